"""What the engines share that DeepSpeed's configuration tells how to shard, offload and communicate."""

from __future__ import annotations

from dist_ckpt.deepspeed_config import DeepSpeedConfig
from dist_ckpt.engines.base import Engine
from dist_ckpt.plan import Plan


class ToldEngine(Engine):
    """Engines whose ``options.deepspeed`` must be given, and which leave nothing to choose that it says."""

    def refuses(self, plan: Plan) -> list[str]:
        problems, options = super().refuses(plan), self.options
        if options.deepspeed is None:
            problems.append(
                f"{self.name} needs TrainingOptions.deepspeed, which dist_ckpt.deepspeed_config.resolve makes"
            )
        if options.accum_sync is not None:
            problems.append(
                f"train.accum_sync={options.accum_sync} is an option of ddp, fsdp1 and fsdp2: {self.name} reduces "
                "gradients where DeepSpeed's own rules say; leave it null"
            )
        return problems

    @property
    def _config(self) -> DeepSpeedConfig:
        assert self.options.deepspeed is not None, "refused without"
        return self.options.deepspeed
