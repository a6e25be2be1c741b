#!/usr/bin/env bash
# train_ddp_torchrun.py on several machines: sbatch --nodes 4 slurm/ddp_torchrun.sh [flags]
#SBATCH --job-name=ddp_torchrun
#SBATCH --gres=gpu:2             # EDIT: GPUs per machine; without any, delete the line
#SBATCH --cpus-per-task=2        # EDIT: CPU cores per machine; more to decode image files
#SBATCH --time=04:00:00          # EDIT: a training that takes longer is requeued and carries on
##SBATCH --partition=gpu         # EDIT: name yours and delete one #, if your cluster wants it
##SBATCH --mem=32G               # EDIT: the same
#SBATCH --nodes=2                # EDIT: machines
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append       # a requeued job goes on in the same log
#SBATCH --requeue
#SBATCH --signal=B:USR1@60       # warns 60 s before the time limit: ten steps and a save fit in

set -euo pipefail
script=train_ddp_torchrun.py # EDIT: its path, seen from the folder where sbatch is typed
port=$((10000 + SLURM_JOB_ID % 20000)) # two jobs on one machine never meet
command=(
    -m torch.distributed.run
    --nnodes "$SLURM_NNODES" --node-rank NODEID # which becomes each machine's number
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}"
    --master-addr "$(hostname)" --master-port "$port" # this shell runs on the first machine
    "$script" --resume "$@"
)

# ---- From here on nothing needs a touch ----------------------------------------------------------

python=("${PYTHON:-python3}")
if [[ -n ${CONTAINER:-} ]]; then
    if ! tool=$(command -v apptainer || command -v singularity); then
        echo "error: CONTAINER is set, but there is no apptainer: load its module" >&2
        exit 2
    fi
    folders=$PWD
    for word in data runs "${command[@]}"; do # the folders that arguments and links lead to
        word=${word#--*=}
        path=$(realpath -m -- "${word#file://}") || continue
        until [[ -d $path ]]; do path=$(dirname "$path"); done
        if [[ $path != / && ,$folders, != *,$path,* ]]; then folders+=,$path; fi
    done
    python=("$tool" exec --nv --bind "$folders" "$CONTAINER" "${python[@]}")
fi
export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:=1} # threads; the DDP scripts share them out

warned="" ended=""
trap 'warned=1' USR1 # the time limit is near
trap 'ended=1' TERM  # Slurm ends the job, and if it was preempted it requeues it by itself
# USR1 goes to all processes, and would kill one that does not catch it yet: hence ignored first.
# shellcheck disable=SC2016 # each machine's own number
srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    bash -c 'trap "" USR1; exec "${@/#NODEID/$SLURM_NODEID}"' bash "${python[@]}" "${command[@]}" &
while kill -0 $! 2> /dev/null; do
    if [[ $warned ]]; then kill -USR1 $! || true; fi # until it is caught
    sleep 2 || true
done
status=0
wait $! || status=$?
if [[ $status == 75 && ! $ended || $status != 0 && $warned ]]; then # torchrun makes 75 a 1
    echo "job $SLURM_JOB_ID has saved and goes back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
