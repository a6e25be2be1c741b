"""A line through points, trained by nerv's BaseMethod."""

import os

import torch
import wandb
from nerv.training import BaseDataModule, BaseMethod, BaseModel, BaseParams
from torch.utils.data import Dataset


class Points(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return {"points": torch.tensor([index / 32, 1.0]), "targets": torch.tensor([index % 5.0])}


class Line(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, data_dict):
        return {"outputs": self.layer(data_dict["points"])}

    def calc_train_loss(self, data_dict, out_dict):
        return {"fit_loss": (out_dict["outputs"] - data_dict["targets"]).square().mean()}


class Params(BaseParams):
    gpus = torch.cuda.device_count()
    max_epochs, eval_interval = 10, 10
    optimizer, lr = "SGD", 0.01
    train_batch_size, num_workers = 8 // gpus, 0
    fit_loss_w = 1.0


wandb.init(mode="disabled")
torch.manual_seed(0)
data = BaseDataModule(Params(), Points(), Points(), use_ddp=True)
rank = int(os.environ["LOCAL_RANK"])
method = BaseMethod(Line(), data, Params(), "out", rank, use_ddp=True)
method.fit(san_check_val_step=0)
