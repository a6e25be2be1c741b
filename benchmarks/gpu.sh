#!/usr/bin/env bash
# What the GPUs of this machine show, on one GPU or many; what is least known comes first. A part is
# a table, which $OUT (gpu/) keeps; it is printed row by row, and ends when its time is over, with
# what it has.
#
#   bash benchmarks/gpu.sh                     # all parts, up to 54 minutes
#   bash benchmarks/gpu.sh --minutes 15        # as many as fit; each may take half of what is left
#   bash benchmarks/gpu.sh articles resnet50   # these
#   PART_SECONDS=600 bash benchmarks/gpu.sh    # so many for each part; default: see seconds_of
#   CIFAR10=FOLDER bash benchmarks/gpu.sh      # with CIFAR-10 as files, or part cifar10 downloads it
#   TESTS="small or resumed" bash benchmarks/gpu.sh tests
#   TINY=1 bash benchmarks/gpu.sh              # tiny sizes, on a CPU: does every command run?
#
# The status is 0 if nothing has failed. What a part had no time for is listed, and is no failure.
# Parts `large` and `saving` need 34 GB in TMPDIR, `images` 1.3 GB per GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
all_parts=(start tests large resnet50 small articles peers saving inputs images resume scripts cifar10)
parts=()
minutes=""
while [[ $# -gt 0 ]]; do
    if [[ $1 == --minutes ]]; then
        minutes=${2:-}
        shift
        if [[ -z $minutes || -n ${minutes//[0-9]/} ]]; then
            echo "--minutes needs a whole number" >&2
            exit 2
        fi
    elif [[ " ${all_parts[*]} " == *" $1 "* ]]; then
        parts+=("$1")
    else
        echo "no part $1; there are: ${all_parts[*]}" >&2
        exit 2
    fi
    shift
done
if [[ ${#parts[@]} -eq 0 ]]; then
    parts=("${all_parts[@]}")
fi
if [[ -n ${TINY:-} ]]; then
    export TORCH_COMPILE_DISABLE=1 # which would take minutes
fi
python=${PYTHON:-python3}
mkdir -p "${OUT:=gpu}"
not_finished=3 # the status of a part that had too little time
grace=30       # seconds in which a part ends by itself after its time

# How long a part may take.
seconds_of() {
    if [[ -n ${PART_SECONDS:-} ]]; then
        echo "$PART_SECONDS"
    elif [[ -n ${TINY:-} ]]; then
        echo 3600
    elif [[ $1 == start ]]; then
        echo 200
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

# How long a part gets: with --minutes, at most half of what is left.
time_for() {
    local seconds left
    seconds=$(seconds_of "$1")
    if [[ -n $minutes ]]; then
        left=$(((60 * minutes - SECONDS - grace) / 2))
        seconds=$((seconds < left ? seconds : left))
    fi
    echo "$seconds"
}

# Runs a command, which knows its time and ends by itself; if it does not, it is ended half a minute
# later. Nothing of it is left then, or it would slow down the next part.
limited() {
    local seconds=$1 started=$SECONDS status=0 mark="GPU_SH_PART=$$-$RANDOM" limit
    limit=$((seconds + grace > 0 ? seconds + grace : 1))
    shift
    env "$mark" PART_SECONDS="$seconds" timeout --foreground -k 10 "$limit" "$@" || status=$?
    if [[ $status == 137 && $((SECONDS - started)) -ge $limit ]]; then
        status=124 # not even SIGTERM has ended it
    fi
    end_marked "$mark"
    if [[ $status == 124 ]]; then
        printf '\nEnded after %s s.\n' "$limit"
        status=$not_finished
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

# test_large.py comes first, as its one test takes longest. pytest itself knows no time: a test that
# has failed before it is ended is a failure.
run_tests() {
    local status=0 seconds=$(($1 - grace))
    limited "$seconds" "$python" -m pytest tests/test_large.py tests -m gpu -v -rs --durations 10 \
        -n "$("$python" -c "$workers")" ${TESTS:+-k "$TESTS"} | tee "$OUT/tests.txt" || status=$?
    if grep -qE '(FAILED|ERROR) ' "$OUT/tests.txt"; then
        status=1
    fi
    return "$status"
}

# What a stranger types first, and ddp_check, which on one GPU compares two runs by one process.
run_start() {
    local third=$(($1 / 3 - grace)) gpus folder worst=0
    local synthetic=(--dataset synthetic --epochs 2)
    gpus=$("$python" -c "import torch; print(torch.cuda.device_count())")
    folder=$(mktemp -d)
    titled "$third" train_single.py "${synthetic[@]}" --output "$folder/single" ||
        worst=$(worse_of "$worst" "$?")
    titled "$third" -m torch.distributed.run --standalone --nproc-per-node "${gpus/#0/2}" \
        train_ddp_torchrun.py "${synthetic[@]}" --output "$folder/torchrun" ||
        worst=$(worse_of "$worst" "$?")
    titled "$third" ddp_check --nproc "$((gpus == 1 ? 1 : 2))" --steps 6 \
        train_ddp_torchrun.py "${synthetic[@]}" --workers 0 ||
        worst=$(worse_of "$worst" "$?")
    rm -rf "$folder"
    return "$worst"
}

# Runs Python with a title above what it prints.
titled() {
    printf '\n## python %s\n\n' "${*:2}"
    limited "$1" "$python" "${@:2}"
}

# Of two statuses: a failure is worse than too little time.
worse_of() {
    if [[ $1 == 0 || ($1 == "$not_finished" && $2 != 0) ]]; then
        echo "$2"
    else
        echo "$1"
    fi
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
    seconds=$(time_for "$1")
    case $1 in
        start) run_start "$seconds" ;;
        articles) run_articles "$seconds" ;;
        inputs) run_inputs "$seconds" ;;
        peers) run_peers "$seconds" ;;
        tests) run_tests "$seconds" ;;
        large | saving) limited "$seconds" "$python" benchmarks/gpu_lm.py "$1" ;;
        *) limited "$seconds" "$python" benchmarks/gpu.py "$1" ;;
    esac
}

nvidia-smi -L || rocm-smi --showproductname || echo "no GPU"
sum=0
for part in "${parts[@]}"; do
    sum=$((sum + $(seconds_of "$part") + grace))
done
echo "${#parts[@]} parts, at most ${minutes:-$(((sum + 59) / 60))} minutes"

failed=()
unfinished=()
not_begun=()
for part in "${parts[@]}"; do # one that fails does not keep the others from running
    if [[ -n $minutes ]] && ((60 * minutes - SECONDS < 2 * grace)); then
        not_begun+=("$part")
        continue
    fi
    echo "== $part"
    status=0
    run_part "$part" | tee "$OUT/$part.md" || status=$?
    if [[ $status == "$not_finished" ]]; then
        unfinished+=("$part")
    elif [[ $status != 0 ]]; then
        failed+=("$part")
    fi
done
echo "== Not finished, for want of time: ${unfinished[*]:-none}. Not begun: ${not_begun[*]:-none}."
echo "Failed: ${failed[*]:-none}."
if [[ ${#failed[@]} -gt 0 ]]; then
    exit 1
fi
