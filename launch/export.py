"""Exports the weights of a training state: ``python launch/export.py STATE_FOLDER OUT.safetensors``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dist_ckpt.trainer.export import main
from dist_ckpt.trainer.process import leave

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
