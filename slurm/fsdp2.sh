#!/usr/bin/env bash
# train_fsdp2.py: sbatch slurm/fsdp2.sh [flags]; four machines: sbatch --nodes 4 ...
#SBATCH --job-name=fsdp2
#SBATCH --nodes=1 --ntasks-per-node=1 # EDIT: machines
#SBATCH --gres=gpu:4             # EDIT: GPUs of a machine; without any, delete the line
#SBATCH --cpus-per-task=16       # EDIT: CPU cores of a machine, about 4 a GPU
#SBATCH --time=04:00:00          # EDIT: a longer training goes back into the queue and carries on
##SBATCH --partition=gpu --account=me --mem=32G # EDIT: delete one # if your cluster wants these
#SBATCH --output=%x-%j.out --open-mode=append # or a requeued job begins its log anew
#SBATCH --requeue                # or a preemption or a lost machine ends the job for good
#SBATCH --signal=B:USR1@60       # 60 s before the time limit; or the limit ends the job for good

# module load python; source ~/env/bin/activate # EDIT: your cluster's; delete the first #
# If compute nodes have no network, load the data on the login node first: slurm/README.md.
set -euo pipefail
script=train_fsdp2.py # EDIT: your copy; it gets --resume --output FOLDER
requeues=20 # EDIT: at most, or a limit too short for one checkpoint goes round for ever
job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID} # the tasks of an array, --array=1-10%1, share one run
task=$job${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID} # in an array JOB alone means all its tasks
output=runs/$SLURM_JOB_NAME-$job # a requeued job finds its run here, a new one begins another
if [[ " $*" =~ " --output"[=\ ]([^ ]+) ]]; then output=${BASH_REMATCH[1]}; fi # --output wins
code=$output/$job-$(basename "$script") # so a requeued job runs the code that began it
[[ -e $code ]] || install -D "$script" "$code" # -D makes the folder
export PYTHONPATH=$PWD:${PYTHONPATH:-} # or the copy does not find modules beside the script
python=("${PYTHON:-python3}" -u)
if [[ -n ${CONTAINER:-} ]]; then python=(apptainer exec --nv "$CONTAINER" "${python[@]}"); fi
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 # or torchrun's restarts wait for dead processes
requeue() { ((${SLURM_RESTART_COUNT:-0} < requeues)) && scontrol requeue "$task"; }
trap 'requeue || echo "not requeued, after ${SLURM_RESTART_COUNT:-0} of $requeues requeues"' USR1
# In the background: bash runs the trap only after a command in the foreground has ended.
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 "${python[@]}" \
    -m torch.distributed.run --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --max-restarts 3 --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    --rdzv-endpoint "$(hostname):$((10000 + SLURM_JOB_ID % 20000))" \
    "$code" --resume --output "$output" "$@" & # this shell, so hostname, is on the first machine
# USR1 ends the first `wait` early: a second one follows. Once srun is over, both have its status.
wait $! || wait $! || failed=$?
# Preemption with a GraceTime: srun ends first, and Slurm requeues no job that has ended. So do it.
if [[ ${failed:-} && $(scontrol show job "$task") = *PreemptTime=[0-9]* ]]; then requeue || true; fi
exit "${failed:-0}"
