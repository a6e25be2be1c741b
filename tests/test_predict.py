"""complete/predict.py: the pixels of the evaluation, a table from which a report can be made, and
files of every kind."""

import csv
import os
import shutil
import sys
from pathlib import Path

import helpers
import numpy as np
import pack_images as packer
import predict
import pytest
import torch
import train
from checkpoint import DamagedFile
from PIL import Image
from runs import recipe

FLAGS = ["--image-size", 70, "--model", "shufflenet_v2_x0_5", "--batch-size", 48, "--epochs", 1]


@pytest.fixture(scope="module")
def mine(data, tmp_path_factory):
    """The folder of a run on data/pictures."""
    folder = tmp_path_factory.mktemp("mine") / "mine"
    helpers.train("--dataset", data / "pictures", *FLAGS, "--workers", 0, "--output", folder)
    return folder


def start(*words):
    predict.main(predict.parser.parse_args(["--workers", "0", *map(str, words)]))


def rows(name="out.csv"):
    with open(name, newline="", encoding="utf-8", errors="surrogateescape") as file:
        return list(csv.reader(file))


def evaluated(dataset, *flags):
    """What the model gets of each test image, in the evaluation of a run."""
    args, device = helpers.parse("--dataset", dataset, *flags), torch.device("cpu")
    test_set = train.load_data(args)[1]
    batches = [train.collate([sample]) for sample in test_set]
    return [train.prepare(args, batch, device)[0][0] for batch in batches]


def test_the_pixels_of_the_evaluation(data, mine):
    """To the last bit: of a folder's run, and of one on images that were packed larger or smaller
    than that, so that they are resized twice."""
    paths = sorted(Path(data, "pictures/test").glob("*/*"))
    model, classes, transform = predict.load(mine)
    assert classes == ["a", "b", "c"] and not model.training
    inputs = evaluated(data / "pictures", *FLAGS)
    assert all(torch.equal(transform(path), x) for path, x in zip(paths, inputs, strict=True))
    assert all(torch.equal(transform(Image.open(path)), x) for path, x in zip(paths, inputs))
    for side in 90, 60, 76:
        words = [data / "pictures", f"packed{side}", "--side", side, "--workers", 0]
        packer.main(packer.parser.parse_args([*map(str, words)]))
        flags = ["--dataset", f"packed{side}", *FLAGS, "--model", "net", "--workers", 0]
        helpers.train(*flags, "--output", f"run{side}")
        _, _, transform = predict.load(f"run{side}/best.pt")
        for path, x in zip(paths, evaluated(f"packed{side}", *FLAGS), strict=True):
            assert torch.equal(transform(path), x)


def test_a_table(data, mine, capsys):
    """It has the probabilities of the run's own evaluation, in batches of any size, true classes,
    and all images but the one that is broken, which is named."""
    shutil.copytree(data / "pictures/test", "new")
    shutil.copytree(data / "pictures/train/a", "new/more/a")  # the same names in another folder
    names = ["b/broken.jpg", 'lion/1, "x"\n.png', os.fsdecode(b"lion/caf\xe9.png"), "a/._1.jpg"]
    for name in names:
        path = Path("new", name)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"no image")
    for name in names[1:3]:
        Image.new("CMYK", (1, 300)).convert("RGB").save(Path("new", name))
    Path("new/a/notes.txt").touch()
    start(mine, "new", "--output", "out.csv", "--batch-size", 7)
    said = capsys.readouterr()
    assert said.err.startswith("new/b/broken.jpg: ") and said.err.count("\n") == 1
    assert "1 files left out by their suffix: 1 .txt" in said.out
    assert "no class of the run has the name of these 1 folders: 'new/lion'" in said.out
    header, *found = rows()
    assert header == ["path", "class", "true", "a", "b", "c"]
    counts = len(list(Path("new/more/a").iterdir())) + 3
    assert f"{counts + 3} images, of which 1 cannot be decoded; {counts} with a true" in said.out
    table = {row[0]: row[1:] for row in found}
    assert len(table) == counts + 2 == len(found)
    assert {table[f"new/{name}"][1] for name in names[1:3]} == {""}
    assert all(row[1] == Path(path).parent.name for path, row in table.items() if row[1])
    model, classes, _ = predict.load(mine)
    paths = sorted(Path(data, "pictures/test").glob("*/*"))
    for path, x in zip(paths, evaluated(data / "pictures", *FLAGS), strict=True):
        predicted, _, *numbers = table[f"new/{path.parent.name}/{path.name}"]
        with torch.no_grad():
            wanted = model(x[None]).softmax(1)[0]
        assert torch.allclose(torch.tensor([*map(float, numbers)]), wanted, atol=1e-4)
        assert predicted == classes[wanted.argmax()]
    start(mine / "model.pt", *Path("new").glob("a/*.*g"), "new/b")  # files, a class folder: printed
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("new/a/") and "; 2 with a true class" in printed[-1], printed


def test_loader_workers(data, mine, capsys):
    """They are forked, and deliver in order."""
    for workers in 0, 2:
        words = [mine, data / "pictures/train", "--output", f"{workers}.csv"]
        start(*words, "--workers", workers, "--batch-size", 5)
    assert rows("0.csv") == rows("2.csv") and len(rows("0.csv")) == 97
    assert helpers.files(".") == ["0.csv", "2.csv"]


def test_refused(data, mine, capsys):
    """In a line that says why, before anything is written."""
    Path("there.csv").write_text("")
    Path("empty").mkdir()
    flags = [mine, data / "pictures/test", "--output", "there.csv"]
    weights = torch.load(mine / "best.pt")
    torch.save(weights["model"], "plain.pt")
    content = bytearray(Path(mine, "best.pt").read_bytes())
    content[len(content) // 2] ^= 4
    Path("flipped.pt").write_bytes(content)
    cases = {
        "--output there.csv exists": flags,
        "nowhere does not exist": [mine, "nowhere"],
        "no images in empty": [mine, "empty"],
        "plain.pt is not a best.pt or model.pt of train.py": ["plain.pt", data],
        "flipped.pt is damaged": ["flipped.pt", data],
        "empty/best.pt is missing": ["empty", data],
    }
    for says, words in cases.items():
        before = helpers.content()
        with pytest.raises(SystemExit, match="2"):
            start(*words)
        said = capsys.readouterr().err
        assert says in said and said.count("error: ") == 1 and helpers.content() == before, said
    with pytest.raises(DamagedFile):
        predict.load("plain.pt")


def test_grey_images(fashion, data):
    """Of a model that was trained on grey images, and of classes that have no names."""
    flags = [*fashion, "--epochs", 1, "--batch-size", 320, "--model", "mlp", "--output", "grey"]
    helpers.train(*flags)
    start("grey", data / "pictures/test", "--output", "out.csv")
    assert len(rows()[0]) == 13 and len(rows()) == 4


def test_report(mine, data, monkeypatch, capsys):
    """docs/your_model_and_data.md: recall, macro F1 and AUC from the table."""
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib").use("agg")
    from sklearn.metrics import f1_score

    start(mine, data / "pictures/train", "--output", "test.csv")
    _, *table = rows("test.csv")
    known = [row for row in table if row[2]]
    wanted = f1_score([row[2] for row in known], [row[1] for row in known], average="macro")
    [code] = [code for language, code in recipe("A report") if language == "python"]
    monkeypatch.setattr(sys, "argv", ["report.py", "test.csv"])
    capsys.readouterr()
    exec(code, {})
    said = capsys.readouterr().out
    assert f"{wanted:.3f}" in said.split("macro avg")[1].split("\n")[0]
    p = np.array([row[3:] for row in known], float)
    auc = []
    for label, name in enumerate("abc"):  # by definition: the share of pairs in the right order
        own = np.array([row[2] == name for row in known])
        pairs = p[own, label][:, None] - p[~own, label]
        auc.append(((pairs > 0) + (pairs == 0) / 2).mean())
    assert float(said.split("AUC")[1]) == pytest.approx(np.mean(auc))
    assert Path("confusion.png").exists()


@pytest.mark.slow
def test_export(mine, data, monkeypatch):
    """docs/recipes.md: both files have the normalization and the crop in them, and take any number
    of images."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    blocks = [code for language, code in recipe("Export") if language == "python"]
    monkeypatch.setattr(sys, "argv", ["export.py", str(mine)])
    exec(blocks[0], {"__name__": "export"})
    run = predict.TrainedRun(mine)
    paths = sorted(Path(data, "pictures/test").glob("*/*"))
    pixels = torch.stack([predict.decode(path, run.image_shape) for path in paths])
    with torch.no_grad():
        wanted = run.model(run.prepare(pixels)).softmax(1)
    assert torch.allclose(torch.export.load("model.pt2").module()(pixels), wanted, atol=1e-5)
    session = onnxruntime.InferenceSession("model.onnx")
    [found] = session.run(None, {"pixels": pixels.numpy()})
    assert np.allclose(found, wanted, atol=1e-5)
    shutil.copy(paths[0], "photo.jpg")
    exec(blocks[1], space := {})
    assert space["classes"] == ["a", "b", "c"]
    assert np.allclose(space["probabilities"], wanted[:1], atol=0.05)


@pytest.mark.parametrize("count", [5, 40])
def test_split_by_patient(monkeypatch, count):
    """docs/your_model_and_data.md: no patient in two parts; each is in one fold's test set."""
    pytest.importorskip("sklearn")
    [code] = [code for language, code in recipe("Split by patient") if language == "python"]
    for i in range(3 * count):
        path = Path("my_images", "ab"[i // 3 % 2], f"p{i // 3}_{i % 3}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    Path("my_images/a/.DS_Store").touch()
    tested = []
    for fold in range(5):
        monkeypatch.setattr(sys, "argv", ["split.py", str(fold)])
        exec(code, {})
        parts = {}
        for path in Path("folds", str(fold)).glob("*/*/*"):
            parts.setdefault(path.parts[2], set()).add(path.name.split("_")[0])
            assert path.exists()
        assert not parts["train"] & parts["test"] and not parts["val"] & parts["test"]
        assert not parts["train"] & parts["val"]
        tested += parts["test"]
    assert sorted(tested) == sorted(f"p{i}" for i in range(count))
