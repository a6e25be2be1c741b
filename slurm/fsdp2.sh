#!/usr/bin/env bash
# FSDP2, a model larger than a GPU: sbatch slurm/fsdp2.sh [flags of train_fsdp2.py]
# It ends at its time limit. To continue from the last epoch, submit it again with --resume.
#SBATCH --job-name=fsdp2 --output=%x-%j.out
#SBATCH --nodes=1 --ntasks-per-node=1 # EDIT: nodes. Each has a torchrun, with a process per GPU
#SBATCH --gres=gpu:4              # EDIT: GPUs per node; if sinfo -o %G shows none, delete this line
#SBATCH --cpus-per-task=16        # EDIT: CPUs per node: 4 per GPU, one for each of its --workers
##SBATCH --mem=64G                # EDIT: memory per node; delete one # if your cluster needs it
#SBATCH --time=04:00:00           # EDIT: time limit
##SBATCH --partition=gpu          # EDIT: delete one # if you need it; likewise --account, --qos

source .venv/bin/activate || exit # EDIT: your environment: this line, or the next
# module load conda; eval "$(conda shell.bash hook)"; conda deactivate; conda activate NAME || exit
inside=() # EDIT: or a container: (apptainer exec --nv --bind /shared IMAGE.sif), activating nothing
# torch must be able to use the GPUs that Slurm has granted. (To train on CPUs, delete this check.)
srun --export=ALL "${inside[@]}" python -c "import os, torch; n = torch.accelerator.device_count()
assert n >= int(os.getenv('SLURM_GPUS_ON_NODE', '1')), f'torch can use only {n} GPUs'" || exit
# torchrun's rendezvous: c10d, this job's ID, this node and a port of its own; imports may be slow
srun --export=ALL --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 "${inside[@]}" \
    torchrun --nnodes "$SLURM_NNODES" --nproc-per-node gpu --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$(hostname):$((10000 + SLURM_JOB_ID % 20000))" \
    --rdzv-conf read_timeout=600 train_fsdp2.py "$@"
