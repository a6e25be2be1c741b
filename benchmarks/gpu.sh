#!/usr/bin/env bash
# What the GPUs of this machine show: six parts, printed and kept in $OUT (gpu/).
#
#   bash benchmarks/gpu.sh                # all six, or those that are named: `gpu.sh scripts resume`
#   TINY=1 bash benchmarks/gpu.sh         # tiny sizes, on a CPU: does every command run?
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "${OUT:=gpu}"
[[ ${TINY:-} ]] && export TORCH_COMPILE_DISABLE=1 OMP_NUM_THREADS=1
[[ $# -gt 0 ]] || set -- tests scripts settings large images resume
failed=0
for part; do # one that fails does not keep the others from running
    command=(benchmarks/gpu.py "$part")
    if [[ $part == tests ]]; then # what only a GPU shows, test by test
        nvidia-smi -L || rocm-smi --showproductname || true
        command=(-m pytest -m gpu -v)
    fi
    "${PYTHON:-python}" "${command[@]}" | tee "$OUT/$part.md" || failed=1
done
exit "$failed"
