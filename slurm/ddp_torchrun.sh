#!/usr/bin/env bash
# Trains with train_ddp_torchrun.py: sbatch slurm/ddp_torchrun.sh [its flags]
# Your script gets --resume --output FOLDER, and must continue from the checkpoint in FOLDER. One
# that does not would start over at each time limit, up to 20 times: use slurm/minimal.sh for it.
#SBATCH --job-name=ddp_torchrun
#SBATCH --nodes=1                 # EDIT: number of nodes
#SBATCH --gres=gpu:4              # EDIT: GPUs per node; if none, delete this and --device cuda
#SBATCH --cpus-per-task=16        # EDIT: CPU cores per node, about 4 per GPU
#SBATCH --time=04:00:00           # EDIT: at this limit the job is requeued, and continues
##SBATCH --partition=gpu          # EDIT: if your cluster needs it, delete one #; likewise for --account
#SBATCH --ntasks-per-node=1       # one torchrun per node, which starts a process per GPU
#SBATCH --output=%x-%j.out --open-mode=append
#SBATCH --requeue                 # requeue the job if a node fails
#SBATCH --signal=B:USR1@60        # send USR1 to this shell 60 s before the time limit: see trap

# source ~/miniconda3/etc/profile.d/conda.sh; conda activate ENV # EDIT: yours, without the first #
script=train_ddp_torchrun.py # EDIT: yours; delete --device cuda below if it does not accept that
output=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID # the same each time this job is requeued
code=$output/$(basename "$script")
[[ -e $code ]] || install -D "$script" "$code" # run a copy, so that you can edit the script
export PYTHONPATH=$PWD:${script%/*}:$PYTHONPATH # for modules here and beside the script
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or torchrun's restarts can hang (pytorch#135712)
port=$((10000 + SLURM_JOB_ID % 20000)) # its own port, in case two jobs share a node
trap '((SLURM_RESTART_COUNT < 20)) && scontrol requeue "$SLURM_JOB_ID"' USR1 # at most 20 times

# EDIT: in a container, write apptainer exec --nv IMAGE.sif before torchrun
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$(hostname):$port" \
    "$code" --device cuda --resume --output "$output" "$@" &
wait $! # USR1 ends this wait, and the trap runs ...
wait $! # ... so wait again; the job ends with the status of srun
