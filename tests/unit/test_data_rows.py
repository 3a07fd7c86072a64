"""Rows against a slow, obvious model of them: every token of every document, joined and cut by hand."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_ckpt.batch import IGNORE_INDEX
from dist_ckpt.errors import DataError
from dist_ckpt.trainer.data import DataConfig, RowDataset, build_data, micro_batch, micro_batches
from dist_ckpt.trainer.data.synthetic import SyntheticDocuments


class Lists:
    """Documents held in memory."""

    def __init__(self, documents: list[list[int]]) -> None:
        self.documents = documents
        self.lengths = np.array([len(d) for d in documents], dtype=np.int64)

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        assert 0 <= start <= stop <= len(self.documents[document])
        return np.array(self.documents[document][start:stop], dtype=np.int64)


def ragged(case: int) -> list[list[int]]:
    rng = random.Random(case)
    lengths = [rng.choice([0, 1, 2, 3, rng.randrange(60)]) for _ in range(rng.randrange(2, 30))]
    return [[rng.randrange(256) for _ in range(length)] for length in [*lengths, 40]]


def expected_rows(documents: list[list[int]], seq_len: int, pack: bool) -> list[tuple[list[int], list[int]]]:
    pairs = [list(zip(d, [*d[1:], IGNORE_INDEX], strict=True)) for d in documents if len(d) > 1]
    if pack:
        stream = [pair for document in pairs for pair in document]
        cut = [stream[at : at + seq_len] for at in range(0, len(stream) - seq_len + 1, seq_len)]
    else:
        cut = [(document + [(0, IGNORE_INDEX)] * seq_len)[:seq_len] for document in pairs]
    return [([token for token, _ in row], [label for _, label in row]) for row in cut]


def rows_of(documents: list[list[int]], seq_len: int, pack: bool = True, seed: int | None = None) -> RowDataset:
    return RowDataset(Lists(documents), seq_len=seq_len, pack=pack, shuffle_seed=seed, label="lists")


def listed(rows: RowDataset, indices: range) -> list[tuple[list[int], list[int]]]:
    return [tuple(tensor.tolist() for tensor in rows.sample(index)) for index in indices]  # type: ignore[misc]


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("seq_len", [1, 2, 7, 16, 39])
def test_rows_are_the_documents_joined_and_cut_or_padded(pack: bool, seq_len: int) -> None:
    for case in range(40):
        documents = ragged(case)
        rows = rows_of(documents, seq_len, pack)
        expected = expected_rows(documents, seq_len, pack)
        assert rows.num_rows == len(expected)
        assert listed(rows, range(rows.num_rows)) == expected
        # Validation starts over in the same order.
        assert listed(rows, range(rows.num_rows, 2 * rows.num_rows)) == expected


def test_every_target_of_a_packed_stream_is_predicted_once() -> None:
    documents = ragged(3)
    while sum(len(d) for d in documents if len(d) > 1) % 8:
        documents[-1].append(1)
    rows = rows_of(documents, 8)
    labels = [label for _, row in listed(rows, range(rows.num_rows)) for label in row]
    assert labels.count(IGNORE_INDEX) == sum(len(d) > 1 for d in documents)
    assert Counter(labels) - Counter({IGNORE_INDEX: len(labels)}) == Counter(
        token for d in documents for token in d[1:]
    )


def test_a_row_may_start_in_the_middle_of_a_document_and_end_before_its_target() -> None:
    rows = rows_of([[1, 2, 3, 4, 5], [6, 7, 8]], 4)
    assert listed(rows, range(2)) == [([1, 2, 3, 4], [2, 3, 4, 5]), ([5, 6, 7, 8], [-100, 7, 8, -100])]


def test_shapes_and_types() -> None:
    ids, labels = rows_of(ragged(0), 8).sample(0)
    assert ids.shape == labels.shape == (8,)
    assert ids.dtype == labels.dtype == torch.int64


@pytest.mark.parametrize("pack", [True, False])
def test_each_epoch_has_every_row_once_in_its_own_order(pack: bool) -> None:
    rows = rows_of(ragged(5), 4, pack, seed=0)
    n = rows.num_rows
    epochs = [listed(rows, range(e * n, (e + 1) * n)) for e in range(4)]
    plain = listed(rows_of(ragged(5), 4, pack), range(n))
    assert all(sorted(epoch) == sorted(plain) for epoch in epochs)
    assert all(a != b for i, a in enumerate([*epochs, plain]) for b in epochs[:i])
    other_seed = listed(rows_of(ragged(5), 4, pack, seed=1), range(n))
    assert other_seed != epochs[0]


def test_samples_do_not_depend_on_what_was_read_before() -> None:
    rows = rows_of(ragged(6), 5, seed=3)
    order = list(range(5 * rows.num_rows))
    in_order = [listed(rows, range(i, i + 1)) for i in order]
    random.Random(0).shuffle(order)
    assert all(listed(rows, range(i, i + 1)) == in_order[i] for i in order)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_any_number_of_ranks_reads_the_same_samples_in_each_step(accumulation: int) -> None:
    rows = rows_of(ragged(7), 4, seed=0)
    per_step = 12 * accumulation  # sequences, more than one epoch in a few steps

    def steps(world_size: int) -> list[list[tuple[list[int], list[int]]]]:
        size, position, out = per_step // accumulation // world_size, 0, []
        for _ in range(5):
            batches = [
                micro_batch(rows, position + m * size * world_size, rank, size)
                for m in range(accumulation)
                for rank in range(world_size)
            ]
            out.append(
                [
                    (ids.tolist(), labels.tolist())
                    for batch in batches
                    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
                ]
            )
            position += size * world_size * accumulation
        return out

    one = steps(1)
    assert [row for step in one for row in step] == listed(rows, range(5 * per_step))
    assert steps(2) == one
    assert steps(4) == one


def test_resuming_at_a_position_continues_the_run() -> None:
    whole = rows_of(ragged(8), 4, seed=5)
    position = 2 * whole.num_rows + 3  # in the third epoch
    before = [micro_batch(whole, start, 1, 2) for start in range(0, position + 40, 4)]
    resumed = rows_of(ragged(8), 4, seed=5)
    for start in range(0, position + 40, 4):
        if start >= position:
            batch = micro_batch(resumed, start, 1, 2)
            assert all(torch.equal(batch[key], before[start // 4][key]) for key in ("input_ids", "labels"))


def test_no_row_is_an_error_that_says_what_there_is() -> None:
    rows = rows_of([[1, 2, 3], [4]], 8)
    assert rows.num_rows == 0
    with pytest.raises(DataError, match=r"too little for one row .*1 documents with 3 tokens.*0 rows of 8"):
        rows.sample(0)


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("vocab_size", [2, 50, 50_000])
def test_synthetic_rows_follow_the_seed_and_are_learnable(pack: bool, vocab_size: int) -> None:
    config = DataConfig(kind="synthetic", documents=60, document_tokens=80, pack=pack)

    def build(seed: int) -> tuple[RowDataset, RowDataset]:
        return build_data(config, vocab_size=vocab_size, seq_len=32, seed=seed)

    train, validation = build(0)
    assert train.num_rows > 0 and validation.num_rows > 0
    first = listed(train, range(train.num_rows))
    assert first == listed(build(0)[0], range(train.num_rows))
    assert first != listed(build(1)[0], range(train.num_rows))
    follows: dict[int, Counter[int]] = {}
    for ids, labels in first:
        assert all(0 <= token < vocab_size for token in ids)
        for token, label in zip(ids, labels, strict=True):
            if label != IGNORE_INDEX:
                follows.setdefault(token, Counter())[label] += 1
    likeliest = {token: labels.most_common(1)[0][0] for token, labels in follows.items()}
    pairs = [p for row in listed(validation, range(validation.num_rows)) for p in zip(*row, strict=True)]
    seen = [(token, label) for token, label in pairs if label != IGNORE_INDEX and token in likeliest]
    right = sum(likeliest[token] == label for token, label in seen) / len(seen)
    assert right > 0.85  # 15 in 16 follow the cycle, which validation shares with training


def test_more_synthetic_documents_change_none_that_were_there() -> None:
    def documents(count: int) -> list[tuple[list[int], list[int]]]:
        config = DataConfig(kind="synthetic", documents=count, pack=False, validation_fraction=0.5)
        validation = build_data(config, vocab_size=97, seq_len=16, seed=2)[1]
        return listed(validation, range(validation.num_rows))

    few, many = documents(20), documents(50)
    assert 0 < len(few) < len(many) and many[: len(few)] == few


def test_a_synthetic_document_is_the_same_whichever_others_are_chosen() -> None:
    # Otherwise a validation document would repeat the training document at its place.
    whole = SyntheticDocuments(range(9), 60, 97, seed=2)
    some = SyntheticDocuments([1, 4, 8], 60, 97, seed=2)
    for place, number in enumerate([1, 4, 8]):
        length = int(whole.lengths[number])
        assert some.lengths[place] == length
        assert some.read(place, 0, length).tolist() == whole.read(number, 0, length).tolist()
        assert some.read(place, 3, 7).tolist() == whole.read(number, 0, length)[3:7].tolist()


def test_text_rows_are_the_files(tmp_path: Path) -> None:
    texts = {f"{name}.txt": bytes(document) for name, document in zip("dbca", ragged(1)[-4:], strict=True)}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    config = DataConfig(kind="text", glob=f"{tmp_path}/*.txt", validation_fraction=0.0)
    rows = build_data(config, vocab_size=256, seq_len=6, seed=0)[0]
    expected = expected_rows([list(texts[name]) for name in sorted(texts)], 6, pack=True)
    assert sorted(listed(rows, range(rows.num_rows))) == sorted(expected)


def test_micro_batches_of_an_update() -> None:
    config = DataConfig(kind="synthetic", documents=64)
    rows = build_data(config, vocab_size=97, seq_len=16, seed=2)[0]
    together = micro_batches(rows, 40, 1, 2, 3, 4)
    tensors = [tensor for batch in together for tensor in batch.values()]
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)  # so that each is kept and counted alone
    for number, batch in enumerate(together):
        for key, value in micro_batch(rows, 40 + number * 6, 1, 3).items():
            assert torch.equal(batch[key], value)
    with pytest.raises(RuntimeError, match="DefaultCPUAllocator"):  # before any row is read
        micro_batches(rows, 0, 0, 1, 4, 10**12)


def test_fingerprints_tell_datasets_apart(tmp_path: Path) -> None:
    def fingerprint(glob: str = "a", seq_len: int = 8, seed: int = 0, **options: Any) -> Any:
        config = DataConfig(kind="text", glob=f"{tmp_path}/{glob}/*", validation_fraction=0.0, **options)
        return build_data(config, vocab_size=256, seq_len=seq_len, seed=seed)[0].fingerprint

    for folder, names in {"a": ("x", "y"), "same": ("x", "y"), "renamed": ("x", "z")}.items():
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / name).write_bytes(b"0123456789" * 5)
    assert fingerprint() == fingerprint("same") == json.loads(json.dumps(dict(fingerprint())))
    others = [
        fingerprint("renamed"), fingerprint(seq_len=4), fingerprint(seed=1), fingerprint(pack=False),
        fingerprint(max_document_bytes=50),
    ]  # fmt: skip
    assert len({json.dumps(dict(one)) for one in (fingerprint(), *others)}) == 6
