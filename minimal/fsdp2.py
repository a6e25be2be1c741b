"""A model too large for one GPU: torchrun --standalone --nproc-per-node gpu minimal/fsdp2.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler
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
    torch.manual_seed(0)  # all ranks must build the same model: FSDP2 does not see to it

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
    # A forward pass communicates, so a rank with more test batches than the others would hang. This
    # sampler repeats a few images to make all ranks' shares equal. Repeated ones are not counted.
    test_sampler = DistributedSampler(test_set, shuffle=False)
    test_loader = DataLoader(test_set, batch_size=256, sampler=test_sampler, **options)
    share = len(range(rank, len(test_set), world_size))  # images of this rank, none twice

    # Each process builds the whole model in its CPU's memory. If it does not fit there: build it
    # under torch.device("meta"), and initialize the shards after fully_shard.
    blocks = [
        nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, norm_first=True) for _ in range(6)
    ]
    model = nn.Sequential(  # reads an image as a sequence: its 28 rows of 28 pixels
        nn.Flatten(1, 2), nn.Linear(28, 128), *blocks, nn.Flatten(), nn.Linear(28 * 128, 10)
    )
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in blocks:
        fully_shard(block, mp_policy=policy)  # its shards are gathered while it is used
    fully_shard(model, mp_policy=policy)  # what is in no block; each shard is on its GPU now
    torch.manual_seed(rank)  # random augmentation and dropout must differ between ranks
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)  # of the shards: after fully_shard

    for epoch in range(5):
        sampler.set_epoch(epoch)  # otherwise every epoch has the same order
        model.train()
        loss_sum = torch.tensor(0.0, device=device)  # a tensor, for all_reduce
        for images, labels in train_loader:
            images, labels = images.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(model(images).float(), labels)  # float32
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()

        model.eval()
        with torch.no_grad():
            hits = [model(x.to(device)).argmax(1) == y.to(device) for x, y in test_loader]
        correct = torch.cat(hits)[:share].sum()  # without the repeated images
        dist.all_reduce(loss_sum)  # becomes the sum over all ranks
        dist.all_reduce(correct)
        loss, accuracy = loss_sum / world_size / len(train_loader), correct / len(test_set)
        if rank == 0:  # one process prints and saves
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.4f}")

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)  # all ranks send their shards to rank 0
    if rank == 0:
        torch.save(weights, "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
