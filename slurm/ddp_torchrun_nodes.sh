#!/usr/bin/env bash
# DDP on several nodes, one process per GPU: sbatch slurm/ddp_torchrun_nodes.sh [script's flags]
# Results are in runs/JOBID. If Slurm requeues the job, it continues from its last checkpoint. After
# its time limit, submit it again with --output runs/JOBID, of the old job.
##SBATCH --account=NAME --partition=gpu # EDIT: delete one # if you need them; or --qos
#SBATCH --nodes=2 --ntasks-per-node=1   # EDIT: nodes. Each has a torchrun, with a process per GPU
#SBATCH --gres=gpu:4                    # EDIT: GPUs per node; if sinfo -o %G has none, delete this
#SBATCH --cpus-per-task=16 --mem=64G    # EDIT: per node; a CPU for each of the --workers, 4 per GPU
#SBATCH --time=04:00:00                 # EDIT: time limit
#SBATCH --job-name=ddp_torchrun_nodes --output=%x-%j.out --open-mode=append

source .venv/bin/activate || exit # EDIT: your environment: this line, or the next
# module load conda; eval "$(conda shell.bash hook)"; conda deactivate; conda activate NAME || exit

# srun may not pass on the environment and the number of CPUs by itself. If a node fails, all end.
options=(--export=ALL --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 --wait=0)
# It would use those of a job in which sbatch was called.
unset SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK

# torch would also train on fewer GPUs than Slurm has granted, or on the CPU: to do so, delete this.
check='
import os, torch
gpus, granted = torch.cuda.device_count(), int(os.getenv("SLURM_GPUS_ON_NODE", "1"))
assert gpus >= granted, f"torch can use only {gpus} of {granted} GPUs"
'
srun "${options[@]}" python -c "$check" || exit

# Each node runs this, with a number of its own. They meet on the first, at a port of the job's own.
# shellcheck disable=SC2016
start='torchrun --node-rank "$SLURM_NODEID" "$@"'
# EDIT: train_ddp_torchrun.py, or another script, such as large/train_fsdp2.py
srun "${options[@]}" bash -c "$start" bash --nnodes "$SLURM_NNODES" --nproc-per-node gpu \
    --master-addr "$(hostname)" --master-port $((10000 + SLURM_JOB_ID % 20000)) \
    train_ddp_torchrun.py --resume --output "runs/$SLURM_JOB_ID" "$@"
