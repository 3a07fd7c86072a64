"""DeepSpeed's ``PipelineModule`` in people's own programs: ``apply(net, policy)`` on each rank, then ``initialize``."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_ckpt import MemoryMeter, Plan, PlanError, Region, apply, apply_plan, make_plan, plan_cost, remove_plan
from dist_ckpt.compat import deepspeed as compat
from dist_ckpt.wrap.module import is_recomputed
from tests.ranks import RankGroups
from tests.unit.toys import SelfMix

VOCAB, WIDTH, SEQ = 16, 8, 6
MICRO_BATCHES = 3

Found = Callable[[Callable[[int, int], Any]], list[Any]]

calls: Counter[str] = Counter()
"""Forwards on this rank, by kind of layer."""


class EmbedPipe(nn.Module):
    """Integer tokens → vectors."""

    def __init__(self, rows: int = VOCAB) -> None:
        super().__init__()
        self.table, self.position = nn.Embedding(rows, WIDTH), nn.Embedding(SEQ, WIDTH)

    @property
    def weight(self) -> Tensor:
        return self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        calls["embed"] += 1
        return self.table(ids) + self.position.weight


class DecoderPipe(nn.Module):
    """A block with attention and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.fc, self.dropout = SelfMix(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        calls["block"] += 1
        x = x + self.attention(x)
        return x + self.dropout(torch.tanh(self.fc(x)))


class MaskedDecoderPipe(DecoderPipe):
    """One that passes a mask on: a tuple in and out."""

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, mask = given
        return super().forward(x * mask), mask


class Reading(DecoderPipe):
    """One whose constructor reads a value, which tensors on meta do not have, and draws a number."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = torch.linspace(0, 1, 3)[1].item() * random.random()


def head(embedding: EmbedPipe, x: Tensor) -> Tensor:
    return F.linear(x, embedding.weight)


def with_mask(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, (torch.arange(x.shape[1], dtype=x.dtype) % 4 > 0)[:, None].expand_as(x).contiguous()


def without_mask(given: tuple[Tensor, Tensor]) -> Tensor:
    return given[0]


def loss_of(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), labels.flatten())


def layers_of(kind: str) -> list[Any]:
    """Specifications of a model, new ones each time."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    last = LayerSpec(nn.Linear, WIDTH, VOCAB)

    def blocks(count: int, cls: type[nn.Module] = DecoderPipe) -> list[Any]:
        return [LayerSpec(cls) for _ in range(count)]

    if kind == "usual":  # stages of 3 and 2 layers: the second one has a single block
        return [LayerSpec(EmbedPipe), *blocks(3), last]
    if kind == "large":  # an embedding that is a stage by itself, by parameters
        return [LayerSpec(EmbedPipe, 500), *blocks(3), last]
    if kind == "tied":
        tied = partial(TiedLayerSpec, "embed", EmbedPipe)
        return [tied(), *blocks(4), torch.relu, tied(forward_fn=head)]
    if kind == "masked":
        return [LayerSpec(EmbedPipe), with_mask, *blocks(4, MaskedDecoderPipe), without_mask, last]
    if kind == "modules":
        return [EmbedPipe(), *(DecoderPipe() for _ in range(4)), nn.Linear(WIDTH, VOCAB)]
    if kind == "reading":
        return [LayerSpec(EmbedPipe), *blocks(4, Reading), last]
    assert kind == "short"  # more stages than layers
    return [LayerSpec(nn.Embedding, VOCAB, WIDTH)]


def net_of(kind: str, cls: str = "PipelineModule", **options: Any) -> nn.Module:
    compat.start(torch.device("cpu"))
    from deepspeed.pipe import PipelineModule

    torch.manual_seed(0)
    options = {"num_stages": 2, "partition_method": "parameters" if kind == "large" else "uniform"} | options
    made = type(cls, (PipelineModule,), {})(layers=layers_of(kind), loss_fn=loss_of, **options)
    assert isinstance(made, nn.Module)
    return made


@dataclass(frozen=True)
class Run:
    """A training of two updates."""

    kind: str
    policy: Any = None
    cls: str = "PipelineModule"
    config: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def trained(rank: int, world: int, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Of each run the gradients before each update, forwards by kind of layer, the plan as JSON, and memory at the end.

    All in one go, because DeepSpeed leaves process groups behind, for which the group of ranks is started anew.
    """
    return [_trained(rank, run) for run in runs]


def _trained(rank: int, run: Run) -> dict[str, Any]:
    import deepspeed

    net = net_of(run.kind, run.cls, **run.options)
    before, also_before = torch.random.get_rng_state(), random.getstate()
    plan = apply(net, run.policy)
    assert torch.equal(torch.random.get_rng_state(), before) and random.getstate() == also_before
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    engine = deepspeed.initialize(
        model=net,
        optimizer=optimizer,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "gradient_clipping": 0.0,
            **run.config,
        },
    )[0]
    grads: list[dict[str, Tensor | None]] = []
    optimizer.register_step_pre_hook(
        lambda *_: grads.append({n: None if p.grad is None else p.grad.clone() for n, p in net.named_parameters()})
    )
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, VOCAB, (2 * MICRO_BATCHES, 2, SEQ), generator=generator)
    calls.clear()
    torch.manual_seed(rank)
    data = iter([(row, row) for row in rows])
    losses = [float(engine.train_batch(data)) for _ in range(2)]
    memory = MemoryMeter(engine).boundary(2)
    return {"grads": grads, "losses": losses, "calls": dict(calls), "plan": plan.to_json(), "memory": memory}


def refused(rank: int, world: int, doing: Callable[..., Any], *args: Any) -> str:
    try:
        doing(rank, world, *args)
    except PlanError as error:
        return str(error)
    return ""


def same(one: Any, other: Any) -> bool:
    """Losses and gradients, bit for bit."""
    if one["losses"] != other["losses"]:
        return False
    return all(
        mine.keys() == theirs.keys() and all(equal(mine[name], theirs[name]) for name in mine)
        for mine, theirs in zip(one["grads"], other["grads"], strict=True)
    )


def equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def is_gradient(grad: Tensor | None) -> bool:
    return grad is not None and bool(grad.any())


BLOCKS = {"usual": (2, 1), "large": (0, 3), "tied": (3, 1), "masked": (2, 2), "modules": (2, 2), "reading": (2, 2)}
"""Blocks on each stage."""

TIMES: list[tuple[str, Any, tuple[float, float]]] = [
    ("usual", "full", (2, 2)),
    ("large", {"mode": "full", "blocks": "DecoderPipe"}, (2, 2)),
    ("tied", "full", (2, 2)),
    ("masked", {"mode": "segments", "k": 2}, (2, 2)),
    ("modules", {"mode": "nested", "k": 2}, (2.5, 2.5)),  # the last block's forward is not needed by its segment
    ("reading", "selective", (2, 2)),
    ("usual", {"mode": "per_stage", "per_stage": ["none", "full"]}, (1, 2)),
    ("usual", {"mode": "full", "blocks": ["EmbedPipe", "DecoderPipe"]}, (2, 2)),
]
"""(model, policy, forwards of each block a micro-batch on each stage)."""


GPT = Run("usual", "full", "GPTModelPipe")
"""In a net of that name DeepSpeed itself would skip the blocks."""
SEEDED = (Run("usual", None, options={"seed_layers": True}), Run("usual", "full", options={"seed_layers": True}))
ZERO = {
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
}
SHARDED = (Run("usual", config=ZERO), Run("usual", "selective", config=ZERO))


@pytest.fixture(scope="module")
def results(ranks: RankGroups) -> Mapping[str, Any]:
    """Of each run, what each rank returned."""
    runs = [*map(Run, BLOCKS), *(Run(kind, policy) for kind, policy, _ in TIMES), GPT, *SEEDED, *SHARDED]
    by_rank = ranks(2).run(trained, runs)
    return {str(run): found for run, found in zip(runs, zip(*by_rank, strict=True), strict=True)}


@pytest.mark.parametrize(("kind", "policy", "times"), TIMES, ids=lambda value: str(value))
def test_blocks_run_again_and_gradients_keep_every_bit(
    results: Mapping[str, Any], kind: str, policy: Any, times: tuple[float, float]
) -> None:
    plain, with_plan = results[str(Run(kind))], results[str(Run(kind, policy))]
    for stage in range(2):
        assert same(with_plan[stage], plain[stage])
        trains = {name for name in plain[stage]["grads"][0] if "position" not in name}  # which no tied head uses
        assert all(is_gradient(plain[stage]["grads"][0][name]) for name in trains) and trains
        once = 2 * MICRO_BATCHES * BLOCKS[kind][stage]
        assert plain[stage]["calls"].get("block", 0) == once
        assert with_plan[stage]["calls"].get("block", 0) == times[stage] * once
    embeds = 2 if "EmbedPipe" in str(policy) else 1  # with integer tokens as input
    assert with_plan[0]["calls"]["embed"] == embeds * plain[0]["calls"]["embed"]
    assert with_plan[0]["plan"] == with_plan[1]["plan"]
    assert len(Plan.from_json(with_plan[0]["plan"]).stages) == 2


def test_no_class_name_of_the_net_makes_a_difference(results: Mapping[str, Any]) -> None:
    for stage, found in enumerate(results[str(GPT)]):
        assert found["calls"]["block"] == 2 * 2 * MICRO_BATCHES * BLOCKS["usual"][stage]


def test_seeds_of_layers_are_those_without_a_plan(results: Mapping[str, Any]) -> None:
    plain, with_plan = (results[str(run)] for run in SEEDED)
    assert all(map(same, with_plan, plain)) and not same(plain[1], results[str(Run("usual"))][1])


def test_zero_1_in_bf16_loses_nothing_either(results: Mapping[str, Any]) -> None:
    plain, with_plan = (results[str(run)] for run in SHARDED)
    for stage in range(2):
        assert same(with_plan[stage], plain[stage])
        assert with_plan[stage]["calls"]["block"] == 2 * plain[stage]["calls"]["block"]
    assert plain[1]["losses"] != results[str(Run("usual"))][1]["losses"]


def test_a_meter_counts_what_the_stages_exchange(results: Mapping[str, Any]) -> None:
    first, last = (found["memory"] for found in results[str(Run("usual"))])
    passed_on, rows = 4 * 2 * SEQ * WIDTH, 8 * 2 * SEQ
    assert first.other == passed_on + 2 * rows  # a gradient that is received, and the inputs in two slots
    # An activation that is received, logits in two slots, and labels that are views of all six micro-batches.
    assert last.other == passed_on + 2 * 4 * 2 * SEQ * VOCAB + 2 * MICRO_BATCHES * rows
    assert first.activations is last.activations is None


FOUR = {
    "four stages": ("usual", 4, [1, 1, 1, 0]),
    "two pipelines": ("usual", 2, [2, 2, 1, 1]),
    "tied": ("tied", 4, [1, 2, 1, 0]),
}
"""(model, stages, blocks on each rank)."""


@pytest.mark.full
@pytest.mark.parametrize("policy", ["full", "selective", {"mode": "segments", "k": 2}], ids=str)
@pytest.mark.parametrize("case", FOUR)
def test_four_ranks(ranks: RankGroups, case: str, policy: Any) -> None:
    kind, stages, blocks = FOUR[case]
    runs = [Run(kind, asked, options={"num_stages": stages}) for asked in (None, policy)]
    by_rank = ranks(4).run(trained, runs)
    for (plain, with_plan), count in zip(by_rank, blocks, strict=True):
        assert same(with_plan, plain)
        assert plain["calls"].get("block", 0) == 2 * MICRO_BATCHES * count
        assert with_plan["calls"].get("block", 0) == 2 * plain["calls"].get("block", 0)
        assert with_plan["plan"] == by_rank[0][1]["plan"]


def plan_alone(rank: int, world: int, kind: str, policy: Any) -> tuple[str, list[str]]:
    """The plan's text, and which modules of this rank have become regions."""
    net = net_of(kind)
    plan = apply(net, policy)
    return str(plan), [name for name, module in net.named_modules() if is_recomputed(module)]


def without_blocks(rank: int, world: int) -> list[tuple[str, list[str]]]:
    embedding = {"mode": "full", "blocks": "Embedding"}
    return [plan_alone(rank, world, "large", "full"), plan_alone(rank, world, "short", embedding)]


def test_stages_without_blocks_or_layers_have_nothing_to_recompute(found: Found) -> None:
    (large, short), (large_too, short_too) = found(without_blocks)
    text = large[0]
    assert (large, large_too) == ((text, []), (text, ["1", "2", "3"]))
    assert "stage 0    0\n" in text and "recompute  {1-3}" in text
    text = short[0]
    assert (short, short_too) == ((text, ["0"]), (text, []))
    assert "stage 1    no module" in text


MISTAKES: list[tuple[Any, str]] = [
    ({"mode": "full", "blocks": "Decoderpipe"}, r"did you mean 'DecoderPipe'?"),
    ({"mode": "full", "blocks": "Decoderpipe"}, "DecoderPipe (3)"),
    ({"mode": "first_n", "n": 2}, "there is 1 block in stage 1"),
    ({"mode": "per_stage", "per_stage": ["full"]}, "there are 2 stages"),
    ({"mode": "selective_attention", "modules": "atention"}, "did you mean 'attention'"),
    ({"mode": "full", "min_bytes": 8}, "needs a batch"),
]


def all_refused(rank: int, world: int) -> list[str]:
    return [refused(rank, world, plan_alone, "usual", policy) for policy, _ in MISTAKES]


def test_what_does_not_fit_is_refused_alike_on_every_rank(found: Found) -> None:
    one, other = found(all_refused)
    assert one == other
    for text, (_, message) in zip(one, MISTAKES, strict=True):
        assert message in text


def intervals(rank: int, world: int) -> list[str]:
    net = net_of("usual", activation_checkpoint_interval=1)
    run = Run("usual", "full", config={"pipeline": {"activation_checkpoint_interval": 1}})
    return [refused(rank, world, lambda *_: apply(net, "full")), refused(rank, world, trained, [run])]


def test_recomputing_twice_is_refused_whoever_asks_for_it(found: Found) -> None:
    one, other = found(intervals)
    assert one == other
    for message in one:
        assert "activation_checkpoint_interval=1" in message and "section pipeline of DeepSpeed's JSON" in message


def later_interval(rank: int, world: int) -> list[str]:
    net = net_of("usual")
    apply(net, "full")
    choose: Any = net.set_checkpoint_interval
    messages = [refused(rank, world, lambda *_: choose(1)), refused(rank, world, lambda *_: choose(0))]
    remove_plan(net)
    return [*messages, refused(rank, world, lambda *_: choose(1))]


def test_an_interval_that_is_chosen_later_is_refused_until_the_plan_is_removed(found: Found) -> None:
    for first, zero, removed in found(later_interval):
        assert "activation_checkpoint_interval=1" in first and not zero and not removed


def wrong_ways(rank: int, world: int) -> list[str]:
    net = net_of("usual")
    ids = torch.zeros(2, SEQ, dtype=torch.int64)
    plan = make_plan(net, "full")
    tied = make_plan(net_of("tied"), {"mode": "full", "blocks": "EmbedPipe"})
    tries: list[Callable[[], Any]] = [
        lambda: make_plan(net, "full", ids),
        lambda: make_plan(net, "full", stages=(("0",), ("1",))),
        lambda: make_plan(nn.ModuleDict({"module": net}), "full"),
        lambda: plan_cost(net, plan, ids),
        lambda: apply_plan(net, plan.part(1 - rank)),
        lambda: apply_plan(net_of("tied"), tied),
        lambda: apply_plan(net, make_plan(net_of("masked"), "full")),
    ]
    return [refused(rank, world, lambda *_, one=one: one()) for one in tries]


def test_what_one_stage_cannot_tell_is_refused(found: Found) -> None:
    for rank, messages in enumerate(found(wrong_ways)):
        assert [message.split(":")[0] for message in messages] == [
            "this PipelineModule holds one stage of a model, and a step runs through all of them",
            "this PipelineModule is cut into stages already",
            "this ModuleDict holds a DeepSpeed PipelineModule",
            "this PipelineModule holds one stage of a model, and a step runs through all of them",
            f"this is the plan of stage {1 - rank}, and this rank holds another one",
            "the plan recomputes 'tied_modules.embed', but layer 6 (a TiedLayerSpec with forward_fn) calls a function "
            "with that module and never the module itself",
            "the plan names '5', and the stages own {0-4}",
        ]
        assert all("verify the model before it is cut" in messages[n] for n in (0, 3))
        assert "it is for another model" in messages[-1]


def recut(rank: int, world: int) -> list[str]:
    net = net_of("modules")
    apply_plan(net, Plan(blocks=("1", "2", "3", "4"), regions=(Region(("1", "2", "3", "4")),)))
    return sorted(name for name, module in net.named_modules() if is_recomputed(module))


def test_a_plan_without_stages_is_cut_where_the_net_is(found: Found) -> None:
    assert found(recut) == [["1", "2"], ["3", "4"]]


UNTRAINED = (without_blocks, all_refused, intervals, later_interval, wrong_ways, recut)


def untrained(rank: int, world: int) -> dict[str, Any]:
    return {doing.__name__: doing(rank, world) for doing in UNTRAINED}


@pytest.fixture(scope="module")
def found(ranks: RankGroups) -> Found:
    """What each rank has returned from one of the functions above; all are run in one go, as in :func:`trained`."""
    by_rank = ranks(2).run(untrained)
    return lambda doing: [one[doing.__name__] for one in by_rank]
