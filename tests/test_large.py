"""large/train_lm.py: the same run on any number of ranks, however sharded; killed and resumed."""

import gc
import json
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import prepare_texts
import pytest
import torch
import torch.nn.functional as F
from helpers import (
    ROOT,
    TORCHRUN,
    Cold,
    altered,
    content,
    files,
    finish,
    here,
    kill_all,
    leaves,
    logs,
    run,
    start,
    together,
    wait_for,
    weights,
)

LM = "large/train_lm.py"
SMALL = ["--layers", 2, "--width", 32, "--heads", 2, "--length", 32, "--batch-size", 12]
SMALL += ["--device", "cpu", "--steps", 8, "--warmup-steps", 2, "--log-every", 1, "--lr", 0.003]
SMALL += ["--eval-every", 4, "--eval-tokens", 1000, "--checkpoint-minutes", 0]
# What a test changes in a copy of train_lm.py. Saves end at once, so that each step has one; and
# after that of step --stop, the run ends.
STOP = """
add("--stop", type=int, default=-1)
MAY_CHANGE.append("stop")
class Checkpoints(Checkpoints):
    def start(self, args, model, optimizer, step):
        super().start(args, model, optimizer, step)
        self.finish()
        if step == args.stop:
            raise SystemExit("stopped")
"""


def prepare(*words):
    words = [*map(str, words), "--workers", "1"]
    prepare_texts.main(prepare_texts.parser.parse_args(words))
    output = Path(words[words.index("--output") + 1])
    about = json.loads((output / "tokens.json").read_text())
    ids = [np.fromfile(output / f"{part}.bin", about["dtype"]) for part in ("train", "val")]
    assert [len(part) for part in ids] == [about[part]["count"] for part in ("train", "val")]
    return about, *ids


@pytest.fixture(scope="session")
def tokens(tmp_path_factory):
    """The bytes of some scripts: the end is for validation."""
    folder = tmp_path_factory.mktemp("texts")
    paths = ROOT / LM, ROOT / "large" / "prepare_texts.py", ROOT / "train_fsdp2.py", Path(__file__)
    (folder / "code.txt").write_text("".join(path.read_text() for path in paths)[:70_000])
    prepare(folder, "--output", folder / "tokens", "--tokenizer", "bytes", "--hold-out", 20)
    return folder / "tokens"


@pytest.fixture
def flags(tokens):
    return ["--tokens", tokens, *SMALL, "--output"]


def rows(output, *names):
    """Values of log.jsonl, without speeds."""
    lines = map(json.loads, Path(output, "log.jsonl").read_text().splitlines())
    names = names or ("step", "loss", "lr", "gradient_norm", "val_loss", "bits_per_byte")
    return [[row[name] for name in names if name in row] for row in lines]


def same_run(output, other):
    """Bit-identical, with the same files."""
    names = ["latest.json", "lock", "log.jsonl", "model.pt", "step-00000008", "tokenizer.json"]
    assert files(output) == files(other) == names
    assert rows(output) == rows(other)
    assert same_weights(output, other)


def same_weights(output, other):
    a, b = (leaves(weights(folder)) for folder in (output, other))
    return all(map(torch.equal, a, b))


def close(output, other, digits=1e-4):
    assert sum(rows(output), []) == pytest.approx(sum(rows(other), []), rel=digits), output


# ---- Texts ---------------------------------------------------------------------------------------
def test_prepare_texts():
    """Each document once, in the order of names, after an end-of-text; every third is held out.
    Pieces of a long one are joined. Hidden files are skipped."""
    Path("texts/sub").mkdir(parents=True)
    Path("texts/.git").mkdir()
    long = "".join(f"line {i} of grün\n\n" for i in range(9000))  # more than one piece
    Path("texts/a.txt").write_text(long)
    for ignored in ("texts/code.py", "texts/.b.txt", "texts/.git/c.md"):
        Path(ignored).write_text("no")
    lines = [json.dumps({"body": f"document {i}"}) for i in range(4)]
    Path("texts/sub/b.jsonl").write_text("\n".join(lines) + "\n\n")
    words = "texts --output out --tokenizer bytes --field body --hold-out".split()
    about, train, val = prepare(*words, 3)
    tokenizer = prepare_texts.build_tokenizer(json.loads(Path("out/tokenizer.json").read_text()))

    def documents(ids):
        starts = np.flatnonzero(ids == tokenizer.end_of_text)
        assert starts[0] == 0
        return [tokenizer.decode(part.tolist()) for part in np.split(ids, starts)[1:]]

    assert len(long) > prepare_texts.PIECE
    assert documents(train) == [long, "document 0", "document 2", "document 3"]
    assert documents(val) == ["document 1"]
    of_text = np.array(about["token_bytes"])[train].sum()
    assert of_text == len("".join(documents(train)).encode())
    # Fewer documents than --hold-out: the end of the text, wherever it is.
    about, begin, end = prepare(*words, 6)
    assert len(end) == (len(train) + len(val)) // 6
    assert documents(np.concatenate([begin, end]))[1:] == [f"document {i}" for i in range(4)]


def test_texts_that_are_refused(capsys):
    """By their names; and a damaged folder of tokens is not taken for a whole one."""
    Path("texts").mkdir()
    with pytest.raises(SystemExit):
        prepare("texts", "--output", "out", "--tokenizer", "bytes")
    assert "no text in .txt, .md or .jsonl files in texts" in capsys.readouterr().err
    Path("texts/a.txt").write_bytes("über".encode("latin-1"))
    prepare("texts", "--output", "out", "--tokenizer", "bytes")
    assert "texts/a.txt: 1 characters are not UTF-8" in capsys.readouterr().out
    for line in ('{"text": "cut', '{"other": "x"}', '{"text": null}', "7"):
        Path("texts/b.jsonl").write_text(f'{{"text": "good"}}\n{line}\n')
        with pytest.raises(SystemExit, match=r"texts/b.jsonl, line 2: "):
            prepare("texts", "--output", "out", "--tokenizer", "bytes")
        assert not Path("out/tokens.json").exists()


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
    assert content("out")[Path("out/tokenizer.json")] == Path("own.json").read_bytes()
    # Trained, and sampled from the run's folder alone.
    flags = ["--tokens", "out", *SMALL, "--output", "run"]
    here(LM, *flags)
    shutil.rmtree("out")
    here(LM, "--device", "cpu", "--sample", "import", "--sample-tokens", 3, "--output", "run")


def test_windows():
    """Each epoch has windows that do not overlap, shuffled otherwise than in others; those of a
    step are the same on any number of ranks, and in any number of parts."""
    import train_lm

    ids = np.arange(1000)
    args = train_lm.parser.parse_args(["--length", "10", "--batch-size", "12"])

    def starts(step, ranks, accumulate=1):
        args.accumulate = accumulate
        parts = [train_lm.read_step(args, ids, rank, ranks, step) for rank in range(ranks)]
        assert parts[0].shape == (accumulate, 12 // ranks // accumulate, 11)
        assert all((part.diff() == 1).all() for part in parts)
        return torch.cat(parts).flatten(0, 1)[:, 0].tolist()

    run = [start for step in range(1, 26) for start in starts(step, 1)]
    epochs = [run[i : i + 99] for i in range(0, 297, 99)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(min(epoch), 1000 - 10, 10))[:99]
    assert len({min(epoch) for epoch in epochs}) > 1 and epochs[0] != epochs[1]
    assert starts(9, 3, 2) == starts(9, 2, 3) == starts(9, 4) == run[96:108]

    class Many:  # more than an int32 counts
        def __len__(self):
            return 10**10

        def __getitem__(self, part):
            return np.arange(part.start, part.stop)

    ids, args.length, args.accumulate = Many(), 2048, 1
    windows = train_lm.read_step(args, ids, 0, 1, 1)
    assert windows.min() >= 0 and windows.max() > 2**32


# ---- The same run --------------------------------------------------------------------------------
WAYS = {  # flags by the number of ranks
    2: [["--accumulate", 3, "--recompute"], ["--shard", 1, "--accumulate", 2]],
    3: [["--keep-gathered", "--accumulate", 2], []],
    4: [["--shard", 2, "--accumulate", 3], ["--shard", 2]],
}


@pytest.mark.parametrize("ways", [1, pytest.param(9, marks=pytest.mark.slow)])
def test_same_losses(flags, ways):
    """On any number of ranks, however sharded and accumulated; without updates the weights are the
    same bit for bit, so those that it starts with are."""
    flags = [*flags[:-1], "--checkpoint-minutes", 100, flags[-1]]
    still = ["--lr", 0, "--weight-decay", 0, "--steps", 1, "--warmup-steps", 0]
    here(LM, *flags, "one")
    here(LM, *flags, "still", *still)
    for processes in [2, 4] if ways == 1 else [2, 3, 4]:
        each = WAYS[processes][:ways]
        runs = [[*flags, f"{processes}-{i}", *way] for i, way in enumerate(each)]
        together(*runs, [*flags, f"{processes}-still", *still], path=LM, processes=processes)
        for i in range(len(each)):
            close(f"{processes}-{i}", "one")
            assert files(f"{processes}-{i}") == files("one")
        assert same_weights(f"{processes}-still", "still")
    losses = [row[0] for row in rows("one", "loss") if row]
    assert losses[-1] < losses[0] - 0.3


def test_a_plain_loop(flags):
    """The whole model in a loop as anybody writes it has the same losses and gradients."""
    import train_lm

    here(LM, *flags, "out")
    here(LM, *flags, "still", "--lr", 0, "--weight-decay", 0, "--steps", 1, "--warmup-steps", 0)
    args = train_lm.parser.parse_args([str(flag) for flag in [*flags, "out"]])
    train_lm.set_defaults(args, 1)
    saved = torch.load("still/model.pt")
    model = train_lm.LanguageModel(**saved["config"])
    model.load_state_dict(saved["model"])
    decays = [name for name, p in model.named_parameters() if p.ndim > 1 and "embed" not in name]
    groups = [[p for name, p in model.named_parameters() if (name in decays) == x] for x in (1, 0)]
    groups = [{"params": part, "weight_decay": 0.1 * i} for part, i in zip(groups, (1, 0))]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    ids, found = train_lm.Texts(args.tokens).train, []
    for step in range(1, 9):
        [windows] = train_lm.read_step(args, ids, 0, 1, step)
        for group in optimizer.param_groups:
            group["lr"] = train_lm.learning_rate(args, step)
        loss = model(windows[:, :-1], windows[:, 1:]) / (12 * 32)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append([loss.item(), norm.item()])
    expected = [row for row in rows("out", "loss", "gradient_norm") if row]
    assert sum(expected, []) == pytest.approx(sum(found, []), rel=1e-4)


def test_validation(flags, tokens):
    """Windows spread over val.bin, whose tokens count once, whatever the number of ranks; the model
    is loaded as the page says."""
    from train_lm import LanguageModel, rotary

    flags = [*flags[:-1], "--steps", 1, "--warmup-steps", 0, "--output"]
    here(LM, *flags, "all", "--eval-tokens", 10**6)
    here(LM, *flags, "some", "--eval-tokens", 33)  # two windows
    run(LM, *flags, "two", "--eval-tokens", 10**6, processes=2)
    close("two", "all", digits=1e-6)
    saved = torch.load("all/model.pt", mmap=True)
    model = LanguageModel(**saved["config"])
    model.load_state_dict(saved["model"])
    ids = torch.from_numpy(np.fromfile(tokens / "val.bin", np.uint16).astype(np.int64))
    assert len(ids) % saved["length"] != 1  # the last window is a short one

    def scores(inputs):  # of all tokens, without chunks
        x = model.embedding(inputs)
        for block in model.blocks:
            x = block(x, *rotary(x.shape[1], model.head_size, x.device))
        return model.head.scores(model.head.norm(x))

    def measured(starts):
        nats, targets = 0.0, []
        for first in starts:
            window = ids[first : first + saved["length"] + 1]
            with torch.no_grad():
                part = scores(window[None, :-1])[0]
            nats += F.cross_entropy(part, window[1:], reduction="sum").item()
            targets += window[1:].tolist()
        of_text = sum(token < 256 for token in targets)
        return [nats / len(targets), nats / math.log(2) / of_text]

    starts = list(range(0, len(ids) - 1, saved["length"]))
    for output, chosen in ("all", starts), ("some", [0, starts[len(starts) // 2]]):
        found = rows(output, "val_loss", "bits_per_byte")[-1]
        assert found == pytest.approx(measured(chosen), rel=1e-6)


def test_no_clipping(flags):
    """--clip-norm 0 leaves gradients as they are; 1e-9 makes them nothing for the losses."""
    flags = [*flags[:-1], "--weight-decay", 0, "--steps", 4, "--eval-every", 9, "--output"]
    for norm in "0", "1e9", "1e-12":
        here(LM, *flags, norm, "--clip-norm", norm)
    assert rows("0") == rows("1e9") and rows("0")[-1] != rows("1e-12")[-1]


@pytest.mark.long
def test_compiled(flags):
    here(LM, *flags, "eager")
    here(LM, *flags, "out", "--compile", "--recompute")
    close("out", "eager", digits=1e-3)


# ---- Checkpoints ---------------------------------------------------------------------------------
MOMENTS = """
args = parser.parse_args()
copying = False
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
__import__("sys").addaudithook(before)
plain = torch.save
def save(*words, **options):  # also DCP's, of each tensor in turn
    plain(*words, **options)
    copy()
torch.save = save
"""


@pytest.mark.parametrize("processes", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_killed_at_each_moment_of_a_save(flags, processes):
    """Before each operation on the folder it is copied, which is what SIGKILL would leave there.
    Copies go on to the end, bit-identical, and nothing is left over in them."""
    flags = [*flags[:-1], "--steps", 3, "--eval-every", 2, "--output"]
    together([*flags, "whole"], path=LM, processes=processes)
    run(LM, *flags, "out", more=STOP + MOMENTS, processes=processes)
    chosen = {}  # one copy for each set of files; of these, a few
    for path in sorted(Path().glob("moment-*")):
        names = [re.sub(r"\d+", "N", file.name) for file in path.rglob("*")]
        kind = "each" if processes else " ".join(sorted(names))
        chosen.setdefault((kind, processes and path.name), path.name)
    kinds = ["latest.json.tmp", ".metadata.tmp", ".metadata", "model.pt.tmp", "log.jsonl.tmp"]
    for kind in [*kinds, "__0_0.distcp"]:
        assert any(list(Path(output).rglob(kind)) for output in chosen.values()), kind
    outputs = sorted(chosen.values())[:: 7 if processes else 1]
    together(*[[*flags, output, "--resume"] for output in outputs], path=LM, processes=processes)
    for output in outputs:
        assert files(output) == files("whole") and rows(output) == rows("whole"), output
        assert same_weights(output, "whole"), output


WAITS = """
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
def test_killed_while_it_writes(flags):
    """Training goes on while a checkpoint is written, and no second save begins. Killed then, a new
    run starts again, and a later one is where its last whole checkpoint is; both bit-identical."""
    for life in range(2):
        if life == 1:  # the one of step 1 is whole, a later one is not
            together([*flags, "out", "--resume", "--stop", 1], path=LM, more=STOP, status=1)
        Path("blocked").touch()
        words = [*flags, "out", "--resume", "--steps", 10**6, "--eval-every", 10**6]
        jobs = start(LM, *words, more=WAITS, processes=2)
        wait_for("writes out/", *jobs)
        wait_for("step 30/", *jobs)
        kill_all(jobs)
        assert logs(jobs).count("writes out/") == 2  # one on each rank
        assert len(list(Path("out").glob("step-*"))) == 1 + life
        assert Path("out/latest.json").exists() == bool(life)
        Path("blocked").unlink()
    text, _ = together([*flags, "out", "--resume"], [*flags, "whole"], path=LM, more=STOP)
    assert "out: 1 steps are done" in text
    same_run("out", "whole")


@pytest.mark.slow
def test_resumed_on_another_number(flags):
    """One rank, then two, then four in two copies, along a schedule that has grown meanwhile: the
    losses are those of one undisturbed run."""
    first, grown = ["--steps", 5, "--warmup-steps", 4], ["--warmup-steps", 4]
    here(LM, *flags, "whole", *grown)
    run(LM, *flags, "out", *first, "--stop", 2, more=STOP, processes=0, status=1)
    resumed = [*flags, "out", "--resume"]
    text = run(LM, *resumed, *grown, "--stop", 4, more=STOP, processes=2, status=1)
    assert "stopped" in text
    shutil.copytree("out", "copy")
    text = run(LM, *resumed, *grown, "--shard", 2, processes=4)
    assert "out: 4 steps are done" in text
    close("out", "whole")
    again = [*flags, "copy", "--resume", *grown]
    together(again, path=LM, processes=2)
    close("copy", "whole")


FULL = """
class Checkpoints(Checkpoints):
    def start(self, args, model, optimizer, step):
        if step == 6 and dist.get_rank() == 1:
            import resource, signal
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does
            resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        super().start(args, model, optimizer, step)
"""


@pytest.mark.slow
def test_a_full_disk(flags):
    """For rank 1, in the middle of the save of step 6: all ranks say so, and resume at step 5."""
    text = run(LM, *flags, "out", more=STOP + FULL, processes=2, status=1)
    assert "File too large" in text and "Timeout" not in text, text
    assert json.loads(Path("out/latest.json").read_text())["step"] == 5
    again = [*flags, "out", "--resume"]
    text, _ = together(again, [*flags, "whole"], path=LM, more=STOP)
    assert "out: 5 steps are done" in text
    same_run("out", "whole")


def test_when_it_saves():
    """A new run at once, then each five minutes, at a progress line or, where steps take longer, in
    between; not while it writes."""
    import train_lm

    class Quick(train_lm.Checkpoints):
        def __init__(self, is_new):
            self.seconds_between, self.writing = 300, None
            self.saved_at = -math.inf if is_new else train_lm.time.perf_counter()

    assert Quick(True).when(1.0) == (True, 300)
    assert Quick(False).when(1.0) == (False, 299)  # in so many steps: there are lines before
    assert Quick(False).when(70.0) == (False, 4)
    assert Quick(False).when(1000.0) == (False, 1)
    late = Quick(False)
    late.saved_at -= 301
    assert late.when(70.0) == (True, 4)
    late.writing = 7, None
    assert late.when(70.0) == (False, math.inf)


# ---- What is refused -----------------------------------------------------------------------------
def test_refusals(flags, tokens, capsys):
    def refused(*words, says):
        gc.collect()  # the last one's traceback has its lock
        before = content()
        with pytest.raises(SystemExit) as error:
            here(LM, *flags, *words)
        text = capsys.readouterr().err + str(error.value)
        assert says in text, text
        assert content() == before

    here(LM, *flags, "out")
    refused("out", says="has a run: add --resume")
    refused("out", "--resume", "--lr", 0.1, says="was started with --lr 0.003: use the same flags")
    refused("out", "--resume", "--steps", 7, says="--steps: out has 8, which can only grow")
    refused("out", "--resume", "--tokens", "none", says="no none/tokens.json")
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
    refused("new", "--resume", says="new has files, but no run of this script")
    Path("new/lock").touch()
    refused("new", "--batch-size", 7, "--accumulate", 2, says="must be a multiple of --accumulate")
    refused("new", "--log-every", 0, says="--log-every must be at least 1")
    refused("new", "--warmup-steps", 8, says="--warmup-steps must be less than --steps")
    refused("new", "--length", 10**6, says="fewer than two sequences")


@pytest.mark.parametrize("what", ["--accumulate", "--tokens", "this file"])
def test_ranks_that_differ(flags, tokens, what):
    """As on two machines, where somebody has typed two commands, or has two copies."""
    code = {
        "--accumulate": "    args.accumulate += rank\n",
        "--tokens": "    texts.about['train']['sha256'] += 'f' * rank\n",
        "this file": "    if rank == 1: globals()['__file__'] = prepared\n",
    }[what]
    more = """
plain_compare, prepared = compare_ranks, __file__.replace("train_lm", "prepare_texts")
def compare_ranks(args, texts, world_size):
    rank = dist.get_rank()
CODE    plain_compare(args, texts, world_size)
""".replace("CODE", code)
    text = run(LM, *flags, "out", more=more, processes=2, status=1)
    assert f"ranks differ in {what}: rank 0 has" in text and "Traceback" not in text, text
    assert files("out") == ["lock"]


def test_two_lives(flags):
    """The second run in a folder in which the first one still trains is refused, and the first one
    is not disturbed."""
    jobs = start(LM, *flags, "out", "--resume", more=WAITS, processes=2)
    Path("blocked").touch()
    wait_for("step 1/", *jobs)
    text = run(LM, *flags, "out", "--resume", processes=0, status=2)
    assert "error: another run is still in out" in text
    Path("blocked").unlink()
    assert finish(jobs)[0] == [0, 0], logs(jobs)
    run(LM, *flags, "whole", processes=2)
    assert same_weights("out", "whole")


def test_shard_1_on_torch_2_9(flags, monkeypatch, capsys):
    import train_lm

    args = train_lm.parser.parse_args(["--shard", "1", "--device", "cpu"])
    train_lm.set_defaults(args, 2)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.10.0+cu128"))
    train_lm.check_flags(args, 2)
    monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion("2.9.1+cu128"))
    train_lm.check_flags(args, 1)  # alone there is nothing to add up
    with pytest.raises(SystemExit):
        train_lm.check_flags(args, 2)
    assert "--shard 1 needs torch 2.10" in capsys.readouterr().err


def test_sample(flags, capsys):
    """Also on two ranks, by the run's folder alone; nothing is written."""
    here(LM, *flags, "out")
    before = content()
    words = ["--device", "cpu", "--sample", "To train", "--sample-tokens", 5, "--output", "out"]
    capsys.readouterr()
    here(LM, *words)
    alone = capsys.readouterr().out
    assert alone.startswith("To train") and content() == before
    more = """
plain = next_scores
def next_scores(*words):  # rank 1 would choose the end of the text
    scores = plain(*words)
    scores[256] += 1e6 * dist.get_rank()
    return scores
"""
    text = run(LM, *words, more=more, processes=2)
    assert alone in text, text


FAULT = """
plain, calls = train_step, []
def train_step(args, model, optimizer, windows, lr):
    loss_sum, norm = plain(args, model, optimizer, windows, lr)
    calls.append(1)
    if len(calls) == 5 and dist.get_rank() == 1:
        KIND
    return loss_sum, norm
"""
KINDS = {
    "loss": "loss_sum = loss_sum * math.nan",
    "weight": "model.head.norm.weight.to_local().data[0] = math.inf",
}


@pytest.mark.parametrize("kind", KINDS)
def test_not_finite(flags, kind):
    """In step 5, on one rank: the run ends on all at that step's line, and keeps what is good."""
    more = STOP + FAULT.replace("KIND", KINDS[kind])
    text = run(LM, *flags, "out", more=more, processes=2, status=1)
    assert "step 5: loss, gradient or weights not finite" in text and "Traceback" not in text, text
    assert json.loads(Path("out/latest.json").read_text())["step"] == 4
    assert [row[0] for row in rows("out", "step")] == [1, 2, 3, 4, 4]


ORPHAN = """
plain, calls = os.getppid, []
def getppid():  # at the third progress line, rank 1 has another parent: torchrun has been killed
    calls.append(1)
    return plain() + (dist.get_rank() == 1 and len(calls) == 3)
os.getppid = getppid
"""


def test_torchrun_is_gone(flags, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    text = run(LM, *flags, "out", more=STOP + ORPHAN, processes=2, status=1)
    assert "torchrun was killed" in text and "Traceback" not in text, text
    assert json.loads(Path("out/latest.json").read_text())["step"] == 2


MEMORY = """
def held(name):
    [line] = [x for x in open("/proc/self/status") if x.startswith(name)]
    return int(line.split()[1]) * 1024 / 1e9

plain_build, plain_step = build_model, train_step
def build_model(*words):
    global before
    (torch.ones(300, 300) @ torch.ones(300, 300)).sum()
    before = held("VmRSS")
    return plain_build(*words)

def train_step(*words):
    found = plain_step(*words)
    print(f"peak {held('VmHWM') - before:.3f}", flush=True)
    time.sleep(0.5)  # the checkpoint of the step before is written
    return found
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes, shard",
    [(2, 0), *(pytest.param(*case, marks=pytest.mark.long) for case in [(2, 1), (4, 2)])],
)
def test_memory(tokens, processes, shard):
    """What a run says at its start is what a process takes, of the CPU's memory here, within the
    0.15 GB of torch's own: a step, and a step while a checkpoint is written. (glibc is told to give
    back what is freed.)"""
    path = altered(LM, more=MEMORY)
    flags = ["--tokens", tokens, "--layers", 8, "--width", 512, "--heads", 4, "--length", 32]
    flags += ["--batch-size", processes, "--steps", 3, "--device", "cpu", "--log-every", 1]
    flags += ["--checkpoint-minutes", 0, "--shard", shard, "--output", "out"]
    start = "env MALLOC_MMAP_THRESHOLD_=1000000 OMP_NUM_THREADS=1".split()
    place = ["--standalone", "--nproc-per-node", processes, path]
    statuses, text = finish([Cold([*start, *TORCHRUN, *place, *flags], "log")])
    assert statuses == [0], text
    said = float(re.search(r"^GB on each: ([\d.]+)", text, re.M)[1])
    copy = float(re.search(r"checkpoint: ([\d.]+)$", text, re.M)[1])
    peaks = [float(peak) for peak in re.findall(r"peak ([\d.]+)", text)]
    first, largest = min(peaks), max(peaks)
    assert said - 0.02 < first < said + 0.15 and said > 0.25, text
    assert said + 0.8 * copy < largest < said + copy + 0.15, text


# ---- Machines and GPUs ---------------------------------------------------------------------------
@pytest.mark.slow
def test_two_machines(flags):
    """Two hosts with two ranks each share a copy, or have one each; another --lr on one is told."""
    if os.getuid() or not shutil.which("ip"):
        pytest.skip("it needs root and iproute2")
    from network import two_namespaces

    here(LM, *flags, "one")
    with two_namespaces() as hosts:

        def both(*words, other=()):
            jobs = []
            for i, host in enumerate(hosts):
                start = f"ip netns exec {host} env GLOO_SOCKET_IFNAME=v{i} OMP_NUM_THREADS=1"
                place = f"--nnodes 2 --node-rank {i} --nproc-per-node 2 --master-addr 10.77.0.1"
                place += f" --master-port 23456 {ROOT / LM}"
                own = [*words, *(other if i else [])]
                command = [*start.split(), *TORCHRUN, *place.split(), *flags, *own]
                jobs.append(Cold(command, f"{words[0]}-{i}.log"))
            return finish(jobs)

        statuses, text = both("copies", "--shard", 2, "--accumulate", 3)
        assert statuses == [0, 0], text
        close("copies", "one")
        statuses, text = both("differ", other=["--lr", 0.1])
        assert 0 not in statuses and "ranks differ in --lr: rank 0 has 0.003" in text, text
        assert files("differ") == ["lock"]


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
    close("exact", "one", digits=1e-2)  # TF32
    run(LM, *flags, "half", processes=ranks)
    close("half", "one", digits=5e-2)
    stop = [*flags, "out", *exact, "--stop", 3]
    run(LM, *stop, more=STOP, processes=ranks, status=1)
    text = run(LM, *flags, "out", *exact, "--resume", processes=1)
    assert "out: 3 steps are done" in text
    close("out", "one", digits=1e-2)
    words = ["--sample", "import", "--sample-tokens", 5, "--output", "out"]
    assert "import" in run(LM, *words, processes=ranks)


# ---- Elsewhere -----------------------------------------------------------------------------------
def test_hugging_face(flags, capsys):
    """Its Qwen3 has the same scores, also where positions and the order of heads matter."""
    transformers = pytest.importorskip("transformers")
    import export_hf
    from train_lm import LanguageModel, rotary

    here(LM, *flags, "out", "--layers", 3, "--heads", 4, "--lr", 0.03)
    here("large/export_hf.py", "out", "theirs")
    saved = torch.load("out/model.pt", weights_only=True)
    model = LanguageModel(**saved["config"])
    model.load_state_dict(saved["model"])
    ids = torch.randint(257, (2, 32), generator=torch.Generator().manual_seed(0))
    x = model.embedding(ids)
    for block in model.blocks:
        x = block(x, *rotary(x.shape[1], model.head_size, x.device))
    scores = model.head.scores(model.head.norm(x))
    theirs = transformers.AutoModelForCausalLM.from_pretrained("theirs", dtype="float32")
    assert type(theirs) is export_hf.Qwen3ForCausalLM and theirs.config.bos_token_id == 256
    torch.testing.assert_close(theirs(ids).logits, scores, rtol=1e-4, atol=1e-4)
    assert scores.std() > 0.1
