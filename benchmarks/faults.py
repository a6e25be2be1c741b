"""Silent faults of data parallelism, put into right loops one at a time: what does ddp_check say?

OMP_NUM_THREADS=1 python benchmarks/faults.py            # all; rows of faults.csv, and a summary
OMP_NUM_THREADS=1 python benchmarks/faults.py gan right  # whose loop, kind or name has a word

Each fault is a change to one of loops/: a line or two, as somebody would write it by mistake.
ddp_check runs the changed copy. It has found a fault if it says WRONG or look, and has named it if
such a line of the report has one of the changed lines, or the line where the fault is seen as well
(`shows`). The loops themselves, unchanged, are "right". Processes are forks of
this one, which has imported torch: seconds are without that. A row keeps the commit at which it was
measured. On Linux.
"""

import csv
import linecache
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch._dynamo  # what DDP and optimizers import otherwise in each fork
import torch.distributed.nn
import torch.utils.data
from torch.optim import swa_utils  # noqa: F401

LOOPS = Path(__file__).resolve().parent / "loops"
sys.path.insert(0, str(LOOPS.parents[1]))

from ddp_check import command, pairs, runs  # noqa: E402
from ddp_check import script as check_script  # noqa: E402
from ddp_check import text as check_text  # noqa: E402
from ddp_check.compare.report import as_text  # noqa: E402


@dataclass
class Fault:
    loop: str
    name: str
    old: str
    new: str
    cost: str  # what it does to the training
    kind: str = "new"  # "new": invented before a tool was run on it
    shows: str = ""  # text of a line where it is as well seen as in the changed one


TOGETHER = (
    "        together = [a + b for a, b in zip(project(first, second), project(second, first))]\n"
)

NEW = [
    Fault(
        "segmentation",
        "class weights from the labels of each rank's share",
        "dist.all_reduce(counts)\n",
        "",
        "other weights of classes on each rank",
        shows="class_weights = counts",
    ),
    Fault(
        "segmentation",
        "mean and deviation of each rank's own pixels",
        "dist.all_reduce(sums)\ndist.all_reduce(counts)",
        "dist.all_reduce(counts)",
        "inputs are normalized differently on each rank",
        shows="return (image - self.mean) / self.std, mask",
    ),
    Fault(
        "segmentation",
        "IoU of each rank's own images, averaged over ranks",
        "    dist.all_reduce(confusion)\n    matrix = confusion.view(CLASSES, CLASSES)\n",
        "    matrix = confusion.view(CLASSES, CLASSES)\n",
        "another score; LR and best.pt by it",
        shows="scheduler.step(iou)",
    ),
    Fault(
        "segmentation",
        "random_split seeded differently on each rank",
        "manual_seed(7)",
        "manual_seed(7 + rank)",
        "images of the validation are trained on",
    ),
    Fault(
        "language_model",
        "LR times world_size, though the batch is as before",
        "torch.optim.AdamW(groups, LR)",
        "torch.optim.AdamW(groups, LR * world)",
        "twice the LR",
    ),
    Fault(
        "language_model",
        "schedule counts steps by the rank's samples and the batch over all",
        "math.ceil(len(train_set) // BATCH / ACCUMULATE)",
        "math.ceil(len(sampler) // BATCH / ACCUMULATE)",
        "the LR is 0 after half of the training",
        shows="optimizer.step()",
    ),
    Fault(
        "language_model",
        "an epoch's last, short window is not synchronized",
        "is_last = micro == len(window)",
        "is_last = micro == ACCUMULATE",
        "weights part in the last step of each epoch",
    ),
    Fault(
        "language_model",
        "the number of tokens is reduced after the division",
        "        dist.all_reduce(tokens)\n        for micro",
        "        for micro",
        "each rank's mean over its own tokens",
        shows="loss = loss * world / tokens",
    ),
    Fault(
        "contrastive",
        "targets without the rank's offset among the gathered keys",
        "targets = rank * len(one) + torch.arange(len(one))",
        "targets = torch.arange(len(one))",
        "wrong positives on all ranks but 0",
        shows="loss = info_nce(one",
    ),
    Fault(
        "contrastive",
        "the teacher follows on rank 0 alone",
        "            for old, new in zip(teacher.parameters(), student.parameters()):\n"
        "                old.lerp_(new, 0.1)",
        "            for old, new in zip(teacher.parameters(), student.parameters()):\n"
        "                if rank == 0:\n"
        "                    old.lerp_(new, 0.1)",
        "other ranks' teacher stays as it was",
        shows="mine = F.normalize(teacher(second), dim=1)",
    ),
    Fault(
        "contrastive",
        "the queue gets the rank's own keys only",
        "queue = torch.cat([keys, queue])[:QUEUE]",
        "queue = torch.cat([mine, queue])[:QUEUE]",
        "another queue on each rank, twice as old",
        shows="loss = info_nce(one",
    ),
    Fault(
        "gan",
        "adaptive weight from each rank's own gradients",
        "    dist.all_reduce(gradient)\n    return (gradient / world).norm()",
        "    return gradient.norm()",
        "each rank weights its losses differently",
        shows="weight = gradient_norm",
    ),
    Fault(
        "gan",
        "lazy penalty by the rank's own number of images",
        "images += len(real) * world",
        "images += len(real)",
        "the penalty is half as frequent",
        shows="if images // PENALTY_EVERY > penalties:",
    ),
    Fault(
        "detection",
        "moving mean of the rank's own number of positives",
        "        dist.all_reduce(positives)\n        usual = 0.9",
        "        usual = 0.9",
        "each rank divides by another number",
        shows="loss = world * (focal + distance) / usual",
    ),
    Fault(
        "detection",
        "warm-up by the rank's own number of images",
        "images_seen += len(images) * world",
        "images_seen += len(images)",
        "the warm-up is twice as long",
        shows='group["lr"] = LR',
    ),
    Fault(
        "policy",
        "advantages normalized over the rank's own environments",
        "        moments = mean_over_ranks(moments)\n",
        "",
        "another scale on each rank",
        shows="advantages = (advantages - moments[0]) / deviation",
    ),
    Fault(
        "policy",
        "observations normalized by the rank's own",
        "        dist.all_reduce(new)\n",
        "",
        "each rank's policy sees other numbers for one state",
        shows="return (states - mean) / (variance + 1e-2).sqrt()",
    ),
    Fault(
        "policy",
        "adaptive coefficient by the rank's own divergence",
        "spread = mean_over_ranks(divergence)",
        "spread = divergence.detach()",
        "another loss on each rank",
        shows="coefficient *= 1.5",
    ),
    Fault(
        "multitask",
        "curriculum by the mean loss of the rank's own share",
        "        average([usual])\n",
        "",
        "other samples are left out",
        shows="easy = (per_sample",
    ),
    Fault(
        "multitask",
        "conflicting gradients are projected before they are averaged",
        f"        average([*first, *second, *gradients])\n{TOGETHER}",
        f"{TOGETHER}        average([*together, *gradients])\n",
        "another direction of the step",
        shows="return [a - torch.clamp(dot / size",
    ),
    Fault(
        "multitask",
        "the weights of the losses are not averaged",
        "average([*first, *second, *gradients])",
        "average([*first, *second, *gradients[:-1]])",
        "each rank has its own weights of the tasks",
        shows="optimizer.step()",
    ),
    Fault(
        "multitask",
        "accuracy: each rank's share counts alike, though one has a sample more",
        "    dist.all_reduce(sums)\n    accuracy = sums[0] / sums[1]",
        "    accuracy = sums[0] / sums[1]\n    average([accuracy])",
        "another score",
        shows='print(f"epoch {epoch}: accuracy',
    ),
]

PORTS = [
    Fault(
        "language_model",
        "loss divided by world_size, too",
        "loss = loss * world / tokens",
        "loss = loss / tokens",
        "half the gradient: clipping and weight decay weigh more",
        "ports",
    ),
    Fault(
        "detection",
        "hook clamps gradients before they are averaged",
        "optimizer = torch.optim.SGD(",
        "model.box.weight.register_hook(lambda g: g.clamp(-0.05, 0.05))\n"
        "optimizer = torch.optim.SGD(",
        "another gradient",
        "ports",
    ),
    Fault(
        "multitask",
        "the hardest quarter of the rank's own share",
        "(easy * per_sample).mean()",
        "per_sample.topk(max(1, len(x) // 4)).values.mean()",
        "other samples are trained on (batch 8: the hardest of 4, twice)",
        "ports",
    ),
    Fault(
        "language_model",
        "twice the epochs, from the rank's number of batches",
        "for epoch in range(EPOCHS):",
        "for epoch in range(EPOCHS * len(train_set) // (len(sampler))):",
        "twice as long a training",
        "ports",
    ),
    Fault(
        "segmentation",
        "a mean by weights of the rank's own pixels: mask / mask.sum()",
        "        dist.all_reduce(total)\n        loss_sum",
        "        total = world * total\n        loss_sum",
        "each rank's mean over its own pixels",
        "ports",
        "loss = world * loss_sum / total",
    ),
    Fault(
        "detection",
        "a sum that is not multiplied by world_size",
        "loss = world * (focal + distance) / usual",
        "loss = (focal + distance) / usual",
        "half the gradient",
        "ports",
    ),
    Fault(
        "detection",
        "all_reduce inside a branch on the rank's own boxes",
        "        dist.all_reduce(positives)\n",
        "        if positives > 8:\n            dist.all_reduce(positives)\n",
        "a hang at the first batch with few boxes on one rank",
        "ports",
    ),
    Fault(
        "contrastive",
        "the center of the keys is a plain attribute, of the rank's own keys",
        "        all_one, all_two = gather(one), gather(two)\n",
        "        center = 0.9 * globals().get('center', 0) + 0.1 * mine.mean(0)\n"
        "        loss = info_nce(one, torch.cat([keys - center, queue]), targets)\n"
        "        all_one, all_two = gather(one), gather(two)\n",
        "another center on each rank",
        "ports",
    ),
    Fault(
        "gan",
        "optimizer from an unsorted set of names",
        "torch.optim.Adam(generator.parameters(), 2e-3",
        "torch.optim.Adam([dict(generator.named_parameters())[n] for n in "
        "{n for n, _ in generator.named_parameters()}], 2e-3",
        "moments are saved in another order: a resume is wrong",
        "ports",
    ),
]

KNOWN = [
    Fault(
        "segmentation",
        "no set_epoch",
        "    sampler.set_epoch(epoch)\n",
        "",
        "the same order in each epoch",
        "known",
        "for images, masks in train_loader:",
    ),
    Fault(
        "language_model",
        "model called without DDP",
        "logits = ddp(words[:, :-1])\n                targets",
        "logits = model(words[:, :-1])\n                targets",
        "gradients are not averaged",
        "known",
        "optimizer.step()",
    ),
    Fault(
        "segmentation",
        "the same random numbers on all ranks",
        "torch.manual_seed(epoch * world + rank)",
        "torch.manual_seed(epoch)",
        "flips and dropout are alike for the first image of each rank",
        "known",
        "flip = torch.rand(len(images)) < 0.5",
    ),
    Fault(
        "gan",
        "no DistributedSampler: each rank trains on all samples",
        "loader = DataLoader(dataset, BATCH // world, sampler=sampler, drop_last=True)",
        "loader = DataLoader(dataset, BATCH // world, shuffle=True, drop_last=True)",
        "N times the steps",
        "known",
        "for (real,) in loader:",
    ),
    Fault(
        "gan",
        "batch size per rank",
        "BATCH // world",
        "BATCH",
        "half the steps",
        "known",
        "for (real,) in loader:",
    ),
    Fault(
        "contrastive",
        "keys are not gathered",
        "keys = gather(mine)",
        "keys = mine",
        "half the negatives",
        "known",
        "loss = info_nce(one",
    ),
    Fault(
        "multitask",
        "the gradient is clipped before it is averaged",
        "        average([*first, *second, *gradients])\n",
        "        scale = torch.clamp(0.2 / nn.utils.get_total_norm(first), max=1)\n"
        "        first = [scale * g for g in first]\n"
        "        average([*first, *second, *gradients])\n",
        "another gradient",
        "known",
    ),
    Fault(
        "detection",
        "a mean over the rank's own boxes",
        "loss = world * (focal + distance) / usual",
        "loss = (focal + distance) / there.sum().clamp(min=1)",
        "each rank's mean over its own number",
        "known",
    ),
    Fault(
        "policy",
        "all ranks' environments have the same noise",
        "torch.manual_seed(1 + rank)",
        "torch.manual_seed(1)",
        "half of the environments are copies",
        "known",
        "states = torch.randn(mine, 4)",
    ),
]
FURTHER = [
    Fault(
        "semisupervised",
        "threshold of pseudo-labels from the rank's own confidence",
        "total, square = reduced(confidence.sum(), confidence.square().sum())\n"
        "        threshold = total / BATCH",
        "threshold = float(confidence.mean())",
        "other samples get pseudo-labels",
        "further",
        "unknown = (y < 0)",
    ),
    Fault(
        "semisupervised",
        "prototypes from the rank's own features",
        "            dist.all_reduce(sums)\n            model",
        "            model",
        "other prototypes on each rank",
        "further",
        "model.prototypes.lerp_",
    ),
    Fault(
        "semisupervised",
        "the backbone thaws by the rank's own number of samples",
        "seen += len(x) * world",
        "seen += len(x)",
        "frozen twice as long",
        "further",
        "features, logits = ddp(x, seen > FROZEN)",
    ),
    Fault(
        "semisupervised",
        "early stopping by the rank's own validation loss",
        "val_sum, count = reduced(sum(losses), len(val_loader.dataset))",
        "val_sum, count = float(sum(losses)), len(val_loader.dataset)",
        "ranks stop at different epochs, or best.pt is another one",
        "further",
        "print(f",
    ),
    Fault(
        "semisupervised",
        "difficulty from the rank's own losses, a plain number",
        "            each.detach()[y >= 0].sum(), (y >= 0).sum(), unknown.sum()\n        )",
        "            each.detach()[y >= 0].sum(), (y >= 0).sum(), unknown.sum()\n        )\n"
        "        known_sum = float(each.detach()[y >= 0].sum()) * world",
        "other weights of pseudo-labels on each rank",
        "further",
        "min(1.0, 1 / difficulty)",
    ),
    Fault(
        "detection",
        "L2 penalty by hand, times world_size",
        "        loss = world * (focal + distance) / usual\n",
        "        loss = world * (focal + distance) / usual\n"
        "        loss = loss + world * 1e-2 * sum(p.square().sum() for p in model.parameters())\n",
        "twice the weight decay",
        "further",
    ),
    Fault(
        "language_model",
        "gradients of the embedding are scaled by the rank's own counts of words",
        "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
        "        counts = window[-1].flatten().bincount(minlength=WORDS).clamp(min=1)\n"
        "        model.words.weight.grad /= counts[:, None].sqrt()\n"
        "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n",
        "weights part over ranks",
        "further",
    ),
    Fault(
        "language_model",
        "label smoothing by the entropy of the rank's own batch",
        "                loss = loss * world / tokens",
        "                peaked = logits.detach().softmax(2).amax(2).mean()\n"
        "                loss = loss * (1 - 0.5 * peaked) * world / tokens",
        "another loss on each rank",
        "further",
    ),
    Fault(
        "contrastive",
        "temperature by the rank's own similarities",
        "targets = rank * len(one) + torch.arange(len(one))\n",
        "targets = rank * len(one) + torch.arange(len(one))\n"
        "        one = one / (one.detach() * mine).sum(1).mean().abs().clamp(min=0.1)\n",
        "another loss on each rank",
        "further",
    ),
    Fault(
        "contrastive",
        "gathered rows without this rank's gradient",
        "    rows[rank] = mine\n",
        "",
        "half of the loss has no gradient",
        "further",
        "pairs = info_nce",
    ),
    Fault(
        "gan",
        "minibatch standard deviation of the rank's own share as a feature",
        "adversarial = -critic(fake).mean()",
        "adversarial = -critic(fake).mean() - 0.1 * fake.std(0).mean()",
        "another loss: of the share",
        "further",
    ),
    Fault(
        "detection",
        "samples are weighted by their share of the rank's boxes",
        "distance = ((found - numbers).abs().sum(1) * there).sum()",
        "share = there.sum((1, 2)) / there.sum().clamp(min=1)\n"
        "        distance = ((found - numbers).abs().sum(1) * there).sum((1, 2))\n"
        "        distance = (distance * share).sum()",
        "another loss",
        "further",
    ),
    Fault(
        "policy",
        "the entropy's weight decays by the rank's own number of states",
        "        loss = coefficient * divergence",
        "        weight = 0.5 / (1 + update * STEPS * len(states) / 10)\n"
        "        loss = weight * (logs.exp() * logs).sum(2).mean() + coefficient * divergence",
        "half as fast a decay",
        "further",
    ),
    Fault(
        "multitask",
        "dynamic weights of tasks from the rank's own losses",
        "        losses = [loss * (-w).exp() + w for loss, w in zip(losses, weights)]\n",
        "        parts = torch.stack(losses).detach().softmax(0)\n"
        "        losses = [part * loss * (-w).exp() + w\n"
        "                  for part, loss, w in zip(parts, losses, weights)]\n",
        "other weights on each rank",
        "further",
    ),
    Fault(
        "multitask",
        "gradients are added up, not averaged",
        "        tensor /= world\n",
        "",
        "twice the gradient (Adam hides it, but not from the projection)",
        "further",
        "dist.all_reduce(tensor)",
    ),
]

LATER = [
    Fault(
        "variational",
        "annealing by the rank's own number of samples",
        "self.seen += len(x) * self.world",
        "self.seen += len(x)",
        "half as fast",
        "later",
        "annealing = min(",
    ),
    Fault(
        "variational",
        "the weight of what is wrong follows the rank's own loss",
        "now = over_ranks(wrong) / self.world",
        "now = float(wrong)",
        "another weight on each rank",
        "later",
        "self.pressure = min(10.0",
    ),
    Fault(
        "variational",
        "samples are scaled by the largest of the rank's own",
        "return over_ranks(sum(tops)) / over_ranks(len(tops))",
        "return sum(tops) / len(tops)",
        "inputs are scaled differently on each rank",
        "later",
        "dataset.scale = largest_of(",
    ),
    Fault(
        "metric",
        "the hardest of the rank's own share",
        "triplets(gather(features), gather(kinds))",
        "triplets(features, kinds)",
        "easier triplets",
        "later",
    ),
    Fault(
        "metric",
        "an outlier by the rank's own loss",
        "        mean = taught.detach() / world\n        dist.all_reduce(mean)\n",
        "        mean = taught.detach()\n",
        "a rank alone weights its loss less",
        "later",
        'if state["usual"] and mean >',
    ),
    Fault(
        "metric",
        "temperature by the teacher's answers to the rank's own samples",
        "    dist.all_reduce(sums)\n    return max(",
        "    return max(",
        "another loss on each rank",
        "later",
        "temperature = softness(",
    ),
]

OBJECTS = [
    Fault(
        "momentum",
        "the keys of a plain object are the rank's own",
        "torch.cat([gather(keys), self.rows])",
        "torch.cat([keys, self.rows])",
        "other keys on each rank",
        "objects",
        "scores = torch.cat(",
    ),
    Fault(
        "momentum",
        "a teacher's momentum by the rank's own loss",
        "float(1 - 0.05 * mean_over_ranks(loss))",
        "float(1 - 0.05 * loss.detach())",
        "another teacher on each rank",
        "objects",
        "targets = F.normalize(teacher",
    ),
    Fault(
        "momentum",
        "samples are counted by each rank",
        "seen += len(batch) * world",
        "seen += len(batch)",
        "twice the steps, and batches overlap",
        "objects",
        "while seen < 3",
    ),
    Fault(
        "momentum",
        "the order of the samples is not broadcast",
        "dist.broadcast(order, 0)\n",
        "",
        "some samples twice, others not at all",
        "objects",
        "order = torch.randperm",
    ),
]

TASKS = """\
body = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
heads = nn.ModuleList([nn.Linear(32, 3), nn.Linear(32, 1)])
weights = nn.Parameter(torch.zeros(2))  # log of the variance of each task
shared, own = list(body.parameters()), [*heads.parameters(), weights]
"""

PRIVATE = [  # random numbers, samples and files of each rank's own
    Fault(
        "contrastive",
        "a teacher is copied before DDP sends rank 0's weights",
        "torch.manual_seed(0)\nstudent",
        "torch.manual_seed(rank)\nstudent",
        "another teacher on each rank, and another queue",
        "private",
        "teacher = encoder()",
    ),
    Fault(
        "multitask",
        "weights are not broadcast, nor seeded alike",
        f"torch.manual_seed(0)\n{TASKS}"
        "for parameter in shared + own:\n    dist.broadcast(parameter.data, 0)\n",
        TASKS,
        "another model on each rank",
        "private",
        "body = nn.Sequential",
    ),
    Fault(
        "momentum",
        "a layer is drawn again after DDP has sent rank 0's",
        "torch.manual_seed(0)\n"
        "student = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6))\n"
        "ddp = nn.parallel.DistributedDataParallel(student)\n",
        "torch.manual_seed(rank)\n"
        "student = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6))\n"
        "ddp = nn.parallel.DistributedDataParallel(student)\n"
        "student[2].reset_parameters()\n",
        "another model on each rank",
        "private",
    ),
    Fault(
        "contrastive",
        "noise is added to the weights",
        "            queue = torch.cat([keys, queue])[:QUEUE]\n",
        "            queue = torch.cat([keys, queue])[:QUEUE]\n"
        "            for weights in student.parameters():\n"
        "                weights.add_(torch.randn_like(weights), alpha=1e-3)\n",
        "the ranks' weights part",
        "private",
    ),
    Fault(
        "momentum",
        "data is drawn without a seed",
        "samples = torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(1))",
        "samples = torch.randn(SAMPLES, 6)",
        "each rank trains on data of its own",
        "private",
    ),
    Fault(
        "segmentation",
        "random_split without a seed",
        "random_split(dataset, [40, 12], generator=split)",
        "random_split(dataset, [40, 12])",
        "images of the validation are trained on",
        "private",
    ),
    Fault(
        "multitask",
        "the ranks' shares leave out a test sample",
        "range(rank, len(val_set), world)",
        "range(rank * (len(val_set) // world), (rank + 1) * (len(val_set) // world))",
        "another score",
        "private",
        "for x, y, _ in val_loader",
    ),
    Fault(
        "multitask",
        "a batch is taken by next(iter(loader))",
        "    for x, y, z in train_loader:\n",
        "    for _ in range(len(train_loader)):\n        x, y, z = next(iter(train_loader))\n",
        "an epoch has one batch, again and again",
        "private",
    ),
    Fault(
        "multitask",
        "steps are counted by the number of ranks",
        "        optimizer.step()\n",
        "        optimizer.step()\n"
        "        number = globals().get('number', 0) + world\n"
        "        optimizer.param_groups[0]['lr'] = 1e-2 * min(1, number / 12)\n",
        "half as long a warm-up",
        "private",
        "optimizer.step()",
    ),
    Fault(
        "multitask",
        "a step is left out by the rank's own loss",
        "        optimizer.step()\n",
        "        if losses[0].item() < 1.1:\n            optimizer.step()\n",
        "the ranks' weights part",
        "private",
    ),
    Fault(
        "contrastive",
        "an all_reduce that is not differentiated",
        "        optimizer.zero_grad()\n        loss.backward()",
        "        center = queries.mean(0)\n"
        "        dist.all_reduce(center)\n"
        "        loss = loss + (center / world).square().sum()\n"
        "        optimizer.zero_grad()\n        loss.backward()",
        "half of that gradient",
        "private",
    ),
    Fault(
        "multitask",
        "each rank writes a log, by the time",
        "\ninputs = ",
        "\nimport time\n\nlog = open(f'log.{time.time_ns()}', 'w')\ninputs = ",
        "twice the scores in one folder",
        "private",
    ),
]

STRANGERS = [
    Fault(
        "graphs",
        "targets standardized by the rank's share",
        "values = torch.stack([y for *_, y in train])",
        "values = torch.stack([y for *_, y in train[rank::world]])",
        "each rank learns other numbers",
        "strangers",
        shows="mean, deviation = values.mean()",
    ),
    Fault(
        "graphs",
        "the order is drawn from each rank's own seed",
        "order = random.Random(1)",
        "order = random.Random(1 + rank)",
        "some graphs on both ranks, others on none",
        "strangers",
        shows="mine = ids[first : first + BATCH]",
    ),
    Fault(
        "graphs",
        "the rate falls by the rank's own error",
        "    dist.all_reduce(sums)\n",
        "",
        "another rate on each rank",
        "strangers",
        shows="plateau.step(error)",
    ),
    Fault(
        "stream",
        "no micro-batch communicates",
        "is_last = micro == micros - 1",
        "is_last = micro == micros",
        "gradients are not averaged",
        "strangers",
        shows="nullcontext() if is_last",
    ),
    Fault(
        "stream",
        "the tokens of the rank alone are counted",
        "seen += inputs.numel() * micros * world",
        "seen += inputs.numel() * micros",
        "the warm-up is twice as long",
        "strangers",
        shows='["lr"] =',
    ),
    Fault(
        "stream",
        "all ranks begin at the same token",
        "self.place = MICRO * LENGTH * rank",
        "self.place = 0",
        "half of the pieces, twice",
        "strangers",
        shows="inputs, targets = stream.next()",
    ),
    Fault(
        "stream",
        "each rank opens the log",
        'log = open("stream.log", "w") if rank == 0 else None',
        'log = open("stream.log", "w")',
        "a rank can empty the other's log",
        "strangers",
    ),
    Fault(
        "two_streams",
        "the same noise on all ranks",
        "torch.manual_seed(100 * epoch + rank)",
        "torch.manual_seed(100 * epoch)",
        "half of the noise is a copy",
        "strangers",
        shows="randn_like(",
    ),
    Fault(
        "two_streams",
        "the consistency's weight by the rank's own samples",
        "        step += 1\n",
        "        step += len(unlabeled) / 16\n",
        "half as fast a ramp",
        "strangers",
        shows="weight = min(1,",
    ),
    Fault(
        "two_streams",
        "the teacher follows on rank 0 alone",
        "zip(teacher.parameters(), student.parameters()):",
        "zip(teacher.parameters(), student.parameters() if rank == 0 else []):",
        "the other ranks' teacher stays as it was",
        "strangers",
        shows="targets = teacher(",
    ),
    Fault(
        "two_streams",
        "the teacher's rate counts the ranks",
        "old.lerp_(new.detach(), 0.1)",
        "old.lerp_(new.detach(), 0.1 * world)",
        "the teacher follows twice as fast",
        "blind",
    ),
    Fault(
        "neighbours",
        "rank 0 alone evaluates the wrapped model",
        "(model(list(range(80, NODES)))",
        "(ddp(list(range(80, NODES)))",
        "DDP sends buffers that the others do not wait for: the last one may hang",
        "blind",
    ),
    Fault(
        "neighbours",
        "the order is drawn like the neighbours",
        "nodes = order.sample(",
        "nodes = random.sample(",
        "some nodes on both ranks, others on none",
        "blind",
    ),
    Fault(
        "neighbours",
        "the loss is weighted by the share's own labels",
        "loss = F.cross_entropy(ddp(share), labels[share])",
        "loss = F.cross_entropy(ddp(share), labels[share], 1.0 / "
        "(1 + labels[share].bincount(minlength=CLASSES)))",
        "other weights of classes on each rank",
        "blind",
    ),
    Fault(
        "language_model",
        "the sampler's seed contains the rank",
        "DistributedSampler(train_set, drop_last=True)",
        "DistributedSampler(train_set, drop_last=True, seed=rank)",
        "in each epoch, some samples are on both ranks, others on none",
    ),
    Fault(
        "detection",
        "the sampler's epoch contains the rank",
        "sampler.set_epoch(epoch)",
        "sampler.set_epoch(epoch * world + rank)",
        "in each epoch, some samples are on both ranks, others on none",
        shows="sampler = DistributedSampler(",
    ),
    Fault(
        "buckets",
        "the ranks' slices of a batch overlap",
        "batch[rank::world]",
        "batch[rank : rank + len(batch) // world]",
        "most samples of a batch are on both ranks, some on none",
    ),
]

LOOP_NAMES = sorted(path.stem for path in LOOPS.glob("*.py"))
RIGHT = [Fault(loop, "right", "", "", "", "right") for loop in LOOP_NAMES]
FAULTS = NEW + PORTS + KNOWN + FURTHER + LATER + OBJECTS + PRIVATE + STRANGERS + RIGHT


class Forked:
    """A command of this Python, in a fork of this process; with what Popen offers."""

    def __init__(self, words, env, log):
        self.returncode = None
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.setsid()
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                for stream in (1, 2):
                    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
                os.environ.clear()
                os.environ.update(env)
                sys.argv = words[1:]
                runpy.run_path(words[1], run_name="__main__")
                status = 0
            except SystemExit as end:
                status = end.code if isinstance(end.code, int) else int(end.code is not None)
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self):
        while self.poll() is None:
            time.sleep(0.05)
        return self.returncode

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)


def run_check(script):
    """The report, as `python ddp_check script.py` prints it."""
    runs.launch, check_script.START = Forked, os.getcwd()
    linecache.clearcache()
    check_text.statements.cache_clear()
    check_script.own_file.cache_clear()
    args = command.parser.parse_args(["--wait", "40", str(script)])
    with tempfile.TemporaryDirectory() as folder:
        try:
            return as_text(command.check(args, pairs.Runs(args, folder)))
        except runs.NothingCompared as error:
            return str(error)


def changed_copy(fault, folder):
    """The faulty script, and the lines that a report should name."""
    text = (LOOPS / f"{fault.loop}.py").read_text()
    assert not fault.old or text.count(fault.old) == 1, (fault.loop, fault.name)
    path = Path(folder, f"{fault.loop}.py")
    path.write_text(new := text.replace(fault.old, fault.new) if fault.old else text)
    if not fault.old:
        return path, set()
    first = text[: text.index(fault.old)].count("\n") + 1
    same = os.path.commonprefix([fault.old, fault.new]).count("\n")
    lines = set(range(first + same, first + max(fault.new.rstrip().count("\n"), same) + 1))
    shows = [n for n, line in enumerate(new.splitlines(), 1) if fault.shows and fault.shows in line]
    return path, lines | set(shows)


def verdict(report, script, lines):
    """("WRONG", "look" or "", whether the line is named)."""
    said = re.findall(r"^(WRONG|look)\b(.*(?:\n[ \t]+.*)*)", report, re.M)
    words = [word for word, _ in said]
    numbers = {int(n) for _, text in said for n in re.findall(rf"{script.name}:(\d+)", text)}
    return "WRONG" if "WRONG" in words else "look" if words else "", bool(numbers & lines)


FIELDS = ["loop", "kind", "fault", "cost", "found", "line", "seconds", "commit"]


def save(rows):
    """faults.csv, in the order above; rows of other faults stay."""
    path = Path(os.environ.get("TABLE", LOOPS.parent / "faults.csv"))
    old = list(csv.DictReader(path.open())) if path.exists() else []
    table = {(row["loop"], row["fault"]): row for row in old}
    for row in rows:
        key = row["loop"], row["fault"]
        table[key] = row
    known = [(fault.loop, fault.name) for fault in FAULTS]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table[key] for key in known if key in table)
    return [table[key] for key in known if key in table]


def main():
    words, reports = sys.argv[1:], os.environ.get("REPORTS")
    faults = [f for f in FAULTS if all(w in f"{f.loop} {f.kind} {f.name}" for w in words)]
    if not faults:
        raise SystemExit(f"no fault has all of these words: {' '.join(words)}")
    words = ["git", "-C", str(LOOPS), "describe", "--always", "--dirty"]
    commit = subprocess.run(words, capture_output=True, text=True).stdout.strip()
    rows = []
    for fault in faults:
        with tempfile.TemporaryDirectory() as folder:
            script, lines = changed_copy(fault, folder)
            os.chdir(folder)
            row = {"loop": fault.loop, "kind": fault.kind, "fault": fault.name, "cost": fault.cost}
            began = time.monotonic()
            report = run_check(script.name)
            row["found"], named = verdict(report, script, lines)
            row["line"] = "named" if named else ""
            row |= {"seconds": f"{time.monotonic() - began:.0f}", "commit": commit}
            if reports:
                text = f"#### {fault.loop}: {fault.name}: {sorted(lines)}\n{report}\n"
                Path(reports).open("a").write(text)
            os.chdir(LOOPS)
            rows.append(row)
            print(" | ".join(row.values()), flush=True)
            table = save(rows)
    summarize(table)


def summarize(rows):
    print("| | loops | WRONG | look | at the line |")
    for kind in dict.fromkeys(fault.kind for fault in FAULTS):
        of_kind = [row for row in rows if row["kind"] == kind]
        found = [row["found"] for row in of_kind]
        lines = sum(row["line"] == "named" for row in of_kind)
        cells = kind, len(of_kind), found.count("WRONG"), found.count("look"), lines
        print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
