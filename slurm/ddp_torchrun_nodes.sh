#!/bin/bash -l
# DDP on several nodes, one process per GPU: sbatch slurm/ddp_torchrun_nodes.sh [script's flags]
# Results are in runs/JOBID. If Slurm requeues the job, it continues from its last checkpoint. After
# its time limit, once squeue -j JOBID lists it no longer, submit it again with --output runs/JOBID.
# Edit the lines EDIT.
##SBATCH --account=NAME --partition=gpu # EDIT: delete one # if you need them; or --qos
#SBATCH --nodes=2 --ntasks-per-node=1   # EDIT: nodes. Each has a torchrun, with a process per GPU
#SBATCH --gres=gpu:4                    # EDIT: GPUs per node; if sinfo -o %G has none, delete this
#SBATCH --time=04:00:00                 # EDIT: time limit
#SBATCH --cpus-per-task=16 --mem=64G    # per node; not 4 GPUs? 4 CPUs and 16 GB for each
#SBATCH --job-name=ddp_torchrun_nodes --output=%x-%j.out --open-mode=append

if [ "${SLURM_RESTART_COUNT:-0}" = 0 ] && [ -e "runs/$SLURM_JOB_ID" ]; then # IDs may be reset
    echo "runs/$SLURM_JOB_ID is of an older job with this number: submit it again"
    exit 2
fi
source .venv/bin/activate || exit # or, for conda, the next four lines
# module load conda || exit
# eval "$(conda shell.bash hook)"
# conda deactivate # what was active at the login: otherwise, activate may not change PATH
# conda activate NAME || exit

# A port of the job's own, another after each requeue: one of its processes may be left.
port=$((10000 + (SLURM_JOB_ID + 997 * ${SLURM_RESTART_COUNT:-0}) % 20000))
nodes=$SLURM_NNODES
cpus=$SLURM_CPUS_PER_TASK
export JOB_GPUS=${SLURM_GPUS_ON_NODE:-0} # on this node; the steps of srun have those of --gres
# Unset what a job in which sbatch was called, or your profile, would tell srun and squeue.
for name in "${!SLURM_@}" "${!SRUN_@}" "${!SQUEUE_@}"; do
    case $name in
        SLURM_CONF* | SLURM_CLUSTER_NAME | SLURM_JOB_* | SLURM_ARRAY_* | SLURM_NNODES) ;;
        SLURM_NODE* | SLURM_SUBMIT_* | SLURM_TMP* | SLURM_RESTART_COUNT) ;; # tell them nothing
        *) unset "$name" ;;
    esac
done
# A task on each node. srun may not pass on the environment and the number of CPUs by itself; if a
# task fails, all end (--kill-on-bad-exit), but not because one of them has finished (--wait=0).
options=(--nodes="$nodes" --ntasks="$nodes" --cpus-per-task="$cpus")
options+=(--export=ALL --kill-on-bad-exit=1 --wait=0)

failed() { # STATUS. A preempted job may lose its steps first; Slurm requeues what still runs
    if squeue -h -j "$SLURM_JOB_ID" -O PreemptTime | grep -qv N/A; then
        sleep 600
    fi
    exit "$1"
}

# torch would also train on fewer GPUs than Slurm has granted, or on the CPU: to do so, delete this.
check='
import os, sys, torch
gpus, granted = torch.cuda.device_count(), int(os.getenv("SLURM_GPUS_ON_NODE", "1"))
if gpus < granted:
    sys.exit(f"{os.uname().nodename}: torch can use only {gpus} of {granted} GPUs")
job_gpus = int(os.environ["JOB_GPUS"])
if granted < job_gpus:
    print(f"the job has {job_gpus} GPUs on its first node, and trains on {granted}: edit --gres")
'
timeout -k 60 900 srun "${options[@]}" python -c "$check" || failed $?

# Each node has its own number. They join on the first.
# shellcheck disable=SC2016
start='torchrun --node-rank "$SLURM_NODEID" "$@"'
# Instead of train_ddp_torchrun.py, it may be another script, such as large/train_fsdp2.py.
srun "${options[@]}" bash -c "$start" bash --nnodes "$nodes" --nproc-per-node gpu \
    --master-addr "$(hostname)" --master-port "$port" \
    train_ddp_torchrun.py --resume --output "runs/$SLURM_JOB_ID" "$@" || failed $?
