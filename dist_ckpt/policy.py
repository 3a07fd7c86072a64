"""What the user asks for: one small frozen dataclass per mode.

A policy says nothing about a particular model. :func:`dist_ckpt.make_plan` turns it into a
:class:`~dist_ckpt.plan.Plan`, which does.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from dist_ckpt.errors import PlanError, choices
from dist_ckpt.typed import Checked, Choice, Range, Size


@dataclass(frozen=True)
class Policy(Checked, section="ckpt", error=PlanError):
    """Base of all policies; ``mode`` is the name used in configurations and on the command line.

    Raises:
        PlanError: an option of the wrong type, or out of range.
    """

    mode: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        """The policy as plain JSON data, ``mode`` first; :func:`policy_from` reads it back."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {"mode": self.mode} | {name: _plain(value) for name, value in fields.items()}


@dataclass(frozen=True)
class NoPolicy(Policy):
    """Keep every activation: nothing is recomputed."""

    mode: ClassVar[str] = "none"


class Inputs(Choice):
    """Where a region's inputs wait for its recompute."""

    keep = "keep"
    offload = "offload"


class DeterminismCheck(Choice):
    """What is compared between a region's forward and its recompute."""

    default = "default"
    none = "none"


@dataclass(frozen=True)
class BlockPolicy(Policy):
    """Base of the policies that work block by block."""

    blocks: str | tuple[str, ...] = "auto"
    """Which modules are the blocks: ``auto`` (repeated layers of the model's own lists), a class name
    (``LlamaDecoderLayer``), a glob over module names (``model.layers.*``; ``*`` stays within one level, ``**``
    crosses levels), or a list of these."""
    exclude: str | tuple[str, ...] = ()
    """Blocks that are left alone: a class name, a glob over module names, or a list of these."""
    min_bytes: Annotated[int, Range(least=0)] = 0
    """Regions that would free less than this in one micro-batch are left out. Needs a batch to measure on."""


@dataclass(frozen=True)
class RecomputePolicy(BlockPolicy):
    """Base of the policies whose regions are recomputed."""

    inputs: Inputs = Inputs.keep
    """``offload``: what each region needs to run again waits in host memory. Costs two copies over the link a region;
    parameters and small tensors stay."""
    preserve_rng_state: bool = True
    """Replay torch's random generators in the recompute. Costs a copy of each generator's state a region and forward
    (5 KB on CPU). Without it a region that draws random numbers is an error."""
    determinism_check: DeterminismCheck = DeterminismCheck.default
    """Compare shape, dtype and device of recomputed tensors with those of the forward (microseconds a tensor); ``none``
    trusts them."""
    early_stop: bool = True
    """End a recompute at the last tensor that backward needs. ``false`` runs each region to its end, which costs what
    follows that tensor (the last matrix product of an MLP)."""


@dataclass(frozen=True)
class FullPolicy(RecomputePolicy):
    """Recompute each block as a whole; only its inputs are kept. The least memory without nesting."""

    mode: ClassVar[str] = "full"


@dataclass(frozen=True)
class EveryKPolicy(RecomputePolicy):
    """Recompute every ``k``-th block as a whole and keep the others."""

    mode: ClassVar[str] = "every_k"

    k: Annotated[int, Range(least=1)] = 2
    """Blocks 0, k, 2k, … are recomputed: the first block too, because its activations live longest. 1 is ``full``."""


@dataclass(frozen=True)
class FirstNPolicy(RecomputePolicy):
    """Recompute the first ``n`` blocks as a whole and keep the others (Megatron's method "block").

    The first blocks' activations live longest. On a pipeline stage or with a budget, n is the number of blocks that
    have to give up theirs.
    """

    mode: ClassVar[str] = "first_n"

    n: Size = 1
    """How many blocks; at most as many as there are."""


@dataclass(frozen=True)
class SelectivePolicy(RecomputePolicy):
    """Inside each block, keep the results of operations that are expensive to recompute and recompute the rest.

    Kept by default: matrix products, convolutions, attention kernels, collectives, ``topk`` (a routing decision that
    changed in the recompute would change gradients), copies to the host, and what fp8 scaling factors are made of. A
    kept result that the recompute never needs (the last matrix product of an MLP, whose output no backward formula
    reads) is dropped when the block's forward ends, so it costs nothing. One that is edited in place is copied first.
    """

    mode: ClassVar[str] = "selective"

    save: str | tuple[str, ...] | None = None
    """Operations whose results are kept: logical names (``matmul``, ``convolution``, ``attention``, ``collective``,
    ``topk``, ``d2h``, ``amax``) or operators (``mm``, ``aten.mm``, ``torch.ops.aten.mm.default``). Each must occur in
    the blocks. null: all of the logical names, of which at least one must occur."""
    offload: str | tuple[str, ...] = ()
    """Operations whose results wait in host memory instead; they take precedence over ``save``, and each must occur."""
    every_nth_matmul: Size = 1
    """Keep every n-th matrix product only, the first one of each region first, and recompute the others. Those of
    ``recompute_matmuls_of`` are not counted."""
    recompute_matmuls_of: str | tuple[str, ...] = ()
    """Globs over module names relative to the block, whose matrix products are recomputed: ``feed_forward.w2``; or
    ``attention``, ``mlp``. Each must match in at least one block."""

    def check(self) -> None:
        if self.save is not None and not self.save and not self.offload:
            raise PlanError("ckpt.save is empty: mode 'full' is the one that keeps nothing")


@dataclass(frozen=True)
class SelectiveAttentionPolicy(RecomputePolicy):
    """Recompute chosen modules inside each block, by default its attention, and keep the rest.

    Worthwhile where attention materializes its (seq × seq) scores. A fused attention kernel keeps so little that there
    is little to gain; ``selective`` is then the better choice.
    """

    mode: ClassVar[str] = "selective_attention"

    modules: str | tuple[str, ...] = "attention"
    """``attention`` (the outermost modules whose name or class says so), ``mlp``, or globs over module names relative
    to the block (``self_attn.*``). Each must match in at least one block."""


@dataclass(frozen=True)
class ConsecutivePolicy(RecomputePolicy):
    """Base of the policies that take consecutive blocks as one region; a segment never crosses lists of blocks."""

    k: Size | str = "sqrt"
    """Blocks a segment. ``sqrt``: the length with the least peak. In ``segments`` that is √(n·input bytes/block bytes)
    for n blocks, where a batch is given to measure them on; without a batch the nearest to √n, which is right only for
    blocks that keep about as much as their input. In ``nested`` it is √n."""

    def check(self) -> None:
        if isinstance(self.k, str) and self.k != "sqrt":
            raise PlanError(f"ckpt.k={self.k}: must be an integer or sqrt")


@dataclass(frozen=True)
class SegmentsPolicy(ConsecutivePolicy):
    """Recompute ``k`` consecutive blocks as one region, of which only the inputs are kept.

    A longer segment keeps less between forward and backward and needs more during its own backward: the peak is about
    (n/k)·input + k·block (arXiv:1604.06174). Transformer blocks keep far more than their input, so short segments, or
    ``nested``, are best for them.
    """

    mode: ClassVar[str] = "segments"

    skip_last: bool = False
    """Keep the last segment: its backward comes first, so that recomputing it frees nothing at the peak."""


@dataclass(frozen=True)
class NestedPolicy(ConsecutivePolicy):
    """Segments of ``k`` blocks with further regions inside: the least memory, at up to one more recompute a level.

    While a segment is recomputed, its blocks keep only what their own regions keep, so the peak is about
    (n/k)·input + k·input + block.
    """

    mode: ClassVar[str] = "nested"

    inner: str | tuple[str, ...] = "block"
    """What is recomputed by itself inside a segment: ``block`` (each block), ``attention``, ``mlp``, ``chunk`` (the
    query chunks of attention), or globs over module names relative to the block. They nest by where they lie:
    ``[block, attention]`` is three levels with the segment, the most that are allowed; ``[attention, mlp]`` is two."""
    save: str | tuple[str, ...] | None = None
    """Operations whose results the innermost regions keep, as in ``selective``, from the recompute of the segment to
    theirs. In the first forward nothing of them is kept, so the segment's memory is that without."""

    def check(self) -> None:
        super().check()
        if not self.inner:
            raise PlanError("ckpt.inner is empty: mode 'segments' is the one without regions inside")


@dataclass(frozen=True)
class OffloadPolicy(BlockPolicy):
    """Recompute nothing; what chosen modules save for backward waits in host memory.

    Worthwhile on an accelerator whose link to the host is fast compared with a block's compute. Parameters and small
    tensors stay on the device. On the CPU it runs and is right, and saves nothing.
    """

    mode: ClassVar[str] = "offload"

    modules: str | tuple[str, ...] = "block"
    """``block`` (whole blocks), ``attention``, ``mlp``, or globs over module names relative to the block."""


@dataclass(frozen=True)
class ReplayPolicy(Policy):
    """Apply a plan as it was written: ``plan.json`` of an earlier run, or of the planner."""

    mode: ClassVar[str] = "plan"

    path: str = ""
    """The file. Its blocks must be those of the model."""


@dataclass(frozen=True)
class PerStagePolicy(Policy):
    """A policy of its own for each stage of a pipeline.

    The first stage holds the most micro-batches at a time and so gains the most from recomputing; the last one holds
    one, and gains nothing.
    """

    mode: ClassVar[str] = "per_stage"

    per_stage: tuple[Policy, ...] = ()
    """One policy a stage, in order: a mode name, or a mode with its options, as in
    ``[full, {mode: nested, k: 2}, none, none]``. A stage without blocks takes ``none``."""

    def __post_init__(self) -> None:
        if isinstance(self.per_stage, (str, Mapping)) or not isinstance(self.per_stage, Sequence):
            raise PlanError(
                f"ckpt.per_stage={self.per_stage!r}: must be a list with a policy for each stage, as in "
                "[full, {mode: selective}, none, none]"
            )
        policies = []
        for stage, spec in enumerate(self.per_stage):
            try:
                policies.append(policy_from(spec))
            except PlanError as error:
                raise PlanError(f"ckpt.per_stage[{stage}]: {error}") from None
            if isinstance(policies[-1], (PerStagePolicy, ReplayPolicy)):
                raise PlanError(
                    f"ckpt.per_stage[{stage}]: mode {policies[-1].mode!r} is about all stages, not about one; "
                    f"{choices('', set(POLICIES) - {PerStagePolicy.mode, ReplayPolicy.mode})}"
                )
        object.__setattr__(self, "per_stage", tuple(policies))


POLICIES: Mapping[str, type[Policy]] = types.MappingProxyType(
    {
        cls.mode: cls
        for cls in (
            NoPolicy,
            FullPolicy,
            EveryKPolicy,
            FirstNPolicy,
            SelectivePolicy,
            SelectiveAttentionPolicy,
            SegmentsPolicy,
            NestedPolicy,
            OffloadPolicy,
            ReplayPolicy,
            PerStagePolicy,
        )
    }
)
"""Mode name to policy class."""


PolicySpec = str | Mapping[str, Any] | Policy | None
"""Any of the ways to write a policy."""


def policy_from(spec: PolicySpec) -> Policy:
    """A policy from any of the ways to write one.

    Args:
        spec: a mode name (``"selective"``), a mapping with ``mode`` and that mode's options (a dict or an OmegaConf
            node), a policy object, or ``None`` for no policy.

    Raises:
        PlanError: an unknown mode, an option of another mode, or a value of the wrong type.
    """
    if isinstance(spec, Policy):
        return spec
    if spec is None:
        return NoPolicy()
    if isinstance(spec, str):
        return _policy_class(spec)()
    if not isinstance(spec, Mapping):
        raise PlanError(
            f"a policy is a mode name, a mapping or a Policy object, not {type(spec).__name__}"
            + "; apply_plan(model, plan) applies a plan" * (type(spec).__name__ == "Plan")
        )
    options = {str(k): spec[k] for k in spec}
    alone = PerStagePolicy.mode if PerStagePolicy.mode in options else None  # no other mode has that key
    mode = options.pop("mode", alone)
    cls = Policy if mode is None else _policy_class(str(mode))
    valid = _options(cls)
    for key in options:
        if key not in valid:
            owners = [name for name, policy in POLICIES.items() if key in _options(policy)]
            whose = f"an option of {', '.join(owners)}" if owners else ""
            if mode is not None:
                other = f" (it is {whose})" if owners else ""
                raise PlanError(f"ckpt.{key}: no option of mode {mode!r}{other}; {choices(key, valid)}")
            names = owners or [name for name in POLICIES if name != NoPolicy.mode]
            raise PlanError(
                f"ckpt.{key}: no policy is chosen{f', and this is {whose}' * bool(owners)}; set mode: "
                f"{' or '.join(f'+ckpt={name}' for name in names)} on the command line"
            )
    if mode is None:
        raise PlanError(f"a policy needs a mode. Valid: {', '.join(sorted(POLICIES))}")
    return cls(**options)


def telling_options(policy: Mapping[str, Any]) -> dict[str, Any]:
    """Of a policy as :meth:`Policy.to_dict` wrote it, the options worth reading: those that differ from their defaults,
    and of the mode's own also defaults that say something (``k=2``)."""
    common = {f.name for f in dataclasses.fields(RecomputePolicy)}
    cls = POLICIES.get(str(policy.get("mode")), RecomputePolicy)
    defaults = {f.name: _plain(f.default) for f in dataclasses.fields(cls)}
    silent: tuple[Any, ...] = (None, False, [], "", 1)
    return {
        name: value
        for name, value in policy.items()
        if name not in ("mode", "per_stage")
        and (value != defaults.get(name) or not (name in common or value in silent))
    }


def described(policy: Mapping[str, Any]) -> str:
    """A policy as :meth:`Policy.to_dict` wrote it, for a line of text: ``nested (k=2, inner=block)``."""
    options = ", ".join(f"{name}={value}" for name, value in telling_options(policy).items())
    return str(policy.get("mode", "none")) + (f" ({options})" if options else "")


def listed(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """An option that may be one string or several, as several."""
    return (value,) if isinstance(value, str) else value


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Policy):
        return value.to_dict()
    return value.value if isinstance(value, Choice) else value


def _policy_class(mode: str) -> type[Policy]:
    try:
        return POLICIES[mode]
    except KeyError:
        raise PlanError(f"ckpt: no mode {mode!r}; {choices(mode, POLICIES)}") from None


def _options(cls: type[Policy]) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]
