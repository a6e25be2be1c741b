#!/usr/bin/env bash
# What the GPUs of this machine show, on one GPU or many, the most telling first. A part is a table,
# which $OUT (gpu/) keeps; it is printed row by row, and ends after two minutes (the tests after
# three) with what it has.
#
#   bash benchmarks/gpu.sh                     # all parts
#   bash benchmarks/gpu.sh resnet50 images     # these
#   CIFAR10=FOLDER bash benchmarks/gpu.sh      # with CIFAR-10 as files, or part cifar10 downloads it
#   TESTS="small or resumed" bash benchmarks/gpu.sh tests
#   TINY=1 bash benchmarks/gpu.sh              # tiny sizes, on a CPU: does every command run?
set -euo pipefail
cd "$(dirname "$0")/.."
parts=(tests resnet50 images cifar10 resume large saving scripts small)
if [[ $# -gt 0 ]]; then
    parts=("$@")
fi
if [[ -n ${TINY:-} ]]; then
    export TORCH_COMPILE_DISABLE=1 # which would take minutes
fi
python=${PYTHON:-python3}
mkdir -p "${OUT:=gpu}"

# A worker of pytest-xdist has up to six processes on the GPU, with half a gigabyte each.
workers="
import torch
bytes = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
print(max(1, min(8, bytes // 8_000_000_000)))"

run_tests() {
    timeout 200 "$python" -m pytest -m gpu -v -rs --durations 10 \
        -n "$("$python" -c "$workers")" ${TESTS:+-k "$TESTS"}
}

run_part() {
    case $1 in
        tests) run_tests ;;
        large | saving) "$python" benchmarks/gpu_lm.py "$1" ;;
        *) "$python" benchmarks/gpu.py "$1" ;;
    esac
}

nvidia-smi -L || rocm-smi --showproductname || echo "no GPU"
failed=0
for part in "${parts[@]}"; do # one that fails does not keep the others from running
    echo "== $part"
    if ! run_part "$part" | tee "$OUT/$part.md"; then
        failed=1
    fi
done
exit "$failed"
