"""One self-contained page: how parts and templates become HTML.

A page holds its own styles and scripts, and a content security policy under which a browser fetches nothing. Colors
are named once, in ``page.css``, for light and for dark; charts name them as ``$params`` and are drawn again when the
reader's preference changes.
"""

from __future__ import annotations

import json
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dist_ckpt.report.html.parts import PARTS, Bytes


def render(template: str, **context: Any) -> str:
    """One HTML page.

    Args:
        template: a file of ``templates/`` that extends ``base.html.j2``.
        context: what it names. A name that is missing is an error (:class:`jinja2.UndefinedError`).
    """
    environment = Environment(
        loader=PackageLoader("dist_ckpt.report.html"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(script_json=_script_json)
    environment.tests.update({kind.__name__.lower(): _is_a(kind) for kind in (Bytes, *PARTS)})
    environment.globals.update(plotly=_plotly)
    return environment.get_template(template).render(context)


def _is_a(kind: type) -> Any:
    return lambda value: isinstance(value, kind)


def _script_json(value: Any) -> Markup:
    """JSON that cannot end the script element it stands in.

    Raises:
        ValueError: a number that JSON does not have.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _plotly() -> Markup:
    from plotly.offline import get_plotlyjs  # type: ignore[import-untyped]

    return Markup(get_plotlyjs())
