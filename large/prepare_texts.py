"""Turn texts into the token ids that train_lm.py reads.

python large/prepare_texts.py my_texts --output my_tokens

Reads a file, or all texts below a folder, in the order of their names. A .txt or .md file is one
document; in a .jsonl or .json file each line is one, {"text": ...}. They are in UTF-8, and may be
compressed (.txt.gz). Other files, blank documents, lines of .jsonl files that are no such text, and
the rest of a compressed file that is cut off are left out and counted; hidden files are only left
out. Links are followed, but nothing is read twice.

Texts of any length are read in pieces, cut at the end of a word, so their tokens are those of the
whole text (but a word of more than 10,000 characters may be cut). A line of a .jsonl or .json file
is read whole, and must have less than a billion characters.

An end-of-text token is put before each document. <|endoftext|> within a text ends a document, as
in the files that GPT-2 was trained on. Every 50th document (--hold-out) is for validation; if there
are fewer than 50, the last 50th of all the text is.

Writes train.bin and val.bin (token ids, 2 or 4 bytes each), tokenizer.json, and, once those are
whole, tokens.json, which describes them. A folder that has anything else is refused.

The tokens are GPT-2's if tiktoken is installed (`pip install tiktoken`; it downloads their list
once), else bytes. A machine without network can take the list from another: --tokenizer FILE, a
tokenizer.json that this program has written there.
"""

import argparse
import base64
import codecs
import fcntl
import gzip
import hashlib
import importlib.util
import io
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import unicodedata
import zlib
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path

import numpy as np

PIECE = 100_000  # characters of a document that are tokenized at a time, about
WORD = 10_000  # characters of the longest word that is not cut
LINE = 1_000_000_000  # bytes of the longest line of a .jsonl file
BATCH = 20_000_000  # characters that the processes share at a time
REPORT_SECONDS = 30  # between two progress lines
BAD_LINES = 1000  # if most lines are no text, after so many the rest is not read
END_OF_TEXT = "<|endoftext|>"
OUTPUTS = ["train.bin", "val.bin", "tokenizer.json", "tokens.json"]

parser = argparse.ArgumentParser(
    description="Turn texts into token ids.",
    usage="%(prog)s TEXTS [flags]; --help lists them",
    formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    allow_abbrev=False,
)
add = parser.add_argument
add("texts", type=Path, help="a file, or a folder of .txt, .md, .jsonl and .json files")
add("--output", type=Path, default=Path("tokens"), help="folder for the token ids")
default = "gpt2" if importlib.util.find_spec("tiktoken") else "bytes"
tokenizer_help = "a name of tiktoken's; without network: bytes, or another machine's tokenizer.json"
add("--tokenizer", default=default, help=tokenizer_help)
add("--hold-out", type=int, default=50, help="of so many documents, one is for validation")
add("--field", default="text", help="what the text is called in .jsonl and .json files")
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
add("--workers", type=int, default=cores, help="processes that tokenize")


class Bytes:
    """UTF-8 bytes as tokens 0 to 255, and end-of-text, 256."""

    vocabulary, end_of_text = 257, 256
    special_tokens = [END_OF_TEXT]

    def encode(self, text):
        first, *others = (part.encode("utf-8", "replace") for part in text.split(END_OF_TEXT))
        ids = list(first)
        for part in others:
            ids += [self.end_of_text, *part]
        return ids

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
        self.end_of_text = description["special_tokens"][END_OF_TEXT]
        self.special_tokens = list(description["special_tokens"])

    def encode(self, text):
        return self.encoding.encode(text, allowed_special="all")

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
        if not Path(name).is_file():
            parser.error(f"--tokenizer: there is no {name}")
        description = json.loads(Path(name).read_text())
        if "name" not in description:  # Hugging Face's files have the same name
            parser.error(f"--tokenizer: {name} is none that prepare_texts.py has written")
        return description
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


class Texts:
    """Finds the texts in a file or a folder, reads them, and counts what is left out. `output` may
    be a folder in it, which has no texts. A text is not cut within one of the special tokens."""

    def __init__(self, path, field, output, special_tokens):
        self.path, self.field, self.output = path, field, identity(output)
        self.special_tokens = special_tokens
        self.known = {identity(path)}  # files and folders that were read
        self.suffixes = Counter()  # of the files left out
        self.other_json = []
        self.not_text = []
        self.damaged = []  # compressed files, each with what is wrong
        self.repeated = self.empty = self.not_utf8 = 0
        self.lines = self.bad_lines = 0  # of .jsonl files, and of .json files that have such lines
        self.first_bad_line = ""
        codecs.register_error("count", self.replace)

    def pieces(self):
        """Yields the documents in pieces, each with whether a document begins with it."""
        try:
            for path in self.files_below(self.path) if self.path.is_dir() else [self.path]:
                yield from self.read_file(path)
        except OSError as error:
            raise SystemExit(f"{error.filename or path}: {error.strerror}") from error

    def files_below(self, folder):
        """Yields a folder's texts, then those of the folders in it: of a million there is no list.
        A folder that cannot be read, and a link to nothing, raise an OSError that names them."""
        entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
        for entry in sorted(entries, key=lambda entry: (entry.is_dir(), entry.name)):
            if not entry.is_dir() and not text_suffix(entry.name):
                self.suffixes[os.path.splitext(entry.name)[1].lower() or "without"] += 1
                continue
            entry_id = identity(entry)  # asks the disk, which may be far away
            if entry_id in self.known:  # by a link, which may lead to a folder above
                self.repeated += 1
            elif entry_id != self.output:
                self.known.add(entry_id)
                yield from self.files_below(entry) if entry.is_dir() else [Path(entry)]

    def read_file(self, path):
        is_compressed = path.name.lower().endswith(".gz")
        try:
            with gzip.open(path) if is_compressed else open(path, "rb") as file:
                head = file.peek(100)[:100]
                if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in head:
                    self.not_text.append(path)
                elif text_suffix(path.name).startswith(".json"):
                    yield from self.read_lines(file, path)
                else:
                    yield from self.read_whole(file, path)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            self.damaged.append(f"{path}: {error}")

    def read_whole(self, file, path):
        self.not_utf8 = 0
        # utf-8-sig: as utf-8, without the mark with which some editors begin a file.
        text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="count")
        yield from self.read_document(iter(lambda: text.read(PIECE), ""))
        if self.not_utf8:
            note = "characters are not UTF-8, and were replaced"
            print(f"{path}: {self.not_utf8} {note}", flush=True)

    def read_document(self, blocks):
        """Yields a document's pieces from its text in blocks; several documents', if it has
        <|endoftext|> between them. A blank one has none."""
        begins, found, blank = True, False, ""
        for text in cut_between_words(blocks, self.special_tokens):
            if text == END_OF_TEXT:
                begins, blank = True, ""
            elif begins and not text.strip():
                blank += text
            elif text:
                yield blank + text, begins
                begins, found, blank = False, True, ""
        self.empty += not found

    def read_lines(self, file, path):
        """A .json file that begins with something else, such as settings, is left out."""
        documents = 0
        for number, line in enumerate(lines_of(file), 1):
            if not line.strip():
                continue
            try:
                text = read_line(line, self.field)
            except ValueError as error:
                is_lines = text_suffix(path.name) == ".jsonl"
                must_be_text = is_lines or documents > 0 or path == self.path
                if not must_be_text:
                    self.other_json.append(path)
                    return
                self.count_bad_line(f"{path}, line {number}: {error}")
                continue
            documents += 1
            self.lines += 1
            yield from self.read_document(text[i : i + PIECE] for i in range(0, len(text), PIECE))

    def count_bad_line(self, message):
        self.first_bad_line = self.first_bad_line or message
        self.lines += 1
        self.bad_lines += 1
        if self.bad_lines >= BAD_LINES:
            self.check_bad_lines()

    def check_bad_lines(self):
        """One line may be cut off or empty; if most are, --field is wrong, or the file is."""
        if 2 * self.bad_lines > self.lines:
            what = f'lines are no {{"{self.field}": "..."}} (see --field). The first:'
            raise SystemExit(f"{self.bad_lines} of {self.lines} {what} {self.first_bad_line}")

    def replace(self, error):
        """What stands for bytes that are not UTF-8: see codecs.register_error."""
        self.not_utf8 += 1
        return "\ufffd", error.end

    def left_out(self):
        """Lines that say what."""
        lines = []
        if self.suffixes:
            shown = ", ".join(f"{count} {name}" for name, count in self.suffixes.most_common(10))
            lines.append(f"{self.suffixes.total()} files left out by their suffix: {shown}")
        if self.other_json:
            start = f'{{"{self.field}": "..."}}'
            reason = f".json files left out, whose first line is no {start}: such as"
            lines.append(f"{len(self.other_json)} {reason} {self.other_json[0]}")
        if self.not_text:
            reason = "files left out, which are UTF-16, or no text: such as"
            lines.append(f"{len(self.not_text)} {reason} {self.not_text[0]}")
        if self.damaged:
            reason = ".gz files cut off or damaged, whose rest is left out: such as"
            lines.append(f"{len(self.damaged)} {reason} {self.damaged[0]}")
        if self.empty:
            lines.append(f"{self.empty} blank documents left out")
        if self.bad_lines:
            what = f'lines left out, which are no {{"{self.field}": "..."}}. The first:'
            lines.append(f"{self.bad_lines} {what} {self.first_bad_line}")
        if self.repeated:
            lines.append(f"{self.repeated} files or folders read once, to which links lead, too")
        return lines


def text_suffix(name):
    """.txt, .md, .jsonl or .json, in whatever case, and compressed or not; or ""."""
    suffix = os.path.splitext(name.lower().removesuffix(".gz"))[1]
    return suffix if suffix in (".txt", ".md", ".jsonl", ".json") else ""


def identity(path):
    """The same for all names and links by which a file or a folder is found."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def lines_of(file):
    """Yields the lines; of one that is too long, the beginning."""
    while line := file.readline(LINE):
        yield line
        while len(line) == LINE and not line.endswith(b"\n"):
            line = file.readline(LINE)


def read_line(line, field):
    """The text of a document. Raises ValueError, which says what is wrong with the line."""
    if len(line) >= LINE:
        raise ValueError(f"it has {LINE:,} bytes or more: make it a .txt file")
    try:
        document = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise ValueError("it is no JSON") from error
    if not isinstance(document, dict):
        raise ValueError("it is no object")
    if field not in document:
        raise ValueError(f"it has {', '.join(list(document)[:10]) or 'nothing'}")
    if not isinstance(document[field], str):
        raise ValueError(f"{field} is no text")
    return document[field]


def cut_between_words(blocks, special_tokens):
    """Yields the text of the blocks in pieces that end where a word does; special tokens are pieces
    of their own."""
    longest_first = sorted(special_tokens, key=len, reverse=True)
    special = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
    rest = ""
    for block in blocks:
        *whole, text = special.split(rest + block)
        yield from whole
        # The next block may complete a special token.
        end = last_end_of_word(text[: len(text) - length_begun(text, special_tokens)])
        yield text[:end]
        rest = text[end:]
    if rest:
        yield rest


def length_begun(text, special_tokens):
    """How many characters at the end of a text may be the beginning of a special token."""
    lengths = (i for token in special_tokens for i in range(len(token)) if text.endswith(token[:i]))
    return max(lengths, default=0)


def last_end_of_word(text):
    """Where the last word that something else follows ends: between a letter or digit and what no
    tokenizer joins to it. If there is none in the last WORD characters, the end of the text; or, of
    fewer characters, 0, as the word may go on."""
    for i in range(len(text) - 1, max(0, len(text) - WORD), -1):
        if text[i - 1].isalnum() and not text[i].isalnum():
            joined = text[i] in "'\u2019_" or unicodedata.category(text[i]).startswith("M")
            if not joined:
                return i
    return len(text) if len(text) > WORD else 0


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
    if parent := multiprocessing.parent_process():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # see start_workers
        threading.Thread(target=end_with, args=[parent], daemon=True).start()


def end_with(parent):
    """After kill -9 of the main process, a worker would wait for ever."""
    parent.join()
    os._exit(1)


def tokenize(piece):
    """A piece's token ids, and whether a document begins with it; runs in a process of the pool."""
    text, begins = piece
    ids = tokenizer.encode(text)
    if begins:
        ids.insert(0, tokenizer.end_of_text)
    return np.array(ids, np.uint16 if tokenizer.vocabulary <= 2**16 else np.uint32), begins


@contextmanager
def name_in_error(path):
    """The system's error about a full disk names no file."""
    try:
        yield
    except OSError as error:
        raise SystemExit(f"{path}: {error.strerror}") from error


def write_json(path, content):
    with name_in_error(path):
        Path(f"{path}.tmp").write_text(json.dumps(content))
        os.replace(f"{path}.tmp", path)


class TokenFile:
    """PART.bin. Until it is whole it has another name: a run may still read the old one."""

    def __init__(self, folder, part):
        self.path, self.count = folder / f"{part}.bin", 0
        self.file = open(f"{self.path}.tmp", "w+b")

    def write(self, ids):
        with name_in_error(self.path):
            self.file.write(ids.tobytes())
        self.count += len(ids)

    def move_end(self, count, dtype, other):
        """Cut off the last `count` token ids, and write them to the other file."""
        self.count -= count
        with name_in_error(self.path):
            self.file.seek(self.count * dtype.itemsize)  # writes what is left
        other.write(np.frombuffer(self.file.read(), dtype))
        self.file.truncate(self.count * dtype.itemsize)

    def close(self):
        """Returns what tokens.json says of it."""
        content = hashlib.sha256()
        with name_in_error(self.path):
            self.file.seek(0)
            while block := self.file.read(2**20):
                content.update(block)
            self.file.close()
            os.replace(f"{self.path}.tmp", self.path)
        return {"count": self.count, "sha256": content.hexdigest()}


def lock_folder(folder, seconds=0):
    """Keep other runs out of a folder for as long as the returned file is open: the system closes
    it when this process ends, in whatever way. If another one is in it, and does not end within so
    many seconds, this one ends."""
    path, end = folder / "lock", None
    while True:
        lock = open(path, "w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            lock.close()
        except OSError:
            print(f"the disk of {folder} has no locks: start no second run there", flush=True)
            return lock
        if end is None:
            end = time.monotonic() + seconds
            if seconds > 0:
                print(f"{folder} is locked: waits up to {seconds} s", flush=True)
        if time.monotonic() >= end:
            remedy = f"if its machine has died, delete {path}"
            raise SystemExit(f"another run is still in {folder}; {remedy}")
        time.sleep(1)


def main(args):
    sys.stdout.reconfigure(errors="backslashreplace")  # for names that the terminal cannot show
    if args.hold_out < 2:
        parser.error("--hold-out must be at least 2")
    if not 1 <= args.workers <= 1000:
        parser.error("--workers must be from 1 to 1000")
    if not args.texts.exists():
        parser.error(f"there is no {args.texts}")
    if args.output.exists() and args.output.samefile(args.texts):
        parser.error("--output must not be the folder of the texts")
    check_output(args.output)
    description = describe_tokenizer(args.tokenizer)
    print(f"tokenizer: {description['name']}", flush=True)  # bytes, if tiktoken is not installed
    special_tokens = build_tokenizer(description).special_tokens
    args.output.mkdir(parents=True, exist_ok=True)
    texts = Texts(args.texts, args.field, args.output, special_tokens)
    pool = ProcessPoolExecutor(args.workers, initializer=start_worker, initargs=[description])
    try:
        start_workers(pool)
        with lock_folder(args.output):
            check_output(args.output)  # again: another one may have just ended
            write_tokens(args, texts, description, pool)
    except BrokenProcessPool as error:
        remedy = "if the memory is full, use fewer --workers"
        raise SystemExit(f"a process that tokenizes has died; {remedy}") from error
    finally:
        pool.shutdown(cancel_futures=True)


def check_output(output):
    """Only what this program has left unfinished is overwritten: neither token ids, to which a run
    of train_lm.py belongs, nor anybody's files of the same names."""
    if (output / "tokens.json").exists():
        parser.error(f"{output} is complete: remove it, or choose another --output")
    unfinished = set()
    if (output / "lock").exists():
        unfinished = {"lock", *OUTPUTS, *(f"{name}.tmp" for name in OUTPUTS)}
    names = [path.name for path in output.iterdir()] if output.is_dir() else []
    for name in sorted(names):
        if name not in unfinished and name != "lost+found" and not name.startswith("."):
            parser.error(f"{output} is not empty: it has {name}; choose another --output")


def start_workers(pool):
    """Before the folder is locked: forked later, they would have the lock, too. They do not get
    Ctrl-C, which goes to all processes of a terminal: one that ends while it takes a piece from
    the pool's queue would leave the others, and this process, waiting for ever."""
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # a new process inherits that
    try:
        pool.submit(os.getpid).result()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def write_tokens(args, texts, description, pool):
    """tokens.json last: with it, all is there. Nothing is left after an error."""
    try:
        about = write_parts(args, texts, pool)
        write_json(args.output / "tokenizer.json", description)
        tokenizer = build_tokenizer(description)
        about |= {"tokenizer": description["name"], "vocabulary": tokenizer.vocabulary}
        about |= {"token_bytes": tokenizer.token_bytes()}
        write_json(args.output / "tokens.json", about)
    finally:
        for name in OUTPUTS:
            (args.output / f"{name}.tmp").unlink(missing_ok=True)


def write_parts(args, texts, pool):
    """train.bin and val.bin. Returns what tokens.json says of them."""
    train, val = TokenFile(args.output, "train"), TokenFile(args.output, "val")
    documents, dtype = 0, None
    reported = time.monotonic()
    for batch in make_batches(texts.pieces()):
        for ids, begins in pool.map(tokenize, batch, chunksize=8):
            documents, dtype = documents + begins, ids.dtype
            (val if documents % args.hold_out == 0 else train).write(ids)
        if time.monotonic() - reported > REPORT_SECONDS:
            reported = time.monotonic()
            print(f"{documents:,} documents, {train.count + val.count:,} tokens", flush=True)
    texts.check_bad_lines()
    for line in texts.left_out():
        print(line, flush=True)
    if documents == 0:
        parser.error(f"no text in .txt, .md, .jsonl or .json files in {args.texts}")
    held_out = f"each {args.hold_out}th document"
    if documents < args.hold_out:
        held_out = f"the last {args.hold_out}th of the text"
        held_out_tokens = max(2, train.count // args.hold_out)
        if train.count < held_out_tokens + 2:
            parser.error(f"{args.texts} has only {train.count} tokens")
        train.move_end(held_out_tokens, dtype, val)
    about = {"dtype": str(dtype), "train": train.close(), "val": val.close()}
    print(f"{args.output}: {documents:,} documents")
    print(f"{train.count:,} tokens for training, {val.count:,} for validation: {held_out}")
    if 10 * args.hold_out * val.count < train.count:
        print("that is little for validation: choose another --hold-out", flush=True)
    return about


if __name__ == "__main__":
    try:
        main(parser.parse_args())
    except KeyboardInterrupt:
        sys.tracebacklimit = 0  # one line
        raise
