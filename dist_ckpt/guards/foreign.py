"""Other people's activation checkpointing, met while a region's forward runs.

What is switched on before a plan is applied is refused then. But trainers wrap models late (HF ``Trainer``, the FSDP
options of accelerate and Lightning), and some models checkpoint their layers from outside (``checkpoint(layer, x)`` in
the model's own loop). A block would then be recomputed twice over, and what the plan says would not be what happens.
"""

from __future__ import annotations

from torch import nn

from dist_ckpt.compat.torch import Frame, in_bare_backward, running_frame
from dist_ckpt.errors import PlanError
from dist_ckpt.names import own_class


def refuse_running_checkpoint(module: nn.Module) -> None:
    """To be called when a region's forward begins, in training.

    Raises:
        PlanError: another checkpoint runs around the region, or is switched on for a module in it.
    """
    for inside in module.modules():
        if inside.__dict__.get("gradient_checkpointing") is True:
            raise PlanError(
                f"gradient_checkpointing of a {own_class(inside).__name__} was switched on after a plan was applied. "
                f"{_REMEDY}: in Hugging Face's TrainingArguments activation_checkpointing=False (in older versions "
                "gradient_checkpointing=False), on a model model.activation_checkpointing_disable()"
            )
    running = running_frame()
    name = own_class(module).__name__
    if running is not None and not isinstance(running[0], Frame):
        raise PlanError(f"another activation checkpoint runs around a recomputed {name}. {_REMEDY}: {_OTHERS}")
    if running is None and in_bare_backward():  # its forward ran without gradients, so that nothing showed
        raise PlanError(
            f"the forward of a recomputed {name} runs inside a backward, as in a reentrant checkpoint "
            f"(use_reentrant=True) around it. {_REMEDY}: {_OTHERS}"
        )


_REMEDY = "Recomputing a block twice gains nothing, so switch one of the two off"
_OTHERS = (
    "a trainer's (accelerate: FullyShardedDataParallelPlugin(activation_checkpointing=False), Lightning: "
    "FSDPStrategy(activation_checkpointing_policy=None)), or the model's own"
)
