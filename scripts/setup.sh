#!/usr/bin/env bash
# Makes VENV with everything kvferry needs on this machine: scripts/setup.sh VENV [EXTRA...]
#
# EXTRA names extras of pyproject.toml, `dev` if none is given. One of cpu, cu12 and cu13 is added
# by what the NVIDIA driver supports; name one to choose yourself. PYTHON chooses the Python.
# CONSTRAINTS names another file of versions than scripts/constraints-<cpu|cu12|cu13>.txt.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

venv=${1:?usage: scripts/setup.sh VENV [EXTRA...]}
shift
extras=("${@:-dev}")
ready=$venv/.kvferry-ready # exists only while the environment is whole; make looks at its time
made_here=$venv/.kvferry-made-here

# Two set-ups at once would write into each other's environment: the second waits here.
exec 9<scripts/setup.sh
flock 9

# -- Python ------------------------------------------------------------------------------------
python=""
for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.10}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' \
        2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || fail "no Python 3.10 to 3.13 found; set PYTHON=/path/to/python3.x"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "this Python cannot make environments; run: sudo apt-get install -y python3-venv"

# -- which build: what the driver's own library says, without asking a GPU ---------------------
build=""
for extra in "${extras[@]}"; do
    case $extra in cpu | cu12 | cu13) build=$extra ;; esac
done
if [ -z "$build" ]; then
    cuda=$("$python" - <<'PY'
import ctypes
version = ctypes.c_int()
try:
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
except OSError:
    pass
print(version.value // 1000)
PY
    )
    if [ "$cuda" -ge 13 ]; then
        build=cu13
    elif [ "$cuda" -eq 12 ]; then
        build=cu12
    else
        build=cpu
        [ ! -e /proc/driver/nvidia/version ] ||
            say "an NVIDIA driver is loaded, but no libcuda.so.1 of CUDA 12 or newer: CPU build"
    fi
    extras+=("$build")
fi
constraints=${CONSTRAINTS:-scripts/constraints-$build.txt}

# -- system libraries that Mooncake's wheel links to and does not carry -------------------------
needed=(libibverbs.so.1:libibverbs1 libnuma.so.1:libnuma1 libcurl.so.4:libcurl4)
[ "$build" = cpu ] || needed+=(libmlx5.so.1:ibverbs-providers)
known=$(PATH=$PATH:/sbin:/usr/sbin ldconfig -p)
libraries=() packages=()
for entry in "${needed[@]}"; do
    if [[ $known != *"${entry%%:*} "* ]]; then
        libraries+=("${entry%%:*}")
        packages+=("${entry##*:}")
    fi
done
if [ ${#packages[@]} -gt 0 ]; then
    if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        say "installing ${packages[*]}"
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq
        apt-get install -y -qq --no-install-recommends -o DPkg::Lock::Timeout=120 "${packages[@]}"
    else
        fail "Mooncake needs ${libraries[*]}; run:" \
            "sudo apt-get install -y --no-install-recommends ${packages[*]}"
    fi
fi

# -- the environment ----------------------------------------------------------------------------
# Made here, but not ready: an earlier set-up was cut short, and no file in it can be trusted.
if [ -e "$made_here" ] && [ ! -e "$ready" ]; then
    say "$venv is half made; starting again"
    rm -rf "$venv"
fi
rm -f "$ready"
if [ ! -x "$venv/bin/python" ]; then
    mkdir -p "$venv"
    touch "$made_here"
    "$python" -m venv "$venv"
fi
# Becomes the mark of readiness with the time of now: what changes meanwhile is newer than it.
touch "$venv/.kvferry-started"

# setuptools is torch's dependency and the tests build a wheel with it, but pip would keep the old
# one that some Pythons put into a new environment.
wanted=("setuptools>=77")
if [ "$build" = cpu ]; then
    # PyPI's torch for Linux is a CUDA build of several GB; the CPU builds lie on torch's own index.
    index=https://download.pytorch.org/whl/cpu
    if timeout 10 "$python" -c "from urllib.request import urlopen; urlopen('$index/torch/', timeout=5)" \
        2>/dev/null; then
        torch=$(sed -n 's/^torch==//p' "$constraints")
        wanted+=("torch==$torch+cpu" --extra-index-url "$index")
    else
        say "$index does not answer; taking the torch that pip finds"
    fi
fi
say "$venv: $("$python" --version), extras ${extras[*]}, versions of $constraints"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$constraints" \
    "${wanted[@]}" -e ".[$(IFS=,; echo "${extras[*]}")]"
mv "$venv/.kvferry-started" "$ready"
