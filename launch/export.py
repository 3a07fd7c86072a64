"""python launch/export.py STATE_FOLDER OUT.safetensors"""

from __future__ import annotations

import os
import sys

from dist_ckpt.trainer.export import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads that torch.distributed.checkpoint leaves may abort an ordinary exit
