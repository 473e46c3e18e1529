"""Uneven inputs (torch.distributed.algorithms.Join): a rank without inputs repeats the others' steps with zeros.

Every rank owns a shard, so it has to gather, reduce, clip and step until the last rank has no inputs. At the start of a
pass all ranks meet: the ranks with inputs announce the pass (whether it trains, whether it is synchronised). After a
backward the user's loop clips and steps; a rank without inputs calls ``repeat=``. As in every loop, the flags of a
later backward tell if some ranks have stepped and others not: on CPUs the next one. The end compares the last step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook

from streamshard.core.forward import begin_forward
from streamshard.core.graph_hooks import run_empty_backward
from streamshard.core.module_state import engine_of
from streamshard.core.reductions import OUT_OF_STEP
from streamshard.errors import ConfigError, RankMismatchError, ShardingError

_DOING = "begin a pass, or end Join"


class _Row(NamedTuple):
    """A rank's message when a pass is announced.

    Attributes:
        can_repeat: the rank has a function ``repeat=``.
        casts: the rank's weights may have changed since the last pass. Then all ranks cast their weights again.
        begins: the rank's own pass; None: the rank has no inputs.
    """

    can_repeat: bool
    casts: bool
    begins: JoinPass | None


class JoinPass(NamedTuple):
    """A pass: whether it makes gradients, and whether it is inside ``no_sync()``."""

    gradients: bool
    no_sync: bool


class UnevenInputs:
    """Inputs that may run out on some ranks: announces passes, and shadows other ranks' passes.

    Args:
        model: the root, made by `StreamShard`.
        repeat: a rank without inputs calls it after each synchronised backward of the others. None: evaluation only.
        divides_by_all: gradients are means over all ranks, with zeros of ranks without inputs. False: means over the
            ranks with inputs.

    Attributes:
        buffer_source: number of the rank that sends its buffers to all ranks.
    """

    def __init__(self, model: nn.Module, repeat: Callable[[], object] | None, divides_by_all: bool) -> None:
        self._model = model
        self._engine = engine_of(model)
        self.buffer_source = 0
        self._repeat = repeat
        self._divides_by_all = divides_by_all
        self._divisor = float(self._engine.ranks.world_size)  # of gradients, in the last pass
        self._is_complete = False  # the last training pass was synchronised: its gradients are complete
        self._shadows = False  # this rank is inside another rank's pass
        if (earlier := self._engine.inputs) is not None:
            earlier.leave()  # an exception has ended it, and something keeps its hook
        self._engine.inputs = self

    # -- called by the engine ----------------------------------------------------------------------------------------

    def before_pass(self) -> None:
        """Announce this rank's pass to the others.

        Raises:
            ConfigError, ShardingError: on all ranks; see `_announce`.
        """
        config: Any = self._model._join_config
        if not self._shadows and config.enable:
            Join.notify_join_context(self._model)  # type: ignore[arg-type]  # has all that a Joinable has
            self._announce(JoinPass(torch.is_grad_enabled(), not self._engine.is_synced))

    # -- on ranks without inputs --------------------------------------------------------------------------------------

    def shadow(self) -> None:
        """Join one pass of the other ranks, and the steps that follow it.

        Gradients of a complete step are cleared, as a rank with inputs does before its next pass.

        Raises:
            ConfigError, ShardingError: on all ranks; see `_announce`.
        """
        engine = self._engine
        if self._is_complete:
            self._model.zero_grad()  # of this rank's own last step too: its loop may not have cleared them
        try:
            announced = self._announce(None)
            engine.set_synced(not announced.no_sync)
            self._shadows = True
            with torch.set_grad_enabled(announced.gradients):
                forward = begin_forward(engine, frozenset(range(len(engine.units))), (), is_whole_model=True)
                graph = forward.finish(None)
            if graph is not None:
                run_empty_backward(engine, graph)
                if self._repeat is not None and not announced.no_sync:
                    self._repeat()
                    self._model.zero_grad()
        except BaseException:
            self.leave()  # the traceback may keep the hook alive
            raise
        finally:
            self._shadows = False
            engine.set_synced(True)

    def finish(self) -> None:
        """All ranks have run out.

        Raises:
            RankMismatchError: on all ranks: after the last backward some ranks have stepped, and others not.
        """
        try:
            steps = self._engine.ranks.gather_objects(_DOING, self._engine.progress.has_stepped)
            if len({*steps}) > 1:
                raise RankMismatchError(OUT_OF_STEP)
            self._engine.buffers.sync(self.buffer_source)  # one of the last ranks with inputs
        finally:
            self.leave()

    def leave(self) -> None:
        """End this context: passes are no longer announced, and gradients are means over all ranks again.

        A second call does nothing, nor does a call after another context has begun.
        """
        if self._engine.inputs is self:
            self._engine.inputs = None
            if self._engine.ranks.grad_divisor == self._divisor:  # else it is the user's factor
                self._engine.divisor.set(float(self._engine.ranks.world_size))
            self._engine.progress.has_stepped = True  # ranks without inputs may have taken no step
            self._model.__dict__.pop("_join_config", None)  # torch's Join sets it, and leaves it enabled

    # -- on all ranks -------------------------------------------------------------------------------------------------

    def _announce(self, own: JoinPass | None) -> JoinPass:
        """Agree with the other ranks on the next pass. Ranks with inputs decide.

        Raises:
            ConfigError: the pass trains, and a rank has no ``repeat=``; or two settings choose the divisor.
            ShardingError: this pass differs between ranks.
        """
        engine = self._engine
        row = _Row(self._repeat is not None, not engine.are_weights_current, own)
        rows: list[_Row] = engine.ranks.gather_objects(_DOING, row)
        passes = {rank: row.begins for rank, row in enumerate(rows) if row.begins is not None}
        announced = _agreed(rows, passes)
        if announced.gradients:
            self._is_complete = not announced.no_sync
        if any(row.casts for row in rows):
            engine.are_weights_current = False  # units in host memory look at versions
        if not self._divides_by_all:
            if engine.ranks.grad_divisor != self._divisor:
                what = "divide_by_initial_world_size=False and set_gradient_divide_factor both choose the divisor"
                raise ConfigError(f"uneven inputs (Join): {what} of gradients: leave one of the two out")
            before = self._divisor  # sums are divided in fp32; scaled gradients would be rounded to their dtype
            self._divisor = engine.ranks.world_size * len(passes) / len(rows)  # replicas average these means
            engine.divisor.scale_unreduced(self._divisor / before)  # divided by the new one with the others
            engine.divisor.set(self._divisor)
        self.buffer_source = max(passes)  # a rank with inputs, as under DDP
        return announced


def _agreed(rows: list[_Row], passes: dict[int, JoinPass]) -> JoinPass:
    """The pass that all ranks with inputs begin. Raises on all ranks if they begin different ones."""
    first, announced = next(iter(passes.items()))
    for rank, begins in passes.items():
        if begins != announced:
            what = f"rank {first} begins {announced}, rank {rank} {begins}"
            raise ShardingError(f"uneven inputs (Join): {what}: ranks with inputs have to begin the same passes")
    for rank, row in enumerate(rows):
        if announced.gradients and not row.can_repeat:
            what = f"a training pass, and rank {rank} has no repeat=, such as Join([model], repeat=optimizer.step)"
            raise ConfigError(f"uneven inputs (Join): {what}. Evaluate under torch.no_grad()")
    return announced


class UnevenHook(JoinHook):
    """The hook that ``Join`` calls. Inputs may be uneven as long as it lives. Arguments: see `UnevenInputs`."""

    def __init__(self, model: nn.Module, repeat: Callable[[], object] | None, divides_by_all: bool) -> None:
        self._inputs = UnevenInputs(model, repeat, divides_by_all)
        weakref.finalize(self, self._inputs.leave)  # an exception ends Join without a call: it drops its hooks

    def main_hook(self) -> None:
        """Shadow one pass of the other ranks, while this rank has no inputs."""
        self._inputs.shadow()

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have run out."""
        self._inputs.finish()
