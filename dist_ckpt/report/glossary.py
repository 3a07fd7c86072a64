"""What the words for memory in tables and charts mean, a sentence each."""

from __future__ import annotations

from collections.abc import Mapping

from dist_ckpt.memory.profile.step_profile import Kind

KIND_MEANINGS: Mapping[Kind, str] = {
    "params": "the parameters that the rank keeps between steps; of sharded ones its shard",
    "grads": "their gradients",
    "optimizer": "the optimizer's moments, and fp32 master weights where an engine has them",
    "activations": "what forward keeps for backward",
    "recompute": "what a checkpointed region makes when it runs again in backward",
    "unsharded": "whole copies of sharded parameters, there while a block is at work",
    "communication": "buckets and buffers of collectives and pipelines",
    "temporary": "allocated and freed within the step and kept by nobody, and the micro-batches",
    "buffers": "the model's tensors that are not trained, such as tables of rotary positions",
    "unattributed": "alive before or after the step and owned by nothing that the engine knows; a copy that somebody "
    "keeps shows here",
}
"""Of :data:`~dist_ckpt.memory.profile.step_profile.Kind`, whose docstring says it for readers of the code."""

MEANINGS: Mapping[str, str] = {
    **{str(kind): meaning for kind, meaning in KIND_MEANINGS.items()},
    "other": "in tables by category: buffers, communication buckets and unsharded copies together, at the boundary",
    "boundary": "the moment after the last backward of a step, before its optimizer step",
    "accounted": "params, grads, optimizer and other at the boundary, and activations at their most: a sum of maxima, "
    "which need not be at one moment and is no peak",
    "live": "what the allocator holds for tensors at the boundary",
    "peak": "the most that the allocator held for tensors at any moment; on the CPU of a deep step alone",
    "reserved": "what the allocator holds from the device at most, in use or cached",
    "headroom": "what was left of the device's memory then",
    "non_torch": "in use on the device, but not by the rank's allocator: CUDA's context, NCCL, other processes",
}
"""Every word that stands over a column or in a legend, and needs to be said."""
