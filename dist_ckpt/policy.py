"""What the user asks for: one small frozen dataclass per mode.

A policy says nothing about a particular model. :func:`dist_ckpt.make_plan` turns it into a
:class:`~dist_ckpt.plan.Plan`, which does.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from dist_ckpt.errors import PlanError, choices
from dist_ckpt.typed import Checked, Range


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
        return {"mode": self.mode} | {k: list(v) if isinstance(v, tuple) else v for k, v in fields.items()}


@dataclass(frozen=True)
class NoPolicy(Policy):
    """Keep every activation: nothing is recomputed."""

    mode: ClassVar[str] = "none"


@dataclass(frozen=True)
class BlockPolicy(Policy):
    """Base of the policies that work block by block."""

    blocks: str | tuple[str, ...] = "auto"
    """Which modules are the blocks: ``auto`` (repeated layers of the model's own lists), a class name
    (``LlamaDecoderLayer``), a glob over module names (``model.layers.*``; ``*`` stays within one level, ``**``
    crosses levels), or a list of these."""


@dataclass(frozen=True)
class FullPolicy(BlockPolicy):
    """Recompute each block as a whole; only its inputs are kept. The least memory without nesting."""

    mode: ClassVar[str] = "full"


@dataclass(frozen=True)
class EveryKPolicy(BlockPolicy):
    """Recompute every ``k``-th block as a whole and keep the others."""

    mode: ClassVar[str] = "every_k"

    k: Annotated[int, Range(least=1)] = 2
    """Blocks 0, k, 2k, … are recomputed: the first block too, because its activations live longest. 1 is ``full``."""


@dataclass(frozen=True)
class SelectivePolicy(BlockPolicy):
    """Inside each block, keep the results of operations that are expensive to recompute and recompute the rest.

    Kept by default: matrix products, convolutions, attention kernels, collectives, ``topk`` (a routing decision that
    changed in the recompute would change gradients) and copies to the host. A kept result that the recompute never
    needs (the last matrix product of an MLP, whose output no backward formula reads) is dropped when the block's
    forward ends, so it costs nothing.
    """

    mode: ClassVar[str] = "selective"

    save: tuple[str, ...] | None = None
    """Operations whose results are kept: logical names (``matmul``, ``convolution``, ``attention``, ``collective``,
    ``topk``, ``d2h``) or operators (``mm``, ``aten.mm``, ``torch.ops.aten.mm.default``). Each must occur in the
    blocks. null: all of the logical names, of which at least one must occur."""

    def check(self) -> None:
        if self.save is not None and not self.save:
            raise PlanError("ckpt.save is empty: mode 'full' is the one that keeps nothing")


@dataclass(frozen=True)
class SelectiveAttentionPolicy(BlockPolicy):
    """Recompute chosen modules inside each block, by default its attention, and keep the rest.

    Worthwhile where attention materializes its (seq × seq) scores. A fused attention kernel keeps so little that there
    is little to gain; ``selective`` is then the better choice.
    """

    mode: ClassVar[str] = "selective_attention"

    modules: str | tuple[str, ...] = "auto"
    """Globs over module names relative to the block (``attention``, ``mlp.*``). ``auto``: the outermost modules
    whose name or class contains ``attn`` or ``attention``. Each glob must match in at least one block."""


POLICIES: Mapping[str, type[Policy]] = types.MappingProxyType(
    {cls.mode: cls for cls in (NoPolicy, FullPolicy, EveryKPolicy, SelectivePolicy, SelectiveAttentionPolicy)}
)
"""Mode name to policy class."""


def policy_from(spec: str | Mapping[str, Any] | Policy | None) -> Policy:
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
        raise PlanError(f"a policy is a mode name, a mapping or a Policy object, not {type(spec).__name__}")
    options = {str(k): spec[k] for k in spec}
    mode = options.pop("mode", None)
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


def _policy_class(mode: str) -> type[Policy]:
    try:
        return POLICIES[mode]
    except KeyError:
        raise PlanError(f"ckpt: no mode {mode!r}; {choices(mode, POLICIES)}") from None


def _options(cls: type[Policy]) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]
