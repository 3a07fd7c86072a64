"""Proves a plan: ``torchrun --nproc_per_node 2 launch/verify.py +ckpt=full``; ``--help`` lists all options."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dist_ckpt.trainer.proving import main

if __name__ == "__main__":
    main(sys.argv[1:])
