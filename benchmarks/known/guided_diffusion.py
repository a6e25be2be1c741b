"""guided-diffusion: the data set is split in its constructor; an EMA of each parameter."""

from made import image_folder, write

REPOSITORY = "openai/guided-diffusion"
COMMIT = "22e0df8"
REMARK = "each rank takes its share of the data set in its constructor: not compared"
PACKAGES = ["blobfile", "tqdm"]
COMMAND = """--cpu --wait 500 --steps 5 scripts/image_train.py --data_dir data/train --image_size 64
    --num_channels 32 --num_res_blocks 1 --num_heads 1 --attention_resolutions 8
    --diffusion_steps 100 --batch_size 2 --log_interval 2 --save_interval 100"""

# Where there is no MPI: rank and size are torchrun's; rank 0 tells the others a port and its name.
MPI = """
import os
import torch.distributed as dist

class Communicator:
    rank = property(lambda self: int(os.environ["RANK"]))
    size = property(lambda self: int(os.environ["WORLD_SIZE"]))

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def bcast(self, value, root=0):
        return int(os.environ["MASTER_PORT"]) if isinstance(value, int) else value

    def gather(self, value, root=0):
        values = [None] * self.size
        dist.all_gather_object(values, value)
        return values

class MPI:
    COMM_WORLD = Communicator()
"""

if __name__ == "__main__":
    write("mpi4py/__init__.py", MPI)
    image_folder("data", size=64)
