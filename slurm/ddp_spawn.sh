#!/usr/bin/env bash
# DDP on one node, without torchrun: sbatch slurm/ddp_spawn.sh [flags of train_ddp_spawn.py]
# It ends at its time limit: submit it again with --resume, which Slurm's own requeueing adds.
#SBATCH --job-name=ddp_spawn --output=%x-%j.out --open-mode=append
#SBATCH --ntasks=1                # one process, which starts one per GPU
#SBATCH --gres=gpu:4              # EDIT: GPUs; if sinfo -o %G shows none, delete this line
#SBATCH --cpus-per-task=16        # EDIT: CPUs: 4 per GPU, one for each of its --workers
#SBATCH --mem=64G                 # EDIT: memory; 0: all of it
#SBATCH --time=04:00:00           # EDIT: time limit
##SBATCH --partition=gpu          # EDIT: delete one # if you need it; likewise --account, --qos

source .venv/bin/activate || exit # EDIT: your environment: this line, or the next
# module load conda; eval "$(conda shell.bash hook)"; conda deactivate; conda activate NAME || exit

# srun would use those of a job in which sbatch was called.
unset SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK
# Without a GPU that torch can use, it would train on the CPU.
check="import torch; assert torch.accelerator.is_available(), 'torch can use no GPU'"
srun --export=ALL python -c "$check" || exit
# srun may not pass on the environment and --cpus-per-task by itself.
srun --export=ALL --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    python -u train_ddp_spawn.py "$@" ${SLURM_RESTART_COUNT:+--resume}
