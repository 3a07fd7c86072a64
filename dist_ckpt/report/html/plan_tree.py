"""A plan as a tree, and what several plans do with each block."""

from __future__ import annotations

from collections.abc import Sequence

from dist_ckpt.errors import counted
from dist_ckpt.plan import Plan, Region, SaveRule, fold_names
from dist_ckpt.policy import described
from dist_ckpt.report.html.parts import Node, Table


def plan_tree(plan: Plan) -> tuple[Node, ...]:
    """A tree, or one for each stage of a pipeline."""
    if not plan.stages or plan.stage is not None:
        return (_tree(described(plan.policy), plan),)
    per_stage = plan.policy.get("per_stage", ()) if not plan.planned_for else ()
    policies = [described(per_stage[n] if n < len(per_stage) else plan.policy) for n in range(len(plan.stages))]
    return tuple(_tree(f"stage {n}: {policy}", plan.part(n)) for n, policy in enumerate(policies))


def _tree(root: str, plan: Plan) -> Node:
    owned = (counted(len(plan.stages[plan.stage]), "layer"),) if plan.stage is not None else ()
    kept = [Node(f"kept whole: {name}") for name in fold_names(plan.unmatched)]
    remarks = [Node(f"repair: {one}") for one in plan.repairs] + [Node(f"note: {one}") for one in plan.notes]
    tags = (*owned, counted(len(plan.regions), "region"), counted(len(plan.blocks), "block"))
    return Node(root, tags, (*_branches(plan.regions), *kept, *remarks))


def _branches(regions: Sequence[Region]) -> tuple[Node, ...]:
    """A branch a kind of region: those that keep the same and hold alike regions stand together."""
    kinds: dict[tuple[SaveRule, int, tuple[str, ...]], list[Region]] = {}
    for region in regions:
        kinds.setdefault((region.save, len(region.modules), _options(region)), []).append(region)
    nodes = []
    for (save, length, options), members in kinds.items():
        inner = _branches([one for region in members for one in region.inner])
        if length == 1:
            names = fold_names(tuple(region.modules[0] for region in members))
        else:
            names = tuple(" + ".join(fold_names(region.modules)) for region in members)
        kept = tuple(str(rule) for rule in save.ops) or ("keeps its inputs only",)
        inputs = ("offloads its inputs",) if save.inputs == "offload" else ()
        verb = "offloaded" if save.offloads_everything else "recomputed"
        verb += f", {length} blocks as one" if length > 1 else ""
        nodes.append(Node(f"{verb}: {', '.join(names)}", (*kept, *inputs, *options), inner))
    return tuple(nodes)


def _options(region: Region) -> tuple[str, ...]:
    """What differs from a region's defaults."""
    said = {
        "RNG not replayed": not region.preserve_rng_state,
        "unchecked": region.determinism_check == "none",
        "to its end": not region.early_stop,
    }
    return tuple(word for word, is_so in said.items() if is_so)


def plan_differences(names: Sequence[str], plans: Sequence[Plan]) -> Table:
    """What each plan does with each block; blocks that are treated alike stand together.

    Args:
        names: of the plans, for the columns.
    """
    blocks = list(dict.fromkeys(block for plan in plans for block in plan.blocks))
    fates: dict[tuple[str, ...], list[str]] = {}
    for block in blocks:
        fates.setdefault(tuple(_fate(block, plan) for plan in plans), []).append(block)
    rows = tuple((", ".join(fold_names(tuple(members))), *fate) for fate, members in fates.items())
    return Table("what becomes of each block", ("blocks", *names), rows)


def _fate(block: str, plan: Plan) -> str:
    """What a plan does with one block, in words."""
    if block not in plan.blocks:
        return "no block of this plan"
    said = [text for region in plan.regions if (text := _part_in(block, region)) is not None]
    return "; ".join(said) or "kept whole"


def _part_in(block: str, region: Region) -> str | None:
    verb = "offloaded" if region.save.offloads_everything else "recomputed"
    rules = f" [{region.save}]"
    nested = f", {counted(len(region.inner), 'region')} inside" if region.inner else ""
    if block in region.modules:
        with_others = f" as one of {len(region.modules)}" if len(region.modules) > 1 else ""
        return f"{verb}{with_others}{nested}{rules}"
    within = [name[len(block) + 1 :] for name in region.modules if name.startswith(f"{block}.")]
    return f"{', '.join(within)} {verb}{nested}{rules}" if within else None
