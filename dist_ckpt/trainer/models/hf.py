"""Causal language models of Hugging Face's, from files on this machine: the one module that imports transformers.

Parameters keep the names of their own library, so that exported weights can be read there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dist_ckpt import stages
from dist_ckpt.batch import Batch
from dist_ckpt.errors import ConfigError
from dist_ckpt.names import named_buffers, named_parameters
from dist_ckpt.states.fit import listed
from dist_ckpt.trainer.models.config import ModelConfig, Weights
from dist_ckpt.trainer.models.hf_layers import hf_layers
from dist_ckpt.trainer.models.init import fill
from dist_ckpt.trainer.models.source import ModelSource

try:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
except ImportError as error:
    raise ConfigError(f"model=hf: {error}: pip install 'dist_ckpt[hf]'") from error


def hf_source(config: ModelConfig, seed: int) -> ModelSource:
    """The model of a folder or configuration file.

    Each rank builds the whole model once in host memory when it is initialized, and keeps its part.

    Raises:
        ConfigError: no such folder; no configuration that transformers can read; no causal language model; code that
            would have to be downloaded or executed; weights that are asked for and not there.
    """
    assert config.path is not None, "checked by the configuration"
    path = Path(config.path)
    asked = _read(path)
    if config.weights is Weights.pretrained:
        _require_weights(path)

    def build() -> nn.Module:
        return transformers.AutoModelForCausalLM.from_config(
            asked, dtype=torch.float32, attn_implementation=config.attention.value
        )

    def initialize(model: nn.Module) -> None:
        with _quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            whole = build() if config.weights is Weights.random else _load(path, asked, config.attention.value)
        for named in (named_parameters, named_buffers):
            values: dict[str, Tensor] = dict(named(whole))
            for name, tensor in named(model):
                fill(tensor, values[name])

    try:
        with _quiet(), torch.device("meta"):
            model = build()
    except (ValueError, ImportError, NotImplementedError) as error:
        raise ConfigError(f"model.path={path}: the model cannot be built: {_first_line(error)}") from error
    text = asked.get_text_config()
    positions = getattr(text, "max_position_embeddings", None)
    return ModelSource(model, text.vocab_size, positions, text.hidden_size, token_loss, initialize, hf_layers)


def token_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Summed cross-entropy of the next tokens, an fp32 scalar; ``labels`` are aligned with ``input_ids``."""
    logits = model(input_ids=batch["input_ids"]).logits
    return stages.token_loss(logits, batch["labels"])


def _read(path: Path) -> Any:
    if not path.exists():
        raise ConfigError(f"model.path={path}: no such folder or file on this machine; models are never downloaded")
    if path.is_dir() and not (path / "config.json").is_file():
        raise ConfigError(f"model.path={path}: the folder has no config.json")
    try:
        with _quiet():
            asked = transformers.AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what a configuration's own class makes of a wrong value is up to it
        raise ConfigError(f"model.path={path}: no configuration of a model: {_first_line(error)}") from error
    if type(asked) not in MODEL_FOR_CAUSAL_LM_MAPPING or getattr(asked, "is_decoder", True) is False:
        raise ConfigError(
            f"model.path={path}: {asked.model_type} is no causal language model; valid are decoders such as gpt2, "
            "llama, mistral, qwen3 (a model_type for which AutoModelForCausalLM has a class, and that predicts the "
            "next token)"
        )
    if getattr(asked, "output_router_logits", False):
        raise ConfigError(
            f"model.path={path}: output_router_logits adds a loss for routing, which is not trained here: set it to "
            "false in config.json"
        )
    asked.use_cache = False  # there is nothing to generate from a cache in training
    return asked


def _require_weights(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"model.weights=pretrained: model.path={path} must be a folder with safetensors files")
    if not any(path.glob("*.safetensors")):
        raise ConfigError(f"model.weights=pretrained: {path} has no safetensors file; model.weights=random needs none")


def _load(path: Path, asked: Any, attention: str) -> nn.Module:
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            path,
            config=asked,
            dtype=torch.float32,
            attn_implementation=attention,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except Exception as error:  # damaged files raise what their reader has for it
        raise ConfigError(f"model.weights=pretrained: {path} cannot be loaded: {_first_line(error)}") from error
    model, report = loaded
    if lacking := sorted(map(str, report["missing_keys"])):
        raise ConfigError(f"model.weights=pretrained: the files in {path} have no {listed(lacking, 5)}")
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's advice on generation, which every rank would print."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        transformers.logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
