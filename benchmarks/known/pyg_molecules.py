"""PyTorch Geometric's example of a graph network on molecules, on several GPUs."""

from made import write

REPOSITORY = "pyg-team/pytorch_geometric"
COMMIT = "5c6461b23"
REMARK = "each rank takes its share by a Subset of its own: steps are not compared"
PATHS = ["examples/multi_gpu"]
FOLDER = PATHS[0]
PACKAGES = ["torch_geometric", "tensorboard", "tqdm"]
COMMAND = """--cpu --wait 400 --steps 6 pcqm4m_ogb.py --num_devices {n} --num_layers 2 --emb_dim 16
    --batch_size 4 --epochs 3"""

# Of ogb, which downloads four million molecules: its encoders, its data set and its measure.
ENCODERS = """
import torch

class Encoder(torch.nn.Module):
    def __init__(self, emb_dim):
        super().__init__()
        self.embedding = torch.nn.Embedding(10, emb_dim)

    def forward(self, features):
        return self.embedding(features).sum(1)

AtomEncoder = BondEncoder = Encoder
"""
DATA = """
import torch
from torch_geometric.data import Data

class PygPCQM4Mv2Dataset:
    def __init__(self, root=None, molecules=None):
        self.molecules = molecules or [self.make(number) for number in range(40)]

    def make(self, number):
        random = torch.Generator().manual_seed(number)
        atoms = 4 + number % 5
        bonds = torch.randint(atoms, (2, 2 * atoms), generator=random)
        features = torch.randint(10, (atoms, 2), generator=random)
        kinds = torch.randint(10, (2 * atoms, 2), generator=random)
        target = features.float().mean().reshape(1)
        return Data(x=features, edge_index=bonds, edge_attr=kinds, y=target)

    def get_idx_split(self):
        indices = torch.arange(40)
        names = "valid", "test-dev", "test-challenge"
        return {"train": indices[:24], **{name: indices[24:32] for name in names}}

    def __getitem__(self, index):
        if isinstance(index, torch.Tensor):
            return PygPCQM4Mv2Dataset(molecules=[self.molecules[i] for i in index])
        return self.molecules[index]

    def __len__(self):
        return len(self.molecules)

class PCQM4Mv2Evaluator:
    def eval(self, values):
        return {"mae": (values["y_true"] - values["y_pred"]).abs().mean().item()}
"""

if __name__ == "__main__":
    write("ogb/__init__.py", "")
    write("ogb/graphproppred/__init__.py", "")
    write("ogb/graphproppred/mol_encoder.py", ENCODERS)
    write("ogb/lsc.py", DATA)
    write("ogb/utils.py", "smiles2graph = None\n")
