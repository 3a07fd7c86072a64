"""Training states of DeepSpeed engines are those of every other engine: bit for bit, on any number of ranks."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt.compat import deepspeed as compat
from dist_ckpt.compat.dcp_pieces import Piece
from dist_ckpt.errors import StateError
from dist_ckpt.states.deepspeed import DeepSpeedSource
from dist_ckpt.states.files import open_folder
from dist_ckpt.states.modules import ModuleSource
from dist_ckpt.states.source import StateSource
from dist_ckpt.states.training_state import load_state, save_state
from dist_ckpt.trainer.export import export_weights
from tests import deepspeed_toys, state_toys
from tests.deepspeed_toys import by_kind, stored
from tests.ranks import RankGroups
from tests.state_toys import Toy, sharded


@dataclass(frozen=True)
class At:
    """Where a training runs: an engine of tests.state_toys, or ``zero``, with its options."""

    engine: str = "zero"
    world: int = 2
    stage: int = 1
    bf16: bool = False
    zero: dict[str, Any] = field(default_factory=dict)
    """Options of ``zero_optimization``."""
    data: dict[str, Any] = field(default_factory=dict)
    """Other options of DeepSpeed."""
    optimizer: str = "AdamW"

    def __str__(self) -> str:
        parts = [f"{self.engine}{self.stage if self.engine == 'zero' else ''}", str(self.world)]
        return "-".join([*parts, *(["bf16"] if self.bf16 else []), *self.zero, *self.data])


class Training:
    """A toy under some engine."""

    def __init__(self, at: At, model: nn.Module) -> None:
        self.zero = at.engine == "zero"
        if self.zero:
            self.engine = deepspeed_toys.initialized(model, at.stage, at.bf16, at.zero, at.data, at.optimizer)
        else:
            self.model = sharded(model, at.engine)  # type: ignore[arg-type]
            self.optimizer = deepspeed_toys.two_groups(self.model)

    @property
    def source(self) -> StateSource:
        return DeepSpeedSource(self.engine) if self.zero else ModuleSource(self.model, self.optimizer)

    def train(self, steps: int, seed: int = 1) -> list[float]:
        """Losses and norms, where the engine gives them."""
        if self.zero:
            return deepspeed_toys.train(self.engine, steps, seed)
        state_toys.train(self.model, self.optimizer, steps, seed)
        return []

    def whole(self) -> dict[str, Tensor]:
        """Weights and moments of all ranks, by key, and the step counts; not by way of a file."""
        if self.zero:
            return deepspeed_toys.whole(self.engine)
        tensors = state_toys.whole(self.model, self.optimizer)["tensors"]
        return by_kind({key.replace("optimizer.", "optimizer.state."): value for key, value in tensors.items()})


@contextmanager
def training(at: At, model: nn.Module) -> Iterator[Training]:
    begun = Training(at, model)
    try:
        yield begun
    finally:
        if begun.zero:
            compat.close(begun.engine)


def assert_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Bit for bit, in fp32; of tied weights only the first name counts, and no copies in 16 bits."""
    keys = one.keys() & other.keys()
    assert {k for k in one.keys() ^ other.keys() if not k.startswith("low.") and "head" not in k} == set()
    assert [key for key in sorted(keys) if not torch.equal(one[key], other[key])] == []


def _saved(rank: int, world: int, at: At, path: str, steps: int = 3, make: type[nn.Module] = Toy) -> dict[str, Tensor]:
    """Saves after some steps; what was saved."""
    with training(at, make()) as begun:
        torch.manual_seed(100 + rank)
        begun.train(steps)
        save_state(path, begun.source, {"step": steps})
        return begun.whole()


def _moved(
    rank: int, world: int, at: At, path: str, to: str | None, make: type[nn.Module] = Toy
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Loads into a training that was another one before, and saves again; what was loaded, and the extra."""
    with training(at, make(seed=9)) as begun:
        begun.train(1)
        extra = load_state(path, begun.source)
        if to is not None:
            save_state(to, begun.source, {"step": extra["step"]})
        found = begun.whole()
        begun.train(1)  # it goes on
        return found, extra


def _gone_on(
    rank: int, world: int, cases: list[At], path: str, steps: int = 3, make: type[nn.Module] = Toy
) -> list[str]:
    """Of each case what differs between a training that was saved, and went on, and one that was loaded from it."""
    unlike = []
    for number, at in enumerate(cases):
        ends = []
        for resumed in (False, True):
            with training(at, make(seed=9 * resumed)) as begun:
                torch.manual_seed(100 + rank)
                begun.train(1 if resumed else steps)
                if resumed:
                    extra = load_state(f"{path}-{number}", begun.source)
                    assert extra == {"step": steps, "rng": True}
                else:
                    save_state(f"{path}-{number}", begun.source, {"step": steps})
                ends.append([begun.whole(), {"drawn": torch.rand(4)}, begun.train(2, seed=2), begun.whole()])
        for what, one, other in zip(("loaded", "drawn", "seen", "end"), *ends, strict=True):
            same = one == other if what == "seen" else all(torch.equal(one[key], other[key]) for key in one | other)
            unlike += [] if same else [f"{at}: {what}"]
    return unlike


def test_training_goes_on_as_if_never_stopped(ranks: RankGroups, tmp_path: Path) -> None:
    """Losses, norms, fp32 weights, moments, step counts, copies in 16 bits and random numbers; with dropout."""
    cases = [At(stage=3, bf16=True), At(stage=1)]
    assert ranks(2).run(_gone_on, cases, str(tmp_path / "state")) == [[], []]


ROUND_ROBIN = {"round_robin_gradients": True}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
EVERY = [
    *(At(stage=stage, bf16=bf16) for stage in range(4) for bf16 in (False, True)),
    *(At(stage=stage, bf16=bf16, zero=OFFLOAD) for stage in (1, 2, 3) for bf16 in (False, True)),
    At(stage=3, bf16=True, zero={**OFFLOAD, "offload_param": {"device": "cpu"}}),
    At(stage=3, zero={"zero_hpz_partition_size": 2}),
    At(stage=3, bf16=True, zero={"sub_group_size": 50}),
    At(stage=2, zero={"overlap_comm": True, **ROUND_ROBIN}),
    At(stage=1, bf16=True, data={"data_types": {"grad_accum_dtype": "fp32"}}),
]


@pytest.mark.full
@pytest.mark.parametrize("cases", [EVERY[:5], EVERY[5:10], EVERY[10:15], EVERY[15:]], ids=lambda c: str(c[0]))
@pytest.mark.parametrize("world", [2, 4])
def test_training_goes_on_under_every_configuration(
    ranks: RankGroups, tmp_path: Path, cases: list[At], world: int
) -> None:
    assert ranks(world).run(_gone_on, cases, str(tmp_path / "state"), timeout_s=400) == [[]] * world


@pytest.mark.parametrize(
    "way",
    [
        [At("ddp"), At(stage=2), At("fsdp2")],
        pytest.param([At("fsdp2", 4), At(stage=3, world=2), At(stage=1, world=4)], marks=pytest.mark.full),
        pytest.param([At(stage=1), At(stage=3, world=4), At(stage=0)], marks=pytest.mark.full),
        pytest.param([At(stage=3), At(stage=0, bf16=True, world=1), At("one", 1)], marks=pytest.mark.full),
        pytest.param([At("ddp"), At(stage=2, bf16=True), At("fsdp1")], marks=pytest.mark.full),
        pytest.param([At(stage=2, world=4), At(stage=3, zero=OFFLOAD), At(stage=1, world=1)], marks=pytest.mark.full),
        pytest.param([At(stage=3, bf16=True), At(stage=3, bf16=True, world=4), At("hsdp", 4)], marks=pytest.mark.full),
        pytest.param([At(stage=1, data=EVERY[-1].data, bf16=True), At(stage=2, world=4)], marks=pytest.mark.full),
        pytest.param([At("ddp"), At(stage=2, world=4, zero=ROUND_ROBIN), At(stage=1)], marks=pytest.mark.full),
    ],
    ids=lambda way: "_".join(map(str, way)),
)
def test_state_moves_between_engines_stages_and_ranks(ranks: RankGroups, tmp_path: Path, way: list[At]) -> None:
    """Each engine saves what it has, has what it has loaded, and saves what it has loaded."""
    saved = ranks(way[0].world).run(_saved, way[0], str(tmp_path / "0"))
    first = stored(tmp_path / "0")
    for rank in saved:
        assert_same(rank, first)
    for number, at in enumerate(way[1:]):
        loaded = ranks(at.world).run(_moved, at, str(tmp_path / str(number)), str(tmp_path / str(number + 1)))
        for found, extra in loaded:
            if at.zero == ROUND_ROBIN:  # DeepSpeed's own functions look for parameters in the wrong places
                low = {key.replace("low.", "model."): value for key, value in found.items() if key.startswith("low.")}
                assert all(torch.equal(value, first[key]) for key, value in low.items())
            else:
                assert_same(found, first)
            assert extra == {"step": 3, "rng": at.world == way[number].world}
        assert_same(stored(tmp_path / str(number + 1)), first)


def test_buffers_keep_their_numbers(ranks: RankGroups, tmp_path: Path) -> None:
    """What has 16 bits in the model has them in a state, though weights that an engine casts have 32."""
    path = tmp_path / "state"
    first = ranks(2).run(_saved, At(stage=1, bf16=True), str(path), 1, deepspeed_toys.Low)[0]
    assert open_folder(path).entries["model.scale"].properties.dtype == torch.bfloat16
    for found, _ in ranks(2).run(_moved, At("ddp"), str(path), None, deepspeed_toys.Low):
        assert_same(found, first)


@pytest.mark.full
@pytest.mark.parametrize("cases", [EVERY[:8], EVERY[8:]], ids=("zero", "options"))
def test_state_of_an_engine_that_has_never_stepped(ranks: RankGroups, tmp_path: Path, cases: list[At]) -> None:
    """It has no moments, also where DeepSpeed has made some, and makes a used engine one that has never stepped."""
    assert ranks(2).run(_gone_on, cases, str(tmp_path / "state"), 0, timeout_s=400) == [[], []]
    for number, at in enumerate(cases):
        state = open_folder(tmp_path / f"state-{number}")
        assert state.record["optimizer"]["stepped"] is False, at
        assert not [key for key in state.entries if key.startswith("optimizer.")], at
        initial = {name: value.bfloat16().float() if at.bf16 else value for name, value in Toy().state_dict().items()}
        held = stored(state.path)
        assert all(torch.equal(held[f"model.{n}"], value) for n, value in initial.items() if n != "head.weight"), at


@pytest.mark.full
@pytest.mark.parametrize("cases", [EVERY[:8], EVERY[8:]], ids=("zero", "options"))
def test_what_is_not_trained_is_saved_too(ranks: RankGroups, tmp_path: Path, cases: list[At]) -> None:
    """Frozen and unused parameters, and running statistics."""
    path = str(tmp_path / "state")
    assert ranks(2).run(_gone_on, cases, path, 3, deepspeed_toys.Odd, timeout_s=400) == [[], []]
    for number, at in enumerate(cases):
        state = open_folder(tmp_path / f"state-{number}")
        assert {"model.embedding.weight", "model.mean"} <= state.entries.keys()
        assert "model.table" not in state.entries
        numbers = [entry.properties.dtype for key, entry in state.entries.items() if key != "model.count"]
        assert set(numbers) == {torch.float32, torch.uint8}, at
        assert stored(state.path)["model.count"] == 3
    assert torch.equal(stored(f"{path}-0")["model.embedding.weight"], deepspeed_toys.Odd().embedding.weight)


@pytest.mark.full
@pytest.mark.parametrize("at", [At(stage=1), At(stage=3)], ids=str)
def test_a_parameter_that_never_had_a_gradient_is_one_with_zero_moments(
    ranks: RankGroups, tmp_path: Path, at: At
) -> None:
    """ZeRO steps whole groups, so it has moments for all of their parameters; other engines for those alone that had a
    gradient."""
    path = tmp_path / "state"
    _saved(0, 1, At("one", 1), str(path), make=deepspeed_toys.Odd)
    first = stored(path)
    assert "exp_avg.unused.weight" not in first
    for found, _ in ranks(2).run(_moved, at, str(path), str(tmp_path / "again"), deepspeed_toys.Odd):
        assert all(torch.equal(found[key], value) for key, value in first.items())
        assert found["exp_avg.unused.weight"].eq(0).all()
    loaded, _ = _moved(0, 1, At("one", 1), str(tmp_path / "again"), None, deepspeed_toys.Odd)
    assert all(torch.equal(loaded[key], value) for key, value in first.items())


MISFITS = {
    "layers": "does not fit the model: model has 4 layers, state has 2; 12 missing from the state (layers.2.norm",
    "untied": "does not fit the model: 1 missing from the state (head.weight)",
    "frozen": "the optimizer has other parameters (only in the state: embedding.weight)",
    "optimizer": "was saved with optimizer AdamW, this run has Adam",
    "waiting": "a training state is saved and loaded between updates; gradients of one are waiting here",
    "damaged": "/__1_0.distcp: is damaged: its content is not what was written",
}


def _refused(rank: int, world: int, at: At, path: str, whats: list[str]) -> list[str]:
    """The messages of loads, after each of which everything is as it was before."""
    messages = []
    for what in whats:
        model = Toy(layers=4 if what == "layers" else 2, tied=what != "untied", seed=9)
        model.head.weight.requires_grad = what != "frozen"
        with training(replace(at, optimizer="Adam" if what == "optimizer" else "AdamW"), model) as begun:
            begun.train(1)
            before = begun.whole()
            begun.engine.micro_steps += 0.5 if what == "waiting" else 0
            try:
                load_state(f"{path}-damaged" if what == "damaged" else path, begun.source)
                messages.append("loaded")
            except StateError as error:
                messages.append(str(error))
                after = begun.whole()
                assert [key for key in before if not torch.equal(before[key], after[key])] == []
    return messages


@pytest.mark.parametrize(
    "at", [At(stage=3), *(pytest.param(At(stage=n), marks=pytest.mark.full) for n in (0, 1))], ids=str
)
def test_mistakes_reach_every_rank_alike_and_change_nothing(ranks: RankGroups, tmp_path: Path, at: At) -> None:
    path = tmp_path / "state"
    ranks(2).run(_saved, at, str(path))
    shutil.copytree(path, tmp_path / "state-damaged")
    shard = tmp_path / "state-damaged" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes().replace(b"PK", b"KP", 1))
    one, other = ranks(2).run(_refused, at, str(path), [*MISFITS, ""])
    assert one == other
    assert one.pop() == "loaded"
    for message, (what, expected) in zip(one, MISFITS.items(), strict=True):
        assert expected in message, what
        assert what == "waiting" or message.startswith(str(path))


@pytest.mark.full
def test_step_counts_that_zero_cannot_keep_apart_are_refused(ranks: RankGroups, tmp_path: Path) -> None:
    """Parameters whose first gradients came later have made fewer steps; ZeRO counts a group's."""
    path = str(tmp_path / "state")
    with training(At("one", 1), Toy(tied=False)) as begun:
        begun.train(2)
        begun.optimizer.state[begun.model.head.weight]["step"] -= 1
        save_state(path, begun.source, {})
    one, other = ranks(2).run(_refused, At(stage=3), path, ["untied"])
    assert one == other
    assert one[0].startswith(f"{path}: the optimizer's step of embedding.weight is 2, that of head.weight 1, and ZeRO ")
    assert ranks(2).run(_refused, At(stage=0), path, ["untied"]) == [["loaded"]] * 2


def _saved_twice(rank: int, world: int, at: At, path: str) -> list[bool]:
    """Whether saving leaves a training as it is."""
    ends = []
    for saving in (True, False):
        with training(at, Toy()) as begun:
            torch.manual_seed(5)
            for number in range(3):
                if saving:
                    save_state(f"{path}-{number}", begun.source, {})
                begun.train(1, seed=number)
            ends.append(begun.whole())
    return [torch.equal(value, ends[1][key]) for key, value in ends[0].items()]


@pytest.mark.full
@pytest.mark.parametrize("at", EVERY, ids=str)
def test_saving_does_not_change_the_training(ranks: RankGroups, tmp_path: Path, at: At) -> None:
    for same in ranks(2).run(_saved_twice, at, str(tmp_path / "state")):
        assert all(same)
    assert not any(str(tmp_path) in output or "FutureWarning: Please" in output for output in ranks(2).outputs())


def _held(rank: int, world: int, at: At, path: str) -> int:
    """How many elements this rank has to offer."""
    with training(at, Toy()) as begun:
        begun.train(1)
        save_state(path, begun.source, {})
        source = begun.source
        source.settle()
        held = {**source.saved_weights(), **source.saved_moments()}
        return sum(value.values.numel() if isinstance(value, Piece) else value.numel() for value in held.values())


@pytest.mark.full
@pytest.mark.parametrize("at", [At(stage=1), At(stage=2, bf16=True), At(stage=3)], ids=str)
def test_each_rank_writes_what_it_holds(ranks: RankGroups, tmp_path: Path, at: At) -> None:
    """Nothing is gathered: half of all that a state has lies on each of two ranks, and goes into its file."""
    found = ranks(2).run(_held, at, str(tmp_path / "state"))
    entries = open_folder(tmp_path / "state").entries
    total = sum(entry.size.numel() for key, entry in entries.items() if not key.startswith("rng."))
    counts = sum(key.endswith(".step") for key in entries)  # each on the rank that has its parameter's first element
    assert all(abs(held - total / 2) <= counts + 3 for held in found), "and the buffer of 3 elements on both"
    sizes = [(tmp_path / "state" / f"__{rank}_0.distcp").stat().st_size for rank in range(2)]
    assert max(sizes) < 1.3 * min(sizes)


@pytest.mark.full
@pytest.mark.parametrize("at", [At(stage=2, bf16=True)], ids=str)
def test_weights_are_exported_from_any_state(ranks: RankGroups, tmp_path: Path, at: At) -> None:
    """In fp32, also of a training in bfloat16, and as ``save_model`` of safetensors writes tied weights."""
    from safetensors.torch import load_model

    saved = ranks(2).run(_saved, at, str(tmp_path / "state"))[0]
    export_weights(tmp_path / "state", tmp_path / "weights.safetensors")
    model = Toy(seed=9)
    assert load_model(model, tmp_path / "weights.safetensors") == (set(), [])
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[f"model.{name.replace('head', 'embedding')}"]), name
