#!/usr/bin/env bash
# train_ddp_torchrun.py on several machines: sbatch slurm/ddp_torchrun.sh [flags of the script]
#SBATCH --job-name=ddp_torchrun
#SBATCH --nodes=2                # EDIT: machines
#SBATCH --gres=gpu:2             # EDIT: GPUs of a machine; without any, delete the line
#SBATCH --cpus-per-task=8        # EDIT: CPU cores of a machine, about 4 a GPU
#SBATCH --time=04:00:00          # EDIT: a longer training goes back into the queue and carries on
##SBATCH --partition=gpu         # EDIT: name yours and delete one #, if your cluster wants it
##SBATCH --mem=32G               # EDIT: the same; memory of a machine
#SBATCH --ntasks-per-node=1
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append       # or a requeued job begins its log anew
#SBATCH --requeue                # or a preemption or a lost machine ends the job for good
#SBATCH --signal=B:USR1@60       # 60 s before the time limit; or the limit ends the job for good

set -euo pipefail
script=train_ddp_torchrun.py # EDIT: your copy of it
requeues=20 # EDIT: so many at most, or a limit too short for one checkpoint goes round for ever
again() { ((${SLURM_RESTART_COUNT:-0} >= requeues)) || scontrol requeue "$SLURM_JOB_ID" || true; }
trap again USR1 # Slurm then kills the job and starts it anew, with --resume
python=(${CONTAINER:+apptainer exec --nv "$CONTAINER"} "${PYTHON:-python3}" -u)
# Or torchrun's restarts find the addresses of dead processes, and wait for them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# In the background, or the shell would not hear the signal before srun ends.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    "${python[@]}" -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --rdzv-endpoint "$(hostname):$((10000 + SLURM_JOB_ID % 20000))" \
    "$script" --resume "$@" & # this shell, and so hostname, is on the first machine
status=0
wait $! || wait $! || status=$? # the signal ends the first wait
# Slurm requeues a preempted job only if it is still there after the GraceTime of the partition.
if ((status)) && scontrol show job "$SLURM_JOB_ID" | grep -q PreemptTime=2; then again; fi
exit "$status"
