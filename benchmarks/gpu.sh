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

run_tests() {
    # A worker of pytest-xdist has up to six processes on the GPU, of half a gigabyte each.
    local workers=1 megabytes
    if megabytes=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1); then
        workers=$((megabytes / 8000))
        workers=$((workers < 1 ? 1 : workers > 8 ? 8 : workers))
    fi
    timeout 200 "$python" -m pytest -m gpu -v -rs --durations 10 -n "$workers" ${TESTS:+-k "$TESTS"}
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
