"""Adapters on a frozen base: blocks whose inputs need no gradient still train. What dist_ckpt adds is marked.

python examples/lora.py
"""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from dist_ckpt import apply, named_parameters  # added


def main(policy: Any = "selective", steps: int = 4) -> list[float]:
    """Trains adapters of a small random Llama on counting, and returns the losses."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    print(apply(model, policy))  # added
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = (torch.arange(16) + torch.arange(8)[:, None]) % 64
    losses = []
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        without = [name for name, p in named_parameters(model) if p.requires_grad and p.grad is None]
        assert not without, f"no gradient: {without}"
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
