"""The diffs in README.md are those of the scripts: check them, or make them so with --fix.

python tests/readme_blocks.py --fix

A block stands under a comment that says which part of which diff to train_single.py it is:
<!-- diff train_dp.py: a text that this part contains -->
"""

import difflib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(<!-- diff (\S+): (.+?) -->\n)```diff\n.*?```\n", re.S)


def parts(name):
    """The parts of the diff from train_single.py to a script, as texts without line numbers."""
    files = [(ROOT / path).read_text().splitlines(True) for path in ("train_single.py", name)]
    found = []
    for line in list(difflib.unified_diff(*files, n=0))[2:]:
        if line.startswith("@@"):
            found.append("")
        else:
            found[-1] += line
    return found


def regenerate(text):
    """README.md with its blocks as the scripts are now. Raises ValueError for unknown ones."""

    def block(match):
        head, name, pattern = match.groups()
        found = [part for part in parts(name) if pattern in part]
        if len(found) != 1:
            raise ValueError(f"{len(found)} parts of {name}'s diff contain {pattern!r}")
        return f"{head}```diff\n{found[0]}```\n"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    readme = ROOT / "README.md"
    old = readme.read_text()
    new = regenerate(old)
    if "--fix" in sys.argv:
        readme.write_text(new)
    print("the same" if new == old else "README.md's diffs differ from the scripts")
    sys.exit(new != old and "--fix" not in sys.argv)
