"""Whatever order people call backward and step in under DeepSpeed, guarded it is right or an error."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist_ckpt import guard_accumulation
from dist_ckpt.compat import deepspeed as compat
from dist_ckpt.errors import EngineError
from tests.ranks import RankGroups

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="DeepSpeed is not installed")

ROWS, WIDTH, LR = 2, 8, 0.1
Loop = Callable[[Any, list[Tensor]], None]
"""(engine, one batch a micro-batch) → one update, with a loss for each that is divided by their number already."""


def after_each(engine: Any, batches: list[Tensor]) -> None:
    """As DeepSpeed's documentation says."""
    for batch in batches:
        engine.backward(engine(batch).mean() / len(batches), scale_wrt_gas=False)
        engine.step()


def torch_style(engine: Any, batches: list[Tensor]) -> None:
    for batch in batches:
        (engine(batch).mean() * engine.gradient_accumulation_steps() / len(batches)).backward()
        engine.step()


def one_step(engine: Any, batches: list[Tensor]) -> None:
    """All backwards, then one step: accelerate's and open-instruct's loops."""
    for batch in batches:
        engine.backward(engine(batch).mean() / len(batches), scale_wrt_gas=False)
    engine.step()


def one_step_torch_style(engine: Any, batches: list[Tensor]) -> None:
    for batch in batches:
        (engine(batch).mean() * engine.gradient_accumulation_steps() / len(batches)).backward()
    engine.step()


def boundary_set(engine: Any, batches: list[Tensor]) -> None:
    for number, batch in enumerate(batches):
        engine.set_gradient_accumulation_boundary(number == len(batches) - 1)
        engine.backward(engine(batch).mean() / len(batches), scale_wrt_gas=False)
    engine.step()


def boundary_set_late(engine: Any, batches: list[Tensor]) -> None:
    engine.set_gradient_accumulation_boundary(False)
    for batch in batches:
        engine.backward(engine(batch).mean() / len(batches), scale_wrt_gas=False)
    engine.set_gradient_accumulation_boundary(True)
    engine.step()


def boundary_set_early(engine: Any, batches: list[Tensor]) -> None:
    engine.set_gradient_accumulation_boundary(True)
    one_step(engine, batches)


def boundary_never(engine: Any, batches: list[Tensor]) -> None:
    engine.set_gradient_accumulation_boundary(False)
    one_step(engine, batches)
    engine.set_gradient_accumulation_boundary(True)
    engine.step()


def without_sync(engine: Any, batches: list[Tensor]) -> None:
    for number, batch in enumerate(batches):
        with engine.no_sync() if number < len(batches) - 1 else contextlib.nullcontext():
            engine.backward(engine(batch).mean() / len(batches), scale_wrt_gas=False)
    engine.step()


def coalesced(engine: Any, batches: list[Tensor]) -> None:
    with engine.coalesce_grad_reduction():
        for batch in batches:
            engine.backward(engine(batch).mean() / len(batches), scale_wrt_gas=False)
    engine.step()


def extra_step(engine: Any, batches: list[Tensor]) -> None:
    engine.step()
    after_each(engine, batches)


def step_twice(engine: Any, batches: list[Tensor]) -> None:
    after_each(engine, batches)
    for _ in batches:
        engine.step()


def forwards_first(engine: Any, batches: list[Tensor]) -> None:
    losses = [engine(batch).mean() / len(batches) for batch in batches]
    for loss in losses:
        engine.backward(loss, scale_wrt_gas=False)
        engine.step()


def one_forward_ahead(engine: Any, batches: list[Tensor]) -> None:
    ahead = engine(batches[0])
    for batch in [*batches[1:], None]:
        output, ahead = ahead, None if batch is None else engine(batch)
        engine.backward(output.mean() / len(batches), scale_wrt_gas=False)
        engine.step()


def one_backward(engine: Any, batches: list[Tensor]) -> None:
    """Of the sum of the losses."""
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(sum(engine(batch).mean() / len(batches) for batch in batches), scale_wrt_gas=False)
    engine.step()


def around_the_engine(engine: Any, batches: list[Tensor]) -> None:
    """Its parts, called one by one."""
    for batch in batches:
        x = batch
        for part in engine.module:
            x = part(x)
        engine.backward(x.mean() / len(batches), scale_wrt_gas=False)
        engine.step()


def cleared_between_updates(engine: Any, batches: list[Tensor]) -> None:
    for clear in (engine.zero_grad, engine.optimizer.zero_grad):
        clear()
    after_each(engine, batches)
    engine.zero_grad()


def cleared_within(engine: Any, batches: list[Tensor]) -> None:
    after_each(engine, batches[:1])
    engine.zero_grad()
    after_each(engine, batches[1:])


def optimizer_cleared_within(engine: Any, batches: list[Tensor]) -> None:
    after_each(engine, batches[:1])
    loss = engine(batches[1]).mean()
    engine.optimizer.zero_grad()
    engine.backward(loss)
    engine.step()


LOOPS: list[Loop] = [
    after_each,
    torch_style,
    one_step,
    one_step_torch_style,
    boundary_set,
    boundary_set_late,
    boundary_set_early,
    boundary_never,
    without_sync,
    coalesced,
    extra_step,
    step_twice,
    forwards_first,
    one_forward_ahead,
    one_backward,
    around_the_engine,
    cleared_between_updates,
    cleared_within,
    optimizer_cleared_within,
]

STEPPING: list[Loop] = [
    after_each,
    torch_style,
    forwards_first,
    one_forward_ahead,
    around_the_engine,
    cleared_between_updates,
    cleared_within,
    optimizer_cleared_within,
]
"""Those that call ``step()`` once after each backward."""


def outcome(loop: Loop, stage: int, accumulation: int, managed: bool = True) -> str:
    """What two updates of four micro-batches come to: ``right``, ``wrong``, or the kind of error."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    plain = copy.deepcopy(net)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "managed_gradient_accumulation": managed,
    }
    engine = compat.build(net, torch.optim.SGD(net.parameters(), LR), config, torch.device("cpu"))
    guard_accumulation(engine)
    torch.manual_seed(3)
    updates = [[[torch.randn(ROWS, WIDTH) for _ in range(4)] for _ in range(world)] for _ in range(2)]
    try:
        for update in updates:
            loop(engine, update[rank])
    except EngineError:
        return "refused"
    except (AssertionError, NotImplementedError, RuntimeError):  # DeepSpeed's own: no_sync() from stage 2 on
        return "DeepSpeed refuses"
    finally:
        weights = {name: whole(p) for name, p in net.named_parameters()}
        compat.close(engine)
    optimizer = torch.optim.SGD(plain.parameters(), LR)
    for update in updates:
        optimizer.zero_grad()
        (sum(plain(batch).mean() / 4 for batches in update for batch in batches) / world).backward()
        optimizer.step()
    worst = max(float((weights[name] - p.detach()).abs().max()) for name, p in plain.named_parameters())
    return "right" if worst < 1e-6 else f"wrong by {worst:.1e}"


def whole(parameter: nn.Parameter) -> Tensor:
    import deepspeed

    with deepspeed.zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def outcomes(rank: int, world: int, stages: list[int], loops: list[Loop]) -> dict[tuple[int, str], str]:
    """By stage, and the loop with how many micro-batches DeepSpeed was told an update has."""
    compat.start(torch.device("cpu"))
    found = {}
    for stage in stages:
        for loop in loops:
            if loop not in STEPPING:  # with 1 each micro-batch would be an update
                found[stage, f"{loop.__name__}, told 1"] = outcome(loop, stage, 1)
            found[stage, f"{loop.__name__}, told 4"] = outcome(loop, stage, 4)
        found[stage, "one_step, told nothing"] = outcome(one_step, stage, 1, managed=False)
    return found


EXPECTED = {
    "after_each, told 4": "right",
    "torch_style, told 4": "right",
    "one_step, told nothing": "right",
    "boundary_set, told 1": "right",
    "boundary_set, told 4": "right",
    "coalesced, told 1": "right",
    "forwards_first, told 4": "right",
    "one_forward_ahead, told 4": "right",
    "one_backward, told 1": "right",
    "one_backward, told 4": "right",
    "around_the_engine, told 4": "right",
    "cleared_between_updates, told 4": "right",
}
"""What is right at all stages, or where DeepSpeed itself refuses it; everything else is refused."""
UNDER_ZERO3 = {(3, f"{loop}, told 4") for loop in ("forwards_first", "around_the_engine")}
"""What would lose gradients at this stage alone."""


def check(found: dict[tuple[int, str], str]) -> None:
    for (stage, loop), verdict in found.items():
        expected = EXPECTED.get(loop, "refused")
        if (stage, loop) == (0, "without_sync, told 1"):
            expected = "right"
        if (stage, loop) in UNDER_ZERO3:
            expected = "refused"
        assert verdict in (expected, "DeepSpeed refuses"), (stage, loop, verdict)
        if loop in ("after_each, told 4", "one_step, told nothing", "boundary_set, told 4", "one_backward, told 4"):
            assert verdict == "right", (stage, loop, verdict)


def test_gradients_are_right_or_refused(ranks: RankGroups) -> None:
    for found in ranks(2).run(outcomes, [0, 2], [after_each, one_step, boundary_set_late]):
        check(found)


def test_what_loses_gradients_by_its_forwards_or_zero_grad_is_refused(ranks: RankGroups) -> None:
    loops = [forwards_first, one_backward, cleared_between_updates, cleared_within, optimizer_cleared_within]
    for found in ranks(2).run(outcomes, [1, 3], loops):
        check(found)


@pytest.mark.full
def test_gradients_are_right_or_refused_in_every_order_at_every_stage(ranks: RankGroups) -> None:
    for found in ranks(2).run(outcomes, [0, 1, 2, 3], LOOPS, timeout_s=400):
        check(found)


def test_only_an_engine_of_deepspeed_is_taken() -> None:
    with pytest.raises(EngineError, match=r"deepspeed\.initialize"):
        guard_accumulation(nn.Linear(2, 2))
