"""Options that every block policy has."""

from __future__ import annotations

import dataclasses

from dist_ckpt.plan import Region
from dist_ckpt.policy import BlockPolicy, Inputs


def with_options(region: Region, policy: BlockPolicy) -> Region:
    """The region, and those nested in it, with the policy's options."""
    # Inputs of nested regions are recomputed by the outer one: in host memory they would outlive it for nothing.
    inner = tuple(with_options(one, dataclasses.replace(policy, inputs=Inputs.keep)) for one in region.inner)
    offload = policy.inputs is Inputs.offload and not region.save.offloads_everything
    return dataclasses.replace(
        region,
        save=dataclasses.replace(region.save, inputs="offload" if offload else "keep"),
        inner=inner,
        preserve_rng_state=policy.preserve_rng_state,
        determinism_check=policy.determinism_check.value,
        early_stop=policy.early_stop,
    )
