"""`python -m pytest` on a machine with GPUs, which only `pytest -m gpu` uses."""

import sys
from pathlib import Path

import pytest
from helpers import ROOT, Cold, done, run

# A torch that pretends to have two GPUs, unless they are hidden, and notes what initializes CUDA.
PRETEND = """
import os
import torch

def count():
    return 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else 2

def initialize(*words):
    with open(os.environ["GPU_LOG"], "a") as file:
        file.write(f"process {os.getpid()} initializes CUDA\\n")
    raise RuntimeError("these GPUs are not real")

plain = torch.accelerator.current_accelerator
torch.cuda.device_count, torch.cuda.is_available = count, lambda: count() > 0
torch.cuda.init = torch.cuda._lazy_init = initialize
torch.accelerator.current_accelerator = lambda check_available=False: (
    torch.device("cuda") if count() else plain(check_available)
)
"""
COLLECT = """
import sys
import pytest
for name in "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES":  # they are hidden from this fork
    del os.environ[name]
for name in "helpers", "harness":  # it has imported these
    sys.modules.pop(name, None)
status = pytest.main([{tests!r}, "--collect-only", "-q", "-m", {chosen!r}])
print(f"status {{status}}, {{count()}} GPUs")
"""


@pytest.fixture
def gpu_log(monkeypatch):
    """The file in which the pretended GPUs note their use."""
    monkeypatch.setenv("GPU_LOG", str(Path("gpu.log").resolve()))
    return Path("gpu.log")


@pytest.mark.slow
def test_collecting(gpu_log):
    """All tests, also those that this command does not choose, are imported without CUDA."""
    for chosen, gpus in ("not slow and not gpu", 0), ("gpu", 2):
        code = PRETEND + COLLECT.format(tests=str(ROOT / "tests"), chosen=chosen)
        Path("collect.py").write_text(code)
        text = run(Path("collect.py").resolve(), processes=0)
        assert f", {gpus} GPUs" in text and (gpus or "status 0" in text), text
        assert gpu_log.exists() == (gpus > 0), text  # test_gpu.py asks what they can do


# Python imports sitecustomize at its start; this one lets the above follow torch's own import.
SITE = """
import importlib.util
import sys

class AfterTorch:
    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        plain = spec.loader.exec_module

        def exec_module(module):
            plain(module)
            import pretend

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, AfterTorch())
"""
SEES = """
import sys
from pathlib import Path

import torch
from helpers import Cold, done, run
from harness import GPUS

def test_sees():
    assert GPUS == torch.cuda.device_count() == 0
    assert torch.accelerator.current_accelerator(check_available=True) is None
    Path("script.py").write_text("import torch\\nprint(torch.cuda.device_count(), 'GPUs')")
    path = Path("script.py").resolve()
    assert "0 GPUs" in done([Cold([sys.executable, path], "cold.log")])
    assert "0 GPUs" in run(path, processes=0)  # in a fork of the server
"""


@pytest.mark.long
def test_all_processes(gpu_log, monkeypatch):
    """GPUs are hidden from the tests' process, from what it starts, and from pytest-xdist's
    workers. Tests that would use a GPU pass."""
    pytest.importorskip("xdist")
    Path("site").mkdir()
    Path("site/sitecustomize.py").write_text(SITE)
    Path("site/pretend.py").write_text(PRETEND)
    Path("test_sees.py").write_text(SEES)
    for name in "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "PYTEST_XDIST_WORKER":
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(Path("site").resolve()))
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "pyproject.toml", "-n", 1]
    command += ["-p", "no:cacheprovider", "-k", "sees or test_files", "--basetemp=of"]
    command += ["test_sees.py", ROOT / "tests" / "test_own_loop.py"]
    text = done([Cold(command, "pytest.log")])
    assert " passed" in text and not gpu_log.exists(), text
