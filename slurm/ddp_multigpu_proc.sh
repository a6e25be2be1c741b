#!/usr/bin/env bash
# DDP, one process per node: sbatch slurm/ddp_multigpu_proc.sh [its script's flags]
# It ends at its time limit. To continue from the last epoch, submit it again with --resume.
#SBATCH --job-name=ddp_multigpu_proc --output=%x-%j.out
#SBATCH --nodes=2 --ntasks-per-node=1 # EDIT: nodes. Each has one process, for all its GPUs
#SBATCH --gres=gpu:4              # EDIT: GPUs per node; if sinfo -o %G shows none, delete this line
#SBATCH --cpus-per-task=16        # EDIT: CPUs per node
##SBATCH --mem=64G                # EDIT: memory per node; delete one # if your cluster needs it
#SBATCH --time=04:00:00           # EDIT: time limit
##SBATCH --partition=gpu          # EDIT: delete one # if you need it; likewise --account, --qos

source .venv/bin/activate || exit # EDIT: your environment: this line, or the next
# module load miniforge && eval "$(conda shell.bash hook)" && conda activate NAME || exit
container=() # EDIT: or (apptainer exec --nv --bind /shared IMAGE.sif), without the lines above
gpus=${SLURM_GPUS_ON_NODE:-4} # what Slurm has granted here; EDIT the 4 if you deleted --gres
srun --export=ALL "${container[@]}" python -c "import torch; n = torch.accelerator.device_count()
assert n >= $gpus, f'torch can use {n} of $gpus GPUs'" || exit # to train on CPUs, delete this check
# shellcheck disable=SC2016 # each node has its own SLURM_NODEID
srun --export=ALL --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 "${container[@]}" \
    bash -c 'python -u train_ddp_multigpu_proc.py --node-rank "$SLURM_NODEID" "$@"' bash \
    --nnodes "$SLURM_NNODES" --init-method "tcp://$(hostname):$((10000 + SLURM_JOB_ID % 20000))" \
    --workers "$SLURM_CPUS_PER_TASK" "$@"
