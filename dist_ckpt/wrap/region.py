"""One forward of a region, under its guards: what modules and plain functions share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import nn

from dist_ckpt.errors import PlanError
from dist_ckpt.guards.forward_state import ForwardState
from dist_ckpt.guards.randomness import Unreplayed
from dist_ckpt.plan import Region
from dist_ckpt.wrap.offload import Offloader
from dist_ckpt.wrap.oplevel import eager_contexts
from dist_ckpt.wrap.span import Forward, new_frame, run_part

CHECKED = "_dist_ckpt_checked"
"""Attribute of modules whose first forward has shown that it can be repeated."""


def run_region(
    region: Region,
    module: nn.Module,
    run: Callable[..., Any],
    offloader: Offloader | None,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    functions: tuple[Callable[..., Any], ...] = (),
) -> Any:
    """Runs a forward so that backward recomputes or fetches what it saves, and returns what it returns.

    Args:
        module: the region's module, or one that holds the modules that a function reaches.
        run: the forward.
        offloader: the model's, where the region offloads.
        functions: what else is searched for random generators that nothing replays.

    Raises:
        PlanError: the forward does something that its recompute could not repeat.
    """
    if region.save.offloads_everything:
        assert offloader is not None
        with offloader.hooks(module):
            return run(*args, **kwargs)
    name = region.modules[0]
    contexts = eager_contexts(region, module, offloader) if region.save.ops else (nullcontext(), None)
    state = ForwardState(module, name, contexts[1])
    frame = new_frame(region)
    frame.caches.append(state.storage)
    forward = Forward(run, run, contexts[0], (lambda: state,))
    with first_forward_checked(region, module, name, functions):
        out = run_part(frame, region, forward, inputs_kept_under(region, module, offloader), args, kwargs)
    state.forward_ends()
    return out


def inputs_kept_under(region: Region, module: nn.Module, offloader: Offloader | None) -> AbstractContextManager[Any]:
    """The saved-tensor hooks for a region's inputs."""
    if region.save.inputs == "keep":
        return nullcontext()
    assert offloader is not None
    return offloader.hooks(module)


@contextmanager
def first_forward_checked(
    region: Region, module: nn.Module, name: str, functions: tuple[Callable[..., Any], ...] = ()
) -> Iterator[None]:
    """Around a region's forward; the first one shows whether a recompute can repeat it.

    Raises:
        PlanError: it drew random numbers that no recompute replays, or holds what an early stop breaks.
    """
    if CHECKED in module.__dict__:
        yield
        return
    if region.early_stop and any(isinstance(inside, nn.RReLU) and not inside.inplace for inside in module.modules()):
        # It saves its noise before it draws it (aten/src/ATen/native/Activation.cpp), and an early stop comes between.
        raise PlanError(
            f"{name} has an RReLU, whose recompute must not stop at the last tensor that it saves: set "
            "ckpt.early_stop=false"
        )
    streams = Unreplayed(module.modules(), functions)
    yield
    streams.refuse_draws(name)
    module.__dict__[CHECKED] = True
