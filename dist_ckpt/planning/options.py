"""Options that every policy has whose regions are recomputed."""

from __future__ import annotations

import dataclasses

from dist_ckpt.plan import Region
from dist_ckpt.policy import Inputs, RecomputePolicy


def with_options(region: Region, policy: RecomputePolicy) -> Region:
    """The region, and those nested in it, with the policy's options."""
    # Inputs of nested regions are recomputed by the outer one: in host memory they would outlive it for nothing.
    inner = tuple(with_options(one, dataclasses.replace(policy, inputs=Inputs.keep)) for one in region.inner)
    return dataclasses.replace(
        region,
        save=dataclasses.replace(region.save, inputs=policy.inputs.value),
        inner=inner,
        preserve_rng_state=policy.preserve_rng_state,
        determinism_check=policy.determinism_check.value,
        early_stop=policy.early_stop,
    )
