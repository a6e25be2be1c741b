"""Scripts for GPUs, on CPUs, and those who start them: what ddp_check does with either.

Lines of scripts are run in forks of this process, which is told nothing else."""

import gc
import os
import re
import shlex
import signal
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import finish, free_port, some_fast, start
from same_text import ROOT
from test_ddp_check_command import COMMAND

import ddp_check
from ddp_check import cpu, launchers, runs, script
from ddp_check.command import parser

START = """\
import os, sys, threading
import torch, torch.distributed as dist
from datetime import timedelta
from torch import nn
from torch.utils.data import DataLoader
def use(thread): done.append(torch.ones(2).cuda())
attend = nn.functional.scaled_dot_product_attention
DDP, one = nn.parallel.DistributedDataParallel, torch.ones(1, 2)
"""
# As they stand in public scripts, each of which must do what it does on a GPU.
LINES = """
assert torch.cuda.is_available() and torch.cuda.device_count() == 2
assert torch.accelerator.is_available() and torch.accelerator.current_accelerator().type == "cuda"
assert torch.zeros(2).cuda().is_cuda and torch.zeros(2).to("cuda:1").sum() == 0
torch.zeros(2).to(0), torch.zeros(2).to(device=1), torch.zeros(2, device=0), torch.ones(2).cuda(1)
torch.zeros(2, device=torch.device("cuda", 1)).new_ones(3, device="cuda")
x = torch.ones(4, 4)[:, :2]; x.to("cuda").view(-1), x.cuda().view(-1), x.to(device=0).view(-1)
torch.eye(2).to_sparse_csr().cuda(), torch.eye(2).to_sparse().to("cuda")
assert one.expand(2, 2).T.contiguous().T.cuda().stride() == (1, 2)
torch.as_tensor([1.0], device="cuda") + torch.arange(3, device="cuda")[:1]
nn.Linear(2, 2, device="cuda").to(0), nn.Linear(2, 2).cuda(1).to("cuda").to(device=1)
torch.cuda.set_device(1); assert torch.cuda.current_device() == 1
torch.cuda.set_device("cuda:1"); assert torch.accelerator.current_device_index() == 1
torch.accelerator.set_device_index(1); torch.accelerator.synchronize()
torch.set_default_device("cuda"); assert torch.zeros(2).sum() == 0
torch.set_default_tensor_type("torch.cuda.FloatTensor"); nn.Linear(2, 2)(torch.zeros(1, 2))
with torch.device("cuda"): assert nn.Linear(2, 2)(torch.zeros(1, 2)).shape == (1, 2)
torch.set_default_device(0); assert torch.zeros(2).sum() == 0
torch.set_default_device("meta"); assert torch.zeros(2).is_meta
torch.set_default_tensor_type(torch.DoubleTensor); assert "Double" in torch.zeros(2).type()
assert torch.zeros(2).type(torch.cuda.LongTensor).dtype == torch.int64
assert torch.zeros(2).type("torch.cuda.HalfTensor").dtype == torch.float16
assert torch.histc(torch.tensor([0, 1, 1, 4], device="cuda"), 5, 0, 4).tolist() == [1, 2, 0, 0, 1]
torch.histc(input=torch.ones(2))
g = torch.Generator(device="cuda").manual_seed(1); torch.randn(2, device="cuda", generator=g)
torch.cuda.manual_seed_all(1); torch.cuda.set_rng_state(torch.cuda.get_rng_state())
assert len(torch.cuda.get_rng_state_all()) == len(torch.cuda.default_generators) == 2
s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream()); torch.zeros(2).record_stream(s)
with torch.cuda.Stream() as s: s.synchronize()
with torch.cuda.stream(torch.cuda.Stream(priority=-1)): torch.zeros(2).cuda(non_blocking=True)
import copy; a = torch.cuda.Event(); assert type(copy.deepcopy(a)) is torch.cuda.Event
a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(); a.record(); a.elapsed_time(b) / 1e3
with torch.cuda.device(1): torch.cuda.synchronize(); torch.cuda.empty_cache()
assert torch.cuda.max_memory_allocated() / 2**20 + torch.cuda.memory_reserved(0) == 0
free, total = torch.cuda.mem_get_info(); assert free and torch.cuda.memory_stats()["a.b"] == 0
p = torch.cuda.get_device_properties(0); assert p.total_memory and p.name
assert torch.cuda.get_device_capability() >= (8, 0) and torch.cuda.is_bf16_supported()
with torch.cuda.nvtx.range("a"): torch.cuda.nvtx.mark("b")
torch.cuda.profiler.start(); torch.cuda.cudart().cudaProfilerStart(); torch.cuda.init()
scaler = torch.cuda.amp.GradScaler(); scaler.scale(torch.ones(1, requires_grad=True)).backward()
with torch.autocast("cuda", torch.bfloat16), torch.cuda.amp.autocast(): torch.ones(2, 2).cuda()
assert next(iter(DataLoader([1.0], pin_memory=True, pin_memory_device="cuda"))) == 1
assert torch.zeros(2, pin_memory=True).sum() == 0
assert torch.zeros(2).pin_memory().to("cuda", non_blocking=True).shape == (2,)
torch.save(torch.ones(2), "a"); torch.load("a", map_location="cuda:0"), torch.load("a", "cuda")
torch.save(torch.ones(2), "a"); torch.load("a", map_location={"cuda:0": "cuda:1"})
torch.save(torch.ones(2), "a"); assert torch.load("a", map_location="meta").is_meta
torch.save(torch.ones(2), "a"); torch.load("a", map_location=lambda storage, _: storage.cuda(1))
t = threading.Thread(target=lambda: done.append(torch.ones(2).cuda())); t.start(); t.join(); done[0]
t = type("T", (threading.Thread,), {"run": use})(); t.start(); t.join(); done[0]
with nn.attention.sdpa_kernel(nn.attention.SDPBackend.CUDNN_ATTENTION): attend(*torch.ones(3, 1, 2))
nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2)).cuda()(torch.randn(3, 2))
dist.new_group([0], timedelta(1), "nccl"); dist.new_group(backend="nccl", pg_options=options)
nn.SyncBatchNorm(2).cuda()(torch.randn(3, 2).cuda())
dist.barrier(async_op=True).wait(); dist.barrier(device_ids=[0])
dist.all_reduce(torch.ones(2).cuda(), dist.ReduceOp.AVG)
dist.broadcast_object_list([1], 0, device=torch.device("cuda", 0))
nn.parallel.DistributedDataParallel(nn.Linear(2, 2).cuda(), device_ids=[1], output_device=1)
at = [torch.device("cuda", 1)]; m = DDP(nn.Linear(2, 2), at); assert [*m.device_ids] == [1]; m(one)
nn.DataParallel(nn.Linear(2, 2), device_ids=[0, 1]).cuda()(torch.zeros(1, 2))
torch.utils.checkpoint.checkpoint(nn.Linear(2, 2).cuda(), torch.ones(1, 2), use_reentrant=False)
dist.device_mesh.init_device_mesh("cuda", (1,))
import torch._dynamo
torch.optim.AdamW(nn.Linear(2, 2).cuda().parameters(), fused=True).step()
"""
GROUP = """\
options = dist.ProcessGroupNCCL.Options()
dist.init_process_group(
    "nccl", init_method="file://FILE", rank=0, world_size=1, timeout=timedelta(minutes=1),
    device_id=torch.device("cuda", 0), pg_options=options)
"""


def in_fork(function, *words):
    """Its exit status."""
    pid = os.fork()
    if pid == 0:
        status = 1
        gc.freeze()  # as child() does
        signal.alarm(60)  # a line that hangs
        try:
            status = function(*words) or 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def run_line(text, is_library=False):
    path = Path("site-packages/library.py" if is_library else "script.py").resolve()
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    script.START = os.getcwd()
    script.own_file.cache_clear()
    cpu.install(SimpleNamespace(cpu=False, nproc=2, run="all"))
    exec(compile(text, str(path), "exec"), {"done": []})


def test_lines(work):
    """All in one test, as each is a fork."""
    failed = []
    for line in LINES.strip().splitlines():
        group = GROUP.replace("FILE", str(Path("store").resolve()))
        text = START + (group if re.search(r"dist\.|Data|DDP", line) else "") + line
        if in_fork(run_line, text):
            failed.append(line)
        Path("store").unlink(missing_ok=True)
    assert not failed, "\n".join(failed)


def said_of(text):
    said = []
    cpu.install(SimpleNamespace(cpu=False, nproc=2, run="all"), said.append)
    exec(text, {"torch": torch, "at": torch.device("cuda", 1)})
    return [cpu.WHAT] != said[:1] or set(said) != {cpu.WHAT}


def test_it_is_said():
    """Whichever way a script asks for a GPU, the report says that it ran on CPUs."""
    for text in "torch.ones(2).cuda()", "torch.ones(2, device=at)", "torch.ones(2).to(at)":
        assert in_fork(said_of, text) == 0, text
    assert in_fork(said_of, "torch.ones(2).to('cpu')") == 1


def asks_for(error):
    cpu.install(SimpleNamespace(cpu=False, nproc=2, run="all"))
    return int(cpu.needs_gpu(error))


def test_what_needs_a_gpu():
    """What is not imitated; not what this version of torch has under another name."""
    assert in_fork(asks_for, RuntimeError("CUDA error: no device")) == 1
    size = "ProcessGroupGloo::scatter: invalid tensor size at index 0 (expected (16), got (8))"
    assert in_fork(asks_for, RuntimeError(size)) == 0  # the script's own
    assert in_fork(asks_for, TypeError("got an unexpected keyword argument 'use_cuda'")) == 0
    # Nor where a script refuses to be one process.
    assert in_fork(asks_for, AssertionError("Cannot train with DDP on a single gpu.")) == 0
    assert in_fork(asks_for, RuntimeError("this kernel needs at least one GPU")) == 1


def test_libraries_get_the_truth(work):
    text = "import torch\nassert not torch.cuda.is_available() and not torch.cuda.device_count()"
    assert in_fork(run_line, text, True) == 0
    assert in_fork(run_line, text) == 1


STARTED = """\
import os, torch
from torch import nn
from torch.distributed import init_process_group  # before it is replaced
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def main(rank, world):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(PORT + world)}
    torch.cuda.set_device(rank)
    init_process_group("nccl", rank=rank, world_size=world)
    data = TensorDataset(torch.arange(128.).view(32, 4).sin(), torch.arange(32.).view(32, 1).cos())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 8 // world, sampler=sampler, pin_memory=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).to(rank)
    ddp = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    for x, y in loader:
        x, y = x.to(rank, non_blocking=True), y.cuda(rank)
        LINE
        loss = (ddp(x) - y).square().mean()
        optimizer.zero_grad(); loss.backward(); optimizer.step()

if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit("no GPU")
    world = torch.cuda.device_count()
    torch.multiprocessing.spawn(main, (world,), nprocs=world)
"""
ENDS = {  # {a line in the training loop: what is said, and the exit status}
    "pass": ("nothing WRONG", 0),
    "pool = torch.cuda.MemPool()": ("needs a GPU: ", 2),
    "torch.distributed.reduce_scatter_tensor(y[0], y[:world], async_op=True).get_future()": (
        "needs a GPU: ",
        2,
    ),
}


@pytest.mark.parametrize("line", some_fast(ENDS, "pool = torch.cuda.MemPool()"))
def test_started_by_the_number_of_gpus(work, line):
    """Without a flag; and what is not imitated is named, with its line."""
    Path("train.py").write_text(STARTED.replace("PORT", str(free_port())).replace("LINE", line))
    words, status = ENDS[line]
    statuses, text = finish(start(COMMAND, "train.py", processes=0, TMPDIR=os.getcwd()))
    assert statuses == [status] and words in text, text
    assert status == 0 or f": {line}\n  needs a GPU" in text, text


# What is typed behind ddp_check: the script, its flags, and whether it is a module; or what is said
TYPED = {
    "train.py --lr 1": ("train.py", ["--lr", "1"], False),
    "torchrun --standalone --nproc-per-node 4 train.py --lr 1": ("train.py", ["--lr", "1"], False),
    "/bin/torchrun --nnodes=2 --rdzv_endpoint h:1 -m a.train -m": ("a.train", ["-m"], True),
    "python -u -W ignore train.py -u": ("train.py", ["-u"], False),
    "python3.11 -m a.train": ("a.train", [], True),
    "python -m torch.distributed.run --nproc_per_node=gpu train.py": ("train.py", [], False),
    "python -m torch.distributed.launch --nproc_per_node=8 train.py --lr 1": (
        "train.py",
        ["--local_rank={rank}", "--lr", "1"],
        False,
    ),
    "-m torch.distributed.launch --use-env train.py": ("train.py", [], False),
    "srun --ntasks=2 python train.py --lr 1": ("train.py", ["--lr", "1"], False),
    "mpirun -np 4 -x A=1 /bin/python3 -m a.train": ("a.train", [], True),
    "srun train.sh": "without srun: python ddp_check my_script.py --its --flags",
    "deepspeed --num_gpus 2 train.py --lr 1": "ddp_check train.py --lr 1 --local_rank {rank}",
    "train.ipynb --lr 1": "--to script train.ipynb, then python ddp_check train.py --lr 1",
    "python -c pass": "write it to a file",
    "python": "which script?",
    "python -m": "which script?",
    "torchrun --nproc-per-node": "is this the launcher's command?",
}


def test_launchers(work):
    Path("train.py").write_text('parser.add_argument("--local_rank", type=int)')
    for typed, expected in TYPED.items():
        args = parser.parse_args(shlex.split(typed))
        if isinstance(expected, str):
            with pytest.raises(launchers.NotSure, match=re.escape(expected)) as error:
                launchers.without_launcher(args)
            assert ("{rank}" in str(error.value)) == ("deepspeed" in typed)
        else:
            launchers.without_launcher(args)
            assert (args.script, args.flags, bool(args.m)) == expected, typed


@pytest.mark.parametrize(
    "text, flags, says",
    [
        ('add_argument("--local_rank")', "--lr 1", "train.py --lr 1 --local_rank {rank}"),
        ('add_argument("--local-rank")', "", "train.py --local-rank {rank}"),
        ('add_argument("--local_rank")', "--local_rank {rank}", ""),
        ('add_argument("--local_rank"); environ["LOCAL_RANK"]', "", ""),
        ('add_argument("--rank", type=int, required=True)', "", "train.py --rank {rank}"),
        ('add_argument("--rank", default=-1); add_argument("--lr", required=True)', "", ""),
    ],
)
def test_local_rank_is_proposed(work, text, flags, says):
    Path("train.py").write_text(text)
    args = parser.parse_args(["train.py", *flags.split()])
    proposal = launchers.proposal(args, ["train.py"])
    assert proposal.endswith(says) and bool(proposal) == bool(says)
    args.m = True
    assert ("ddp_check -m train.py" in launchers.proposal(args, ["train.py"])) == bool(says)


def test_environment_of_launchers(monkeypatch):
    """Each process has its own rank and their number, also inside of an allocation of one task."""
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    values = runs.environment(1, 2, 20_000)
    for names, value in {
        "RANK LOCAL_RANK SLURM_PROCID SLURM_LOCALID OMPI_COMM_WORLD_RANK PMI_RANK": "1",
        "WORLD_SIZE SLURM_NTASKS SLURM_NPROCS OMPI_COMM_WORLD_SIZE PMI_SIZE MPI_LOCALNRANKS": "2",
        "SLURM_NNODES GROUP_WORLD_SIZE": "1",
        "SLURM_NODEID": "0",
        "SLURM_JOB_NODELIST SLURM_NODELIST": "node7",
    }.items():
        assert {name: values[name] for name in names.split()} == dict.fromkeys(names.split(), value)
    assert "SLURM_JOB_ID" not in values


def test_version(capsys):
    with pytest.raises(SystemExit):
        parser.parse_args(["--version"])
    assert capsys.readouterr().out == f"ddp_check {ddp_check.__version__}\n"
    assert f"(this page: {ddp_check.__version__})" in (ROOT / "docs/your_loop.md").read_text()
