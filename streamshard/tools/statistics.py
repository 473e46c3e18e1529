"""Figures of each training step, for a tracker. Nothing is measured outside of `step_statistics`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from streamshard.tools.trace import trace


@dataclass(frozen=True)
class Statistics:
    """One training step of this rank. ``dataclasses.asdict`` makes a dict of numbers.

    Attributes:
        step: its number, from 1: how often it was read.
        skipped_steps: how many steps the loss scaler has skipped so far, because gradients had overflowed.
        grad_norm: as given; None if it was not.
        loss_scale: of the next step; None without a scaler.
        step_s: seconds since the last reading.
        compute_s: seconds of the model's computation, see `streamshard.tools.timeline.Trace.summary`.
        exposed_all_gather_s: seconds in which compute waited for weights.
        exposed_reduction_s: seconds in which compute waited for reductions of gradients.
    """

    step: int
    skipped_steps: int
    grad_norm: float | None
    loss_scale: float | None
    step_s: float
    compute_s: float
    exposed_all_gather_s: float
    exposed_reduction_s: float


class StepReader:
    """Measures from one reading to the next. Made by `step_statistics`."""

    def __init__(self, model: nn.Module, scaler: Any) -> None:
        self._model, self._scaler = model, scaler
        self._step = self._skipped = 0
        self._scale = None if scaler is None else scaler.get_scale()
        self._begin()

    def _begin(self) -> None:
        self.running = contextlib.ExitStack()
        self._trace = self.running.enter_context(trace(self._model))

    def read(self, grad_norm: Tensor | float | None = None) -> Statistics:
        """The step since the last reading. Call it once per step, behind ``optimizer.step()`` and ``scaler.update()``.

        Not collective. On an accelerator the host waits for the device.

        Args:
            grad_norm: what ``model.clip_grad_norm_`` has returned, to be among the figures.
        """
        self.running.close()
        times, before = self._trace.summary(), self._scale
        if self._scaler is not None:
            self._scale = self._scaler.get_scale()
        self._step += 1
        self._skipped += before is not None and self._scale < before  # only an overflow makes the scale smaller
        self._begin()
        return Statistics(
            *(self._step, self._skipped, None if grad_norm is None else float(grad_norm), self._scale),
            *(times[name] for name in ("step_s", "compute_s", "exposed_all_gather_s", "exposed_reduction_s")),
        )


@contextlib.contextmanager
def step_statistics(model: nn.Module, scaler: Any = None) -> Iterator[StepReader]:
    """Measure each training step inside the context, on this rank.

        with streamshard.step_statistics(model) as statistics:
            for batch in loader:
                model(batch).backward()
                norm = model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                tracker.log(dataclasses.asdict(statistics.read(norm)))

    Args:
        model: made by `StreamShard`.
        scaler: a ``torch.amp.GradScaler``, if there is one.

    Raises:
        ShardingError: `model` is not sharded.
    """
    reader = StepReader(model, scaler)
    try:
        yield reader
    finally:
        reader.running.close()
