"""Mode ``plan``: a plan as it was written."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from dist_ckpt.blocks import class_name, find_blocks
from dist_ckpt.errors import PlanError, choices
from dist_ckpt.names import named_modules, unwrap
from dist_ckpt.plan import Plan, fold_names
from dist_ckpt.policy import BlockPolicy, ReplayPolicy, policy_from


def read_plan(model: nn.Module, policy: ReplayPolicy) -> Plan:
    """The plan in the policy's file, checked to be about a model with these blocks.

    Raises:
        PlanError: no such file, no plan, or a plan for a model with other blocks.
    """
    if not policy.path:
        raise PlanError("ckpt.path is missing: mode 'plan' needs the file of a plan, as ckpt.path=run/plan.json")
    try:
        plan = Plan.from_json(Path(policy.path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"ckpt.path={policy.path}: {error}") from None
    except PlanError as error:
        raise PlanError(f"ckpt.path={policy.path}: {error}") from None
    modules = dict(named_modules(model))
    for name in (*plan.blocks, *(name for region in plan.all_regions() for name in region.modules)):
        if name not in modules:
            raise PlanError(
                f"ckpt.path={policy.path}: the plan is about {name!r}, which {class_name(unwrap(model))} does not "
                f"have; {choices(name, [other for other in modules if other.count('.') == name.count('.')][:40])}"
            )
    asked = policy_from(plan.policy)
    found = find_blocks(model, asked.blocks) if isinstance(asked, BlockPolicy) else plan.blocks
    if missing := tuple(block for block in found if block not in plan.blocks):
        raise PlanError(
            f"ckpt.path={policy.path}: the plan says nothing about {', '.join(fold_names(missing))}: it was made for "
            f"a model of {len(plan.blocks)} blocks, and this one has {len(found)}"
        )
    return plan
