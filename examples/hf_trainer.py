"""Hugging Face's ``Trainer``. What dist_ckpt adds is marked; the model is random, so nothing is downloaded.

python examples/hf_trainer.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from dist_ckpt import apply  # added


def main(policy: Any = "selective", steps: int = 4) -> list[float]:
    """Trains a small GPT-2 on counting, and returns the losses."""
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=32, vocab_size=64, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    print(apply(model, policy))  # added
    rows: list[dict[str, Tensor]] = [{"input_ids": (torch.arange(16) + start) % 64} for start in range(64)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
        )
        trainer = Trainer(model, arguments, train_dataset=[row | {"labels": row["input_ids"]} for row in rows])
        trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


if __name__ == "__main__":
    main()
