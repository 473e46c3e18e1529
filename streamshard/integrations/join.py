"""Uneven inputs (torch.distributed.algorithms.Join): a rank without inputs repeats the others' steps with zeros.

Every rank owns a shard, so it has to gather, reduce, clip and step until the last rank has no inputs. At the start of a
pass all ranks meet: the ranks with inputs announce the pass (whether it trains, whether it is synchronised). After a
backward the user's code clips and steps; a rank without inputs calls ``repeat=`` instead. At the next training pass,
and at the end, ranks compare the clipping and steps that they did.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from streamshard.comm.issue_log import RecordKind
from streamshard.engine.backward import run_empty_backward
from streamshard.engine.engine import Engine, Inputs
from streamshard.engine.forward import begin_forward
from streamshard.errors import ConfigError, ShardingError
from streamshard.planning.structure import params_of


class _Row(NamedTuple):
    """A rank's message when a pass is announced. A rank with inputs describes its own pass.

    Attributes:
        acts: its steps and clipping since the last training pass was announced, e.g. ``AdamW.step(lr=0.1, ...)``.
        issued: a hash of the collectives that it has issued.
        has_inputs: it still has inputs.
        can_repeat: it was given ``repeat=``.
        has_grad: its pass is a training pass.
        is_synced: it is not inside ``no_sync()``.
        casts: its weights may have changed since the last pass, so they are cast again.
    """

    acts: list[str]
    issued: int
    has_inputs: bool
    can_repeat: bool
    has_grad: bool = False
    is_synced: bool = False
    casts: bool = False


class UnevenInputs(Inputs):
    """Inputs that may run out on some ranks: announces passes, shadows other ranks' passes, compares ranks' steps.

    Args:
        model: the root, made by `StreamShard`.
        engine: its engine.
        repeat: a rank without inputs calls it after each synchronised backward of the others. None: evaluation only.
        divides_by_all: gradients are means over all ranks, with zeros from ranks without inputs. False: over the ranks
            with inputs.
    """

    def __init__(
        self, model: nn.Module, engine: Engine, repeat: Callable[[], object] | None, divides_by_all: bool
    ) -> None:
        self._model = model
        self._engine = engine
        self._repeat = repeat
        self._divides_by_all = divides_by_all
        self._params = set(params_of(model).values())
        self._acts: list[str] | None = None  # see `_Row`; None: there was no training pass
        self._is_complete = False  # the last training pass was synchronised: no other one adds to its gradients
        self._has_run_out = False
        self._shadows = False  # a pass of others is under way, which this rank has announced already
        self._handle = register_optimizer_step_pre_hook(self._on_step)

    # -- what the engine and others tell ------------------------------------------------------------------------------

    def before_pass(self) -> None:
        """Announce a pass of this rank's own to the others.

        Raises:
            ConfigError, ShardingError: on all ranks; see `_announce`.
        """
        config: Any = self._model._join_config
        if self._shadows or not config.enable:
            return
        casts = self._engine.casts
        Join.notify_join_context(self._model)  # type: ignore[arg-type]  # has all that a Joinable has
        own = self._row(True)
        self._announce(own._replace(has_grad=torch.is_grad_enabled(), is_synced=casts.is_synced, casts=casts.are_due))

    def on_clipping(self, max_norm: object, norm_type: float) -> None:
        """See `Inputs`."""
        self._note("clip_grad_norm_", {"max_norm": max_norm, "norm_type": norm_type})

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """A global hook: an optimizer is about to step."""
        if not self._params.isdisjoint(param for group in optimizer.param_groups for param in group["params"]):
            for group in optimizer.param_groups:
                settings = {key: value for key, value in group.items() if key not in ("params", "param_names")}
                self._note(f"{type(optimizer).__name__}.step", settings)

    def _note(self, name: str, settings: dict[str, Any]) -> None:
        if self._acts is not None:  # the ranks do not compare what came before the first training pass
            self._acts.append(f"{name}({', '.join(f'{key}={_text(value)}' for key, value in settings.items())})")

    # -- on ranks that have run out -----------------------------------------------------------------------------------

    def shadow(self) -> None:
        """Join one pass of the other ranks, and the steps that follow it.

        Raises:
            ConfigError, ShardingError: on all ranks; see `_announce`.
        """
        engine = self._engine
        self._has_run_out = True
        self._clear()
        announced = self._announce(self._row(False))
        engine.casts.match(is_synced=announced.is_synced, are_due=announced.casts)
        self._shadows = True
        try:
            with torch.set_grad_enabled(announced.has_grad):
                forward = begin_forward(engine, frozenset(range(len(engine.units))), is_whole_model=True)
                graph = forward.finish(None)
            if graph is not None:
                run_empty_backward(engine, graph)
                if announced.is_synced:
                    assert self._repeat is not None
                    self._repeat()
        finally:
            self._shadows = False
            engine.casts.set_synced(True)

    def finish(self) -> None:
        """All ranks have run out.

        Raises:
            ShardingError: on all ranks: what ranks did after the last backward differs.
        """
        _compare(self._engine.ranks.gather_objects(self._row(False)))
        self._engine.buffers.sync(self.buffer_source)  # a rank that was among the last
        if self._has_run_out:
            self._clear()

    def _clear(self) -> None:
        """Clear the gradients of the last step, as a rank with inputs does before its next pass."""
        if self._is_complete:
            self._model.zero_grad()

    def leave(self) -> None:
        """Restore the state before the context, unless another context has begun. A second call does nothing."""
        self._handle.remove()
        if self._engine.inputs is self:
            self._engine.set_inputs(Inputs())
            self._model.__dict__.pop("_join_config", None)

    # -- on all ranks -------------------------------------------------------------------------------------------------

    def _row(self, has_inputs: bool) -> _Row:
        return _Row(self._acts or [], self._engine.ranks.recorder.log.digest, has_inputs, self._repeat is not None)

    def _announce(self, own: _Row) -> _Row:
        """Exchange what the next pass is like. Ranks with inputs decide.

        Raises:
            ConfigError: the pass is a training pass, and a rank has no ``repeat=``.
            ShardingError: the last step, or this pass, differs between ranks.
        """
        self._engine.ranks.recorder.log.add(RecordKind.END_OF_STEP)
        rows: list[_Row] = self._engine.ranks.gather_objects(own)
        active = [rank for rank, row in enumerate(rows) if row.has_inputs]
        announced = rows[active[0]]
        _check(rows, active)
        if announced.has_grad:
            _compare(rows)
            self._acts = []
            self._is_complete = announced.is_synced
        self.grad_scale = 1.0 if self._divides_by_all else len(rows) / len(active)
        self.buffer_source = active[-1]  # a rank that has inputs now, the same one as under DDP
        return announced._replace(casts=any(row.casts for row in rows))


def _compare(rows: list[_Row]) -> None:
    """Raise on all ranks unless all took the same steps since the last training pass."""
    for rank, row in enumerate(rows):
        did, first = (", ".join(each.acts) or "nothing" for each in (row, rows[0]))
        if did != first or row.issued != rows[0].issued:
            raise ShardingError(
                f"uneven inputs (Join): after a backward rank {rank} did {did}; rank 0 did {first}"
                f"{', but one of them took a norm or another sum alone' if did == first else ''}. Join([model], "
                "repeat=function) takes all that the loop does after a backward: clipping, norms, optimizer.step(), "
                "scheduler.step(). Micro-batches without a step belong inside no_sync()"
            )


def _check(rows: list[_Row], active: list[int]) -> None:
    announced = rows[active[0]]
    for rank in active:
        if (rows[rank].has_grad, rows[rank].is_synced) != (announced.has_grad, announced.is_synced):
            raise ShardingError(
                f"uneven inputs (Join): rank {active[0]} begins a pass with gradients={announced.has_grad}, "
                f"no_sync={not announced.is_synced}, rank {rank} one with gradients={rows[rank].has_grad}, "
                f"no_sync={not rows[rank].is_synced}: ranks that have inputs have to make the same passes"
            )
    for rank, row in enumerate(rows):
        if announced.has_grad and not row.can_repeat:
            raise ConfigError(
                f"uneven inputs (Join): a training pass, and rank {rank} has no repeat=, which says what to do after "
                "the others' backwards: Join([model], repeat=optimizer.step), or a function of all that ends a step, "
                "such as lambda: (model.clip_grad_norm_(1.0), optimizer.step()). Evaluation needs none, under "
                "torch.no_grad()"
            )


def _text(value: Any) -> str:
    """`value`, the same on all ranks; numbers as floats."""
    value = value.tolist() if isinstance(value, torch.Tensor) else value
    value = float(value) if type(value) is int else value
    return str(value) if isinstance(value, bool | float | str | list | tuple | None) else type(value).__name__


class UnevenHook(JoinHook):
    """The hook that ``Join`` calls. Uneven inputs are allowed while this object lives.

    Args:
        inputs: put into the engine.
        engine: of the model.
    """

    def __init__(self, inputs: UnevenInputs, engine: Engine) -> None:
        self._inputs = inputs
        engine.set_inputs(inputs)
        weakref.finalize(self, inputs.leave)  # Join says nothing when an exception ends it, and drops its hooks

    def main_hook(self) -> None:
        """Shadow one pass of the other ranks, while this rank has no inputs."""
        try:
            self._inputs.shadow()
        except BaseException:
            self._inputs.leave()  # the traceback may keep this alive
            raise

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have run out."""
        try:
            self._inputs.finish()
        finally:
            self._inputs.leave()
