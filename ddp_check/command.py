"""The command: its flags, both runs, the report."""

import argparse
import os
import sys
import tempfile
import time

from . import __version__, launchers
from .kept.made import Janitor
from .script import find_script

EXITS = "exit status: 1 if something is WRONG, 2 if nothing could be compared, else 0"

parser = argparse.ArgumentParser(
    prog="ddp_check",
    usage="python ddp_check [flags] my_script.py [its flags]",
    description="Runs a training script with DDP, unchanged, on one process and on two, with the "
    "same samples and random numbers, and says where they part. In the script's flags, {run} is "
    "the name of the run, {n} its number of processes, and {rank} that of the process. No file "
    "that was there before is changed, and none is left.",
    epilog=EXITS,
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
)
parser.add_argument("--steps", type=int, default=20, help="optimizer steps to compare")
parser.add_argument("--nproc", type=int, default=2, help="processes of the second run")
parser.add_argument("--short", type=int, help="end each pass over a DataLoader after these batches")
parser.add_argument("--one", default="", help="further flags of the script on one process")
parser.add_argument("--tolerance", type=float, default=3e-4, help="of gradients")
parser.add_argument("--noise", action="store_true", help="measure rounding by one more run")
parser.add_argument("--seed", type=int, default=0, help="of all random numbers, in both runs")
parser.add_argument("--wait", type=float, default=120, help="seconds without advance: it hangs")
parser.add_argument("--cpu", action="store_true", help="on CPUs, and libraries see GPUs, too")
parser.add_argument("--json", action="store_true", help="print the report as JSON")
parser.add_argument("--list", action="store_true", help="print the rules, and exit")
parser.add_argument("--version", action="version", version=f"ddp_check {__version__}")
parser.add_argument("-m", action="store_true", help="the script is a module, as in python -m")
parser.add_argument("script", nargs="?", help="your script, followed by its flags")
parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def check(args, runs):
    """The Result. What is not known before: whether a loader's batch size is one per process, and
    whether rank r has the r-th block of a batch; then it is run again."""
    from .compare.samples import lines_by_turns, loaders_per_process, remedy_by_one
    from .notes import Finding, Said

    one, ranks = runs.run_both()
    if scaled := loaders_per_process(one, ranks):
        remedy = remedy_by_one(ranks[0], args.nproc)
        runs.options["scaled"] = list(scaled)
        one, ranks = runs.run_both()
        for loader in loaders_per_process(one, ranks):
            scaled.pop(loader, None)  # with a batch_sampler of the script's own
    if turns := lines_by_turns(one, ranks):
        runs.options["turns"] = turns
        one, ranks = runs.run_both()
    result = judge_runs(args, runs, one, ranks, scaled)
    orders = {note.text for _, note in ranks[0][Said] if note.kind == "order"}
    if result.status and orders == {"blocks"}:
        runs.options["layout"] = "blocks"
        one, ranks = runs.run_both()
        result = judge_runs(args, runs, one, ranks, scaled)
    for line in scaled.values():
        text = f"a batch size per process, so {args.nproc} times the batch: intended, and "
        text += "the rate, too? One process was given as many samples here; if the script computes "
        text += "with its size, "
        result.findings.insert(0, Finding("look", "samples", 0, text + remedy, line))
    if runs.too_few_gpus:
        result.findings.insert(0, Finding("note", "", 0, runs.too_few_gpus))
    return result


def judge_runs(args, runs, one, ranks, scaled):
    """With one more run on one process, where rounding may explain a finding."""
    from .compare.judge import judge

    result = judge(one, ranks, args.tolerance, scaled=scaled)
    if args.noise or result.may_be_noise:
        return judge(one, ranks, args.tolerance, runs.run_again(), scaled)
    return result


def main(words=None):
    args = parser.parse_args(words)
    sys.stdout.reconfigure(errors="backslashreplace")  # for a script's text in any terminal
    if args.list:
        from .compare.report import list_rules

        return print(list_rules())
    if args.script is None:
        parser.error("which script?")
    if not hasattr(os, "fork"):
        parser.error("it needs Linux or macOS; on Windows, WSL")
    typed = [args.script, *args.flags]
    try:
        launchers.without_launcher(args)
    except launchers.NotSure as error:
        parser.error(str(error))
    if [args.script, *args.flags] != typed:
        words = ["-m"] * args.m + [args.script, *args.flags]
        print(f"ddp_check: without the launcher: {' '.join(words)}", file=sys.stderr)
    path = find_script(args)
    if path is None:
        parser.error(f"there is no {'module' if args.m else 'file'} {args.script}")
    if proposal := launchers.proposal(args, path):
        print(f"ddp_check: {proposal}", file=sys.stderr)
    folder = os.path.realpath(tempfile.mkdtemp(prefix="ddp_check-"))  # as the script's paths are
    janitor = Janitor(folder)
    try:
        status = report(args, folder)
    except KeyboardInterrupt:
        status = 130
    finally:
        janitor.finish()
    sys.exit(status)


def report(args, folder):
    """Print it, and return the exit status."""
    from .compare.report import as_json, as_text
    from .runs import BothRuns, NothingCompared

    result, reason, began = None, "", time.monotonic()
    runs = BothRuns(args, folder)
    try:
        result = check(args, runs)
    except NothingCompared as error:
        reason = str(error)
    if args.json:
        print(as_json(args, result, reason, runs.seconds()))
    else:
        print(as_text(result) if result else f"ddp_check: nothing can be compared: {reason}")
    print(f"ddp_check: {time.monotonic() - began:.0f} s in all", file=sys.stderr)
    return result.status if result else 2
