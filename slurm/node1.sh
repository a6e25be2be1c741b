#!/usr/bin/env bash
# Machine 1 of two jobs that find each other: sbatch slurm/node0.sh; sbatch slurm/node1.sh
#SBATCH --job-name=node1
#SBATCH --nodelist=node1         # EDIT: this machine's name
#SBATCH --gres=gpu:2             # EDIT: GPUs; without any, delete the line
#SBATCH --cpus-per-task=8        # EDIT: CPU cores, about 4 a GPU
#SBATCH --time=04:00:00          # EDIT: a longer training goes back into the queue and carries on
##SBATCH --partition=gpu --account=me --mem=32G # EDIT: delete one # if your cluster wants these
#SBATCH --output=%x-%j.out --open-mode=append # or a requeued job begins its log anew
#SBATCH --requeue                # or a preemption or a lost machine ends the job for good
#SBATCH --signal=B:USR1@60       # 60 s before the time limit; or the limit ends the job for good

# module load python; source ~/env/bin/activate # EDIT: your cluster's; delete the first #
# If compute nodes have no network, load the data on the login node first: slurm/README.md.
set -euo pipefail
script=train_ddp_spawn.py # EDIT: your copy; it gets --resume --output FOLDER
requeues=20 # EDIT: at most, or a limit too short for one checkpoint goes round for ever
output=runs/pair # EDIT: another folder for another training, alike in both files
meet=${INIT_METHOD:-tcp://node0:23456} # EDIT: machine 0 and a free port, alike in both files
if [[ ${1:-} == *.py ]]; then script=$1; shift; fi # sbatch slurm/node1.sh other_script.py [flags]
if [[ " $*" =~ " --output"[=\ ]([^ ]+) ]]; then output=${BASH_REMATCH[1]}; fi # --output wins
code=$output/$SLURM_JOB_ID-$(basename "$script") # so a requeued job runs the code that began it
[[ -e $code ]] || install -D "$script" "$code" # -D makes the folder
export PYTHONPATH=$PWD:${PYTHONPATH:-} # or the copy does not find modules beside the script
python=("${PYTHON:-python3}" -u)
if [[ -n ${CONTAINER:-} ]]; then python=(apptainer exec --nv "$CONTAINER" "${python[@]}"); fi

requeue() { ((${SLURM_RESTART_COUNT:-0} < requeues)) && scontrol requeue "$SLURM_JOB_ID"; }
trap 'requeue || echo "not requeued, after ${SLURM_RESTART_COUNT:-0} of $requeues requeues"' USR1
echo "machine 1 waits for machine 0 at $meet"
# In the background: bash runs the trap only after a command in the foreground has ended.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    "${python[@]}" "$code" --resume --output "$output" \
    --init-method "$meet" --world-size 2 --rank 1 "$@" &
# USR1 ends the first `wait` early: a second one follows. Once srun is over, both have its status.
wait $! || wait $! || failed=$?
# 2 is a wrong flag. After another failure both jobs begin anew, if the other is still there too.
if ((${failed:-2} != 2)) && [[ -n $(squeue --me -h -n node0) ]]; then requeue || true; fi
exit "${failed:-0}"
