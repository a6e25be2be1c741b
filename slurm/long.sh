#!/bin/bash -l
# Trains beyond Slurm's time limit, on one node or several: sbatch slurm/long.sh FOLDER [flags]
# The same command again continues in FOLDER. In an array, FOLDER needs a %a: the task's number.
#
# Each start of the job is a life. In each, your script gets --resume --output FOLDER, and must
# - continue from its newest checkpoint in FOLDER, or begin if there is none yet;
# - save one several times in each life: to another name, then os.replace, as Slurm may kill it
#   at any moment;
# - end with status 0 when it is finished, also if it is started again after that.
#
# Before the time limit, after a preemption or a failure, the job requeues itself. It ends
# - when the script is finished, or after so many lives;
# - after three failures in a row, or a time limit, without a new checkpoint;
# - if the script fails within a minute, and there is no checkpoint yet (wrong flags, for example).
# The log says why: mend the cause, and submit the same command. Edit the lines EDIT.
##SBATCH --account=NAME --partition=gpu # EDIT: delete one # if you need them; or --qos
#SBATCH --nodes=1 --ntasks-per-node=1   # EDIT: nodes. Each has a torchrun, with a process per GPU
#SBATCH --gres=gpu:4                    # EDIT: GPUs per node; if sinfo -o %G has none, delete this
#SBATCH --time=04:00:00                 # EDIT: time limit of each life
#SBATCH --cpus-per-task=16 --mem=64G    # per node; not 4 GPUs? 4 CPUs and 16 GB for each
#SBATCH --signal=B:USR1@300             # warns this script 300 s before the time limit
#SBATCH --job-name=long --output=%x-%j.out --open-mode=append --requeue
warned=""
trap 'warned=yes' USR1 # before all else: otherwise, a warning would end the job
set +euC               # as your profile may have set them
folder=${1//%a/"$SLURM_ARRAY_TASK_ID"}

lives=8 # EDIT: days of training / time limit x 1.5. The cost is at most lives x time limit x GPUs
source .venv/bin/activate || exit # EDIT: or, for conda, the next four lines
# module load conda || exit
# eval "$(conda shell.bash hook)"
# conda deactivate # what was active at the login: otherwise, activate may not change PATH
# conda activate NAME || exit
script=(complete/train.py)          # EDIT: or yours: (mine.py --seed "$SLURM_ARRAY_TASK_ID")
flags=(--resume --output "$folder") # EDIT: by which yours resumes: (--output_dir "$folder")
checkpoint=checkpoint.pt            # EDIT: what it saves as it advances, in FOLDER: latest.json, or
                                    # "epoch_*.pt"; of a folder, the file that is written last:
                                    # "*/.metadata", "checkpoint-*/trainer_state.json"
pass_on=no    # yes: when the job is warned, your script gets SIGTERM, and 30 s to save and end
container=()  # or, without `source`: (apptainer exec --nv --bind /shared IMAGE.sif)
processes=gpu # per node: one for each GPU; xpu: Intel's; or a number, on CPUs

end() { # STATUS REASON
    echo "long.sh: $2"
    exit "$1"
}

persist() { # COMMAND: Slurm's controller may be away for some minutes
    for _ in {1..60}; do
        if "$@"; then
            return
        fi
        sleep 5
    done
    return 1
}

# ---- The job ----

# A job runs Slurm's copy of this file, which has this name. Called by another job file, its lines
# #SBATCH are not read, and no warning arrives.
if [ "${0##*/}" != slurm_script ] || [ -z "$folder" ] || [[ $folder == -* ]]; then
    end 2 "usage: sbatch slurm/long.sh FOLDER [flags]"
fi

# Unset what a job in which sbatch was called, or your profile, would tell srun and the others.
export JOB_GPUS=${SLURM_GPUS_ON_NODE:-0} # on this node; the steps of srun have those of --gres
for name in CDPATH "${!SLURM_@}" "${!SRUN_@}" "${!SQUEUE_@}" "${!SCONTROL_@}" "${!SCANCEL_@}"; do
    case $name in
        SLURM_CONF* | SLURM_CLUSTER_NAME | SLURM_JOB_* | SLURM_ARRAY_* | SLURM_NNODES) ;;
        SLURM_NODE* | SLURM_SUBMIT_* | SLURM_TMP* | SLURM_RESTART_COUNT) ;; # tell them nothing
        *) unset "$name" ;;
    esac
done

id=$SLURM_JOB_ID
if [ "$SLURM_ARRAY_JOB_ID" = "$id" ]; then # the last task: to Slurm, this number is all tasks
    id=${id}_$SLURM_ARRAY_TASK_ID
fi
facts=$(persist scontrol show job "$id") || end 1 "Slurm does not answer: submit it again"

fact() { # NAME: a number of this job. The environment may have that of another
    grep -o -m 1 "$1=[0-9]*" <<< "$facts" | cut -d = -f 2
}

restarts=$(fact Restarts)
life=$((restarts + 1))
if [ "$(fact Requeue)" = 0 ]; then
    end 2 "Slurm may not requeue this job: submit ddp_torchrun.sh several times (slurm/README.md)"
elif [ -n "$(fact ArrayTaskId)" ] && [ "$folder" = "$1" ]; then
    end 2 "an array needs a folder for each task: sbatch slurm/long.sh FOLDER/%a [flags]"
elif [ "$life" -gt "$lives" ]; then
    end 2 "this was the last of $lives lives"
fi
shift # the other words are the script's flags

# ---- The folder ----

# This file has the job that has the folder, then a line for each failure in a row without a new
# checkpoint. It is as old as this life, by the disk's clock.
job=$folder/job
me="$id on $SLURM_CLUSTER_NAME"

checkpoints() { # [CONDITION of find]: their names. An empty file may only reserve the folder
    (cd "$folder" && find -L . -path "./$checkpoint" -size +0 "$@")
}

saved() { # in this life. -cnewer: a copy may keep its original's time
    [ -n "$(checkpoints -cnewer job)" ]
}

wait_for() { # OWNER: what was preempted may need minutes to end. Slurm may list only this job
    if [ "${1#* on }" != "$SLURM_CLUSTER_NAME" ]; then
        end 2 "$folder is job $1's: if that is over, rm $job"
    fi
    echo "long.sh: waits up to 10 minutes for job $1, which has $folder, to end"
    for _ in {1..40}; do
        if [ "$(squeue -h -j "${1% on *},$id" -o %A)" = "$SLURM_JOB_ID" ]; then
            return
        fi
        sleep 15
    done
    end 2 "$folder is job $1's, which still waits or runs, or Slurm does not answer"
}

mkdir -p "$folder" || exit
owner=$(head -n 1 "$job" 2> /dev/null)
if [ -n "$owner" ] && [ "$owner" != "$me" ]; then
    wait_for "$owner"
fi
if [ "$owner" != "$me" ] || saved; then # saved: in an earlier life
    echo "$me" > "$job" || exit
fi
touch "$job" || exit
echo "long.sh: life $life of $lives, in $folder, on $SLURM_JOB_NODELIST, $(date)"
if [ -z "$(checkpoints)" ]; then
    echo "long.sh: no $checkpoint there yet: starts new"
fi

# ---- What runs on the nodes ----

export PYTHONUNBUFFERED=1 PYTHONFAULTHANDLER=1 # a crash prints where it was
export SLURM_RESTART_COUNT=$restarts
# A task on each node. srun may not pass on the environment and the number of CPUs by itself; if a
# task fails, all end (--kill-on-bad-exit), but not because one of them has finished (--wait=0).
on_nodes=(srun --nodes="$SLURM_NNODES" --ntasks="$SLURM_NNODES" --export=ALL)
on_nodes+=(--kill-on-bad-exit=1 --wait=0)
cpus=$(fact CPUs/Task)
if [ "${cpus:-1}" -gt 1 ]; then # without --cpus-per-task above, srun gives all
    on_nodes+=(--cpus-per-task="$cpus")
fi
on_nodes+=("${container[@]}")

# torch would also train on fewer GPUs than Slurm has granted to this step, or to the job.
check='
import os, sys, torch
gpus, granted = torch.cuda.device_count(), int(os.getenv("SLURM_GPUS_ON_NODE", "1"))
job_gpus = int(os.environ["JOB_GPUS"])
if gpus < granted:
    sys.exit(f"{os.uname().nodename}: torch can use only {gpus} of {granted} GPUs")
for i in range(gpus):
    torch.ones(1, device=i).item()  # or an error that says what is wrong
if granted < job_gpus:
    print(f"the job has {job_gpus} GPUs on its first node, and trains on {granted}: edit --gres")
'

# They join on the first node, at a port of this job and life.
# shellcheck disable=SC2016
train=("${on_nodes[@]}" bash -c 'exec torchrun --node-rank "$SLURM_NODEID" "$@"' bash)
train+=(--nnodes "$SLURM_NNODES" --nproc-per-node "$processes" --master-addr "$(hostname)")
train+=(--master-port $((10000 + (SLURM_JOB_ID + 997 * restarts) % 20000)))
train+=("${script[@]}" "$@" "${flags[@]}")

# ---- Whether another life follows ----

was_preempted() { # in this life: Slurm may also tell of an earlier one
    local preempted started answer
    answer=$(SLURM_TIME_FORMAT=%s persist squeue -h -j "$id" -O PreemptTime:30,StartTime:30)
    read -r preempted started <<< "$answer"
    [ "$preempted" -ge "$started" ] 2> /dev/null # without a preemption, it is N/A
}

requeue() { # Slurm then ends this life
    if persist scontrol requeue incomplete "$id"; then
        sleep 600
    fi
}

answer_warning() {
    echo "long.sh: warned of the time limit, or of a preemption, $(date)"
    if [ "$pass_on" = yes ]; then
        scancel --signal=TERM "$id" # what the script then saves counts when it has ended
    elif [ "$life" -lt "$lives" ]; then
        warned=answered # requeues as soon as this life has saved
        if was_preempted; then
            requeue
        fi
    fi
}

failed() { # STATUS WHAT: the job is requeued, unless its next life is likely to fail alike
    local reason=""
    if [ "$life" -ge "$lives" ]; then
        reason="this was the last of $lives lives"
    elif saved || was_preempted; then
        reason=""
    elif [ "$SECONDS" -lt 60 ] && [ -z "$(checkpoints)" ]; then
        reason="within a minute, and there is no $checkpoint yet"
    elif ! echo "life $life has failed without a new $checkpoint" >> "$job"; then
        reason="$job cannot be written"
    elif [ "$(wc -l < "$job")" -gt 3 ]; then
        reason="three lives in a row without a new $checkpoint"
    fi
    if [ -z "$reason" ]; then
        requeue
        reason="Slurm does not requeue it"
    fi
    end "$1" "$2 failed with status $1: $reason"
}

# ---- A life ----

SECONDS=0
if [ "$processes" = gpu ]; then
    timeout -k 60 900 "${on_nodes[@]}" python -c "$check" || failed $? "the GPU check"
fi
if [ "$(head -n 1 "$job")" != "$me" ]; then
    end 2 "another job has begun in $folder"
fi
# Here, each node may unpack data: slurm/clusters.md
"${train[@]}" &
training=$!
while kill -0 "$training" 2> /dev/null; do # bash takes note of a warning when sleep ends
    if [ "$warned" = yes ]; then
        warned=""
        answer_warning
    fi
    if [ "$warned" = answered ] && saved; then
        requeue
    fi
    sleep 5
done
wait "$training" || failed $? "the training"
