"""Images: decoded from every format, found in folders, packed, cropped; training on a folder."""

import itertools
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import struct
import subprocess
import threading
import time
import unicodedata
from pathlib import Path

import helpers
import images as folders
import loaders
import numpy as np
import pack_images as packer
import pytest
import torch
import train
from helpers import same, weights
from PIL import Image
from PIL.TiffImagePlugin import AppendingTiffWriter
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2


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


def paths(folder, *flags):
    """Of the training images, and of the test images."""
    return [[os.fsdecode(path) for path in data.paths] for data in load(folder, *flags)[:2]]


# ---- Formats -------------------------------------------------------------------------------------
def corners(width=128, height=96, mode="RGB"):
    """White, with a red upper left, a green upper right and a blue lower left quarter."""
    image = Image.new("RGB", (width, height), "white")
    image.paste((250, 0, 0), (0, 0, width // 2, height // 2))
    image.paste((0, 250, 0), (width // 2, 0, width, height // 2))
    image.paste((0, 0, 250), (0, height // 2, width // 2, height))
    return image.convert(mode)


def turned(orientation):
    """A file that shows `corners` only to those who obey this EXIF tag."""
    method = {5: Image.TRANSPOSE, 6: Image.ROTATE_90, 7: Image.TRANSVERSE, 8: Image.ROTATE_270}
    method |= {2: Image.FLIP_LEFT_RIGHT, 3: Image.ROTATE_180, 4: Image.FLIP_TOP_BOTTOM}
    exif = Image.Exif()
    exif[0x0112] = orientation
    return corners().transpose(method[orientation]), {"exif": exif}


def sixteen_bits(is_negative=False):
    grey = np.asarray(corners(mode="L")).astype(np.uint16) * 256 + 7  # the lower byte is another
    return Image.fromarray(~grey if is_negative else grey)


NEGATIVE = {"tiffinfo": {262: 0}}  # white is 0; Pillow inverts 8 bits as it saves them


FORMATS = {
    "rgb.jpg": (corners(), {"quality": 95}),
    "large.jpg": (corners(1280, 960), {"quality": 95}),
    "grey.jpg": (corners(mode="L"), {"quality": 95}),
    "cmyk.jpg": (corners(mode="CMYK"), {"quality": 95}),
    **{f"turned_{i}.png": turned(i) for i in range(2, 9)},
    "turned.jpg": turned(6),
    "alpha.webp": (corners(mode="RGBA"), {"lossless": True}),
    "grey_alpha.png": (corners(mode="LA"), {}),
    "palette.png": (corners().quantize(8), {"transparency": bytes([0, 128, 255, 255])}),
    "grey_16_bits.png": (sixteen_bits(), {}),
    "grey_16_bits.tif": (sixteen_bits(), {}),
    "grey_negative_8_bits.tif": (corners(mode="L"), NEGATIVE),
    "grey_negative_16_bits.tif": (sixteen_bits(is_negative=True), NEGATIVE),
    "grey_negative_packed.tif": (
        sixteen_bits(is_negative=True),
        NEGATIVE | {"compression": "tiff_lzw"},
    ),
    "grey_16_bits.pgm": (sixteen_bits(), {}),  # opened as one of 32 bits, as an old Pillow does PNG
    os.fsdecode(b"a name in another encoding, caf\xe9 \xff.bmp"): (corners(), {}),
}


def twelve_bits():
    """A TIFF with 12 bits per pixel, two pixels in three bytes, which Pillow cannot write."""
    grey = np.asarray(corners(mode="L")).astype(np.uint16) * 16 + 7
    first, second = grey[:, ::2], grey[:, 1::2]
    triples = [first >> 4, (first & 15) << 4 | second >> 8, second & 255]
    pixels = np.stack(triples, axis=2).astype(np.uint8).tobytes()
    height, width = grey.shape
    tags = {256: width, 257: height, 258: 12, 259: 1, 262: 1, 273: 8, 277: 1, 278: height}
    tags[279] = len(pixels)
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    return struct.pack("<2sHI", b"II", 42, 8 + len(pixels)) + pixels + directory


def test_twelve_bits(recwarn):
    """Packed, they are seen. In 16 bits, there is a warning, as four bits would be left of them;
    not for a black image."""
    Path("packed.tif").write_bytes(twelve_bits())
    wanted = np.asarray(corners(mode="L").convert("RGB"))
    assert np.array_equal(folders.load_image("packed.tif", 60), wanted)
    Image.fromarray(np.zeros((40, 40), np.uint16)).save("black.tif")
    folders.load_image("black.tif", 40)
    assert not recwarn
    for suffix in "tif", "png":
        Image.fromarray(np.full((40, 40), 4095, np.uint16)).save(f"dark.{suffix}")
        with pytest.warns(UserWarning, match="no values above 4095"):
            folders.load_image(f"dark.{suffix}", 40)


@pytest.fixture
def formats():
    """A folder with a file of each format, once to train on and once to test on."""
    for part, (name, (image, options)) in itertools.product(("train", "test"), FORMATS.items()):
        path = Path("formats", part, "grey" if "grey" in name else "colour", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, **options)
    return Path("formats")


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_every_format_is_upright_rgb(formats):
    for path in formats.glob("train/*/*"):
        mode = "L" if path.parent.name == "grey" else "RGB"
        expected = np.asarray(corners(mode=mode).convert("RGB")).astype(int)
        image = folders.load_image(path, 60)
        assert image.mode == "RGB", path
        if path.name == "large.jpg":  # 10 times as large, and decoded at 1/8: still at least 60
            assert image.size == (160, 120)
            image = image.resize((128, 96))
        difference = abs(np.asarray(image).astype(int) - expected)
        difference[44:52], difference[:, 60:68] = 0, 0  # edges are blurred
        assert difference.max() <= 16, (path, difference.max())


def test_square():
    """The whole shorter side, and the middle of the longer one."""
    pixels = torch.from_numpy(np.array(corners())).permute(2, 0, 1)
    assert torch.equal(folders.square(96)(corners()), pixels[:, :, 16:112])


def test_thin_images():
    """Very long ones are cut before they are resized, which took gigabytes: the middle stays the
    middle. Others, here up to 8 to 1, have the pixels of torchvision's transforms."""
    plain = v2.Compose([v2.PILToTensor(), v2.Resize(30), v2.CenterCrop(30)])
    for size in (40, 30), (240, 30), (11, 88), (1, 8):
        image = Image.effect_noise(size, 90).convert("RGB")
        assert torch.equal(folders.square(30)(image), plain(image))
    for size in (25, 1000), (1001, 24), (9, 100):
        image = Image.linear_gradient("L").resize(size).convert("RGB")
        assert (folders.square(30)(image).int() - plain(image).int()).abs().max() <= 5, size
    for size in (1, 20_000), (30_000, 1), (2, 12_346):
        image = Image.new("RGB", size)
        image.paste((250, 250, 250), tuple(n // 2 for n in size) + size)  # one half, or a quarter
        pixels = folders.square(224)(image).float()
        assert pixels.shape == (3, 224, 224) and 60 < pixels.mean() < 190, (size, pixels.mean())
    exif = Image.Exif()
    exif[0x0112] = 6
    corners(1, 20_000).save("thin.png", exif=exif)
    image = folders.load_image("thin.png", 30)
    assert image.size == (20_000, 1) and folders.square(30)(image).shape == (3, 30, 30)


@pytest.mark.filterwarnings("ignore:Palette images with Transparency")
def test_packed_pixels_are_those_of_the_folder(formats, capsys):
    """In the same order too, decoded by workers. Whether another --side would be faster or sharper
    is said."""
    pack(formats, "packed", "--side", 73, "--workers", 2)
    assert "packed is for --image-size 64, or less" in capsys.readouterr().out
    *plain, classes = load(formats, "--image-size", 64)
    *packed, packed_classes = load("packed", "--image-size", 64)
    assert classes == packed_classes == 2 and "--side" not in capsys.readouterr().out
    for own, other in zip(plain, packed, strict=True):
        assert own.classes == other.classes == ["colour", "grey"]
        assert len(own) == len(other) == len(FORMATS)
        for (image, label), (pixels, same_label) in zip(own, other, strict=True):
            assert image.shape == (3, 73, 73) and torch.equal(image, pixels)
            assert label == same_label and type(same_label) is int
    for size, note in (32, "--side 32 would be faster"), (80, "--side 91 would be sharper"):
        load("packed", "--image-size", size)
        assert f"packed was packed with --side 73; {note}" in capsys.readouterr().out


def exif(*entries):
    """An EXIF block that says orientation 6, and has more entries: tag, type, count, value."""
    entries = [(0x0112, 3, 1, struct.pack("<HH", 6, 0)), *entries]
    block = struct.pack("<2sHLH", b"II", 42, 8, len(entries))
    return b"Exif\0\0" + block + b"".join(struct.pack("<HHL4s", *entry) for entry in entries)


@pytest.mark.parametrize("name", ["photo.jpg", "photo.png", "photo.webp"])
@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_a_broken_exif_block_spoils_no_image(name):
    """An image is turned upright if its orientation can be read, and else stays as it lies. PIL's
    own function raises an error for each of these blocks."""
    upright, as_it_lies = (60, 80), (80, 60)
    for block, size in (
        (exif((0x0100, 2, 4, b"abc\0")), upright),  # a width that is a text
        (exif((0x010F, 11, 1, b"abc\0")), upright),  # a maker that is a number
        (b"Exif\0\0II*\0", as_it_lies),
        (b"Exif\0\0" + bytes(range(100)), as_it_lies),
    ):
        corners(80, 60).save(name, exif=block)
        assert folders.load_image(name, 60).size == size, block


def test_a_file_that_cannot_be_decoded_is_named(monkeypatch):
    """So are pixels without a known maximum: floats are from 0 to 1, or to 255, or anything."""
    corners().save("whole.jpg")
    Path("cut.jpg").write_bytes(Path("whole.jpg").read_bytes()[:-500])
    Path("empty.jpg").touch()
    Path("text.jpg").write_bytes(b"no")
    for numbers in np.float32, np.int32:
        Image.fromarray(np.zeros((20, 20), numbers)).save(f"{numbers.__name__}.tif")
    for name in "cut.jpg", "empty.jpg", "text.jpg", "float32.tif", "int32.tif":
        with pytest.raises(OSError, match=f"^{re.escape(name)}: "):
            folders.load_image(name, 10)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(OSError, match="^whole.jpg: .* save it smaller, or raise Image.MAX_IMAGE"):
        folders.load_image("whole.jpg", 10)


def test_several_images_in_a_file():
    """Refused, as one of them would stand for all. Once it was the first one."""
    frames = [corners(40, 40), corners(40, 40).rotate(90), corners(40, 40).rotate(180)]
    for name in "stack.tif", "animation.webp", "animation.png", "animation.gif":
        frames[0].save(name, save_all=True, append_images=frames[1:])
        Path(name).rename("file.jpg")  # whatever its name says
        with pytest.raises(OSError, match="^file.jpg: it has 3 pages or frames"):
            folders.load_image("file.jpg", 40)
    for name in "one.tif", "one.webp", "one.png", "one.gif":
        frames[0].save(name, save_all=True)
        assert folders.load_image(name, 40).size == (40, 40)


def test_previews_beside_a_photo():
    """The photo is taken: of a TIFF with a preview before or after it, and of a camera's JPEG."""
    photo, preview = corners(80, 80), Image.new("RGB", (20, 20))
    photo.save("camera.jpg", format="MPO", save_all=True, append_images=[preview])
    for name, images in ("after.tif", [photo, preview]), ("before.tif", [preview, photo]):
        with AppendingTiffWriter(name, True) as file:
            for image in images:
                image.save(file, format="TIFF", tiffinfo={254: 1} if image is preview else {})
                file.newFrame()
    for name in "camera.jpg", "after.tif", "before.tif":
        assert Image.open(name).n_frames == 2
        image = folders.load_image(name, 80)
        assert image.size == (80, 80) and image.getpixel((20, 20))[0] > 200, name


# ---- Folders -------------------------------------------------------------------------------------
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


def test_files_left_out_are_counted_and_said(capsys, monkeypatch):
    """By suffix, whose case does not matter; by rank 0 alone. Hidden files and folders are not
    counted: a Mac's ._photo.jpg has no image in it."""
    touch(*(f"pictures/{name}.JPG" for name in ("train/a/1", "train/b/1", "test/a/1", "test/b/1")))
    touch(*(f"pictures/train/a/{name}" for name in ("1.jfif", "2.jfif", "3.jfif", "notes")))
    touch("pictures/train/a/._1.jpg", "pictures/test/.git/1.jpg", "pictures/train/a/.thumbs/1.jpg")
    found = [["pictures/train/a/1.JPG", "pictures/train/b/1.JPG"]]
    found += [["pictures/test/a/1.JPG", "pictures/test/b/1.JPG"]]
    assert paths("pictures") == found
    line = "pictures: 4 files left out by their suffix: 3 .jfif, 1 without\n"
    assert capsys.readouterr().out == line
    monkeypatch.setenv("RANK", "1")
    assert paths("pictures") == found and capsys.readouterr().out == ""


REFUSED = {  # what was done to a folder, and the message
    "mv test/b/3.jpg test/b/3.jfif": "test on in 'b'\npictures: 1 files left out by their suffix",
    "rm -r test": "pictures: no images to train or to test on in 'a', 'b'\n",
    "mkdir test/c": "pictures: train/ and test/ differ in 'c': ",
    "cp -r test val && mkdir 'val/caf\u00e9 '": "train/ and val/ differ in 'caf\\xe9 ': give both",
    "mv train Train && mv test Test": "no train/, and no images directly in 'Test', 'Train'",
    "mkdir all && mv train/* all && mv all train": "pictures/train has only one class, 'all'",
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
    assert str(error.value) in capsys.readouterr().err and not Path("packed").exists()


PARTS = {  # what was done to a folder, where its test images are then, and those of --evaluate
    "mv test val": ["val", "val"],
    "mkdir val": ["test", "test"],
    "mv test valid && mkdir test && touch test/9.jpg": ["valid", "valid"],  # as ImageNet's test/
    "cp -r test validation": ["validation", "test"],
}


@pytest.mark.parametrize("change", PARTS)
def test_parts(capsys, change):
    """val/ is for testing too. With both, best.pt is chosen on val/, and test/ remains for
    --evaluate, which is said; packed images are alike."""
    for part, name in itertools.product(("train", "test"), "ab"):
        Path("pictures", part, name).mkdir(parents=True)
        Image.new("L", (8, 8)).save(f"pictures/{part}/{name}/0.png")
    subprocess.run(change, shell=True, check=True, cwd="pictures")
    pack("pictures", "packed", "--side", 8)
    last = "test" if PARTS[change][1] == "test" else "val"
    assert load("pictures", "--evaluate")[1].part == load("packed", "--evaluate")[1].part == last
    assert load("pictures")[1].part == ("test" if PARTS[change][0] == "test" else "val")
    assert (" is not used, as " in capsys.readouterr().out) == ("mkdir" in change)
    for flags, test in zip(([], ["--evaluate"]), PARTS[change]):
        for folder, start in ("pictures", "pictures/"), ("packed", ""):
            wanted = [[f"{start}{part}/{name}/0.png" for name in "ab"] for part in ("train", test)]
            assert paths(folder, *flags) == wanted
            note = f"{folder}: best.pt is chosen on val/; --evaluate gives the scores on test/\n"
            has_both = PARTS[change] == ["validation", "test"]
            assert capsys.readouterr().out.count(note) == has_both


def test_links(capsys):
    """Links are followed, but not to a folder that contains them, which would never end. One from
    test/ into train/ is said, also where test/ is every tenth image."""
    for part, name in itertools.product(("train", "test"), "ab"):
        touch(*(f"pictures/{part}/{name}/{i}.jpg" for i in "12"))
    touch("elsewhere/5.jpg", "one/two/8.jpg")
    Path("elsewhere/5.jpg").write_text("a photo")
    links = {"train/loop": ".", "train/a/up": "..", "train/b/top": "../../.."}  # to nowhere
    links |= {"train/c": "../../elsewhere", "test/c": "../../elsewhere"}
    links |= {"train/b/6.jpg": "../../../elsewhere/5.jpg", "train/b/two": "../../../one/two"}
    for name, target in links.items():
        Path("pictures", name).symlink_to(target)
    Path("one/two/back").symlink_to("../../pictures/train/b")  # by another link it is in there
    train_paths, test_paths = paths("pictures")
    names = ["a/1.jpg", "a/2.jpg", "b/1.jpg", "b/2.jpg", "b/6.jpg", "b/two/8.jpg", "c/5.jpg"]
    assert train_paths == [f"pictures/train/{name}" for name in names] and len(test_paths) == 5
    says = "pictures: 1 images of test are also in train, as links or copies, such as "
    assert says in capsys.readouterr().out
    touch("tenth/a/1.jpg", "tenth/b/1.jpg", "tenth/b/2.jpg")
    Path("tenth/a/1.jpg").write_text("a photo")
    Path("tenth/a/2.jpg").symlink_to("1.jpg")
    paths("tenth")
    assert "tenth/a/1.jpg': scores will be too good" in capsys.readouterr().out


def write_parts(folder, contents):
    """Files, by their paths below a folder; and an empty one of each class in each part."""
    touch(*(f"{folder}/{part}/{name}/empty.jpg" for part in ("train", "test") for name in "ab"))
    for name, content in contents.items():
        Path(folder, name).write_bytes(content)


@pytest.mark.parametrize("most", [folders.MOST_COMPARED, 1])
def test_copies(capsys, monkeypatch, most):
    """An image that is in two parts is said: a copy, also in another class and with another name;
    but not one of the same size, or two empty files. Of many files of one size, not all are opened:
    then copies with the same name are found, and links with another name."""
    monkeypatch.setattr(folders, "MOST_COMPARED", most)
    photo, other, large = b"photo 1", b"photo 2", bytes(9000)
    contents = {"train/a/1.jpg": photo, "test/b/1.jpg": photo, "train/a/2.jpg": large}
    contents |= {"train/b/3.jpg": other, "test/b/renamed.jpg": other, "test/a/9.jpg": b"photo 9"}
    write_parts("copies", contents | {"test/a/2.jpg": b"1" + large[1:]})
    Path("copies/test/a/link.jpg").symlink_to("../../train/b/3.jpg")
    paths("copies")
    images = "3 images of test" if most > 1 else "2 images of test"
    says = f"copies: {images} are also in train, as links or copies, such as 'copies/test/a/link"
    assert says in capsys.readouterr().out
    for part in "train", "test", "val":
        for i, name in enumerate("ab"):
            write_parts("three", {})
            Path("three", part, name).mkdir(parents=True, exist_ok=True)
            Path("three", part, name, "1.jpg").write_bytes(f"photo {i}".encode())
    paths("three")
    said = capsys.readouterr().out
    for both in "val are also in train", "test are also in train", "test are also in val":
        assert f"three: 2 images of {both}, as links or copies" in said
    write_parts("apart", {"train/a/1.jpg": photo, "test/a/1.jpg": other})
    paths("apart")
    assert capsys.readouterr().out == ""


def test_files_are_asked_for_at_the_same_time():
    """By two threads, or the first one would wait for ever. Their answers are in order."""
    meeting = threading.Barrier(2, timeout=60)

    def key(path):
        if path in (0, 1000):
            meeting.wait()
        return path

    assert folders.keys_of(range(1001), key) == [*range(1001)]


def test_copies_are_said_before_packing(capsys, monkeypatch):
    folder = write_folder("pictures", side=20)
    shutil.copy(folder / "train/a/00000.jpg", folder / "test/a/copied.jpg")
    pack(folder, "packed", "--side", 20)
    assert "pictures: 1 images of test are also in train" in capsys.readouterr().out
    monkeypatch.setenv("RANK", "1")  # which prints nothing: it compares no files either
    monkeypatch.setattr(folders, "shared_files", None)
    load(folder)


def test_folders_of_systems_and_accents_of_a_mac():
    """What an archive or a system has put beside the classes is none. An accent is the same in both
    ways to write it."""
    accents = [unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD")]
    for part, accent in zip(("train", "test"), accents):
        touch(f"pictures/{part}/{accent}/1.jpg", f"pictures/{part}/tea/1.jpg")
    touch("pictures/train/__MACOSX/tea/._1.jpg", "pictures/train/tea/@eaDir/1.jpg/S.jpg")
    touch("pictures/test/lost+found/1.jpg", "plain/__MACOSX/1.jpg")
    found = load("pictures")
    assert found[0].classes == [accents[0], "tea"] and [len(x) for x in found[:2]] == [2, 2]
    touch(*(f"plain/{name}/{i}.jpg" for name in [*accents, "tea"] for i in "12"))
    found = load("plain")
    assert found[0].classes == [accents[0], "tea"] and [len(x) for x in found[:2]] == [4, 2]


def test_a_folder_that_cannot_be_read(refused, monkeypatch):
    folder, scandir = write_folder("pictures", side=20), os.scandir

    def denies(path):
        if str(path).endswith("train/b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denies)
    for name, flags in ("train", ["--dataset", folder]), ("pack_images", [folder, "packed"]):
        refused(f"{folder}/train/b cannot be read", f"complete/{name}.py", *flags)


def test_classes_named_as_parts():
    """Of folders without images, train/ and test/ may be two classes of three."""
    touch(*(f"pictures/{name}/{i}.jpg" for name in ("train", "test", "plane") for i in range(2)))
    Path("pictures/classes.json").write_text("[]")  # the user's: these are not packed images
    train_set, test_set, _ = load("pictures")
    assert train_set.classes == ["plane", "test", "train"]
    assert [len(train_set), len(test_set)] == [3, 3]


# ---- Packing -------------------------------------------------------------------------------------
def test_packing_with_broken_files(capsys):
    """One is named and ends it, or is left out with --skip-broken, unless no image of its class
    remains, whose recall would be of nothing. Nothing unfinished is left over."""
    folder = write_folder("pictures", side=20)
    broken = folder / "train" / "a" / os.fsdecode(b"caf\xe9.jpg")  # this name can be said, too
    broken.write_bytes(b"no image")
    with pytest.raises(SystemExit, match=f"{folder}/train/a/caf.*\nRemove or mend the file"):
        pack(folder, "packed", "--side", 20)
    pack(folder, "packed", "--side", 20, "--skip-broken")
    output = capsys.readouterr().out
    assert "left out: pictures/train/a/caf" in output and "train: 16 images" in output, output
    for image, label in list(load("packed")[0]):  # each has its own label still
        assert (image.float().mean() > 120) == label
    for path in folder.glob("test/b/*"):
        path.write_bytes(b"no image")
    with pytest.raises(SystemExit, match="test: no image can be decoded of 'b'"):
        pack(folder, "other", "--side", 20, "--skip-broken")
    assert helpers.files(".") == ["packed", "pictures"]


def test_progress_lines(capsys, monkeypatch):
    """A line every five seconds, with the time left."""
    clock = iter(range(0, 10_000, 2))
    monkeypatch.setattr(packer.time, "monotonic", lambda: next(clock))
    pack(write_folder("pictures"), "packed", "--side", 20)
    pattern = r"^train: \d+ of 16 images, \d+ images/s, ([\d.]+) min left$"
    left = [float(minutes) for minutes in re.findall(pattern, capsys.readouterr().out, re.M)]
    assert 3 < len(left) < 16 and sorted(left, reverse=True) == left and left[-1] < 0.1


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
    taken for a packed one; and packing again is not in its way. What is complete is not packed
    again."""
    folder = write_folder("pictures")
    pack(folder, "whole", "--side", 20)
    moments = (folders, "load_image", 10), (folders, "load_image", 20), (os, "rename", 1)
    for module, name, call in moments:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, kills(getattr(module, name), call))
            words = folder, "packed", "--side", 20
            process = multiprocessing.get_context("fork").Process(target=pack, args=words)
            process.start()
            process.join()
        assert process.exitcode == -signal.SIGKILL and not Path("packed").exists()
    pack(folder, "packed", "--side", 20)
    with pytest.raises(SystemExit, match="2"):
        pack(folder, "packed", "--side", 10)
    for path in Path("whole").iterdir():
        assert Path("packed", path.name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", ["empty", "link", "link to nothing", "."])
def test_where_to_pack(monkeypatch, kind):
    """A folder that is there, as where a disk is mounted, and stays the same one; or to be made."""
    folder, target = write_folder("pictures", side=20).resolve(), Path("packed")
    real = Path("there/real")
    if kind != "link to nothing":
        real.mkdir(parents=True)
    target.symlink_to(real)
    if kind in ("empty", "."):
        target = real
        Path(real, ".packing.left").mkdir()  # by a kill
        Path(real, "lost+found").mkdir()
    if kind == ".":
        monkeypatch.chdir(real)
        target = real = Path()
    before = real.stat().st_ino if real.exists() else None
    pack(folder, target, "--side", 20)
    assert before in (None, real.stat().st_ino)
    names = sorted(path.name for path in target.glob("[!.l]*"))
    assert names == ["classes.json", "test.bin", "test.npy", "train.bin", "train.npy"]
    assert len(load(target)[0]) == 16
    assert kind != "link to nothing" or Path("packed").is_symlink()


def test_what_cannot_be_packed(monkeypatch, capsys):
    """Said before anything is decoded, or what was decoded stays."""
    folder = write_folder("pictures", side=20)
    Path("file").touch()
    Path("full").mkdir()
    Path("full/mine.txt").touch()
    Path("loop").symlink_to("loop")
    usage = packer.shutil.disk_usage
    with monkeypatch.context() as patch:
        patch.setattr(folders, "load_image", None)
        for target, says in {
            "file": "file is a file",
            "file/packed": "Not a directory",
            "full": "full is not empty: it has 'mine.txt'",
            "loop": "loop",
            "big": "big needs 0.0 GB, and 0.0 are free",
        }.items():
            space = usage(".")._replace(free=5) if target == "big" else usage(".")
            patch.setattr(packer.shutil, "disk_usage", lambda path, space=space: space)
            with pytest.raises(SystemExit, match="2"):
                pack(folder, target, "--side", 20)
            said = capsys.readouterr().err
            assert says in said and said.count("error: ") == 1, said
    for target in "new", "empty":
        Path("empty").mkdir(exist_ok=True)
        with monkeypatch.context() as patch:  # another process is faster
            patch.setattr(packer, "move", lambda *words: pack_another(*words))
            with pytest.raises(SystemExit, match="the packed images are in (.*)") as error:
                pack(folder, target, "--side", 20)
        kept = Path(str(error.value).split("images are in ")[1])
        assert len(folders.PackedImages(kept / "train", "ab")) == 16
        assert Path(target, "train.bin").read_bytes() == b"another's"


def pack_another(folder, target):
    target.mkdir(exist_ok=True)
    Path(target, "train.bin").write_text("another's")
    move(folder, target)


move = packer.move


# ---- Packed images -------------------------------------------------------------------------------
def test_workers_read_packed_images():
    """A fork shares the open file, and with it its position, which must not move. Other kinds of
    workers get the data set pickled."""
    pack(write_folder("pictures"), "packed", "--side", 20)
    images = load("packed")[0]
    pixels = torch.stack([image for image, _ in images])
    order, position = torch.randperm(16).tolist(), images.file.tell()
    options = {"num_workers": 2, "multiprocessing_context": "fork"}
    found = torch.cat([batch for batch, _ in DataLoader(images, 3, sampler=order, **options)])
    assert torch.equal(found, pixels[order]) and images.file.tell() == position
    assert torch.equal(pickle.loads(pickle.dumps(images))[5][0], pixels[5])


def test_packed_files_that_were_cut_are_named():
    """Before the run starts, or while it reads. So is a folder that is not complete."""
    pack(write_folder("pictures"), "packed", "--side", 20)
    images = load("packed")[0]
    os.truncate("packed/train.bin", 16 * 1200 - 1)
    images[14]
    with pytest.raises(OSError, match=r"packed/train\.bin ends within image 15"):
        images[15]
    for size in 16 * 1200 - 1, 8 * 1200:  # the second is nearly that of 16 smaller images
        os.truncate("packed/train.bin", size)
        with pytest.raises(OSError, match=r"packed/train\.bin does not hold 16 images"):
            load("packed")
    Path("packed/classes.json").unlink()
    with pytest.raises(folders.FolderError, match="packed is not complete"):
        load("packed")


# ---- Training on them ----------------------------------------------------------------------------
def test_packed_and_unpacked_losses_are_the_same():
    flags = ["--image-size", 64, "--augment", "--batch-size", 4, "--epochs", 2]
    pack(write_folder("pictures"), "packed", "--side", 73)
    for folder, workers in ("pictures", 0), ("packed", 1):
        words = ["--dataset", folder, "--workers", workers, "--output", f"{folder}_run"]
        helpers.train(*flags, *words)
    assert same(weights("pictures_run"), weights("packed_run"))
    helpers.close("packed_run", "pictures_run", 1e-12)


class Hangs(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        time.sleep(2)


@pytest.mark.slow
def test_a_worker_that_hangs_ends_the_run(monkeypatch):
    monkeypatch.setattr(loaders.dist, "get_world_size", lambda: 1)
    args = helpers.parse("--batch-size", 4, "--workers", 1, "--timeout", 1)
    places = [(0, i) for i in range(4)]
    loader = loaders.make_loader(args, "train", Hangs(), places, None, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="DataLoader timed out after 1 seconds"):
        next(iter(loader))


# ---- Batches on the device -----------------------------------------------------------------------
def test_normalization():
    """Of the weights, per channel or for all; floats are left as they are."""
    device, args = torch.device("cpu"), helpers.parse("--image-size", 8)
    images, labels = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8), torch.tensor([0, 1])
    assert train.prepare(args, (images / 255, labels), device)[0].equal(images / 255)
    found = train.prepare(args, (images, labels), device)[0]
    assert torch.allclose(found, (images.float() - 115) / 58)
    args.normalization = [[120.0, 110, 100], [60.0, 50, 40]]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in args.normalization)
    found = train.prepare(args, (images, labels), device)[0]
    assert torch.allclose(found, (images.float() - mean) / std)
