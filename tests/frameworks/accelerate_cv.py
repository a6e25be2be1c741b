"""Accelerate, as its cv_example: images, one cycle of the learning rate, set_seed on all ranks."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, Dataset


class PetsDataset(Dataset):
    def __init__(self, number, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(4, (number,), generator=g)
        self.images = torch.randn(number, 3, 8, 8, generator=g) + self.labels[:, None, None, None]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"image": self.images[index], "label": self.labels[index]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="out")
    args = parser.parse_args()
    config = {"lr": 3e-2, "num_epochs": 3, "seed": 42, "batch_size": 8}
    accelerator = Accelerator()
    set_seed(config["seed"])
    train_dataloader = DataLoader(
        PetsDataset(80, 0), shuffle=True, batch_size=config["batch_size"], num_workers=2
    )
    eval_dataloader = DataLoader(PetsDataset(22, 1), batch_size=config["batch_size"])
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    model = model.to(accelerator.device)
    optimizer = torch.optim.Adam(params=model.parameters(), lr=config["lr"] / 25)
    lr_scheduler = OneCycleLR(
        optimizer=optimizer,
        max_lr=config["lr"],
        epochs=config["num_epochs"],
        steps_per_epoch=len(train_dataloader),
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    mean = torch.tensor([0.5, 0.5, 0.5])[None, :, None, None].to(accelerator.device)
    for epoch in range(config["num_epochs"]):
        model.train()
        for step, batch in enumerate(train_dataloader):
            inputs = batch["image"] - mean
            outputs = model(inputs)
            loss = torch.nn.functional.cross_entropy(outputs, batch["label"])
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        model.eval()
        accurate = 0
        num_elems = 0
        for _, batch in enumerate(eval_dataloader):
            inputs = batch["image"] - mean
            with torch.no_grad():
                outputs = model(inputs)
            predictions = outputs.argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, batch["label"]))
            accurate_preds = predictions == references
            num_elems += accurate_preds.shape[0]
            accurate += accurate_preds.long().sum()
        eval_metric = accurate.item() / num_elems
        accelerator.print(f"epoch {epoch}: {100 * eval_metric:.2f}")
    accelerator.wait_for_everyone()
    unwrapped_model = accelerator.unwrap_model(model)
    accelerator.save(unwrapped_model.state_dict(), f"{args.output_dir}.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
