"""python ddp_check my_script.py --its --own flags"""

import argparse
import os
import shutil
import signal
import sys
import tempfile

if not __package__:  # the folder is run, as a script is: it becomes a package, behind all others
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path.append(sys.path[0])  # where mp.spawn's processes find it, too

import torch

from ddp_check.child import child
from ddp_check.compare.batches import loaders_per_process
from ddp_check.compare.judge import judge
from ddp_check.compare.report import as_text
from ddp_check.compare.rules import PAGE, RULES
from ddp_check.notes import Finding, Said
from ddp_check.runs import ENDS, BothRuns, uninterrupted
from ddp_check.script import source

parser = argparse.ArgumentParser(
    usage="python ddp_check [flags] script.py [script's flags]",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
)
parser.add_argument("--steps", type=int, default=20, help="optimizer steps to compare")
parser.add_argument("--nproc", type=int, default=2, help="processes of the second run")
parser.add_argument("--short", type=int, help="end each pass over a DataLoader after these batches")
parser.add_argument("--one", default="", help="further flags of the script on one process")
parser.add_argument("--tolerance", type=float, help="of gradients [3e-4, on GPUs 3e-3]")
parser.add_argument("--seed", type=int, default=0, help="of all random numbers, in both runs")
parser.add_argument("--wait", type=float, default=120, help="seconds without advance: it hangs")
parser.add_argument("--list", action="store_true", help="print the rules, and exit")
parser.add_argument("-m", action="store_true", help="the script is a module, as in python -m")
parser.add_argument("script", nargs="?", help="your script, followed by its flags")
parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def check(args, folder):
    """The report, and the exit status. What is not known before: whether a loader's batch size is
    one per process, and whether rank r has the r-th block of a batch; then it is run again."""
    tolerance = args.tolerance or (3e-3 if torch.cuda.device_count() >= args.nproc else 3e-4)
    layout, scaled = "turns", {}
    while True:
        runs = BothRuns(args, folder, layout, list(scaled))
        one, ranks = runs.run_both()
        if one is None:
            return f"ddp_check: {ranks}: nothing can be compared", 2
        found = {} if scaled else loaders_per_process(one, ranks)
        orders = {note.text for _, note in ranks[0][Said] if note.kind == "order"}
        if not found:
            result = judge(one, ranks, tolerance)
            if any(finding.what == "printed" for finding in result.findings):  # a clock?
                result = judge(one, ranks, tolerance, runs.run_again())
            for line in scaled.values():
                about = f"{source(line)}: a batch size per process, so {args.nproc} times the "
                about += "batch: intended, and the rate, too? One process was given as many here"
                result.findings.insert(0, Finding("look", "samples", 0, about))
            if not result.status or orders != {"blocks"} or layout == "blocks":
                return as_text(result), result.status
            layout = "blocks"
        scaled = found or scaled
        for file in os.listdir(folder):
            if file != "made":  # of downloads
                os.remove(os.path.join(folder, file))


def main():
    args = parser.parse_args()
    if args.list:
        for rule in RULES:
            print(
                f"{rule.name:10} {rule.right}\n{'':10} -> {rule.remedy[0]}: {PAGE}{rule.remedy[1]}"
            )
        return
    if args.script is None:
        parser.error("which script?")
    for number in ENDS[1:]:
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    folder = os.path.realpath(tempfile.mkdtemp(prefix="ddp_check-"))  # as the script's paths are
    if 0 < torch.cuda.device_count() < args.nproc:
        print(f"note   {torch.cuda.device_count()} GPUs for {args.nproc} processes: on CPUs")
    try:
        text, status = check(args, folder)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        with uninterrupted():
            shutil.rmtree(folder, ignore_errors=True)
    print(text)
    sys.exit(status)


if __name__ == "__main__":
    child() if "DDP_CHECK" in os.environ else main()
