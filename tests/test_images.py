"""Images: decoded from every format, packed, cropped; fine-tuning on a folder of one's own."""

import itertools
import json
import multiprocessing
import os
import re
import signal
import struct
import subprocess
from pathlib import Path

import helpers
import images as folders
import numpy as np
import pack_images as packer
import predict
import pytest
import torch
import train
from checkpoint import DamagedFile
from helpers import metrics, same, weights
from PIL import Image
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader


def load(folder, *flags):
    return train.load_data(helpers.parse("--dataset", folder, *flags))


def pack(*words):
    packer.main(packer.parser.parse_args(["--workers", "0", *(str(word) for word in words)]))


def write_folder(folder, count=16, tests=8, side=90):
    """Pictures of noise: those of class "a" are dark, those of "b" bright."""
    random = np.random.default_rng(0)
    for i in range(count + tests):
        path = Path(folder, "train" if i < count else "test", "ab"[i % 2], f"{i:05}.jpg")
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 120, (side, side + 10, 3)) + 120 * (i % 2)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    return Path(folder)


def touch(*paths):
    """Empty files, where nothing is decoded."""
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


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
    return Image.fromarray(grey * 256 + 7), {}  # the lower byte is not the upper one


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
    os.fsdecode(b"a name in another encoding, caf\xe9 \xff.bmp"): (corners(), {}),
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
        image = folders.load_image(format_path(name), 60)
        assert image.mode == "RGB", name
        if name == "large.jpg":  # 10 times as large, and decoded at 1/8: still at least 60
            assert image.size == (160, 120)
            image = image.resize((128, 96))
        difference = abs(np.asarray(image).astype(int) - expected)
        assert difference.shape == expected.shape, name
        difference[44:52], difference[:, 60:68] = 0, 0  # edges are blurred
        assert difference.max() <= 16, (name, difference.max())


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_packed_pixels_are_those_of_the_folder(formats):
    """In the same order too, decoded by workers."""
    pack(formats, "packed", "--side", 73, "--workers", 2)
    *plain, classes = load(formats, "--image-size", 64)
    *packed, packed_classes = load("packed", "--image-size", 64)
    assert classes == packed_classes == 2
    for own, other in zip(plain, packed, strict=True):
        assert own.classes == other.classes == ["colour", "grey"]
        assert len(own) == len(other) == len(FORMATS)
        assert list(own.targets) == list(other.targets)
        for (image, label), (pixels, same_label) in zip(own, other, strict=True):
            assert image.shape == (3, 73, 73) and torch.equal(image, pixels)
            assert label == same_label and type(same_label) is int
    names = ["classes.json", "test.bin", "test.npy", "train.bin", "train.npy"]
    assert helpers.files("packed") == names
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


@pytest.mark.parametrize("kind", BROKEN_EXIF)
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_broken_exif_block_spoils_no_image(kind):
    """An image is turned upright if its orientation can be read, and else stays as it lies."""
    block, readable = BROKEN_EXIF[kind]
    for name in "photo.jpg", "photo.png", "photo.webp":
        corners(80, 60).save(name, exif=block)
        assert folders.load_image(name, 60).size == ((60, 80) if readable else (80, 60)), name


def test_sixteen_bits_as_old_versions_of_pillow_open_them(monkeypatch):
    """Before 10.3 a PNG of 16 bits was opened as one of 32; a PGM is by every version."""
    image, _ = sixteen_bits()
    image.save("grey.png")
    grey = np.asarray(image)
    Path("grey.pgm").write_bytes(b"P5 128 96 65535\n" + grey.astype(">u2").tobytes())
    wanted = (grey >> 8)[..., None].repeat(3, axis=2)
    opened = Image.open

    def as_32_bits(path):
        image = opened(path)
        old = Image.fromarray(np.asarray(image).astype(np.int32))
        old.format = image.format
        return old

    assert opened("grey.pgm").mode == "I"
    assert np.array_equal(folders.load_image("grey.pgm", 60), wanted)
    monkeypatch.setattr(Image, "open", as_32_bits)
    assert np.array_equal(folders.load_image("grey.png", 60), wanted)


def test_narrow_and_tiny_images():
    """One of 1 x 1000 pixels, and one of a single pixel, become squares."""
    for size in (1, 1000), (1000, 1), (1, 1):
        Image.new("RGB", size, (10, 200, 30)).save("image.png")
        pixels = folders.Images(["image.png"], [0], ["a"], 64)[0][0]
        assert pixels.shape == (3, 64, 64) and pixels[1].min() == 200


@pytest.mark.parametrize("numbers", [np.float32, np.int16, np.int32])
def test_pixels_without_a_known_maximum_are_refused(numbers):
    """Floats are from 0 to 1, or to 255, or anything: no guess is right for all."""
    Image.fromarray(np.zeros((20, 20), numbers)).save("numbers.tif")
    with pytest.raises(OSError, match=r"numbers\.tif: its pixels \(mode [FI]\) have no known"):
        folders.load_image("numbers.tif", 10)


def test_training_names_a_broken_file():
    corners().save("whole.jpg")
    corners().save("whole.png")
    jpg, png = Path("whole.jpg").read_bytes(), Path("whole.png").read_bytes()
    damaged = png.replace(b"IDAT", b"IDAT" + bytes(50), 1)[: len(png)]
    contents = {
        "cut.jpg": jpg[:-500],
        "cut.png": png[:-50],
        "damaged.png": damaged,
        "empty.jpg": b"",
        "text.jpg": b"no",
    }
    for name, content in contents.items():
        Path(name).write_bytes(content)
        with pytest.raises(OSError, match=f"^{re.escape(name)}: "):
            folders.load_image(name, 10)


# ---- Folders -------------------------------------------------------------------------------------
def paths(folder):
    return [[os.fsdecode(path) for path in data.paths] for data in load(folder)[:2]]


@pytest.mark.parametrize("place", ["pictures/train", "pictures"])
def test_every_tenth_image_is_for_testing(capsys, place):
    """Of each class, by file name, in a folder that has train/ alone, or only class folders."""
    touch(*(f"{place}/{'ab'[i % 2]}/{i:05}.jpg" for i in range(46)), f"{place}/b/zz.jpg")
    train_paths, test_paths = paths("pictures")
    names = [f"a/{i:05}.jpg" for i in (0, 20, 40)] + [f"b/{i:05}.jpg" for i in (1, 21, 41)]
    assert test_paths == [f"{place}/{name}" for name in names]
    assert len(train_paths) == 41 and not {*train_paths} & {*test_paths}
    line = "pictures has no test/ or val/: every tenth image of each class is for testing\n"
    assert capsys.readouterr().out == line
    touch("few/a/0.jpg", "few/a/1.jpg", "few/b/0.jpg", "few/b/1.jpg")  # two of each are enough
    assert paths("few") == [["few/a/1.jpg", "few/b/1.jpg"], ["few/a/0.jpg", "few/b/0.jpg"]]


def test_files_left_out_are_counted_and_said(capsys, monkeypatch):
    """By suffix; case does not matter. Of several ranks, rank 0 alone says it."""
    folder = write_folder("pictures")
    for path in folder.glob("test/b/*"):
        path.rename(path.with_suffix(".JPG"))
    touch(*(f"pictures/train/a/{name}" for name in ("1.jfif", "2.jfif", "3.jfif", "notes")))
    line = "pictures: 4 files left out by their suffix: 3 .jfif, 1 without\n"
    assert [*map(len, paths(folder))] == [16, 8] and capsys.readouterr().out == line
    monkeypatch.setenv("RANK", "1")
    load(folder)
    assert capsys.readouterr().out == ""
    monkeypatch.delenv("RANK")
    pack(folder, "packed", "--side", 8)
    said = capsys.readouterr().out
    assert said.startswith(line) and "\ntrain: 16 images in" in said


REFUSED = {  # what was done to a folder, and the message
    "mv test/b/3.jpg test/b/3.jfif": "test on in 'b'\npictures: 1 files left out by their suffix",
    "rm -r test/?/*": "pictures: no images to train or to test on in 'a', 'b'",
    "rm -r test": "pictures: no images to train or to test on in 'a', 'b'\n",
    "mkdir test/c": "pictures: train/ and test/ differ in 'c': ",
    "mv test valid && mv valid/a valid/caf\u00e9": "differ in 'a', 'caf\\xe9': give both",
    "cp -r test val && mkdir 'val/b '": "pictures: train/ and val/ differ in 'b ': ",
    "mv train Train && mv test Test": "no train/, and no images directly in 'Test', 'Train'",
    "rm -r test; mv train/* .; rmdir train; mv b/1.jpg b/1.heic": "in 'b'\npictures: 1 files left",
    "mkdir all && mv train/* all && mv all train": "pictures/train has only one class, 'all'",
    "rm -r *": "pictures has no folders",
    "mv train/a/0.jpg . && rm -r train test": "pictures has no folders",
    "mv train/a/* train/b/* train && rmdir train/?": "pictures/train has no folders",
}


@pytest.mark.parametrize("change", REFUSED)
def test_refused_folders(capsys, change):
    """By both scripts, with the same message, before anything is decoded or written."""
    touch(*(f"pictures/{name}.jpg" for name in ("train/a/0", "train/b/1", "test/a/2", "test/b/3")))
    subprocess.run(change, shell=True, check=True, cwd="pictures")
    with pytest.raises(folders.FolderError) as error:
        load("pictures")
    assert REFUSED[change] in str(error.value)
    with pytest.raises(SystemExit, match="2"):
        pack("pictures", "packed")
    said = capsys.readouterr().err
    assert str(error.value) in said and said.count("error: ") == 1
    assert not Path("packed").exists()


PARTS = {  # what was done to a folder, where its test images are then, and those of --evaluate
    "mv test val": ["val", "val"],
    "mv test validation": ["validation", "validation"],
    "mkdir val": ["test", "test"],
    "mv test valid && mkdir test && touch test/9.jpg": ["valid", "valid"],  # as ImageNet's test/
    "cp -r test val": ["val", "test"],
}


@pytest.mark.parametrize("change", PARTS)
def test_parts(capsys, change):
    """val/ is for testing too. With both, best.pt is chosen on val/, and test/ remains for
    --evaluate, which is said; packed images are alike."""
    for part in "train", "test":
        for name in "ab":
            Path("pictures", part, name).mkdir(parents=True)
            Image.new("L", (8, 8)).save(f"pictures/{part}/{name}/0.png")
    subprocess.run(change, shell=True, check=True, cwd="pictures")
    for flag, part in zip(([], ["--evaluate"]), PARTS[change]):
        train_set, test_set, _ = load("pictures", *flag)
        for dataset, place in (train_set, "train"), (test_set, part):
            found = [os.fsdecode(path) for path in dataset.paths]
            assert found == [f"pictures/{place}/{name}/0.png" for name in "ab"]
    both, line = (
        change == "cp -r test val",
        "best.pt is chosen on val/; --evaluate gives the scores",
    )
    assert (line in capsys.readouterr().out) == both
    pack("pictures", "packed", "--side", 8)
    for flag, part in zip(([], ["--evaluate"]), PARTS[change]):
        found = [os.fsdecode(path) for path in load("packed", *flag)[1].paths]
        assert found == [f"{part}/{name}/0.png" for name in "ab"]
    assert Path("packed/val.bin").exists() == both


def test_hidden_files_and_folders(capsys):
    """A Mac's ._photo.jpg has no image in it; folders such as .git have none of the data set."""
    names = [f"{part}/{name}/1.jpg" for part in ("train", "test") for name in "ab"]
    touch(*(f"pictures/{name}" for name in names))
    before = paths("pictures")
    hidden = ["train/a/._1.jpg", "test/b/.DS_Store", "train/.git/1.jpg", "test/.git/1.jpg"]
    touch(*(f"pictures/{name}" for name in [*hidden, "train/a/.thumbnails/1.jpg", ".git/1.jpg"]))
    assert paths("pictures") == before and capsys.readouterr().out == ""


def test_links(capsys):
    """Links are followed, but not to a folder that contains them, which would never end. One from
    test/ into train/ is said, also where test/ is every tenth image."""
    for name in "ab":
        touch(*(f"pictures/{part}/{name}/{i}.jpg" for part in ("train", "test") for i in "12"))
    touch("elsewhere/5.jpg", "store/6.jpg", "pictures/.store/7.jpg", "one/two/8.jpg")
    links = {"train/loop": ".", "train/a/loop": ".", "train/a/up": "..", "train/b/top": "../../.."}
    links |= {"test/b/test": "../../test", "train/c": "../../elsewhere"}
    links |= {"train/b/6.jpg": "../../../store/6.jpg", "train/b/7.jpg": "../../.store/7.jpg"}
    links |= {"train/b/two": "../../../one/two", "test/c": "../../elsewhere"}
    for name, target in links.items():
        Path("pictures", name).symlink_to(target)
    Path("one/two/back").symlink_to("../../pictures/train/b")  # by another link it is in there
    train_paths, test_paths = paths("pictures")
    new = {"b/6.jpg", "b/7.jpg", "b/two/8.jpg", "c/5.jpg"}
    old = {f"{name}/{i}.jpg" for name in "ab" for i in "12"}
    assert {path.removeprefix("pictures/train/") for path in train_paths} == old | new
    assert len(train_paths) == 8 and len(test_paths) == 5
    says = "pictures: links put 1 images into train and test, such as "
    assert says in capsys.readouterr().out
    Path("pictures/test/c").unlink()
    touch("pictures/test/c/9.jpg")
    paths("pictures")
    assert "links" not in capsys.readouterr().out
    touch("tenth/a/1.jpg", "tenth/b/1.jpg", "tenth/b/2.jpg")
    Path("tenth/a/2.jpg").symlink_to("1.jpg")
    paths("tenth")
    said = capsys.readouterr().out
    assert "tenth: links put 1 images into train and test, such as" in said, said
    assert "tenth/a/1.jpg': scores will be too good" in said


def test_classes_named_as_parts():
    touch(*(f"pictures/{name}/{i}.jpg" for name in ("train", "test", "plane") for i in range(2)))
    train_set, test_set, _ = load("pictures")
    assert train_set.classes == ["plane", "test", "train"]
    assert [len(train_set), len(test_set)] == [3, 3]
    Path("pictures/classes.json").write_text("[]")  # of the user's
    assert len(load("pictures")[0]) == 3


# ---- Packing -------------------------------------------------------------------------------------
def test_packing_names_a_broken_file(capsys):
    folder = write_folder("pictures")
    path = folder / "train" / "a" / "00004.jpg"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(SystemExit) as error:
        pack(folder, "packed", "--side", 20)
    assert str(path) in str(error.value) and not Path("packed", "classes.json").exists()
    pack(folder, "packed", "--side", 20, "--skip-broken")
    output = capsys.readouterr().out
    assert f"left out: {path}" in output and "train: 15 images" in output, output
    assert "1 left out" in output and "packed is for --image-size 20, or less" in output
    train_set, test_set, classes = load("packed")
    assert (len(train_set), len(test_set), classes) == (15, 8, 2)
    for image, label in map(train_set.__getitem__, range(15)):  # each has its own label still
        assert (image.float().mean() > 120) == label


def test_a_class_that_skip_broken_empties(capsys):
    """Its recall would be of no image at all."""
    folder = write_folder("pictures", side=20)
    for path in folder.glob("test/b/*"):
        path.write_bytes(b"no image")
    odd = folder / "train" / "a" / os.fsdecode(b"caf\xe9.jpg")  # can be said, too
    odd.write_bytes(b"no image")
    with pytest.raises(SystemExit, match="test: no image can be decoded of 'b'"):
        pack(folder, "packed", "--side", 20, "--skip-broken")
    assert not Path("packed").exists()


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


def kills(function, call):
    """The function, of which that call kills the process."""
    before = iter(range(call - 1))

    def wrapped(*arguments):
        if next(before, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    return wrapped


def test_killed_while_packing(monkeypatch):
    """In the first part, in the second, or in the last moment, it leaves no folder that would be
    taken for a packed one; and packing again is not in its way."""
    folder = write_folder("pictures")
    pack(folder, "whole", "--side", 20)
    for module, name, call in (
        (folders, "load_image", 10),
        (folders, "load_image", 20),
        (os, "rename", 1),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, kills(getattr(module, name), call))
            words = folder, "packed", "--side", 20
            process = multiprocessing.get_context("fork").Process(target=pack, args=words)
            process.start()
            process.join()
        assert process.exitcode == -signal.SIGKILL and not Path("packed").exists()
    complete = [path for path in Path().glob("packed.*/packed/classes.json")]
    assert len([*Path().glob("packed.*")]) == 3 and len(complete) == 1
    for path in Path().glob("packed.*/packed"):
        if path / "classes.json" not in complete:
            with pytest.raises(folders.FolderError):
                load(path)
    pack(folder, "packed", "--side", 20)
    for path in Path("whole").iterdir():
        assert Path("packed", path.name).read_bytes() == path.read_bytes()


def test_two_pack_into_one_folder(monkeypatch):
    """The second one begins and ends while the first one packs, which is then refused; what is
    there is whole."""
    folder, plain = write_folder("pictures"), packer.pack
    pack(folder, "whole", "--side", 20)

    def slow(args, *words):
        if not Path("packed").exists():
            monkeypatch.setattr(packer, "pack", plain)
            pack(folder, "packed", "--side", 20)
        plain(args, *words)

    monkeypatch.setattr(packer, "pack", slow)
    with pytest.raises(OSError, match="packed"):
        pack(folder, "packed", "--side", 10)
    for path in Path("whole").iterdir():
        assert Path("packed", path.name).read_bytes() == path.read_bytes()
    assert not [*Path().glob("packed.*")]


# ---- Packed images -------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_read_packed_images(method):
    """A fork shares the open file, and with it its position, which must not move. Others open the
    file for themselves."""
    pack(write_folder("pictures"), "packed", "--side", 20)
    images = load("packed")[0]
    pixels = torch.stack([image for image, _ in images])
    order, position = torch.randperm(16).tolist(), images.file.tell()
    options = {"num_workers": 2, "multiprocessing_context": method}
    found = torch.cat([batch for batch, _ in DataLoader(images, 3, sampler=order, **options)])
    assert torch.equal(found, pixels[order]) and images.file.tell() == position


def test_the_side_of_packed_images_is_said(capsys):
    """Where it costs time, or sharpness; on --resume and by predict.py it is known (best.pt)."""
    pack(write_folder("pictures"), "packed", "--side", 73)
    for size, word in (64, ""), (32, "faster"), (80, "sharper"):
        capsys.readouterr()
        assert load("packed", "--image-size", size)[0].side == 73
        said = capsys.readouterr().out
        assert ("packed with --side 73" in said) == bool(word) and word in said


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


# ---- Training on them ----------------------------------------------------------------------------
STEPS = ["--image-size", 64, "--augment", "--batch-size", 4, "--epochs", 2, "--log-every", 2]


ENDS = """
plain, left = prepare, list(range(8))
def prepare(args, batch, device, train=False):
    if train and not left.pop():
        raise KeyboardInterrupt
    return plain(args, batch, device, train)
"""


def test_packed_and_unpacked_losses_are_the_same():
    """Also of a run on packed images that ends within its second epoch, and is resumed."""
    folder = write_folder("pictures")
    pack(folder, "packed", "--side", 73)
    helpers.train("--dataset", folder, *STEPS, "--workers", 0, "--output", "unpacked")

    flags = ["--dataset", "packed", *STEPS, "--workers", 1, "--checkpoint-minutes", 0, "--resume"]
    with pytest.raises(KeyboardInterrupt):
        helpers.train(*flags, "--output", "packed_run", more=ENDS)
    assert helpers.place("packed_run") == (1, 2)
    helpers.train(*flags, "--output", "packed_run")
    assert same(weights("unpacked"), weights("packed_run"))
    helpers.close("packed_run", "unpacked", 1e-12)


HANGS = """
import images, time
plain_load_image = images.load_image
def load_image(path, side):
    if torch.utils.data.get_worker_info():
        time.sleep(1000)
    return plain_load_image(path, side)
images.load_image = load_image
"""


@pytest.mark.slow
def test_a_worker_that_hangs_ends_the_run():
    flags = ["--dataset", write_folder("pictures"), "--batch-size", 4, "--workers", 1]
    flags += ["--timeout", 3]
    text = helpers.run(helpers.COMPLETE, *flags, more=HANGS, processes=1, status=1)
    assert "DataLoader timed out after 3 seconds" in text


# ---- Batches on the device -----------------------------------------------------------------------
def test_normalization():
    """Of the weights, per channel or for all; floats are left as they are."""
    images = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    batch, device, args = (images, torch.tensor([0, 1])), torch.device("cpu"), helpers.parse()
    args.image_size = 8
    assert torch.allclose(train.prepare(args, batch, device)[0], (images.float() - 115) / 58)
    args.normalization = [[120.0, 110, 100], [60.0, 50, 40]]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in args.normalization)
    assert torch.allclose(train.prepare(args, batch, device)[0], (images.float() - mean) / std)


class Kernels(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, words=(), options=None):
        if not function.is_view and "empty" not in str(function):
            self.names.append(str(function))
        return function(*words, **options or {})


def test_random_crops_by_an_affine_grid():
    """The same transforms as matrices, with the same random numbers: equal up to rounding. Each
    kernel of a step counts."""
    images, size = torch.rand(50, 3, 40, 36), (33, 24)
    torch.manual_seed(1)
    crops = folders.random_crops(images, size)
    torch.manual_seed(1)
    zoom = torch.empty(50).uniform_(0.6, 1)
    flip = torch.empty(50).uniform_(-1, 1).sign()
    place = torch.empty(50, 2).uniform_(-1, 1)
    assert 15 < (flip < 0).sum() < 35
    matrices = torch.zeros(50, 2, 3)
    matrices[:, 0, 0], matrices[:, 1, 1] = zoom * flip, zoom
    matrices[:, :, 2] = place * (1 - zoom)[:, None]
    grid = F.affine_grid(matrices, (50, 3, *size), align_corners=False)
    wanted = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
    assert torch.allclose(crops, wanted, atol=1e-5)
    with Kernels() as kernels:
        folders.random_crops(images, size)
    assert len(kernels.names) <= 10, kernels.names


# ---- A loader of one's own -----------------------------------------------------------------------
LOAD_OWN = """
from torchvision.transforms import v2

def load_data(args):  # images with transforms of one's own, in the loader's workers
    normalize = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    normalize += [v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    side = args.image_size
    augment = [v2.RandomResizedCrop(side), v2.RandomHorizontalFlip(), v2.TrivialAugmentWide()]
    train_set = datasets.ImageFolder(Path(args.dataset, "train"), v2.Compose(augment + normalize))
    middle = [v2.Resize(side * 8 // 7), v2.CenterCrop(side)]
    test_set = datasets.ImageFolder(Path(args.dataset, "test"), v2.Compose(middle + normalize))
    return train_set, test_set, len(train_set.classes)

plain_prepare = prepare

def prepare(args, batch, device, train=False):  # it leaves floats
    prepared = plain_prepare(args, batch, device, train)
    assert torch.equal(prepared[0], batch[0]) and batch[0].dtype == torch.float32
    return prepared
"""


def test_transforms_of_the_loader():
    flags = ["--dataset", write_folder("pictures"), *STEPS, "--workers", 1, "--output", "own"]
    helpers.train(*flags, more=LOAD_OWN)
    assert len(metrics("own")) == 2
    with pytest.raises(DamagedFile, match="best.pt was not trained on square uint8 images"):
        predict.load("own")  # predict.py would have to guess what they were
