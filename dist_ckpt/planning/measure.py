"""Bytes of single blocks and regions on a batch, measured on fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dist_ckpt.cost import LossFn, ModelInput, default_loss, fake_training
from dist_ckpt.errors import PlanError
from dist_ckpt.memory.activations import saved_bytes
from dist_ckpt.memory.storages import Storages
from dist_ckpt.names import named_modules
from dist_ckpt.plan import Plan, Region
from dist_ckpt.planning.planned import BlockBytes

Span = tuple[str, ...]
"""Modules that run one after the other: a region's."""


def measure_blocks(
    model: nn.Module, batch: ModelInput, loss_fn: LossFn | None, blocks: tuple[str, ...]
) -> Mapping[str, BlockBytes]:
    """What each block is given and keeps in a micro-batch, without a policy."""
    measured = _measure(model, Plan(), [(block,) for block in blocks], batch, loss_fn)
    return {span[0]: found for span, found in measured.items()}


def freed_bytes(
    model: nn.Module, regions: Sequence[Region], batch: ModelInput, loss_fn: LossFn | None
) -> Mapping[Span, int]:
    """How much less is kept in a micro-batch because of each region."""
    spans = [region.modules for region in regions]
    without = _measure(model, Plan(), spans, batch, loss_fn)
    with_regions = _measure(model, Plan(regions=tuple(regions)), spans, batch, loss_fn)
    return {span: without[span].kept - with_regions[span].kept for span in spans}


def _measure(
    model: nn.Module, plan: Plan, spans: Sequence[Span], batch: ModelInput, loss_fn: LossFn | None
) -> Mapping[Span, BlockBytes]:
    """Bytes of each span, read when its last module returns; of a span that runs several times the last time counts.

    Raises:
        PlanError: a span does not run on this batch.
    """
    kept: dict[Span, int] = {}
    inputs: dict[Span, list[Tensor]] = {}
    with fake_training(model, plan, batch) as (fake, fake_batch):
        modules = dict(named_modules(fake))
        lasting = [*fake.parameters(), *fake.buffers()]

        def starts(span: Span) -> Any:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                inputs[span] = _tensors((args, kwargs))

            return hook

        def ends(span: Span) -> Any:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                given = inputs[span]
                kept[span] = saved_bytes(_tensors(output), [*lasting, *given], until=given).on_device

            return hook

        for span in spans:
            modules[span[0]].register_forward_pre_hook(starts(span), with_kwargs=True)
            modules[span[-1]].register_forward_hook(ends(span))
        (loss_fn or default_loss)(fake, fake_batch)
        if unused := [span for span in spans if span not in kept]:
            raise PlanError(f"{' + '.join(unused[0])} does not run on the batch that was given to measure on")
        own = _own_inputs(inputs)
    return {span: BlockBytes(own[span], kept[span]) for span in spans}


def _own_inputs(inputs: Mapping[Span, Sequence[Tensor]]) -> Mapping[Span, int]:
    """Bytes of what each span is given and no other: a mask or table that all of them share is kept once anyway."""
    uses = Counter(key for given in inputs.values() for key in {_key(tensor) for tensor in given})
    return {span: Storages(t for t in given if uses[_key(t)] == 1).nbytes for span, given in inputs.items()}


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
