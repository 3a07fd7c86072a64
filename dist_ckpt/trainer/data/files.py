"""Documents in files: in an order that every rank agrees on, and read only where a row needs them."""

from __future__ import annotations

import functools
import glob as globbing
import hashlib
import os
import stat
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dist_ckpt.errors import DataError
from dist_ckpt.trainer.data.config import DataConfig


@dataclass(frozen=True)
class DocumentFile:
    """One file: ``path`` opens it; ``name`` (relative, with forward slashes) decides its position and split."""

    path: str
    name: str
    size_bytes: int


def split_point(name: str) -> float:
    """A number in [0, 1) that depends on the name alone; documents below the validation fraction are held out."""
    return int.from_bytes(hashlib.blake2b(os.fsencode(name), digest_size=6).digest(), "big") / 2**48


def stdlib_files() -> list[DocumentFile]:
    """The ``.py`` files of the running Python's standard library except its tests, about 12 MB, sorted by name.

    Raises:
        DataError: this Python has no such folder (a frozen or zipped one), or a file cannot be read.
    """
    root = sysconfig.get_paths()["stdlib"]
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skipped]
        paths += [os.path.join(folder, name) for name in names if name.endswith(".py")]
    files = _documents(paths, root)
    if not files:
        raise DataError(f"data=stdlib: no .py file in {root}, where this Python's library should be; use data=text")
    return files


def glob_files(pattern: str, option: str) -> list[DocumentFile]:
    """The regular files that a glob matches, sorted by name; ``**`` is recursive, hidden files need a dot.

    Names are relative to the glob's last folder without a wildcard, so moving a whole corpus changes no split.

    Raises:
        DataError: it matches no file, or one that cannot be read.
    """
    expanded = os.path.expanduser(pattern)
    parts = Path(expanded).parts
    plain = next((i for i, part in enumerate(parts) if any(sign in part for sign in "*?[")), len(parts) - 1)
    matches = globbing.glob(expanded, recursive=True)
    files = _documents(matches, os.path.join(*parts[:plain]) if plain > 0 else "")
    if not files:
        found = f"only folders, {len(matches)} of them; add '/**/*'" if matches else "nothing"
        where = "" if os.path.isabs(expanded) else f" in {os.getcwd()}"
        raise DataError(f"{option}: {pattern!r} matches {found}{where}")
    return files


def find_files(config: DataConfig) -> tuple[list[DocumentFile], list[DocumentFile]]:
    """The training and the validation files, for any kind of data except ``synthetic``. Needs no torch.

    Raises:
        DataError: a pattern matches nothing, a file cannot be read, or none is left to train on.
    """
    if config.kind == "stdlib":
        files = stdlib_files()
    else:
        assert config.glob is not None, "DataConfig checks it"
        files = glob_files(config.glob, "data.glob")
    if config.validation_glob is not None:
        validation = glob_files(config.validation_glob, "data.validation_glob")
        taken = {os.path.realpath(file.path) for file in validation}
        training = [file for file in files if os.path.realpath(file.path) not in taken]
        if not training:
            raise DataError(
                f"data.validation_glob: {config.validation_glob!r} matches every file of "
                f"data.glob={config.glob!r}, which leaves none to train on"
            )
        return training, validation
    share = config.validation_fraction
    training = [file for file in files if split_point(file.name) >= share]
    if not training:
        raise DataError(
            f"data.validation_fraction={share}: picks each of the {len(files)} files (by its hashed path) "
            "and leaves none to train on; set it to 0, or name data.validation_glob"
        )
    return training, [file for file in files if split_point(file.name) < share]


def _documents(paths: list[str], root: str) -> list[DocumentFile]:
    files = {}  # keyed by name, as one file can match a glob with two ** twice
    for path in paths:
        try:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode):
                continue  # a folder, or a pipe whose opening would wait forever
            with open(path, "rb"):  # finds out now, not in the middle of a run
                pass
        except OSError as error:
            raise DataError(f"data: cannot read {path}: {error.strerror}") from error
        name = Path(os.path.relpath(path, root or ".")).as_posix()
        files[name] = DocumentFile(path, name, status.st_size)
    return [files[name] for name in sorted(files)]


class FileDocuments:
    """Files of little-endian unsigned integers: text is ``uint8``, token ids are ``uint16`` or ``uint32``.

    Args:
        files: the documents, in order.
        dtype: the type of one token.
        vocab_size: ids at or beyond it are errors, found at once in a sample, else when a row reads them.

    Raises:
        DataError: a file's size is not a multiple of a token's, or a sample has ids beyond the vocabulary or looks like
            wider tokens.
    """

    def __init__(self, files: list[DocumentFile], dtype: str, vocab_size: int) -> None:
        self._files = files
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._vocab_size = vocab_size
        item = self._dtype.itemsize
        for file in files:
            if file.size_bytes % item:
                raise DataError(
                    f"data: {file.path} has {file.size_bytes} bytes, not a multiple of the {item} of a "
                    f"{dtype} token; is data.dtype right?"
                )
        self.lengths = np.array([file.size_bytes // item for file in files], dtype=np.int64)
        # A mapping holds a file descriptor, so only this many stay open.
        self._map = functools.lru_cache(maxsize=64)(self._open)
        if np.iinfo(self._dtype).max >= vocab_size:
            self._check_sample()

    def digest(self) -> str:
        """A hash of the files' relative names and sizes: equal if, in all likelihood, the documents are."""
        digest = hashlib.blake2b(digest_size=8)
        for file in self._files:
            digest.update(os.fsencode(file.name) + b"\0%d\0" % file.size_bytes)
        return digest.hexdigest()

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop`` (exclusive) of a document: (stop - start,) int64.

        Raises:
            DataError: the file has changed or gone, or has a token id beyond the vocabulary.
        """
        tokens = np.asarray(self._map(document)[start:stop], dtype=np.int64)
        if tokens.size and tokens.max() >= self._vocab_size:
            bad = int(np.argmax(tokens >= self._vocab_size))
            raise DataError(
                f"data: {self._files[document].path} has token id {tokens[bad]} at offset {start + bad} "
                f"(in tokens), but model.vocab_size is {self._vocab_size}; is that, or data.dtype, wrong?"
            )
        return tokens

    def _open(self, document: int) -> np.ndarray:
        path = self._files[document].path
        try:
            tokens = np.memmap(path, dtype=self._dtype, mode="r")
        except (OSError, ValueError) as error:  # ValueError: cut to no bytes, or in the middle of a token
            raise DataError(f"data: cannot read {path}: {error}") from error
        if len(tokens) != self.lengths[document]:
            raise DataError(f"data: {path} had {self.lengths[document]} tokens at the start, now {len(tokens)}")
        return tokens

    def _check_sample(self) -> None:
        """Reads start, middle and end of up to 16 files: a wrong dtype or tokenizer shows now, not hours later."""
        full = np.flatnonzero(self.lengths)
        for document in full[:: max(1, len(full) // 16)][:16].tolist():
            length = int(self.lengths[document])
            for start in {0, length // 2, max(0, length - 4096)}:
                ids = self.read(document, start, min(start + 4096, length))
                if len(ids) >= 64 and ids.any() and not (ids[::2].any() and ids[1::2].any()):
                    raise DataError(
                        f"data: every other token of {self._files[document].path} is 0, as if wider tokens were "
                        f"read as data.dtype={self._dtype.name}; valid: uint16, uint32"
                    )
