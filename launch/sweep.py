"""Compares policies: ``python launch/sweep.py 'sweep.ckpt=[none,full]' nproc=2``; ``--help`` lists all."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dist_ckpt.trainer.sweep.program import main

if __name__ == "__main__":
    main(sys.argv[1:], Path(__file__).resolve().with_name("train.py"))
