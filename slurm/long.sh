#!/bin/bash -l
# Trains beyond Slurm's time limit, on one node or several: sbatch slurm/long.sh [flags]
# Without sbatch, bash slurm/long.sh [flags] only prints what a job would run, and its cost.
#
# Each start of the job is called a life. In each, your script gets --resume --output FOLDER, which
# is runs/JOBID if the flags name none. It must
# - continue from its newest checkpoint in FOLDER, or begin if there is none yet;
# - save one several times in each life: to another name, then os.replace, as Slurm may kill it
#   at any moment;
# - end with status 0 when it is finished, also if it is started again after that.
#
# Before the time limit, or if the script fails, the job requeues itself if this life has saved a
# checkpoint. Otherwise it ends, and the log says why: mend the cause, and submit it again with the
# flag --output FOLDER, of the old job. Edit the lines EDIT; the others may stay.
##SBATCH --account=NAME --partition=gpu # EDIT: delete one # if you need them; or --qos
#SBATCH --gres=gpu:4                    # EDIT: GPUs per node; if sinfo -o %G has none, delete this
#SBATCH --time=04:00:00                 # EDIT: time limit of each life
#SBATCH --cpus-per-task=16 --mem=64G    # per node; not 4 GPUs? 4 CPUs and 16 GB for each
#SBATCH --nodes=1 --ntasks-per-node=1   # nodes: each has a torchrun, with a process for each GPU
#SBATCH --signal=B:USR1@300             # warns this script 300 s before the time limit
#SBATCH --job-name=long --output=%x-%j.out --open-mode=append --requeue
warned="" preempted="" counted="" why=""
trap 'warned=yes' USR1 # before all else: otherwise, a warning would end the job
lives=5                           # EDIT: days of training / time limit, and half as many again
source .venv/bin/activate || exit # or, for conda, the next four lines
# module load conda || exit
# eval "$(conda shell.bash hook)"
# conda deactivate # what was active at the login: otherwise, activate may not change PATH
# conda activate NAME || exit
script=(complete/train.py) # or your own, with flags: (mine.py --seed "$SLURM_ARRAY_TASK_ID")
checkpoint=checkpoint.pt   # what it saves as it advances, in FOLDER: latest.json or "epoch_*.pt";
                           # a sharded one is complete when it has this: "*/.metadata"
container=()               # or, without `source`: (apptainer exec --nv --bind /shared IMAGE.sif)
processes=gpu              # per node: one for each GPU; xpu: Intel's; or a number, on CPUs

# Unset what your own settings, or a job in which sbatch was called, would tell srun and squeue.
unset CDPATH SLURM_GPUS SLURM_GRES SLURM_HINT SLURM_LABELIO SLURM_TIME_FORMAT SLURM_CLUSTERS
unset SLURM_TRES_PER_TASK SLURM_CPUS_PER_GPU SLURM_NTASKS_PER_GPU
unset "${!SLURM_GPUS_PER_@}" "${!SLURM_MEM_PER_@}" "${!SLURM_CPU_BIND@}" "${!SQUEUE_@}"
export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 # a crash prints where it was

# ---- What a life runs ----

directive() { # NAME: its value in the lines #SBATCH of this file
    sed -n "s/^#SBATCH.* --$1=\([^ ]*\).*/\1/p" "$0"
}

# A job runs Slurm's copy of this file, which has this name. A terminal may be within a job, too, as
# Jupyter's is.
if [ "${0##*/}" = slurm_script ]; then
    in_batch=yes
    folder=runs/$SLURM_JOB_ID
    port=$((10000 + SLURM_JOB_ID % 20000))
    nodes=$SLURM_NNODES
    cpus=$SLURM_CPUS_PER_TASK
else
    in_batch=no
    folder=runs/JOBID
    port=PORT
    nodes=$(directive nodes)
    cpus=$(directive cpus-per-task)
fi
previous=""
for word in "${script[@]}" "$@"; do
    if [ "$previous" = --output ]; then
        folder=$word
    elif [[ $word == --output=* ]]; then
        folder=${word#*=}
    fi
    previous=$word
done

# A task on each node. srun may not pass on the environment and the number of CPUs by itself; if a
# task fails, all end (--kill-on-bad-exit), but not because one of them has finished (--wait=0).
on_nodes=(srun --nodes="$nodes" --ntasks="$nodes" --export=ALL --kill-on-bad-exit=1 --wait=0)
if [ -n "$cpus" ]; then
    on_nodes+=(--cpus-per-task="$cpus")
fi
on_nodes+=("${container[@]}")

# Each node has its own number. They join on the first, at a port of the job's own.
# shellcheck disable=SC2016
train=("${on_nodes[@]}" bash -c 'exec torchrun --node-rank "$SLURM_NODEID" "$@"' bash)
train+=(--nnodes "$nodes" --nproc-per-node "$processes" --master-addr "$(hostname)")
train+=(--master-port "$port")
train+=("${script[@]}" "$@" --resume --output "$folder")

# The check of the GPUs: torch would also train on fewer than Slurm has granted to this step. (Of
# whole nodes, the job has all GPUs, but its steps have those of --gres.)
check='
import os, sys, torch
gpus, granted = torch.cuda.device_count(), int(os.getenv("SLURM_GPUS_ON_NODE", "1"))
if gpus < granted:
    sys.exit(f"{os.uname().nodename}: torch can use only {gpus} of {granted} GPUs")
for i in range(gpus):
    torch.ones(1, device=i).item()  # or an error that says what is wrong
'

print_cost() { # TIME-LIMIT GPUS
    awk -F '[-:]' -v lives="$lives" -v gpus="$2" '
        { minutes = $1 }                           # 90 or 90:00
        NF == 3 { minutes = $1 * 60 + $2 }         # 04:00:00
        /-/ { minutes = $1 * 1440 + $2 * 60 + $3 } # 1-12:00:00
        minutes * gpus > 0 {
            printf "long.sh: at most %d lives x %s x %d GPUs", lives, $0, gpus
            printf " = %d GPU hours, preemptions aside", lives * minutes * gpus / 60
            print "; in an array, for each task"
        }' <<< "$1"
}

if [ "$in_batch" = no ]; then # only print
    printf '%q ' "${train[@]}"
    echo
    gpus=$(directive gres) # gpu:4 or gpu:a100:4
    cost=$(print_cost "$(directive time)" $((nodes * (${gpus##*:} + 0))))
    if [ -z "$cost" ]; then
        cost="long.sh: for the cost, lines #SBATCH must have --nodes=, --gres=gpu: and --time="
    fi
    echo "$cost"
    exit
fi

# ---- Whether another life follows ----

id=$SLURM_JOB_ID
if [ "$SLURM_ARRAY_JOB_ID" = "$id" ]; then # the last task: to Slurm, this number is all tasks
    id=${id}_$SLURM_ARRAY_TASK_ID
fi
job=$folder/job # first the ID of the job that has the folder, then a line for each counted requeue

end() {
    echo "long.sh: $*"
    exit 2
}

ask_squeue() { # the controller may be busy, or away for a moment
    for _ in 1 2 3; do
        if squeue -h "$@"; then
            return
        fi
        sleep 10
    done
    return 1
}

run_step() { # srun and its words. While the controller is busy, srun fails with status 99
    local status
    for _ in 1 2 3; do
        SLURM_EXIT_ERROR=99 "$@"
        status=$?
        if [ "$status" != 99 ]; then
            break
        fi
        sleep 10
    done
    return "$status"
}

has_left() { # JOB: of the two, Slurm may list only this one
    [ "$(squeue -h -j "$1,$id" -o %A)" = "$SLURM_JOB_ID" ]
}

wait_for() { # JOB: once it is preempted, its nodes may need minutes to end it
    echo "long.sh: waits up to 10 minutes for job $1, which has $folder, to end"
    for _ in {1..40}; do
        if has_left "$1"; then
            return
        fi
        sleep 15
    done
    return 1
}

claim_folder() {
    local owner
    mkdir -p "$folder" || exit
    owner=$(head -n 1 "$job" 2> /dev/null)
    if [ "$owner" != "$id" ]; then
        if [ -n "$owner" ] && ! has_left "$owner" && ! wait_for "$owner"; then
            end "$folder is job $owner's, which still waits or runs, or Slurm does not answer"
        fi
        echo "$id" > "$job" || exit
    fi
    touch "$job" || exit # its time is the beginning of this life, by the disk's clock
}

look_for_preemption() { # of this life: Slurm may also tell that of an earlier one
    local preempted_at started_at answer
    answer=$(SLURM_TIME_FORMAT=%s ask_squeue -j "$id" -O PreemptTime:30,StartTime:30)
    read -r preempted_at started_at <<< "$answer"
    if [ "$preempted_at" -ge "$started_at" ] 2> /dev/null; then # without a preemption, it is N/A
        preempted=yes
    fi
}

checkpoints() { # [CONDITION of find]: their names. An empty file may only reserve the folder
    (cd "$folder" && find -L . -path "./$checkpoint" -size +0 "$@")
}

requeue() { # Slurm then ends this life. While the controller is away, nobody ends it at its limit.
    for _ in {1..60}; do
        if scontrol requeue incomplete "$id"; then
            sleep 600
            return
        fi
        sleep 5
    done
}

requeue_if_useful() { # returns if it is not, or if Slurm does not requeue the job: $why says which
    if [ -z "$preempted" ] && [ -z "$counted" ]; then
        if [ -z "$(checkpoints -newer job)" ]; then
            why="no new $checkpoint in $folder in this life"
            return
        fi
        if [ "$(wc -l < "$job")" -ge "$lives" ]; then
            why="this was the last of $lives lives"
            return
        fi
        if ! echo "life ${SLURM_RESTART_COUNT:-0} is requeued, $(date)" >> "$job"; then
            why="$job cannot be written"
            return
        fi
        counted=yes
    fi
    requeue
    why="Slurm does not requeue it"
}

answer_warning() {
    local why_before=$why
    if [ "$warned" = yes ]; then
        warned=answered
        echo "long.sh: warned of the time limit, or of a preemption, $(date)"
        look_for_preemption
    fi
    requeue_if_useful
    if [ "$why" != "$why_before" ]; then
        echo "long.sh: not requeued so far: $why"
    fi
}

# ---- A life ----

type srun scontrol squeue > /dev/null || exit
if [ "${SLURM_RESTART_COUNT:-0}" -ge $((3 * lives)) ]; then # preemptions, and nodes that fail
    end "started $SLURM_RESTART_COUNT times: look why, then submit it again with --output $folder"
fi
if scontrol show job "$id" | grep -q Requeue=0; then
    end "Slurm may not requeue this job: submit ddp_torchrun.sh several times (slurm/README.md)"
fi
claim_folder
echo "long.sh: life $(wc -l < "$job") of $lives, in $folder, on $SLURM_JOB_NODELIST, $(date)"
if [ -z "$(checkpoints)" ]; then
    echo "long.sh: no $checkpoint there yet: starts new"
fi
print_cost "$(ask_squeue -j "$id" -o %l)" $((nodes * ${SLURM_GPUS_ON_NODE:-0}))

if [ "$processes" = gpu ]; then
    if ! run_step timeout -k 60 900 "${on_nodes[@]}" python -c "$check"; then
        echo "long.sh: the check of the GPUs has failed (or not ended). If on all nodes, mend the"
        end "environment; if on one: sbatch --exclude=NODE slurm/long.sh FLAGS --output $folder"
    fi
fi
if [ "$(head -n 1 "$job")" != "$id" ]; then
    end "another job has begun in $folder"
fi

# Here, each node may unpack data: slurm/clusters.md
run_step "${train[@]}" &
training=$!
while kill -0 "$training" 2> /dev/null; do # bash takes note of a warning when sleep ends
    if [ -n "$warned" ]; then
        answer_warning
    fi
    sleep 5
done
wait "$training"
status=$?
if [ "$status" = 0 ]; then
    exit
fi
look_for_preemption
requeue_if_useful
echo "long.sh: it ends with status $status: $why"
exit "$status"
