"""Uneven inputs (torch.distributed.algorithms.Join): a rank that has run out shadows the others' steps with zeros.

A rank owns a shard whatever inputs it has, so it must go on gathering, reducing, clipping and stepping until the last
rank is done. What a pass is like (whether it trains, whether it is synchronised) the others say at its start, in one
small sum. What follows a backward is the user's code, and so is what a rank that has run out does then: ``repeat=``.
Whether that was the same, ranks compare when the next training pass is announced, and at the end.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from streamshard.comm.flight_recorder import Kind
from streamshard.engine.backward import run_empty_backward
from streamshard.engine.engine import Engine, Inputs
from streamshard.engine.forward import begin_forward
from streamshard.errors import ConfigError, ShardingError
from streamshard.plan.structure import params_of

__all__ = ["UnevenHook", "UnevenInputs"]


# What each rank adds to a sum that may meet one of `Join`'s own: as large as those, or gloo would end the process.
_MARK = 1009.0


class _Role(enum.IntEnum):
    """Of a rank in a pass."""

    HAS_INPUTS = 0
    HAS_RUN_OUT = 1


class _Row(NamedTuple):
    """What a rank says when a pass is announced; of the pass, only if it is its own. Integers on their way.

    Attributes:
        role: whether it has inputs.
        can_repeat: whether it was given ``repeat=``.
        has_grad: its pass is a training pass.
        is_synced: it is not inside ``no_sync()``.
        casts: its weights may have changed since the last pass.
    """

    role: _Role
    can_repeat: bool
    has_grad: bool = False
    is_synced: bool = False
    casts: bool = False


class _Act(NamedTuple):
    """What a rank did after a backward that the others have to do too: ``AdamW.step`` with ``{"lr": 0.1, ...}``."""

    name: str
    settings: dict[str, Any]


class UnevenInputs(Inputs):
    """Inputs while ranks may run out of them: announces passes, shadows those of others, compares what ranks do.

    Args:
        model: the root, made by `StreamShard`.
        engine: its engine.
        repeat: what a rank that has run out does after each synchronised backward of the others. None: evaluation only.
        divides_by_all: gradients are means over all ranks, with zeros from those that ran out; else over the ranks
            that have inputs.
    """

    def __init__(
        self, model: nn.Module, engine: Engine, repeat: Callable[[], object] | None, divides_by_all: bool
    ) -> None:
        self._model = model
        self._engine = engine
        self._repeat = repeat
        self._divides_by_all = divides_by_all
        self._params = set(params_of(model).values())
        self._roles: list[_Role] = []  # by rank, in the last training pass; empty: there was none
        self._acts: list[_Act] = []  # of this rank, since that was announced
        self._is_complete = False  # it was synchronised: its gradients are not added to by another
        self._has_run_out = False
        self._shadows = False  # a pass of others is under way, which this rank has announced already
        self._handle = register_optimizer_step_pre_hook(self._on_step)

    # -- what the engine and others tell ------------------------------------------------------------------------------

    def before_pass(self) -> None:
        """See `Inputs`. A pass of this rank's own is announced to the others.

        Raises:
            ConfigError, ShardingError: on all ranks; see `_announce`.
        """
        config: Any = self._model._join_config
        if self._shadows or not config.enable:
            return
        engine = self._engine
        Join.notify_join_context(self._model)  # type: ignore[arg-type]  # has all that a Joinable has
        self._announce(
            _Row(
                _Role.HAS_INPUTS,
                self._repeat is not None,
                has_grad=torch.is_grad_enabled(),
                is_synced=engine.casts.is_synced,
                casts=engine.casts.are_due,
            )
        )

    def on_clipping(self, max_norm: object, norm_type: float, skip_above: float | None) -> None:
        """See `Inputs`."""
        self._note("clip_grad_norm_", {"max_norm": max_norm, "norm_type": norm_type, "skip_above": skip_above})

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """A global hook: an optimizer is about to step."""
        groups = optimizer.param_groups
        if not self._roles or self._params.isdisjoint(param for group in groups for param in group["params"]):
            return
        settings = {
            key if len(groups) == 1 else f"param_groups[{index}].{key}": value
            for index, group in enumerate(groups)
            for key, value in group.items()
            if key not in ("params", "param_names")
        }
        self._note(f"{type(optimizer).__name__}.step", settings)

    def _note(self, name: str, settings: dict[str, Any]) -> None:
        if self._roles:  # nobody looks at what came before the first training pass
            copies = {k: v.detach().clone() if isinstance(v, torch.Tensor) else v for k, v in settings.items()}
            self._acts.append(_Act(name, copies))

    # -- on ranks that have run out -----------------------------------------------------------------------------------

    def shadow(self) -> None:
        """One pass of the others, and what follows it.

        Raises:
            ConfigError, ShardingError: on all ranks; see `_announce`.
        """
        engine = self._engine
        self._has_run_out = True
        self._clear()
        announced = self._announce(_Row(_Role.HAS_RUN_OUT, self._repeat is not None))
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
        self._meet()
        if _Role.HAS_RUN_OUT in self._roles:
            self._compare()
        self._engine.buffers.sync(self.buffer_source)  # a rank that was among the last
        if self._has_run_out:
            self._clear()

    def _clear(self) -> None:
        """Gradients of the last step, this rank's own perhaps, which it would have cleared at the start of the next."""
        if self._is_complete:
            self._model.zero_grad()

    def leave(self) -> None:
        """Everything is as it was before the context, unless the next one has begun. A second call does nothing."""
        self._handle.remove()
        if self._engine.inputs is self:
            self._engine.set_inputs(Inputs())
            self._model.__dict__.pop("_join_config", None)

    # -- on all ranks -------------------------------------------------------------------------------------------------

    def _meet(self) -> None:
        """All ranks have ended a step. If not, what some have issued was taken for `Join`'s own sums by others.

        Raises:
            CommunicationError: on all ranks.
        """
        ranks = self._engine.ranks
        ranks.log.add(Kind.END_OF_STEP)
        if _Role.HAS_RUN_OUT in self._roles:
            with ranks.guard("the end of a step with uneven inputs (Join)"):
                marks = torch.full((1,), _MARK, device=self._engine.streams.device)
                ranks.all_reduce(marks, with_replicas=True)
                if marks.item() != _MARK * ranks.total_size:
                    raise RuntimeError("some ranks take norms of gradients, or part in other sums, that others do not")

    def _announce(self, own: _Row) -> _Row:
        """What the pass that begins is like, from ranks that have inputs.

        Raises:
            ConfigError: a training pass, and a rank was given no ``repeat=``.
            ShardingError: the last step, or this pass, is not the same on all ranks.
        """
        self._meet()
        engine, ranks = self._engine, self._engine.ranks
        table = torch.zeros(ranks.total_size, len(own), dtype=torch.int32, device=engine.streams.device)
        table[ranks.number] = torch.tensor(own, dtype=torch.int32)
        ranks.all_reduce(table, with_replicas=True)
        rows = [_Row(_Role(role), *map(bool, said)) for role, *said in table.tolist()]
        roles = [row.role for row in rows]
        active = [rank for rank, role in enumerate(roles) if role is _Role.HAS_INPUTS]
        announced = rows[active[0]]
        _check(rows, active)
        if announced.has_grad:
            if self._roles and _Role.HAS_RUN_OUT in roles:
                self._compare()
            self._acts.clear()
            self._roles = roles
            self._is_complete = announced.is_synced
        self.grad_scale = 1.0 if self._divides_by_all else len(rows) / len(active)
        self.buffer_source = active[-1]  # a rank that has inputs now, the same one as under DDP
        return announced._replace(casts=any(row.casts for row in rows))

    def _compare(self) -> None:
        """What ranks did since the last training pass was announced is the same on all.

        Raises:
            ShardingError: on all ranks: it is not.
        """
        gathered: list[list[_Act]] = self._engine.ranks.gather_objects([_legible(act) for act in self._acts])
        first = self._roles.index(_Role.HAS_INPUTS)
        for rank, acts in enumerate(gathered):
            if acts != gathered[first]:
                who = "has run out, and repeat=" if self._roles[rank] is _Role.HAS_RUN_OUT else "itself"
                raise ShardingError(
                    f"uneven inputs (Join): after a backward rank {rank} {who} did {_story(acts, gathered[first])}; "
                    f"rank {first} did {_story(gathered[first], acts)}. {_ADVICE}"
                )


_ADVICE = (
    "Join([model], repeat=function) takes all that the loop does after a backward: clipping, norms, optimizer.step(), "
    "scheduler.step(). Micro-batches without a step belong into no_sync()"
)


def _check(rows: Sequence[_Row], active: Sequence[int]) -> None:
    announced = rows[active[0]]
    for rank in active:
        if _describe(rows[rank]) != _describe(announced):
            raise ShardingError(
                f"uneven inputs (Join): rank {active[0]} begins {_describe(announced)}, rank {rank} "
                f"{_describe(rows[rank])}: ranks that have inputs have to make the same passes"
            )
    for rank, row in enumerate(rows):
        if announced.has_grad and not row.can_repeat:
            raise ConfigError(
                f"uneven inputs (Join): a training pass, and rank {rank} does not know what to do after those of "
                "others once it has run out: Join([model], repeat=optimizer.step), or a function of all that ends a "
                "step, such as lambda: (model.clip_grad_norm_(1.0), optimizer.step()). Evaluation needs none, under "
                "torch.no_grad()"
            )


def _describe(row: _Row) -> str:
    kind = "a training pass" if row.has_grad else "an evaluation"
    return kind if row.is_synced else f"{kind} inside no_sync()"


def _legible(act: _Act) -> _Act:
    """`act` with settings that can be sent, compared and shown."""
    return _Act(act.name, {key: _text(value) for key, value in act.settings.items()})


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return _text(value.tolist())
    if isinstance(value, list | tuple):
        return f"({', '.join(_text(item) for item in value)})"
    if isinstance(value, bool | str) or value is None:
        return repr(value)
    return repr(float(value)) if isinstance(value, int | float) else type(value).__name__


def _story(acts: Sequence[_Act], others: Iterable[_Act]) -> str:
    """For messages: ``clip_grad_norm_(), AdamW.step(lr=0.1)``, with those settings in which `others` differ."""
    theirs = dict(enumerate(others))
    parts = []
    for index, (name, settings) in enumerate(acts):
        other = theirs.get(index, _Act("", {}))
        differing = [f"{k}={v}" for k, v in settings.items() if other.name == name and other.settings.get(k) != v]
        parts.append(f"{name}({', '.join(differing)})")
    return ", ".join(parts) or "nothing"


class UnevenHook(JoinHook):
    """What ``Join`` calls. Ranks' inputs may be uneven from here on, and as long as this lives.

    Args:
        inputs: put into the engine.
        engine: of the model.
    """

    def __init__(self, inputs: UnevenInputs, engine: Engine) -> None:
        self._inputs = inputs
        engine.set_inputs(inputs)
        # Join lets go of its hooks when it is left, also because of an exception, of which it tells nobody.
        weakref.finalize(self, inputs.leave)

    def main_hook(self) -> None:
        """One pass of the others, while this rank has run out."""
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
