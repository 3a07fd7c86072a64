"""Trains a model: ``torchrun --nproc_per_node 8 launch/train.py +ckpt=selective``; ``--help`` lists all options."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dist_ckpt.trainer.main import main

if __name__ == "__main__":
    main(sys.argv[1:])
