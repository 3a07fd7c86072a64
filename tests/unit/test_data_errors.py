"""Every message about what a user can do wrong with data."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_ckpt.errors import ConfigError, DataError
from dist_ckpt.trainer.data import DataConfig, RowDataset, build_data
from dist_ckpt.trainer.data.files import split_point


def build(seq_len: int = 8, vocab_size: int = 256, seed: int = 0, **options: Any) -> tuple[RowDataset, RowDataset]:
    return build_data(DataConfig(**options), vocab_size=vocab_size, seq_len=seq_len, seed=seed)


def test_over_long_documents_are_dropped_and_counted(tmp_path: Path) -> None:
    for length in (10, 20, 30, 1000, 2000):
        (tmp_path / f"{length}.txt").write_text("x" * length)
    train, validation = build(
        kind="text",
        glob=f"{tmp_path}/*.txt",
        max_document_bytes=30,
        pack=False,
        validation_fraction=0,
        seq_len=5,
    )
    assert (train.num_rows, train.dropped, validation.dropped) == (3, 2, 0)
    assert "2 longer documents dropped" in train.description and "\n" not in train.description
    with pytest.raises(DataError, match=r"too little for one row .*5 longer documents dropped"):
        build(kind="text", glob=f"{tmp_path}/*.txt", max_document_bytes=3, validation_fraction=0)


def test_an_empty_glob_names_itself_and_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"data.glob: 'no/\*.txt' matches nothing in {re.escape(str(tmp_path))}"):
        build(kind="text", glob="no/*.txt")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r"'folder' matches only folders, 1 of them; add '/\*\*/\*'"):
        build(kind="text", glob="folder")
    (tmp_path / "a.txt").write_text("long enough for a row")
    with pytest.raises(DataError, match=r"data.validation_glob: 'no' matches nothing"):
        build(kind="text", glob="*.txt", validation_glob="no")


def test_an_unreadable_file_is_named_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("text " * 10)
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"cannot read .*gone.txt: No such file"):
        build(kind="text", glob=f"{tmp_path}/*.txt")


def test_a_file_without_permission_is_named_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = tmp_path / "locked.txt"
    locked.write_text("text")

    def refuse(path: str, mode: str) -> None:  # root may read whatever its mode
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DataError, match=r"cannot read .*locked.txt: Permission denied"):
        build(kind="text", glob=f"{tmp_path}/*.txt")


def test_a_pipe_is_no_document(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")  # opening it would wait for a writer
    with pytest.raises(DataError, match=r"matches"):
        build(kind="text", glob=f"{tmp_path}/*.txt")


def test_a_file_that_changes_during_the_run_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("text " * 10)
    rows = build(kind="text", glob=str(path), validation_fraction=0)[0]
    path.write_text("other")
    with pytest.raises(DataError, match=r"a.txt had 50 tokens at the start, now 5"):
        rows.sample(0)
    path.unlink()
    with pytest.raises(DataError, match=r"cannot read .*a.txt"):
        rows.sample(0)


def test_a_size_that_is_no_multiple_of_a_token(tmp_path: Path) -> None:
    (tmp_path / "odd.bin").write_bytes(b"12345")
    with pytest.raises(DataError, match=r"odd.bin has 5 bytes, not a multiple of the 4 of a uint32 token"):
        build(kind="tokens", glob=f"{tmp_path}/odd.bin", dtype="uint32", validation_fraction=0)


def test_too_little_text_for_one_row(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("short")
    with pytest.raises(DataError, match=r"too little for one row .*5 tokens.*rows of 8.*train.seq_len"):
        build(kind="text", glob=f"{tmp_path}/a.txt", validation_fraction=0)
    (tmp_path / "b.txt").write_text("long enough for a row")
    with pytest.raises(DataError, match=r"too little for one row .*text validation"):
        build(kind="text", glob=f"{tmp_path}/b.txt", validation_glob=f"{tmp_path}/a.txt")


def test_a_split_that_leaves_nothing_to_train_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("long enough for a row")
    share = split_point("a.txt") + 1e-6
    with pytest.raises(DataError, match=r"picks each of the 1 files .*set it to 0"):
        build(kind="text", glob=f"{tmp_path}/a.txt", validation_fraction=share)
    with pytest.raises(DataError, match=r"matches every file of data.glob"):
        build(kind="text", glob=f"{tmp_path}/a.txt", validation_glob=f"{tmp_path}/*")


def test_a_vocabulary_too_small_for_the_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 10)
    with pytest.raises(DataError, match=r"a.txt has token id 116 at offset 0 .* but model.vocab_size is 100"):
        build(kind="text", glob=f"{tmp_path}/*", validation_fraction=0, vocab_size=100)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "txt"}, "data.kind=txt: .*did you mean 'text'.* Valid: stdlib, synthetic, text, tokens"),
        (
            {"glob": "*"},
            "data.glob=.*: is an option of text and tokens, not of stdlib, whose options are max",
        ),
        ({"validation_glob": "*"}, "data.validation_glob"),
        ({"dtype": "uint16"}, "data.dtype=uint16: is an option of tokens, not of stdlib"),
        ({"documents": 3}, "data.documents=3: is an option of synthetic"),
        ({"kind": "text", "glob": "*", "dtype": "uint16"}, "data.dtype=uint16: is an option of tokens"),
        ({"kind": "tokens", "glob": "*", "document_tokens": 9}, "data.document_tokens=9"),
        ({"kind": "synthetic", "max_document_bytes": 9}, "stdlib and text and tokens, not of synthetic"),
        ({"kind": "text"}, "data.glob: data=text needs one"),
        ({"kind": "tokens", "glob": ""}, "data.glob: data=tokens needs one"),
        ({"kind": "text", "glob": "*", "validation_glob": ""}, "data.validation_glob: is empty"),
        ({"kind": "tokens", "glob": "*", "dtype": "uint61"}, "did you mean 'uint16'"),
        ({"validation_fraction": 1.0}, "data.validation_fraction=1.0: must be"),
        ({"validation_fraction": -0.1}, "data.validation_fraction=-0.1: must be"),
        (
            {"kind": "text", "glob": "*", "validation_glob": "*", "validation_fraction": 0.1},
            "set one of the two",
        ),
        ({"max_document_bytes": 0}, "data.max_document_bytes=0: must be at least 1"),
        ({"kind": "synthetic", "documents": 0}, "data.documents=0: must be at least 1"),
        ({"kind": "synthetic", "document_tokens": 1}, "data.document_tokens=1: must be at least 2"),
    ],
)
def test_an_option_that_is_wrong_or_has_no_use_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DataConfig(**options)


def test_tokens_that_are_wider_than_told_are_found_at_the_start(tmp_path: Path) -> None:
    np.arange(1, 200, dtype="<u4").tofile(tmp_path / "wide.bin")
    options = {"kind": "tokens", "glob": f"{tmp_path}/wide.bin", "validation_fraction": 0}
    with pytest.raises(DataError, match=r"every other token of .*wide.bin is 0.*data.dtype=uint16; valid"):
        build(**options)
    assert build(**options, dtype="uint32")[0].num_rows == 24
