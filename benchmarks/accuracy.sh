#!/usr/bin/env bash
# Test accuracy on CIFAR-10 after 1, 5, 10 and 30 epochs with three seeds: a row of a table for each.
# Images are decoded once, before the first run.
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
for epochs in ${EPOCHS:-1 5 10 30}; do
    for seed in ${SEEDS:-1 2 3}; do
        "$PYTHON" "$scratch/train.py" --model "$2" --augment --lr-schedule cosine --seed "$seed" \
            --epochs "$epochs" --output "$scratch/$epochs-$seed" --log-every 100000 "${@:3}" >&2
    done
    "$PYTHON" - "$2" "$epochs" "$scratch/$epochs"-*/metrics.csv << 'END'
import csv, sys
rows = [list(csv.DictReader(open(path))) for path in sys.argv[3:]]
found = [100 * float(row[-1]["test_accuracy"]) for row in rows]
seconds = sum(float(line["seconds"]) for row in rows for line in row) / len(rows)
mean = f"{sum(found) / len(found):.1f} % ({min(found):.1f} to {max(found):.1f})"
print(f"| `{sys.argv[1]}` | {sys.argv[2]} | {mean} | {seconds:.0f} |", flush=True)
END
done
