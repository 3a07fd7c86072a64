"""What the memory meter costs a step: operations and collectives exactly, time as paired ratios.

Fails if the meter adds any operation, collective or synchronization to a step.

python benchmarks/meter.py [rounds]
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._pairing import paired
from dist_ckpt.engines import ENGINES, TrainingOptions
from dist_ckpt.engines.data_parallel import DataParallelEngine
from dist_ckpt.memory.ledger import owners_of
from dist_ckpt.memory.meter import MemoryMeter
from dist_ckpt.planning import make_plan
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.init import init_parameters
from dist_ckpt.trainer.models.llama import Transformer

ROUNDS = 31
CONFIG = ModelConfig(n_layers=8, d_model=256, n_heads=8, n_kv_heads=4, d_ff=704)
SHAPE = (4, 256)


class Off(MemoryMeter):
    """The same step with the meter's work left out."""

    def after_forward(self, *roots: torch.Tensor) -> int:
        return 0

    def reset(self) -> None:
        pass


class Operations(TorchDispatchMode):
    """Counts what reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def build(name: str, policy: str) -> tuple[DataParallelEngine, MemoryMeter, MemoryMeter]:
    """An engine, its own meter and one that is off."""
    model = Transformer(CONFIG)
    init_parameters(model, 0, CONFIG.n_layers)
    engine = ENGINES[name](TrainingOptions(), torch.device("cpu"), lambda m, b: m(**b))
    engine.prepare(model, make_plan(model, policy))
    return engine, engine.meter, Off(engine.model, owners=lambda: owners_of(engine.model, engine.optimizer))


def events(step: Callable[[], object]) -> Counter[str]:
    """Every operation, collective and synchronisation that the profiler sees in a step."""
    with profile() as recorded:
        step()
    found = recorded.events()
    assert found is not None
    return Counter(e.name for e in found if not e.name.startswith(("Optimizer", "profiler", "ProfilerStep")))


def compare(name: str, policy: str, rounds: int) -> str:
    """What the meter adds to a step of one engine under one policy."""
    engine, on, off = build(name, policy)
    batch = {key: torch.randint(0, CONFIG.vocab_size, SHAPE) for key in ("input_ids", "labels")}

    def step(meter: MemoryMeter, measure: bool = False) -> None:
        engine.meter = meter
        engine.train_step([batch], measure=measure)

    for _ in range(3):  # DDP rebuilds its buckets, the optimizer makes its moments
        step(on)
    without, with_meter = (events(lambda meter=meter: step(meter)) for meter in (off, on))
    dispatched = []
    for meter in (off, on):
        with Operations() as operations:
            step(meter)
        dispatched.append(operations.seen)

    def deep() -> None:
        with on.profile([batch]):
            step(on, measure=True)

    ways = [lambda: step(off), lambda: step(on), lambda: step(on, measure=True), deep]
    always, reported, deeply = paired(ways, rounds)
    added, dispatched_too = difference(without, with_meter), difference(*dispatched)
    assert not added and not dispatched_too, (added, dispatched_too)
    return (
        f"{name} {policy}: nothing added to {sum(without.values())} profiler events and "
        f"{sum(dispatched[0].values())} dispatched operations\n"
        f"    every step:           {always}\n"
        f"    a step that reports:  {reported}\n"
        f"    a deep step:          {deeply}"
    )


def difference(without: Counter[str], with_meter: Counter[str]) -> dict[str, int]:
    """How the counts of a step change, by name; nothing if they do not."""
    return {n: with_meter[n] - without[n] for n in {*without, *with_meter} if with_meter[n] != without[n]}


def main() -> None:
    """Prints one line an engine and policy."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name, policy in (("ddp", "none"), ("fsdp1", "full"), ("fsdp2", "selective")):
        print(compare(name, policy, rounds))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
