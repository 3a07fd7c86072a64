"""Shape of the Llama-style decoder and its checks."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dist_ckpt.errors import ConfigError


class Attention(str, Enum):
    """How attention is computed; all three give the same result."""

    sdpa = "sdpa"
    """torch's fused kernel."""
    eager = "eager"
    """Materialises the (seq × seq) scores, as models without a fused kernel do."""
    chunked = "chunked"
    """Materialises the scores of ``attention_chunk`` queries at a time."""


class Loss(str, Enum):
    """How the loss is computed; both give the same result."""

    full = "full"
    """All (batch · seq, vocab) logits at once."""
    chunked = "chunked"
    """Logits of ``loss_chunk`` tokens at a time, recomputed in backward, so that they never all exist."""


@dataclass
class ModelConfig:
    """A decoder with RMSNorm, rotary embeddings, grouped-query attention and SwiGLU (arXiv:2302.13971, 2305.13245)."""

    vocab_size: int = 256
    """Token ids; 256 for bytes."""
    n_layers: int = 4
    """Blocks."""
    d_model: int = 64
    """Width of the residual stream."""
    n_heads: int = 4
    """Query heads; they divide ``d_model``."""
    n_kv_heads: int = 2
    """Key/value heads; each serves ``n_heads / n_kv_heads`` query heads."""
    d_ff: int = 176
    """Width of the SwiGLU's hidden layer."""
    max_seq_len: int = 2048
    """Positions that the rotary tables cover."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in each RMSNorm."""
    dropout: float = 0.0
    """On the embedding and on both residual branches; attention itself has none, so fused kernels apply."""
    tied: bool = False
    """Whether the output head shares the embedding's weight."""
    attention: Attention = Attention.sdpa
    attention_chunk: int = 1024
    """Queries per chunk of ``attention: chunked``."""
    loss: Loss = Loss.full
    loss_chunk: int = 4096
    """Tokens per chunk of ``loss: chunked``."""

    @property
    def head_dim(self) -> int:
        return self.d_model // self.n_heads

    def check(self) -> None:
        """Raises ConfigError where sizes do not divide or are out of range."""
        positive = ("vocab_size", "n_layers", "d_model", "n_heads", "n_kv_heads", "d_ff", "max_seq_len")
        for name in (*positive, "attention_chunk", "loss_chunk"):
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}={getattr(self, name)}: must be at least 1")
        if self.d_model % self.n_heads:
            raise ConfigError(f"model.d_model={self.d_model} is no multiple of model.n_heads={self.n_heads}")
        if self.head_dim % 2:
            raise ConfigError(
                f"model.d_model / model.n_heads = {self.head_dim}: rotary embeddings need an even head size"
            )
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(f"model.n_heads={self.n_heads} is no multiple of model.n_kv_heads={self.n_kv_heads}")
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"model.dropout={self.dropout}: must be at least 0 and below 1")
        for name in ("rope_theta", "norm_eps"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"model.{name}={getattr(self, name)}: must be above 0")
