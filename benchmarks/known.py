"""What does ddp_check say of training scripts that everybody knows, and is it true?

python benchmarks/known.py                    # all: clones, makes tiny data, runs ddp_check
python benchmarks/known.py nanogpt minimind   # some
python benchmarks/known.py --write            # renews known.csv and mended.csv
python benchmarks/known.py --mirror FOLDER    # of git directories named OWNER+NAME or OWNER/NAME

known/ has a file for each script: repository, commit, edits (tokens that are replaced), command,
and what each WRONG was found to be. Run as a program in the clone, the same file makes the data.
known.csv has a row for each WRONG, or one if there is none. It says whether it is true, and how
that was confirmed; false ones stay. mended.csv has faults of data parallelism that their authors
have mended: what is said of the commit before, and of the mended one. The last column of both is
the commit of ddp_check.

Exit status 1 if something else is said than known.csv and mended.csv have, else 0.
"""

import argparse
import csv
import json
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import time
import venv
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
DDP_CHECK = HERE.parent / "ddp_check"
KNOWN = "name repository commit script edits command said line verdict why confirmed look seconds"
KNOWN += " ddp_check"  # the commit that last changed it
MENDED = "name repository before after fault found said_before said_after remark seconds ddp_check"
TABLES = {"known": HERE / "known.csv", "mended": HERE / "mended.csv"}
LONGEST = 1500  # seconds of a run of ddp_check


@dataclass
class Script:
    """A file of known/, whose constants these are."""

    path: Path
    repository: str  # OWNER/NAME
    command: str  # flags of ddp_check, the script, its flags
    commit: str = ""
    before: str = ""  # of a mended fault: the commit before, and
    after: str = ""  # the one that mends it
    fault: str = ""  # in words
    lines: list = field(default_factory=list)  # "file:line" of the fault, in the commit before
    remark: str = ""  # on what is said of a mended commit, or not said at all
    paths: list = field(default_factory=lambda: ["."])  # what is checked out
    edits: list = field(default_factory=list)  # (file, old, new)
    packages: list = field(default_factory=list)  # that it needs beside torch, torchvision, numpy
    folder: str = ""  # in which it is started
    environment: dict = field(default_factory=dict)
    verdicts: dict = field(default_factory=dict)  # {"rule file:line": (verdict, why, confirmed)}
    cannot: str = ""  # why it could not be run

    @property
    def name(self):
        return self.path.stem

    @property
    def script(self):
        words = [word for word in shlex.split(self.command) if word.endswith(".py")]
        return f"{self.folder}/{words[0]}".lstrip("/")


def read_scripts(words):
    """Those whose name, or its part before "_", is among the words; all, without words."""
    scripts = []
    sys.path.append(str(HERE / "known"))  # where the files' made.py is
    for path in sorted((HERE / "known").glob("*.py")):
        constants = {
            name.lower(): value
            for name, value in runpy.run_path(str(path)).items()
            if name.lower() in Script.__dataclass_fields__ and name.isupper()
        }
        if "repository" in constants:  # else it is a module of these files
            scripts.append(Script(path, **constants))
    if unknown := {*words} - {word for script in scripts for word in names(script)}:
        sys.exit(f"known/ has no file of these names: {', '.join(sorted(unknown))}")
    return [script for script in scripts if not words or {*words} & {*names(script)}]


def names(script):
    return script.name, script.name.partition("_")[0]


def git_directory(mirror, repository):
    """In a folder of git directories, or the public address."""
    if mirror is None:
        return f"https://github.com/{repository}"
    for name in repository, repository.replace("/", "+"):
        for path in mirror / name, mirror / name / ".git", mirror / name / "repo":
            if (path / "HEAD").exists():
                return str(path.resolve())
    return ""


def clone(args, script, commit, folder):
    """The files of this commit, edited. Raises RuntimeError."""
    address = git_directory(args.mirror, script.repository)
    if not address:
        raise RuntimeError(f"{args.mirror} has no {script.repository}")
    shutil.rmtree(folder, ignore_errors=True)
    git = ["git", "-C", folder, "-c", "advice.detachedHead=false"]
    shared = ["--shared"] if args.mirror else ["--filter=blob:none"]
    for words in (
        ["git", "clone", "--quiet", "--no-checkout", *shared, address, folder],
        [*git, "read-tree", commit],
        [*git, "checkout-index", "--quiet", "--force", "--all"]
        if script.paths == ["."]
        else [*git, "checkout", "--quiet", commit, "--", *script.paths],
    ):
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode and "checkout-index" not in words:  # a mirror may lack large files
            raise RuntimeError(done.stderr.strip())
    for file, old, new in script.edits:
        path = folder / file
        text = path.read_text()
        if old not in text:
            raise RuntimeError(f"{file} has no {old!r} to be replaced")
        path.write_text(text.replace(old, new))


def make_environment(args, scripts):
    """A virtual environment that also sees this Python's packages, with those that the scripts
    need. Returns its Python."""
    folder = args.folder.resolve() / "venv"
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        site = next(folder.glob("lib/python*/site-packages"))
        seen = [path for path in sys.path if path.endswith("site-packages")]
        (site / "this_python.pth").write_text("\n".join(seen))
    packages = sorted({package for script in scripts for package in script.packages})
    if packages:
        words = [python, "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(words, check=True)
    return python


def run(args, script, commit, python):
    """ddp_check's report as a dictionary, with what it took; its "error" if it did not run."""
    folder = args.folder.resolve() / f"{script.name}-{commit}"
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "offline",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join([str(folder / script.folder), str(folder)]),
        "HF_HOME": str(folder / "hf"),
    }
    environment |= script.environment
    began = time.monotonic()
    try:
        clone(args, script, commit, folder)
        subprocess.run(
            [python, script.path], cwd=folder / script.folder, env=environment, check=True
        )
        done = subprocess.run(
            [python, DDP_CHECK, "--json", *shlex.split(script.command)],
            cwd=folder / script.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
        (folder.parent / f"{folder.name}.log").write_text(done.stderr)
        (folder.parent / f"{folder.name}.json").write_text(done.stdout)
        report = json.loads(done.stdout)
    except (RuntimeError, subprocess.SubprocessError, json.JSONDecodeError) as error:
        report = {"error": f"{type(error).__name__}: {error}", "findings": []}
    report["wall"] = round(time.monotonic() - began)
    return report


def said(report, *verdicts):
    """["rule file:line", ...]"""
    return [
        f"{finding['rule']} {place(finding)}".strip()
        for finding in report["findings"]
        if finding["verdict"] in verdicts
    ]


def place(finding):
    return f"{finding['file']}:{finding['line']}" if finding["file"] else ""


def checked_by():
    """The commit that last changed ddp_check; with "+" if its files are edited since."""
    words = ["git", "log", "-1", "--format=%h", "."], ["git", "status", "--porcelain", "."]
    kwargs = {"cwd": DDP_CHECK, "capture_output": True, "text": True}
    texts = [subprocess.run(each, **kwargs).stdout for each in words]
    return texts[0].strip() + "+" * bool(texts[1])


def one_line(text):
    return " ".join(text.split())


def known_rows(script, report):
    """Of known.csv."""
    row = {
        "name": script.name,
        "repository": script.repository,
        "commit": script.commit,
        "script": script.script,
        "edits": len(script.edits),
        "command": one_line(script.command),
        "look": "; ".join(said(report, "look")),
        "seconds": report["wall"],
        "ddp_check": checked_by(),
    }
    if report["error"]:
        reason = script.cannot or report["error"].splitlines()[0]
        return [row | {"said": "nothing can be compared", "why": reason}]
    rows = [
        row | {"said": f"WRONG {finding['rule']}", "line": place(finding)}
        for finding in report["findings"]
        if finding["verdict"] == "WRONG"
    ]
    return [judged(script, each) for each in rows or [row | {"said": "nothing WRONG"}]]


def judged(script, row):
    """A row of known.csv, with what the script's file says of what ddp_check says."""
    if row["said"] == "nothing WRONG":
        return row | {"why": one_line(script.remark)}
    if not row["said"].startswith("WRONG"):
        return row
    key = f"{row['said'].removeprefix('WRONG ')} {row['line']}".strip()
    verdict, why, confirmed = script.verdicts.get(key, ("not judged", "", ""))
    return row | {"verdict": verdict, "why": why, "confirmed": confirmed}


def mended_row(script, before, after):
    """Of mended.csv. A fault is "named" if the report has its line, "found" if another."""
    reports, found = {"before": before, "after": after}, "no"
    findings = [each for each in before["findings"] if each["verdict"] in ("WRONG", "look")]
    rules = [{each.split()[0] for each in said(report, "WRONG")} for report in (before, after)]
    if rules[0] - rules[1]:
        found = "found"
    rules_after = {each.split()[0] for each in said(after, "WRONG", "look")}
    for finding in findings:
        text = " ".join([place(finding), finding["text"], *finding["details"]])
        is_gone = finding["rule"] not in rules_after
        if is_gone and any(line in text for line in script.lines):
            if finding["verdict"] == "WRONG":
                found = "named"
            elif found == "no":
                found = "look"
    row = {
        "name": script.name,
        "repository": script.repository,
        "before": script.before,
        "after": script.after,
        "fault": script.fault,
        "found": found,
        "remark": one_line(script.remark),
        "seconds": before["wall"] + after["wall"],
        "ddp_check": checked_by(),
    }
    for name, report in reports.items():
        text = "; ".join(f"WRONG {each}" for each in said(report, "WRONG"))
        row[f"said_{name}"] = report["error"].partition("\n")[0] or text or "nothing WRONG"
    return row


def read_table(path):
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def write_table(path, columns, rows):
    rows = sorted(rows, key=lambda row: row["name"])
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns.split(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def summary():
    """Of both tables, in two lines."""
    rows, mended = read_table(TABLES["known"]), read_table(TABLES["mended"])
    verdicts = Counter(row["verdict"] for row in rows if row["said"].startswith("WRONG"))
    scripts, repositories = ({row[key] for row in rows} for key in ("name", "repository"))
    failed = sum(row["said"] == "nothing can be compared" for row in rows)
    text = f"known.csv: {len(scripts)} scripts of {len(repositories)} repositories, of which "
    text += f"{failed} could not be compared; WRONG: {counts(verdicts)}\n"
    return text + f"mended.csv: {len(mended)} faults: {counts(Counter(r['found'] for r in mended))}"


def counts(counter):
    return ", ".join(f"{count} {name}" for name, count in counter.most_common()) or "none"


def differences(old, new):
    """In what is said, as lines."""
    keys = "said", "line", "found", "said_before", "said_after"
    texts = [
        sorted(" ".join(str(row.get(key) or "") for key in keys).strip() for row in rows)
        for rows in (old, new)
    ]
    lines = [f"  no longer: {text}" for text in texts[0] if text not in texts[1]]
    return lines + [f"  new: {text}" for text in texts[1] if text not in texts[0]]


def judge(scripts):
    """Renew the verdicts of these scripts in known.csv."""
    scripts = {script.name: script for script in scripts}
    rows = [
        judged(scripts[row["name"]], row) if row["name"] in scripts else row
        for row in read_table(TABLES["known"])
    ]
    write_table(TABLES["known"], KNOWN, rows)
    print(summary())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="files of known/, without .py")
    parser.add_argument("--mirror", type=Path, help="folder of git directories, instead of the net")
    parser.add_argument("--folder", type=Path, default="runs/known", help="of clones and packages")
    parser.add_argument("--write", action="store_true", help="renew known.csv and mended.csv")
    parser.add_argument("--judge", action="store_true", help="renew the verdicts, and run nothing")
    args = parser.parse_args()
    scripts = read_scripts(args.names)
    if args.judge:
        return judge(scripts)
    args.folder.mkdir(parents=True, exist_ok=True)
    python, differ = make_environment(args, scripts), 0
    for script in scripts:
        if script.before:
            reports = [run(args, script, each, python) for each in (script.before, script.after)]
            table, columns, rows = "mended", MENDED, [mended_row(script, *reports)]
        else:
            report = {"error": script.cannot, "findings": [], "wall": 0}
            if not script.cannot:
                report = run(args, script, script.commit, python)
            table, columns, rows = "known", KNOWN, known_rows(script, report)
        table_rows = read_table(TABLES[table])
        old = [row for row in table_rows if row["name"] == script.name]
        lines = differences(old, rows)
        differ += bool(lines)
        print(f"{script.name}: {'differs' if lines else 'as in the table'}", *lines, sep="\n")
        sys.stdout.flush()
        if args.write:
            others = [row for row in table_rows if row["name"] != script.name]
            write_table(TABLES[table], columns, others + rows)
    print(f"{len(scripts)} scripts, {differ} of them not as in the tables", summary(), sep="\n")
    sys.exit(bool(differ) and not args.write)


if __name__ == "__main__":
    main()
