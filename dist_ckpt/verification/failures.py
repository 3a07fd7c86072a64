"""A step that a plan makes fail, as a finding: where, and what was wrong."""

from __future__ import annotations

from torch import nn
from torch.utils.checkpoint import CheckpointError

from dist_ckpt.compat.torch import failed_frame
from dist_ckpt.errors import DistCkptError
from dist_ckpt.verification.findings import Finding
from dist_ckpt.verification.observe import Observation


def failure(planned: Observation) -> Finding:
    """What a step that only fails with the plan has raised."""
    error = planned.error
    assert error is not None
    checkpoint = planned.checkpoint_of(failed_frame(error))
    where = checkpoint.region if checkpoint is not None else _deepest_module(error, planned) or "the step"
    if isinstance(error, DistCkptError):
        return Finding(where, f"the plan is refused: {error}")
    if isinstance(error, CheckpointError):
        text = str(error).removeprefix("torch.utils.checkpoint: ").partition("\nTip:")[0]
        return Finding(where, f"torch refuses its recompute: {' '.join(text.split())[:300]}")
    message = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {message[0] if message else 'no message'}"
    return Finding(where, f"the step fails with the plan, and not without: {text}")


def _deepest_module(error: BaseException, planned: Observation) -> str | None:
    """The innermost module in whose methods an error was raised."""
    names = planned.names
    found = None
    trace = error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            found = names.get(id(owner), found)
        trace = trace.tb_next
    return found
