#!/usr/bin/env bash
# Trains with train_ddp_spawn.py on all GPUs of one machine: sbatch slurm/ddp_spawn.sh [its flags]
# Your script gets --resume --output FOLDER, and must continue from the checkpoint in FOLDER. One
# that does not would start over at each time limit, up to 20 times: use slurm/minimal.sh for it.
#SBATCH --job-name=ddp_spawn
#SBATCH --gres=gpu:4              # EDIT: GPUs; if none, delete this and --device cuda
#SBATCH --cpus-per-task=16        # EDIT: CPU cores, about 4 per GPU
#SBATCH --time=04:00:00           # EDIT: at this limit the job is requeued, and continues
##SBATCH --partition=gpu          # EDIT: if your cluster needs it, delete one #; likewise for --account
#SBATCH --output=%x-%j.out --open-mode=append
#SBATCH --requeue                 # requeue the job if a node fails
#SBATCH --signal=B:USR1@60        # send USR1 to this shell 60 s before the time limit: see trap

# source ~/miniconda3/etc/profile.d/conda.sh; conda activate ENV # EDIT: yours, without the first #
script=train_ddp_spawn.py # EDIT: your script
output=runs/$SLURM_JOB_NAME-$SLURM_JOB_ID # the same each time this job is requeued
code=$output/$(basename "$script")
[[ -e $code ]] || install -D "$script" "$code" # run a copy, so that you can edit the script
export PYTHONPATH=$PWD:${script%/*}:$PYTHONPATH # for modules here and beside the script
trap '((SLURM_RESTART_COUNT < 20)) && scontrol requeue "$SLURM_JOB_ID"' USR1 # at most 20 times

# EDIT: in a container, write apptainer exec --nv IMAGE.sif before python
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    python -u "$code" --device cuda --resume --output "$output" "$@" &
wait $! # USR1 ends this wait, and the trap runs ...
wait $! # ... so wait again; the job ends with the status of srun
