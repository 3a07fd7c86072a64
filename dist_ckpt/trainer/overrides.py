"""Command-line arguments into plain data, by Hydra's ``compose()`` over the files in ``configs/``."""

from __future__ import annotations

import io
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from hydra.version import VersionBase
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dist_ckpt.errors import ConfigError, choices
from dist_ckpt.trainer.keys import mesh_refusal

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
GROUPS = ("ckpt", "engine", "model", "data", "device")


def group_choices(group: str) -> list[str]:
    """The names that ``group=NAME`` may have."""
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def compose_overrides(overrides: Sequence[str], text_keys: Collection[str]) -> dict[str, Any]:
    """The files and arguments merged; keys and types are not checked, interpolations not resolved.

    Args:
        overrides: arguments in Hydra's grammar.
        text_keys: keys whose value is text even where it looks like a number (``run_dir=2024``).

    Raises:
        ConfigError: an argument that cannot be read, an unknown group choice, a group given twice.
    """
    if not (CONFIGS / "config.yaml").is_file():
        raise ConfigError(f"{CONFIGS}/config.yaml: not there; train from a clone of the repository (pip install -e .)")
    parser = OverridesParser.create()
    chosen: dict[str, str] = {}
    arguments: list[str] = []
    for argument in overrides:
        override = _parsed(parser, argument, text_keys)
        group = override.key_or_group
        if group in GROUPS and (group == "ckpt" or not isinstance(override.value(), dict)):
            if group in chosen:
                raise ConfigError(f"{group} is given twice: {chosen[group]} and {argument}; give it once")
            chosen[group] = argument
        arguments += _normalized(override, argument, text_keys)
    return _composed(arguments)


def parse_yaml(text: str) -> dict[str, Any]:
    """A mapping written as YAML; interpolations are kept.

    Raises:
        ConfigError: not YAML, or not a mapping.
    """
    try:
        data = OmegaConf.to_container(OmegaConf.load(io.StringIO(text)))
    except (yaml.YAMLError, OmegaConfBaseException, OSError) as error:
        raise ConfigError(f"not a configuration in YAML: {' '.join(str(error).split())}") from error
    if not (isinstance(data, dict) and data):
        raise ConfigError(f"not a configuration in YAML: must be a mapping of keys to values, not {data or 'empty'}")
    return {str(key): value for key, value in data.items()}


def _parsed(parser: OverridesParser, argument: str, text_keys: Collection[str]) -> Override:
    if argument.startswith("-"):
        written = argument.lstrip("-")
        instead = f"write {written}" if "=" in written else "options are written key=value"
        raise ConfigError(f"{argument}: no such flag; {instead} (--help lists all)")
    if argument.startswith("~"):
        raise ConfigError(f"{argument}: keys are not deleted; set one to null, or ckpt=none")
    key, equals, value = argument.lstrip("+").partition("=")
    key = key.strip()
    if not equals:
        groups = [group for group in GROUPS if key in group_choices(group)]
        meant = f"did you mean {' or '.join(f'{group}={key}' for group in groups)}? " if groups else ""
        raise ConfigError(f"{argument!r}: {meant}options are written key=value, such as train.steps=100")
    if not re.fullmatch(r"[A-Za-z_][\w-]*(\.[\w-]+)*", key):
        dotted = key.replace("/", ".")
        meant = f"; did you mean {dotted}?" if "/" in key else ", such as train.steps"
        raise ConfigError(f"{argument!r}: {key!r} is not a key: names joined by dots{meant}")
    if key.partition(".")[0] == "hydra":
        raise ConfigError(f"{argument}: Hydra's own options have no effect here; run_dir names the run's folder")
    # Inner quotes for Hydra, outer ones for the shell.
    quoted = shlex.quote(f'{key}="' + value.replace('"', r"\"") + '"')
    try:
        override = parser.parse_override(argument)
        override.value()
    except HydraException as error:
        reason = str(error).splitlines()[0]
        remedy = f"quote it: {quoted}" if key in text_keys else "text with , = : { } [ ] ( ) must be in quotes"
        raise ConfigError(f"{argument!r}: the value cannot be read ({reason}); {remedy}") from error
    if override.is_sweep_override():
        remedy = f"as text it is {quoted}" if key in text_keys else "a list is written [a, b]"
        raise ConfigError(f"{argument}: several values, but one run takes one; {remedy}")
    return override


def _normalized(override: Override, argument: str, text_keys: Collection[str]) -> list[str]:
    """The argument with the prefix that Hydra needs, whichever one was typed.

    That is none for a choice of a group in the defaults list, ``+`` for ``ckpt``, which is not in the list, and ``++``
    for a value.
    """
    key, value = override.key_or_group, override.value()
    raw = argument.partition("=")[2].strip()
    if key in GROUPS and not isinstance(value, dict):
        if key == "ckpt" and value is None:
            return []
        _check_choice(key, str(value) if isinstance(value, str) else raw)
        return [f"{'+' * (key == 'ckpt')}{key}={raw}"]
    if key in text_keys and isinstance(value, (bool, int, float)):
        raw = f'"{raw}"'
    return [f"++{key}={raw}"]


def _check_choice(group: str, name: str) -> None:
    valid = group_choices(group)
    if name in valid:
        return
    refusal = mesh_refusal(name) if group == "engine" else None
    if refusal:
        raise ConfigError(f"{group}={name}: {refusal}. Valid: {', '.join(valid)}")
    raise ConfigError(f"{group}={name}: no such choice; {choices(name, valid)}{', or null' * (group == 'ckpt')}")


def _composed(arguments: list[str]) -> dict[str, Any]:
    """Composes without disturbing a program that uses Hydra itself: Hydra keeps its state in singletons."""
    version_base, running = VersionBase.instance(), GlobalHydra.instance().hydra
    base = version_base.version_base
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(CONFIGS), job_name="train", version_base="1.3"):
            composed = compose(config_name="config", overrides=arguments)
        plain = OmegaConf.to_container(composed)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(f"the configuration cannot be composed: {' '.join(str(error).split())}") from error
    finally:
        GlobalHydra.instance().hydra = running
        version_base.version_base = base
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
