"""Mode ``nested``: segments with further regions inside."""

from __future__ import annotations

from dist_ckpt.errors import PlanError
from dist_ckpt.plan import Region, SaveRule
from dist_ckpt.planning.inside import select_inside
from dist_ckpt.planning.planned import Planned, Target
from dist_ckpt.planning.segments import cut
from dist_ckpt.planning.selective import save_rules
from dist_ckpt.policy import NestedPolicy, listed

MOST_LEVELS = 3


def plan_nested(target: Target, policy: NestedPolicy) -> Planned:
    """Each segment recomputes as one, with regions of its own inside that nest by where their modules lie.

    Raises:
        PlanError: a pattern that matches nothing, or more than three levels.
    """
    by_stage, notes = cut(target, policy, has_inner=True)
    patterns = listed(policy.inner)
    matched: dict[str, int] = {}
    names: dict[str, None] = {}
    for pattern in patterns:
        found, counts = select_inside(target, pattern, key="inner")
        names |= dict.fromkeys(found)
        matched |= counts
    save = SaveRule(ops=save_rules(listed(policy.save or ()), "save"))
    regions = tuple(
        _segment(modules, _nest(list(names), modules, save)) for segments in by_stage.values() for modules in segments
    )
    deepest = max(region.depth for region in regions)
    if deepest > MOST_LEVELS:
        raise PlanError(
            f"ckpt.inner={list(patterns)}: {deepest} levels of regions; each level repeats the forwards of the one "
            f"below, and more than {MOST_LEVELS} are refused"
        )
    return Planned(regions, matched, notes)


def _segment(modules: tuple[str, ...], inner: tuple[Region, ...]) -> Region:
    """A segment of one block whose inner region is that block is just this region."""
    if len(modules) == 1 and any(region.modules == modules for region in inner):
        return inner[0]
    return Region(modules, inner=inner)


def _nest(names: list[str], within: tuple[str, ...], save: SaveRule) -> tuple[Region, ...]:
    """Regions of those names that lie in (or are) the given modules, nested as the modules are."""
    inside = [name for name in names if any(name == one or name.startswith(f"{one}.") for one in within)]
    outermost = [name for name in inside if not any(name.startswith(f"{other}.") for other in inside)]
    regions = []
    for name in outermost:
        inner = _nest([other for other in inside if other != name], (name,), save)
        regions.append(Region((name,), SaveRule() if inner else save, inner))
    return tuple(regions)
