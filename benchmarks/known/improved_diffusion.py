"""improved-diffusion: the data set is split in its constructor; an EMA of each parameter."""

import guided_diffusion
from made import image_folder, write

REPOSITORY = "openai/improved-diffusion"
COMMIT = "1bc7bbb"
REMARK = "each rank takes its share of the data set in its constructor: not compared"
PACKAGES = guided_diffusion.PACKAGES
COMMAND = """--cpu --wait 500 --steps 5 scripts/image_train.py --data_dir data/train --image_size 64
    --num_channels 32 --num_res_blocks 1 --num_heads 1 --attention_resolutions 8
    --diffusion_steps 100 --batch_size 2 --log_interval 2 --save_interval 100"""

if __name__ == "__main__":
    write("mpi4py/__init__.py", guided_diffusion.MPI)
    image_folder("data", size=64)
