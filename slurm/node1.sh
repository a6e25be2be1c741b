#!/usr/bin/env bash
# Machine 1 of two jobs that train together: sbatch slurm/node0.sh; sbatch slurm/node1.sh
# Submit both, with the same flags. They end at their time limit: submit both again to continue.
#SBATCH --job-name=node1 --output=%x-%j.out --no-requeue # which starts one alone
#SBATCH --nodelist=node1 --ntasks=1 # EDIT: this machine. One process, which starts one per GPU
#SBATCH --gres=gpu:4              # EDIT: GPUs; if sinfo -o %G shows none, delete this line
#SBATCH --cpus-per-task=16        # EDIT: CPUs: 4 per GPU, one for each of its --workers
#SBATCH --mem=64G                 # EDIT: memory; 0: all of it
#SBATCH --time=04:00:00           # EDIT: time limit
##SBATCH --partition=gpu          # EDIT: delete one # if you need it; likewise --account, --qos

source .venv/bin/activate || exit # EDIT: your environment: this line, or the next
# module load conda; eval "$(conda shell.bash hook)"; conda deactivate; conda activate NAME || exit
inside=() # EDIT: or a container: (apptainer exec --nv --bind /shared IMAGE.sif), activating nothing
unset "${!SLURM_GPUS_PER@}" # or srun would use those of a job in which sbatch was called
# torch must be able to use the GPUs that Slurm has granted. (To train on CPUs, delete this check.)
srun --export=ALL "${inside[@]}" python -c "import os, torch; n = torch.accelerator.device_count()
assert n >= int(os.getenv('SLURM_GPUS_ON_NODE', '1')), f'torch can use only {n} GPUs'" || exit
# EDIT, as in node0.sh: machine 0 and a free port, and a folder on a disk that both machines share.
# Without a port: --init-method file:///shared/NEW_FILE. --timeout: minutes to wait for the other.
srun --export=ALL --cpus-per-task="$SLURM_CPUS_PER_TASK" "${inside[@]}" \
    python -u train_ddp_spawn.py --init-method tcp://node0:23456 --timeout 240 \
    --nnodes 2 --node-rank 1 --output runs/pair --resume "$@"
