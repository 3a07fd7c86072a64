"""What a pipeline evaluates, resumes and refuses, on all its ranks together."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt.batch import IGNORE_INDEX, Batch, count_targets
from dist_ckpt.compat.zero import pipe_buffers
from dist_ckpt.engines.deepspeed_pipe import PipelineEngine
from dist_ckpt.names import named_parameters
from dist_ckpt.plan import Plan
from dist_ckpt.stages import Layer, LayerList
from dist_ckpt.trainer.models.llama import Transformer, TransformerBlock
from tests.distributed.pipelines import Pipe, initialize, make_model, options_of, prepared
from tests.ranks import RankError, RankGroups

Told = tuple[str, str]
"""Class and message of what was raised."""

PIPE = Pipe(gas=2, zero=1, policy="full", model={"dropout": 0.1})


def told(action: Callable[[], Any]) -> Told:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def batch(shape: tuple[int, int], seed: int = 0, targets: int | None = None) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 61, (shape[0], shape[1] + 1), generator=generator)
    labels = ids[:, 1:].clone()
    if targets is not None:
        labels[:, targets:] = IGNORE_INDEX
    return {"input_ids": ids[:, :-1], "labels": labels}


EVALUATIONS = {
    "one": [batch((2, 24))],
    "five": [batch((2, 24), seed) for seed in range(5)],
    "ragged": [batch((2, 24), 1), batch((2, 24), 2, targets=7), batch((1, 24), 3), batch((3, 30), 4)],
    "none": [],
}
GOOD = [batch((2, 24), 1), batch((2, 24), 2)]


def weights_of(engine: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in named_parameters(engine.model)}


def evaluated(rank: int, world: int) -> dict[str, Any]:
    """Losses of evaluations before the first update and between updates, and of the updates."""
    with prepared(world, PIPE) as engine:
        found: dict[str, Any] = {name: engine.eval_loss(batches) for name, batches in EVALUATIONS.items()}
        found["is training"] = engine.model.training
        torch.manual_seed(5)
        found["losses"] = [engine.train_step(GOOD).loss]
        found["between"] = engine.eval_loss(EVALUATIONS["five"])
        found["losses"] += [engine.train_step(GOOD).loss]
        found["weights"] = weights_of(engine)
        longer = [batch((3, 30), 1), batch((3, 30), 2)]
        found["longer"] = engine.train_step(longer).tokens
        found["rows in slots"] = [kind for kind, _ in pipe_buffers(engine.deepspeed) if kind != "receive buffer"]
    return found


def uninterrupted(rank: int, world: int) -> dict[str, Any]:
    with prepared(world, PIPE) as engine:
        torch.manual_seed(5)
        return {"losses": [engine.train_step(GOOD).loss for _ in range(2)], "weights": weights_of(engine)}


def refused(rank: int, world: int) -> dict[str, Any]:
    """What each rank was told, and whether the pipeline trains on as if nothing had been."""
    last = rank == world - 1
    with prepared(world, PIPE) as engine:
        step, evaluate = engine.train_step, engine.eval_loss
        before = weights_of(engine)
        found: dict[str, Any] = {
            "too few": told(lambda: step(iter(GOOD[:1]))),
            "too few on one": told(lambda: step(GOOD[: 1 + last])),
            "too many": told(lambda: step(GOOD * 2)),
            "smaller last": told(lambda: step([GOOD[0], batch((1, 24))])),
            "smaller on one": told(lambda: step([GOOD[0], batch((2 - last, 24))])),
            "other rows": told(lambda: step([GOOD[0], batch((2, 24), rank)])),
            "no labels": told(lambda: step([GOOD[0], {"input_ids": GOOD[0]["input_ids"]}] if last else GOOD)),
            "a mask": told(lambda: step([GOOD[0], {**GOOD[1], "attention_mask": GOOD[1]["labels"]}])),
            "no targets": told(lambda: step([batch((2, 24), 1, targets=0), batch((2, 24), 2, targets=0)])),
            "other evaluations": told(lambda: evaluate(EVALUATIONS["five"][: 1 + last])),
        }
        found["kept"] = all(torch.equal(w, before[name]) for name, w in weights_of(engine).items())
        torch.manual_seed(5)
        found["losses"] = [step(GOOD).loss for _ in range(2)]
        if last:
            with torch.no_grad():
                engine.model.get_parameter("output.weight")[0, 0] = float("inf")
        before = weights_of(engine)
        found["not finite"] = told(lambda: step(GOOD))
        found["kept"] &= all(torch.equal(w, before[name]) for name, w in weights_of(engine).items())
    return found


class Exploding(torch.autograd.Function):
    """Has a finite value and no finite gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * float("inf")


def exploding_layers(model: nn.Module) -> LayerList:
    """The gradient is not finite in the last stage's last layer."""
    assert isinstance(model, Transformer)
    layers = model.pipeline_layers()
    *rest, last = layers.layers
    return LayerList((*rest, Layer(last.modules, lambda m, x: Exploding.apply(last.run(m, x)))), layers.loss)


def losing_layers(model: nn.Module) -> LayerList:
    """A block gets no gradient if it recomputes, as its class is another one then."""
    assert isinstance(model, Transformer)
    layers = model.pipeline_layers()
    return LayerList(tuple(Layer(one.modules, _losing(one)) for one in layers.layers), layers.loss)


def _losing(layer: Layer) -> Callable[[nn.Module, Tensor], Tensor]:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        out = layer.run(model, x)
        if layer.modules == ("layers.4",) and type(model.get_submodule("layers.4")) is not TransformerBlock:
            return x + (out - x).detach()
        return out

    return run


def gradients_refused(rank: int, world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for zero, precision in ((0, "fp32"), (1, "fp32"), (0, "bf16"), (1, "bf16")):
        pipe = dataclasses.replace(PIPE, layers=exploding_layers, zero=zero, precision=precision)
        with prepared(world, pipe) as engine:
            before = weights_of(engine)
            found[f"explodes {zero} {precision}"] = told(lambda: engine.train_step(GOOD))
            found[f"kept {zero} {precision}"] = all(torch.equal(w, before[n]) for n, w in weights_of(engine).items())
    for zero in (0, 1):
        losing = dataclasses.replace(PIPE, zero=zero, layers=losing_layers)
        with prepared(world, losing) as engine:
            found[f"loses {zero}"] = told(lambda: engine.train_step(GOOD))
        with prepared(world, dataclasses.replace(losing, check_gradients=False)) as engine:
            found[f"trains on {zero}"] = told(lambda: engine.train_step(GOOD))
    return found


def two_outputs(model: nn.Module) -> LayerList:
    return _with_last_of_first_stage(model, lambda out: (out, out))


def whole_numbers(model: nn.Module) -> LayerList:
    return _with_last_of_first_stage(model, lambda out: out.long())


def growing(model: nn.Module) -> LayerList:
    """Micro-batches of one shape, and outputs of several."""
    calls = itertools.count(1)
    return _with_last_of_first_stage(model, lambda out: out[:, : -next(calls)])


def boom(model: nn.Module) -> LayerList:
    assert isinstance(model, Transformer)
    layers = model.pipeline_layers()

    def run(model: nn.Module, x: Tensor) -> Tensor:
        raise RuntimeError("boom in the last stage")

    return LayerList((*layers.layers[:-1], Layer(layers.layers[-1].modules, run)), layers.loss)


def _with_last_of_first_stage(model: nn.Module, change: Callable[[Tensor], Any]) -> LayerList:
    assert isinstance(model, Transformer)
    layers = model.pipeline_layers()
    before, last, after = layers.layers[:3], layers.layers[3], layers.layers[4:]
    changed = Layer(last.modules, lambda model, x: change(last.run(model, x)))
    return LayerList((*before, changed, *after), layers.loss)


def one_step(rank: int, world: int, pipe: Pipe) -> None:
    with prepared(world, pipe) as engine:
        engine.train_step(GOOD)


def saved(rank: int, world: int, folder: str) -> dict[str, Any]:
    """A state saved and resumed in a new pipeline, and what two more updates then make of it."""
    tied = dataclasses.replace(PIPE, model={"dropout": 0.1, "tied": True})
    with prepared(world, tied) as engine:
        torch.manual_seed(5)
        engine.train_step(GOOD)
        engine.save(folder, {"note": "here"})
        engine.train_step(GOOD)
        whole = weights_of(engine)
    with prepared(world, dataclasses.replace(tied, policy="none")) as engine:
        extra = engine.load(folder)
        engine.train_step(GOOD)
        resumed = weights_of(engine)
    return {"extra": extra, "same": all(torch.equal(w, whole[name]) for name, w in resumed.items())}


def quick(rank: int, world: int) -> list[dict[str, Any]]:
    return [evaluated(rank, world), uninterrupted(rank, world), refused(rank, world)]


@pytest.fixture(scope="module")
def seen(ranks: RankGroups) -> list[list[dict[str, Any]]]:
    """Of each function in ``quick`` what both ranks returned."""
    by_rank = ranks(2).run(quick, timeout_s=240)
    return [list(both) for both in zip(*by_rank, strict=True)]


@pytest.fixture(scope="module")
def stopped(ranks: RankGroups) -> list[dict[str, Any]]:
    """What both ranks returned."""
    return ranks(2).run(gradients_refused, timeout_s=240)


def test_evaluation_is_that_of_a_serial_run(seen: list[list[dict[str, Any]]]) -> None:
    model = make_model(PIPE)
    model.to_empty(device="cpu")
    initialize(model)
    model.eval()
    for found in seen[0]:
        for name, batches in EVALUATIONS.items():
            tokens = sum(map(count_targets, batches))
            expected = sum(float(model(**one).detach()) for one in batches) / max(tokens, 1)
            assert found[name] == pytest.approx(expected, rel=1e-6), name
        assert found["is training"]
        assert found["between"] < found["five"]


def test_evaluation_leaves_training_as_it_is(seen: list[list[dict[str, Any]]]) -> None:
    for found, expected in zip(seen[0], seen[1], strict=True):
        assert found["losses"] == expected["losses"]
        assert all(torch.equal(found["weights"][name], weight) for name, weight in expected["weights"].items())
        assert found["longer"] == 2 * 3 * 30
        assert found["rows in slots"] == []


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("too few", "DataError", "1 micro-batches, and the pipeline was built for 2"),
        ("too few on one", "DataError", "rank 0 has 1, rank 1 has 2"),
        ("too many", "DataError", "4 micro-batches"),
        ("smaller last", "DataError", "(2, 24), (1, 24)"),
        ("smaller on one", "DataError", "micro-batch 1 has (2, 24) on rank 0 and (1, 24) on rank 1"),
        ("other rows", "DataError", "ranks 0 and 1 are stages of one pipeline and were given different rows"),
        ("no labels", "DataError", "rank 1, micro-batch 1: it has no labels"),
        ("a mask", "DataError", "attention_mask"),
        ("no targets", "DataError", "no token of the whole update has a target"),
        ("other evaluations", "DataError", "rank 0 has 1, rank 1 has 2"),
        ("not finite", "NonFiniteError", "step 3: loss"),
    ],
)
def test_bad_input_is_refused_on_all_ranks_before_anything_is_sent(
    seen: list[list[dict[str, Any]]], what: str, kind: str, words: str
) -> None:
    for found in seen[2]:
        assert found[what][0] == kind
        assert words in found[what][1]


def test_a_refusal_leaves_the_pipeline_as_it_was(seen: list[list[dict[str, Any]]]) -> None:
    for found, expected in zip(seen[2], seen[1], strict=True):
        assert found["kept"]
        assert found["losses"] == expected["losses"]


@pytest.mark.full
@pytest.mark.parametrize("job", ["0 fp32", "1 fp32", "0 bf16", "1 bf16"])
def test_gradients_that_are_not_finite_change_no_weights(stopped: list[dict[str, Any]], job: str) -> None:
    for found in stopped:
        kind, message = found[f"explodes {job}"]
        assert kind == "NonFiniteError"
        assert "step 1: loss 4." in message
        assert found[f"kept {job}"]


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 1])
def test_a_lost_gradient_stops_every_stage(stopped: list[dict[str, Any]], zero: int) -> None:
    for found in stopped:
        kind, message = found[f"loses {zero}"]
        assert kind == "PlanError"
        assert "no gradient reaches layers.4.attention_norm.weight, layers.4.attention.wq.weight" in message
        assert found[f"trains on {zero}"] == ("nothing", "")


@pytest.mark.full
@pytest.mark.parametrize(
    ("layers", "rank", "words"),
    [
        (two_outputs, 0, "layer 'layers.2' ends stage 0 and returned a tuple; what stages pass on is one tensor"),
        (whole_numbers, 0, "layer 'layers.2' ends stage 0 and returned (2, 24, 32) of torch.int64"),
        (growing, 0, "returned (2, 22, 32) of torch.float32, where it returned (2, 23, 32)"),
        (boom, 1, "RuntimeError: boom in the last stage"),
    ],
)
def test_a_stage_that_fails_says_so_itself(
    ranks: RankGroups, layers: Callable[[nn.Module], LayerList], rank: int, words: str
) -> None:
    pipe = dataclasses.replace(PIPE, layers=layers, check_gradients=False)
    with pytest.raises(RankError) as caught:
        ranks(2).run(one_step, pipe)
    assert caught.value.failures[rank].kind == "raised"
    assert words in caught.value.failures[rank].text


@pytest.mark.full
def test_a_state_resumes_bitwise_whatever_the_policy(ranks: RankGroups, tmp_path: Path) -> None:
    for found in ranks(2).run(saved, str(tmp_path / "step_1")):
        assert found["same"]
        assert found["extra"]["note"] == "here"
        assert found["extra"]["rng"]


def engine_of(pipe: Pipe) -> PipelineEngine:
    return PipelineEngine(options_of(pipe, 2), torch.device("cpu"), pipe.loss_sum)


def test_refuses_what_no_pipeline_can_do() -> None:
    stages = (("tok_embeddings",), ("output",))
    assert engine_of(PIPE).refuses(Plan(stages=stages)) == []
    assert "engine.stages" in " ".join(engine_of(PIPE).refuses(Plan()))
    engine = engine_of(PIPE)
    for sync in ("every", "boundary"):
        engine.options = dataclasses.replace(engine.options, accum_sync=sync, replicas=2)  # type: ignore[arg-type]
        assert f"accum_sync={sync}" in " ".join(engine.refuses(Plan(stages=stages)))
    assert "replicas" in " ".join(engine.refuses(Plan(stages=stages)))
    for zero in (2, 3):
        config = dataclasses.replace(engine.options.deepspeed, stage=zero)  # type: ignore[type-var]
        engine.options = dataclasses.replace(engine.options, deepspeed=config, allow_untested=False)
        [untested, *_] = engine.refuses(Plan(stages=stages))
        assert f"engine=deepspeed_pipe (ZeRO {zero})" in untested and "no test has proven it right" in untested
    engine.options = dataclasses.replace(engine.options, deepspeed=None)
    assert "deepspeed_pipe needs TrainingOptions.deepspeed" in " ".join(engine.refuses(Plan(stages=stages)))
