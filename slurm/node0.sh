#!/usr/bin/env bash
# Machine 0 of two jobs that train together: sbatch slurm/node0.sh; sbatch slurm/node1.sh
# Your script gets --resume --output FOLDER, and must continue from the checkpoint in FOLDER. One
# that does not would start over at each time limit, up to 20 times: use slurm/minimal.sh for it.
#SBATCH --job-name=node0
#SBATCH --nodelist=node0          # EDIT: the name of this machine
#SBATCH --gres=gpu:4              # EDIT: GPUs; if none, delete this and --device cuda
#SBATCH --cpus-per-task=16        # EDIT: CPU cores, about 4 per GPU
#SBATCH --time=04:00:00           # EDIT: at this limit the job is requeued, and continues
##SBATCH --partition=gpu          # EDIT: if your cluster needs it, delete one #; likewise for --account
#SBATCH --output=%x-%j.out --open-mode=append
#SBATCH --requeue                 # requeue the job if a node fails
#SBATCH --signal=B:USR1@60        # send USR1 to this shell 60 s before the time limit: see trap

# source ~/miniconda3/etc/profile.d/conda.sh; conda activate ENV # EDIT: yours, without the first #
script=train_ddp_spawn.py # EDIT: your script
output=runs/pair # EDIT: a new folder for each run, the same in both files
meet=tcp://node0:23456 # EDIT: machine 0 and a free port, the same in both files
code=$output/$SLURM_JOB_ID-$(basename "$script")
[[ -e $code ]] || install -D "$script" "$code" # run a copy, so that you can edit the script
export PYTHONPATH=$PWD:${script%/*}:$PYTHONPATH # for modules here and beside the script
requeue() { ((SLURM_RESTART_COUNT < 20)) && scontrol requeue "$SLURM_JOB_ID"; } # at most 20 times
trap requeue USR1
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    python -u "$code" --device cuda --resume --output "$output" \
    --init-method "$meet" --world-size 2 --rank 0 "$@" &
wait $! # USR1 ends this wait, and requeue runs ...
wait $! # ... so wait again, for srun
status=$?
# If the other machine is gone, start again, with it. A wrong flag (status 2) is not repeated.
if ((status != 0 && status != 2)) && squeue --me --name=node1 | grep -q node1; then requeue; fi
exit $status
