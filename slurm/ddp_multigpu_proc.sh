#!/usr/bin/env bash
# DDP, one process per node: sbatch slurm/ddp_multigpu_proc.sh [its script's flags]
# It ends at its time limit. To continue from the last epoch, submit it again with --resume.
#SBATCH --job-name=ddp_multigpu_proc
#SBATCH --nodes=2                 # EDIT: number of nodes
#SBATCH --ntasks-per-node=1       # one process per node, which uses all its GPUs
#SBATCH --gres=gpu:4              # EDIT: GPUs per node; if sinfo -o %G shows none, delete this line
#SBATCH --cpus-per-task=16        # EDIT: CPUs per node, in proportion to its GPUs
##SBATCH --mem=64G                # EDIT: memory per node; delete one # if your cluster needs it
#SBATCH --time=04:00:00           # EDIT: time limit
##SBATCH --partition=gpu          # EDIT: delete one # if you need it; likewise --account, --qos
#SBATCH --output=%x-%j.out

source .venv/bin/activate || exit # EDIT: your environment
port=$((10000 + SLURM_JOB_ID % 20000)) # its own port, in case two jobs share a node
# bash -c: each node has its own SLURM_NODEID
# shellcheck disable=SC2016
srun --export=ALL --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    bash -c 'python -u train_ddp_multigpu_proc.py --rank "$SLURM_NODEID" "$@"' bash \
    --world-size "$SLURM_NNODES" --init-method "tcp://$(hostname):$port" "$@"
