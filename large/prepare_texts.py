"""Turn texts into the token ids that train_lm.py reads.

python large/prepare_texts.py my_texts --output my_tokens

Reads a file, or all .txt, .md and .jsonl files below a folder but the hidden ones, in the order of
their names. A .txt or .md file is one document; in a .jsonl file each line is one, {"text": ...}.
An end-of-text token is put before each document. Every 50th document (--hold-out) is for
validation; if there are fewer than 50, the last 50th of all the text is.

Writes train.bin and val.bin (token ids, 2 or 4 bytes each), tokenizer.json, and, once those are
whole, tokens.json, which describes them.

The tokens are GPT-2's if tiktoken is installed (`pip install tiktoken`; it downloads their list
once), else bytes. A machine without network can take the list from another: --tokenizer FILE, a
tokenizer.json that this program has written there.
"""

import argparse
import base64
import hashlib
import importlib.util
import json
import multiprocessing
import os
from pathlib import Path

import numpy as np

PIECE = 100_000  # characters of a document that are tokenized at a time, about
BATCH = 20_000_000  # characters that the processes share at a time

parser = argparse.ArgumentParser(
    description="Turn texts into token ids.",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    allow_abbrev=False,
)
add = parser.add_argument
add("texts", type=Path, help="a file, or a folder of .txt, .md and .jsonl files")
add("--output", type=Path, default=Path("tokens"), help="folder for the token ids")
default = "gpt2" if importlib.util.find_spec("tiktoken") else "bytes"
tokenizer_help = "a name of tiktoken's; without network: bytes, or another machine's tokenizer.json"
add("--tokenizer", default=default, help=tokenizer_help)
add("--hold-out", type=int, default=50, help="of so many documents, one is for validation")
add("--field", default="text", help="what the text is called in .jsonl files")
add("--workers", type=int, default=os.cpu_count(), help="processes that tokenize")


class Bytes:
    """UTF-8 bytes as tokens 0 to 255, and end-of-text, 256."""

    vocabulary, end_of_text = 257, 256

    def encode(self, text):
        return list(text.encode("utf-8", "replace"))

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def token_bytes(self):
        """How many bytes of text each token stands for."""
        return [1] * 256 + [0]


class BytePairs:
    """A tokenizer of tiktoken, from the description that `describe_tokenizer` returns."""

    def __init__(self, description):
        import tiktoken

        tokens = {base64.b64decode(token): i for token, i in description["mergeable_ranks"].items()}
        self.encoding = tiktoken.Encoding(**description | {"mergeable_ranks": tokens})
        self.tokens, self.vocabulary = tokens, self.encoding.n_vocab
        self.end_of_text = description["special_tokens"]["<|endoftext|>"]

    def encode(self, text):
        return self.encoding.encode_ordinary(text)

    def decode(self, ids):
        return self.encoding.decode([i for i in ids if i != self.end_of_text])

    def token_bytes(self):
        sizes = [0] * self.vocabulary
        for token, i in self.tokens.items():
            sizes[i] = len(token)
        return sizes


def describe_tokenizer(name):
    """What tokenizer.json says: all that builds the tokenizer on a machine without network."""
    if name == "bytes":
        return {"name": "bytes"}
    if name.endswith(".json"):
        return json.loads(Path(name).read_text())
    from tiktoken_ext.openai_public import ENCODING_CONSTRUCTORS

    if name not in ENCODING_CONSTRUCTORS:
        parser.error(f"--tokenizer: bytes, a .json file, or one of {list(ENCODING_CONSTRUCTORS)}")
    print(
        f"{name}: tiktoken downloads it once. If that fails, see --tokenizer in --help", flush=True
    )
    description = ENCODING_CONSTRUCTORS[name]()
    tokens = description["mergeable_ranks"].items()
    encoded = {base64.b64encode(token).decode(): i for token, i in tokens}
    return description | {"mergeable_ranks": encoded}


def build_tokenizer(description):
    return Bytes() if description["name"] == "bytes" else BytePairs(description)


def find_files(texts):
    """A folder's files, one folder after the other: of a million there is no list."""
    if texts.is_file():
        yield texts
    for folder, folders, names in os.walk(texts):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.endswith((".txt", ".md", ".jsonl")) and not name.startswith("."):
                yield Path(folder, name)


def read_pieces(path, field):
    """Yields a file's documents in pieces, each with whether a document begins with it."""
    broken = 0
    # utf-8-sig: as utf-8, without the mark with which some editors begin a file.
    with open(path, encoding="utf-8-sig", errors="replace") as file:
        if path.suffix == ".jsonl":
            for number, line in enumerate(file, 1):
                if line.strip():
                    text = read_line(line, field, f"{path}, line {number}")
                    broken += text.count("\ufffd")
                    yield text, True
        else:
            begins = True
            while text := file.read(PIECE) + file.readline():  # to the end of a line
                broken += text.count("\ufffd")
                yield text, begins
                begins = False
    if broken:
        print(f"{path}: {broken} characters are not UTF-8, and were replaced", flush=True)


def read_line(line, field, place):
    try:
        text = json.loads(line)[field]
    except (ValueError, LookupError, TypeError) as error:  # which do not know the file
        raise SystemExit(f'{place}: not {{"{field}": "..."}}: {error!r}') from error
    if not isinstance(text, str):
        raise SystemExit(f"{place}: {field} is no text")
    return text


def make_batches(pieces):
    """Lists of pieces, each of BATCH characters or a little more: so much is in memory."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[0])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def start_worker(description):
    global tokenizer
    tokenizer = build_tokenizer(description)


def tokenize(piece):
    """A piece's token ids, and whether a document begins with it; runs in a process of the pool."""
    text, begins = piece
    ids = tokenizer.encode(text)
    if begins:
        ids.insert(0, tokenizer.end_of_text)
    return np.array(ids, np.uint16 if tokenizer.vocabulary <= 2**16 else np.uint32), begins


class TokenFile:
    """PART.bin. Until it is whole it has another name: a run may still read the old one."""

    def __init__(self, folder, part):
        self.path, self.count = folder / f"{part}.bin", 0
        self.file = open(f"{self.path}.tmp", "w+b")

    def write(self, ids):
        self.file.write(ids.tobytes())
        self.count += len(ids)

    def move_end(self, count, dtype, other):
        """Cut off the last `count` token ids, and write them to the other file."""
        self.count -= count
        self.file.seek(self.count * dtype.itemsize)
        other.write(np.frombuffer(self.file.read(), dtype))
        self.file.truncate(self.count * dtype.itemsize)

    def close(self):
        """Returns what tokens.json says of it."""
        content = hashlib.sha256()
        self.file.seek(0)
        while block := self.file.read(2**20):
            content.update(block)
        self.file.close()
        os.replace(f"{self.path}.tmp", self.path)
        return {"count": self.count, "sha256": content.hexdigest()}


def main(args):
    if args.hold_out < 2:
        parser.error("--hold-out must be at least 2")
    description = describe_tokenizer(args.tokenizer)
    tokenizer = build_tokenizer(description)
    print(f"tokenizer: {description['name']}", flush=True)  # bytes, if tiktoken is not installed
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "tokens.json").unlink(missing_ok=True)  # written last: then all is there
    (args.output / "tokenizer.json").write_text(json.dumps(description))
    train, val = TokenFile(args.output, "train"), TokenFile(args.output, "val")
    documents, dtype = 0, None
    pieces = (piece for path in find_files(args.texts) for piece in read_pieces(path, args.field))
    with multiprocessing.Pool(args.workers, start_worker, [description]) as pool:
        for batch in make_batches(pieces):
            for ids, begins in pool.imap(tokenize, batch, chunksize=8):
                documents, dtype = documents + begins, ids.dtype
                (val if documents % args.hold_out == 0 else train).write(ids)
    if documents == 0:
        parser.error(f"no text in .txt, .md or .jsonl files in {args.texts}")
    held_out = f"each {args.hold_out}th document"
    if documents < args.hold_out:
        held_out = f"the last {args.hold_out}th of the text"
        train.move_end(max(2, train.count // args.hold_out), dtype, val)
    about = {
        "tokenizer": description["name"],
        "vocabulary": tokenizer.vocabulary,
        "dtype": str(dtype),
        "train": train.close(),
        "val": val.close(),
        "token_bytes": tokenizer.token_bytes(),
    }
    (args.output / "tokens.json.tmp").write_text(json.dumps(about))
    os.replace(args.output / "tokens.json.tmp", args.output / "tokens.json")
    print(f"{args.output}: {documents:,} documents")
    print(f"{train.count:,} tokens for training, {val.count:,} for validation: {held_out}")


if __name__ == "__main__":
    main(parser.parse_args())
