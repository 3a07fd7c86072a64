"""What a user can ask of the model."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated

from dist_ckpt.errors import ConfigError
from dist_ckpt.typed import Checked, Choice, Positive, Range, Size, shown


class ModelKind(Choice):
    """Whose code the model is."""

    decoder = "decoder"
    """A Llama-style decoder of the sizes below."""
    hf = "hf"
    """A causal language model of Hugging Face's, from a folder or configuration on this machine."""


class Weights(Choice):
    """Where the weights of ``kind: hf`` come from."""

    random = "random"
    """The model's own initialization, the same on every rank and for every number of ranks."""
    pretrained = "pretrained"
    """The safetensors files of the folder."""


class Attention(Choice):
    """How attention is computed; all three give the same result."""

    sdpa = "sdpa"
    """torch's fused kernel."""
    eager = "eager"
    """Materializes the (seq × seq) scores, as models without a fused kernel do."""
    chunked = "chunked"
    """Materializes the scores of ``attention_chunk`` queries at a time."""


class Loss(Choice):
    """How the loss is computed; both give the same result."""

    full = "full"
    """All (batch · seq, vocab) logits at once."""
    chunked = "chunked"
    """Logits of ``loss_chunk`` tokens at a time, recomputed in backward, so that they never all exist."""


@dataclass
class ModelConfig(Checked, section="model"):
    """A decoder with RMSNorm, rotary embeddings, grouped-query attention and SwiGLU (arXiv:2302.13971, 2305.13245), or
    a model of Hugging Face's, which has its sizes from its own configuration.

    Raises:
        ConfigError: a value of the wrong type or out of range, sizes that do not divide, or an option that the kind
            does not use.
    """

    kind: ModelKind = ModelKind.decoder
    """Set by the group: ``model=hf``."""
    path: str | None = None
    """hf: a folder with a ``config.json``, or such a file. Nothing is ever downloaded."""
    weights: Weights = Weights.random
    vocab_size: Size = 256
    """Number of token ids; text as bytes needs 256."""
    n_layers: Annotated[int, Range(least=1, most=10_000)] = 4
    """Number of blocks."""
    d_model: Size = 64
    """Width of the residual stream."""
    n_heads: Size = 4
    """Query heads; must divide ``d_model``."""
    n_kv_heads: Size = 2
    """Key/value heads; each serves ``n_heads / n_kv_heads`` query heads."""
    d_ff: Size = 176
    """Width of the SwiGLU's hidden layer."""
    max_seq_len: Size = 2048
    """Positions that the rotary tables cover."""
    rope_theta: Positive = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: Positive = 1e-5
    """Added to the mean square in each RMSNorm."""
    dropout: Annotated[float, Range(least=0, below=1)] = 0.0
    """On the embedding and on both residual branches; attention itself has none, so fused kernels apply."""
    tied: bool = False
    """Whether the output head shares the embedding's weight."""
    attention: Attention = Attention.sdpa
    attention_chunk: Size = 1024
    """Queries per chunk of ``attention: chunked``."""
    loss: Loss = Loss.full
    loss_chunk: Size = 4096
    """Tokens per chunk of ``loss: chunked``."""

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    def check(self) -> None:
        self._check_kind()
        if self.kind is ModelKind.hf:
            return
        if self.d_model % self.n_heads:
            raise ConfigError(f"model.d_model={self.d_model}: must be a multiple of model.n_heads={self.n_heads}")
        if self.head_dim % 2:
            raise ConfigError(
                f"model.d_model / model.n_heads = {self.head_dim}: rotary embeddings need an even head size"
            )
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"model.n_heads={self.n_heads}: must be a multiple of model.n_kv_heads={self.n_kv_heads}")
        defaults = {f.name: f.default for f in fields(self)}
        for option, size in (("attention", "attention_chunk"), ("loss", "loss_chunk")):
            way, asked = getattr(self, option), getattr(self, size)
            if way != "chunked" and asked != defaults[size]:
                raise ConfigError(f"model.{size}={asked}: no option of model.{option}={way}, only of chunked")
        if self.d_model * max(self.d_model, self.d_ff, self.vocab_size) > 2**60:  # torch cannot even count the bytes
            raise ConfigError(f"model.d_model={self.d_model}: makes a weight with more than 2**60 elements")

    def _check_kind(self) -> None:
        """Options that the kind does not use, and what it needs."""
        of_hf, of_both = ("path", "weights"), ("kind", "attention")
        for field in fields(self):
            if field.name in of_both or (field.name in of_hf) == (self.kind is ModelKind.hf):
                continue
            value = getattr(self, field.name)
            if value != field.default:
                whose = "hf" if field.name in of_hf else "decoder"
                remedy = "" if whose == "hf" else "; a model of Hugging Face's has it from its config.json"
                raise ConfigError(
                    f"model.{field.name}={shown(value)}: is an option of model.kind={whose}, not of {self.kind}{remedy}"
                )
        if self.kind is ModelKind.hf:
            if not self.path:
                raise ConfigError("model.path: model=hf needs one, such as model.path=checkpoints/llama")
            if self.attention is Attention.chunked:
                raise ConfigError("model.attention=chunked: is only in model.kind=decoder; model=hf has sdpa and eager")
