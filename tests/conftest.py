import contextlib
import os
import pickle
import signal
import struct
from multiprocessing import forkserver

import numpy as np
import pytest
import torch
from helpers import processes
from PIL import Image


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the slow tests too")


def pytest_collection_finish(session):
    os.environ["PYTHONWARNINGS"] = "ignore"
    forkserver.ensure_running()  # before there is a test whose mark it would bear


def pytest_collection_modifyitems(config, items):
    gpu = torch.accelerator.is_available()
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))
        if "gpu" in item.keywords and not gpu:
            item.add_marker(pytest.mark.skip(reason="there is no GPU"))


@pytest.fixture(autouse=True)
def work(request, tmp_path, monkeypatch):
    """Each test works in an empty folder, without network and, unless marked so, without GPU."""
    if "gpu" not in request.keywords:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.chdir(tmp_path)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens: no download, ever
    monkeypatch.setenv("TEST_FOLDER", str(tmp_path))  # the mark of all processes of this test
    yield tmp_path
    for number in processes():  # a test that fails leaves some, which would slow down all others
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)


def pictures(count, channels, side, seed):
    """uint8 (count, side, side, channels) and labels: a class is a brightness, with noise."""
    random = np.random.default_rng(seed)
    labels = random.integers(10, size=count)
    images = (
        random.integers(40, size=(count, side, side, channels)) + 20 * labels[:, None, None, None]
    )
    return images.astype(np.uint8), labels


def write_cifar10(root, train, test, seed=0):
    """CIFAR-10 as its authors ship it: five pickled batches, a test batch, the names."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    images, labels = pictures(train + test, 3, 32, seed)
    rows = images.transpose(0, 3, 1, 2).reshape(train + test, -1)
    cuts = [train * i // 5 for i in range(6)] + [train + test]
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for name, start, end in zip(names, cuts, cuts[1:]):
        batch = {"batch_label": name, "labels": labels[start:end].tolist()}
        batch |= {"data": rows[start:end], "filenames": ["x.png"] * (end - start)}
        with open(folder / name, "wb") as file:
            pickle.dump(batch, file, protocol=2)
    with open(folder / "batches.meta", "wb") as file:
        pickle.dump({"label_names": [f"class{i}" for i in range(10)]}, file, protocol=2)
    return images, labels


def write_fashion_mnist(root, train, test, seed=0):
    """Fashion-MNIST as IDX files: magic number, sizes, bytes."""
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    images, labels = pictures(train + test, 1, 28, seed)
    for name, part in (("train", slice(0, train)), ("t10k", slice(train, None))):
        x, y = images[part], labels[part].astype(np.uint8)
        head = struct.pack(">IIII", 0x803, len(x), 28, 28)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(head + x.tobytes())
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(
            struct.pack(">II", 0x801, len(y)) + y.tobytes()
        )
    return images, labels


def write_folder(root, train, test, seed=0, test_name="test", kind="png"):
    """Image files in one sub-folder a class, three classes, of several sizes."""
    images, labels = pictures(train + test, 3, 40, seed)
    for i, (image, label) in enumerate(zip(images, labels)):
        folder = root / ("train" if i < train else test_name) / "abc"[label % 3]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[: 36 + i % 4]).save(folder / f"{i:05}.{kind}")
    return root


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """A folder with small data sets in the true formats: 640 + 203 images each, and `pictures`."""
    root = tmp_path_factory.mktemp("data")
    write_cifar10(root, 640, 203)
    write_fashion_mnist(root, 640, 203)
    write_folder(root / "pictures", 96, 35)
    os.chmod(root, 0o755)
    return root
