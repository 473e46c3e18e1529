"""Figures of each training step, for a tracker. Nothing is measured outside of `step_statistics`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from streamshard.tools.trace import trace

Read = Callable[..., dict[str, float]]


@contextlib.contextmanager
def step_statistics(model: nn.Module, scaler: Any = None) -> Iterator[Read]:
    """Measure each training step inside the context, on this rank.

        with streamshard.step_statistics(model) as read:
            for batch in loader:
                model(batch).backward()
                norm = model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                tracker.log(read(grad_norm=norm))

    Args:
        model: made by `StreamShard`.
        scaler: a ``torch.amp.GradScaler``, if there is one.

    Yields:
        A function that returns the figures since its last call: the seconds of `Trace.summary`, ``step``, the number of
        the call, and the numbers that are given to it. With a scaler also ``loss_scale``, that of the next step, and
        ``skipped_steps``: how many steps the scaler has skipped so far, because gradients had overflowed. Call it once
        per step, behind ``optimizer.step()`` and ``scaler.update()``. Not collective. On an accelerator the host waits
        for the device.

    Raises:
        ShardingError: `model` is not sharded.
    """
    step = skipped = 0
    scale = None if scaler is None else scaler.get_scale()
    with contextlib.ExitStack() as running:
        found = running.enter_context(trace(model))

        def read(**given: Tensor | float) -> dict[str, float]:
            nonlocal found, scale, skipped, step
            running.close()
            step += 1
            figures = {"step": step, **found.summary(), **{name: float(value) for name, value in given.items()}}
            if scaler is not None:
                before, scale = scale, scaler.get_scale()
                skipped += scale < before  # only an overflow makes the scale smaller
                figures |= {"loss_scale": scale, "skipped_steps": skipped}
            found = running.enter_context(trace(model))
            return figures

        yield read
