#!/usr/bin/env bash
# Machine 1 of two jobs that train together: sbatch slurm/node0.sh; sbatch slurm/node1.sh
# For those who know it so from an article. ddp_torchrun_nodes.sh is one job for both machines, and
# better: Slurm starts its nodes together, on any that are free. These two wait for one another.
# Submit both, with the same flags. They end at their time limit: submit both again to continue.
##SBATCH --account=NAME --partition=gpu # EDIT: delete one # if you need them; or --qos
#SBATCH --nodelist=node1                # EDIT: this machine
#SBATCH --gres=gpu:4                    # EDIT: GPUs; if sinfo -o %G has none, delete this
#SBATCH --cpus-per-task=16 --mem=64G    # EDIT: a CPU for each of the --workers, 4 per GPU
#SBATCH --time=04:00:00                 # EDIT: time limit
#SBATCH --job-name=node1 --output=%x-%j.out --open-mode=append
#SBATCH --no-requeue                    # which would start one of the two alone

source .venv/bin/activate || exit # EDIT: your environment: this line, or the next
# module load conda; eval "$(conda shell.bash hook)"; conda deactivate; conda activate NAME || exit

# torch would also train on fewer GPUs than Slurm has granted, or on the CPU: to do so, delete this.
check='
import os, torch
gpus, granted = torch.cuda.device_count(), int(os.getenv("SLURM_GPUS_ON_NODE", "1"))
assert gpus >= granted, f"torch can use only {gpus} of {granted} GPUs"
'
python -c "$check" || exit

# EDIT, as in node0.sh: machine 0 and a free port, and a folder on a disk that both machines share.
# Without a port: --init-method file:///shared/NEW_FILE. --timeout: minutes to wait for the other
# machine, and later for another rank: if one hangs, all wait for so long.
python train_ddp_spawn.py --init-method tcp://node0:23456 --timeout 240 \
    --nnodes 2 --node-rank 1 --output runs/pair --resume "$@"
