"""large/: texts to tokens; the same run on any number of ranks, however sharded; killed and
resumed; what is refused; memory; samples and export."""

import gzip
import json
import math
import os
import re
import resource
import shutil
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import numpy as np
import prepare_texts
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import train_lm
from helpers import (
    ENDED_BY_CTRL_C,
    ROOT,
    Cold,
    altered,
    by_mark,
    content,
    files,
    free_port,
    here,
    kill_all,
    leaves,
    logs,
    run,
    some_fast,
    start,
    together,
    wait_for,
    wait_until,
    weights,
)

LM = "large/train_lm.py"
SMALL = ["--layers", 2, "--width", 32, "--heads", 2, "--length", 32, "--batch-size", 12]
SMALL += ["--device", "cpu", "--steps", 8, "--warmup-steps", 2, "--log-every", 1, "--lr", 0.003]
SMALL += ["--eval-every", 4, "--eval-tokens", 1000]
STILL = ["--lr", 0, "--weight-decay", 0, "--steps", 1, "--warmup-steps", 0]  # no update
# What a test changes in a copy of train_lm.py. Each step is saved, which ends at once; and after
# that of step --stop, the run ends.
STOP = """
parser.set_defaults(checkpoint_minutes=0)
add_run("--stop", type=int, default=-1)
MAY_CHANGE.add("stop")
class Checkpoints(Checkpoints):
    def __init__(self, args, *words, **options):
        super().__init__(args, *words, **options)
        self.stop = args.stop

    def start(self, model, optimizer, step):
        super().start(model, optimizer, step)
        self.finish()
        if step == self.stop:
            raise SystemExit("stopped")
"""


BYTES = ["texts", "--output", "out", "--tokenizer", "bytes"]


def prepare(*words, pool=ThreadPoolExecutor):
    """What prepare_texts.py has written: tokens.json, and the ids for training and validation."""
    words = ["--workers", "1", *map(str, words or BYTES)]
    with mock.patch.object(prepare_texts, "ProcessPoolExecutor", pool):
        prepare_texts.main(prepare_texts.parser.parse_args(words))
    output = Path(words[words.index("--output") + 1])
    about = json.loads((output / "tokens.json").read_text())
    ids = [np.fromfile(output / f"{part}.bin", about["dtype"]) for part in ("train", "val")]
    assert [len(part) for part in ids] == [about[part]["count"] for part in ("train", "val")]
    return about, *ids


def refusal(function, *words):
    """What SystemExit says. Its traceback is freed: it would keep a lock."""
    try:
        function(*words)
    except SystemExit as error:
        return str(error)
    raise AssertionError("it is not refused")


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """The bytes of some scripts, in two documents: the end is for validation."""
    folder = tmp_path_factory.mktemp("texts")
    paths = ROOT / LM, ROOT / "large" / "prepare_texts.py", Path(__file__)
    text = "".join(path.read_text() for path in paths)
    (folder / "a.txt").write_text(text[:68_000])
    (folder / "b.txt").write_text(text[68_000:70_000])
    prepare(folder, "--output", folder / "tokens", "--tokenizer", "bytes", "--hold-out", 20)
    return folder / "tokens"


@pytest.fixture
def flags(tokens):
    """Those of a small run: --output stands last, and gets its value from the test."""
    return ["--tokens", tokens, *SMALL, "--output"]


@pytest.fixture(scope="session")
def finished(tokens, tmp_path_factory):
    """A folder with two runs by one process: "one", and "still", which has the weights that it
    starts with."""
    folder = tmp_path_factory.mktemp("lm")
    for name, more in ("one", []), ("still", STILL):
        here(LM, "--tokens", tokens, *SMALL, *more, "--output", folder / name)
    return folder


@pytest.fixture
def one(finished):
    return finished / "one"


def rows(output, *names):
    """Values of log.jsonl, without speeds."""
    lines = map(json.loads, Path(output, "log.jsonl").read_text().splitlines())
    names = names or ("step", "loss", "lr", "gradient_norm", "val_loss", "bits_per_byte")
    return [[row[name] for name in names if name in row] for row in lines]


def same_losses(output, other, digits=1e-4):
    """The same losses up to rounding, and the same files."""
    assert sum(rows(output), []) == pytest.approx(sum(rows(other), []), rel=digits), output
    assert files(output) == files(other)


def same_weights(output, other):
    a, b = (leaves(weights(folder)) for folder in (output, other))
    return all(map(torch.equal, a, b))


def same_run(output, other):
    """Bit-identical, with the same files."""
    assert files(output) == files(other) and rows(output) == rows(other), output
    assert same_weights(output, other), output


def load_model(output):
    """What model.pt has, and the model, as the page says."""
    saved = torch.load(Path(output, "model.pt"), mmap=True)
    model = train_lm.LanguageModel(**saved["config"])
    model.load_state_dict(saved["model"])
    return saved, model


@torch.no_grad()
def all_scores(model, ids):
    """Of the next token after each, (N, length, vocabulary), without chunks."""
    x = model.embedding(ids)
    for block in model.blocks:
        x = block(x, *train_lm.rotary(ids.shape[1], model.head_size, x.device))
    return model.head.scores(model.head.norm(x))


# ---- Texts ---------------------------------------------------------------------------------------
def test_prepare_texts(capsys):
    """Each document once, in the order of names, after an end-of-text; every third is held out.
    Pieces of a long one are joined. Hidden files are skipped."""
    Path("texts/sub").mkdir(parents=True)
    Path("texts/.git").mkdir()
    long = "".join(f"line {i} of grün\n\n" for i in range(9000))  # more than one piece
    Path("texts/a.txt").write_text(long)
    for ignored in ("texts/code.py", "texts/.b.txt", "texts/.git/c.md"):
        Path(ignored).write_text("no")
    lines = [json.dumps({"body": f"document {i}"}) for i in range(4)]
    Path("texts/sub/b.jsonl").write_text("\n".join(lines[:3]) + "\n\n")
    Path("texts/sub/c.jsonl").write_text(lines[3])
    words = "texts --output out --tokenizer bytes --field body --hold-out".split()
    about, train, val = prepare(*words, 3, pool=ProcessPoolExecutor)
    tokenizer = prepare_texts.build_tokenizer(json.loads(Path("out/tokenizer.json").read_text()))

    def documents(ids):
        starts = np.flatnonzero(ids == tokenizer.end_of_text)
        assert starts[0] == 0
        return [tokenizer.decode(part.tolist()) for part in np.split(ids, starts)[1:]]

    assert len(long) > prepare_texts.PIECE
    assert documents(train) == [long, "document 0", "document 2", "document 3"]
    assert documents(val) == ["document 1"]
    assert "that is little for validation: choose another --hold-out" in capsys.readouterr().out
    of_text = np.array(about["token_bytes"])[train].sum()
    assert of_text == len("".join(documents(train)).encode())
    # Fewer documents than --hold-out: the end of the text, wherever it is.
    words[words.index("out")] = "other"
    _, begin, end = prepare(*words, 6)
    assert len(end) == (len(train) + len(val)) // 6
    assert documents(np.concatenate([begin, end]))[1:] == [f"document {i}" for i in range(4)]
    assert "little" not in capsys.readouterr().out


def test_progress_lines(monkeypatch, capsys):
    """Nobody waits for hours without a word."""
    monkeypatch.setattr(prepare_texts, "BATCH", 4)
    monkeypatch.setattr(prepare_texts, "REPORT_SECONDS", 0)
    Path("texts").mkdir()
    for i in range(3):
        Path(f"texts/{i}.txt").write_text("word")
    prepare()
    said = capsys.readouterr().out
    assert "\n1 documents, 5 tokens\n2 documents, 10 tokens\n3 documents, 15 tokens\n" in said


@pytest.mark.parametrize("name", ["one.txt", "one.jsonl"])
def test_one_long_line(monkeypatch, name):
    """A document of one line is read in pieces that end with a word, if none is too long."""
    monkeypatch.setattr(prepare_texts, "PIECE", 200)
    monkeypatch.setattr(prepare_texts, "WORD", 50)
    text = "  Zwölf Boxkämpfer don\u2019t x_y, 1234 it\u2019s नमस्ते。今天，天气 " * 40 + "x" * 500
    text = text.strip()
    Path(name).write_text(json.dumps({"text": text}) if name.endswith("l") else text)
    texts = prepare_texts.Texts(Path(name), "text", Path(), prepare_texts.Bytes.special_tokens)
    pieces, begins = zip(*texts.pieces())
    assert "".join(pieces) == text and begins == (True, *[False] * (len(pieces) - 1))
    assert max(map(len, pieces)) <= 250
    cuts = np.cumsum([len(piece) for piece in pieces])
    whole = [i for i in cuts if i < len(text) - 500]
    assert len(whole) > 5 and all(text[i - 1].isalnum() and text[i] in " ,。，" for i in whole)
    monkeypatch.setattr(prepare_texts, "LINE", 300)
    if name.endswith("l"):
        Path(name).write_text(Path(name).read_text() + '\n{"text": "good"}\n')
        assert list(texts.pieces()) == [("good", True)]
        assert "one.jsonl, line 1: it has 300 bytes or more" in texts.left_out()[-1]


def test_full_disk(capsys):  # whose file the limit would cut, too
    """An error names the file, and leaves no temporary one and nothing that looks whole."""
    Path("texts").mkdir()
    for name, limit, *counts in (
        ("train.bin", 9000, 20_000, 10),
        ("val.bin", 9000, 10, 20_000),
        ("tokenizer.json", 10, 1, 1),
        ("tokens.json", 500, 10, 10),
    ):
        for i, count in enumerate(counts):  # the second one is held out
            Path(f"texts/{i}.txt").write_text("a" * count)
        plain = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, plain[1]))
        try:
            words = "texts --output out --tokenizer bytes --hold-out 2".split()
            assert refusal(prepare, *words) == f"out/{name}: File too large"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, plain)
        assert not list(Path("out").glob("*.tmp")) and not Path("out/tokens.json").exists()


def test_which_texts_are_read(capsys):
    """Suffixes in any case, compressed or not; through links, which may lead to a folder above, but
    nothing twice; what is left out is counted, also blank documents; the output is no text."""
    Path("texts/sub").mkdir(parents=True)
    Path("elsewhere").mkdir()
    Path("texts/A.TXT").write_text("one\r\n")
    Path("texts/b.json").write_text(
        '{"text": "two"}\n\n{"text": ""}\n{"text": "\\n "}\n{"text": "three"}'
    )
    Path("texts/c.Jsonl.GZ").write_bytes(gzip.compress(b'{"text": "four"}'))
    Path("texts/list.json").write_text('[{"text": "x"},\n{"text": "y"}]')
    Path("texts/null.JSON").write_text('{"text": null}\n{"text": "z"}')
    Path("texts/d.txt.gz").write_bytes(gzip.compress("\ufefff\u00fcnf".encode()))
    Path("texts/e.md").touch()
    Path("texts/blank.txt").write_text(" \n\t\n")
    Path("texts/f.txt").write_bytes("\ufffd: ".encode() + b"\xff\xfe!")
    Path("elsewhere/g.txt").write_text("seven")
    for name in "texts/code.PY", "texts/sub/b.py", "texts/none", "texts/h.tar.gz":
        Path(name).touch()
    Path("texts/sub/again").symlink_to("../../elsewhere/g.txt")
    Path("texts/sub/again.txt").symlink_to("../../elsewhere/g.txt")
    Path("texts/sub/other").symlink_to("../../elsewhere")
    Path("texts/sub/up").symlink_to("..")
    for _ in range(2):  # the second time there are files in the output, of a run that was killed
        words = "texts --output texts/out --tokenizer bytes --hold-out 7".split()
        _, train, val = prepare(*words)
        assert len(val) == 6 and bytes(val[1:].astype(np.uint8)) == b"seven"
        ids = np.where(train == 256, ord("|"), train).astype(np.uint8).tobytes().decode()
        assert ids == "|one\n|two|three|four|f\u00fcnf|\ufffd: \ufffd\ufffd!"
        text = capsys.readouterr().out
        assert "texts/f.txt: 2 characters are not UTF-8" in text
        assert "5 files left out by their suffix: 2 .py, 2 without, 1 .gz" in text
        assert (
            '2 .json files left out, whose first line is no {"text": "..."}: such as texts/l'
            in text
        )
        assert "4 blank documents" in text and "2 files or folders read once" in text
        Path("texts/out/tokens.json").unlink()


REFUSED = {  # what a text in a.NAME has, and what is said; also next to a good text
    "null.jsonl": (b'{"text": null}', ", line 1: text is no text"),
    "fields.jsonl": (b'{"a": 1, "b": 2}\n' * 2 + b'{"text": "good"}', ", line 1: it has a, b"),
    "many.jsonl": (b"[]\n" * 1000 + b'{"text": "good"}\n' * 2000, ", line 1: it is no object"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_texts_that_are_refused(name):
    """In a line that names the file; and a folder of token ids does not look whole after it. If
    most of the lines are no texts, it is found out after the first thousand."""
    content, says = REFUSED[name]
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("good")
    Path(f"texts/b{name}").write_bytes(content)
    message = refusal(prepare)
    if "jsonl" in name:
        count = 'lines are no {"text": "..."} (see --field). The first: '
        bad, message = message.split(count)
        assert bad == {"null": "1 of 1 ", "fiel": "2 of 3 "}.get(name[:4], "1000 of 1000 ")
    assert message.startswith(f"texts/b{name}{says if says[0] == ',' else f' {says}'}")
    assert files("out") == ["lock"]


BAD_LINES = {  # what is said of one among good ones
    b'{"text": null}': "text is no text",
    b'{"other": "x", "more": 1}': "it has other, more",
    b"{}": "it has nothing",
    b'["text"]': "it is no object",
    b"7": "it is no object",
    b'{"text": "cut': "it is no JSON",
    b"[" * 100_000: "it is no JSON",  # deeper than Python's stack
    b'{"text": "\xff"}': "it is not UTF-8",
}


def test_bad_lines(capsys):
    """Are left out and counted, and the first one is named; .json files' too, which begin well."""
    Path("texts").mkdir()
    good = b'{"text": "good"}\n'
    for number, (line, says) in enumerate(BAD_LINES.items()):
        Path("texts/a.json").write_bytes(good * 5 + line)
        Path("texts/b.jsonl").write_bytes(good * 3 + line + b"\r\n\n" + b"\xef\xbb\xbf" + good)
        _, train, val = prepare("texts", "--output", number, "--tokenizer", "bytes")
        assert np.concatenate([train, val]).tolist() == [256, *b"good"] * 9
        what = '2 lines left out, which are no {"text": "..."}. The first: texts/a.json, line 6: '
        assert what + says + "\n" in capsys.readouterr().out


def test_files_that_are_no_whole_texts(capsys):
    """Are left out and counted, and a torn .gz file from where it is torn: its lines before that
    are texts."""
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("good")
    for name, encoding in ("b.txt", "utf-16"), ("c.md", "utf-16-le"), ("d.jsonl", "utf-16-be"):
        Path("texts", name).write_bytes("hi".encode(encoding))
    Path("texts/e.txt.gz").write_bytes(gzip.compress("hi".encode("utf-16")))
    Path("texts/f.txt.gz").write_bytes(b"hi")
    whole = gzip.compress(b"".join(b'{"text": "%06d"}\n' % (i * i) for i in range(900)))
    for name, torn in ("g.jsonl.gz", whole[:-1000]), ("h.jsonl.gz", whole[:-6] + b"damage"):
        Path("texts", name).write_bytes(torn)
    Path("texts/i.txt").write_text("last")
    _, train, val = prepare("texts", "--output", "out", "--tokenizer", "bytes")
    text = capsys.readouterr().out
    assert "4 files left out, which are UTF-16, or no text: such as texts/b.txt\n" in text
    reason = "3 .gz files cut off or damaged, whose rest is left out: such as texts/f.txt.gz: Not a"
    assert reason in text
    documents = bytes(np.where(train == 256, ord("|"), train).astype(np.uint8)).split(b"|")
    assert documents[1] == b"good" and documents[-1] == b"last" and len(documents) > 1000
    assert all(len(document) == 6 for document in documents[2:-1])
    assert refusal(prepare, "texts/b.txt", "--output", "none", "--tokenizer", "bytes") == "2"


SPECIAL = ["<|endoftext|>", "<s>", "<|fim-1|>"]


@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_special_tokens(monkeypatch, size):
    """<|endoftext|> is between documents, wherever a piece ends; others stand within one, whole."""
    monkeypatch.setattr(prepare_texts, "WORD", 20)
    texts = prepare_texts.Texts(Path(), "text", Path(), SPECIAL)
    parts = [
        "",
        "one two",
        " ",
        "<s>three<s> ",
        "  x<|fim-1|>y",
        "<|endoftext|",
        "z" * 70,
        "- " * 9,
    ]
    text = "<|endoftext|>".join(parts)
    documents = []
    for piece, begins in texts.read_document(text[i : i + size] for i in range(0, len(text), size)):
        documents += [[]] if begins else []
        documents[-1].append(piece)
    assert ["".join(pieces) for pieces in documents] == [part for part in parts if part.strip()]
    assert documents[1][1:] == ["three", "<s>"] or documents[1] == ["<s>", "three", "<s>", " "]
    assert texts.empty == 0
    assert list(texts.read_document(["<|endof", "text|>\n"])) == [] and texts.empty == 1


def test_end_of_text_in_texts(capsys):
    """As in files for GPT-2; in a line of a .jsonl file, too; and in the text of --sample."""
    Path("texts").mkdir()
    Path("texts/a.txt").write_text("<|endoftext|>".join(f"document {i}" for i in range(100)))
    Path("texts/b.jsonl").write_text('{"text": "<|endoftext|>x<|endoftext|>y<|endoftext|>"}')
    _, train, val = prepare()
    assert "out: 102 documents" in capsys.readouterr().out
    assert bytes(val[val < 256].astype(np.uint8)) == b"document 49document 99"
    assert list(train[-4:]) == [256, *b"x", 256, *b"y"]
    assert prepare_texts.Bytes().encode("a<|endoftext|>b<|endoftext|>") == [97, 256, 98, 256]


def test_folders_of_texts_that_are_refused(capsys, monkeypatch):
    """Without text, or with too little; that cannot be read; into which another process writes."""
    words = list(BYTES)

    def refused(says, *others):
        message = refusal(prepare, *words, *others)
        assert says in capsys.readouterr().err + message

    refused("there is no texts")
    Path("texts").mkdir()
    for flags in ["--hold-out", 1], ["--workers", 0], ["--workers", -1], ["--workers", 10**6]:
        refused(f"{flags[0]} must be", *flags)
    Path("tokenizer.json").write_text('{"model": {}}')
    refused("there is no other.json", "--tokenizer", "other.json")
    refused("tokenizer.json is none that prepare_texts.py has", "--tokenizer", "tokenizer.json")
    Path("texts/a.csv").touch()
    refused("no text in .txt, .md, .jsonl or .json files in texts")
    for text in "", "a":
        Path("texts/a.txt").write_text(text)
        refused("texts has only 2 tokens" if text else "no text in")
    Path("texts/a.jsonl").write_text('{"text": ""}\n' * 60)
    refused("texts has only 2 tokens")
    Path("texts/a.txt").write_text("enough")
    refused("--output must not be the folder of the texts", "--output", "texts")
    Path("texts/b.txt").symlink_to("nowhere")
    refused("texts/b.txt: No such file")
    Path("texts/b.txt").unlink()
    Path("list.json").write_text("[]")
    words[0] = "list.json"  # it is asked for: not left out
    refused("The first: list.json, line 1: it is no object")
    words[0] = "texts"
    Path("texts/secret").mkdir()
    plain = os.scandir

    def scandir(folder):  # as for another user than root, whom nothing is forbidden
        if Path(folder).name == "secret":
            raise PermissionError(13, "Permission denied", str(Path(folder)))
        return plain(folder)

    with monkeypatch.context() as changed:
        changed.setattr(os, "scandir", scandir)
        refused("texts/secret: Permission denied")
    lock = prepare_texts.lock_folder(Path("out"))
    refused("another run is still in out")
    lock.close()
    prepare(*words)


def test_folders_that_are_kept(monkeypatch, finished, capsys):
    """A second command with the same --output changes nothing: with a mistake, other texts, or none
    of the two; while another one has just ended; nor is what others have there overwritten."""
    for folder, text in ("texts", "one"), ("more", "other"), ("none", ""):
        Path(folder).mkdir()
        Path(folder, "a.txt").write_text(text)
    prepare()
    before = content("out")
    for texts in "texts", "more", "none":
        refusal(prepare, texts, *BYTES[1:])
        assert "out is complete: remove it, or choose another --output" in capsys.readouterr().err
        assert content("out") == before
    check, answers = prepare_texts.check_output, [lambda output: None]
    monkeypatch.setattr(prepare_texts, "check_output", lambda x: (answers or [check]).pop()(x))
    refusal(prepare, "more", *BYTES[1:])
    assert content("out") == before and not answers
    Path("theirs").mkdir()
    for name in prepare_texts.OUTPUTS[:3]:
        Path("theirs", name).write_text(name)
        refusal(prepare, "texts", "--output", "theirs", "--tokenizer", "bytes")
        assert f"theirs is not empty: it has {name}" in capsys.readouterr().err
        assert content("theirs") == {Path("theirs", name): name.encode()}
        Path("theirs", name).unlink()
    shutil.copytree(finished / "one", "run")
    Path("run/latest.json").unlink()
    before = content("run")
    refusal(prepare, "texts", "--output", "run", "--tokenizer", "bytes")
    assert "run is not empty: it has log.jsonl" in capsys.readouterr().err
    assert content("run") == before


def test_killed_while_it_prepares(monkeypatch):
    """Before any of the renamings: there is no tokens.json, and the same command mends it."""
    words = ["texts.txt", *BYTES[1:]]
    Path("texts.txt").write_text("some text")
    plain, done = os.replace, []

    def replace(*paths):
        if len(done) == number:
            raise KeyboardInterrupt
        done.append(plain(*paths))

    for number in range(4):
        done.clear()
        with monkeypatch.context() as changed, pytest.raises(KeyboardInterrupt):
            changed.setattr(os, "replace", replace)
            prepare(*words)
        assert len(done) == number and not Path("out/tokens.json").exists()
        prepare(*words)
        Path("out/tokens.json").unlink()


SLOW = """
class Bytes(Bytes):
    def encode(self, text):
        os.write(1, b"encodes\\n")  # a whole line, beside other processes
        time.sleep(0.4)
        return super().encode(text)
"""


@pytest.mark.parametrize("stage", some_fast(["tokenizer: bytes", "encodes"], "tokenizer: bytes"))
def test_ctrl_c_while_it_prepares(stage):
    """All processes get it, as from a terminal, and end at once, with one line: while they are
    started, or in the middle of many pieces."""
    Path("texts.txt").write_text("some words " * 2_000_000)
    command = [sys.executable, altered("large/prepare_texts.py", more=SLOW), "texts.txt"]
    started = time.monotonic()
    process = Cold([*command, *BYTES[1:], "--workers", "4"], "log")
    wait_for(stage, process)
    began = time.monotonic()
    limit = 15 + (began - started)  # on a machine that is busy, all takes longer
    os.killpg(process.pid, signal.SIGINT)
    wait_until(lambda: process.status() is not None)
    assert time.monotonic() - began < limit and process.status() in ENDED_BY_CTRL_C
    lines = set(Path("log").read_text().splitlines())
    assert lines <= {"tokenizer: bytes", "encodes", "KeyboardInterrupt"}
    assert "KeyboardInterrupt" in lines and files("out") in ([], ["lock"])


def test_a_worker_that_is_killed(monkeypatch):
    """The command ends, as for want of memory, and says so."""
    Path("texts.txt").write_text("some text")
    kill = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
    monkeypatch.setattr(prepare_texts.Bytes, "encode", kill)
    words = ["texts.txt", "--output", "out", "--tokenizer", "bytes"]
    with pytest.raises(SystemExit, match="a process that tokenizes has died"):
        prepare(*words, pool=partial(ProcessPoolExecutor, mp_context=get_context("fork")))


@pytest.mark.slow
def test_tiktoken():
    """A tokenizer of tiktoken from a file, as a machine without network takes it from another: a
    small one that is made here, as GPT-2's has to be downloaded."""
    tiktoken = pytest.importorskip("tiktoken")
    from tiktoken._educational import bpe_train
    from tiktoken_ext.openai_public import r50k_pat_str

    text = (ROOT / LM).read_text() + "grün 日本\n"
    ranks = bpe_train(text[:1000], 262, r50k_pat_str, visualise=None)
    pairs = {"name": "own", "pat_str": r50k_pat_str, "special_tokens": {"<|endoftext|>": 262}}
    own = tiktoken.Encoding(**pairs, mergeable_ranks=ranks)
    encoded = {prepare_texts.base64.b64encode(token).decode(): i for token, i in ranks.items()}
    Path("own.json").write_text(json.dumps(pairs | {"mergeable_ranks": encoded}))
    Path("one.text").write_text(text)
    about, train, val = prepare("one.text", "--output", "out", "--tokenizer", "own.json")
    ids = np.concatenate([train, val])
    assert ids.tolist() == [262, *own.encode_ordinary(text)]
    assert about["vocabulary"] == 263 and len(ids) < 0.95 * len(text)
    assert np.array(about["token_bytes"])[ids].sum() == len(text.encode())
    tokenizer = prepare_texts.build_tokenizer(json.loads(Path("out/tokenizer.json").read_text()))
    assert tokenizer.decode(ids.tolist()) == text
    # In pieces, by each pattern: the same ids.
    text = "".join(path.read_text() for path in sorted(ROOT.glob("*.md")))
    special = dict(zip(SPECIAL, range(400, 403)))
    text = re.sub(r"(?<=[aeiou]) (?=[pqrs])", lambda match: SPECIAL[match.start() % 3], text)
    for name, pattern in PATTERNS.items():
        ranks = bpe_train(text[:2000], 400, pattern, visualise=None)
        own = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
        )
        blocks = (text[i : i + 500] for i in range(0, len(text), 500))
        encode = partial(own.encode, allowed_special="all")
        pieces = [*map(encode, prepare_texts.cut_between_words(blocks, SPECIAL))]
        assert len(pieces) > 20 and sum(pieces, []) == encode(text)
        assert all(sum(pieces, []).count(i) > 5 for i in special.values())


def test_windows():
    """Each epoch has windows that do not overlap, shuffled otherwise than in others; those of a
    step are the same on any number of ranks, also if some have one more than others."""
    ids = np.arange(1000)
    args = train_lm.parser.parse_args(["--length", "10", "--batch-size", "12"])

    def starts(step, ranks):
        parts = [train_lm.read_step(args, ids, rank, ranks, step) for rank in range(ranks)]
        assert {part.shape[0] for part in parts} <= {12 // ranks, -(-12 // ranks)}
        assert all((part.diff() == 1).all() and part.shape[1] == 11 for part in parts)
        return torch.cat(parts)[:, 0].tolist()

    run = [start for step in range(1, 26) for start in starts(step, 1)]
    epochs = [run[i : i + 99] for i in range(0, 297, 99)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(min(epoch), 1000 - 10, 10))[:99]
    assert len({min(epoch) for epoch in epochs}) > 1
    assert [start // 10 for start in epochs[0]] != [start // 10 for start in epochs[1]]
    assert starts(9, 3) == starts(9, 5) == starts(9, 7) == starts(9, 12) == run[96:108]

    args.length = 2048
    found = train_lm.read_step(args, range(10**10), 0, 1, 1)[:, 0]  # more than an int32 counts
    assert ((found > 4e9) & (found < 6e9)).any()


# ---- The same run --------------------------------------------------------------------------------
WAYS = {  # flags by the number of ranks
    2: [
        [],
        ["--accumulate", 3, "--recompute"],
        ["--accumulate", 3, "--keep-gathered"],
        ["--shard", 1, "--accumulate", 2],
    ],
    3: [["--accumulate", 2]],
    4: [
        ["--shard", 2, "--accumulate", 3, "--recompute"],
        ["--shard", 2, "--accumulate", 3, "--keep-gathered"],
    ],
    5: [["--keep-gathered", "--accumulate", 2]],  # of 12 sequences, some have two, some three
}
SENT = """
def counted(function):
    def replaced(*words, **options):
        tensors = [x for x in [*words, *options.values()] if isinstance(x, torch.Tensor)]
        global sent
        sent += max(tensor.nbytes for tensor in tensors)
        return function(*words, **options)
    return replaced

for name in [name for name in vars(dist) if name.startswith(("all_gather_", "reduce_scatter_"))]:
    if name.endswith(("_single", "_tensor")):
        setattr(dist, name, counted(getattr(dist, name)))

class Checkpoints(Checkpoints):
    def steps_until_due(self, step_seconds):
        assert dist.get_rank() == 0  # by one clock: what ranks say is added
        return super().steps_until_due(step_seconds)

plain_step = train_step
def train_step(args, model, *words):
    global sent
    sent = 0
    print("seed", torch.initial_seed(), flush=True)
    found = plain_step(args, model, *words)
    whole = 4 * sum(p.numel() for p in model.parameters())
    print(f"sent {sent / whole:.2f} times", flush=True)
    return found
"""


@pytest.mark.parametrize("processes", some_fast(WAYS, 3))
def test_same_losses(flags, finished, processes):
    """On any number of ranks, however sharded and accumulated; without updates the weights are the
    same bit for bit, so those that it starts with are. With --keep-gathered a step gathers once and
    reduces once, however many micro-batches it has: in float32, twice the weights are sent."""
    runs = {f"{processes}-{i}": way for i, way in enumerate(WAYS[processes])}
    each = [[*flags, output, *way] for output, way in [*runs.items(), ("still", STILL)]]
    texts = together(*each, path=altered(LM, more=SENT), processes=processes)
    for (output, way), text in zip(runs.items(), texts):
        same_losses(output, finished / "one")
        sent = {float(times) for times in re.findall(r"sent (\S+) times", text)}
        seeds = re.findall(r"^seed (\d+)", text, re.M)
        assert len(set(seeds)) == len(seeds) == 8 * processes, text
        parts = way[way.index("--accumulate") + 1] if "--accumulate" in way else 1
        if "--keep-gathered" in way:
            assert max(sent) < 2.1, text
        elif "--shard" not in way or 1 not in way:
            assert min(sent) > 2.3 * parts, text
    assert same_weights("still", finished / "still")
    losses = [row[0] for row in rows(finished / "one", "loss") if row]
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize("clip_norm", [0, 0.3])
def test_a_plain_loop(flags, finished, clip_norm):
    """The whole model in a loop as anybody writes it has the same losses and gradients, without
    clipping and with it."""
    by_epochs = ["--epochs" if flag == "--steps" else flag for flag in flags]
    by_epochs[by_epochs.index("--epochs") + 1] = 0.0462  # of 173 steps: 8
    here(LM, *by_epochs, "out", "--clip-norm", clip_norm)
    args = train_lm.parser.parse_args([str(flag) for flag in [*flags, "out"]])
    train_lm.set_defaults(args, 1)
    _, model = load_model(finished / "still")
    decays = [name for name, p in model.named_parameters() if p.ndim > 1 and "embed" not in name]
    groups = [[p for name, p in model.named_parameters() if (name in decays) == x] for x in (1, 0)]
    groups = [{"params": part, "weight_decay": 0.1 * i} for part, i in zip(groups, (1, 0))]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    ids, found = train_lm.Texts(args.tokens).train, []
    for step in range(1, 9):
        windows = train_lm.read_step(args, ids, 0, 1, step)
        for group in optimizer.param_groups:
            group["lr"] = train_lm.learning_rate(args, step)
        loss = model(windows[:, :-1], windows[:, 1:]) / (12 * 32)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm or math.inf)
        optimizer.step()
        found += [loss.item(), norm.item()]
    assert min(found[1::2]) > 0.3  # so each step is clipped
    expected = [row for row in rows("out", "loss", "gradient_norm") if row]
    assert sum(expected, []) == pytest.approx(found, rel=1e-4)


class Edited(train_lm.LanguageModel):
    """With an attention bias, a parameter outside of blocks and head, and perhaps a buffer."""

    def __init__(self, *, buffer=False, **config):
        super().__init__(**config)
        for block in self.blocks:
            block.qkv = torch.nn.Linear(config["width"], 3 * config["width"])
        self.projection = torch.nn.Linear(config["width"], config["width"])
        if buffer:
            self.register_buffer("angles", torch.ones(2))


def test_an_edited_model(flags, monkeypatch):
    """Biases begin at 0, each parameter is trained, and a buffer, which would have no values, is
    refused."""
    monkeypatch.setattr(train_lm, "LanguageModel", Edited)
    args = train_lm.parser.parse_args([str(flag) for flag in [*flags, "out"]])
    args.compile = False
    config = {"vocabulary": 64, "layers": 1, "width": 32, "heads": 2}
    device = torch.device("cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = train_lm.build_model(args, config, device, 1)
        train_lm.initialize(model, 76)
        for name, parameter in model.named_parameters():
            values = parameter.full_tensor()
            assert bool(values.any()) != name.endswith("bias") and values.isfinite().all()
        groups = train_lm.build_optimizer(args, model).param_groups
        trained = [id(p) for group in groups for p in group["params"]]
        assert sorted(trained) == sorted(map(id, model.parameters()))
        with pytest.raises(SystemExit, match="the buffer angles would have no values"):
            train_lm.build_model(args, config | {"buffer": True}, device, 1)
    finally:
        dist.destroy_process_group()


def test_learning_rate():
    """It rises in a line, and falls to a tenth by a cosine."""
    words = "--steps 100 --warmup-steps 20 --lr 1".split()
    args = train_lm.parser.parse_args(words)
    found = [train_lm.learning_rate(args, step) for step in (1, 10, 20, 60, 100)]
    assert found == pytest.approx([0.05, 0.5, 1, 0.55, 0.1])


def test_validation(flags, tokens, one):
    """Windows spread over val.bin, or all of it, whose tokens count once: nats per token, and bits
    per byte of text."""
    Path("all").mkdir()
    Path("all/slurm-7.log").touch()  # a job's log may be there, and --resume without a checkpoint
    more = "--eval-tokens", 10**6, "--steps", 1, "--warmup-steps", 0, "--resume"
    here(LM, *flags, "all", *more)
    ids = torch.from_numpy(np.fromfile(tokens / "val.bin", np.uint16).astype(np.int64))
    ends = range(0, len(ids) - 1, 32)
    assert len(ids) % 32 != 1 and len(ends) > 32  # the last window is a short one
    assert train_lm.Texts(tokens).token_bytes[ids].sum() == len(ids) - 1  # an end-of-text has none
    for output, starts in ("all", ends), (one, [ends[i * len(ends) // 32] for i in range(32)]):
        _, model = load_model(output)
        nats, targets = 0.0, []
        for first in starts:
            window = ids[first : first + 33]
            [scores] = all_scores(model, window[None, :-1])
            nats += F.cross_entropy(scores, window[1:], reduction="sum").item()
            targets += window[1:].tolist()
        of_text = sum(token < 256 for token in targets)
        wanted = [nats / len(targets), nats / math.log(2) / of_text]
        assert rows(output, "val_loss", "bits_per_byte")[-1] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.long
def test_compiled(flags, one):
    here(LM, *flags, "out", "--compile", "--recompute")
    same_losses("out", one, digits=1e-3)


# ---- Checkpoints ---------------------------------------------------------------------------------
MOMENTS = """
import sys
args, copying = parser.parse_args(), False
def copy():
    global copying
    if dist.is_initialized() and not copying:
        copying = True
        number = len(list(Path().glob("moment-*")))
        shutil.copytree(args.output, f"moment-{dist.get_rank()}-{number:03}")
        copying = False
def before(event, words):
    names = "os.mkdir", "os.remove", "os.rename", "os.rmdir"
    if event in names or event == "open" and set(str(words[1])) & set("wxa"):
        copy()
sys.addaudithook(before)
plain = torch.save
def save(*words, **options):  # also DCP's, of each tensor in turn
    plain(*words, **options)
    copy()
torch.save = save
"""


@pytest.mark.slow
@pytest.mark.parametrize("processes", [0, 2])
def test_killed_at_each_moment_of_a_save(flags, processes):
    """Before each operation on the folder it is copied, which is what SIGKILL would leave there.
    Copies go on to the end, bit-identical, and nothing is left over in them."""
    flags = [*flags[:-1], "--steps", 3, "--eval-every", 2, "--output"]
    together([*flags, "whole"], path=LM, processes=processes)
    run(LM, *flags, "out", more=STOP + MOMENTS, processes=processes)
    chosen = {}  # one copy for each set of files; with two processes a few of all copies
    for path in sorted(Path().glob("moment-*"))[:: 15 if processes else 1]:
        names = [re.sub(r"\d+", "N", file.name) for file in path.rglob("*")]
        chosen[path.name if processes else " ".join(sorted(names))] = path.name
    outputs = sorted(chosen.values())
    for kind in "latest.json.tmp", ".metadata.tmp", ".metadata", "model.pt.tmp", "__0_0.distcp":
        assert processes or any(list(Path(output).rglob(kind)) for output in outputs), kind
    together(*[[*flags, output, "--resume"] for output in outputs], path=LM, processes=processes)
    for output in outputs:
        same_run(output, "whole")


WAITS = """
parser.set_defaults(checkpoint_minutes=0)
plain_step, plain_write, steps = train_step, dcp.FileSystemWriter.write_data, []
def train_step(*words):
    steps.append(1)
    return plain_step(*words)
def write_data(self, *words):  # of the first save: not before the fifth step, which waits for none
    end = time.monotonic() + 300
    while len(steps) < 5 and time.monotonic() < end:
        time.sleep(0.01)
    assert len(steps) >= 5
    print("writes", self.checkpoint_id, flush=True)
    while os.path.exists("blocked"):
        time.sleep(0.01)
    return plain_write(self, *words)
dcp.FileSystemWriter.write_data = write_data
"""


@pytest.mark.slow
def test_killed_while_it_writes(flags, monkeypatch):
    """Training goes on while a checkpoint is written, no second save begins, and no second run is
    let into the folder. Killed then, the run is where its last whole checkpoint is."""
    run(LM, *flags, "out", "--stop", 1, more=STOP, processes=2, status=1)
    Path("blocked").touch()
    endless = [*flags, "out", "--resume", "--steps", 10**6, "--eval-every", 10**6]
    jobs = start(LM, *endless, more=WAITS, processes=2)
    wait_for("writes out/", *jobs)
    monkeypatch.setattr(train_lm, "LOCK_SECONDS", 1)
    with pytest.raises(SystemExit, match="another run is still in out; if its machine has died"):
        train_lm.lock_output(train_lm.parser.parse_args([str(flag) for flag in endless]))
    wait_for("step 30/", *jobs)
    kill_all(jobs)
    assert logs(jobs).count("writes out/") == 2  # one on each rank
    assert len(list(Path("out").glob("step-*"))) == 2
    text, _ = together([*flags, "out", "--resume"], [*flags, "whole"], path=LM)
    assert "out: 1 steps are done" in text
    same_run("out", "whole")


@pytest.mark.slow
def test_resumed_on_another_number(flags):
    """One rank, then two, then four in two copies; --steps grows and shrinks while the learning
    rate still rises: the losses are those of one undisturbed run."""
    flags = [*flags[:-1], "--warmup-steps", 4, "--output"]
    resumed = [*flags, "out", "--resume"]
    here(LM, *flags, "whole")
    run(LM, *resumed, "--steps", 5, "--stop", 2, more=STOP, processes=0, status=1)
    run(LM, *resumed, "--steps", 12, "--stop", 4, more=STOP, processes=2, status=1)
    text = run(LM, *resumed, "--shard", 2, processes=4)
    assert "out: 4 steps are done" in text
    same_losses("out", "whole")


FULL = """
class Checkpoints(Checkpoints):
    def start(self, model, optimizer, step):
        if step == 6 and dist.get_rank() == 1:
            import resource, signal
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        super().start(model, optimizer, step)
"""


@pytest.mark.slow
def test_a_full_disk(flags):
    """For rank 1, in the middle of the save of step 6: all ranks say so, and resume at step 5."""
    text = run(LM, *flags, "out", more=STOP + FULL, processes=2, status=1)
    assert "File too large" in text and "Timeout" not in text, text
    again = [*flags, "out", "--resume"]
    text, _ = together(again, [*flags, "whole"], path=LM, more=STOP)
    assert "out: 5 steps are done" in text
    same_run("out", "whole")


def test_when_it_saves():
    """A new run at once, then each five minutes, at a progress line or, where steps take longer, in
    between; not while it writes."""

    class Quick(train_lm.Checkpoints):
        def __init__(self, due_in):
            self.writing, self.due = None, train_lm.time.perf_counter() + due_in

    assert Quick(-1e9).steps_until_due(1.0) == 0
    assert Quick(300).steps_until_due(1.0) == 300
    assert Quick(300).steps_until_due(70.0) == 5
    assert Quick(300).steps_until_due(1000.0) == 1
    late = Quick(-1)
    assert late.steps_until_due(70.0) == 0
    late.writing = 7, None
    assert late.steps_until_due(70.0) == math.inf
    late.due += 301
    assert late.steps_until_due(70.0) == 5


def test_copies_of_checkpoints_are_kept():
    for name in "step-00000001", "step-00000002", "step-00000001-mine", "step-old":
        Path("out", name).mkdir(parents=True)
    train_lm.remove_checkpoints(Path("out"), "step-00000002")
    assert files("out") == ["step-00000001-mine", "step-00000002", "step-old"]


# ---- What is refused -----------------------------------------------------------------------------
FLAGS = {  # and the number of ranks
    "must be at least the number of processes, 3": ("--batch-size 2", 3),
    "must be at least --accumulate times": ("--batch-size 8 --accumulate 3", 3),
    "must be a multiple of --shard": ("--shard 3", 4),
    "--shard 1 needs torch 2.10": ("--shard 1", 2),  # gradients may be summed wrongly before
    "--width must be a multiple of two times --heads": ("--width 36 --heads 4", 1),
}


def test_flags_that_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.9.1+cu128"))
    for says, (words, ranks) in FLAGS.items():
        args = train_lm.parser.parse_args(["--device", "cpu", *words.split()])
        train_lm.check_numbers(args)
        train_lm.set_defaults(args, ranks)
        with pytest.raises(SystemExit, match="2"):
            train_lm.check_flags(args, ranks)
        assert says in capsys.readouterr().err
    assert vars(train_lm.parser.parse_args([])).keys() > train_lm.MAY_CHANGE


def test_numbers(capsys):
    """Each flag that has a number has limits, which one line says; before a folder is made."""
    typed = [x for x in train_lm.parser._actions if x.type in (int, float)]
    flags = {x.option_strings[-1]: ["-1", "nan", "inf", "9" * 15] for x in typed}
    zero = "batch-size steps layers width heads accumulate log-every eval-every timeout epochs"
    for name in zero.split():
        flags[f"--{name}"].append("0")
    for flag, values in flags.items():
        for value in values:
            with pytest.raises(SystemExit, match="2"):
                train_lm.check_numbers(train_lm.parser.parse_args([f"{flag}={value}"]))
            said = capsys.readouterr().err
            assert f"argument {flag}: invalid" in said or f"error: {flag} must be" in said, said
    with pytest.raises(SystemExit, match="2"):
        here(LM, "--device", "cpu", "--output", "new", "--length=0")
    assert "error: --length must be at least 1" in capsys.readouterr().err
    assert files(".") == []


def test_folders_that_are_refused(flags, tokens, one, capsys):
    """A run that would be overwritten, or continued with other flags or texts, or in which another
    run still is: nothing in the folder changes."""

    def refused(*words, says):
        before = content()
        message = refusal(here, LM, *flags, *words)
        text = capsys.readouterr().err + message
        assert says in text and content() == before, text

    shutil.copytree(one, "out")
    refused("out", says="has a run: add --resume")
    refused("out", "--resume", "--lr", 0.1, says="was started with --lr 0.003: use the same flags")
    refused("out", "--resume", "--steps", 7, says="--steps: 8 steps are done in out")
    refused("out", "--resume", "--warmup-steps", 8, says="was started with --warmup-steps 2")
    shutil.copytree(tokens, "other")
    about = json.loads(Path("other/tokens.json").read_text())
    about["train"]["sha256"] = "0"
    Path("other/tokens.json").write_text(json.dumps(about))
    refused("out", "--resume", "--tokens", "other", says="was started with other token ids")
    about["train"]["count"] += 1
    Path("other/tokens.json").write_text(json.dumps(about))
    refused("out", "--resume", "--tokens", "other", says="other is not whole")
    Path("new").mkdir()
    Path("new/step-of-mine").touch()
    refused("new", "--resume", says="new has step-of-mine, but no run of this script")
    Path("new/lock").touch()
    refused("new", "--warmup-steps", 8, says="--warmup-steps must be less than --steps, 8")
    refused("new", "--length", 10**6, says="fewer than two sequences")
    for name in "tokens.json", "val.bin", "model.pt":  # with a lock, as prepare_texts.py has one
        Path("new", name).touch()
        refused("new", "--resume", says=f"new has {name}, but no run of this script")
        Path("new", name).unlink()
    with prepare_texts.lock_folder(Path("new")):
        refused("new", says="another run is still in new; if its machine has died, delete new/lock")


@pytest.mark.parametrize("ids", [[], [256], [256, 256, 256]])
def test_validation_without_text(flags, tokens, ids):
    """As prepare_texts.py of earlier versions wrote it: refused before the first step."""
    shutil.copytree(tokens, "other")
    np.array(ids, np.uint16).tofile("other/val.bin")
    about = json.loads(Path("other/tokens.json").read_text())
    about["val"]["count"] = len(ids)
    Path("other/tokens.json").write_text(json.dumps(about))
    with pytest.raises(SystemExit, match="val.bin has no text: run prepare_texts.py on more"):
        here(LM, *flags, "out", "--tokens", "other")
    assert files("out") == ["lock"]


@pytest.mark.parametrize("name", ["--accumulate", "--tokens", "torch", "this file"])
def test_ranks_that_differ(flags, monkeypatch, name):
    """As on two machines, where somebody has typed two commands, or has two copies. (For real, and
    before anything is written: in test_two_machines.)"""
    args = train_lm.parser.parse_args([str(flag) for flag in [*flags, "out"]])
    texts = train_lm.Texts(args.tokens)

    def gather(seen, own):
        assert own["--tokens"] == texts.about and own["--output"] is None  # paths may differ
        seen[:] = own, own | {name: "another"}

    monkeypatch.setattr(train_lm.dist, "all_gather_object", gather)
    with pytest.raises(SystemExit, match=f"ranks differ in {name}: .*, rank 1 another"):
        train_lm.compare_ranks(args, texts, 2)


FAULTS = """
plain_step, steps = train_step, []
def train_step(args, model, *words):
    loss_sum, norm = plain_step(args, model, *words)
    fault = args.output.name
    steps.append(fault)
    if dist.get_rank() == 1 and steps.count(fault) == 5:
        if fault == "loss":
            loss_sum = loss_sum * math.nan
        elif fault == "weight":
            model.head.norm.weight.to_local().data[0] = math.inf
        else:  # torchrun was killed: this rank has another parent
            os.getppid = lambda: 1
    return loss_sum, norm
"""


def test_what_ends_the_run_on_all_ranks(flags, monkeypatch):
    """In step 5, on one rank: a loss or a weight that is not finite, or torchrun's end. The run
    ends on all at that step's line, and keeps the checkpoint before."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    not_finite = "step 5: loss, gradient or weights not finite"
    faults = {"loss": not_finite, "weight": not_finite, "orphan": "torchrun was killed"}
    runs = [[*flags, fault] for fault in faults]
    texts = together(*runs, path=LM, more=STOP + FAULTS, status=1)
    for (fault, says), text in zip(faults.items(), texts):
        assert says in text and "Traceback" not in text, text
        assert json.loads(Path(fault, "latest.json").read_text())["step"] == 4
        assert [row[0] for row in rows(fault, "step")] == [1, 2, 3, 4, 4]


@pytest.mark.parametrize("seconds", [0, 1])
def test_a_rank_left_in_the_shell(flags, capsys, seconds):
    """RANK and WORLD_SIZE of an earlier command, say: a line tells for whom this process waits."""
    place = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    if not seconds:  # only a part of them: it is ignored
        place = {"RANK": "1"}
        with pytest.raises(SystemExit, match="fewer than two sequences"):
            here(LM, *flags, "out", "--length", 10**6, **place)
        return
    with pytest.raises(dist.DistError):
        here(LM, *flags, "out", "--timeout", seconds, **place)
    text = capsys.readouterr().out
    assert (
        f"rank 0 waits at 127.0.0.1:{place['MASTER_PORT']} for the others of WORLD_SIZE=2" in text
    )


# ---- Samples, and other programs -----------------------------------------------------------------
ANOTHER_CHOICE = """
plain = next_scores
sys.stdout.reconfigure(encoding="ascii")  # of the terminal
def next_scores(*words):  # rank 1 would choose the end of the text
    return plain(*words) + 1e6 * dist.get_rank() * (torch.arange(320) == 256)
"""


def test_sample(one, capsys):
    """Also on two ranks, which agree, with a terminal that has no umlauts; by the run's folder
    alone, in which nothing is written."""
    before = content(one)
    words = ["--device", "cpu", "--sample", "Tö train", "--sample-tokens", 5, "--output", one]
    capsys.readouterr()
    here(LM, *words)
    alone = capsys.readouterr().out
    assert alone.startswith("Tö train") and len(alone) > 10
    here(LM, *words, "--sample", "<|endoftext|>Tö train")  # which is there anyway
    assert capsys.readouterr().out == alone
    here(LM, *words, "--sample", "")  # from the end-of-text alone
    assert 1 < len(capsys.readouterr().out) <= 6
    text = run(LM, *words, more=ANOTHER_CHOICE, processes=2)
    shown = alone.encode("ascii", "backslashreplace").decode()
    assert shown in text and content(one) == before, text


@pytest.mark.slow
def test_hugging_face(flags, capsys, monkeypatch):
    """Its Qwen3 has the same scores, also where positions and the order of heads matter; its
    tokenizer is in the folder, and says what a prompt begins with."""
    transformers = pytest.importorskip("transformers")
    import export_hf

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    here(LM, *flags, "out", "--layers", 3, "--heads", 4, "--lr", 0.03)
    before = content("out")
    for words in ["out", "out"], ["out", "out/model.pt"]:
        assert refusal(here, "large/export_hf.py", *words) == "2"
        assert f"{words[1]} is there already: remove it" in capsys.readouterr().err
    assert refusal(here, "large/export_hf.py", ".", "theirs") == "2"
    assert ". has no model.pt: only a run that has ended" in capsys.readouterr().err
    with monkeypatch.context() as changed, pytest.raises(KeyboardInterrupt):
        changed.setattr(os, "rename", mock.Mock(side_effect=KeyboardInterrupt))
        here("large/export_hf.py", "out", "theirs")
    assert content("out") == before and files(".") == ["out"]
    here("large/export_hf.py", "out", "theirs")
    assert 'begin each prompt with <|endoftext|>, as in tokenizer("' in capsys.readouterr().out
    _, model = load_model("out")
    ids = torch.randint(257, (2, 32), generator=torch.Generator().manual_seed(0))
    scores = all_scores(model, ids)
    theirs = transformers.AutoModelForCausalLM.from_pretrained("theirs", dtype="float32")
    assert type(theirs) is export_hf.Qwen3ForCausalLM and theirs.config.bos_token_id == 256
    torch.testing.assert_close(theirs(ids).logits, scores, rtol=1e-4, atol=1e-4)
    assert scores.std() > 0.1
    tokenizer = transformers.AutoTokenizer.from_pretrained("theirs")
    text = "\n\n  grün <b>\t日本"
    assert tokenizer("<|endoftext|>" + text).input_ids == [256, *text.encode()]
    text += "<|endoftext|>a"
    assert tokenizer(text).input_ids == prepare_texts.Bytes().encode(text)
    text = text.removesuffix("<|endoftext|>a")
    assert tokenizer.decode([*text.encode(), 256], skip_special_tokens=True) == text


END = r"++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {  # tiktoken's, by the names of its tokenizers
    "r50k": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]"
    + END,
    "o200k": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PATTERNS)
def test_exported_tokenizer(name):
    """Encodes as prepare_texts.py: words, numbers and spaces, at ends of lines and of the text; the
    numbers of special tokens have a gap before them. (tiktoken's own lists are downloads.)"""
    pytest.importorskip("transformers")
    pytest.importorskip("tiktoken")
    import export_hf
    from tiktoken._educational import bpe_train

    code = (ROOT / LM).read_text()
    odd = "  \n\n\t 12345678 1234\r\n  x'll I'VE\u2028\u00a0 grün日本🎉 ١٢٣ ½ \x85 a  \n \n\nend"
    odd += "   \n\n"
    pairs = {"name": name, "pat_str": PATTERNS[name]}
    ranks = bpe_train(code[:3000] + odd, 400, pairs["pat_str"], visualise=None)
    pairs["special_tokens"] = {"<|endoftext|>": 402, "<|other|>": 401}
    encoded = {prepare_texts.base64.b64encode(token).decode(): i for token, i in ranks.items()}
    description = pairs | {"mergeable_ranks": encoded}
    ours = prepare_texts.build_tokenizer(description)
    theirs = export_hf.convert_tokenizer(description, length=32)
    for text in odd, code, odd.strip(), *(odd[i:] + odd[:i] for i in range(0, len(odd), 3)):
        assert theirs(text).input_ids == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text
    text = "<|endoftext|>a<|other|> \n<|endoftext|>b<|endof"
    ids = [402, *ours.encode("a"), 401, *ours.encode(" \n"), 402, *ours.encode("b<|endof")]
    assert theirs(text).input_ids == ours.encode(text) == ids


# ---- Memory, machines and GPUs -------------------------------------------------------------------
MEMORY = """
import ctypes
libc = ctypes.CDLL(None)
libc.mallopt(-3, 100_000)  # M_MMAP_THRESHOLD: glibc gives back what is freed
def held(name):
    [line] = [x for x in open("/proc/self/status") if x.startswith(name)]
    return int(line.split()[1]) * 1024 / 1e9

plain_build, plain_step = build_model, train_step
def build_model(*words):
    global before
    (torch.ones(300, 300) @ torch.ones(300, 300)).sum()
    libc.malloc_trim(0)
    before = held("VmRSS")
    return plain_build(*words)

def train_step(*words):
    found = plain_step(*words)
    print(f"peak {held('VmHWM') - before:.3f}", flush=True)
    time.sleep(0.5)  # the checkpoint of the step before is written
    return found
"""


@pytest.mark.parametrize("case", by_mark(slow=[(2, 0)], long=[(2, 1), (4, 2)]))
def test_memory(tokens, case):
    """What a run says at its start is what a process takes, of the CPU's memory here, but for
    0.15 GB of torch's own, and what is not held at once: a step, and a step while a checkpoint is
    written."""
    processes, shard = case
    flags = ["--tokens", tokens, "--layers", 8, "--width", 512, "--heads", 4, "--length", 32]
    flags += ["--batch-size", processes, "--steps", 3, "--device", "cpu", "--log-every", 1]
    flags += ["--checkpoint-minutes", 0, "--eval-tokens", 32, "--shard", shard, "--output", "out"]
    text = run(LM, *flags, more=MEMORY, processes=processes)
    said = float(re.search(r"^GB on each: ([\d.]+)", text, re.M)[1])
    copy = float(re.search(r"memory: ([\d.]+) for each rank's part of a checkpoint", text)[1])
    peaks = [float(peak) for peak in re.findall(r"peak ([\d.]+)", text)]
    assert said - 0.06 < min(peaks) < said + 0.15 and said > 0.25, text
    assert said + 0.8 * copy < max(peaks) < said + copy + 0.15, text


@pytest.mark.slow
def test_two_machines(flags, one):
    """Two machines with two ranks each have a copy each; another --lr on one is told, and nothing
    is written."""

    def another_rate(rank):
        return [*flags, "differ", *(["--lr", 0.1] if rank > 1 else [])]

    copies = [*flags, "copies", "--shard", 2, "--accumulate", 3]
    _, text = together(copies, another_rate, path=LM, processes=4, gpus=2, status=1)
    same_losses("copies", one)
    assert text.count("ranks differ in --lr: rank 0 has 0.003, rank 2 0.1") == 2, text
    assert files("differ") == ["lock"]


SAVES = """
import torch.distributed.checkpoint.filesystem
from torch.utils._python_dispatch import TorchDispatchMode

class Copies(TorchDispatchMode):
    bytes = 0

    def __torch_dispatch__(self, operation, types, words=(), options=None):
        result = operation(*words, **(options or {}))
        if operation.name() in ("aten::copy_", "aten::clone", "aten::_to_copy"):
            Copies.bytes += result.nbytes
        return result

def open_gpu(*words, **options):
    raise AssertionError("the thread opens GPU 0")

class Checkpoints(Checkpoints):
    def start(self, model, optimizer, step):
        state = [*model.parameters(), *(x for y in optimizer.state.values() for x in y.values())]
        Copies.bytes, size = 0, sum(x.nbytes for x in state)
        with Copies():
            super().start(model, optimizer, step)
        print(f"step {step}: copied {Copies.bytes / size:.3f} times", flush=True)
        self.finish()

plain_write = dcp.FileSystemWriter.write_data
def write_data(self, *words):  # as it would be with GPUs
    torch.cuda.is_available, torch.cuda.current_stream = lambda: True, open_gpu
    try:
        return plain_write(self, *words)
    finally:
        torch.cuda.is_available = lambda: False
dcp.FileSystemWriter.write_data = write_data
plain_reduce = dist.all_reduce
def all_reduce(tensor, *words, **options):
    assert tensor.dtype != torch.float64, "Intel's GPUs have no float64"
    return plain_reduce(tensor, *words, **options)
dist.all_reduce = all_reduce
"""


def test_saving(flags):
    """Each shard is copied once, into memory that is kept. The thread that writes the copies uses
    no GPU: it would be number 0 on every rank. And no float64 is communicated."""
    more = "--steps", 3, "--checkpoint-minutes", 0
    text = run(LM, *flags, "out", *more, more=SAVES, processes=0)
    assert re.findall(r"copied (.*) times", text) == ["1.000"] * 3, text


def test_micro_batches(monkeypatch):
    """As few as fit into the GPU beside the model, of a step of half a million tokens; weights stay
    gathered where that leaves room; the head computes the more scores at a time, the more memory
    there is."""

    class Device:
        @staticmethod
        def get_device_properties(index):
            return Device

    monkeypatch.setattr(torch, "get_device_module", lambda name: Device)
    Path("tokens").mkdir()

    def choose(gigabytes, ranks, *words, vocabulary=50_257):
        Path("tokens/tokens.json").write_text(json.dumps({"vocabulary": vocabulary}))
        Device.total_memory = gigabytes * 2**30
        args = train_lm.parser.parse_args(["--device", "cpu", "--size", *words])
        args.device, args.compile = "cuda", "--no-compile" not in words
        train_lm.set_defaults(args, ranks)
        tokens = train_lm.micro_batch_tokens(args, ranks)
        return tokens, args.accumulate, args.keep_gathered

    for case, tokens, accumulate, keep_gathered in (
        ((80, 8, "160m"), 65_536, 1, True),
        ((24, 8, "160m"), 22_528, 3, True),
        ((80, 8, "160m", "--batch-size", "2048"), 65_536, 4, True),
        ((80, 8, "3b"), 10_240, 7, True),
        ((80, 8, "3b", "--no-keep-gathered"), 13_312, 5, False),
        ((80, 8, "3b", "--accumulate", "8"), 8_192, 8, True),
        ((80, 8, "3b", "--accumulate", "6"), 11_264, 6, False),
        ((80, 8, "7b", "--recompute"), 65_536, 1, False),  # if gathered: two micro-batches
        ((24, 8, "3b", "--recompute"), 22_528, 3, False),  # gathered, it does not fit
        ((24, 8, "3b", "--recompute", "--keep-gathered"), 4_096, 16, True),
        # one GPU gathers nothing
        ((24, 1, "400m"), 10_240, 52, False),
        ((80, 1, "3b"), 4_096, 128, False),
        ((24, 1, "3b"), 4_096, 128, False),  # does not fit, whatever the micro-batch
        ((80, 1, "3b", "--recompute"), 32_768, 16, False),
        ((48, 2, "1.4b", "--shard", "1"), 7_168, 37, False),
        # twice the activations
        ((80, 8, "160m", "--float32"), 32_768, 2, True),
        ((80, 8, "160m", "--no-compile"), 32_768, 2, True),
    ):
        assert choose(*case) == (tokens, accumulate, keep_gathered), case
    assert choose(80, 8, "tiny", "--float32", vocabulary=257) == (65_536, 1, True)
    assert choose(80, 8, "tiny", vocabulary=2**20) == (13_312, 5, True)
    args = train_lm.parser.parse_args([])
    args.device = "cuda"
    for gigabytes, vocabulary, tokens in (
        (24, 50_304, 2048),
        (80, 50_304, 8192),
        (180, 50_304, 16_384),
        (80, 200_064, 2048),
        (24, 200_064, 512),
    ):
        Device.total_memory = gigabytes * 2**30
        assert train_lm.chunk_tokens(args, vocabulary) == tokens, (gigabytes, vocabulary)
    for ranks, accumulate, length in (
        (7, 5, 1024),
        (3, 11, 1024),
        (1, 32, 1000),
        (8, 64, 20_000),
        (300, 1, 20_000),
    ):
        args = train_lm.parser.parse_args(["--device", "cpu", "--length", str(length)])
        train_lm.set_defaults(args, ranks)
        assert args.accumulate == accumulate
        train_lm.check_flags(args, ranks)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", ""])
def test_settings_of_the_allocator(monkeypatch, name):
    """A user's are kept, under whichever of its names."""
    for other in "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF":
        monkeypatch.delenv(other, raising=False)
    expected = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    if name:
        expected = {name: "backend:native"}
        monkeypatch.setenv(name, expected[name])
    head, *_ = (ROOT / LM).read_text().split("import numpy")
    exec(head, {})
    found = {key: value for key, value in os.environ.items() if key.endswith("ALLOC_CONF")}
    os.environ.pop("PYTORCH_ALLOC_CONF", None)  # of the last case, in the tests' own process
    assert found == expected


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_only_nccl_is_bound_to_its_gpu(monkeypatch, kind):
    """Or the CPUs' group, by which checkpoints are written, could not be made on Intel's GPUs."""
    bound = []

    def init(*words, device_id, **options):
        bound.append(device_id)

    monkeypatch.setattr(train_lm, "launched", False)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "get_default_backend_for_device", lambda device: device.type)
    args = train_lm.parser.parse_args(["--device", "cpu"])
    args.device = kind
    assert train_lm.join(args, 0, 1) == torch.device(kind, 0)
    assert bound == [torch.device("cuda", 0) if kind == "cuda" else None]


SYNCS = """
plain_step = train_step
def train_step(*words):
    torch.cuda.set_sync_debug_mode("error")  # what waits for the GPU raises an error
    found = plain_step(*words)
    torch.cuda.set_sync_debug_mode("default")
    return found
"""


@pytest.mark.gpu
def test_gpus(flags):
    """On up to two GPUs as on the CPU: in float32, in bfloat16 and compiled, resumed; nothing in a
    step waits for the GPU."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    ranks = min(2, torch.cuda.device_count())
    flags = [*flags[:-1], "--heads", 1, "--output"]
    run(LM, *flags, "one", processes=0)
    flags = [*flags[:-1], "--device", "cuda", "--output"]
    exact = ["--float32", "--no-compile"]
    run(LM, *flags, "exact", *exact, more=SYNCS, processes=ranks)
    same_losses("exact", "one", digits=1e-2)  # TF32
    run(LM, *flags, "half", processes=ranks)
    same_losses("half", "one", digits=5e-2)
    stop = [*flags, "out", *exact, "--stop", 3]
    run(LM, *stop, more=STOP, processes=ranks, status=1)
    text = run(LM, *flags, "out", *exact, "--resume", processes=1)
    assert "out: 3 steps are done" in text
    same_losses("out", "one", digits=1e-2)
    words = ["--sample", "import", "--sample-tokens", 5, "--output", "out"]
    assert "import" in run(LM, *words, processes=ranks)
