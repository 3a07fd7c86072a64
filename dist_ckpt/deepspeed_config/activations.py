"""What the file asks to be recomputed, as a policy of ours.

DeepSpeed itself does nothing with its section ``activation_checkpointing`` unless model code calls
``deepspeed.checkpointing``, and reads ``pipeline.activation_checkpoint_interval`` in a pipeline alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dist_ckpt.deepspeed_config.run import RunSettings
from dist_ckpt.deepspeed_config.schema import SCHEMA
from dist_ckpt.deepspeed_config.walk import Walk, at, listed, shown
from dist_ckpt.errors import ConfigError

_SECTION = "activation_checkpointing"
_INTERVAL = "pipeline.activation_checkpoint_interval"

_COMMON = ("blocks", "exclude", "min_bytes", "inputs", "preserve_rng_state", "determinism_check", "early_stop")
"""Options that a policy keeps when it is put inside of chunks."""


def recompute_is_asked_once(data: Mapping[str, Any], run: RunSettings) -> Iterator[str]:
    """The rule about what is asked to be recomputed: one thing."""
    yield from _asked_twice(data)


def _asked_twice(data: Mapping[str, Any]) -> Iterator[str]:
    number, interval = _asked(data)[0], at(data, _INTERVAL)
    if number and interval:
        yield (
            f"{shown(f'{_SECTION}.number_checkpoints', number)} and {shown(_INTERVAL, interval)}: both say how many "
            "blocks are recomputed as one; give one of the two"
        )


def policy_of(
    data: Mapping[str, Any], num_blocks: int, inner: Mapping[str, Any] | None = None, path: str | None = None
) -> dict[str, Any] | None:
    """The policy that a file asks for, as :func:`dist_ckpt.policy.policy_from` takes it; None if it asks for none.

    ``number_checkpoints: n`` recomputes segments of ceil(num_blocks / n) blocks, ``cpu_checkpointing`` lets their
    inputs wait in host memory, and ``pipeline.activation_checkpoint_interval: k`` recomputes segments of k blocks. With
    an ``inner`` policy such an interval becomes the outer level of mode ``nested``.

    Args:
        data: as :func:`~dist_ckpt.deepspeed_config.read_config` gives it. Only the two sections that are about this are
            read and checked, as :func:`~dist_ckpt.deepspeed_config.resolve` checks them.
        num_blocks: of the whole model.
        inner: the run's own policy, as ``Policy.to_dict`` writes it; None or mode ``none``: there is none.
        path: the file, for messages.

    Raises:
        ConfigError: the sections have mistakes; or the run's policy and the file both say what to recompute, and cannot
            be nested.
    """
    walk = Walk(SCHEMA, None)
    data = walk.taken({name: data[name] for name in (_SECTION, "pipeline") if name in data})
    if problems := [*walk.problems, *_asked_twice(data)]:
        raise ConfigError(listed(problems, path))
    interval, (number, offloads) = at(data, _INTERVAL) or 0, _asked(data)
    if not (interval or number or offloads):
        return None
    own = inner if inner is not None and inner.get("mode") != "none" else None
    where = path or "DeepSpeed configuration"
    if own is not None and (number or offloads or not interval):
        raise ConfigError(
            f"{where}: {_SECTION} and ckpt.mode={own['mode']} both say what to recompute; remove the section, or ckpt"
        )
    if own is not None:
        return _nested(interval, own, where)
    k = interval or (-(-max(num_blocks, 1) // number) if number else 1)
    policy: dict[str, Any] = {"mode": "full"} if k == 1 else {"mode": "segments", "k": k}
    return policy | ({"inputs": "offload"} if offloads else {})


def _asked(data: Mapping[str, Any]) -> tuple[int | None, bool]:
    """How many regions, and whether their inputs are offloaded."""
    return at(data, f"{_SECTION}.number_checkpoints"), at(data, f"{_SECTION}.cpu_checkpointing") is True


def _nested(k: int, own: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Segments of ``k`` blocks, with the regions of the run's own policy inside."""
    mode, common = own["mode"], {name: own[name] for name in _COMMON if name in own}
    if k == 1 and mode == "full":
        return dict(own)
    inside: dict[str, Any] = {}
    if mode == "full":
        inside = {"inner": "block"}
    elif mode == "selective_attention":
        inside = {"inner": own["modules"]}
    elif mode == "selective" and _is_plain_selection(own):
        inside = {"inner": "block", "save": own["save"]}
    if not inside:
        hint = "; name what it keeps, ckpt.save=[matmul,attention]" if mode == "selective" else ""
        raise ConfigError(
            f"{where}: {_INTERVAL}={k}: chunks can hold +ckpt=full, +ckpt=selective_attention or +ckpt=selective with "
            f"ckpt.save, and not +ckpt={mode} as it is{hint}; remove the interval, or change ckpt"
        )
    return {"mode": "nested", "k": k, **inside, **common}


def _is_plain_selection(own: Mapping[str, Any]) -> bool:
    """Whether ``selective`` says by ``save`` alone what it keeps, as ``nested`` can."""
    others = (own.get("offload"), own.get("recompute_matmuls_of"), own.get("every_nth_matmul", 1) != 1)
    return bool(own.get("save")) and not any(others)
