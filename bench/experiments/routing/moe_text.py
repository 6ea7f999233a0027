"""Text for training from this machine: documentation and source code under Python's packages and /usr, split by file.

collect() returns Pieces of two kinds, `prose` (docstrings, documentation, manual pages, licences) and `code` (source
without docstrings), each distinct file once, and `whole` held-out files. A file is held out by the hash of its
content, so that no docstring of a held-out file is in the training text.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

KINDS = ("prose", "code", "mixed")
DOCS = (".rst", ".md", ".txt")
CODE = (".py", ".h", ".hpp", ".cuh", ".c", ".cpp", ".js")
LICENCES = ("license", "licence", "copying", "copyright", "notice", "readme", "changelog")
SKIPPED = ("__pycache__", "/tests/data", "/locale", "/testdata/", "/node_modules/")
HELD_OUT = 0.03  # share of the files
SMALLEST, LARGEST = 400, 400_000  # size of a file in bytes
DOCSTRING = 200  # shortest docstring that counts as prose, in characters


@dataclass
class Pieces:
    """Texts by kind; `files` counts the files read."""

    train: dict[str, list[str]] = field(default_factory=lambda: {"prose": [], "code": []})
    held_out: dict[str, list[str]] = field(default_factory=lambda: {k: [] for k in KINDS})
    files: int = 0

    def nbytes(self) -> int:
        return sum(len(t) for texts in self.train.values() for t in texts)


def roots() -> list[Path]:
    """Return the folders with text: Python's packages and the system's documentation."""
    here = Path(__file__).resolve()
    ours = (here.parent, here.parents[2])  # on sys.path for the script itself
    found = [Path(p) for p in sys.path if p and Path(p).is_dir() and Path(p).resolve() not in ours]
    found += [Path(sys.prefix), Path("/usr/lib/python3"), Path("/usr/share/doc"), Path("/usr/share/man")]
    found += [Path("/usr/share/common-licenses"), Path("/usr/share/perl"), Path("/usr/include")]
    there = {p.resolve() for p in found if p.is_dir()}
    return sorted(p for p in there if not any(q in p.parents for q in there))


def _paths(folders: Iterable[Path]) -> Iterator[str]:
    seen = set()
    for folder in folders:
        for where, inside, names in os.walk(folder, onerror=lambda _: None):
            inside.sort()
            for name in sorted(names):
                path = os.path.join(where, name)
                lower = name.lower()
                wanted = lower.endswith((*DOCS, *CODE)) or lower.startswith(LICENCES) or "/man/man" in where
                if wanted and path not in seen and not any(s in path for s in SKIPPED):
                    seen.add(path)
                    yield path


def _read(path: str) -> bytes:
    try:
        if os.path.islink(path) or not SMALLEST // 4 <= os.path.getsize(path) <= LARGEST:
            return b""
        data = Path(path).read_bytes()
        return gzip.decompress(data) if path.endswith(".gz") else data
    except (OSError, EOFError, gzip.BadGzipFile):
        return b""


def parts(path: str, text: str) -> dict[str, list[str]]:
    """Split a file: {'prose': docstrings or the document, 'code': the source without them}."""
    if not path.endswith(CODE):
        return {"prose": [text], "code": []}
    if not path.endswith(".py"):
        return {"prose": [], "code": [text]}
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {"prose": [], "code": []}
    lines, prose = text.split("\n"), []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            docstring = ast.get_docstring(node)
            if first is not None and docstring and len(docstring) >= DOCSTRING:
                prose.append(docstring)
                for number in range(first.lineno - 1, min(first.end_lineno or first.lineno, len(lines))):
                    lines[number] = "\0"
    code = "\n".join(line for line in lines if line != "\0")
    return {"prose": prose, "code": [code] if len(code) >= SMALLEST // 2 else []}


def _one(path: str) -> tuple[str, str, dict[str, list[str]], str] | None:
    data = _read(path)
    if not SMALLEST <= len(data) <= LARGEST or b"\0" in data:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    if max(map(len, text.split("\n"))) > 2000:  # generated or minified
        return None
    key = hashlib.sha256(" ".join(text.split()).encode()).hexdigest()
    return path, key, parts(path, text), text


def collect(
    limit: int, workers: int = 1, folders: Iterable[Path] | None = None, seconds: float = 30.0
) -> Pieces:
    """Collect about `limit` bytes for training, at most 60% of them code, within the time limit.

    Call it before CUDA is initialized, because workers are forked.
    """
    began = time.monotonic()
    pieces, seen, sizes = Pieces(), set(), {"prose": 0, "code": 0}
    # Order by a hash of the path, so that a limit takes a share of every package.
    paths = sorted(
        _paths(roots() if folders is None else folders), key=lambda p: hashlib.md5(p.encode()).digest()
    )
    pool = ProcessPoolExecutor(workers, mp_context=get_context("fork")) if workers > 1 else None
    chunk = 512
    try:
        for start in range(0, len(paths), chunk):
            batch = paths[start : start + chunk]
            done = map(_one, batch) if pool is None else pool.map(_one, batch, chunksize=16)
            for found in done:
                if found is None or found[1] in seen:
                    continue
                seen.add(found[1])
                pieces.files += 1
                held_out = int(found[1][:8], 16) < HELD_OUT * 2**32
                for kind, texts in found[2].items():
                    size = sum(map(len, texts))
                    if held_out:
                        pieces.held_out[kind] += texts
                    elif sizes[kind] + size <= limit * (0.6 if kind == "code" else 1.0):
                        pieces.train[kind] += texts
                        sizes[kind] += size
                if held_out and found[2]["prose"] and found[2]["code"]:
                    pieces.held_out["mixed"].append(found[3])
            if time.monotonic() - began > seconds or sum(sizes.values()) >= limit:
                break
    finally:
        if pool is not None:
            pool.shutdown(cancel_futures=True)
    return pieces


def train_tokenizer(texts: Iterable[str], vocab: int):  # type: ignore[no-untyped-def]
    """Train a byte-level BPE tokenizer; id 0 is <s>, 1 is </s>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer, folder: Path) -> None:  # type: ignore[no-untyped-def]
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", model_max_length=4096
    )
    fast.save_pretrained(folder)
