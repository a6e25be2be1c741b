#!/usr/bin/env bash
# What the GPUs of this machine show, on one GPU or many, the most telling first. A part is a table,
# which $OUT (gpu/) keeps; it is printed row by row, and ends when its time is over, with what it has.
#
#   bash benchmarks/gpu.sh                     # all parts
#   bash benchmarks/gpu.sh articles resnet50   # these
#   PART_SECONDS=600 bash benchmarks/gpu.sh    # so many for each part; default: see seconds_of
#   CIFAR10=FOLDER bash benchmarks/gpu.sh      # with CIFAR-10 as files, or part cifar10 downloads it
#   TESTS="small or resumed" bash benchmarks/gpu.sh tests
#   TINY=1 bash benchmarks/gpu.sh              # tiny sizes, on a CPU: does every command run?
#
# The status is 0 if everything has run, and nothing has failed. A part that runs out of time fails,
# and lists what is missing. Parts `large` and `saving` need 34 GB in TMPDIR, `images` 1.3 GB per GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
parts=(articles peers tests resnet50 images inputs cifar10 resume large saving scripts small)
if [[ $# -gt 0 ]]; then
    parts=("$@")
fi
if [[ -n ${TINY:-} ]]; then
    export TORCH_COMPILE_DISABLE=1 # which would take minutes
fi
python=${PYTHON:-python3}
mkdir -p "${OUT:=gpu}"

# How long a part may take.
seconds_of() {
    if [[ -n ${PART_SECONDS:-} ]]; then
        echo "$PART_SECONDS"
    elif [[ -n ${TINY:-} ]]; then
        echo 3600
    elif [[ $1 == articles ]]; then
        echo 270
    elif [[ $1 == peers ]]; then
        echo 210 # eight minutes with articles
    elif [[ $1 == tests || $1 == inputs || $1 == resnet50 ]]; then
        echo 300
    else
        echo 180
    fi
}

# Runs a command, which knows its time and ends by itself; if it does not, it is ended half a minute
# later. Nothing of it is left then, or it would slow down the next part.
limited() {
    local seconds=$1 started=$SECONDS status=0 mark="GPU_SH_PART=$$-$RANDOM"
    shift
    env "$mark" PART_SECONDS="$seconds" timeout --foreground -k 10 "$((seconds + 30))" "$@" ||
        status=$?
    end_marked "$mark"
    if ((SECONDS - started >= seconds + 30)); then
        printf '\nEnded after %s s.\n' "$((seconds + 30))"
        status=1
    fi
    return "$status"
}

# Ends all processes that have inherited this variable, those in other sessions too.
end_marked() {
    local file pid
    for _ in 1 2 3; do # again, as one that was just being started is not seen
        { grep -lzxF "$1" /proc/[0-9]*/environ 2> /dev/null || true; } | while read -r file; do
            pid=${file#/proc/}
            kill -KILL "${pid%/environ}" 2> /dev/null || true
        done
        sleep 0.3
    done
}

# A worker of pytest-xdist has up to six processes on the GPU, with half a gigabyte each. On several
# GPUs, two: the NCCL kernels of more would wait for each other's turns on GPUs 0 and 1.
workers="
import torch
bytes = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
print(max(1, min(2 if torch.cuda.device_count() > 1 else 8, bytes // 8_000_000_000)))"

# test_large.py comes first, as its one test takes longest.
run_tests() {
    limited "$1" "$python" -m pytest tests/test_large.py tests -m gpu -v -rs --durations 10 \
        -n "$("$python" -c "$workers")" ${TESTS:+-k "$TESTS"}
}

run_articles() {
    if [[ -n ${TINY:-} ]]; then
        limited "$1" "$python" benchmarks/articles.py ways --quick
    else
        limited "$1" "$python" benchmarks/articles.py ways resnet18 start --quick
    fi
}

run_inputs() {
    if [[ -n ${TINY:-} ]]; then
        limited "$1" "$python" benchmarks/articles.py device --quick
    else
        limited "$1" "$python" benchmarks/articles.py device inputs workers --rounds 1
    fi
}

# Few contestants, so that it is done on eight GPUs, too; peers.py alone has all of them.
run_peers() {
    if [[ -n ${TINY:-} ]]; then
        limited "$1" "$python" benchmarks/peers.py step --rounds 1 --steps 2 --only bare train
    else
        limited "$1" "$python" benchmarks/peers.py loop step epochs --rounds 1 \
            --only bare train Accelerate --model resnet18 --amp
    fi
}

run_part() {
    local seconds
    seconds=$(seconds_of "$1")
    case $1 in
        articles) run_articles "$seconds" ;;
        inputs) run_inputs "$seconds" ;;
        peers) run_peers "$seconds" ;;
        tests) run_tests "$seconds" ;;
        large | saving) limited "$seconds" "$python" benchmarks/gpu_lm.py "$1" ;;
        *) limited "$seconds" "$python" benchmarks/gpu.py "$1" ;;
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
