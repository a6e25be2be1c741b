#!/usr/bin/env bash
# DDP on several nodes, one process per GPU: sbatch slurm/ddp_torchrun_nodes.sh [script's flags]
# It ends at its time limit: submit it again with --resume, which Slurm's own requeueing adds.
#SBATCH --job-name=ddp_torchrun_nodes --output=%x-%j.out --open-mode=append
#SBATCH --nodes=2 --ntasks-per-node=1 # EDIT: nodes. Each has a torchrun, with a process per GPU
#SBATCH --gres=gpu:4              # EDIT: GPUs per node; if sinfo -o %G shows none, delete this line
#SBATCH --cpus-per-task=16        # EDIT: CPUs per node: 4 per GPU, one for each of its --workers
#SBATCH --mem=64G                 # EDIT: memory per node; 0: all of it
#SBATCH --time=04:00:00           # EDIT: time limit
##SBATCH --partition=gpu          # EDIT: delete one # if you need it; likewise --account, --qos

source .venv/bin/activate || exit # EDIT: your environment: this line, or the next
# module load conda; eval "$(conda shell.bash hook)"; conda deactivate; conda activate NAME || exit
script=train_ddp_torchrun.py # EDIT: or train_fsdp2.py, for a model larger than a GPU

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

# Each node runs this for each GPU. If not all nodes have joined, each would train alone.
# shellcheck disable=SC2016
start='
if [ "$GROUP_WORLD_SIZE" -ne "$SLURM_NNODES" ]; then
    echo "nodes are missing: do their clocks differ?"
    exit 1
fi
exec python -u "$@"
'
# The nodes meet on this one, at a port of the job's own. Imports from a slow disk may take minutes.
meet=(--rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-conf read_timeout=600)
meet+=(--rdzv-endpoint "$(hostname):$((10000 + SLURM_JOB_ID % 20000))")
# srun may not pass on the environment and --cpus-per-task by itself. If a node fails, all end.
srun --export=ALL --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --wait=0 \
    torchrun --nnodes "$SLURM_NNODES" --nproc-per-node gpu "${meet[@]}" \
    --no-python bash -c "$start" bash "$script" "$@" ${SLURM_RESTART_COUNT:+--resume}
