"""The pages are true: commands run, links hold, examples train, recipes do what they say."""

import re
import runpy
import shlex
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
import torch
import train
from helpers import COMPLETE, ROOT, run
from torch.distributed.run import get_args_parser

FOLDERS = [ROOT, *(ROOT / name for name in ("docs", "complete", "large", "slurm", "benchmarks"))]
PAGES = {path: path.read_text() for folder in FOLDERS for path in sorted(folder.glob("*.md"))}
README = PAGES[ROOT / "README.md"]
CHINESE = PAGES[ROOT / "README.zh-CN.md"]
MACHINES = PAGES[ROOT / "docs" / "several_machines.md"]
YOUR_LOOP = PAGES[ROOT / "docs" / "your_loop.md"]
EXPLAINED = PAGES[ROOT / "docs" / "ddp_explained.md"]
SECTIONS = re.split(r"^##+ ", YOUR_LOOP, flags=re.M)  # each begins with its title
CODE = re.compile(r"^```(\w*) ?(.*)\n((?:.*\n)*?)```$", re.M)  # language, scripts, content
SCRIPT = (
    r"((?:(?:complete|large|own_loop)/)?"
    r"(?:train(?:_\w+)?|pack_images|predict|prepare_texts|before|after)\.py)"
)
STARTS = re.compile(rf"(?:[A-Z_]+=\S* )*(?:torchrun (.*? )?|python3? |.*/python ){SCRIPT}(.*)")


def blocks(text, language):
    return [content for found, _, content in CODE.findall(text) if found == language]


def commands(text):
    """Those that start a script of ours, of a page's blocks and within its sentences."""
    lines = [line.strip() for line in "".join(blocks(text, "sh")).splitlines()]
    lines += [line[2:] for line in "".join(blocks(text, "console")).splitlines() if line[:1] == "$"]
    lines += re.findall(r"`([^`\n]+)`", CODE.sub("", text))
    found = [(line, STARTS.match(line)) for line in lines]
    return [line for line, match in found if match and match[2] != "train.py"]  # a user's


def test_pages():
    """Each link leads to a file, and to a heading; each command that names a script of ours is one
    that `commands` finds; what "```python train_dp.py" begins stands so in this script."""
    plain, wrong = {page: CODE.sub("", text) for page, text in PAGES.items()}, []
    for page, text in PAGES.items():
        for target in re.findall(r"\]\((?!https://)([^)]+)\)", plain[page]):
            path, _, anchor = target.partition("#")
            path = (page.parent / path).resolve() if path else page
            if not path.exists():
                wrong.append((page, target))
                continue
            titles = re.findall(r"^#+ (.*)", plain[path].lower() if anchor else "# ", re.M)
            titles = [re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles]
            wrong += [(page, target)] * (anchor not in titles)
        for name, content in [(name, content) for _, name, content in CODE.findall(text) if name]:
            wrong += [(page, content)] * (f"\n{content}" not in (ROOT / name).read_text())
        for line in map(str.strip, "".join(blocks(text, "sh")).splitlines()):
            known = re.match("(srun|docker|apptainer|git|cp) ", line) or STARTS.match(line)
            if re.search(rf"(?<![/\w]){SCRIPT}", line):
                wrong += [(page, line)] * (not known)
    assert not wrong, "\n".join(f"{page.relative_to(ROOT)}: {what}" for page, what in wrong)


def test_sections_of_ddp_check():
    """Each section that ddp_check names is on its page."""
    text = "".join(path.read_text() for path in (ROOT / "ddp_check").rglob("*.py"))
    titles = re.findall(r"^#+ (.*)", CODE.sub("", YOUR_LOOP).lower(), re.M)
    named = set(re.findall(r'(?:"|\{PAGE\})#([a-z][a-z0-9-]+)"', text))
    assert len(named) > 5 and named <= {title.replace(" ", "-") for title in titles}


def test_chinese():
    """README.zh-CN.md has README.md's code, to the letter but for comments, and its links."""
    english, chinese = (re.sub(r" +# .*", "", text) for text in (README, CHINESE))
    assert CODE.findall(chinese) == CODE.findall(english)
    links = [re.findall(r"\]\((?!#)([^)#]+)", text) for text in (README, CHINESE)]
    assert set(links[0]) - {"README.zh-CN.md"} == set(links[1]) - {"README.md"}


def test_commands(monkeypatch):
    """torchrun and the script know the flags of each command, and complete/train.py does not refuse
    them on four GPUs."""
    modules, wrong = {}, []
    monkeypatch.setattr(train.dist, "get_world_size", lambda: 4)
    for page, line in [(page, line) for page, text in PAGES.items() for line in commands(text)]:
        torchrun, name, flags = STARTS.match(line.replace('"$R"', "0")).groups()
        if name not in modules:
            modules[name] = runpy.run_path(str(ROOT / name))
        flags = shlex.split(flags, comments=True)
        try:
            get_args_parser().parse_args([*(torchrun or "").split(), name])
            if "parser" in modules[name]:
                args = modules[name]["parser"].parse_args(flags)
            else:
                monkeypatch.setattr("sys.argv", [name, *flags])
                args = modules[name]["parse_args"]()
        except SystemExit:
            wrong.append((page, line))
            continue
        if name == COMPLETE and (message := train.check_flags(args)):
            wrong.append((page, f"{line}: {message}"))
    assert not wrong, "\n".join(f"{page.relative_to(ROOT)}: {what}" for page, what in wrong)


@pytest.mark.slow
def test_first_command():
    """Its last line is as README.md shows it, but for the speed."""
    [command] = re.findall(r"train_single\.py (.*)", "".join(blocks(README, "sh")))
    text = run("single", *command.split(), "--workers", 0)  # torch warns of more than cores
    shown, printed = (
        re.findall(r"epoch 0: loss (\S+) accuracy (\S+)", x)[-1] for x in (README, text)
    )
    assert [*map(float, printed)] == pytest.approx([*map(float, shown)], abs=2e-3)


@pytest.mark.slow
def test_my_own_images(data):
    """README.md's three commands, the second once more, and what it says to add if memory is full.
    Some flags take minutes on a CPU, or download weights; of the others, the last value counts."""
    shutil.copytree(data / "pictures" / "train", "my_images")
    shutil.copytree(data / "pictures" / "test", "new_photos")
    [lines] = [x.splitlines() for x in blocks(README, "sh") if "pack_images" in x]
    pack, fine_tune, predict = [STARTS.match(line).groups() for line in lines]
    [more] = re.findall(r"`(--accumulate \d)`", README)
    run(pack[1], *pack[2].split(), processes=0)
    flags = re.sub("--(amp|pretrained)", "", fine_tune[2]).split()
    flags += ["--model", "resnet18", "--image-size", 32, "--batch-size", 16, "--workers", 0]
    run(COMPLETE, *flags, "--epochs", 1, processes=2)
    text = run(COMPLETE, *flags, "--epochs", 2, *more.split(), processes=2)
    assert "runs/mine: 1 epochs and 0 steps are done" in text
    run(predict[1], *predict[2].split(), processes=0)
    assert len(Path("predictions.csv").read_text().splitlines()) == 1 + 3


CLOUDS = {  # what a service tells a machine of two; the machine's number, and the first's address
    "SkyPilot": (
        {"NUM_NODES": "2", "NODE_RANK": "1", "NODE_IPS": "10.0.0.1\n10.0.0.2"},
        (1, "10.0.0.1"),
    ),
    "AWS Batch": (
        {"NUM_NODES": "2", "NODE_INDEX": "1", "MAIN_NODE_PRIVATE_IPV4_ADDRESS": "10.0.0.1"},
        (1, "10.0.0.1"),
    ),
    "AWS Batch: the first": ({"NUM_NODES": "2", "NODE_INDEX": "0"}, (0, "127.0.0.1")),
}


@pytest.mark.parametrize("service", CLOUDS)
def test_clouds(service):
    """docs/several_machines.md: a service's names for N, R and A say which machine it is."""
    told, place = CLOUDS[service]
    prefix = "AWS_BATCH_JOB_" if "AWS" in service else "SKYPILOT_"
    [command] = re.findall(r'^torchrun .*"\$N".*', MACHINES, re.M)
    [cells] = re.findall(rf"^\| .* `(\${prefix}.*)` \| `(.*)` \| `(.*)` \|$", MACHINES, re.M)
    lines = [f"{name}={cell}" for name, cell in zip("NRA", cells)]
    lines += ['torchrun() { printf "%s\\n" "$@"; }', command]
    text = "\n".join(lines).replace("\\|", "|")
    told = {prefix + name: value for name, value in told.items()}
    words = subprocess.check_output(["bash", "-euc", text], env=told, text=True).splitlines()
    args = get_args_parser().parse_args(words)
    assert (args.nnodes, args.node_rank, args.master_addr) == ("2", *place)


# ---- Examples ------------------------------------------------------------------------------------
FULL_BATCH = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
epochs, loss_function, Model = 3, nn.MSELoss(), lambda: nn.Linear(4, 2)
train_set = TensorDataset(torch.randn(256, 4), torch.randn(256, 2))
"""


def loop(sign, *changes):
    """One side of README.md's first diff as a script for CPUs, with these changes."""
    [diff] = blocks(README, "diff")
    lines = [line[1:] for line in diff.splitlines() if line[:1] in (" ", sign)]
    code = "\n".join(line for line in lines if "cuda.set_device" not in line)
    for old, new in ('"cuda', '"cpu'), ('"nccl"', '"gloo"'), *changes:
        assert old in code or sign == "-", old
        code = code.replace(old, new)
    return FULL_BATCH + code


def test_fourteen_lines():
    """README.md's diff adds fourteen lines, with which the loop trains on two ranks to the same
    weights. docs/your_loop.md has the same, without comments."""
    added = [line.partition("  #")[0] for line in blocks(README, "diff")[0].splitlines()]
    added = [line for line in added if line[0] == "+"]
    assert len(added) == 14 and added == blocks(YOUR_LOOP, "diff")[0].splitlines()
    for sign, output, processes in ("-", "old.pt", 0), ("+", "new.pt", 2):
        Path("loop.py").write_text(loop(sign, ("model.pt", output)))
        run(Path("loop.py").resolve(), processes=processes)
    old, new = torch.load("old.pt"), torch.load("new.pt")
    assert all(torch.allclose(old[name], new[name], atol=1e-6) for name in old)


@pytest.mark.slow
def test_what_ddp_check_prints():
    """README.md's report, but for numbers, is that of its lines without set_epoch, and with a loss
    that is divided by world_size."""
    divided = "loss.backward()", "(loss / dist.get_world_size()).backward()"
    text = loop("+", ("    sampler.set_epoch(epoch)", ""), divided).replace("(256,", "(2560,")
    Path("my_script.py").write_text(text)
    [report] = blocks(README, "console")
    numbers = re.compile(r"\d+(\.\d+)?")
    text = run("tests/check_by_fork.py", "my_script.py", processes=0, status=1)
    printed = [numbers.sub("#", line) for line in text.splitlines()]
    shown = [numbers.sub("#", line) for line in report.splitlines()[1:] if line != "..."]
    assert len(shown) > 3 and all(line in printed for line in shown), text


def without_comments(text):
    lines = [line.partition("  # ")[0] for line in text.splitlines()]
    return [line for line in lines if line.strip() and not line.strip().startswith("#")]


def test_diff():
    """docs/ddp_explained.md shows all of `main`'s, without comments, in order; each - may stand
    beside its +. Other lines are those of both scripts, or "..."."""
    shown = "".join(blocks(EXPLAINED, "diff")).splitlines()
    mains = []
    for name in "single", "ddp_torchrun":
        text = (ROOT / f"train_{name}.py").read_text()
        mains.append(
            without_comments(re.search(r"^def main\(.*?(?=^@torch)", text, re.M | re.S)[0])
        )
        Path(name).write_text("\n".join(mains[-1]) + "\n")
    words = ["git", "diff", "--no-index", "-w", "-U0", "single", "ddp_torchrun"]
    real = subprocess.run(words, capture_output=True, text=True).stdout.splitlines()[4:]
    for sign in "-", "+":
        both = [[x for x in lines if x[:1] == sign != x] for lines in (shown, real)]
        assert both[0] == both[1]
    common = [line[1:].strip() for line in shown if line[:1] not in "-+"]
    for main in mains:
        assert set(common) - {"..."} <= {line.strip() for line in main}


LOOP = """
import os, random
import numpy
import torch
import torch.distributed as dist, torch.nn.functional as F
from contextlib import nullcontext
from copy import deepcopy
from datetime import timedelta
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.data import (
    BatchSampler, DataLoader, DistributedSampler, Subset, TensorDataset, WeightedRandomSampler
)

dist.init_process_group(timeout=timedelta(seconds=100))
rank, world_size = dist.get_rank(), dist.get_world_size()
communicated = []


class Draws:
    def __len__(self):
        return 1

    def __getitem__(self, i):
        return torch.tensor([random.random(), numpy.random.rand()])


def of_all(*things):
    found, own = [None] * world_size, [torch.as_tensor(thing).tolist() for thing in things]
    dist.all_gather_object(found, own)
    return found


def alike(*things):
    found = of_all(*things)
    assert found[0] == found[1], found


def step_by_hand(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.data -= 0.1 * parameter.grad / world_size


def counted(state, bucket):
    communicated.append(bucket)
    return allreduce_hook(None, bucket)


def new(model):
    torch.manual_seed(rank)
    ddp = nn.parallel.DistributedDataParallel(model)
    ddp.register_comm_hook(None, counted)
    communicated.clear()
    return ddp, torch.optim.SGD(model.parameters(), 0.1)
"""
IOU = "(classes * masks.long() + predicted).flatten().bincount(minlength=classes**2)"
OWN = {  # of docs/your_loop.md: what comes before a section's code, and what is true after
    "The checklist": (
        "random.seed(0), numpy.random.seed(0)\n"
        "found = of_all(*DataLoader(Draws(), num_workers=1, multiprocessing_context='fork'))\n"
        "assert all(a != b for a, b in zip(*(own[0] for own in found))), found\n"
        "classes, shape = 20, (3, 9, 9)\n"
        "both = [torch.randint(20, (2, *shape)).byte() for _ in range(5)]\n"
        "dist.broadcast_object_list(both)\n"
        "confusion = 0\n"
        "for predicted, masks in both[:4] if rank == 0 else both[4:]:\n"
        f"    confusion += {IOU}",
        "dist.all_reduce(confusion)\n"
        "hits = confusion.view(classes, classes).diag()\n"
        "x, y = torch.cat(both, 1)\n"
        "assert hits.tolist() == [((x == i) & (y == i)).sum().item() for i in range(classes)]\n"
        "assert confusion.sum() == x.numel()",
    ),
    "Scores": (
        "test_set = TensorDataset(torch.randn(7, 2), torch.arange(7.0) ** 2)\n"
        "score_of_each_image, batch_size, device = lambda outputs, labels: labels, 3, 'cpu'\n"
        "outputs = torch.arange(7.0)[rank::world_size, None] * torch.ones(2)",
        "assert mean == 13, mean\n"  # the mean of the ranks' means is 12.8
        "assert gathered.tolist() == [[i, i] for i in range(7)], gathered",
    ),
    "An optimizer with a closure": (
        "inputs, labels, loss_function = torch.randn(9, 2), torch.randn(9, 1), F.mse_loss\n"
        "optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn='strong_wolfe')",
        "for _ in range(5):\n    optimizer.step(closure)\nalike(closure(), *model.parameters())",
    ),
    "Gradient accumulation": (
        "for i, inputs in enumerate(torch.randn(6, 2, 2)):\n"
        "    step_now = i % 4 == 3 or i == 5\n"
        "    with nullcontext() if step_now else ddp.no_sync():\n"
        "        ddp(inputs).sum().backward()\n"
        "    if step_now:\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()",
        "alike(*model.parameters())\nassert len(communicated) == 2",
    ),
    "A loss that is a mean over what is valid": (
        "outputs, labels = torch.randn(7, 3, requires_grad=True), torch.arange(7) % 3\n"
        "dist.broadcast(outputs.data, 0)\n"
        "mean = F.cross_entropy(outputs[1:], labels[1:])\n"  # rank 1 ignores a sample
        "whole = (7 * F.cross_entropy(outputs, labels) + 6 * mean) / 13\n"
        "labels[:rank] = -100",
        "dist.all_reduce(loss)\nassert torch.isclose(loss / world_size, whole)",
    ),
    "One backward for each forward pass": (
        "inputs, weight = torch.randn(5, 2), 0.5\n"
        "task_loss, other_loss = torch.sum, lambda outputs: outputs.square().sum()\n"
        "outputs = ddp(inputs)\n"
        "task_loss(outputs).backward(retain_graph=True)\n"
        "other_loss(outputs).backward()\n"
        "assert len(set(map(str, of_all(model.weight.grad)))) == 2\n"
        "optimizer.zero_grad()",
        "alike(*(p.grad for p in model.parameters()))",
    ),
    "A GAN": (
        "norm, _ = new(nn.BatchNorm1d(2))\n"
        "norm.broadcast_buffers = False\n"
        "(norm(torch.randn(3, 2)) + norm(torch.randn(3, 2))).mean().backward()\n"
        "critic = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))\n"
        "generator, noise, real = nn.Linear(3, 2), torch.randn(8, 3), torch.randn(8, 2)\n"
        "critic_ddp, critic_optimizer = new(critic)\n"
        "generator_ddp, generator_optimizer = new(generator)\n"
        "both, draw = deepcopy([critic, generator]), torch.rand(8, 1)\n"
        "mixed = real + draw * (generator(noise).detach() - real)\n"
        "[slope] = torch.autograd.grad(\n"
        "    critic_ddp(mixed.requires_grad_()).sum(), mixed, create_graph=True\n"
        ")\n"
        "penalty = 10 * (slope.norm(dim=1) - 1).square().mean()",
        "fake = generator_ddp(noise)\n"
        "generator_loss = -critic(fake).mean()\n"
        "critic_loss = critic_ddp(fake.detach()).mean() - critic_ddp(real).mean()\n"
        "generator_optimizer.zero_grad()\n"
        "generator_loss.backward(inputs=list(generator.parameters()))\n"
        "critic_optimizer.zero_grad()\n"
        "critic_loss.backward()\n"
        "alike(*(p.grad for p in [*critic.parameters(), *generator.parameters()]))\n"
        "generator_loss = -critic(generator_ddp(noise)).mean()\n"
        "critic_loss = critic_ddp(fake.detach()).mean() - critic_ddp(real).mean()\n"
        "generator_loss.backward()\n"
        "critic_optimizer.zero_grad()\n"
        "critic_loss.backward()\n"
        "found = of_all(critic[0].weight.grad)\n"
        "assert found[0] != found[1], found\n"
        "alike(*critic.parameters(), *generator.parameters())\n"
        "own, own_generator = both\n"  # the same step, with gradients averaged by hand
        "fake = own_generator(noise).detach()\n"
        "mixed = (real + draw * (fake - real)).requires_grad_()\n"
        "[slope] = torch.autograd.grad(own(mixed).sum(), mixed, create_graph=True)\n"
        "(10 * (slope.norm(dim=1) - 1).square().mean()).backward()\n"
        "(own(fake).mean() - own(real).mean()).backward()\n"
        "step_by_hand(own)\n"
        "(-own(own_generator(noise)).mean()).backward()\n"
        "step_by_hand(own_generator)\n"
        "for a, b in (critic, own), (generator, own_generator):\n"
        "    for x, y in zip(a.parameters(), b.parameters()):\n"
        "        assert torch.allclose(x, y, rtol=1e-4, atol=1e-6)",
    ),
    "Gradients": (
        "model, inputs = nn.Linear(2, 1), torch.randn(3, 2)\n"
        "model.register_parameter('unused', nn.Parameter(torch.randn(2)))\n"
        "model(inputs).sum().backward()",
        "mean = inputs.sum(0)\ndist.all_reduce(mean)\n"
        "assert torch.allclose(model.weight.grad, mean / world_size)\n"
        "alike(*model.parameters())",
    ),
    "Another sampler, or no DataLoader": (
        "sampler, epoch = WeightedRandomSampler(torch.ones(11), 11), 3\n"
        "train_set, options = range(11), dict(batch_size=None)",
        "found = of_all(*train_loader)\n"
        "assert torch.initial_seed() == 6 + rank\n"
        "torch.manual_seed(epoch)\n"
        "order = list(sampler)\n"
        "assert found == [order[0:10:2], order[1:10:2]], found\n"
        "share = list(BatchSampler(range(8), 2, drop_last=False))[rank::2]\n"
        "found = of_all(*DataLoader(train_set, batch_sampler=share))\n"
        "assert found == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]], found",
    ),
}


def test_own_loop():
    """The code of each section, in two processes whose data differ."""
    assert f"`{IOU}`" in YOUR_LOOP
    [section] = [part for part in SECTIONS if part.startswith("Different numbers of batches\n")]
    stream = "def share(samples):\n" + textwrap.indent(CODE.findall(section)[0][2], "    ")
    stream += "found = of_all(*share(iter(range(7))))\nassert found == [[0, 2, 4], [1, 3, 5]]"
    text = [LOOP, stream]
    for i, (title, (before, after)) in enumerate(OWN.items()):
        [section] = [part for part in SECTIONS if part.startswith(f"{title}\n")]
        codes = [code for language, _, code in CODE.findall(section) if language == "python"]
        lines = ["model = nn.Linear(2, 1)", "ddp, optimizer = new(model)", before, *codes, after]
        text += [f"def section_{i}():", textwrap.indent("\n".join(lines), "    "), f"section_{i}()"]
    Path("loop.py").write_text("\n".join(text) + "\nprint('all of it')\n")
    assert run(Path("loop.py").resolve(), processes=2).count("all of it") == 2
