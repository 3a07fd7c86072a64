"""What pages are made of: tables, charts, text. Plain data, which other than pages may show too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dist_ckpt.memory.records import byte_unit, format_bytes


@dataclass(frozen=True)
class Bytes:
    """A number of bytes in a table: shown in the table's unit, exact for whoever points at it."""

    nbytes: int | None


@dataclass(frozen=True)
class Share:
    """A part of a whole; ``0.25`` is shown as 25.0%."""

    of_one: float


Cell = str | int | float | Bytes | Share | None
"""``None`` is shown as a dash. Floats are shown with four significant digits; write others as text."""


@dataclass(frozen=True)
class Table:
    """Rows of cells; all bytes in a table have one unit, which its caption names."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    note: str = ""
    """What the table leaves out."""

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), (self.caption, self.columns)

    @cached_property
    def unit(self) -> str | None:
        """GiB or MiB; None where there are no bytes."""
        counts = [cell.nbytes for row in self.rows for cell in row if isinstance(cell, Bytes)]
        return byte_unit(counts) if counts else None

    @cached_property
    def numeric(self) -> tuple[bool, ...]:
        """For each column whether it holds no text, and so is read by its right edge."""
        return tuple(not any(isinstance(row[n], str) for row in self.rows) for n in range(len(self.columns)))

    def shown(self, cell: Cell) -> str:
        """A cell's text."""
        if cell is None:
            return "-"
        if isinstance(cell, Bytes):
            return format_bytes(cell.nbytes, self.unit or "auto")
        if isinstance(cell, Share):
            return f"{cell.of_one:.1%}"
        if isinstance(cell, float):
            return _significant(cell)
        return f"{cell:,}" if isinstance(cell, int) else cell


@dataclass(frozen=True)
class Chart:
    """A chart and the table that says the same."""

    title: str
    summary: str
    """What it shows, in a sentence, for those who cannot see it."""
    figure: Mapping[str, Any]
    """Plotly's ``data`` and ``layout``; ``$name`` stands for the color ``--name`` of ``page.css``. ``layout.height`` is
    in pixels."""
    table: Table
    note: str = ""
    """What the chart leaves out."""


@dataclass(frozen=True)
class Fact:
    """A figure worth reading first."""

    label: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Facts:
    """Figures side by side."""

    items: tuple[Fact, ...]


@dataclass(frozen=True)
class Listing:
    """Sentences, the most important first; each with a word on what it is worth, or none."""

    items: tuple[tuple[str, str], ...]
    title: str = ""


@dataclass(frozen=True)
class Node:
    """A branch of a tree."""

    text: str
    tags: tuple[str, ...] = ()
    inner: tuple[Node, ...] = ()


@dataclass(frozen=True)
class Code:
    """Text as it is, behind a summary that opens it."""

    summary: str
    text: str


@dataclass(frozen=True)
class Columns:
    """Small charts, two a row where there is room."""

    charts: tuple[Chart, ...]


@dataclass(frozen=True)
class Panel:
    """One of several contents, of which the reader chooses one."""

    choice: str
    """What it is called in the list of choices; no two are called alike."""
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Panels:
    """Contents of which one is shown at a time, the first one first."""

    label: str
    panels: tuple[Panel, ...]


Part = str | Chart | Table | Facts | Listing | Node | Code | Columns | Panels
"""What a section consists of; text is a paragraph."""

PARTS = (Chart, Table, Facts, Listing, Node, Code, Columns, Panels)
"""The kinds of them that are not text."""


@dataclass(frozen=True)
class Section:
    """A part of a page under a heading of its own."""

    anchor: str
    title: str
    parts: tuple[Part, ...]


def _significant(number: float) -> str:
    if number and (abs(number) >= 1e15 or abs(number) < 1e-4):
        return f"{number:.3e}"
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:#.4g}".rstrip(".")
