"""The data sets: read as they lie on disk, the same to whom they go, and augmented as promised."""

import runpy
import shutil
import time
from pathlib import Path

import pytest
import torch
from conftest import write_folder
from helpers import metrics, quick, run, same, script, weights
from torchvision.transforms import functional


@pytest.fixture(scope="module")
def parts():
    return runpy.run_path(script("train_single"), run_name="script")


def load(parts, *flags):
    args = parts["parser"].parse_args([str(flag) for flag in flags])
    return args, parts["load_data"](args, torch.device("cpu"))


@pytest.mark.parametrize("name, channels, side", [("cifar10", 3, 32), ("fashion-mnist", 1, 28)])
def test_torchvision_sets(parts, data, name, channels, side):
    import conftest

    _, (train, test) = load(parts, "--dataset", name, "--data-dir", data)
    images, labels = conftest.pictures(640 + 203, channels, side, 0)
    assert len(train) == 640 and len(test) == 203 and len(train.classes) == 10
    for part, x, y in ((train, images[:640], labels[:640]), (test, images[640:], labels[640:])):
        assert torch.equal(part.tensors[0], torch.from_numpy(x).permute(0, 3, 1, 2))
        assert torch.equal(part.tensors[1], torch.from_numpy(y))
    batch = train.__getitems__([5, 3])
    assert torch.equal(batch[0][1], train[3][0]) and batch[0].dtype == torch.uint8
    quick("train_single", "--dataset", name, "--data-dir", data, "--epochs", "1", "--output", "out")
    assert len(metrics("out")) == 1


def test_folder(parts, data):
    _, (train, test) = load(parts, "--dataset", data / "pictures", "--image-size", "24")
    assert len(train) == 96 and len(test) == 35 and train.classes == ["a", "b", "c"]
    assert train[0][0].shape == (3, 24, 24) and train[0][0].dtype == torch.uint8
    _, (held, _) = load(
        parts, "--dataset", data / "pictures", "--image-size", "24", "--data-on-device"
    )
    assert all(
        torch.equal(held[i][0], train[i][0]) and held[i][1] == train[i][1] for i in range(96)
    )
    assert held.classes == train.classes


def test_folder_trains_the_same_from_workers_and_memory(data):
    flags = ["--dataset", data / "pictures", "--batch-size", "8", "--epochs", "2", "--augment"]
    for number, more in enumerate([["--workers", "0"], ["--workers", "2"], ["--data-on-device"]]):
        quick("train_single", *flags, *more, "--output", f"out{number}")
    assert same(weights("out0"), weights("out1")) and same(weights("out0"), weights("out2"))
    assert weights("out0")["fc3.weight"].shape[0] == 3


@pytest.mark.slow
def test_folder_on_two_processes(tmp_path):
    folder = write_folder(tmp_path / "pictures", 64, 9, test_name="val", kind="jpg")
    flags = ["--dataset", folder, "--batch-size", "8", "--epochs", "2", "--output", "out"]
    run("train_ddp_spawn", *flags, "--workers", "1", processes=2)
    assert len(metrics("out")) == 2
    shutil.rmtree("out")
    run("train_ddp_torchrun", *flags, "--data-on-device", processes=2)
    assert len(metrics("out")) == 2


def test_synthetic(parts):
    start = time.perf_counter()
    _, (train, test) = load(parts, "--dataset", "synthetic")
    assert time.perf_counter() - start < 3
    _, (again, _) = load(parts, "--dataset", "synthetic")
    _, (other, _) = load(parts, "--dataset", "synthetic", "--seed", "77")
    assert torch.equal(train.tensors[0], again.tensors[0])
    assert not torch.equal(train.tensors[0], other.tensors[0])
    assert train.tensors[0].shape == (10_000, 3, 32, 32) and len(test) == 2_000
    assert train.tensors[1].bincount().min() > 800
    assert not any(torch.equal(test[0][0], image) for image in train.tensors[0])
    assert train.tensors[0].min() < 40 and train.tensors[0].max() > 215


def test_synthetic_is_learned():
    quick("train_single", "--dataset", "synthetic", "--epochs", "4", "--output", "out")
    accuracy = [row["test_accuracy"] for row in metrics("out")]
    assert 0.2 < accuracy[0] < 0.9 < accuracy[3]


def test_prepare(parts, data):
    args, (train, _) = load(parts, "--dataset", "cifar10", "--data-dir", data, "--repeat", "2")
    images, labels = train[torch.arange(50)]
    out, same_labels = parts["prepare"](args, (images, labels), torch.device("cpu"))
    expected = (images.float() - 127.5) / 64
    assert torch.equal(out, torch.cat([expected, expected], 1)) and torch.equal(labels, same_labels)


def test_augmentation_is_a_flip_and_a_shifted_crop(parts, data):
    """Each image equals torchvision's flip, 4 pixels of padding and crop at one of 81 places."""
    args, (train, _) = load(parts, "--dataset", "cifar10", "--data-dir", data)
    images, labels = train[torch.arange(100)]
    draw = torch.Generator().manual_seed(0)
    draws = (torch.rand(100, 3, generator=draw) * torch.tensor([2, 9, 9])).long()
    out, _ = parts["prepare"](args, (images, labels), torch.device("cpu"), draws)
    for image, flip, result, right, down in zip(images, draws[:, 0], out, *draws[:, 1:].T):
        image = functional.pad(functional.hflip(image) if flip else image, [4] * 4)
        places = [(down, right), (down, 8 - right)]  # a flip turns the shift round as well
        crops = [functional.crop(image, top, left, 32, 32).float() for top, left in places]
        assert any(torch.equal((crop - 127.5) / 64, result) for crop in crops)
    assert {0, 8} <= set(draws[:, 1].tolist()) and draws[:, 0].float().mean() < 0.7


def test_draws_do_not_depend_on_the_step(data):
    """Augmentation is the same whether an epoch is done in one go or not: see test_exact_resume."""
    flags = ["--dataset", "cifar10", "--data-dir", data, "--epochs", "2", "--augment"]
    quick("train_single", *flags, "--output", "one")
    quick("train_single", *flags, "--output", "two", "--checkpoint-every", "3")
    assert same(weights("one"), weights("two"))


def test_no_image_in_the_middle_of_training(tmp_path):
    """What becomes unreadable later is named too, and what was saved stays."""
    folder = write_folder(tmp_path / "pictures", 64, 9)
    flags = ["--dataset", folder, "--batch-size", "8", "--output", "out", "--workers", "2"]
    quick("train_single", *flags, "--epochs", "1")
    before = Path("out/last.pt").read_bytes()
    bad = sorted(folder.glob("train/*/*"))[7]
    bad.write_bytes(bad.read_bytes()[:60])
    err = quick("train_single", *flags, "--epochs", "2", "--resume", status=2).err
    assert err.count("\n") == 1 and str(bad) in err
    assert Path("out/last.pt").read_bytes() == before
