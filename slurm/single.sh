#!/usr/bin/env bash
# One GPU: sbatch slurm/single.sh [flags of train_single.py]
# It ends at its time limit. To continue from the last epoch, submit it again with --resume.
#SBATCH --job-name=single
#SBATCH --ntasks=1                # one process
#SBATCH --gres=gpu:1              # EDIT: GPUs; if sinfo -o %G shows none, delete this line
#SBATCH --cpus-per-task=4         # EDIT: CPUs, in proportion to the GPUs
##SBATCH --mem=16G                # EDIT: memory; delete one # if your cluster needs it
#SBATCH --time=04:00:00           # EDIT: time limit
##SBATCH --partition=gpu          # EDIT: delete one # if you need it; likewise --account, --qos
#SBATCH --output=%x-%j.out

source .venv/bin/activate || exit # EDIT: your environment
# srun may not pass on the environment and --cpus-per-task by itself
srun --export=ALL --cpus-per-task="$SLURM_CPUS_PER_TASK" python -u train_single.py "$@"
