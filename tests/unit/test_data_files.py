"""Finding, splitting and reading files."""

from __future__ import annotations

import hashlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_ckpt.errors import DataError
from dist_ckpt.trainer.data import DataConfig, RowDataset, build_data
from dist_ckpt.trainer.data.files import FileDocuments, glob_files, split_point, stdlib_files


def build(seq_len: int = 8, vocab_size: int = 256, seed: int = 0, **options: Any) -> tuple[RowDataset, RowDataset]:
    return build_data(DataConfig(**options), vocab_size=vocab_size, seq_len=seq_len, seed=seed)


def row_set(rows: RowDataset) -> set[bytes]:
    return {rows.sample(index)[0].numpy().tobytes() for index in range(rows.num_rows)}


def write_texts(folder: Path, count: int) -> None:
    for number in range(count):
        path = folder / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"document number {number} " * 3)


# ---- the default ----


def test_default_is_the_standard_library_without_its_tests() -> None:
    files = stdlib_files()
    names = [file.name for file in files]
    assert names == sorted(names) and len(set(names)) == len(names)
    assert {"abc.py", "json/decoder.py", "dataclasses.py"} <= set(names)
    assert all(name.endswith(".py") for name in names)
    assert not [name for name in names if {"site-packages", "test", "tests"} & set(name.split("/"))]
    assert sum(file.size_bytes for file in files) > 4_000_000
    train, validation = build(seq_len=128)
    assert train.num_rows > 20_000 and validation.num_rows > 500  # enough for 60 steps of 8 ranks, many times
    ids, labels = next(row for row in map(train.sample, range(100)) if row[1].min() >= 0)
    text = bytes([*ids.tolist(), int(labels[-1])])  # one document's bytes and the one that follows
    assert any(text in Path(file.path).read_bytes() for file in files)


def test_starting_reads_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    # Eight ranks that each read twelve megabytes at the same moment would be slow on a small machine.
    monkeypatch.setattr(FileDocuments, "read", lambda *_: pytest.fail("read a document"))
    assert build(seq_len=128)[0].num_rows > 0


def fingerprint() -> str:
    digest = hashlib.sha256()
    for rows in build(seq_len=64, seed=7):
        for index in (0, 1, 100, rows.num_rows, 10**7):
            for tensor in rows.sample(index):
                digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def test_ranks_agree_whatever_the_listing_order(monkeypatch: pytest.MonkeyPatch) -> None:
    as_is, walk = fingerprint(), os.walk

    def backwards(top: str) -> Iterator[tuple[str, list[str], list[str]]]:
        for folder, folders, names in walk(top):
            folders.sort(reverse=True)
            yield folder, folders, sorted(names, reverse=True)

    monkeypatch.setattr(os, "walk", backwards)
    assert fingerprint() == as_is


def test_ranks_agree_whatever_the_hash_seed() -> None:
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    run = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import fingerprint; print(fingerprint())"],
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=True,
    )
    assert run.stdout.strip() == fingerprint()


# ---- the split ----


def test_adding_a_file_moves_no_other_between_training_and_validation(tmp_path: Path) -> None:
    options: dict[str, Any] = {"kind": "text", "glob": f"{tmp_path}/**/*.txt", "pack": False}
    write_texts(tmp_path, 40)
    train, validation = build(validation_fraction=0.3, seq_len=64, **options)
    assert train.num_rows + validation.num_rows == 40 and validation.num_rows > 0
    write_texts(tmp_path, 80)
    train_more, validation_more = build(validation_fraction=0.3, seq_len=64, **options)
    assert train_more.num_rows + validation_more.num_rows == 80
    assert row_set(train) < row_set(train_more) and row_set(validation) < row_set(validation_more)


def test_split_follows_the_path_below_the_glob_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("here", "there/deeper"):
        write_texts(tmp_path / place, 20)
    monkeypatch.chdir(tmp_path / "here")
    relative = [file.name for file in glob_files("**/*.txt", "data.glob")]
    assert relative == [file.name for file in glob_files(f"{tmp_path}/there/deeper/**/*.txt", "data.glob")]
    assert relative == [file.name for file in glob_files("../here/**/*.txt", "data.glob")]
    assert relative[0] == "part0/0.txt"
    assert [file.name for file in glob_files("part0/0.txt", "data.glob")] == ["0.txt"]


def test_split_share_is_about_the_fraction_asked_for() -> None:
    points = [split_point(f"folder/{number}.txt") for number in range(4000)]
    assert all(0 <= point < 1 for point in points)
    assert abs(sum(point < 0.05 for point in points) / 4000 - 0.05) < 0.02
    assert split_point("abc.py") == split_point("abc.py") != split_point("abd.py")


def test_validation_files_are_never_trained_on(tmp_path: Path) -> None:
    write_texts(tmp_path, 30)
    train, validation = build(
        kind="text",
        glob=f"{tmp_path}/**/*.txt",
        validation_glob=f"{tmp_path}/part1/*",
        pack=False,
        seq_len=64,
    )
    assert (train.num_rows, validation.num_rows) == (20, 10)
    assert not row_set(train) & row_set(validation)


def test_one_file_may_have_no_validation_and_says_so_when_it_is_needed(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("to be or not to be " * 10)
    train, validation = build(kind="text", glob=f"{tmp_path}/corpus.txt")
    assert train.num_rows > 0 and validation.num_rows == 0
    with pytest.raises(DataError, match=r"text validation.*raise data.validation_fraction=0.05"):
        validation.require_rows()


# ---- tokens ----


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_tokens_are_read_as_written(tmp_path: Path, dtype: str) -> None:
    vocab_size = 60_000 if dtype == "uint16" else 120_000
    tokens = np.random.default_rng(0).integers(vocab_size, size=999)
    tokens.astype(f"<{dtype[0]}{int(dtype[4:]) // 8}").tofile(tmp_path / "train.bin")
    rows = build(
        kind="tokens",
        glob=f"{tmp_path}/*.bin",
        dtype=dtype,
        vocab_size=vocab_size,
        seq_len=100,
        validation_fraction=0,
    )[0]
    assert rows.num_rows == 9
    got = {tuple(rows.sample(index)[0].tolist()) for index in range(9)}
    assert got == {tuple(tokens[at : at + 100].tolist()) for at in range(0, 900, 100)}
    labels = {tuple(rows.sample(index)[1].tolist()) for index in range(9)}
    assert labels == {tuple(tokens[at + 1 : at + 101].tolist()) for at in range(0, 900, 100)}


def test_a_huge_token_file_is_read_in_part_only(tmp_path: Path) -> None:
    path = tmp_path / "huge.bin"
    with path.open("wb") as file:
        file.truncate(64 << 30)  # sparse: 64 GiB of token 0
    documents = FileDocuments(glob_files(str(path), "data.glob"), "uint16", 10)
    assert documents.read(0, (32 << 30) - 4, 32 << 30).tolist() == [0, 0, 0, 0]


def test_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number:03}.txt").write_text(f"{number:03}")
    documents = FileDocuments(glob_files(f"{tmp_path}/*", "data.glob"), "uint8", 256)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, len(os.listdir("/proc/self/fd")) + 100), hard))
    try:
        assert all(bytes(documents.read(n, 0, 3).tolist()) == f"{n:03}".encode() for n in range(300))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_token_beyond_the_vocabulary_is_found_at_the_start_or_when_read(tmp_path: Path) -> None:
    tokens: np.ndarray = np.zeros(40_000, dtype="<u2")
    tokens[5] = 500
    tokens.tofile(tmp_path / "early.bin")
    with pytest.raises(DataError, match=r"early.bin has token id 500 at offset 5 .*vocab_size is 500"):
        build(kind="tokens", glob=f"{tmp_path}/early.bin", vocab_size=500, validation_fraction=0)
    tokens[[5, 9001]] = [0, 65_535]
    tokens.tofile(tmp_path / "late.bin")
    rows = build(kind="tokens", glob=f"{tmp_path}/late.bin", vocab_size=500, validation_fraction=0)[0]
    with pytest.raises(DataError, match=r"late.bin has token id 65535 at offset 9001"):
        for index in range(rows.num_rows):
            rows.sample(index)


def test_a_label_beyond_the_row_is_checked_too(tmp_path: Path) -> None:
    tokens: np.ndarray = np.zeros(40_000, dtype="<u2")
    tokens[9000] = 500
    tokens.tofile(tmp_path / "a.bin")
    documents = FileDocuments(glob_files(f"{tmp_path}/a.bin", "data.glob"), "uint16", 500)
    rows = RowDataset(documents, seq_len=1000, pack=True, shuffle_seed=None, label="tokens")
    with pytest.raises(DataError, match=r"offset 9000"):
        rows.sample(8)  # tokens 8000 to 8999, whose last target is token 9000
