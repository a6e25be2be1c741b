"""DiT: diffusion in the latent space of an autoencoder, an EMA."""

from made import image_folder, write

REPOSITORY = "facebookresearch/DiT"
COMMIT = "ed81ce2"
PACKAGES = ["timm==0.4.12"]
EDITS = [
    ("models.py", "depth=12, hidden_size=384", "depth=2, hidden_size=48"),
    ("models.py", "in_channels, hidden_size, bias=True", "in_channels, hidden_size"),
]
COMMAND = """--cpu --wait 400 --short 2 --steps 6 train.py --data-path data/train
    --results-dir {run} --model DiT-S/8 --num-classes 4 --epochs 3 --global-batch-size 4
    --num-workers 0 --log-every 2"""

AUTOENCODER = """
import torch

class Latents:
    def __init__(self, mean):
        self.mean = mean

    def sample(self):
        return self.mean + 0.1 * torch.randn_like(self.mean)

class AutoencoderKL(torch.nn.Module):
    @classmethod
    def from_pretrained(cls, name):
        return cls()

    def encode(self, images):
        small = torch.nn.functional.avg_pool2d(images, 8)
        self.latent_dist = Latents(torch.cat([small, small[:, :1]], dim=1))
        return self
"""

if __name__ == "__main__":
    write("diffusers/__init__.py", "")  # whose weights would be downloaded
    write("diffusers/models.py", AUTOENCODER)
    image_folder("data")
