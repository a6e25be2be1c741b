#!/usr/bin/env bash
# Test accuracy on CIFAR-10 after 1, 5, 10 and 30 epochs of a run of 30; means of three seeds.
#
#   bash benchmarks/accuracy.sh DIR net --lr 0.02 --batch-size 64        # DIR has train/ and test/
set -euo pipefail
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT
for seed in 1000 2000 3000; do # far apart: an epoch is shuffled by seed + epoch
    "${PYTHON:-python}" "$(dirname "$0")/../train_single.py" --dataset "$1" --model "$2" --augment \
        --lr-schedule cosine --epochs 30 --seed "$seed" --output "$scratch/$seed" "${@:3}" >&2
done
"${PYTHON:-python}" - "$scratch"/*/metrics.csv << 'END'
import csv, sys
runs = [list(csv.DictReader(open(path))) for path in sys.argv[1:]]
for epoch in 1, 5, 10, 30:
    found = sorted(100 * float(run[epoch - 1]["test_accuracy"]) for run in runs)
    print(f"| {epoch} epochs | {sum(found) / len(found):.1f} % ({found[0]:.1f} to {found[-1]:.1f}) |")
END
