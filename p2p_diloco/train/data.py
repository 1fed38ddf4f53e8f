"""Training and held-out sequences from local text, byte-level tokens.

A *corpus* is the ordered concatenation of one source's documents; only its index (paths and sizes) is held
in memory, the bytes are read when a sequence needs them. Which sequences a peer trains on follows from a
hash of its shares key and an index, so nobody hands out work and peers need not even have equal files.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import os
import sysconfig
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from p2p_diloco.config import DataConfig, SourceConfig
from p2p_diloco.errors import DataError

_CACHE_BYTES = 64 * 1024 * 1024
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "node_modules"})
_UNIT = 1 << 64

Tokens = NDArray[np.int64]


class Corpus:
    """Ordered documents seen as one byte string; a document is (path, start, stop) in its file's text.

    Bytes are read from disk where they are needed. The texts of .jsonl files, which have to be parsed, are
    cached up to 64 MiB (a larger one is cached alone).
    """

    def __init__(self, parts: Sequence[tuple[Path, int, int]]) -> None:
        self._parts = [part for part in parts if part[2] > part[1]]
        self._ends: list[int] = []
        total = 0
        for _, start, stop in self._parts:
            total += stop - start
            self._ends.append(total)
        self._cache: OrderedDict[Path, bytes] = OrderedDict()
        self._cached_bytes = 0
        self.total_bytes = total

    def window(self, position: int, length: int) -> bytes:
        """``length`` bytes from ``position`` on; it may span documents. DataError if a file has shrunk."""
        if position < 0 or position + length > self.total_bytes:
            raise DataError(f"{length} bytes at {position} are outside a corpus of {self.total_bytes}")
        result = bytearray()
        index = bisect.bisect_right(self._ends, position)
        while len(result) < length:
            path, start, stop = self._parts[index]
            begin = position + len(result) - (self._ends[index] - (stop - start)) + start
            wanted = min(stop - begin, length - len(result))
            piece = self._read(path, begin, wanted)
            if len(piece) != wanted:
                raise DataError(f"{path} has changed since the trainer started")
            result += piece
            index += 1
        return bytes(result)

    def _read(self, path: Path, begin: int, length: int) -> bytes:
        try:
            if path.suffix == ".jsonl":
                return self._parsed(path)[begin : begin + length]
            with path.open("rb") as file:
                file.seek(begin)
                return file.read(length)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}") from None

    def _parsed(self, path: Path) -> bytes:
        cached = self._cache.get(path)
        if cached is not None:
            self._cache.move_to_end(path)
            return cached
        text = _jsonl_text(path)
        self._cache[path] = text
        self._cached_bytes += len(text)
        while self._cached_bytes > _CACHE_BYTES and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= len(dropped)
        return text


class DataMix:
    """Weighted mix of sources: training sequences by shares key, and the fixed held-out ones.

    Raises DataError if a source is missing, or has less than one sequence to train on or to hold out.
    """

    def __init__(self, config: DataConfig, paths: Mapping[str, Path], seq_len: int) -> None:
        self._length = seq_len + 1
        self._train: list[Corpus] = []
        self._held_out: list[Corpus] = []
        for source in config.sources:
            train, held_out = _open_source(source, paths, config.holdout_fraction)
            for corpus, use in ((train, "train on"), (held_out, "hold out")):
                if corpus.total_bytes < self._length:
                    raise DataError(
                        f"data source {source.name} has {corpus.total_bytes} bytes to {use}, "
                        f"less than one sequence of {self._length}"
                    )
            self._train.append(train)
            self._held_out.append(held_out)
        total = sum(source.weight for source in config.sources)
        self._bounds = np.cumsum([source.weight / total for source in config.sources]).tolist()

    def training_tokens(self, shares_key: bytes, indices: Iterable[int]) -> Tokens:
        """Sequences of a share, int64 [len(indices), seq_len + 1]; equal for equal keys and files."""
        return self._tokens(b"p2p-diloco/train/" + shares_key, indices, self._train)

    def held_out_tokens(self, indices: Iterable[int]) -> Tokens:
        """The held-out sequences with these indices, int64 [len(indices), seq_len + 1]."""
        return self._tokens(b"p2p-diloco/held-out/", indices, self._held_out)

    def _tokens(self, key: bytes, indices: Iterable[int], corpora: Sequence[Corpus]) -> Tokens:
        rows = []
        for index in indices:
            digest = hashlib.sha256(key + index.to_bytes(8, "big")).digest()
            corpus = corpora[self._source_of(int.from_bytes(digest[:8], "big") / _UNIT)]
            places = corpus.total_bytes - self._length + 1
            position = int.from_bytes(digest[8:24], "big") % places
            rows.append(np.frombuffer(corpus.window(position, self._length), dtype=np.uint8))
        if not rows:
            return np.zeros((0, self._length), dtype=np.int64)
        return np.stack(rows).astype(np.int64)

    def _source_of(self, fraction: float) -> int:
        return min(bisect.bisect_right(self._bounds, fraction), len(self._bounds) - 1)


def is_held_out(name: str, fraction: float) -> bool:
    """True for about ``fraction`` of all names; the same on every machine."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") / _UNIT < fraction


def _open_source(source: SourceConfig, paths: Mapping[str, Path], fraction: float) -> tuple[Corpus, Corpus]:
    suffixes: tuple[str, ...]
    if source.kind == "stdlib":
        root, suffixes = Path(sysconfig.get_paths()["stdlib"]), (".py",)
    else:
        if source.name not in paths:
            raise DataError(
                f"data source {source.name} has no folder here: set peer.data_paths.{source.name}"
            )
        root, suffixes = Path(paths[source.name]), (".txt", ".py", ".jsonl")
    if not root.is_dir():
        raise DataError(f"data source {source.name}: {root} is not a folder")
    files = _files(root, suffixes)
    if not files:
        raise DataError(f"data source {source.name}: no {', '.join(suffixes)} files under {root}")
    train, held_out = _split(files, fraction)
    return Corpus(train), Corpus(held_out)


def _files(root: Path, suffixes: tuple[str, ...]) -> list[tuple[str, Path, int]]:
    """(relative name, path, text bytes) of all files with these suffixes, by name; empty files dropped."""
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        for name in names:
            path = Path(folder, name)
            if path.suffix in suffixes and path.is_file():
                found.append((path.relative_to(root).as_posix(), path))
    sized = [(name, path, _text_bytes(path)) for name, path in sorted(found)]
    return [entry for entry in sized if entry[2]]


def _text_bytes(path: Path) -> int:
    try:
        # The text of .jsonl differs from the file, so it has to be read once to know its length.
        return len(_jsonl_text(path)) if path.suffix == ".jsonl" else path.stat().st_size
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def _jsonl_text(path: Path) -> bytes:
    """The "text" fields of a file's lines, one line break between them."""
    texts = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            raise DataError(f"{path}, line {number}: not JSON") from None
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(text, str):
            raise DataError(f'{path}, line {number}: no "text" field')
        texts.append(text.encode("utf-8", "replace"))
    return b"\n".join(texts)


def _split(
    files: Sequence[tuple[str, Path, int]], fraction: float
) -> tuple[list[tuple[Path, int, int]], list[tuple[Path, int, int]]]:
    """Documents to train on and to hold out. If hashing leaves one side empty, which happens with few
    files, the end of every file is held out instead."""
    train = [(path, 0, size) for name, path, size in files if not is_held_out(name, fraction)]
    held_out = [(path, 0, size) for name, path, size in files if is_held_out(name, fraction)]
    if train and held_out:
        return train, held_out
    cuts = [(path, size - max(1, int(size * fraction)), size) for _, path, size in files]
    return [(path, 0, cut) for path, cut, _ in cuts], [(path, cut, size) for path, cut, size in cuts]
