#!/bin/bash -l
# Machine 1 of two jobs that train together: sbatch slurm/node0.sh; sbatch slurm/node1.sh
# For those who know it so from an article. ddp_torchrun_nodes.sh is one job for both machines, and
# better: Slurm starts its nodes together, on any that are free. These two wait for one another: if
# one ends early, cancel the other. Submit both with the same flags; after the time limit, again
# with --resume. For another experiment, use --output runs/ANOTHER: where there is a checkpoint, a
# new run does not begin.
##SBATCH --account=NAME --partition=gpu # EDIT: delete one # if you need them; or --qos
#SBATCH --nodelist=node1                # EDIT: this machine; waits until its GPUs are free
#SBATCH --gres=gpu:4                    # EDIT: as in node0.sh; if sinfo -o %G has none, delete this
#SBATCH --time=04:00:00                 # EDIT: time limit
#SBATCH --cpus-per-task=16 --mem=64G    # not 4 GPUs? 4 CPUs (--workers) and 16 GB for each
#SBATCH --job-name=node1 --output=%x-%j.out --open-mode=append
#SBATCH --no-requeue                    # which would start one of the two alone

if [ "$SLURM_NNODES" != 1 ]; then
    echo "node1.sh is for one node: each of the two jobs has one"
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

script=train_ddp_spawn.py # or train_ddp_multigpu_proc.py: one process for all GPUs of a machine
# EDIT, as in node0.sh: machine 0, a port that nobody else uses there, and a folder on a disk that
# both machines share. Without a port: --init-method file:///shared/NEW_FILE. If the other job does
# not begin within 30 minutes, this one ends.
python "$script" --init-method "tcp://node0:$((10000 + UID % 20000))" --nnodes 2 --node-rank 1 \
    --output runs/pair "$@"
