#!/usr/bin/env bash
# DDP, one process per node: sbatch slurm/ddp_multigpu_proc.sh [its script's flags]
# It ends at its time limit: submit it again with --resume, which Slurm's own requeueing adds.
#SBATCH --job-name=ddp_multigpu_proc --output=%x-%j.out --open-mode=append
#SBATCH --nodes=2 --ntasks-per-node=1 # EDIT: nodes. Each has one process, for all its GPUs
#SBATCH --gres=gpu:4              # EDIT: GPUs per node; if sinfo -o %G shows none, delete this line
#SBATCH --cpus-per-task=16        # EDIT: CPUs per node
#SBATCH --mem=64G                 # EDIT: memory per node; 0: all of it
#SBATCH --time=04:00:00           # EDIT: time limit
##SBATCH --partition=gpu          # EDIT: delete one # if you need it; likewise --account, --qos

source .venv/bin/activate || exit # EDIT: your environment: this line, or the next
# module load conda; eval "$(conda shell.bash hook)"; conda deactivate; conda activate NAME || exit
inside=() # EDIT: or a container: (apptainer exec --nv --bind /shared IMAGE.sif), activating nothing
unset "${!SLURM_GPUS_PER@}" # or srun would use those of a job in which sbatch was called
# torch must be able to use the GPUs that Slurm has granted. (To train on CPUs, delete this check.)
srun --export=ALL "${inside[@]}" python -c "import os, torch; n = torch.accelerator.device_count()
assert n >= int(os.getenv('SLURM_GPUS_ON_NODE', '1')), f'torch can use only {n} GPUs'" || exit
# shellcheck disable=SC2016 # each node has its own SLURM_NODEID
srun --export=ALL --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 "${inside[@]}" \
    bash -c 'python -u train_ddp_multigpu_proc.py --node-rank "$SLURM_NODEID" "$@"' bash \
    --nnodes "$SLURM_NNODES" --init-method "tcp://$(hostname):$((10000 + SLURM_JOB_ID % 20000))" \
    --workers "$SLURM_CPUS_PER_TASK" "$@" ${SLURM_RESTART_COUNT:+--resume}
