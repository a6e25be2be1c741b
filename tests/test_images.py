"""Images: decoded from every format, packed, cropped; fine-tuning on a folder of one's own."""

import csv
import inspect
import itertools
import json
import multiprocessing
import os
import re
import struct
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pack_images as packer
import pytest
import torch
import train
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import datasets
from torchvision.transforms import v2

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {"train": train, "pack": packer}


def with_scripts():
    """The environment of a process that imports the scripts."""
    return {**os.environ, "PYTHONPATH": str(ROOT / "complete")}


def parse(*flags):
    flags = ["--device", "cpu", "--workers", 0, *flags]
    return train.parser.parse_args([str(flag) for flag in flags])


def load(folder, *flags):
    return train.load_data(parse("--dataset", folder, *flags))


def run(*flags):
    """A run in this process. Returns model.pt."""
    args = parse(*flags)
    train.check_flags(args)
    train.main(args)
    return torch.load(args.output / "model.pt", weights_only=True)


def pack(*words):
    packer.main(packer.parser.parse_args(["--workers", "0", *(str(word) for word in words)]))


def rows(output):
    with open(Path(output, "metrics.csv")) as file:
        return list(csv.DictReader(file))


def write_folder(folder, count=16, tests=8, side=90, suffix="jpg"):
    """Pictures of noise: those of class "a" are dark, those of "b" bright."""
    random = np.random.default_rng(0)
    for i in range(count + tests):
        path = Path(folder, "train" if i < count else "test", "ab"[i % 2], f"{i:05}.{suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 120, (side, side + 10, 3)) + 120 * (i % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    return Path(folder)


# ---- Formats -------------------------------------------------------------------------------------
def corners(width=128, height=96, mode="RGB"):
    """White, with a red upper left, a green upper right and a blue lower left quarter."""
    image = Image.new("RGB", (width, height), "white")
    image.paste((250, 0, 0), (0, 0, width // 2, height // 2))
    image.paste((0, 250, 0), (width // 2, 0, width, height // 2))
    image.paste((0, 0, 250), (0, height // 2, width // 2, height))
    return image.convert(mode)


def rotated(orientation, transpose):
    """A file that shows `corners` only to those who obey its EXIF tag."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return corners().transpose(transpose), {"exif": exif, "quality": 95}


def sixteen_bits():
    grey = np.asarray(corners(mode="L")).astype(np.uint16)
    return Image.fromarray(grey * 257), {}


def transparent_palette():
    return corners().quantize(8), {"transparency": bytes([0, 128, 255, 255])}


FORMATS = {
    "rgb.jpg": (corners(), {"quality": 95}),
    "large.jpg": (corners(1280, 960), {"quality": 95}),
    "progressive.jpeg": (corners(), {"quality": 95, "progressive": True}),
    "grey.jpg": (corners(mode="L"), {"quality": 95}),
    "cmyk.jpg": (corners(mode="CMYK"), {"quality": 95}),
    "rotated.jpg": rotated(6, Image.Transpose.ROTATE_90),
    "upside_down.jpg": rotated(3, Image.Transpose.ROTATE_180),
    "mirrored.jpg": rotated(2, Image.Transpose.FLIP_LEFT_RIGHT),
    "rotated.png": rotated(8, Image.Transpose.ROTATE_270),
    "rgb.png": (corners(), {}),
    "alpha.png": (corners(mode="RGBA"), {}),
    "grey.png": (corners(mode="L"), {}),
    "grey_alpha.png": (corners(mode="LA"), {}),
    "black_and_white.png": (corners().convert("1", dither=Image.Dither.NONE), {}),
    "palette.png": (corners().quantize(8), {}),
    "transparent_palette.png": transparent_palette(),
    "sixteen_bits.png": sixteen_bits(),
    "sixteen_bits.tif": sixteen_bits(),
    "rgb.tiff": (corners(), {"compression": "tiff_lzw"}),
    "cmyk.tif": (corners(mode="CMYK"), {}),
    "rgb.bmp": (corners(), {}),
    "rgb.webp": (corners(), {"quality": 95}),
    "lossless.webp": (corners(mode="RGBA"), {"lossless": True}),
    "rgb.ppm": (corners(), {}),
    "grey.pgm": (corners(mode="L"), {}),
}


@pytest.fixture
def formats():
    """A folder with a file of each format, once to train on and once to test on."""
    for part, (name, (image, options)) in itertools.product(("train", "test"), FORMATS.items()):
        path = format_path(name, part)
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, **options)
    return Path("formats")


def format_path(name, part="train"):
    return Path("formats", part, "grey" if is_grey(name) else "colour", name)


def is_grey(name):
    return "grey" in name or "sixteen" in name


@pytest.mark.filterwarnings("error", "ignore:Palette images with Transparency")
def test_every_format_is_upright_rgb(formats):
    for name in FORMATS:
        expected = corners(mode="L") if is_grey(name) else corners()
        if "black" in name:
            expected = corners().convert("1", dither=Image.Dither.NONE)
        expected = np.asarray(expected.convert("RGB")).astype(int)
        image = train.load_image(format_path(name), 60)
        assert image.mode == "RGB", name
        scale = 2 if name == "large.jpg" else 1  # 10 times as large, and drafted at 1/8 or so
        if scale == 2:
            assert image.size == (160, 120)  # 1280 x 960 / 8: still at least 60
            image = image.resize((128, 96))
        difference = abs(np.asarray(image).astype(int) - expected)
        assert difference.shape == expected.shape, name
        difference[44:52], difference[:, 60:68] = 0, 0  # edges are blurred
        assert difference.max() <= 16, (name, difference.max())


def test_packed_pixels_are_those_of_the_folder(formats):
    """In the same order too, with and without processes that decode."""
    pack(formats, "packed", "--side", 73)
    pack(formats, "by_workers", "--side", 73, "--workers", 2)
    found = [load(name, "--image-size", 64) for name in ("formats", "packed", "by_workers")]
    for plain, *packed in zip(*found):
        for other in packed:
            if type(plain) is int:
                assert plain == other == 2
                continue
            assert plain.classes == other.classes == ["colour", "grey"]
            assert len(plain) == len(other) == len(FORMATS)
            assert list(plain.targets) == list(other.targets)
            for (image, label), (pixels, same_label) in zip(plain, other, strict=True):
                assert image.shape == (3, 73, 73) and torch.equal(image, pixels)
                assert label == same_label and type(same_label) is int
    assert not sorted(Path("packed").glob("*.tmp"))
    assert json.loads(Path("packed", "classes.json").read_text()) == ["colour", "grey"]


def exif(*entries):
    """An EXIF block that says orientation 6, and has more entries: tag, type, count, value."""
    entries = [(0x0112, 3, 1, struct.pack("<HH", 6, 0)), *entries]
    block = struct.pack("<2sHLH", b"II", 42, 8, len(entries))
    return b"Exif\0\0" + block + b"".join(struct.pack("<HHL4s", *entry) for entry in entries)


# What PIL raises as it reads the block, or as it writes the orientation's neighbours again; and
# whether the orientation can be read.
BROKEN_EXIF = {
    "struct.error": (exif((0x0100, 2, 4, b"abc\0")), True),
    "TypeError": (exif((0x011A, 2, 4, b"abc\0")), True),
    "AttributeError": (exif((0x010F, 11, 1, b"abc\0")), True),
    "struct.error while reading": (b"Exif\0\0II*\0", False),
    "SyntaxError": (b"Exif\0\0" + bytes(range(100)), False),
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind", BROKEN_EXIF)
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_broken_exif_block_spoils_no_image(script, kind, suffix):
    """An image is turned upright if its orientation can be read, and else stays as it lies."""
    block, readable = BROKEN_EXIF[kind]
    corners(80, 60).save(f"photo.{suffix}", exif=block)
    image = SCRIPTS[script].load_image(f"photo.{suffix}", 60)
    assert image.size == ((60, 80) if readable else (80, 60))


def write_numbers(path, kind):
    numbers = {"float": np.float32, "signed": np.int16, "long": np.int32}[kind]
    Image.fromarray((np.random.default_rng(0).random((20, 20)) * 100).astype(numbers)).save(path)


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("kind", ["float", "signed", "long"])
def test_pixels_without_a_known_maximum_are_refused(script, kind):
    """Floats are from 0 to 1, or to 255, or anything: no guess is right for all."""
    write_numbers("numbers.tif", kind)
    with pytest.raises(OSError, match=r"numbers\.tif: its pixels \(mode [FI]\) have no known"):
        SCRIPTS[script].load_image("numbers.tif", 10)


def test_sixteen_bits_are_divided_by_256():
    values = np.arange(0, 2**16, 256, np.uint16).reshape(16, 16) + 255
    for name in ("ramp.png", "ramp.tif"):
        Image.fromarray(values).save(name)
        assert (np.asarray(train.load_image(name, 10))[..., 0] == values // 256).all()


BROKEN = {
    "cut.jpg": lambda whole: whole["jpg"][:-500],
    "cut.png": lambda whole: whole["png"][:-50],
    "damaged.png": lambda whole: whole["png"].replace(b"IDAT", b"IDAT" + bytes(50), 1)[
        : len(whole["png"])
    ],
    "empty.jpg": lambda whole: b"",
    "text.jpg": lambda whole: b"no image",
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_training_names_a_broken_file(name, workers):
    folder = write_folder("pictures")
    whole = {}
    for suffix in ("jpg", "png"):
        corners().save(f"whole.{suffix}")
        whole[suffix] = Path(f"whole.{suffix}").read_bytes()
    (folder / "train" / "b" / name).write_bytes(BROKEN[name](whole))
    train_set = load(folder)[0]
    args = parse("--workers", workers)
    loader = train.make_loader(args, train_set, 4, range(len(train_set)), torch.device("cpu"))
    with pytest.raises(OSError, match=re.escape(f"pictures/train/b/{name}: ")):
        list(loader)


# ---- Folders -------------------------------------------------------------------------------------
def both(folder, capsys):
    """What load_data and pack_images.py find in a folder, and what they print: it is the same."""
    train_set, test_set, classes = load(folder)
    assert train_set.classes == test_set.classes and len(train_set.classes) == classes
    printed = [line for line in capsys.readouterr().out.splitlines() if " min" not in line]
    samples = [[os.fsdecode(path) for path in data.paths] for data in (train_set, test_set)]
    pack(folder, "packed_too", "--side", 8)
    packed = [line for line in capsys.readouterr().out.splitlines() if " min" not in line]
    assert packed == printed
    for data, part in (train_set, "train"), (test_set, "test"):
        assert np.load(f"packed_too/{part}.npy").tolist() == data.targets.tolist()
    return *samples, printed


def refused(folder, capsys):
    """Both scripts refuse a folder with the same message."""
    for call in partial(load, folder), partial(pack, folder, "refused"):
        with pytest.raises(SystemExit) as error:
            call()
        assert error.value.code == 2 and not Path("refused").exists()
    messages = [line for line in capsys.readouterr().err.split("error: ")[1:]]
    assert messages[0].split("usage:")[0] == messages[1]
    return messages[1].rstrip("\n")


@pytest.mark.parametrize("alone", [True, False])
def test_every_tenth_image_is_for_testing(capsys, alone):
    """Of each class, by file name, in a folder that has train/ alone, or only class folders."""
    folder = write_folder("pictures", count=46, tests=0)
    folder = folder / "train" if alone else folder
    (folder / "b" if alone else folder / "train" / "b").joinpath("zz.jpg").write_bytes(
        Path("pictures/train/b/00001.jpg").read_bytes()
    )
    train_paths, test_paths, printed = both(folder, capsys)
    expected = [f"a/{i:05}.jpg" for i in (0, 20, 40)] + [f"b/{i:05}.jpg" for i in (1, 21, 41)]
    assert test_paths == [f"pictures/train/{name}" for name in expected]
    assert len(train_paths) == 41 and not {*train_paths} & {*test_paths}
    assert printed == [f"{folder} has no test/: every tenth image of each class is for testing"]


def test_two_images_of_a_class_suffice(capsys):
    folder = write_folder("pictures", count=4, tests=0)
    assert [len(paths) for paths in both(folder, capsys)[:2]] == [2, 2]
    (folder / "train" / "b" / "00003.jpg").unlink()
    assert "no images to train or to test on in b" in refused(folder, capsys)


def test_files_left_out_are_counted_and_said(capsys, monkeypatch):
    """By suffix; case does not matter. Only rank 0 says it."""
    folder = write_folder("pictures")
    for path in sorted(folder.glob("train/a/*"))[:3]:
        path.rename(path.with_suffix(".jfif"))
    for path in sorted(folder.glob("test/b/*"))[:2]:
        path.rename(path.with_suffix(".JPG"))
    Path(folder, "train", "a", "notes").touch()
    *_, printed = both(folder, capsys)
    assert printed == ["pictures: 4 files left out by their suffix: 3 .jfif, 1 without"]
    monkeypatch.setenv("RANK", "1")
    load(folder)
    assert capsys.readouterr().out == ""


def test_a_class_without_images_is_named(capsys):
    folder = write_folder("pictures")
    for path in folder.glob("test/b/*"):
        path.rename(path.with_suffix(".jfif"))
    message = refused(folder, capsys)
    assert "test on in b" in message and "4 .jfif" in message


def test_one_level_too_deep_is_refused(capsys):
    """All images would be of one class, and the accuracy 1.0000."""
    write_folder("deep/train/pictures")
    assert "deep/train has only one class, pictures" in refused(Path("deep"), capsys)
    assert "deep has only one class" not in refused(Path("deep/train/pictures/train/a"), capsys)


@pytest.mark.parametrize("names", [("Train", "Test"), ("training", "test"), ("1", "2")])
def test_parts_by_other_names_are_not_taken_for_classes(capsys, names):
    folder = write_folder("pictures")
    for old, new in zip(("train", "test"), names):
        (folder / old).rename(folder / new)
    message = f"pictures has no train/, and no images directly in {', '.join(sorted(names))}"
    assert message == refused(folder, capsys)


def test_folders_without_images_are_refused(capsys):
    Path("empty").mkdir()
    assert "empty has no folders" in refused(Path("empty"), capsys)
    Path("empty", "photo.jpg").touch()
    assert "empty has no folders" in refused(Path("empty"), capsys)


@pytest.mark.parametrize("name", ["c", ".ipynb_checkpoints"])
@pytest.mark.parametrize("part", ["train", "test"])
def test_a_class_in_one_part_only_is_named(capsys, part, name):
    folder = write_folder("pictures")
    (folder / part / name).mkdir()
    assert f"train/ and test/ differ in {name}: " in refused(folder, capsys)


@pytest.mark.parametrize("name", ["find_images", "load_image"])
def test_both_scripts_have_one_text(name):
    assert inspect.getsource(getattr(train, name)) == inspect.getsource(getattr(packer, name))


def test_a_name_that_is_no_text(capsys):
    """Archives from elsewhere have names in other encodings; the file is read all the same."""
    folder = write_folder("pictures")
    path = folder / "train" / "a" / os.fsdecode(b"caf\xe9 \xff.jpg")
    (folder / "train" / "a" / "00000.jpg").rename(path)
    assert both(folder, capsys)[0][7] == str(path)


# ---- Packing -------------------------------------------------------------------------------------
def test_different_classes_are_refused_before_anything_is_decoded(capsys):
    folder = write_folder("pictures")
    (folder / "train" / "a" / "broken.jpg").write_bytes(b"no image")
    (folder / "test" / "a").rename(folder / "test" / "c")
    with pytest.raises(SystemExit) as error:
        pack(folder, "packed")
    assert error.value.code == 2 and "differ in a, c" in capsys.readouterr().err
    assert not Path("packed").exists()


@pytest.mark.parametrize("broken", ["text", "cut", "empty"])
def test_a_broken_file_is_named(capsys, broken):
    folder = write_folder("pictures")
    path = folder / "train" / "a" / "00004.jpg"
    content = {"text": b"no image", "cut": path.read_bytes()[:2000], "empty": b""}
    path.write_bytes(content[broken])
    with pytest.raises(SystemExit) as error:
        pack(folder, "packed", "--side", 20)
    assert str(path) in str(error.value) and not Path("packed", "classes.json").exists()
    with pytest.raises(SystemExit):  # what is not complete is not taken for a packed folder
        load("packed")
    pack(folder, "packed", "--side", 20, "--skip-broken")
    output = capsys.readouterr().out
    assert f"left out: {path}" in output and "train: 15 images" in output, output
    assert "1 left out" in output and "packed is not complete" in output
    train_set, test_set, classes = load("packed")
    assert (len(train_set), len(test_set), classes) == (15, 8, 2)
    for image, label in map(train_set.__getitem__, range(15)):  # each has its own label still
        assert (image.float().mean() > 120) == label


def test_a_complete_folder_is_not_packed_again(capsys):
    folder = write_folder("pictures")
    pack(folder, "packed", "--side", 20)
    before = Path("packed", "train.bin").read_bytes()
    with pytest.raises(SystemExit) as error:
        pack(folder, "packed", "--side", 10)
    assert error.value.code == 2 and "is complete" in capsys.readouterr().err
    assert Path("packed", "train.bin").read_bytes() == before
    for flags in (["--side", 0], ["--workers", -1]):
        with pytest.raises(SystemExit) as error:
            pack(folder, "other", *flags)
        assert error.value.code == 2


def test_progress_lines(capsys, monkeypatch):
    """A line every five seconds, with the time left, that can be kept in a log file."""
    clock = iter(range(0, 10_000, 2))
    monkeypatch.setattr(packer.time, "monotonic", lambda: next(clock))
    pack(write_folder("pictures"), "packed", "--side", 20)
    output = capsys.readouterr().out
    pattern = r"^train: (\d+) of 16 images, \d+ images/s, ([\d.]+) min left$"
    found = re.findall(pattern, output, re.M)
    assert "\r" not in output and 3 < len(found) < 16, output
    counts, left = zip(*((int(count), float(minutes)) for count, minutes in found))
    assert sorted(set(counts)) == list(counts) and sorted(left, reverse=True) == list(left)


@pytest.mark.slow
def test_start_method():
    """The default on Linux is fork up to Python 3.13, then forkserver, which needs the same of a
    script as spawn."""
    folder = write_folder("pictures")
    lines = ["import multiprocessing, pack_images", "if __name__ == '__main__':"]
    lines += ["    multiprocessing.set_start_method('spawn')"]
    lines += ["    pack_images.main(pack_images.parser.parse_args())"]
    Path("by_spawn.py").write_text("\n".join(lines))
    command = [sys.executable, "by_spawn.py", folder, "packed", "--side", "20", "--workers", "1"]
    subprocess.run(command, check=True, env=with_scripts())
    pack(folder, "by_one", "--side", 20)
    for name in ("train.bin", "test.bin", "train.npy", "test.npy", "classes.json"):
        assert Path("packed", name).read_bytes() == Path("by_one", name).read_bytes()


def pack_and_wait(folder, name, calls):
    """Pack in a process of its own, which stops forever in that call of a function."""
    module, function = {"load_image": packer, "replace": packer.os}[name], name
    original, done = getattr(module, function), []

    def wait(*arguments):
        done.append(arguments)
        if len(done) == calls:
            Path("waits").touch()
            time.sleep(3600)
        return original(*arguments)

    setattr(module, function, wait)
    pack(folder, "packed", "--side", 20)


def test_killed_while_packing():
    """In the first part, in the second, or in the last moment, it leaves no folder that would be
    taken for a packed one; and packing again mends what is there."""
    folder = write_folder("pictures")
    pack(folder, "whole", "--side", 20)
    for place in ("load_image", 10), ("load_image", 20), ("replace", 1):
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=pack_and_wait, args=(folder, *place))
        process.start()
        while not Path("waits").exists():
            assert process.exitcode is None
            time.sleep(0.01)
        process.kill()
        process.join()
        Path("waits").unlink()
        assert Path("packed", "train.bin").exists()
        with pytest.raises(SystemExit):
            load("packed")
    pack(folder, "packed", "--side", 20)
    for path in Path("whole").iterdir():
        assert Path("packed", path.name).read_bytes() == path.read_bytes()


# ---- Packed images -------------------------------------------------------------------------------
class Vanishing(Dataset):
    """Removes the file of its images as soon as one was read: whoever opens it again finds none."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        image = self.images[i]
        Path("packed/train.bin").unlink(missing_ok=True)
        return image


METHODS = [None, "fork", "forkserver", pytest.param("spawn", marks=pytest.mark.slow)]


@pytest.mark.parametrize("method", METHODS)
def test_packed_images_are_opened_once(method):
    """In each process, however it was started, also when the parent process has read some."""
    pack(write_folder("pictures"), "packed", "--side", 20)
    images = load("packed")[0]
    pixels = np.fromfile("packed/train.bin", np.uint8).reshape(16, 3, 20, 20)
    assert (images[3][0].numpy() == pixels[3]).all()
    options = {"num_workers": 1, "multiprocessing_context": method} if method else {}
    order = torch.randperm(16).tolist()
    for i, (image, label) in zip(
        order, DataLoader(Vanishing(images), None, sampler=order, **options)
    ):
        assert (image.numpy() == pixels[i]).all() and label == images.targets[i]
    assert not Path("packed/train.bin").exists()


def test_two_workers_read_from_one_file():
    """A fork shares the open file, and with it its position."""
    pack(write_folder("pictures"), "packed", "--side", 20)
    images = load("packed")[0]
    order = torch.randint(16, (2000,)).tolist()
    options = {"num_workers": 2, "multiprocessing_context": "fork"}
    found = torch.cat([batch for batch, _ in DataLoader(images, 20, sampler=order, **options)])
    pixels = torch.stack([image for image, _ in images])
    assert torch.equal(found, pixels[order])


def test_packed_files_that_were_cut_are_named():
    """Before the run starts, or while it reads."""
    pack(write_folder("pictures"), "packed", "--side", 20)
    images = load("packed")[0]
    os.truncate("packed/train.bin", 16 * 1200 - 1)
    images[14]
    with pytest.raises(OSError, match=r"packed/train\.bin ends within image 15"):
        images[15]
    with pytest.raises(OSError, match=r"packed/train\.bin does not hold 16 images"):
        load("packed")
    os.truncate("packed/train.bin", 8 * 1200)  # the same as 16 images of another side, nearly
    with pytest.raises(OSError, match=r"packed/train\.bin does not hold 16 images"):
        load("packed")


# ---- The loader ----------------------------------------------------------------------------------
@pytest.mark.slow
def test_a_loader_that_delivers_nothing_ends_the_run():
    """A worker cannot send a batch where the names of its sockets would be too long: it prints a
    traceback, and waits."""
    folder, long = write_folder("pictures"), Path("t" * 100).resolve()
    long.mkdir()
    command = [
        sys.executable,
        ROOT / "complete" / "train.py",
        "--dataset",
        folder,
        "--device",
        "cpu",
    ]
    command += ["--batch-size", 4, "--workers", 1, "--timeout", 3]
    command = [str(word) for word in command]
    environment = {**os.environ, "TMPDIR": str(long)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "AF_UNIX path too long" in done.stderr, done.stderr
    assert "DataLoader timed out after 3 seconds" in done.stderr


# ---- Training on them ----------------------------------------------------------------------------
STEPS = ["--image-size", 64, "--augment", "--batch-size", 4, "--epochs", 2, "--log-every", 2]


def test_packed_and_unpacked_losses_are_the_same():
    folder = write_folder("pictures")
    pack(folder, "packed", "--side", 73)
    first = run("--dataset", folder, *STEPS, "--output", "unpacked")
    second = run("--dataset", "packed", *STEPS, "--output", "from_packed")
    assert all(torch.equal(first[name], second[name]) for name in first)
    losses = [
        [(r["train_loss"], r["test_loss"]) for r in rows(o)] for o in ("unpacked", "from_packed")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 2


# A pause in each step, or the run would be over before it can be killed.
SLOWLY = """import time, train
def slowly(*arguments, **options):
    time.sleep(0.2)
    return prepare(*arguments, **options)
prepare, train.prepare = train.prepare, slowly
if __name__ == "__main__":
    train.main(train.parser.parse_args())
"""


@pytest.mark.slow
def test_killed_while_training_on_packed_images():
    pack(write_folder("pictures", count=64), "packed", "--side", 73)
    flags = ["--dataset", "packed", *STEPS, "--checkpoint-minutes", 0]
    whole = run(*flags, "--output", "whole")
    Path("slowly.py").write_text(SLOWLY)
    words = [sys.executable, "slowly.py", "--device", "cpu", "--workers", 1, *flags]
    words = [str(word) for word in (*words, "--output", "killed")]
    process = subprocess.Popen(words, env=with_scripts())
    deadline = time.monotonic() + 120
    step = 0
    while step < 4:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
        if Path("killed", "last.json").exists():
            step = json.loads(Path("killed", "last.json").read_text())["progress"]["step"]
    process.kill()
    process.wait()
    again = run(*flags, "--output", "killed", "--resume")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


# ---- Fine-tuning ---------------------------------------------------------------------------------
def test_normalization_of_the_weights():
    images = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    batch = images, torch.tensor([0, 1])
    imagenet = [[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]
    cases = {"resnet18": imagenet, "efficientnet_v2_l": [[0.5] * 3, [0.5] * 3]}
    for model, values in cases.items():
        mean, std = (torch.tensor(value).view(3, 1, 1) for value in values)
        prepared = train.prepare(
            parse("--model", model, "--pretrained"), batch, torch.device("cpu")
        )
        assert torch.allclose(prepared[0], (images / 255 - mean) / std, atol=1e-5)
        prepared = train.prepare(parse("--model", model), batch, torch.device("cpu"))
        assert torch.allclose(prepared[0], (images.float() - 115) / 58)


# ---- A loader of one's own -----------------------------------------------------------------------
def load_own(args):
    """Images with transforms of one's own, in the loader's workers. `prepare` leaves floats."""
    normalize = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    normalize += [v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    side = args.image_size
    augment = [v2.RandomResizedCrop(side), v2.RandomHorizontalFlip(), v2.TrivialAugmentWide()]
    train_set = datasets.ImageFolder(Path(args.dataset, "train"), v2.Compose(augment + normalize))
    middle = [v2.Resize(side * 8 // 7), v2.CenterCrop(side)]
    test_set = datasets.ImageFolder(Path(args.dataset, "test"), v2.Compose(middle + normalize))
    return train_set, test_set, len(train_set.classes)


def test_transforms_of_the_loader(monkeypatch):
    monkeypatch.setattr(train, "load_data", load_own)
    folder = write_folder("pictures")
    batch = train.default_collate([load(folder)[1][0]])
    prepared = train.prepare(parse("--augment"), batch, torch.device("cpu"), train=True)[0]
    assert torch.equal(prepared, batch[0]) and batch[0].dtype == torch.float32
    run("--dataset", folder, *STEPS, "--workers", 1, "--output", "own")
    assert len(rows("own")) == 2
