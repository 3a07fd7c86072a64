"""The file, as JSON and nothing else."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from dist_ckpt.errors import ConfigError


def read_config(path: str | Path) -> dict[str, Any]:
    """The object in a JSON file, none of whose keys is given twice.

    Args:
        path: UTF-8, with or without a byte order mark.

    Raises:
        ConfigError: no such file, a folder, not readable, not JSON (with line and column), ``NaN`` or ``Infinity``, a
            key that is given twice, or JSON that is no object.
    """
    text = _text(Path(path))

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if twice := sorted(key for key, count in Counter(key for key, _ in pairs).items() if count > 1):
            raise ConfigError(f"{path}: {', '.join(twice)}: given twice in one object; keep one of them")
        return dict(pairs)

    def no_number(name: str) -> NoReturn:
        raise ConfigError(f"{path}: {name} is not JSON; write a number")

    try:
        data = json.loads(text, object_pairs_hook=unique, parse_constant=no_number)
    except json.JSONDecodeError as error:
        # DeepSpeed itself would read Hjson, which other programs cannot.
        raise ConfigError(
            f"{path}: line {error.lineno}, column {error.colno}: not JSON: {error.msg}; comments, trailing commas and "
            "keys without quotes are not JSON either"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{path}: is nested too deeply for a DeepSpeed configuration") from error
    except ConfigError:
        raise
    except ValueError as error:  # an integer of more digits than Python converts
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f'{path}: must be an object, such as {{"zero_optimization": {{"stage": 2}}}}')
    return data


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        near = sorted(str(p) for p in path.parent.glob("*.json")) if path.parent.is_dir() else []
        there = f"; there are {', '.join(near[:8])}" if near else ""
        raise ConfigError(f"{path}: no such file{there}") from error
    except IsADirectoryError as error:
        raise ConfigError(f"{path}: is a folder; name a JSON file in it") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not text.strip():
        raise ConfigError(f'{path}: is empty; the least is {{"zero_optimization": {{"stage": 0}}}}')
    return text
