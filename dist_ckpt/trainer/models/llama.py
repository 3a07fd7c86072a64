"""A Llama-style decoder."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dist_ckpt.stages import Layer, LayerList, token_loss
from dist_ckpt.trainer.models.config import Attention, Loss, ModelConfig


def rope_tables(config: ModelConfig, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every position's rotation angles (arXiv:2104.09864, eq. 34).

    Returns:
        Two fp32 tensors (max_seq_len, head_dim / 2).
    """
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    frequencies = config.rope_theta ** (-half / config.head_dim)
    angles = torch.outer(torch.arange(config.max_seq_len, dtype=torch.float32, device=device), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair (x_i, x_{i + head_dim/2}) by its position's angle, in fp32.

    x: (batch, seq, heads, head_dim); cos, sin: (seq, head_dim / 2). Returns x's shape and dtype.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class SelfAttention(nn.Module):
    """Causal grouped-query attention with rotary positions.

    x: (batch, seq, d_model) → the same.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        kv_dim = config.n_kv_heads * config.head_dim
        self.wq = nn.Linear(config.d_model, config.d_model, bias=False)
        self.wk = nn.Linear(config.d_model, kv_dim, bias=False)
        self.wv = nn.Linear(config.d_model, kv_dim, bias=False)
        self.wo = nn.Linear(config.d_model, config.d_model, bias=False)
        if config.attention is not Attention.sdpa:
            self.chunk = QueryChunk()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        q = rotate(self.wq(x).view(batch, seq, self.config.n_heads, -1), cos, sin).transpose(1, 2)
        k = rotate(self.wk(x).view(batch, seq, self.config.n_kv_heads, -1), cos, sin).transpose(1, 2)
        v = self.wv(x).view(batch, seq, self.config.n_kv_heads, -1).transpose(1, 2)
        if self.config.attention is Attention.sdpa:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
        else:
            repeats = self.config.n_heads // self.config.n_kv_heads
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
            chunk = self.config.attention_chunk if self.config.attention is Attention.chunked else seq
            parts = [self.chunk(q[:, :, i : i + chunk], k, v, i) for i in range(0, seq, chunk)]
            out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
        return self.wo(out.transpose(1, 2).reshape(batch, seq, -1))


class QueryChunk(nn.Module):
    """Causal attention of some queries, ``start …``, to all keys that they may see, with materialised scores.

    A module without parameters, so that it can be a region: recomputed chunk by chunk, the scores of one chunk exist at
    a time, in backward too.

    q: (batch, heads, chunk, head_dim); k, v: (batch, heads, seq, head_dim). Returns q's shape.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        stop = start + q.shape[2]
        k, v = k[:, :, :stop], v[:, :, :stop]
        scores = (q @ k.transpose(-2, -1)) * q.shape[-1] ** -0.5
        future = torch.ones(q.shape[2], stop, dtype=torch.bool, device=q.device).triu(start + 1)
        return scores.masked_fill(future, float("-inf")).softmax(dim=-1, dtype=torch.float32).to(v.dtype) @ v


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) · w3 x) (arXiv:2002.05202).

    x: (batch, seq, d_model) → the same.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.d_model, config.d_ff, bias=False)
        self.w2 = nn.Linear(config.d_ff, config.d_model, bias=False)
        self.w3 = nn.Linear(config.d_model, config.d_ff, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    """Pre-norm attention and feed-forward, each on a residual branch.

    x: (batch, seq, d_model) → the same.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.attention = SelfAttention(config)
        self.ffn_norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        return x + self.dropout(self.feed_forward(self.ffn_norm(x)))


class Transformer(nn.Module):
    """The decoder with its head and loss."""

    rope_cos: Tensor
    rope_sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.d_model, eps=config.norm_eps)
        self.output = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tied:
            self.output.weight = self.tok_embeddings.weight
        cos, sin = rope_tables(config)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def init_buffers(self) -> None:
        """Fills the buffers anew, after a model built on meta got memory on a device."""
        self.rope_cos, self.rope_sin = rope_tables(self.config, self.rope_cos.device)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits, or with labels the loss.

        Args:
            input_ids: (batch, seq) int64.
            labels: (batch, seq) int64, the target of each position, or IGNORE_INDEX for none.

        Returns:
            Logits (batch, seq, vocab_size); with labels the **sum** over tokens of the cross-entropy in nats, an
            fp32 scalar. A sum, because the right divisor (the tokens of the whole update, over micro-batches and
            ranks) is known to the engine alone.
        """
        seq = input_ids.shape[1]
        cos, sin = self.rope_cos[:seq], self.rope_sin[:seq]
        x = self.dropout(self.tok_embeddings(input_ids))
        for layer in self.layers:
            x = layer(x, cos, sin)
        x = self.norm(x)
        return self.output(x) if labels is None else self._loss(x, labels)

    def pipeline_layers(self) -> LayerList:
        """The embedding, the blocks, and the last norm with the head: what stages of a pipeline are made of."""
        blocks = [Layer((f"layers.{number}",), partial(_block, number=number)) for number in range(len(self.layers))]
        layers = (Layer(("tok_embeddings", "dropout"), _embed), *blocks, Layer(("norm", "output"), _normalize))
        return LayerList(layers, _loss_of_normalized)

    def _loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Summed cross-entropy of the last norm's output; x: (batch, seq, d_model); fp32 scalar."""
        x, labels = x.flatten(0, 1), labels.flatten()
        if self.config.loss is Loss.full:
            return _token_loss(self.output, x, labels)
        pieces = zip(x.split(self.config.loss_chunk), labels.split(self.config.loss_chunk), strict=True)
        if torch.is_grad_enabled():
            losses = [checkpoint(_token_loss, self.output, *piece, use_reentrant=False) for piece in pieces]
        else:
            losses = [_token_loss(self.output, *piece) for piece in pieces]
        return torch.stack(losses).sum()


def _embed(model: nn.Module, input_ids: Tensor) -> Tensor:
    """The model's first layer in a pipeline; (batch, seq) int64 → (batch, seq, d_model)."""
    assert isinstance(model, Transformer)
    return model.dropout(model.tok_embeddings(input_ids))


def _block(model: nn.Module, x: Tensor, number: int) -> Tensor:
    """One block of a model of which others may be missing."""
    assert isinstance(model, Transformer)
    seq = x.shape[1]
    block = model.get_submodule(f"layers.{number}")  # an index would count those that are left
    out: Tensor = block(x, model.rope_cos[:seq], model.rope_sin[:seq])
    return out


def _normalize(model: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(model, Transformer)
    return model.norm(x)


def _loss_of_normalized(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    assert isinstance(model, Transformer)
    return model._loss(x, labels)


def _token_loss(head: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
    """Summed cross-entropy; x: (tokens, d_model), labels: (tokens,); fp32 scalar."""
    return token_loss(head(x), labels)
