"""How fast a GPU can train: forward pass, backward pass and optimizer, again and again on one batch
that is in its memory. Prints images per second.

python benchmarks/bare_step.py --model resnet50 --image-size 224 --batch-size 256
"""

import argparse
import time

import torch
import torch.nn.functional as F
from torchvision import models

WARMUP = 10  # steps in which cuDNN looks for its fastest kernels


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize()


def main(args):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    old = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    torch.set_float32_matmul_precision("high")  # all as complete/train.py sets it
    torch.backends.cudnn.benchmark = torch.version.hip is None
    model = models.get_model(args.model, num_classes=10).to(device)
    model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, fused=True)
    images = torch.randn(args.batch_size, 3, args.image_size, args.image_size, device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (args.batch_size,), device=device)
    for step in range(WARMUP + args.steps):
        if step == WARMUP:
            synchronize(device)
            started = time.perf_counter()
        with torch.autocast(device.type, torch.float16 if old else torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    synchronize(device)
    print(args.steps * args.batch_size / (time.perf_counter() - started))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=50)
    main(parser.parse_args())
