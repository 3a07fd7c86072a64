"""Generated documents of any vocabulary and length, for tests and benchmarks without data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class SyntheticDocuments:
    """Walks along one hidden cycle of up to 64 token ids, with a random jump about every 16 tokens.

    The next token is therefore learnable from the current one alone, down to about 0.5 nats. Document i depends only
    on (seed, i) and the options; none is kept in memory.

    Args:
        numbers: which documents; number i is the same whichever others there are.
        max_tokens: lengths are uniform in [max(2, max_tokens // 4), max_tokens].
        vocab_size: ids are below it.
        seed: of lengths, cycle and walks.
    """

    def __init__(self, numbers: Sequence[int], max_tokens: int, vocab_size: int, seed: int) -> None:
        rng = np.random.default_rng([seed, 0])
        self._seed = seed
        self._cycle = rng.permutation(vocab_size)[:64]
        self._numbers = numbers
        least, count = max(2, max_tokens // 4), max(numbers, default=-1) + 1
        lengths = rng.integers(least, max_tokens, endpoint=True, size=count)
        self.lengths = lengths[np.asarray(numbers, dtype=np.int64)]

    def read(self, document: int, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop`` (exclusive) of a document: (stop - start,) int64."""
        rng = np.random.default_rng([self._seed, 1, self._numbers[document]])
        steps = np.arange(self.lengths[document])
        jumps = rng.random(len(steps)) < 1 / 16
        jumps[0] = True
        landing = rng.integers(len(self._cycle), size=len(steps))
        last_jump = np.maximum.accumulate(np.where(jumps, steps, 0))
        tokens: np.ndarray = self._cycle[(landing[last_jump] + steps - last_jump) % len(self._cycle)]
        return tokens[start:stop]
