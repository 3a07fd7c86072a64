"""Gradient accumulation under DeepSpeed, held to its rules.

DeepSpeed decides in each backward whether gradients are reduced, from a count that only ``step()`` advances. Whoever
calls ``backward()`` more often than that count expects loses gradients without a word: ZeRO-1 and 2 keep those of the
last call (deepspeedai/DeepSpeed#545, huggingface/accelerate#3877).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from dist_ckpt.compat import zero
from dist_ckpt.errors import EngineError

_GUARD = "_dist_ckpt_accumulation"


def guard_accumulation(engine: Any) -> None:
    """Makes a DeepSpeed engine raise where its gradient accumulation would lose gradients or count wrong.

    To be called once after ``deepspeed.initialize``, at any ZeRO stage; it adds nothing to the step but a few
    comparisons. Right, and left alone, are the ways that DeepSpeed has:

    - ``backward()`` and then ``step()`` for each micro-batch, ``gradient_accumulation_steps`` times an update;
    - ``set_gradient_accumulation_boundary(False)`` for all backwards but the last of an update, ``True`` before that
      one and its ``step()``;
    - ``no_sync()`` around all backwards but the last of an update, with ``"gradient_accumulation_steps": 1``, without
      ZeRO;
    - ``coalesce_grad_reduction()``, and ``"managed_gradient_accumulation": false``.

    ``loss.backward()`` counts as ``engine.backward(loss)`` does, where the loss comes from the engine's forward. Under
    ZeRO-3 that forward has to run between two backwards, and ``zero_grad()`` is for between updates at any stage.

    Raises:
        EngineError: the engine is none of DeepSpeed's or a pipeline's, or is guarded already. Later, from
            ``backward()``, ``step()`` and ``zero_grad()``: they are called in an order that loses gradients.
    """
    if not zero.is_engine(engine) or not zero.has_backward_hooks(engine):
        raise EngineError(
            f"guard_accumulation takes the engine that deepspeed.initialize returns (DeepSpeed 0.19), not a "
            f"{type(engine).__name__}"
        )
    if zero.is_pipeline(engine):
        raise EngineError("guard_accumulation: train_batch() of a pipeline calls backward and step itself")
    if _GUARD in engine.__dict__:
        raise EngineError("guard_accumulation: this engine is guarded already")
    engine.__dict__[_GUARD] = guard = _Guard(engine)
    engine.backward = guard.checked(engine.backward)
    zero.wrap_backward(engine, begins=guard.checked, ends=guard.counted)
    engine.coalesce_grad_reduction = guard.flushed(engine.coalesce_grad_reduction)
    engine.step = guard.stepped(engine.step)
    engine.zero_grad = guard.clearing(engine.zero_grad)
    if engine.optimizer is not None:
        engine.optimizer.zero_grad = guard.clearing(engine.optimizer.zero_grad)


class _Guard:
    """What one engine has been asked for since its last update.

    Two shapes of micro-batches are told apart by who decides on the boundary: DeepSpeed's count of ``step()`` calls, or
    the caller with ``set_gradient_accumulation_boundary``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._since_step = 0
        self._unsynced = 0
        """Backwards within ``no_sync()`` since the last ``step()``."""
        self._since_update = 0
        self._is_reduced = False
        """Whether the backward has run that reduces the update's gradients."""
        self._is_stepping = False

    def checked(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """A function that starts a backward, behind the check whether one may run."""

        @functools.wraps(backward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self._check_backward()
            self._check_forward()
            return backward(*args, **kwargs)

        return run

    def counted(self, ended: Callable[..., Any]) -> Callable[..., Any]:
        """A function that ends a backward, which is counted once it has run."""

        @functools.wraps(ended)
        def run(*args: Any, **kwargs: Any) -> Any:
            result = ended(*args, **kwargs)
            if zero.is_in_no_sync(self._engine):
                self._unsynced += 1
            else:
                self._since_step += 1
            self._since_update += 1
            self._is_reduced = self._is_reduced or self._reduces()
            return result

        return run

    def flushed(self, coalescing: Callable[[], AbstractContextManager[Any]]) -> Callable[[], Any]:
        """``coalesce_grad_reduction()``, which reduces gradients when it ends."""

        @contextmanager
        def run() -> Iterator[None]:
            self._check_backward()
            with coalescing():
                yield
            self._is_reduced = True

        return run

    def stepped(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """``step()``, behind the check whether it would use all gradients and only those."""

        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            updates = self._check_step()
            self._is_stepping = True
            try:
                result = step(*args, **kwargs)
            finally:
                self._is_stepping = False
            self._since_step = self._unsynced = 0
            if updates:
                self._since_update, self._is_reduced = 0, False
            return result

        return run

    def clearing(self, zero_grad: Callable[..., Any]) -> Callable[..., Any]:
        """``zero_grad()``, which DeepSpeed itself calls in ``step()``, behind the check whether an update has begun."""

        @functools.wraps(zero_grad)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._since_update and not self._is_stepping:
                raise EngineError(
                    f"zero_grad() after backward {self._since_update} of an update: what it drops depends on the ZeRO "
                    "stage, and DeepSpeed counts the micro-batch all the same, so the update would come after too few. "
                    "Leave it out: engine.step() clears the gradients after each update"
                )
            return zero_grad(*args, **kwargs)

        return run

    def _check_forward(self) -> None:
        if zero.overwrites_gradients(self._engine):
            raise EngineError(
                f"backward {self._since_update + 1} of an update without a forward of the engine since the backward "
                "before it: ZeRO-3 counts micro-batches in forward, and would lose the gradients of the first. Call "
                "engine(…), engine.backward() and engine.step() for one micro-batch after the other, or go backward "
                "once, from the sum of the losses"
            )

    def _check_backward(self) -> None:
        engine = self._engine
        if not zero.counts_micro_batches(engine):
            return
        configured = engine.gradient_accumulation_steps()
        if self._is_reduced:
            raise EngineError(
                f"backward {self._since_update + 1} of an update that DeepSpeed took for complete after "
                f"{self._since_update} (gradient_accumulation_steps={configured}): at some ZeRO stages the gradients "
                "before it would be lost. Call engine.step() after each engine.backward(), and set "
                '"gradient_accumulation_steps" to the number of micro-batches of an update'
            )
        if self._since_step and not zero.boundary_is_set(engine) and not zero.is_in_no_sync(engine):
            raise EngineError(
                "two backwards without engine.step() in between: DeepSpeed counts micro-batches in step(), so this "
                "update would never be complete. Call engine.step() after each engine.backward(), or say where updates "
                "end with engine.set_gradient_accumulation_boundary()"
            )

    def _check_step(self) -> bool:
        """Whether the step is an update."""
        engine = self._engine
        if not zero.counts_micro_batches(engine):
            updates, complete = True, self._since_update > 0
        else:
            updates = bool(engine.is_gradient_accumulation_boundary())
            complete = self._is_reduced or not updates
        if updates and not complete:
            what = (
                "the last backward was not told that it is the last of its update, so its gradients are not reduced: "
                "call engine.set_gradient_accumulation_boundary(True) before that backward, not after it"
                if self._since_update
                else "no backward has run since the last update"
            )
            raise EngineError(f"engine.step() would change the weights without the gradients of an update: {what}")
        if updates or zero.boundary_is_set(engine):
            return updates
        if self._unsynced:
            raise EngineError(
                f"engine.step() after {self._since_update} backwards, some of them within no_sync(), is no update: "
                "DeepSpeed counts calls of step() up to gradient_accumulation_steps="
                f"{engine.gradient_accumulation_steps()}. Set that to 1, or leave no_sync() out and call step() after "
                "each backward"
            )
        if not self._since_step:
            raise EngineError(
                "engine.step() without a backward since the last one: DeepSpeed would count a micro-batch that never "
                "ran, and update the weights too early"
            )
        return updates

    def _reduces(self) -> bool:
        """Whether the backward that ends now reduces gradients for an update."""
        engine = self._engine
        return (
            zero.counts_micro_batches(engine)
            and not zero.defers_reduction(engine)
            and bool(engine.is_gradient_accumulation_boundary())
        )
