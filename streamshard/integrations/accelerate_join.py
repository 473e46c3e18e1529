"""`join_uneven_inputs`: what a rank that has run out of inputs does after the others' backwards.

torch's `Join` is told with ``repeat=`` (see docs/guide/uneven_inputs.md). accelerate's signature has no room for that,
and in its loops all that ends a step goes through the Accelerator: so what a rank's own last step did is noted, and
done again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch.distributed.algorithms.join import Join
from torch.optim import Optimizer

from streamshard.errors import warn_user

__all__ = ["StepNotes", "join"]


class StepNotes:
    """What this rank did in its last step, in order; a thing that is done again begins a new step.

    Holds no reference to the accelerator that owns it, except while `open`: a cycle would keep its loaders alive.
    """

    def __init__(self) -> None:
        self._acts: dict[object, Callable[[], object]] = {}
        self._is_open = False

    def note(self, key: object, act: Callable[[], object]) -> None:
        """`act` is being done; `key` is the same for all acts of its kind."""
        if self._is_open:
            if key in self._acts:
                self._acts = {}
            self._acts[key] = act

    @contextmanager
    def open(self, accelerator: Any) -> Iterator[None]:
        """Inside, acts are noted: those of the accelerator's optimizers and schedulers, too."""
        self._is_open = True
        with ExitStack() as undone:
            undone.callback(self._close)
            for optimizer in accelerator._optimizers:
                hook = optimizer.optimizer.register_step_pre_hook(partial(self._on_optimizer, optimizer))
                undone.callback(hook.remove)
            for scheduler in accelerator._schedulers:
                scheduler.step = partial(self._step_scheduler, scheduler, scheduler.step)
                undone.callback(scheduler.__dict__.pop, "step", None)
            yield

    def repeat(self, accelerator: Any) -> None:
        """The last step's acts once more. Before the first step, all optimizers and schedulers step."""
        if accelerator.scaler is not None:
            accelerator.scaler.scale(torch.zeros((), device=accelerator.device))  # a rank that never had inputs
        acts = list(self._acts.values())
        self._is_open = False
        try:
            for act in acts or [each.step for each in (*accelerator._optimizers, *accelerator._schedulers)]:
                act()
        finally:
            self._is_open = True

    def _close(self) -> None:
        self._is_open, self._acts = False, {}

    def _on_optimizer(self, prepared: Any, optimizer: Optimizer, args: object, kwargs: object) -> None:
        self.note(optimizer, prepared.step)

    def _step_scheduler(self, scheduler: Any, step: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        self.note(scheduler, partial(step, *args, **kwargs))
        step(*args, **kwargs)


@contextmanager
def join(
    accelerator: Any, joinables: list[Any], even_batches: bool | None, repeat: Callable[[], object]
) -> Iterator[None]:
    """As accelerate's ``join_uneven_inputs``, with something to repeat, and on CPUs as well.

    Args:
        accelerator: of several processes.
        joinables: sharded models and others.
        even_batches: None is the accelerator's own setting.
        repeat: what ranks that have run out do after the others' backwards.
    """
    with ExitStack() as undone:
        if even_batches is not None:
            for loader in accelerator._dataloaders:
                sampler = loader.batch_sampler
                if isinstance(loader, DataLoaderDispatcher) or not hasattr(sampler, "even_batches"):
                    warn_user("join_uneven_inputs(even_batches=..) changes nothing for a loader of iterable data")
                    continue
                undone.callback(setattr, sampler, "even_batches", sampler.even_batches)
                sampler.even_batches = even_batches
        joins = not (accelerator.even_batches if even_batches is None else even_batches)
        undone.enter_context(Join(joinables, enable=joins, throw_on_early_termination=False, repeat=repeat))
        yield
