"""Predict how DistributedDataParallel scales: will more machines help, before they are booked?

python benchmarks/scaling.py --model resnet18 --batch-size 128 --rate 10
python benchmarks/scaling.py --gradients 102 --step 0.232 --rate 50     # of a model elsewhere

It measures a step of one machine here, the size of each gradient and the moment of the backward
pass at which it is there. With --gradients it takes your word for them. DDP sends a bucket as soon
as the gradients in it are there, one after the other, while the backward pass goes on. A ring
all-reduce of B bytes over n machines takes 2 (n - 1) latency + 2 (n - 1) / n B / rate (Patarasuk
and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009). Efficiency
is the step on one machine over that on n machines with the same batch each.
"""

import argparse
import csv
import statistics
import time
from pathlib import Path

import torch
from throughput import markdown, rooms
from yardsticks import scripts

MACHINES = [2**power for power in range(1, 11)]


def profile(model, batch_size, amp=False, steps=20):
    """A step of the scripts' model on this device, with what they set for it, on synthetic images.

    Returns its seconds (median), and for each gradient in the order in which they come its bytes
    and the fraction of the step's time after which it is there.
    """
    if model == "example":
        exec(rooms(model), vars(scripts))  # the pages' model and data in place of the script's
    data = str(Path(__file__).parent) if model == "example" else "synthetic"
    args = scripts.parser.parse_args(["--dataset", data])
    args.model, device = model, torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    train_set, _, classes = scripts.load_data(args)
    loader = scripts.make_loader(args, train_set, range(batch_size), batch_size, device)
    inputs, labels = scripts.prepare(args, next(iter(loader)), device)
    model = scripts.build_model(args, train_set[0][0], classes).to(device)
    optimizer, _ = scripts.build_optimizer(args, model, steps=1)
    came = {}  # {parameter: when its gradient was there, in this step}

    def now():
        if device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()

    def step():
        begin = now()
        with torch.autocast(device.type, torch.bfloat16, enabled=amp):
            loss = scripts.loss_function(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds = now() - begin
        return seconds, {p: (moment - begin) / seconds for p, moment in came.items()}

    plain = [step()[0] for _ in range(steps)][steps // 4 :]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: came.update({p: now()}))
    hooked = [step()[1] for _ in range(steps)][steps // 4 :]
    ready = {p: statistics.median(moments[p] for moments in hooked) for p in hooked[0]}
    gradients = [(4 * p.numel(), ready[p]) for p in sorted(ready, key=ready.get)]
    return statistics.median(plain), gradients


def buckets(gradients):
    """(bytes, ready) of the buckets into which DDP sorts gradients that come in this order."""
    found, total, limit = [], 0, 2**20  # the first is closed at 1 MiB, the others at 25
    for size, ready in gradients:
        total += size
        if total >= limit:
            found.append((total, ready))
            total, limit = 0, 25 * 2**20
    return [*found, (total, ready)] if total else found


def predict(step, buckets, machines, rate, latency, cost=0.0):
    """Seconds of a step on n machines. `step`, `latency`: seconds; `rate`: bytes a second; `cost`:
    seconds in which the processor that computes handles a byte, as on a CPU (a GPU does not)."""
    done, busy = 0.0, step
    for size, ready in buckets:
        sent = 2 * (machines - 1) * size / machines
        done = max(done, ready * step) + 2 * (machines - 1) * latency + sent * (1 / rate + cost)
        busy += sent * cost
    rest = (1 - buckets[-1][1]) * step  # the optimizer waits for the last bucket
    return max(busy, done + rest)


def predict_fsdp2(step, size, groups, machines, rate, latency, cost=0.0, gpu=True, gather=1.0):
    """As predict, for `size` bytes of parameters in so many blocks. Each step gathers them in the
    forward pass and again in the backward pass, and scatters the gradients: three times (n - 1) / n
    of them, where DDP sends two. `gather`: 0.5 if they are gathered in bfloat16. A `gpu` computes
    while the next block comes. Without one nothing is hidden, and Gloo scatters by all-reduce."""
    share = ((1 if gpu else 2) + 2 * gather) * (machines - 1) / machines * size
    messages = 3 * groups * (machines - 1) * latency
    sent = share / rate + messages
    if gpu:  # all is hidden but the first block's gathering and the last block's gradients
        return max(step, sent) + 2 * sent / (3 * groups)
    return step + sent + share * cost


def hosts(path):
    """For each job of network.py's CSV file: name, rows, buckets, the seconds that a host computes
    in a step, and those in which DDP and Gloo handle a byte, which the fastest link's row tells."""
    torch.set_num_threads(max(1, torch.get_num_threads() // 2))  # what a host had
    rows = csv.DictReader(path.read_text().splitlines())
    rows = sorted(rows, key=lambda row: -float(row["rate"]))
    # The pages' example comes last: its definitions replace the scripts' own.
    for job in sorted({row["job"] for row in rows}, key=lambda job: (job == "example", job)):
        own = [row for row in rows if row["job"] == job]
        groups = buckets(profile(job.split("-")[0], int(own[0]["batch"]) // 2)[1])
        compute = statistics.median(float(row["compute"]) for row in own)
        fastest = predict(compute, groups, 2, float(own[0]["rate"]) * 1e9 / 8, 0)
        sent = sum(size for size, _ in groups)
        yield job, own, groups, compute, max(0, float(own[0]["plain"]) - fastest) / sent


def check(path):
    """Measured beside predicted; the first row of a job is what the others are predicted from."""
    print("| job | Gbit/s | DDP, ms | predicted | error | FSDP2, ms | predicted | error |")
    print("|---" * 8 + "|")
    for job, rows, groups, compute, cost in hosts(path):
        size = sum(size for size, _ in groups)
        rates = [float(row["rate"]) * 1e9 / 8 for row in rows]
        rest = float(rows[0]["cut"]) - predict_fsdp2(compute, size, 1, 2, rates[0], 0, gpu=False)
        handling = max(0, rest) / (2 * size)  # as `cost`, of FSDP2
        for row, rate in zip(rows, rates):
            cut = predict_fsdp2(compute, size, 1, 2, rate, 0, handling, gpu=False)
            cells, ddp = [job, row["rate"]], predict(compute, groups, 2, rate, 0, cost)
            for measured, step in (float(row["plain"]), ddp), (float(row["cut"]), cut):
                cells += [f"{1e3 * measured:.1f}", f"{1e3 * step:.1f}"]
                cells.append(f"{step / measured - 1:+.0%}")
            print(markdown(cells))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", choices=("net", "mlp", "resnet18", "example"), default="resnet18")
    add("--batch-size", type=int, default=128, help="images a step on each machine")
    add("--rate", type=float, default=10, help="of the link, in Gbit/s")
    add("--latency", type=float, default=5e-5, help="of a message, in seconds")
    add("--step", type=float, help="seconds of a step on one machine; else it is measured here")
    add("--gradients", type=float, help="MB of all, in float32; needs --step, and nothing is run")
    add("--fsdp2", type=int, metavar="BLOCKS", help="train_fsdp2.py with so many blocks, too")
    add("--amp", action="store_true", help="as in the scripts; FSDP2 then gathers in bfloat16")
    add("--check", type=Path, help="a CSV file of network.py's")
    args = parser.parse_args()
    if args.gradients and not args.step:
        parser.error("--gradients needs --step, the seconds of a step on one machine")
    if args.check:
        check(args.check)
    else:
        if args.gradients:  # in a hundred pieces, one after the other in the backward pass
            step, pieces = 0, [(args.gradients * 1e4, (1 + 2 * i / 99) / 3) for i in range(100)]
        else:
            step, pieces = profile(args.model, args.batch_size, args.amp)
        step, groups = args.step or step, buckets(pieces)
        print(f"{1e3 * step:.2f} ms a step on one machine\n")
        heads = ["machines", "step, ms", "efficiency"]
        heads += ["FSDP2, ms", "efficiency"] if args.fsdp2 else []
        print(markdown(heads), "|---" * len(heads) + "|", sep="\n")
        size, gather = sum(size for size, _ in groups), 0.5 if args.amp else 1.0
        for n in MACHINES:
            link = n, args.rate * 1e9 / 8, args.latency
            found = [predict(step, groups, *link)]
            if args.fsdp2:
                found.append(predict_fsdp2(step, size, args.fsdp2, *link, gather=gather))
            cells = [text for s in found for text in (f"{1e3 * s:.2f}", f"{step / s:.0%}")]
            print(markdown([str(n), *cells]))
