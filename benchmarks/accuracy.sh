#!/usr/bin/env bash
# Test accuracy on CIFAR-10 after 1, 5, 10 and 30 epochs of a run of 30, with three seeds: a row of a
# table. Images are decoded once, before the first run.
#
#   bash benchmarks/accuracy.sh DIR net --lr 0.02 --batch-size 64        # DIR has train/ and test/
set -euo pipefail
PYTHON=${PYTHON:-python}
images=$(realpath "$1")
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -r "$scratch"' EXIT
"$PYTHON" - "$images" "$scratch/images.pt" << 'END'
import sys
import torch
from torchvision import datasets
from torchvision.transforms import v2
parts = []
for part in "train", "test":
    files = datasets.ImageFolder(f"{sys.argv[1]}/{part}", v2.PILToTensor())
    parts += [torch.stack([image for image, _ in files]), torch.tensor(files.targets)]
torch.save(parts, sys.argv[2])
END
sed '/^if __name__/,$d' train_single.py > "$scratch/train.py"
cat >> "$scratch/train.py" << END
def load_data(args):
    images, labels, test_images, test_labels = torch.load("$scratch/images.pt")
    return TensorDataset(images, labels), TensorDataset(test_images, test_labels), 10


END
sed -n '/^if __name__/,$p' train_single.py >> "$scratch/train.py"
for seed in ${SEEDS:-1 2 3}; do
    "$PYTHON" "$scratch/train.py" --model "$2" --augment --lr-schedule cosine --epochs 30 \
        --seed "$seed" --output "$scratch/$seed" --log-every 100000 "${@:3}" >&2
done
"$PYTHON" - "$2" "$scratch"/*/metrics.csv << 'END'
import csv, statistics, sys
runs = [list(csv.DictReader(open(path))) for path in sys.argv[2:]]
cells = [f"`{sys.argv[1]}`"]
for epoch in 1, 5, 10, 30:
    found = [100 * float(run[epoch - 1]["test_accuracy"]) for run in runs]
    cells.append(f"{sum(found) / len(found):.1f} % ({min(found):.1f} to {max(found):.1f})")
seconds = statistics.median(float(epoch["seconds"]) for run in runs for epoch in run)
print("|", " | ".join(cells), f"| {seconds:.0f} s |")
END
