"""Documents as rows of fixed length, in an order that depends on the seed alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from dist_ckpt.batch import IGNORE_INDEX, Batch
from dist_ckpt.errors import DataError


class Documents(Protocol):
    """Sequences of token ids that can be read in part."""

    lengths: np.ndarray
    """(documents,) int64, in tokens."""

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop`` (exclusive) of a document: (stop - start,) int64."""
        ...


class RowDataset:
    """An endless, random-access stream of rows of ``seq_len`` tokens.

    Packed, the documents are joined in order and cut into rows: a row may start inside a document and hold several,
    and a remainder shorter than a row is unused. Unpacked, each document is a row, cut off at ``seq_len`` or padded
    with token 0. Either way, a label is the next token of the *same* document (which may lie beyond the row's end);
    a document's last token and padding have none. Documents of fewer than two tokens have no targets and are left out.

    Args:
        documents: what to read.
        seq_len: tokens per row.
        pack: see above.
        shuffle_seed: shuffles the rows of each epoch by (seed, epoch); None keeps their order in every epoch.
        label: start of the description.
        dropped: documents left out because of their length, for the description.
        remedy: what to do if there is no row, for the message.
        identity: what else the rows depend on, for ``fingerprint``.
    """

    def __init__(
        self,
        documents: Documents,
        *,
        seq_len: int,
        pack: bool,
        shuffle_seed: int | None,
        label: str,
        dropped: int = 0,
        remedy: str = "",
        identity: Mapping[str, Any] | None = None,
    ) -> None:
        assert seq_len >= 1
        self._documents = documents
        self.seq_len = seq_len
        """Tokens a row."""
        self._pack = pack
        self._shuffle_seed = shuffle_seed
        self._used = np.flatnonzero(documents.lengths > 1)
        self._ends = np.cumsum(documents.lengths[self._used])  # where each document ends in the joined stream
        tokens = int(self._ends[-1]) if len(self._ends) else 0
        self._order: tuple[int, np.ndarray] | None = None  # (epoch, its permutation)
        self.num_tokens = tokens
        """Tokens in all documents that have a target."""
        self.num_rows = tokens // seq_len if pack else len(self._used)
        """Rows per epoch; 0 only for validation."""
        self.dropped = dropped
        """Documents left out because of ``data.max_document_bytes``."""
        held = f"{len(self._used):,} documents with {tokens:,} tokens"
        self.description = (
            f"{label}: {held}, {'packed in' if pack else 'one each in'} {self.num_rows:,} rows of {seq_len}"
        )
        """One line for the console."""
        if dropped:
            self.description += f", {dropped:,} longer documents dropped"
        self._remedy = remedy
        self.fingerprint: Mapping[str, Any] = {
            **(identity or {}),
            "train.seq_len": seq_len,
            "data.pack": pack,
            "rows": self.num_rows,
            "tokens": self.num_tokens,
        }
        """JSON data that is equal for two datasets if, in all likelihood, each index means the same row in both."""

    def require_rows(self) -> None:
        """Checks that there is at least one row; :func:`build_data` has checked the training rows.

        Raises:
            DataError: there is none.
        """
        if not self.num_rows:
            raise DataError(f"data: too little for one row ({self.description}); {self._remedy}")

    def sample(self, index: int) -> tuple[Tensor, Tensor]:
        """Row of global sample index ``index`` >= 0: input ids and labels, (seq_len,) int64 each.

        Raises:
            DataError: there are no rows, or the row cannot be read.
        """
        assert index >= 0
        self.require_rows()
        row = self._row_at(*divmod(index, self.num_rows))
        ids: np.ndarray = np.zeros(self.seq_len, dtype=np.int64)
        labels: np.ndarray = np.full(self.seq_len, IGNORE_INDEX, dtype=np.int64)
        for at, document, start, stop in self._spans(row):
            length = int(self._documents.lengths[document])
            tokens = self._documents.read(document, start, min(stop + 1, length))
            ids[at : at + stop - start] = tokens[: stop - start]
            labels[at : at + len(tokens) - 1] = tokens[1:]
        return torch.from_numpy(ids), torch.from_numpy(labels)

    def _spans(self, row: int) -> list[tuple[int, int, int, int]]:
        """The parts of a row: (position in the row, document, its first token, its last token + 1)."""
        if not self._pack:
            document = int(self._used[row])
            return [(0, document, 0, min(self.seq_len, int(self._documents.lengths[document])))]
        spans = []
        begin, end = row * self.seq_len, (row + 1) * self.seq_len
        at, slot = begin, int(np.searchsorted(self._ends, begin, side="right"))
        while at < end:
            document = int(self._used[slot])
            document_end = int(self._ends[slot])
            document_begin = document_end - int(self._documents.lengths[document])
            stop = min(end, document_end)
            spans.append((at - begin, document, at - document_begin, stop - document_begin))
            at, slot = stop, slot + 1
        return spans

    def _row_at(self, epoch: int, position: int) -> int:
        if self._shuffle_seed is None:
            return position
        if self._order is None or self._order[0] != epoch:
            rows: np.ndarray = np.arange(self.num_rows, dtype=np.int64 if self.num_rows >> 32 else np.uint32)
            self._order = (epoch, np.random.default_rng([self._shuffle_seed, epoch]).permutation(rows))
        return int(self._order[1][position])


def micro_batch(rows: RowDataset, start: int, rank: int, micro_batch: int) -> Batch:
    """One rank's rows of the micro-batch that starts at global sample ``start``: :func:`micro_batches` of one."""
    return micro_batches(rows, start, rank, 1, micro_batch, 1)[0]


def micro_batches(
    rows: RowDataset, start: int, rank: int, world_size: int, micro_batch: int, count: int
) -> list[Batch]:
    """One rank's rows of the ``count`` micro-batches that start at global sample ``start``.

    In each micro-batch, rank r takes the ``micro_batch`` samples from ``r * micro_batch`` on, so any number of ranks
    together read the same samples. ``rank`` and ``world_size`` count data-parallel ranks.

    Returns:
        ``input_ids`` and ``labels``, each (micro_batch, seq_len) int64; a label is the target of the token at
        its own position, or :data:`IGNORE_INDEX`.

    Raises:
        RuntimeError: they do not fit into memory; raised before any row is read.
    """
    shape = (count, micro_batch, rows.seq_len)
    ids, labels = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)
    for number in range(count):
        first = start + (number * world_size + rank) * micro_batch
        for row in range(micro_batch):
            ids[number, row], labels[number, row] = rows.sample(first + row)
    # Copies: a graph that keeps one micro-batch's rows would otherwise keep, and be counted with, those of all.
    return [{"input_ids": ids[number].clone(), "labels": labels[number].clone()} for number in range(count)]
