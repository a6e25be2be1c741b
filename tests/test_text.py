"""The five files as texts: what is shared is the same, what is promised about them holds."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import DDP, ROOT, SCRIPTS, quick, script
from readme_blocks import BLOCK, regenerate
from same_text import SCRIPTS as PATHS
from same_text import compare, definitions

README = (ROOT / "README.md").read_text()
BANNERS = ["The model", "The data", "The training loop", "Checkpoints", "The launch"]


def test_same_text():
    assert compare(PATHS) == []
    shared = set(definitions(PATHS[0]))
    assert {"Net", "build_model", "load_data", "prepare", "evaluate", "save", "FIXED"} <= shared
    for path in PATHS:
        assert shared <= set(definitions(path)), path


def test_a_difference_is_found_and_mended(tmp_path):
    copies = [tmp_path / path.name for path in PATHS]
    for path, copy in zip(PATHS, copies):
        copy.write_text(path.read_text())
    copies[2].write_text(copies[2].read_text().replace("net.eval()", "net.train()"))
    copies[4].write_text(copies[4].read_text().replace("FIXED = ", "FIXED =  "))
    differ = [f"evaluate: {copies[2].name}", f"FIXED: {copies[4].name}"]
    assert compare(copies) == differ and compare(copies, fix=True) == differ
    assert compare(copies) == []
    assert [copy.read_text() for copy in copies] == [path.read_text() for path in PATHS]


@pytest.mark.parametrize("name", SCRIPTS)
def test_shape(name):
    text = open(script(name)).read()
    assert text.startswith("# /// script\n# requires-python")
    places = [text.index(f"# ---- {banner}") for banner in BANNERS]
    assert places == sorted(places)
    assert text.count("# ---- ") == len(BANNERS)
    modules = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add(node.module.split(".")[0])
    assert modules <= set(sys.stdlib_module_names) | {"torch", "torchvision", "numpy"}


def test_same_flags():
    """The flags of train_single.py are in all scripts, with the same words and defaults."""
    first = [line for line in open(script("train_single")) if line.startswith("add(")]
    assert len(first) == 21
    for name in SCRIPTS:
        lines = [line for line in open(script(name)) if line.startswith("add(")]
        assert [line for line in lines if line in first] == first, name


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name, monkeypatch):
    """In 80 columns a line a flag, with its default, in the same groups; then the commands."""
    monkeypatch.setenv("COLUMNS", "80")
    text = quick(name, "--help").out
    groups = re.findall(r"^(\w+):$", text, re.M)
    assert groups == ["options", "data", "model", "training", "output"] + ["processes"] * (
        name in DDP
    )
    flags, _, commands = text[text.index("data:") :].rpartition("\n\n")
    for line in flags.splitlines():
        assert re.fullmatch(r"\w+:|  --.* \(default: \S+\)|", line) and len(line) <= 80, line
    assert commands.count(f"{name}.py") >= 3 and commands in open(script(name)).read()
    described = set(re.findall(r"^  (--[\w-]+)", flags, re.M))
    assert described == set(re.findall(r'^add\("(--[\w-]+)', open(script(name)).read(), re.M)) - {
        "--local-rank"
    }


def test_requirements():
    assert (ROOT / "requirements.txt").read_text().split() == ["torch", "torchvision", "numpy"]


def test_readme_shows_the_real_diffs():
    text = README
    assert len(BLOCK.findall(text)) >= 10 and text.count("```diff") == len(BLOCK.findall(text))
    assert regenerate(text) == text  # else: python tests/readme_blocks.py --fix
    assert regenerate(text.replace("+    ddp = ", "+    wrapped = ")) == text
    with pytest.raises(ValueError, match="0 parts"):
        regenerate(text.replace("dist.all_reduce(stop)", "no such text", 1))


def test_readme_links():
    """Files and headings of this repository that README.md links to are there."""
    text = README
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.S), re.M)
    anchors = {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}
    links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if "://" not in link]
    assert links
    for link in links:
        assert link[1:] in anchors if link[0] == "#" else (ROOT / link).exists(), link


def test_readme_counts_lines():
    """How long the scripts are, and how many lines of `diff` differ, an old and a new one each."""
    for name in SCRIPTS:
        lines = Path(script(name)).read_text().splitlines()
        words = ["diff", script("train_single"), script(name)]
        found = subprocess.run(words, capture_output=True, text=True).stdout
        differ = len(re.findall(r"^[<>]", found, re.M)) or ""
        assert f"\n| {name}.py | {len(lines)} | {differ}".rstrip() in README, (len(lines), differ)
