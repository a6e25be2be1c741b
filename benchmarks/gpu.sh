#!/usr/bin/env bash
# What the GPUs of this machine show, the most telling first. Each part ends within two minutes (the
# tests, three), needs no network, and is complete by itself; it prints its table row by row, says
# what it had no time for, and keeps both in $OUT (gpu/).
#
#   bash benchmarks/gpu.sh                     # all parts
#   bash benchmarks/gpu.sh resnet50 images     # these
#   bash benchmarks/gpu.sh cifar10 FOLDER      # CIFAR-10 as files: ten minutes, not in "all"
#   TINY=1 bash benchmarks/gpu.sh              # tiny sizes, on a CPU: does every command run?
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p "${OUT:=gpu}"
limit=130 tests=(-n 8)
if [[ ${TINY:-} ]]; then
    export TORCH_COMPILE_DISABLE=1 OMP_NUM_THREADS=1
    limit=3600
    few="small and single or compile-shard or float16 or deterministic or moves or norm or on_gpus"
    tests=(-k "$few")
fi
[[ $# -gt 0 ]] || set -- tests resnet50 images lm lm_large lm_saving small checkpoint resume scripts inputs
nvidia-smi -L || rocm-smi --showproductname || true
df -h /dev/shm "${TMPDIR:-/tmp}" || true # room for loader workers, and for checkpoints
failed=0
while [[ $# -gt 0 ]]; do # a part that fails does not keep the others from running
    part=$1 seconds=$limit command=(benchmarks/gpu.py "$1")
    shift
    case $part in
        tests)
            command=(-m pytest -m gpu -v -rs --durations 10 "${tests[@]}") seconds=$((limit + 70)) ;;
        cifar10) command+=("$1") seconds=$((limit + 480)) && shift ;;
    esac
    status=0
    timeout "$seconds" "${PYTHON:-python3}" "${command[@]}" | tee "$OUT/$part.md" || status=$?
    [[ $status == 0 ]] || failed=1
    [[ $status != 124 ]] || echo "ended after $seconds s: the rest is not measured" | tee -a "$OUT/$part.md"
done
exit "$failed"
