#!/usr/bin/env bash
# DataParallel, one node: sbatch slurm/dp.sh [flags of train_dp.py]
# It ends at its time limit. To continue from the last epoch, submit it again with --resume.
#SBATCH --job-name=dp --output=%x-%j.out
#SBATCH --ntasks=1                # one process, which uses all GPUs
#SBATCH --gres=gpu:4              # EDIT: GPUs; if sinfo -o %G shows none, delete this line
#SBATCH --cpus-per-task=16        # EDIT: CPUs
##SBATCH --mem=64G                # EDIT: memory; delete one # if your cluster needs it
#SBATCH --time=04:00:00           # EDIT: time limit
##SBATCH --partition=gpu          # EDIT: delete one # if you need it; likewise --account, --qos

source .venv/bin/activate || exit # EDIT: your environment: this line, or the next
# module load miniforge && eval "$(conda shell.bash hook)" && conda activate NAME || exit
container=() # EDIT: or (apptainer exec --nv --bind /shared IMAGE.sif), without the lines above
gpus=${SLURM_GPUS_ON_NODE:-4} # what Slurm has granted here; EDIT the 4 if you deleted --gres
srun --export=ALL "${container[@]}" python -c "import torch; n = torch.accelerator.device_count()
assert n >= $gpus, f'torch can use {n} of $gpus GPUs'" || exit # to train on CPUs, delete this check
# srun may not pass on the environment and --cpus-per-task by itself
srun --export=ALL --cpus-per-task="$SLURM_CPUS_PER_TASK" "${container[@]}" \
    python -u train_dp.py --workers "$SLURM_CPUS_PER_TASK" "$@"
