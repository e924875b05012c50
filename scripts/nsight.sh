#!/usr/bin/env bash
# Runs a command under Nsight Systems or Nsight Compute: scripts/nsight.sh nsys|ncu COMMAND...
#
# OUT is the folder of the report (nsight/). RANGE is a name of docs/profiling.md, such as "load" or
# "pack objects": nsys records from the first such range's begin to its end, ncu profiles launches
# inside such ranges only. By default nsys records the whole command, and ncu takes every range of
# kvferry. LAUNCHES is how many launches ncu profiles at most (20). RANGE=cuda lets nsys record from
# the command's own cudaProfilerStart to its cudaProfilerStop.
set -euo pipefail

fail() { echo "nsight: $*" >&2; exit 1; }

tool=${1:-}
out=${OUT:-nsight}
range=${RANGE:-}
case $tool in
    nsys) name="Nsight Systems" package=cuda-nsight-systems page=nsight-systems ;;
    ncu) name="Nsight Compute" package=cuda-nsight-compute page=nsight-compute ;;
    *) fail "usage: scripts/nsight.sh nsys|ncu COMMAND..." ;;
esac
shift
[ $# -gt 0 ] || fail "no command given: scripts/nsight.sh $tool COMMAND..."
command -v "$tool" >/dev/null || fail "$tool is not in PATH. It comes with CUDA (try" \
    "PATH=/usr/local/cuda/bin:\$PATH), as $package-13-0 from NVIDIA's CUDA packages, or as $name" \
    "from https://developer.nvidia.com/$page"

mkdir -p "$out"
if [ "$tool" = nsys ]; then
    options=(--trace=cuda,nvtx,osrt --sample=none --cpuctxsw=none --stats=true
        --force-overwrite=true --output="$out/kvferry")
    # Names of ranges are registered strings, which is what nsys compares.
    case $range in
        "") ;;
        cuda) options+=(--capture-range=cudaProfilerApi --capture-range-end=stop) ;;
        *) options+=(--capture-range=nvtx --nvtx-capture="$range@kvferry" --capture-range-end=stop) ;;
    esac
    exec nsys profile "${options[@]}" "$@"
fi
# The slash says push-pop ranges, which ours are. Not the kernels of counters: one that waits for a
# counter would wait in vain, since launches are run one at a time.
exec ncu --nvtx --nvtx-include "regex:kvferry@${range:-.+}/" \
    --kernel-name "regex:_move_(tiles|units)_kernel" --launch-count "${LAUNCHES:-20}" \
    --set full --target-processes all --force-overwrite --export "$out/kvferry" "$@"
