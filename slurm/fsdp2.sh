#!/usr/bin/env bash
# FSDP2, a model larger than a GPU: sbatch slurm/fsdp2.sh [flags of train_fsdp2.py]
# It ends at its time limit. To continue from the last epoch, submit it again with --resume.
#SBATCH --job-name=fsdp2
#SBATCH --nodes=1                 # EDIT: number of nodes
#SBATCH --ntasks-per-node=1       # one torchrun per node, which starts a process per GPU
#SBATCH --gres=gpu:4              # EDIT: GPUs per node; if sinfo -o %G shows none, delete this line
#SBATCH --cpus-per-task=16        # EDIT: CPUs per node, in proportion to its GPUs
##SBATCH --mem=64G                # EDIT: memory per node; delete one # if your cluster needs it
#SBATCH --time=04:00:00           # EDIT: time limit
##SBATCH --partition=gpu          # EDIT: delete one # if you need it; likewise --account, --qos
#SBATCH --output=%x-%j.out

source .venv/bin/activate || exit # EDIT: your environment
port=$((10000 + SLURM_JOB_ID % 20000)) # its own port, in case two jobs share a node
# srun may not pass on the environment and --cpus-per-task by itself
srun --export=ALL --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    torchrun --nnodes "$SLURM_NNODES" --nproc-per-node gpu \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$(hostname):$port" \
    --rdzv-conf read_timeout=600 train_fsdp2.py "$@"
