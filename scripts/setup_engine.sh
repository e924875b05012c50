#!/usr/bin/env bash
# Makes VENV with a real engine's package, on a CPU: scripts/setup_engine.sh ENGINE VENV [MORE]
#
# ENGINE is a folder of engine_tests/. Its requirements.txt is installed as it stands, then without
# dependencies the engine of its engine.txt (or of the file that ENGINE_TXT names), what the file
# MORE lists, and this checkout. PYTHON chooses the Python.
set -euo pipefail
cd "$(dirname "$0")/.."

say() { echo "setup: $*"; }
fail() { echo "setup: $*" >&2; exit 1; }

engine=${1:?usage: scripts/setup_engine.sh ENGINE VENV [MORE]}
venv=${2:?usage: scripts/setup_engine.sh ENGINE VENV [MORE]}
more=${3:-}
folder=engine_tests/$engine
package=${ENGINE_TXT:-$folder/engine.txt}
[ -d "$folder" ] || fail "no folder $folder; engines are: $(cd engine_tests && ls -d */)"
[ -f "$package" ] || fail "no file $package, wanted a requirement of $engine"
[ -z "$more" ] || [ -f "$more" ] || fail "no file $more, wanted a list of requirements"
ready=$venv/.kvferry-ready # exists only while the environment is whole; make looks at its time
made_here=$venv/.kvferry-made-here

# Two set-ups at once would write into each other's environment: the second waits here.
exec 9<scripts/setup_engine.sh
flock 9

python=""
for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' \
        2>/dev/null; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || fail "no Python 3.11 to 3.13 found, as $engine needs; set PYTHON=/path/to/python3.x"
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    fail "this Python cannot make environments; run: sudo apt-get install -y python3-venv"

# Made anew each time: what an older list of requirements brought must not stay.
[ ! -e "$venv" ] || [ -e "$made_here" ] || fail "$venv was not made by this script; remove it first"
rm -rf "$venv"
mkdir -p "$venv"
touch "$made_here"
"$python" -m venv "$venv"
# Becomes the mark of readiness with the time of now: what changes meanwhile is newer than it.
touch "$venv/.kvferry-started"

# PyPI's torch for Linux is a CUDA build of several GB; the CPU builds lie on torch's own index.
wanted=(-r "$folder/requirements.txt")
index=https://download.pytorch.org/whl/cpu
if timeout 10 "$python" -c "from urllib.request import urlopen; urlopen('$index/torch/', timeout=5)" \
    2>/dev/null; then
    torch=$(sed -n 's/^torch==//p' "$folder/requirements.txt")
    wanted+=("torch==$torch+cpu" --extra-index-url "$index")
else
    say "$index does not answer; taking the torch that pip finds"
fi
pip=("$venv/bin/python" -m pip install --quiet --disable-pip-version-check)
say "$venv: $("$python" --version), $(grep -v '^#' "$package" | head -n 1)"
"${pip[@]}" "setuptools>=77" "${wanted[@]}"
"${pip[@]}" --no-deps -r "$package" ${more:+-r "$more"} -e .
mv "$venv/.kvferry-started" "$ready"
