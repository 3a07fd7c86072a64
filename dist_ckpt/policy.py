"""What the user asks for: one small frozen dataclass a mode.

A policy says nothing about a particular model. :func:`dist_ckpt.make_plan` turns it into a
:class:`~dist_ckpt.plan.Plan`, which does.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Union

from dist_ckpt.errors import PlanError, choices


@dataclass(frozen=True)
class Policy:
    """Base of all policies; ``mode`` is the name used in configurations and on the command line."""

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
    """What policies that work block by block share."""

    blocks: str | tuple[str, ...] = "auto"
    """Which modules are the blocks: ``auto`` (repeated layers of the model's own lists), a class name
    (``LlamaDecoderLayer``), a glob over module names (``model.layers.*``; ``*`` stays within one level, ``**``
    crosses levels), or a list of these."""


@dataclass(frozen=True)
class FullPolicy(BlockPolicy):
    """Recompute each block whole; only its inputs are kept. Least memory that one level gives."""

    mode: ClassVar[str] = "full"


@dataclass(frozen=True)
class EveryKPolicy(BlockPolicy):
    """Recompute one block in ``k`` whole and keep the others."""

    mode: ClassVar[str] = "every_k"

    k: int = 2
    """Blocks 0, k, 2k, … are recomputed; early blocks first, because their activations live longest."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise PlanError(f"ckpt.k must be at least 1, not {self.k} (1 recomputes every block, as mode 'full')")


@dataclass(frozen=True)
class SelectivePolicy(BlockPolicy):
    """Inside each block keep the results of operations that are dear to recompute and recompute the rest.

    Kept by default: matrix products, convolutions, attention kernels, collectives, ``topk`` (a routing that flips in
    the recompute would change gradients) and copies to the host. A kept result that the
    recompute never reaches (the last matrix product of an MLP, whose output no backward formula reads) is dropped
    when the block's forward ends, so it costs nothing.
    """

    mode: ClassVar[str] = "selective"

    save: tuple[str, ...] | None = None
    """Operations whose results are kept: logical names (``matmul``, ``convolution``, ``attention``, ``collective``,
    ``topk``, ``d2h``) or operators (``mm``, ``aten.mm``, ``torch.ops.aten.mm.default``). Each must occur in the
    blocks. null: all of the logical names, of which at least one must occur."""

    def __post_init__(self) -> None:
        if self.save is not None and not self.save:
            raise PlanError("ckpt.save is empty: with nothing kept, ask for mode 'full' instead")


@dataclass(frozen=True)
class SelectiveAttentionPolicy(BlockPolicy):
    """Recompute chosen modules inside each block, by default its attention, and keep the rest.

    Pays where the attention materialises its (seq × seq) scores; a fused attention kernel keeps little that could
    be saved, and ``selective`` is then the better choice.
    """

    mode: ClassVar[str] = "selective_attention"

    modules: str | tuple[str, ...] = "auto"
    """Globs over module names relative to the block (``attention``, ``mlp.*``). ``auto`` finds the outermost modules
    whose name or class speaks of attention. Each glob must match in at least one block."""


POLICIES: Mapping[str, type[Policy]] = types.MappingProxyType(
    {cls.mode: cls for cls in (NoPolicy, FullPolicy, EveryKPolicy, SelectivePolicy, SelectiveAttentionPolicy)}
)
"""Mode name to policy class."""


def policy_from(spec: str | Mapping[str, Any] | Policy | None) -> Policy:
    """A policy from what people write.

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
    if mode is None:
        raise PlanError(
            f"ckpt has options ({', '.join(options)}) but no mode. Valid modes: {', '.join(sorted(POLICIES))}"
        )
    cls = _policy_class(str(mode))
    hints = typing.get_type_hints(cls)
    valid = [f.name for f in dataclasses.fields(cls)]
    for key in options:
        if key not in valid:
            owners = [m for m, c in POLICIES.items() if key in {f.name for f in dataclasses.fields(c)}]
            other = f" (it is an option of {', '.join(owners)})" if owners else ""
            raise PlanError(f"ckpt.{key}: no option of mode {mode!r}{other}; {choices(key, valid)}")
    return cls(**{key: _typed(f"ckpt.{key}", value, hints[key]) for key, value in options.items()})


def _policy_class(mode: str) -> type[Policy]:
    try:
        return POLICIES[mode]
    except KeyError:
        raise PlanError(f"ckpt: no mode {mode!r}; {choices(mode, POLICIES)}") from None


def _typed(where: str, value: Any, hint: Any) -> Any:
    """``value`` as ``hint`` wants it: lists of strings become tuples; nothing else is converted."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = tuple(value)
    alternatives = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
    for alternative in alternatives:
        if typing.get_origin(alternative) is tuple:
            if isinstance(value, tuple) and all(isinstance(v, str) for v in value):
                return value
        elif type(value) is alternative:  # exact: True is no int here
            return value
    wanted = " or ".join(_describe(a) for a in alternatives)
    raise PlanError(f"{where}: expected {wanted}, not {value!r}")


def _describe(hint: Any) -> str:
    if hint is type(None):
        return "null"
    if typing.get_origin(hint) is tuple:
        return "a list of strings"
    return {int: "an integer", str: "a string", bool: "true or false", float: "a number"}.get(hint, str(hint))
