"""A DeepSpeed configuration, read strictly and completed for a run. Needs neither torch nor DeepSpeed.

DeepSpeed takes a misspelled section for a missing one, ignores options that do not act at the chosen stage, and fills
gaps with defaults that train something else (gradients clipped at 1.0). Here each key it knows is taken, or refused
with the reason; so is each key it does not know.

1. :func:`read_config`: the file as it is.
2. :func:`resolve`: checked against the run and completed. That is what ``deepspeed.initialize`` gets.
3. :func:`policy_of`: what the file asks to be recomputed, as a policy of ours.
"""

from __future__ import annotations

from dist_ckpt.deepspeed_config.activations import policy_of
from dist_ckpt.deepspeed_config.reading import read_config
from dist_ckpt.deepspeed_config.resolve import DeepSpeedConfig, resolve
from dist_ckpt.deepspeed_config.run import RunSettings

__all__ = ["DeepSpeedConfig", "RunSettings", "policy_of", "read_config", "resolve"]
