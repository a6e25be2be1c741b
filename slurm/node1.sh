#!/usr/bin/env bash
# Machine 1 of two jobs that find each other: sbatch slurm/node0.sh; sbatch slurm/node1.sh
#SBATCH --job-name=node1
#SBATCH --nodelist=node1         # EDIT: this machine's name
#SBATCH --gres=gpu:2             # EDIT: GPUs; without any, delete the line
#SBATCH --cpus-per-task=8        # EDIT: CPU cores, about 4 a GPU
#SBATCH --time=04:00:00          # EDIT: a longer training goes back into the queue and carries on
##SBATCH --partition=gpu         # EDIT: name yours and delete one #, if your cluster wants it
##SBATCH --mem=32G               # EDIT: the same; memory of a machine
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append       # or a requeued job begins its log anew
#SBATCH --requeue                # or a preemption or a lost machine ends the job for good
#SBATCH --signal=B:USR1@60       # 60 s before the time limit; or the limit ends the job for good

set -euo pipefail
requeues=20 # EDIT: so many at most, or a limit too short for one checkpoint goes round for ever
meet=${INIT_METHOD:-tcp://node0:23456} # EDIT: machine 0 and a free port, alike in both files
script=train_ddp_spawn.py # EDIT: your copy of it
if [[ ${1:-} == *.py ]]; then script=$1; shift; fi # sbatch slurm/node1.sh other_script.py [flags]
if [[ $meet == file://* ]]; then # of both jobs the first removes the file that an earlier run left
    exec 9>> "${meet#file://}.lock"
    if flock --nonblock 9; then rm -f "${meet#file://}"; fi
    flock --shared 9
fi
again() { ((${SLURM_RESTART_COUNT:-0} >= requeues)) || scontrol requeue "$SLURM_JOB_ID" || true; }
trap again USR1 # Slurm then kills the job and starts it anew, with --resume
python=(${CONTAINER:+apptainer exec --nv "$CONTAINER"} "${PYTHON:-python3}" -u)
echo "machine 1 waits for machine 0 at $meet"
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    "${python[@]}" "$script" --resume --init-method "$meet" --world-size 2 --rank 1 "$@" &
status=0
wait $! || wait $! || status=$? # the signal ends the first wait
if ((status == 0 || status == 2)); then exit "$status"; fi # 2 is a wrong flag
if squeue --me -h -t PD,R -n node0 | grep -q .; then again; fi # the other machine will be back
exit "$status"
