#!/usr/bin/env bash
# Runs any script for torchrun, once: sbatch slurm/minimal.sh minimal/ddp.py [flags of the script]
#SBATCH --nodes=1                 # EDIT: number of nodes
#SBATCH --gres=gpu:4              # EDIT: GPUs per node
#SBATCH --cpus-per-task=16        # EDIT: CPU cores per node, about 4 per GPU
#SBATCH --time=04:00:00           # EDIT: the job ends at this limit
##SBATCH --partition=gpu          # EDIT: if your cluster needs it, delete one #; and add --account
#SBATCH --ntasks-per-node=1       # one torchrun per node, which starts a process per GPU
#SBATCH --output=%x-%j.out --no-requeue

# source ~/miniconda3/etc/profile.d/conda.sh; conda activate ENV # EDIT: yours, without the first #
port=$((10000 + SLURM_JOB_ID % 20000)) # its own port, in case two jobs share a node
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$(hostname):$port" "$@"
