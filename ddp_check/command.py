"""The command: its flags, the runs, the report."""

import argparse
import os
import re
import sys
import tempfile
import time
import traceback

from . import __version__, launchers
from .kept.made import Janitor
from .script import find_script

OF_RANKS = "averaging", "samples", "end", "files", "calls", "steps"  # where a rank may be missing

parser = argparse.ArgumentParser(
    prog="ddp_check",
    usage="python ddp_check [flags] my_script.py [its flags]",
    description="Runs a training script with DDP, unchanged, on one process and on two, with the "
    "same samples and random numbers, and says where they part. In the script's flags, {run} is "
    "the name of the run, {n} its number of processes, and {rank} that of the process. No file "
    "that was there before is changed, and none is left but downloads.",
    epilog="exit status: 1 if something is WRONG, 2 if nothing could be compared, else 0",
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
parser.add_argument("--all", action="store_true", help="print all that was seen, and was not")
parser.add_argument("--json", action="store_true", help="print the report as JSON")
parser.add_argument("--list", action="store_true", help="print the rules, and exit")
parser.add_argument("--version", action="version", version=f"ddp_check {__version__}")
parser.add_argument("-m", action="store_true", help="the script is a module, as in python -m")
parser.add_argument("script", nargs="?", help="your script, followed by its flags")
parser.add_argument("flags", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)


def check(args, runs):
    """The Result of two runs; of a third, where noise is to be told; and if something is to be
    explained, of one more pair, in which the values of lines are noted."""
    from .compare.judge import judge
    from .compare.samples import remedy_by_one
    from .compare.starts import other_layout, other_options, scaled_loaders
    from .notes import Cut, Finding
    from .pairs import NothingCompared

    one, ranks = runs.pair(other_options)
    scaled = scaled_loaders(runs.options, one, ranks)
    known = {"tolerance": args.tolerance, "scaled": scaled, "own_flags": bool(args.one)}
    result = judge(one, ranks, **known)
    if args.noise or result.may_be_noise:
        is_clock = all(finding.what == "printed" for finding in result.measured)  # as it may be
        lines = 0 if is_clock else result.lines
        known["again"] = runs.once_more(lines, further=2 * bool(lines))
        result = judge(one, ranks, **known)
    if result.lines:
        try:
            known["lines"] = runs.lines(result.lines)
        except NothingCompared as error:
            text = f"the values of lines could not be noted: {error}"
            result.findings.insert(0, Finding("note", "", 0, text))
        else:
            if options := other_layout(runs.options, *known["lines"]):
                runs.start_again(options, "each rank has a block of a batch")
                return check(args, runs)
            result = judge(one, ranks, **known)
        if "again" not in known and result.may_be_rounding:
            known["again"] = runs.once_more(result.lines)
            result = judge(one, ranks, **known)
    prepared = {note.loader for _, note in one[Cut]}
    if any("passes in a step" in finding.text for finding in result.of("look")):
        scaled = {}  # it may be the same batch, in fewer parts
    for name, line in scaled.items():
        text = f"a batch size per process, so {args.nproc} times the batch: intended, and "
        text += "the rate, too? Here, "
        about = {"section": "#batch-size"}
        if name in prepared:
            text += "one process was given the samples of all"
        else:
            text += "the ranks together were given one process's samples"
            about["remedy"] = remedy_by_one(ranks[0], args.nproc)
        result.findings.insert(0, Finding("look", "samples", 0, text, line, **about))
    if runs.too_few_gpus:
        result.findings.insert(0, Finding("note", "", 0, runs.too_few_gpus))
    return result


def main(words=None):
    words = list(sys.argv[1:] if words is None else words)
    if "--one" in words[:-1]:  # argparse takes a single flag after it for one of its own
        at = words.index("--one")
        words[at : at + 2] = [f"--one={words[at + 1]}"]
    args = parser.parse_args(words)
    sys.stdout.reconfigure(errors="backslashreplace")  # for a script's text in any terminal
    if args.list:
        from .compare.report import list_rules

        return print(list_rules())
    if args.script is None:
        parser.error("which script?")
    if args.nproc < 2:
        parser.error("--nproc: two processes at least, to compare with one")
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
    folder = os.path.realpath(tempfile.mkdtemp(prefix="ddp_check-"))  # as the script's paths are
    janitor = Janitor(folder)
    try:
        status, proposal = report(args, folder, path)
    except KeyboardInterrupt:
        status, proposal = 130, ""
    finally:
        janitor.finish()
    if proposal:
        print(f"ddp_check: {proposal}", file=sys.stderr)
    sys.exit(status)


def report(args, folder, path):
    """Print it. The exit status; what to pass, if the processes may not know their ranks."""
    from .compare.report import as_json, as_text
    from .pairs import NothingCompared, Runs

    result, reason, began = None, "", time.monotonic()
    runs = Runs(args, folder)
    try:
        result = check(args, runs)
    except NothingCompared as error:
        reason = str(error)
    except Exception as error:
        traceback.print_exc()
        reason = f"ddp_check itself has failed: {error!r}"
    if args.json:
        print(as_json(args, result, reason, runs.seconds()))
    else:
        nothing = f"ddp_check: nothing can be compared: {reason}"
        print(as_text(result, args.all) if result else nothing)
    print(f"ddp_check: {time.monotonic() - began:.0f} s in all", file=sys.stderr)
    proposal = launchers.proposal(args, [path, *runs.files()])
    if result:
        what = {finding.what for finding in result.of("WRONG")}
        return result.status, proposal * (not what.isdisjoint(OF_RANKS))
    is_other = re.search(r"\w+Error at ", reason) and not re.search(r"(?<![a-z])rank\b", reason)
    return 2, proposal * (not is_other)
