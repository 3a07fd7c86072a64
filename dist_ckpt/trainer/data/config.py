"""What a user can ask of the data."""

from __future__ import annotations

from dataclasses import dataclass, fields

from dist_ckpt.errors import ConfigError, choices


@dataclass
class DataConfig:
    """Where the rows come from. An option that the chosen kind has no use for is an error, never ignored.

    Raises:
        ConfigError: an unknown kind or dtype, a value out of range, an option that the kind does not use.
    """

    kind: str = "stdlib"
    """``stdlib``: the sources of the running Python's standard library, a token a byte; ``text``: any files,
    a token a byte; ``tokens``: flat little-endian files of token ids; ``synthetic``: made up, learnable."""

    glob: str | None = None
    """text, tokens: the files, a document each; ``**`` is recursive, relative to the working folder."""

    validation_glob: str | None = None
    """text, tokens: the validation files, never trained on (default: a share of ``glob``)."""

    validation_fraction: float = 0.05
    """The share of the documents that validates, picked by hashed path: adding one moves no other."""

    dtype: str | None = None
    """tokens: ``uint16`` (default) or ``uint32``."""

    pack: bool = True
    """True: documents are joined and cut into rows; False: one document a row, cut off or padded."""

    max_document_bytes: int | None = None
    """stdlib, text, tokens: leave out (and count) documents that are longer."""

    documents: int | None = None
    """synthetic: how many there are (default 4096)."""

    document_tokens: int | None = None
    """synthetic: the longest one (default twice the row); the shortest has a quarter of that."""

    def __post_init__(self) -> None:
        files = ("glob", "validation_glob", "max_document_bytes")
        uses: dict[str, tuple[str, ...]] = {
            "stdlib": ("max_document_bytes",),
            "text": files,
            "tokens": (*files, "dtype"),
            "synthetic": ("documents", "document_tokens"),
        }
        if self.kind not in uses:
            raise ConfigError(f"data.kind={self.kind}: no such kind of data; {choices(self.kind, uses)}")
        valid = {"kind", "pack", "validation_fraction", *uses[self.kind]}
        for field in fields(self):
            if field.name not in valid and getattr(self, field.name) != field.default:
                users = " and ".join(kind for kind, names in uses.items() if field.name in names)
                raise ConfigError(
                    f"data.{field.name}={getattr(self, field.name)}: is an option of {users}, not of "
                    f"{self.kind}, whose options are {', '.join(sorted(valid - {'kind'}))}"
                )
        if "glob" in valid and not self.glob:
            raise ConfigError(f"data.glob: data={self.kind} needs one, such as data.glob='corpus/**/*.txt'")
        if self.validation_glob == "":
            raise ConfigError("data.validation_glob: is empty; name files, or null for a share of data.glob")
        if self.dtype not in (None, "uint16", "uint32"):
            raise ConfigError(f"data.dtype={self.dtype}: {choices(self.dtype, ('uint16', 'uint32'))}")
        if not 0 <= self.validation_fraction < 1:
            raise ConfigError(f"data.validation_fraction={self.validation_fraction}: must be at least 0, below 1")
        if self.validation_glob and self.validation_fraction != type(self).validation_fraction:
            raise ConfigError(
                f"data.validation_fraction={self.validation_fraction}: has no use beside "
                "data.validation_glob, which names all validation files; set one of the two"
            )
        for name, least in (("max_document_bytes", 1), ("documents", 1), ("document_tokens", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"data.{name}={value}: must be at least {least}, or null")
