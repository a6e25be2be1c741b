#!/usr/bin/env bash
# DDP, one process per node: sbatch slurm/ddp_multigpu_proc.sh [flags of train_ddp_multigpu_proc.py]
# It ends at its time limit: submit it again with --resume, which Slurm's own requeueing adds.
#SBATCH --job-name=ddp_multigpu_proc --output=%x-%j.out --open-mode=append
#SBATCH --nodes=2 --ntasks-per-node=1 # EDIT: nodes. Each has one process, for all its GPUs
#SBATCH --gres=gpu:4              # EDIT: GPUs per node; if sinfo -o %G shows none, delete this line
#SBATCH --cpus-per-task=16        # EDIT: CPUs per node
#SBATCH --mem=64G                 # EDIT: memory per node; 0: all of it
#SBATCH --time=04:00:00           # EDIT: time limit
##SBATCH --partition=gpu          # EDIT: delete one # if you need it; likewise --account, --qos

source .venv/bin/activate || exit # EDIT: your environment: this line, or the next
# module load conda; eval "$(conda shell.bash hook)"; conda deactivate; conda activate NAME || exit

# srun would use those of a job in which sbatch was called.
unset SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK

# Can torch use the GPUs that Slurm has granted on each node? (To train on CPUs, delete this.)
check='
import os, torch
gpus = torch.accelerator.device_count()
granted = int(os.getenv("SLURM_GPUS_ON_NODE", "1"))
assert gpus >= granted, f"torch can use only {gpus} GPUs"
'
srun --export=ALL python -c "$check" || exit

# Each node runs this, with a number of its own.
# shellcheck disable=SC2016
start='exec python -u train_ddp_multigpu_proc.py --node-rank "$SLURM_NODEID" "$@"'
# srun may not pass on the environment and --cpus-per-task by itself. If a node fails, all end.
srun --export=ALL --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --wait=0 \
    bash -c "$start" bash --nnodes "$SLURM_NNODES" \
    --init-method "tcp://$(hostname):$((10000 + SLURM_JOB_ID % 20000))" \
    --workers "$SLURM_CPUS_PER_TASK" "$@" ${SLURM_RESTART_COUNT:+--resume}
