"""What is found out after a failed allocation: how much was asked for, where, and what was alive."""

from __future__ import annotations

import errno
import gc
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dist_ckpt.memory.activations import saved_bytes
from dist_ckpt.memory.ledger import owners_of
from dist_ckpt.memory.out_of_memory.failure import out_of_memory_in, requested_bytes
from dist_ckpt.memory.out_of_memory.graph_names import GraphNames, modules_of_parameters
from dist_ckpt.memory.out_of_memory.post_mortem import PostMortem, post_mortem
from dist_ckpt.memory.records import MemoryReport, RankMemory
from dist_ckpt.planning import apply
from dist_ckpt.report.html.out_of_memory import out_of_memory_page
from dist_ckpt.trainer.models.config import ModelConfig
from dist_ckpt.trainer.models.init import init_parameters
from dist_ckpt.trainer.models.llama import FeedForward, Transformer
from dist_ckpt.trainer.post_mortem import in_a_sentence
from tests.distributed.oracle import COMPILER, counter

pytestmark = pytest.mark.usefixtures("alone")

TOO_MUCH = 1 << 50


def fail(*_: Any, **__: Any) -> None:
    torch.empty(TOO_MUCH, dtype=torch.uint8)


def build(policy: str = "none") -> Transformer:
    config = ModelConfig(n_layers=3, d_model=32, d_ff=64, vocab_size=100, dropout=0.1)
    model = Transformer(config)
    model.init_buffers()
    init_parameters(model, 0, config.n_layers)
    apply(model, policy)
    return model.train()


def examine(step: Callable[[nn.Module, torch.optim.Optimizer], None], policy: str = "none") -> PostMortem:
    """Runs a step that fails."""
    gc.collect()  # what tests before have left
    model = build(policy)
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        step(model, optimizer)
    except RuntimeError as error:
        return post_mortem(error, model, lambda: owners_of(model, optimizer), step=7)
    raise AssertionError("nothing has failed")


def loss_of(model: nn.Module) -> Tensor:
    ids = torch.arange(64).reshape(2, 32)
    loss: Tensor = model(ids, labels=ids)
    return loss


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    loss_of(model).backward()
    optimizer.step()


def fails_at_forward(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """The n-th call of a feed-forward fails, recomputes counted."""
    usual, calls = FeedForward.forward, iter(range(1, 100))

    def forward(self: FeedForward, x: Tensor) -> Tensor:
        if next(calls) == call:
            fail()
        return usual(self, x)

    monkeypatch.setattr(FeedForward, "forward", forward)


def test_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_at_forward(monkeypatch, call=2)
    found = examine(update)
    assert (found.place.phase, found.place.module) == ("forward", "layers.1.feed_forward")
    assert found.requested_bytes == TOO_MUCH and "DefaultCPUAllocator" in found.message
    assert found.place.line is not None and found.place.line.endswith(": torch.empty(TOO_MUCH, dtype=torch.uint8)")
    assert found.by_kind["params"] == sum(p.nbytes for p in build().parameters())
    assert found.by_kind["activations"] > 0 and found.by_kind["grads"] == 0
    assert found.by_module["layers.0.feed_forward"]["activations"] == 3 * 2 * 32 * 64 * 4, "w1's and w3's, and silu's"
    assert not found.notes
    said = in_a_sentence(found)
    assert said.startswith("1,048,576.000 GiB failed in forward of layers.1.feed_forward; most of the tensors alive ")
    assert "were activations, " in said and said.endswith("%)")


def test_recompute(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_at_forward(monkeypatch, call=3 + 2)
    found = examine(update, "full")
    assert (found.place.phase, found.place.module) == ("recompute", "layers.1.feed_forward")
    assert found.by_module["layers.1"]["recompute"] > 0
    assert found.by_module["layers.0"] == {"activations": 2 * 32 * 32 * 4}, "the input of a block yet to be recomputed"
    assert found.by_kind["grads"] > 0


def test_backward() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model.get_parameter("layers.1.feed_forward.w2.weight").register_hook(fail)
        update(model, optimizer)

    found = examine(step)
    assert found.place.phase == "backward"
    assert found.place.module is not None and found.place.module.startswith("layers.1.feed_forward")
    assert 0 < found.by_kind["grads"] < found.by_kind["params"]
    assert "layers.0.feed_forward" in found.by_module, "whose backward was to come"
    assert "activations" not in found.by_module.get("layers.2.feed_forward", {}), "whose backward is done"


def test_optimizer() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        update(model, optimizer)
        optimizer.register_step_pre_hook(fail)
        update(model, optimizer)

    found = examine(step)
    assert found.place.phase == "optimizer"
    moments = 2 * found.by_kind["params"]
    assert found.by_kind["optimizer"] == moments + 4 * len(list(build().parameters()))
    assert found.by_kind["activations"] == 0


def test_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C._nn, "cross_entropy_loss", fail)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        logits = nn.Linear(4, 4)(torch.randn(2, 4))
        nn.functional.cross_entropy(logits, torch.zeros(2, dtype=torch.long))

    assert examine(step).place.phase == "loss"


@pytest.mark.parametrize("policy", ["none", "full", "selective"])
def test_activations_are_those_that_the_meter_counts(policy: str) -> None:
    counted = []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        loss = loss_of(model)
        counted.append(saved_bytes([loss], [*model.parameters(), *model.buffers()]).total)
        fail()

    found = examine(step, policy)
    assert [found.by_kind["activations"]] == counted
    assert found.by_kind["buffers"] == sum(b.nbytes for b in build().buffers())


def test_what_nobody_owns_is_named() -> None:
    kept = [torch.zeros(1000, 1000)]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        fail()

    found = examine(step)
    (holding,) = [h for h in found.holdings if h.shape == tuple(kept[0].shape)]
    assert (holding.kind, holding.nbytes) == ("unattributed", 4_000_000)
    assert "kept" in holding.source and "test_post_mortem" in holding.source


@pytest.mark.skipif(COMPILER is None, reason="no C compiler to build the counter with")
def test_holdings_are_all_that_the_allocator_has_given() -> None:
    gc.collect()
    base, alive = counter().live(), []

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        update(model, optimizer)
        loss = loss_of(model)
        alive.append(counter().live() - base)
        fail(loss)

    found = examine(step)
    before = found.by_kind["unattributed"]  # of other tests
    assert found.tensor_bytes - before == pytest.approx(alive[0], rel=0.005)
    assert found.rest_bytes >= 0 and len(found.holdings) <= 60


def test_a_model_that_cannot_be_examined_is_no_error() -> None:
    def owners() -> Any:
        raise AttributeError("half built")

    try:
        fail()
    except RuntimeError as error:
        found = post_mortem(error, build(), owners)
    (note,) = found.notes
    assert "who owns" in note and "half built" in note
    assert found.requested_bytes == TOO_MUCH


def test_modules_of_saved_tensors() -> None:
    model = build()
    loss = loss_of(model)
    lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    names = GraphNames([loss], modules_of_parameters(model), lists)
    saved = saved_bytes([loss], [*model.parameters(), *model.buffers()], tensors=True)
    found = {names.keeper(tensor) for tensor in saved.tensors}
    assert None not in found, "each one is kept by a node"
    for block in ("layers.0", "layers.1", "layers.2"):
        assert {
            (f"{block}.attention", "saved by ScaledDotProductFlashAttentionForCpuBackward0"),
            (f"{block}.attention.wo", "saved by MmBackward0"),
            (f"{block}.feed_forward", "saved by SiluBackward0"),
            (f"{block}.feed_forward.w2", "saved by MmBackward0"),
            (block, "saved by MulBackward0"),
        } <= found, "attention lies between its projections, dropout between two branches"
    assert ("output", "saved by MmBackward0") in found and ("", "saved by NllLossBackward0") in found


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 123 bytes. Error code 12", 123),
        ("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.10 GiB", 3 * 2**29),
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0", 20 * 2**20),
        ("Unable to allocate 64.0 KiB for an array with shape (8192,) and data type float64", 2**16),
        ("std::bad_alloc", None),
        ("", None),
    ],
)
def test_what_was_asked_for(text: str, nbytes: int | None) -> None:
    assert requested_bytes(RuntimeError(text)) == nbytes


def chained(cause: BaseException, hidden: bool = False) -> BaseException:
    try:
        try:
            raise cause
        except BaseException as error:
            if hidden:
                raise ValueError("later") from None
            raise ValueError("later") from error
    except ValueError as error:
        return error


def test_the_first_allocation_that_failed_counts() -> None:
    """Whoever deals with it may need memory as well: a profiler that stops, say."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        try:
            model.get_parameter("norm.weight").register_hook(fail)
            update(model, optimizer)
        finally:
            raise RuntimeError("std::bad_alloc")

    found = examine(step)
    assert (found.place.phase, found.requested_bytes) == ("backward", TOO_MUCH)


def test_errors_about_memory() -> None:
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("std::bad_alloc"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        torch.distributed.DistBackendError("NCCL error … Cuda failure 2 'out of memory'"),
    ):
        assert out_of_memory_in(error) is error
        assert out_of_memory_in(chained(error)) is error
        assert out_of_memory_in(chained(error, hidden=True)) is None
    for error in (
        RuntimeError("Connection closed by peer"),
        RuntimeError("the queue: std::bad_alloc was mentioned"),
        OSError(errno.ENOSPC, "No space left on device"),
        ValueError("DefaultCPUAllocator: "),
    ):
        assert out_of_memory_in(error) is None


def test_the_page_says_what_was_asked_for_and_what_filled_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fails_at_forward(monkeypatch, call=2)
    found = examine(update)
    report = MemoryReport(6, (RankMemory(3, "cpu", 6, 3, 3, 3, 0, None),)).to_dict()
    suggestion = {"change": "ckpt=full", "saved_bytes": 2**20, "freed_bytes": 2**21, "recomputed": 0.25}
    record = found.to_dict() | {
        "suggestions": [suggestion], "advice": "Recompute more.", "last_report": report, "heaviest_rank": 3,
    }  # fmt: skip
    page = out_of_memory_page(json.loads(json.dumps(record)))
    for text in (
        "Rank 0 ran out of memory in step 7",
        "An allocation of 1,048,576.000 GiB failed in forward of layers.1.feed_forward.",
        f'data-bytes="{found.by_kind["params"]}"',
        "saved by SiluBackward0",
        "ckpt=full",
        "+25.0%",
        "The heaviest rank was rank 3, as of step 6.",
    ):
        assert text in page, text
    bare = found.to_dict() | {"suggestions": [], "advice": "Shard.", "last_report": None, "heaviest_rank": None}
    assert "No memory was reported before." in out_of_memory_page(json.loads(json.dumps(bare)))
