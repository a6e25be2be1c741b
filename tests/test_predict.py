"""complete/predict.py: the pixels of the evaluation, a table from which a report can be made, and
files of every kind. split.py, report.py, and the pages' scripts for a report and for export."""

import csv
import itertools
import os
import re
import runpy
import shutil
import signal
import sys
import unicodedata
from pathlib import Path
from unittest import mock

import helpers
import images
import numpy as np
import predict
import pytest
import torch
import train
from altered import recipe
from helpers import ROOT
from PIL import Image
from test_images import pack, touch

FLAGS = ["--image-size", 70, "--model", "shufflenet_v2_x0_5", "--batch-size", 48, "--epochs", 1]
COLOURS = [[120.0, 110.0, 100.0], [60.0, 50.0, 40.0]]  # mean and standard deviation


@pytest.fixture(scope="module")
def mine(data, tmp_path_factory):
    """The folder of a run on data/pictures. Its best weights get a normalization by colours, as
    pretrained ones have, and prefer a class that is not the first."""
    folder = tmp_path_factory.mktemp("mine") / "mine"
    helpers.train("--dataset", data / "pictures", *FLAGS, "--workers", 0, "--output", folder)
    saved = torch.load(folder / "best.pt")
    saved["normalization"] = COLOURS
    saved["model"]["fc.bias"] += torch.tensor([0.0, 1.0, 0.5])
    torch.save(saved, folder / "best.pt")
    return folder


def predict_here(*words):
    predict.main(predict.parser.parse_args(["--workers", "0", *map(str, words)]))


def evaluated(dataset, normalization=None):
    """What the model gets of each test image, in the evaluation of a run."""
    args, device = helpers.parse("--dataset", dataset, *FLAGS), torch.device("cpu")
    args.normalization = normalization or args.normalization
    batches = [train.collate([sample]) for sample in train.load_data(args)[1]]
    return [train.prepare(args, batch, device)[0][0] for batch in batches]


def test_the_pixels_of_the_evaluation(data, mine):
    """To the last bit: of a folder's run, and of one on images that were packed larger or smaller
    than that, so that they are resized twice."""
    paths = sorted(Path(data, "pictures/test").glob("*/*"))
    model, classes, transform = predict.load(mine)
    assert classes == ["a", "b", "c"] and not model.training
    for path, x in zip(paths, evaluated(data / "pictures", COLOURS), strict=True):
        assert torch.equal(transform(path), x) and torch.equal(transform(Image.open(path)), x)
    for side in 90, 60:
        pack(data / "pictures", f"packed{side}", "--side", side)
        flags = ["--dataset", f"packed{side}", *FLAGS, "--model", "net", "--workers", 0]
        helpers.train(*flags, "--output", f"run{side}")
        _, _, transform = predict.load(f"run{side}/best.pt")
        for path, x in zip(paths, evaluated(f"packed{side}"), strict=True):
            assert torch.equal(transform(path), x)


def test_a_table(data, mine, capsys):
    """It has the true classes, and the probabilities of the run's own evaluation, whatever the
    batches and workers. A file that cannot be decoded is named; the others go on; the status is 1.
    """
    shutil.copytree(data / "pictures/test", "new")
    paths = sorted(Path("new").glob("*/*"))
    Path("new/b/broken.jpg").write_bytes(b"no image")
    Path("new/a/notes.txt").touch()
    Path("new/lion").mkdir()
    for name in b'1, "x"\n.png', b"caf\xe9.png":  # the second in another encoding
        Image.new("RGB", (1, 300)).save(Path("new/lion", os.fsdecode(name)))
    with pytest.raises(SystemExit, match="^1 of 6 files could not be classified$"):
        predict_here(mine, "new", "--output", "out.csv", "--batch-size", 2, "--workers", 2)
    said = capsys.readouterr()
    assert said.err.startswith("new/b/broken.jpg: ") and said.err.count("\n") == 1
    assert "1 files left out by their suffix: 1 .txt" in said.out
    assert "no class of the run has the name of these 1 folders: 'new/lion'" in said.out
    assert "5 images; 3 with a true class, accuracy " in said.out
    with open("out.csv", newline="", encoding="utf-8", errors="surrogateescape") as file:
        header, *rows = csv.reader(file)
    assert header == ["path", "class", "true", "a", "b", "c"]
    table = {Path(path): rest for path, *rest in rows}
    assert sorted([*Path("new/lion").iterdir(), *paths]) == sorted(table) and len(rows) == 5
    model, classes, _ = predict.load(mine)
    for path, x in zip(paths, evaluated(data / "pictures", COLOURS), strict=True):
        predicted, true, *numbers = table.pop(path)
        with torch.no_grad():
            wanted = model(x[None]).softmax(1)[0]
        assert torch.allclose(torch.tensor([*map(float, numbers)]), wanted, atol=1e-4)
        assert predicted == classes[wanted.argmax()] and true == path.parent.name
    assert [true for _, true, *_ in table.values()] == ["", ""]  # of the lions


def test_files_and_folders_of_a_class(data, mine, capsys):
    """Without --output, each image has a line with the best class first. The folder of a class may
    be given itself, and a single image in it."""
    photo, folder = next(Path(data, "pictures/test/a").iterdir()), data / "pictures/test/b"
    predict_here(mine / "model.pt", photo, folder)
    [first, _, last] = capsys.readouterr().out.splitlines()
    path, classes = first.rsplit(": ", 1)
    found = [part.split(" ") for part in classes.split(", ")]
    assert path == str(photo) and sorted(name for name, _ in found) == ["a", "b", "c"]
    assert found == sorted(found, key=lambda part: -float(part[1]))
    assert last.startswith("2 images; 2 with a true class")


def test_classes_of_one_probability(capsys):
    """The first in the order of the run is printed first, as it is the one in the table."""
    predict.print_classes([("1.jpg", "b", "", [0.4, 0.4, 0.2])], ["b", "c", "a"])
    assert capsys.readouterr().out == "1.jpg: b 0.4000, c 0.4000, a 0.2000\n"


def true_classes(classes, *places):
    """Of the images in these places, by their names, as predict.py finds them."""
    found, names = predict.find_photos([Path(place) for place in places], classes)
    assert len({*map(os.path.realpath, found)}) == len(found)
    return {os.path.basename(path): name for path, name in zip(found, names, strict=True)}


def test_true_classes(monkeypatch, capsys):
    """As training decides, where classes are named as parts of the data; each image once."""
    for part in "train", "test":
        for name in "bus", "train", "val":
            path = Path("data", part, name, f"{part}-{name}.jpg")
            path.parent.mkdir(parents=True)
            path.touch()
    classes = ["bus", "train", "val"]
    whole = {f"{part}-{name}.jpg": name for part in ("train", "test") for name in classes}
    tests = {f"test-{name}.jpg": name for name in classes}
    assert train.load_data(helpers.parse("--dataset", "data"))[0].classes == classes
    assert true_classes(classes, "data") == whole
    assert true_classes(classes, "data/train", "data/test") == whole
    capsys.readouterr()
    assert true_classes(classes, "data/test", "data/test/bus", "data/../data/test") == tests
    assert "4 images are given twice, and counted once" in capsys.readouterr().out
    assert true_classes(classes, "data/test/train") == {"test-train.jpg": "train"}
    photo = "data/test/val/test-val.jpg"
    Path("link").symlink_to("data/test")
    assert true_classes(classes, photo, "link/val", "data/test/bus/../val") == {
        "test-val.jpg": "val"
    }
    Path("data/train/stray.jpg").touch()  # in no class, which training leaves out
    assert true_classes(classes, "data/train")["stray.jpg"] == ""
    for name in classes:  # without parts, train/ is a class
        Path("plain", name).mkdir(parents=True)
        Path("plain", name, f"{name}.jpg").touch()
    assert true_classes(classes, "plain") == {f"{name}.jpg": name for name in classes}
    monkeypatch.chdir("plain/val")
    for here in ".", "..", "val.jpg", "../val", "../train/../val/val.jpg":
        assert true_classes(classes, here)["val.jpg"] == "val", here


def test_in_half_precision(data):
    """As its own evaluation was: the loss of the table's probabilities is that of metrics.csv."""
    flags = ["--dataset", data / "pictures", *FLAGS, "--model", "net", "--workers", 0, "--amp"]
    helpers.train(*flags, "--output", "half")
    predict_here("half", data / "pictures/test", "--output", "half.csv")
    with open("half.csv", newline="") as file:
        losses = [-np.log(float(row[row["true"]])) for row in csv.DictReader(file)]
    assert np.mean(losses) == pytest.approx(helpers.metrics("half")[0]["test_loss"], abs=1e-5)


NO_FLOAT64 = """
plain = torch.Tensor.double
def double(tensor):
    assert tensor.device.type == "cpu"
    return plain(tensor)
torch.Tensor.double = double
"""


def test_a_gpu_without_float64(data, mine, work):
    pytest.importorskip("emulated_accelerator", reason="torch is too old", exc_type=ImportError)
    cards = {"EMULATED_CARDS": 1, "EMULATED_REPORT": work, "processes": 0}
    words = [mine, data / "pictures/test", "--workers", 0]
    text = helpers.run("complete/predict.py", *words, more=NO_FLOAT64, **cards)
    assert "3 images; 3 with a true class" in text
    assert any("uses card 0" in path.read_text() for path in work.glob("[0-9]*") if path.is_file())


def test_two_tables(data, mine, monkeypatch):
    """Another predict.py has written --output meanwhile: it stays, and so does this one's table."""
    photos, there = data / "pictures/test", Path("out.csv")
    plain = predict.classify

    def classify(*words):
        there.write_text("another's")
        yield from plain(*words)

    monkeypatch.setattr(predict, "classify", classify)
    with pytest.raises(SystemExit, match="out.csv was written by another process: .* is ") as error:
        predict_here(mine, photos, "--output", there)
    assert there.read_text() == "another's"
    assert len(Path(str(error.value).split(" is ")[-1]).read_text().splitlines()) == 4


def test_outputs_that_are_not_finite(data, mine, capsys):
    """No class is better than another then: the image is named, as one that is broken is."""
    saved = torch.load(mine / "best.pt")
    saved["model"]["fc.bias"][1] = float("nan")
    torch.save(saved, "nan.pt")
    with pytest.raises(SystemExit, match="^3 of 3 files could not be classified$"):
        predict_here("nan.pt", data / "pictures/test", "--output", "out.csv")
    said = capsys.readouterr()
    assert said.err.count(": the outputs of the model are not finite\n") == 3
    assert "0 images" in said.out and len(Path("out.csv").read_text().splitlines()) == 1


def test_a_full_disk(data, mine, monkeypatch):
    """Also while packing: the message names what cannot be written, and nothing is left over."""
    monkeypatch.setattr(predict.secrets, "token_hex", lambda size: "new")
    Path("out.csv.new").symlink_to("/dev/full")
    with pytest.raises(SystemExit, match="^cannot write .*/out.csv: .*No space left"):
        predict_here(mine, data / "pictures/test", "--output", "out.csv")

    def full(*words):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(SystemExit, match="^cannot write packed: .*No space left"):
        pack(data / "pictures", "packed", "--side", 8)
    assert helpers.files(".") == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pack_images", "predict"])
def test_ctrl_c(mine, name):
    """All processes get it, as from a terminal. They end soon, with one line, and leave nothing.
    Where a worker was just sending a batch, a thread of Python's multiprocessing can add that the
    connection was reset; its traceback may be cut off."""
    noise = np.random.default_rng(0).integers(0, 256, (300, 300, 3), np.uint8)
    Image.fromarray(noise).save("noise.png")
    for label, i in itertools.product("ab", range(10_000)):
        Path("new", label).mkdir(parents=True, exist_ok=True)
        os.link("noise.png", f"new/{label}/{i}.png")
    words = {"pack_images": ["new", "out"], "predict": [mine, "new", "--output", "out.csv"]}[name]
    command = [sys.executable, ROOT / f"complete/{name}.py", *words, "--workers", 2]
    process = helpers.Cold(command, "log")
    helpers.wait_for({"pack_images": "images/s", "predict": "1000 of"}[name], process)
    assert list(Path().glob("out*"))
    os.killpg(process.pid, signal.SIGINT)
    helpers.wait_until(lambda: process.status() is not None)
    text = Path("log").read_text()
    assert process.status() in helpers.ENDED_BY_CTRL_C, text
    assert "\nKeyboardInterrupt\n" in text
    begins = re.findall(r'Traceback.*\n +File "(.*?)"', text)
    assert text.count("Traceback") == len(begins), text
    assert all("/multiprocessing/" in file for file in begins), text
    assert not list(Path().glob("out*"))


def test_accents_of_a_mac():
    """A folder's name may be written in another way than that of the class."""
    names = [unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD")]
    for photos, trained in names, names[::-1]:
        Path("photos", photos).mkdir(parents=True)
        Path("photos", photos, "1.png").touch()
        assert true_classes(["tea", trained], "photos") == {"1.png": trained}
        shutil.rmtree("photos")


PROGRAM = """
from complete.predict import load
import complete.predict
print(load, complete.predict.__file__)
"""


@pytest.mark.slow
def test_beside_files_of_the_same_names(work):
    """A program that has its own train.py, images.py and predict.py beside it. train.py can also be
    started as a module."""
    Path("complete").symlink_to(ROOT / "complete")
    for name in "train", "images", "predict", "files", "loaders", "ranks", "run", "start":
        Path(f"{name}.py").write_text("raise Exception('another one')")
    Path("my_program.py").write_text(PROGRAM)
    assert "complete/predict.py" in helpers.command(sys.executable, "my_program.py")
    words = [sys.executable, "-m", "complete.train", "--epochs", 0]
    assert "rank 0: host " in helpers.command(*words)


def test_refused(data, mine, capsys):
    """In a line that says why, before anything is written."""
    Path("there.csv").touch()
    Path("empty").mkdir()
    saved = torch.load(mine / "best.pt")
    torch.save(saved["model"], "plain.pt")
    torch.save(saved | {"image": None}, "floats.pt")  # of images that load_data made floats
    content = bytearray(Path(mine, "best.pt").read_bytes())
    content[len(content) // 2] ^= 4
    Path("flipped.pt").write_bytes(content)
    photos, before = data / "pictures/test", helpers.content()
    cases = {
        "--output there.csv exists": [mine, photos, "--output", "there.csv"],
        "--output no/out.csv: there is no folder ": [mine, photos, "--output", "no/out.csv"],
        "nowhere does not exist": [mine, "nowhere"],
        "--batch-size must be at least 1": [mine, photos, "--batch-size", 0],
        "--workers must not be negative": [mine, photos, "--workers", -1],
        "no images in empty": [mine, "empty"],
        "plain.pt is not a best.pt or model.pt of train.py": ["plain.pt", photos],
        "floats.pt was not trained on square uint8 images": ["floats.pt", photos],
        "flipped.pt is damaged": ["flipped.pt", photos],
        "empty/best.pt is missing": ["empty", photos],
    }
    for says, words in cases.items():
        with pytest.raises(SystemExit, match="2"):
            predict_here(*words)
        said = capsys.readouterr().err
        assert says in said and said.count("error: ") == 1 and helpers.content() == before, said


def test_many_grey_images(fashion, data, capsys):
    """Of a model that was trained on grey images, and whose classes have no names: 0 to 9. A line
    on stderr for each thousand."""
    flags = [*fashion, "--epochs", 1, "--batch-size", 320, "--model", "mlp", "--output", "grey"]
    helpers.train(*flags)
    saved = torch.load("grey/best.pt")
    torch.save(saved | {"classes": 10}, "grey/best.pt")
    photo = next(Path(data, "pictures/test/a").iterdir())
    capsys.readouterr()
    Path("photos").mkdir()
    for i in range(1000):
        Path("photos", f"{i}{photo.suffix}").symlink_to(photo)
    predict_here("grey", "photos")
    said = capsys.readouterr()
    assert said.err == "1000 of 1000 images\n" and said.out.endswith("\n1000 images\n")


# ---- Scripts of the pages ------------------------------------------------------------------------
TABLES = {  # the classes; of each image the predicted one, the true one, and probabilities
    "0.750 0.733": ("ab", [("a", "a", 0.9), ("a", "a", 0.6), ("a", "b", 0.65), ("b", "b", 0.2)]),
    "1.000 1.000": ("abc", [("a", "a", 1, 0), ("b", "b", 0, 1), ("c", "c", 0, 0)]),
    # In an order of their own.
    "0.750 0.500": ("ba", [("a", "a", 0.1), ("b", "b", 0.9), ("b", "a", 0.6), ("a", "b", 0.3)]),
    "1.000 0.556": ("cab", [("c", "c", 0.8, 0.1), ("a", "b", 0.1, 0.5), ("a", "a", 0.2, 0.6)]),
}


@pytest.fixture
def report_classes(monkeypatch):
    """complete/report_classes.py as a function of a table, in a notebook's environment."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    import report_classes

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["report_classes.py", *words])
        report_classes.main()

    run.module = report_classes
    return run


def write_classes(path, classes, images):
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "class", "true", *classes])
        for predicted, true, *first in [*images, (classes[0], "", *images[0][2:])]:
            writer.writerow(["1.jpg", predicted, true, *first, 1 - sum(first)])


@pytest.mark.slow
@pytest.mark.parametrize("scores", TABLES)
def test_report(capsys, report_classes, scores):
    """complete/report_classes.py: AUC and macro F1 of the images with a true class."""
    write_classes("test.csv", *TABLES[scores])
    report_classes("test.csv")
    said = capsys.readouterr().out
    f1 = said.split("macro avg")[1].split()[2]
    assert f"{float(said.split('AUC')[1]):.3f} {f1}" == scores
    assert Path("confusion.png").exists()


def perfect(classes, of=None):
    """An image of each class, which is certain; the last probability is what remains to 1."""
    numbers = range(len(classes)) if of is None else of
    return [
        (classes[i], classes[i], *(float(i == k) for k in range(len(classes) - 1))) for i in numbers
    ]


@pytest.mark.slow
def test_report_in_the_order_of_the_run(capsys, report_classes):
    """Which no alphabet knows, in table and picture: of two classes, three, and twelve without
    names. Classes of which there are no images are left out of the means."""
    numbers = [str(i) for i in range(12)]
    for i, classes in enumerate((["normal", "ill"], ["mild", "severe", "healthy"], numbers)):
        write_classes("test.csv", classes, perfect(classes))
        report_classes("test.csv", f"{i}.png")
        said = capsys.readouterr().out
        assert float(said.split("AUC")[1]) == 1
        rows = [line.split()[0] for line in said.splitlines()[2:] if line]
        assert rows[: len(classes)] == classes
        axes = report_classes.module.pyplot.gcf().axes[0]
        assert [label.get_text() for label in axes.get_xticklabels()] == classes
        assert [text.get_text() for text in axes.texts][:2] == ["1", "0"]
    write_classes("test.csv", numbers, perfect(numbers, of=[0, 3, 11]))
    report_classes("test.csv", "few.png")
    said = capsys.readouterr().out
    assert "left out, as there are no images of them: 1 2 4 5 6 7 8 9 10\n" in said
    assert said.split("macro avg")[1].split()[:3] == ["1.000"] * 3
    assert float(said.split("AUC")[1]) == 1
    write_classes("test.csv", numbers, perfect(numbers, of=[3]))
    report_classes("test.csv", "one.png")
    assert "AUC cannot be computed: all images are of 3\n" in capsys.readouterr().out


@pytest.mark.slow
def test_report_of_many_classes(capsys, report_classes):
    """The picture has no counts, which would cover it, and in the end numbers for names."""
    for count, first in (50, "class 0"), (400, "0"):
        classes = [f"class {i}" for i in range(count)]
        write_classes("test.csv", classes, perfect(classes))
        report_classes("test.csv", f"{count}.png")
        axes = report_classes.module.pyplot.gcf().axes[0]
        labels = [label.get_text() for label in axes.get_yticklabels()]
        assert labels[0] == first and len(labels) <= 50 and not axes.texts
        with Image.open(f"{count}.png") as picture:
            assert min(picture.size) > 600 and max(picture.size) < 5000
    said = capsys.readouterr().out
    assert (
        re.search("^ *399 class 399 ", said, re.M)
        and "400.png has the numbers of the classes" in said
    )


@pytest.mark.slow
def test_report_in_any_letters(capsys, monkeypatch, report_classes):
    """A font that has them is taken; without one, the picture has numbers, and the table, too. A
    sign of mathematics is a letter."""
    classes = ["\u732b", "\u72d7", "$\\frac$"]
    write_classes("test.csv", classes, perfect(classes))
    own = report_classes.module.letters

    def letters(path):
        return set("\u732b\u72d7") if path == "cjk.ttf" else own(path)

    monkeypatch.setattr(report_classes.module, "letters", letters)
    manager = report_classes.module.font_manager.fontManager
    usual = [font for font in manager.ttflist if font.name.startswith("DejaVu")]
    entry = report_classes.module.font_manager.FontEntry
    squares = entry(fname=usual[0].fname, name="Last Resort")
    chinese = entry(fname="cjk.ttf", name="cjk")
    monkeypatch.setattr(manager, "ttflist", [*usual, squares])
    report_classes("test.csv", "numbers.png")
    said = capsys.readouterr().out
    assert re.search("^ +0 \u732b ", said, re.M) and "numbers.png has the numbers" in said
    monkeypatch.setattr(manager, "ttflist", [*usual, squares, chinese])
    families = report_classes.module.fonts_for(classes)
    assert families[-1] == "cjk" and len(families) == 2
    assert report_classes.module.fonts_for(classes[2:]) == families[:1]


@pytest.mark.slow
def test_report_from_a_notebook(monkeypatch):
    """Whose MPLBACKEND !python inherits. A picture that is there stays, and the table is said."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "module://a_notebooks.backend")
    write_classes("test.csv", "ab", perfect("ab"))
    words = [sys.executable, ROOT / "complete/report_classes.py", "test.csv"]
    assert "AUC 1.0" in helpers.command(*words)
    before = Path("confusion.png").read_bytes()
    job = helpers.Cold(words, "log")
    assert helpers.finish([job])[0] == [1]
    said = job.log.read_text()
    assert "AUC 1.0" in said and "confusion.png exists: remove it, or put another name" in said
    assert Path("confusion.png").read_bytes() == before


def write_images(path, patients, random):
    """A table of predict.py: four images of each patient, of which the first two are alike."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "class", "true", "ill", "healthy"])  # in the run's order
        for name in patients:
            first = round(random.uniform(0, 0.6) + 0.3 * (name % 3 == 0), 4)
            for i, p in enumerate([first, first, first / 2, 0.05]):
                true = "ill" if name % 3 == 0 and i < 3 else "healthy"
                writer.writerow([f"{path.stem}/{true}/p{name}/{i}.png", "", true, p, 1 - p])
        writer.writerow(["stray.png", "", "", 0.5, 0.5])


def read_images(path):
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["true"]]
    return [(row["true"] == "ill", float(row["ill"]), row["path"].split("/")[2]) for row in rows]


def report_on(*words):
    with mock.patch.object(sys, "argv", ["report.py", *words]):
        runpy.run_path(str(ROOT / "complete/report.py"), run_name="__main__")


@pytest.mark.slow
def test_few_patients(capsys):
    """Five ill patients, one in each fold, of whom four are found: Wilson's interval of 4 of 5, and
    how many draws the others have used. With one image per patient, images are alike."""
    pytest.importorskip("sklearn")
    accents = [unicodedata.normalize(form, "m\u00e9lanome") for form in ("NFC", "NFD")]
    for fold in range(5):
        for part in "val", "test":
            rows = [["path", "class", "true", "healthy", accents[fold % 2]]]
            for i in range(21):
                true = rows[0][4] if i == 0 else "healthy"
                p = 0.9 if i == 0 and (part, fold) != ("test", 3) else i / 100
                rows.append([f"{part}/{true}/{part}{fold}-{i}/1.png", "", true, 1 - p, p])
            path = Path(f"fold{fold}", f"{part}.csv")
            path.parent.mkdir(exist_ok=True)
            with open(path, "w", newline="", encoding="utf-8") as file:
                csv.writer(file).writerows(rows)
    report_on(accents[1], *(f"fold{fold}" for fold in range(5)))
    said = capsys.readouterr().out
    assert said.startswith("healthy: 100 patients, 100 images\nm\u00e9lanome: 5 patients, 5 images")
    for name, row in {
        "recall": "0.800 (0.376 to 0.964) 4 of 5",
        "specificity": "1.000 (0.963 to 1.000) 100 of 100",
        "precision": "1.000 (0.510 to 1.000) 4 of 4",
    }.items():
        assert re.findall(rf"^  {name} +(.*)$", said, re.M) == [row, row]
    for name in "F1", "AUC", "average precision":
        for used in re.findall(rf"^  {name} .* (\d+) of 500 draws$", said, re.M):
            assert 490 <= int(used) <= 500
    assert said.count(" of 500 draws") == 6


@pytest.mark.slow
def test_report_of_patients(monkeypatch, capsys):
    """complete/report.py: counts over all folds at each fold's threshold, which is the one with the
    highest F1 on val; of patients, by their highest probability. Intervals hold the value; those of
    patients whose images are all alike are not narrower for it."""
    metrics = pytest.importorskip("sklearn.metrics")
    random = np.random.default_rng(0)
    for fold in range(2):
        for part in "val", "test":
            first = 60 * fold + 1200 * (part == "val")
            write_images(Path(f"fold{fold}", f"{part}.csv"), range(first, first + 60), random)
    monkeypatch.setattr(sys, "argv", ["report.py", "ill", "fold0", "fold1"])
    runpy.run_path(str(ROOT / "complete/report.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "480 images, 120 of them ill" in said and "120 patients, 40 of them ill" in said
    assert said.startswith("ill: 40 patients, 120 images\nhealthy: 120 patients, 360 images\n")
    assert "480 images (120 ill) of 120 patients (40 ill) were split" in said.replace("\n", " ")
    for unit, printed in zip(("images", "patients"), said.split(" of them ill\n")[1:]):
        true, found, aucs = [], [], []
        for fold in range(2):
            sets = []
            for part in "val", "test":
                images = read_images(Path(f"fold{fold}", f"{part}.csv"))
                names = sorted({name for *_, name in images})
                if unit == "patients":
                    images = [
                        (
                            any(ill for ill, _, other in images if other == name),
                            max(p for _, p, other in images if other == name),
                            name,
                        )
                        for name in names
                    ]
                sets.append([np.array(values) for values in list(zip(*images))[:2]])
            (val, val_p), (test, p) = sets
            limit = max(sorted(val_p), key=lambda x: metrics.f1_score(val, val_p >= x))
            true, found = np.append(true, test), np.append(found, p >= limit)
            aucs.append(metrics.roc_auc_score(test, p))
        wanted = {
            "recall": metrics.recall_score(true, found),
            "precision": metrics.precision_score(true, found),
            "F1": metrics.f1_score(true, found),
            "AUC": np.mean(aucs),
        }
        for name, value in wanted.items():
            pattern = rf"^  {name} +(\S+) \((\S+) to (\S+)\) (\d+) of (\d+)( draws)?$"
            [[*row, hits, total, is_draws]] = re.findall(pattern, printed, re.M)
            shown, low, high = map(float, row)
            assert bool(is_draws) == (unit == "images" or name not in ("recall", "precision"))
            assert is_draws or float(hits) / float(total) == pytest.approx(value)
            assert not is_draws or (hits, total) == ("500", "500")
            assert shown == pytest.approx(value, abs=6e-4) and low <= shown <= high, (unit, name)
            assert high - low > 0.01 or value > 0.98
    shutil.copytree("fold0", "fold2")
    for folders, says in (
        (["fold0", "fold2"], "patient p0 is in the test.csv of fold0 and of fold2"),
        (["fold?"], "fold[?]/val.csv: .*: write it with predict.py"),
    ):
        with pytest.raises(SystemExit, match=says):
            report_on("ill", *folders)
    shutil.copy("fold2/test.csv", "fold2/val.csv")
    with pytest.raises(SystemExit, match="fold2: patient p0 is in val.csv and in test.csv"):
        report_on("ill", "fold2")
    Path("fold2/val.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match="fold2/val.csv is no table of predict.py"):
        report_on("ill", "fold2")
    text = Path("fold1/test.csv").read_text()
    Path("fold1/test.csv").write_text(re.sub(r"/p\d+/", "/", text))
    with pytest.raises(SystemExit, match="not of patients"):
        runpy.run_path(str(ROOT / "complete/report.py"), run_name="__main__")


@pytest.mark.slow
def test_export(mine, data, monkeypatch):
    """docs/recipes.md: both files have the normalization and the crop in them, and take any number
    of images."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    [code] = [code for language, code in recipe("Export") if language == "python"]
    monkeypatch.setattr(sys, "argv", ["export.py", str(mine)])
    exec(code, {"__name__": "export"})
    run = predict.TrainedRun(mine)
    paths = sorted(Path(data, "pictures/test").glob("*/*"))
    pixels = torch.stack([predict.decode(path, run.image_shape) for path in paths])
    with torch.no_grad():
        wanted = run.model(run.prepare(pixels)).softmax(1)
    assert torch.allclose(torch.export.load("model.pt2").module()(pixels), wanted, atol=1e-5)
    session = onnxruntime.InferenceSession("model.onnx")
    [found] = session.run(None, {"pixels": pixels.numpy()})
    assert np.allclose(found, wanted, atol=1e-5)


def split_refused():
    """Folders that cannot be split by patient, and what is said."""
    for part, i in itertools.product(("Training", "testing"), range(20)):
        touch(f"parts/{part}/{'ab'[i % 2]}/{'ab'[i % 2]}_{i}.png")
        touch(f"flat/{part}/{i}_1.png", f"flat/{part}/{i}_2.png")
    for i in range(20):
        touch(f"named/cats/cats_{i}.png", f"named/dogs/dogs_{i}.png")
        touch(f"rare/ill/p{i % 4}/{i}.png", f"rare/well/q{i % 9}/{i}.png")
        touch(f"twice/a/p{i % 6}/1/x/{i}.png", f"twice/b/q{i % 6}/{i}.png")
    touch("twice/a/p0/1_x_0.png")
    return {
        "parts": "parts has Training, testing, which are no classes",
        "flat": "flat has Training, testing, which are no classes",
        "named": "cats has only 1 patients (cats), for 5 folds: see --patient",
        "rare": "ill has only 4 patients (p0, p1, p2, p3), for 5 folds",
        "twice": "would have one name, a/p0/1_x_0.png: rename one",
        "nowhere": "nowhere has no folders",
    }.items()


@pytest.mark.slow
def test_split_by_patient(monkeypatch, capsys, data):
    """complete/split.py: no patient in two parts; each is in one fold's test set. What
    pack_images.py, train.py and predict.py find in a fold are its images."""
    pytest.importorskip("sklearn")
    photos = sorted(Path(data, "pictures/train").glob("*/*"))
    for i in range(30):
        path = Path("my_images", "ab"[i // 3 % 2], f"p{i // 3}_{i % 3}{photos[i].suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(photos[i], path)
    monkeypatch.setattr(sys, "argv", ["split.py", "my_images", "folds"])
    runpy.run_path(str(ROOT / "complete/split.py"), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert said[:4] == [
        "a/p0_0.jpg is of patient p0",
        "all a: 5 patients, 15 images",
        "all b: 5 patients, 15 images",
        "folds/0/test a: 1 patients, 3 images",
    ]
    tested = []
    for fold in range(5):
        links = [path for path in Path("folds", str(fold)).glob("*/*/*/*") if path.exists()]
        parts = {(path.parts[2], path.parts[4]) for path in links}
        assert len(links) == 30 and len(parts) == 10  # each patient is in one of them
        assert all(path.name.startswith(f"{path.parts[4]}_") for path in links)
        tested += [patient for part, patient in parts if part == "test"]
    assert sorted(tested) == sorted(f"p{i}" for i in range(10))
    classes, found, _ = images.find_images(Path("folds/0"))
    sizes = {part: len(paths) for part, (paths, _) in found.items()}
    assert classes == ["a", "b"] and sizes == {"train": 18, "val": 6, "test": 6}
    for path in list(Path("my_images").glob("*/*")):  # a folder for each patient
        patient, _, name = path.name.partition("_")
        path.parent.joinpath(patient).mkdir(exist_ok=True)
        path.rename(path.parent / patient / name)
    monkeypatch.setattr(sys, "argv", ["split.py", "my_images", "by_folder"])
    runpy.run_path(str(ROOT / "complete/split.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines()[1:] == [
        line.replace("folds", "by_folder") for line in said[1:]
    ]
    for path in list(Path("my_images/a/p0").iterdir()):  # two scans, with the same names
        for scan in "12":
            copied = path.parent / f"scan{scan}" / path.name
            copied.parent.mkdir(exist_ok=True)
            shutil.copy(path, copied)
        path.unlink()
    monkeypatch.setattr(sys, "argv", ["split.py", "my_images", "scans"])
    runpy.run_path(str(ROOT / "complete/split.py"), run_name="__main__")
    names = {path.name for path in Path("scans/0").glob("*/a/p0/*")}
    assert len(names) == 6 and all(name.startswith(("scan1_", "scan2_")) for name in names)
    capsys.readouterr()
    for folder, says in split_refused():
        before = helpers.content()
        monkeypatch.setattr(sys, "argv", ["split.py", folder, "other"])
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(str(ROOT / "complete/split.py"), run_name="__main__")
        said = capsys.readouterr().err
        assert says in said and helpers.content() == before and not Path("other").exists(), said
    monkeypatch.setattr(sys, "argv", ["split.py", "my_images", "my_images/folds"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(ROOT / "complete/split.py"), run_name="__main__")
    assert "my_images/folds would look like a class" in capsys.readouterr().err
    for pattern in "x", ".*", "p":
        monkeypatch.setattr(sys, "argv", ["split.py", "my_images", "other", "--patient", pattern])
        with pytest.raises(SystemExit):
            runpy.run_path(str(ROOT / "complete/split.py"), run_name="__main__")
        assert "--patient" in capsys.readouterr().err and not Path("other").exists()
