"""What a user can ask of the data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

from dist_ckpt.errors import ConfigError
from dist_ckpt.typed import Checked, Choice, Range, shown


class DataKind(Choice):
    """What the rows are made of."""

    stdlib = "stdlib"
    """The sources of the running Python's standard library, one token per byte."""
    text = "text"
    """Any files, one token per byte."""
    tokens = "tokens"
    """Flat little-endian files of token ids."""
    synthetic = "synthetic"
    """Generated, learnable."""


class TokenType(Choice):
    """How one token is stored."""

    uint16 = "uint16"
    uint32 = "uint32"


@dataclass
class DataConfig(Checked, section="data"):
    """Where the rows come from. An option that the chosen kind does not use is an error, never ignored.

    Raises:
        ConfigError: a value of the wrong type or out of range, or an option that the kind does not use.
    """

    kind: DataKind = DataKind.stdlib
    glob: str | None = None
    """text, tokens: the files, one document each; ``**`` is recursive, relative to the working directory."""
    validation_glob: str | None = None
    """text, tokens: the validation files, never trained on. null: a share of ``glob``."""
    validation_fraction: Annotated[float, Range(least=0, below=1)] = 0.05
    """The share of documents held out for validation, chosen by hashed path: adding a file moves no other."""
    dtype: TokenType | None = None
    """tokens: the type of one token. null: ``uint16``."""
    pack: bool = True
    """true: documents are joined and cut into rows. false: one document per row, cut off or padded."""
    max_document_bytes: Annotated[int, Range(least=1)] | None = None
    """stdlib, text, tokens: leave out (and count) longer documents."""
    documents: Annotated[int, Range(least=1, most=1_000_000)] | None = None
    """synthetic: how many. null: 4096."""
    document_tokens: Annotated[int, Range(least=2, most=10_000_000)] | None = None
    """synthetic: length of the longest; the shortest has a quarter of that. null: two rows."""

    def check(self) -> None:
        files = ("glob", "validation_glob", "max_document_bytes")
        uses: dict[DataKind, tuple[str, ...]] = {
            DataKind.stdlib: ("max_document_bytes",),
            DataKind.text: files,
            DataKind.tokens: (*files, "dtype"),
            DataKind.synthetic: ("documents", "document_tokens"),
        }
        valid = {"kind", "pack", "validation_fraction", *uses[self.kind]}
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in valid and value != field.default:
                users = " and ".join(kind for kind, names in uses.items() if field.name in names)
                raise ConfigError(
                    f"data.{field.name}={shown(value)}: is an option of {users}, not of {self.kind}, "
                    f"whose options are {', '.join(sorted(valid - {'kind'}))}"
                )
        if "glob" in valid and not self.glob:
            raise ConfigError(f"data.glob: data={self.kind} needs one, such as data.glob='corpus/**/*.txt'")
        if self.validation_glob == "":
            raise ConfigError("data.validation_glob: is empty; name files, or null for a share of data.glob")
        if self.validation_glob and self.validation_fraction != type(self).validation_fraction:
            raise ConfigError(
                f"data.validation_fraction={self.validation_fraction}: has no effect with data.validation_glob, "
                "which names all validation files; set one of the two"
            )
