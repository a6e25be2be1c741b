#!/usr/bin/env bash
#SBATCH --job-name=srun --ntasks=2 --output=%x-%j.out
MASTER_ADDR=$(hostname)
export MASTER_ADDR MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000)) WORLD_SIZE=2
# shellcheck disable=SC2016 # each task expands it
srun --ntasks 2 bash -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID exec "$PYTHON" -u "$@"' \
    bash train_ddp_torchrun.py --output "runs/srun-$SLURM_JOB_ID" "$@"
