"""Images: decoded from every format, packed, cropped; fine-tuning on a folder of one's own.

The recipes below are those of docs/your_model_and_data.md."""

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
import pytest
import torch
from PIL import Image
from torch.nn import functional as F
from torchvision import models

ROOT = Path(__file__).resolve().parents[1]


def load(name, *changes):
    """A complete script as a module, or of a copy with changes: what stands there, what comes in
    its place, and so on."""
    path = ROOT / "complete" / f"{name}.py"
    if changes:
        text = path.read_text()
        for old, new in zip(changes[::2], changes[1::2], strict=True):
            assert old in text, old
            text = text.replace(old, new)
        path = Path("changed.py").resolve()
        path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # where workers find their functions
    spec.loader.exec_module(module)
    return module


ddp, packer = load("train_ddp"), load("pack_images")


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
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_start_methods(method):
    """The default on Linux is fork up to Python 3.13, then forkserver; elsewhere it is spawn."""
    folder, line = write_folder("pictures"), "    main(parser.parse_args())\n"
    text = (ROOT / "complete" / "pack_images.py").read_text()
    choose = f"    __import__('multiprocessing').set_start_method('{method}')\n"
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


# ---- Crops ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "model, size, shape, seen",
    [
        ("net", 32, (3, 32, 32), (32, 32)),
        ("net", 24, (3, 32, 32), (24, 24)),
        ("net", 64, (3, 32, 32), (32, 32)),  # CIFAR-10 is not enlarged
        ("net", 32, (1, 28, 28), (28, 28)),  # nor is Fashion-MNIST
        ("resnet18", 224, (3, 256, 256), (224, 224)),
        ("resnet18", 64, (3, 73, 73), (64, 64)),
        ("net", 64, (3, 48, 80), (48, 64)),
    ],
)
def test_what_the_test_sees_is_the_middle_at_the_size_of_training(model, size, shape, seen):
    args = parse("--model", model, "--image-size", size, "--augment")
    images = torch.arange(2 * shape[0] * shape[1] * shape[2]).view(2, *shape).to(torch.uint8)
    batch = images, torch.tensor([0, 1])
    trained = ddp.prepare(args, batch, torch.device("cpu"), train=True)[0]
    tested = ddp.prepare(args, batch, torch.device("cpu"))[0]
    assert trained.shape == tested.shape == (2, shape[0], *seen)
    top, left = (shape[1] - seen[0]) // 2, (shape[2] - seen[1]) // 2
    middle = images[:, :, top : top + seen[0], left : left + seen[1]]
    assert torch.allclose(tested, (middle.float() - 115) / 58)


def test_random_crops():
    """Their zoom, place and flip differ from image to image, and nothing outside is seen."""
    column = torch.linspace(-1, 1, 64)
    ramps = column.expand(500, 2, 64, 64).clone()
    ramps[:, 1] = column[:, None]
    torch.manual_seed(0)
    crops = ddp.random_crops(ramps, (48, 48))
    assert crops.shape == (500, 2, 48, 48) and crops.abs().max() <= 1
    right = crops[:, 0, 24, -2] - crops[:, 0, 24, 1]
    down = crops[:, 1, -2, 24] - crops[:, 1, 1, 24]
    assert 0.4 < (right < 0).float().mean() < 0.6 and (down > 0).all()  # never upside down
    zoom = right.abs() / (45 * 64 / 48 * 2 / 63)  # 45 pixels, each 64 / 48 of the image's
    assert torch.allclose(right.abs(), down, atol=1e-4)  # not distorted
    assert 0.55 < zoom.min() < 0.65 and 0.95 < zoom.max() < 1.001
    centers = crops.mean((2, 3))
    assert centers.abs().max() > 0.3 and centers.mean(0).abs().max() < 0.05
    assert not torch.equal(centers[:, 0], centers[:, 1])


def write_fashion_mnist(count=8):
    raw = Path("data", "FashionMNIST", "raw")
    raw.mkdir(parents=True)
    images = np.random.default_rng(0).integers(256, size=(count, 28, 28)).astype(np.uint8)
    for name in ("train", "t10k"):
        for kind, array in ("images", images), ("labels", np.arange(count, dtype=np.uint8)):
            head = np.array([0x800 + array.ndim, *array.shape], ">i4").tobytes()
            (raw / f"{name}-{kind}-idx{array.ndim}-ubyte").write_bytes(head + array.tobytes())


def test_grey_images_for_a_model_of_torchvision():
    write_fashion_mnist()
    flags = ["--dataset", "fashion-mnist", "--batch-size", 4, "--epochs", 1, "--augment"]
    weights = train(*flags, "--model", "shufflenet_v2_x0_5")
    assert weights["conv1.0.weight"].shape[1] == 3
    assert train(*flags, "--output", "net")["conv1.weight"].shape[1] == 1


# ---- Fine-tuning ---------------------------------------------------------------------------------
@pytest.fixture
def pretrained(monkeypatch):
    """A file of random weights, where torch.hub would put the download. Returns the weights."""
    monkeypatch.setenv("TORCH_HOME", str(Path("hub_home").resolve()))
    name = models.get_model_weights("shufflenet_v2_x0_5").DEFAULT.url.split("/")[-1]
    torch.manual_seed(1)
    weights = models.get_model("shufflenet_v2_x0_5").state_dict()
    folder = Path("hub_home", "hub", "checkpoints")
    folder.mkdir(parents=True)
    torch.save(weights, folder / name)
    return weights


FINE_TUNE = ["--model", "shufflenet_v2_x0_5", "--pretrained", "--image-size", 32, "--batch-size", 8]
FINE_TUNE += ["--epochs", 1, "--dataset"]


def test_pretrained(pretrained):
    """The run starts from the weights, all but the head, which has as many outputs as classes."""
    flags = [*FINE_TUNE, write_folder("pictures")]
    model = train(*flags, "--lr", 0)
    names = [name for name, _ in models.get_model("shufflenet_v2_x0_5").named_parameters()]
    body = [name for name in names if not name.startswith("fc.")]
    assert all(torch.equal(model[name], pretrained[name]) for name in body)
    assert model["fc.weight"].shape == (2, 1024)
    model = train(*flags, "--lr", 0.1, "--output", "trained")
    assert not any(torch.equal(model[name], pretrained[name]) for name in body[:3])


HEAD_ONLY = """    model = models.get_model(args.model, num_classes=classes)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name.startswith("fc.")  # all but the head stays as it is
"""


def test_only_the_head(pretrained):
    line = "    model = models.get_model(args.model, num_classes=classes)\n"
    script = load("train_ddp", line, HEAD_ONLY)
    flags = [*FINE_TUNE, write_folder("pictures"), "--weight-decay", 0.1, "--lr", 0.1]
    model = train(*flags, script=script)
    start = train(*flags, "--lr", 0, "--output", "start", script=script)
    for name, _ in models.get_model("shufflenet_v2_x0_5").named_parameters():
        assert torch.equal(model[name], start[name]) != name.startswith("fc."), name


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


CLASS_WEIGHTS = '''@functools.cache  # copied to the device once
def class_weights(device):
    return torch.tensor([1.0, 9.0], device=device)


def loss_function(outputs, labels):
    """The mean over the labels: main averages it over micro-batches (and over GPUs)."""
    losses = F.cross_entropy(outputs, labels, class_weights(outputs.device), reduction="sum")
    return losses / len(labels)
'''
LOSS = '''def loss_function(outputs, labels):
    """The mean over the labels: main averages it over micro-batches (and over GPUs)."""
    return F.cross_entropy(outputs, labels)
'''


def test_class_weights():
    """The mean over micro-batches is that over the batch, which F.cross_entropy's mean is not."""
    script = load("train_ddp", LOSS, CLASS_WEIGHTS)
    outputs, labels = torch.randn(8, 2), torch.tensor([0, 0, 0, 0, 0, 1, 1, 1])
    one = F.cross_entropy(outputs, labels, reduction="none") * torch.where(labels == 1, 9.0, 1.0)
    assert torch.allclose(script.loss_function(outputs, labels), one.mean())
    flags = ["--dataset", write_folder("pictures"), "--batch-size", 4, "--epochs", 1]
    first = train(*flags, "--output", "one", script=script)
    second = train(*flags, "--output", "two", "--accumulate", 2, script=script)
    assert all(torch.allclose(first[name], second[name], atol=1e-6) for name in first)


BALANCED = [
    "len(dataset), seed, rank, world_size\n",
    """len(dataset), seed, rank, world_size
        labels = torch.as_tensor(dataset.targets)
        self.weights = 1 / labels.bincount()[labels]  # of a sample: all classes are drawn alike
""",
    "torch.randperm(self.length, generator=generator)[",
    "self.weights.multinomial(self.length, True, generator=generator)[",
]


def test_balanced_sampler():
    script, folder = load("train_ddp", *BALANCED), write_folder("pictures", count=200, side=12)
    for path in sorted((folder / "train" / "b").iterdir())[10:]:
        path.unlink()
    pack(folder, "packed", "--side", 12)
    for name in (folder, "packed"):
        train_set = script.load_data(parse("--dataset", name, script=script))[0]
        samplers = [script.EpochSampler(train_set, 1, rank, 2) for rank in range(2)]
        order = []
        for start in (0, 20):
            for sampler in samplers:
                sampler.set_epoch(3, start)
            order.append([list(sampler) for sampler in samplers])
        assert [indices[20:] for indices in order[0]] == order[1]
        drawn = [int(train_set.targets[i]) for i in order[0][0] + order[0][1]]
        assert len(drawn) == 110 and 30 < sum(drawn) < 80  # of which 10 in 110 are of class b


CONFUSION = '''def count(outputs, labels):
    """Row i, column j of the confusion matrix: how many samples of class i were taken for j."""
    classes = outputs.shape[1]
    pairs = labels * classes + outputs.argmax(1)
    confusion = pairs.bincount(minlength=classes**2).view(classes, classes)
    return {"labels": labels.numel(), "confusion": confusion}


def metrics(sums):
    """Columns of metrics.csv, from the sums of `count` over the test set (float64 tensors)."""
    confusion = sums["confusion"]
    if dist.get_rank() == 0:
        print(confusion.int(), flush=True)
    hits = confusion.diag()
    f1 = 2 * hits / (confusion.sum(0) + confusion.sum(1)).clamp(min=1)
    return {"test_accuracy": hits.sum() / sums["labels"], "macro_f1": f1.mean()}
'''


def confusion_changes():
    text = (ROOT / "complete" / "train_ddp.py").read_text()
    old = text[text.index("def count(") : text.index("\n\ndef build_optimizer(")]
    return old, CONFUSION


def test_confusion_matrix_and_f1(capsys):
    script = load("train_ddp", *confusion_changes())
    outputs = F.one_hot(torch.tensor([0, 0, 1, 2, 2, 1]), 3).float()
    labels = torch.tensor([0, 0, 0, 2, 1, 1])
    counts = script.count(outputs, labels)
    assert counts["confusion"].tolist() == [[2, 1, 0], [0, 1, 1], [0, 0, 1]]
    folder = write_folder("pictures")
    train("--dataset", folder, *STEPS, "--lr", 0.05, script=script)
    row = rows("runs/changed")[-1]
    assert list(row)[3:5] == ["test_accuracy", "macro_f1"]
    found = re.findall(
        r"tensor\(\[\[ *(\d+), *(\d+)\],\s*\[ *(\d+), *(\d+)\]\]", capsys.readouterr().out
    )
    (a, ab), (ba, b) = np.reshape(np.array(found[-1], float), (2, 2))
    assert len(found) == 2 and a + ab == ba + b == 4
    assert float(row["test_accuracy"]) == pytest.approx((a + b) / 8)
    f1 = (2 * a / (2 * a + ab + ba) + 2 * b / (2 * b + ab + ba)) / 2
    assert float(row["macro_f1"]) == pytest.approx(f1)


def test_best_weights():
    """best.pt has the weights of the epoch with the lowest test loss: the last one, or the first
    where the classes of the test images are exchanged, so that it only rises."""
    folder = write_folder("pictures")
    flags = ["--dataset", folder, "--image-size", 64, "--batch-size", 4, "--lr", 0.01]
    last = train(*flags, "--epochs", 3, "--output", "falls")
    test = folder / "test"
    for old, new in ("a", "c"), ("b", "a"), ("c", "b"):
        (test / old).rename(test / new)
    train(*flags, "--epochs", 3, "--output", "rises")
    first = train(*flags, "--epochs", 1, "--output", "first")
    for output, expected in ("falls", last), ("rises", first):
        found = torch.load(Path(output, "best.pt"), weights_only=True)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not all(torch.equal(first[name], last[name]) for name in first)


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


COLLATE = """
def collate(samples):
    \"\"\"A batch of samples of different lengths: filled up with zeros.\"\"\"
    rows, labels = zip(*samples)
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(labels)


class Rows(Dataset):
    targets = [1, 0] * 8

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.full((i + 1,), self.targets[i] - 0.5), self.targets[i]


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(1, 2)

    def forward(self, rows):
        return self.head(rows.sum(1, keepdim=True))


def load_data(args):
    return Rows(), Rows(), 2


def build_model(args, inputs, classes):
    return Sum()


# ---- Loaders and evaluation"""


def test_collate_fn():
    """Samples that torch cannot stack: one more line in make_loader, and another name in main."""
    line = '    options["pin_memory"]'
    changes = (
        "\n# ---- Loaders and evaluation",
        COLLATE,
        line,
        f'    options["collate_fn"] = collate\n{line}',
    )
    changes += "default_collate([test_set[0]])", "collate([test_set[0]])"
    train("--batch-size", 4, "--epochs", 4, "--lr", 0.02, script=load("train_ddp", *changes))
    assert float(rows("runs/changed")[-1]["test_accuracy"]) == 1


def test_labels_file_lists_the_classes(formats):
    pack(formats, "packed", "--side", 20)
    assert json.loads(Path("packed", "classes.json").read_text()) == ["all"]
    assert np.load("packed/train.npy").dtype.kind == "i"
