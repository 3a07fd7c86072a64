"""Op-level recompute here and in torch's own selective checkpointing: the same results kept, paired step times.

    python benchmarks/oplevel.py [rounds]

The model is small, so that what is paid per operation shows.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._pairing import paired
from dist_ckpt import apply
from dist_ckpt.ops import resolve_op
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.init import init_parameters
from dist_ckpt.trainer.models.llama import Transformer

ROUNDS = 31
CONFIG = ModelConfig(n_layers=12)
SHAPE = (2, 64)


def built() -> Transformer:
    """The model, its weights the same each time."""
    model = Transformer(CONFIG)
    init_parameters(model, 0, CONFIG.n_layers)
    return model


def with_torch(model: Transformer) -> Transformer:
    """Puts torch's selective checkpointing around each block, keeping matrix products and attention."""
    kept = resolve_op("matmul") | resolve_op("attention")

    def decide(ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, decide)
    for layer in model.layers:
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, context_fn=contexts)
    return model


def main() -> None:
    """Prints a line a way, each compared with no recompute."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    torch.set_num_threads(1)
    batch = {name: torch.randint(0, CONFIG.vocab_size, SHAPE) for name in ("input_ids", "labels")}
    plain, theirs, ours = built(), with_torch(built()), built()
    apply(ours, "selective")

    def step(model: Transformer) -> None:
        model(**batch).backward()
        model.zero_grad()

    ratios = paired([lambda: step(plain), lambda: step(theirs), lambda: step(ours)], rounds)
    for name, ratio in zip(("torch's selective checkpointing", "selective"), ratios, strict=True):
        print(f"{name}: {ratio}")


if __name__ == "__main__":
    main()
