"""Makes a run's page, or compares several runs: ``python launch/report.py RUN [RUN …] [--out FILE]``."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from dist_ckpt.trainer.process import leave
from dist_ckpt.trainer.report_program import main

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
