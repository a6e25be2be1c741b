#!/usr/bin/env bash
# All figures of a GPU, in parts of less than ten minutes; each leaves a table in $OUT (gpu/), which
# has what is known so far if the part is ended before. pip install -r benchmarks/requirements.txt
#
#   bash benchmarks/gpu.sh              # all parts, one after the other
#   bash benchmarks/gpu.sh net amp512   # these parts
#   TINY=1 bash benchmarks/gpu.sh       # on a CPU with tiny sizes: does every command run?
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python}
OUT=$(mkdir -p "${OUT:-gpu}" && realpath "${OUT:-gpu}")
SCRATCH=$(mktemp -d)
trap 'rm -rf "$SCRATCH"' EXIT
ROUNDS=3 IMAGES=10000 LARGE=51200 MODEL=resnet18 BATCH=256 LONG=50 SHORT=5 TESTS=(-m gpu)
PEERS=(copied accelerate lightning)
if [[ ${TINY:-} ]]; then
    ROUNDS=1 IMAGES=256 LARGE=1024 MODEL=mlp BATCH=16 LONG=2 SHORT=2 TESTS=(-m gpu --collect-only)
fi

throughput() { # NAME JOB IMAGES EPOCHS WORDS...: the table NAME.md
    "$PYTHON" benchmarks/throughput.py --processes 1 --rounds "$ROUNDS" \
        --workers 0 4 --jobs "$2" --images "$3" --epochs "$4" "${@:5}" > "$OUT/$1.md"
}

edited() { # OLD NEW: a folder of the scripts with NEW in the place of OLD
    for script in train_*.py; do
        sed "s/$1/$2/" "$script" > "$SCRATCH/$script"
        cmp -s "$script" "$SCRATCH/$script" && { echo "$script: no $1" >&2; exit 1; }
    done
    echo "$SCRATCH"
}

run_tests() { tests tests -k "not waits and not flags"; }
run_flags() { tests flags -k flags; }
run_waits() { tests waits -k waits; }
tests() { "$PYTHON" -m pytest -q "${TESTS[@]}" "${@:2}" 2>&1 | tee "$OUT/$1.md"; }
run_net() {
    throughput net net "$IMAGES" "$LONG" --only limit single ddp_torchrun "${PEERS[@]}"
}
run_resnet18() {
    throughput resnet18 resnet18 "$IMAGES" "$SHORT" --only limit single "${PEERS[@]}" -- \
        --model "$MODEL"
}
run_compile() {
    throughput compile net "$IMAGES" "$LONG" --only limit single ddp_torchrun -- --compile
}
run_amp128() { amp 128; }
run_amp512() { amp 512; }
amp() { # with channels_last beside without
    plain=$(edited "\.to(memory_format=torch.channels_last)" "")
    throughput "amp$1" resnet18 "$LARGE" "$SHORT" --only limit single ddp_torchrun \
        --baseline "$plain" -- --model "$MODEL" --batch-size "$1" --amp
}
run_tf32at128() { tf32 128; }
run_tf32at512() { tf32 512; }
tf32() { # beside full precision
    full=$(edited 'matmul_precision("high")' \
        'matmul_precision("highest"); torch.backends.cudnn.allow_tf32 = False') # convolutions too
    throughput "tf32at$1" resnet18 "$LARGE" "$SHORT" --only limit single \
        --baseline "$full" -- --model "$MODEL" --batch-size "$1"
}
run_pixels224() { # what ImageNet is trained with
    throughput pixels224 resnet18-224 "$IMAGES" "$SHORT" --only limit single ddp_torchrun fsdp2 \
        -- --model "$MODEL" --batch-size "$BATCH" --amp
}
run_folder() { # JPEG files of 500 x 375: do the workers keep up with the GPU?
    throughput folder folder-224 "$LARGE" 2 --only single -- --model "$MODEL" --amp \
        --batch-size "$BATCH"
}
run_example() { throughput example example "$IMAGES" "$SHORT" --only limit single ddp_torchrun; }
run_lm100m() { # a language model of 100 million parameters
    [[ ${TINY:-} ]] && return # two minutes a step
    throughput lm100m example-100m "$IMAGES" 2 --only limit single ddp_torchrun fsdp2 -- --amp
}
run_scaling() {
    "$PYTHON" benchmarks/scaling.py --model "$MODEL" --batch-size "$BATCH" --amp --fsdp2 8 \
        > "$OUT/scaling.md"
}
run_overhead() {
    "$PYTHON" benchmarks/overhead.py --rounds "$ROUNDS" --steps "$IMAGES" > "$OUT/overhead.md"
}

run_kill() { # SIGKILL in an epoch, and --resume: are the weights those of an undisturbed run?
    printf '| flags | went on | largest difference of a weight |\n|---|---|---|\n' > "$OUT/kill.md"
    for flags in "" "--augment" "--compile" "--model $MODEL --amp"; do
        read -ra words <<< "train_single.py --dataset synthetic --epochs 4 --log-every 20 $flags"
        words+=(--checkpoint-minutes 0 --resume --output)
        rm -rf "$SCRATCH/whole" "$SCRATCH/killed"
        "$PYTHON" "${words[@]}" "$SCRATCH/whole" > /dev/null
        : > "$SCRATCH/log"
        "$PYTHON" "${words[@]}" "$SCRATCH/killed" > "$SCRATCH/log" &
        pid=$!
        until grep -q "epoch 2/4 step 60/" "$SCRATCH/log"; do sleep 0.01; done
        kill -9 "$pid"
        wait "$pid" || true
        "$PYTHON" "${words[@]}" "$SCRATCH/killed" > "$SCRATCH/log"
        from=$(grep -o "from epoch.*" "$SCRATCH/log")
        "$PYTHON" - "$flags" "$from" "$SCRATCH"/{whole,killed}/model.pt >> "$OUT/kill.md" << 'END'
import sys, torch
a, b = (torch.load(path) for path in sys.argv[3:])
largest = max((a[key].double() - b[key].double()).abs().max().item() for key in a)
print(f"| {sys.argv[1]} | {sys.argv[2]} | {largest:.1e} |")
END
    done
}

if [[ $# = 0 ]]; then # a part that fails does not keep the others from running
    for part in tests flags waits net resnet18 compile amp128 amp512 tf32at128 tf32at512 \
        pixels224 folder example lm100m scaling overhead kill; do
        bash benchmarks/gpu.sh "$part" || echo "$part: failed" | tee -a "$OUT/seconds.txt"
    done
fi
for part; do
    SECONDS=0
    "run_$part"
    echo "$part: $SECONDS s" | tee -a "$OUT/seconds.txt"
done
