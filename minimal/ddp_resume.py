"""ddp.py with checkpoints. Killed at any time, it continues with --resume.

torchrun --standalone --nproc-per-node gpu minimal/ddp_resume.py --output runs/first --resume
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets
from torchvision.transforms import ToTensor

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch-size", type=int, default=256, help="of all processes together")
parser.add_argument("--output", default="runs/minimal", help="on a disk that all machines share")
parser.add_argument("--resume", action="store_true", help="continue from the checkpoint, if any")


def main():
    args = parser.parse_args()
    os.makedirs(args.output, exist_ok=True)
    checkpoint_path = os.path.join(args.output, "checkpoint.pt")

    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun starts one process per GPU: 0, 1, ...
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each process uses its own GPU
    dist.init_process_group(device_id=device if device.type == "cuda" else None)  # joins the others
    rank, world_size = dist.get_rank(), dist.get_world_size()  # this process's index, their count
    if args.batch_size % world_size != 0:
        raise SystemExit("--batch-size must be a multiple of the number of processes")
    torch.manual_seed(0)

    if rank == 0:  # one process downloads ...
        datasets.FashionMNIST("data", download=True)
    dist.barrier()  # ... and all wait for it
    if local_rank == 0:  # then one process of each machine, if its disk does not have the files
        datasets.FashionMNIST("data", download=True)
    dist.barrier()
    train_set = datasets.FashionMNIST("data", train=True, transform=ToTensor(), download=True)
    test_set = datasets.FashionMNIST("data", train=False, transform=ToTensor(), download=True)
    options = {"num_workers": 4, "persistent_workers": True, "pin_memory": device.type == "cuda"}
    sampler = DistributedSampler(train_set)  # shuffles, and gives each rank its own images
    batch_size = args.batch_size // world_size  # of this process
    train_loader = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True, **options)
    test_subset = Subset(test_set, range(rank, len(test_set), world_size))  # each image on one rank
    test_loader = DataLoader(test_subset, batch_size=256, **options)

    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 10),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    first_epoch = 0
    if os.path.exists(checkpoint_path):
        if not args.resume:
            raise SystemExit(f"{args.output} has a run: continue it with --resume")
        state = torch.load(checkpoint_path, map_location="cpu")  # by every process
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch = state["epoch"] + 1
    epoch_sum = torch.tensor(first_epoch, device=device)
    dist.all_reduce(epoch_sum)  # all have read the checkpoint before rank 0 writes the next one
    if epoch_sum != first_epoch * world_size:
        raise SystemExit(f"the machines see different files in {args.output}: use a shared disk")
    ddp = nn.parallel.DistributedDataParallel(model)  # backward() averages all ranks' gradients

    for epoch in range(first_epoch, args.epochs):
        sampler.set_epoch(epoch)  # otherwise every epoch has the same order
        torch.manual_seed(epoch * world_size + rank)  # or a resumed run would repeat its dropout
        model.train()
        loss_sum = torch.tensor(0.0, device=device)  # a tensor, for all_reduce
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(ddp(images), labels)  # ddp, not model
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()

        for buffer in model.buffers():  # batch norm's running averages differ: take those of rank 0
            dist.broadcast(buffer, 0)
        model.eval()
        correct = torch.tensor(0, device=device)  # a tensor, too
        with torch.no_grad():
            for images, labels in test_loader:
                images, labels = images.to(device), labels.to(device)
                correct += (model(images).argmax(1) == labels).sum()  # model: no communication
        dist.all_reduce(loss_sum)  # becomes the sum over all ranks
        dist.all_reduce(correct)
        loss, accuracy = loss_sum / world_size / len(train_loader), correct / len(test_set)
        if rank == 0:  # one process prints and saves
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}")
            state = dict(epoch=epoch, model=model.state_dict(), optimizer=optimizer.state_dict())
            torch.save(state, checkpoint_path + ".tmp")
            os.replace(checkpoint_path + ".tmp", checkpoint_path)  # never half a file

    if rank == 0:
        torch.save(model.state_dict(), os.path.join(args.output, "model.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
