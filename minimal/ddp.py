"""one_gpu.py on all GPUs: torchrun --standalone --nproc-per-node gpu minimal/ddp.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, Subset
from torchvision import datasets
from torchvision.transforms import ToTensor


def main():
    local_rank = int(os.environ["LOCAL_RANK"])  # torchrun starts one process per GPU: 0, 1, ...
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each process uses its own GPU
    dist.init_process_group(device_id=device if device.type == "cuda" else None)  # joins the others
    rank, world_size = dist.get_rank(), dist.get_world_size()  # this process's index, their count
    if 256 % world_size != 0:  # the batch of 256 images is split across the processes
        raise SystemExit("the batch size, 256, must be a multiple of the number of processes")
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
    batch_size = 256 // world_size  # of this process
    train_loader = DataLoader(train_set, batch_size, sampler=sampler, drop_last=True, **options)
    test_subset = Subset(test_set, range(rank, len(test_set), world_size))  # each image on one rank
    test_loader = DataLoader(test_subset, batch_size=256, **options)

    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 7 * 7, 10),
    ).to(device)  # fmt: skip
    ddp = nn.parallel.DistributedDataParallel(model)  # backward() averages all ranks' gradients
    torch.manual_seed(rank)  # random augmentation and dropout must differ between ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    for epoch in range(5):
        sampler.set_epoch(epoch)  # otherwise every epoch has the same order
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

    if rank == 0:
        torch.save(model.state_dict(), "model.pt")  # not ddp: its keys begin with "module."
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
