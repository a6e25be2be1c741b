#!/usr/bin/env bash
# What the GPUs of this machine show. Each part ends within ten minutes, and needs no network; its
# table, or the tests' results, are printed and kept in $OUT (gpu/).
#
#   bash benchmarks/gpu.sh                     # all parts
#   bash benchmarks/gpu.sh tests checkpoint    # these
#   TINY=1 bash benchmarks/gpu.sh              # tiny sizes, on a CPU: does every command run?
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "${OUT:=gpu}"
workers=(0 1 2 4 8 16) seconds=5 loops=(--rounds 2) limit=595 tests="not compile and not waits"
if [[ ${TINY:-} ]]; then
    export TORCH_COMPILE_DISABLE=1 OMP_NUM_THREADS=1
    workers=(0 1) seconds=1 loops=(--rounds 1 --only limit complete) limit=3600
    tests="test_small and single or moves or less and float16 or two_ranks"
fi
[[ $# -gt 0 ]] || set -- tests compiled waiting scripts loops settings graphs large inputs images \
    loader checkpoint resume
nvidia-smi -L || rocm-smi --showproductname || true
df -h /dev/shm "${TMPDIR:-/tmp}" || true # room for loader workers, and for checkpoints
failed=0
for part; do # one that fails does not keep the others from running
    case $part in
        tests) command=(-m pytest -m gpu -v -rs -k "$tests") ;; # what only a GPU shows
        compiled) command=(-m pytest -m gpu -v -rs -k "compile${TINY:+-shard}") ;;
        waiting) command=(-m pytest -m gpu -v -rs -k "waits${TINY:+ and single}") ;;
        loader) command=(benchmarks/image_loading.py --sizes ImageNet --rounds 1
            --seconds "$seconds" --workers "${workers[@]}") ;;
        loops) command=(benchmarks/throughput.py "${loops[@]}") ;;
        *) command=(benchmarks/gpu.py "$part") ;;
    esac
    timeout "$limit" "${PYTHON:-python3}" "${command[@]}" | tee "$OUT/$part.md" || failed=1
done
exit "$failed"
