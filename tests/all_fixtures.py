"""The fixtures of all tests. conftest.py imports this file once it has hidden the GPUs."""

import json
import pickle
import shutil
from dataclasses import asdict

import numpy as np
import pytest
import torch
from helpers import COMPLETE, content, here, kill, marked, train
from PIL import Image
from torchvision import models

from ddp_check.process import Process
from ddp_check.runs import Options


@pytest.fixture(autouse=True)
def work(tmp_path, monkeypatch):
    """Each test works in an empty folder, without network."""
    monkeypatch.chdir(tmp_path)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens: no download, ever
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))  # marks the processes that this test starts
    yield tmp_path
    for pid in marked():
        kill(pid)


def pictures(count, channels, side):
    """uint8 (count, side, side, channels) and labels: a class is a brightness, with noise."""
    random = np.random.default_rng(0)
    labels = random.integers(10, size=count)
    noise = random.integers(40, size=(count, side, side, channels))
    return (noise + 20 * labels[:, None, None, None]).astype(np.uint8), labels


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Fashion-MNIST of 640 + 203 images as IDX files, and `pictures/` of 96 + 3 in 3 classes."""
    root = tmp_path_factory.mktemp("data")
    raw = root / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    images, labels = pictures(640 + 203, 1, 28)
    for name, part in ("train", slice(640)), ("t10k", slice(640, None)):
        for kind, array in ("images", images[part, ..., 0]), ("labels", labels[part]):
            head = np.array([0x800 + array.ndim, *array.shape], ">i4").tobytes()
            content = head + array.astype(np.uint8).tobytes()
            (raw / f"{name}-{kind}-idx{array.ndim}-ubyte").write_bytes(content)
    for i, image in enumerate(pictures(96 + 3, 3, 40)[0]):
        folder = root / "pictures" / ("train" if i < 96 else "test") / "abc"[i % 3]
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(image[: 36 + i % 4]).convert("L" if i == 7 else "RGB")
        image.save(folder / f"{i:05}.{'png' if i % 4 else 'jpg'}")
    return root


@pytest.fixture(scope="session")
def fashion(data):
    """The flags for its small Fashion-MNIST: 40 steps of 16 an epoch."""
    return ["--dataset", "fashion-mnist", "--data-dir", data]


@pytest.fixture
def refused(capsys):
    """Asserts that a script refuses these flags in one line, and that no file changes."""

    def refused(says, name, *flags):
        before = content()
        with pytest.raises(SystemExit, match="2"):
            here(name, *flags)
        said = capsys.readouterr().err
        assert says in said and said.count("error: ") == 1 and content() == before, said

    return refused


@pytest.fixture(scope="session")
def trained(fashion, tmp_path_factory):
    """The folder of a run of two epochs."""
    folder = tmp_path_factory.mktemp("trained") / "out"
    train(*fashion, "--epochs", 2, "--output", folder)
    return folder


@pytest.fixture
def out(trained, work):
    """A copy of it: out/ in the test's folder."""
    return shutil.copytree(trained, "out")


@pytest.fixture
def pretrained(monkeypatch, tmp_path):
    """A model's name, and a file of random weights where torchvision keeps the downloaded ones."""
    name = "shufflenet_v2_x0_5"
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    url = models.get_model_weights(name).DEFAULT.url
    file = tmp_path / "hub" / "checkpoints" / url.rpartition("/")[2]
    file.parent.mkdir(parents=True)
    torch.save(models.get_model(name).state_dict(), file)
    return name, file


@pytest.fixture
def denied(refused, fashion):
    def denied(says, flags):
        refused(says, COMPLETE, *fashion, "--output", "out", *flags.split())

    return denied


@pytest.fixture
def make_process(tmp_path, monkeypatch):
    """A Process, as one of a run has it, of two ranks."""

    def make(run="all", rank=0, known=({},) * 5, **options):
        facts = {"folder": str(tmp_path), "nproc": 2, "run": run, "seed": 0, "short": None}
        facts |= asdict(Options(20)) | options
        monkeypatch.setenv("DDP_CHECK", json.dumps(facts))
        with open(tmp_path / "one.draws", "wb") as file:
            pickle.dump((20, *known), file)
        return Process(rank)

    return make
