"""A check after the first backward: no parameter has lost its gradient to the plan.

A forward that does something else when its blocks recompute (``type(layer) is Block`` is False then), or a checkpoint
whose inputs need no gradient, trains on without any error, and some parameters never move.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dist_ckpt.batch import Batch
from dist_ckpt.compat import zero
from dist_ckpt.compat.torch import local_tensor
from dist_ckpt.cost import fake_training, without_memory
from dist_ckpt.errors import PlanError
from dist_ckpt.names import named_parameters
from dist_ckpt.plan import Plan, fold_names
from dist_ckpt.states.fit import listed

_log = logging.getLogger(__name__)


class LostGradients:
    """Finds parameters without a gradient that would have one without the plan.

    FSDP1 gives a parameter that no backward reaches a gradient of zeros as long as another one of its unit has one, so
    there it finds whole units only.

    Args:
        model: before the plan and before sharding; what is kept of it needs no memory.
        loss_sum: (model, batch) → loss.
    """

    def __init__(self, model: nn.Module, loss_sum: Callable[[nn.Module, Batch], Tensor]) -> None:
        self._plain = without_memory(model)
        self._loss_sum = loss_sum
        self._trained = tuple(name for name, p in named_parameters(model) if p.requires_grad)

    def refuse(
        self,
        model: nn.Module,
        micro_batches: Sequence[Batch],
        device: torch.device,
        with_gradient: Set[str] | None = None,
    ) -> None:
        """To be called at the boundary of an update, on every rank.

        Costs one small collective. Only where a trainable parameter has no gradient, the same micro-batches run
        without the plan, on fake tensors.

        Args:
            model: as this rank trains it: sharded, or a stage of a pipeline.
            with_gradient: the parameters that have one, where it does not lie in ``grad`` until the boundary.

        Raises:
            PlanError: on every rank: the plan has lost gradients.
        """
        # A rank that holds nothing of a parameter has nothing to say about it.
        held = {name: p for name, p in named_parameters(model) if zero.is_partitioned(p) or _numel(p) > 0}
        if with_gradient is None:
            with_gradient = {name for name, p in held.items() if p.grad is not None}
        trained = self._trained
        flags = _on_any_rank([name in names for names in (with_gradient, held) for name in trained], device)
        has, holds = flags[: len(trained)], flags[len(trained) :]
        missing = [name for name, known, is_held in zip(trained, has, holds, strict=True) if is_held and not known]
        if not missing:
            return
        without = self._with_gradients(micro_batches)
        wanted = _on_any_rank([without is not None and name in without for name in missing], device)
        lost = tuple(name for name, wants in zip(missing, wanted, strict=True) if wants)
        if lost:
            raise PlanError(
                f"with this plan no gradient reaches {listed(fold_names(lost), 8)}, and without a plan it does. "
                "launch/verify.py with the same options says where the forward does something else; "
                "train.check_gradients=false trains on without them"
            )

    def _with_gradients(self, micro_batches: Sequence[Batch]) -> set[str] | None:
        """Parameters that have a gradient without a plan; None if fake tensors cannot tell."""
        found: set[str] = set()
        for batch in micro_batches:
            try:
                with fake_training(self._plain, Plan(), batch) as (fake, fake_batch):
                    self._loss_sum(fake, fake_batch).backward()
            except PlanError as error:
                _log.warning("parameters without a gradient could not be compared with a run without a plan: %s", error)
                return None
            found |= {name for name, p in named_parameters(fake) if p.grad is not None}
        return found


def _numel(parameter: nn.Parameter) -> int:
    return local_tensor(parameter.detach()).numel()


def _on_any_rank(flags: Sequence[bool], device: torch.device) -> list[bool]:
    total = torch.tensor(flags, dtype=torch.int32, device=device)
    if dist.is_initialized():
        dist.all_reduce(total)
    return [bool(count) for count in total.tolist()]
