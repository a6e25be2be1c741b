"""Images: decoded from every format, packed, cropped; fine-tuning on a folder of one's own."""

import csv
import importlib.util
import json
import multiprocessing
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pack_images as packer
import pytest
import torch
import train_ddp as ddp
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]


def load(name, *changes):
    """A copy of a complete script with changes, as a module: what stands there, what comes in its
    place, and so on."""
    text, path = (ROOT / "complete" / f"{name}.py").read_text(), Path("changed.py").resolve()
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text, old
        text = text.replace(old, new)
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where workers find their functions
    spec.loader.exec_module(module)
    return module


def parse(*flags, script=ddp):
    flags = ["--device", "cpu", "--workers", 0, *flags]
    return script.parser.parse_args([str(flag) for flag in flags])


def train(*flags, script=ddp):
    """A run in this process. Returns model.pt."""
    args = parse(*flags, script=script)
    script.check_flags(args)
    script.main(args)
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
    for part in ("train", "test"):
        Path("formats", part, "all").mkdir(parents=True)
        for name, (image, options) in FORMATS.items():
            image.save(Path("formats", part, "all", name), **options)
    return Path("formats")


@pytest.mark.filterwarnings("error", "ignore:Palette images with Transparency")
def test_every_format_is_upright_rgb(formats):
    for name in FORMATS:
        expected = corners()
        if "grey" in name or "sixteen" in name:
            expected = corners(mode="L")
        if "black" in name:
            expected = corners().convert("1", dither=Image.Dither.NONE)
        expected = np.asarray(expected.convert("RGB")).astype(int)
        image = ddp.load_image(formats / "train" / "all" / name, 60)
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
    flags = "--image-size", 64, "--dataset"
    found = [ddp.load_data(parse(*flags, name)) for name in ("formats", "packed", "by_workers")]
    for plain, *packed in zip(*found):
        for other in packed:
            if type(plain) is int:
                assert plain == other == 1
                continue
            assert len(plain) == len(other) == len(FORMATS)
            for (image, label), (pixels, same_label) in zip(plain, other):
                assert image.shape == (3, 73, 73) and torch.equal(image, pixels)
                assert label == same_label and type(same_label) is int
    assert not sorted(Path("packed").glob("*.tmp"))
    assert json.loads(Path("packed", "classes.json").read_text()) == ["all"]


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
        ddp.load_data(parse("--dataset", "packed"))
    pack(folder, "packed", "--side", 20, "--skip-broken")
    output = capsys.readouterr().out
    assert f"left out: {path}" in output and "train: 15 images" in output, output
    assert "1 left out" in output and "packed is not complete" in output
    train_set, test_set, classes = ddp.load_data(parse("--dataset", "packed"))
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
    folder, line = write_folder("pictures"), "    main(parser.parse_args())\n"
    text = (ROOT / "complete" / "pack_images.py").read_text()
    choose = "    __import__('multiprocessing').set_start_method('spawn')\n"
    assert text.endswith(line)
    Path("changed.py").write_text(text.removesuffix(line) + choose + line)
    command = [sys.executable, "changed.py", folder, "packed", "--side", "20", "--workers", "1"]
    subprocess.run(command, check=True)
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
            ddp.load_data(parse("--dataset", "packed"))
    pack(folder, "packed", "--side", 20)
    for path in Path("whole").iterdir():
        assert Path("packed", path.name).read_bytes() == path.read_bytes()


# ---- Training on them ----------------------------------------------------------------------------
STEPS = ["--image-size", 64, "--augment", "--batch-size", 4, "--epochs", 2, "--log-every", 2]


def test_packed_and_unpacked_losses_are_the_same():
    folder = write_folder("pictures")
    pack(folder, "packed", "--side", 73)
    first = train("--dataset", folder, *STEPS, "--output", "unpacked")
    second = train("--dataset", "packed", *STEPS, "--output", "from_packed")
    assert all(torch.equal(first[name], second[name]) for name in first)
    losses = [
        [(r["train_loss"], r["test_loss"]) for r in rows(o)] for o in ("unpacked", "from_packed")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 2


@pytest.mark.slow
def test_killed_while_training_on_packed_images():
    pack(write_folder("pictures", count=64), "packed", "--side", 73)
    flags = ["--dataset", "packed", *STEPS, "--checkpoint-minutes", 0]
    whole = train(*flags, "--output", "whole")
    # A pause in each step, or the run would be over before it can be killed.
    load(
        "train_ddp",
        "            scheduler.step()\n",
        "            scheduler.step(); time.sleep(0.2)\n",
    )
    words = [sys.executable, "changed.py", "--device", "cpu", "--workers", 1, *flags]
    process = subprocess.Popen([*(str(word) for word in words), "--output", "killed"])
    deadline = time.monotonic() + 120
    step = 0
    while step < 4:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
        if Path("killed", "last.pt").exists():
            step = torch.load("killed/last.pt", weights_only=True)["progress"]["step"]
    process.kill()
    process.wait()
    again = train(*flags, "--output", "killed", "--resume")
    assert all(torch.equal(whole[name], again[name]) for name in whole)


# ---- Fine-tuning ---------------------------------------------------------------------------------
def test_normalization_of_the_weights():
    images = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    batch = images, torch.tensor([0, 1])
    imagenet = [[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]]
    cases = {"resnet18": imagenet, "efficientnet_v2_l": [[0.5] * 3, [0.5] * 3]}
    for model, values in cases.items():
        mean, std = (torch.tensor(value).view(3, 1, 1) for value in values)
        prepared = ddp.prepare(parse("--model", model, "--pretrained"), batch, torch.device("cpu"))
        assert torch.allclose(prepared[0], (images / 255 - mean) / std, atol=1e-5)
        prepared = ddp.prepare(parse("--model", model), batch, torch.device("cpu"))
        assert torch.allclose(prepared[0], (images.float() - 115) / 58)


# ---- A loader of one's own -----------------------------------------------------------------------
OWN_TRANSFORMS = '''def load_data(args):
    """Images with transforms of one's own, in the loader's workers. `prepare` leaves floats."""
    normalize = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    normalize += [v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    side = args.image_size
    augment = [v2.RandomResizedCrop(side), v2.RandomHorizontalFlip(), v2.TrivialAugmentWide()]
    train_set = datasets.ImageFolder(Path(args.dataset, "train"), v2.Compose(augment + normalize))
    middle = [v2.Resize(side * 8 // 7), v2.CenterCrop(side)]
    test_set = datasets.ImageFolder(Path(args.dataset, "test"), v2.Compose(middle + normalize))
    return train_set, test_set, len(train_set.classes)
'''


def own_transforms():
    text = (ROOT / "complete" / "train_ddp.py").read_text()
    return text[text.index("def load_data(") : text.index("\n\ndef load_image(")], OWN_TRANSFORMS


def test_transforms_of_the_loader():
    script = load("train_ddp", *own_transforms())
    folder = write_folder("pictures")
    batch = script.default_collate([script.load_data(parse("--dataset", folder))[1][0]])
    prepared = script.prepare(parse("--augment"), batch, torch.device("cpu"), train=True)[0]
    assert torch.equal(prepared, batch[0]) and batch[0].dtype == torch.float32
    train("--dataset", folder, *STEPS, "--workers", 1, script=script)
    assert len(rows("runs/changed")) == 2
