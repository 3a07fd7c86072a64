"""From a configuration to training rows and validation rows."""

from __future__ import annotations

from typing import Any

from dist_ckpt.trainer.data.config import DataConfig
from dist_ckpt.trainer.data.files import DocumentFile, FileDocuments, find_files, split_point
from dist_ckpt.trainer.data.rows import Documents, RowDataset
from dist_ckpt.trainer.data.synthetic import SyntheticDocuments

Files = tuple[list[DocumentFile], list[DocumentFile]]
"""Those that train and those that validate."""


def build_data(
    config: DataConfig, *, vocab_size: int, seq_len: int, seed: int, files: Files | None = None
) -> tuple[RowDataset, RowDataset]:
    """Finds the documents and splits them. Of files, at most a sample of token ids is read.

    Args:
        config: what to read.
        vocab_size: of the model; a token id beyond it is a DataError, at once or when a row reads it.
        seq_len: tokens per row.
        seed: of the order of training rows and of synthetic documents; at least 0.
        files: what :func:`find_files` has returned, if it was called before.

    Returns:
        Training rows, reshuffled each epoch, and validation rows, in a fixed order. A share of few documents may leave
        validation without rows (``num_rows == 0``): call ``require_rows`` before using them.

    Raises:
        DataError: no files, unreadable or malformed ones, too little for one row.
    """
    documents: list[Documents] = []
    dropped = [0, 0]
    if config.kind == "synthetic":
        numbers = range(config.documents or 4096)
        validates = [split_point(str(number)) < config.validation_fraction for number in numbers]
        longest = config.document_tokens or 2 * seq_len
        for chooses in (False, True):
            chosen = [number for number in numbers if validates[number] is chooses]
            documents.append(SyntheticDocuments(chosen, longest, vocab_size, seed))
    else:
        dtype = "uint8" if config.kind != "tokens" else str(config.dtype or "uint16")
        limit = config.max_document_bytes
        for part, found in enumerate(files or find_files(config)):
            kept = [file for file in found if limit is None or file.size_bytes <= limit]
            dropped[part] = len(found) - len(kept)
            documents.append(FileDocuments(kept, dtype, vocab_size))

    named = config.validation_glob is not None
    remedy = "use more data, shorter rows (train.seq_len) or data.pack=false"
    raise_share = f"raise data.validation_fraction={config.validation_fraction}"
    training, validation = (
        RowDataset(
            documents[part],
            seq_len=seq_len,
            pack=config.pack,
            shuffle_seed=None if part else seed,
            label=f"{config.kind} {'validation' if part else 'training'}",
            dropped=dropped[part],
            remedy=raise_share if part and not named else remedy,
            identity=_identity(config, vocab_size, None if part else seed, documents[part]),
        )
        for part in (0, 1)
    )
    training.require_rows()
    if named:
        validation.require_rows()
    return training, validation


def _identity(config: DataConfig, vocab_size: int, seed: int | None, documents: Documents) -> dict[str, Any]:
    """What a row depends on besides its index, under the names of the options."""
    identity: dict[str, Any] = {"data.kind": str(config.kind), "train.seed": seed}
    if isinstance(documents, FileDocuments):
        identity |= {"data.max_document_bytes": config.max_document_bytes, "files": documents.digest()}
        return identity | ({"data.dtype": str(config.dtype or "uint16")} if config.kind == "tokens" else {})
    made = {"data.documents": config.documents, "data.document_tokens": config.document_tokens}
    return identity | made | {"model.vocab_size": vocab_size}
