#!/bin/bash -l
# DataParallel on one node: sbatch slurm/dp.sh [flags of train_dp.py]
# Results are in runs/JOBID. If Slurm requeues the job, it continues from its last checkpoint. After
# its time limit, once squeue -j JOBID lists it no longer, submit it again with --output runs/JOBID.
# Edit the lines EDIT.
##SBATCH --account=NAME --partition=gpu # EDIT: delete one # if you need them; or --qos
#SBATCH --gres=gpu:4                    # EDIT: GPUs; if sinfo -o %G has none, delete this
#SBATCH --time=04:00:00                 # EDIT: time limit
#SBATCH --cpus-per-task=16 --mem=64G    # not 4 GPUs? 4 CPUs (--workers) and 16 GB for each
#SBATCH --job-name=dp --output=%x-%j.out --open-mode=append

if [ "$SLURM_NNODES" != 1 ]; then
    echo "dp.sh is for one node: for several, see ddp_torchrun_nodes.sh"
    exit 2
fi
if [ "${SLURM_RESTART_COUNT:-0}" = 0 ] && [ -e "runs/$SLURM_JOB_ID" ]; then # IDs may be reset
    echo "runs/$SLURM_JOB_ID is of an older job with this number: submit it again"
    exit 2
fi
source .venv/bin/activate || exit # or, for conda, the next four lines
# module load conda || exit
# eval "$(conda shell.bash hook)"
# conda deactivate # what was active at the login: otherwise, activate may not change PATH
# conda activate NAME || exit

# torch would also train on fewer GPUs than Slurm has granted, or on the CPU: to do so, delete this.
check='
import os, sys, torch
gpus, granted = torch.cuda.device_count(), int(os.getenv("SLURM_GPUS_ON_NODE", "1"))
if gpus < granted:
    sys.exit(f"{os.uname().nodename}: torch can use only {gpus} of {granted} GPUs")
'
timeout -k 60 900 python -c "$check" || exit

python train_dp.py --workers "$SLURM_CPUS_PER_TASK" \
    --resume --output "runs/$SLURM_JOB_ID" "$@"
