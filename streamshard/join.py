"""Uneven inputs (torch.distributed.algorithms.Join): a rank that has run out shadows the others' steps with zeros.

A rank owns a shard whatever inputs it has, so it must go on gathering, reducing, clipping and stepping until the last
rank is done. What a pass is like (whether it trains, whether it is synchronised) the others say at its start, in one
small sum; what happens after backward is taken from the rank's own last step: clipping, and the optimizers that
stepped. Their settings, of which a schedule may have moved the learning rate, come with the announcement of a pass.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, JoinHook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from streamshard.engine.engine import Engine, UnevenSteps
from streamshard.engine.hooks import backward_of
from streamshard.errors import ConfigError, ShardingError
from streamshard.optim.wrapper import engine_of_both, outermost
from streamshard.plan.structure import params_of

__all__ = ["UnevenInputs", "make_hook"]

# What ranks add up at the start of a pass: for each a one if it has inputs, for each what it does not know, and flags.
_FLAGS = 3  # has_grad, is_synced, casts
_PUPIL = 0.5  # a rank that has run out before its first step: knows its optimizers, but not what else follows backward
_LOST = 0.25  # one that does not know its optimizers either


class _PassKind(NamedTuple):
    """The pass that ranks with inputs are about to make.

    Attributes:
        has_grad: whether it is a training pass.
        is_synced: False inside ``no_sync()``.
        casts: whether weights may have changed since the last pass.
    """

    has_grad: bool
    is_synced: bool
    casts: bool


class UnevenInputs(JoinHook):
    """The join hook of a sharded model; also records what a step consists of. One per ``with Join(...)``.

    Args:
        model: the root, made by `StreamShard`.
        engine: its engine.
        clip: clips its gradients, as its ``clip_grad_norm_`` does.
        optimizers: of a rank that may run out before it has made a step.
        repeat: what a rank that has run out does after each backward of the others, instead of what it did itself.
        divide_by_initial_world_size: gradients are means over all ranks, with zeros from those that ran out; else over
            the ranks that have inputs.
    """

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        clip: Callable[..., torch.Tensor],
        optimizers: Sequence[Optimizer] = (),
        repeat: Callable[[], object] | None = None,
        divide_by_initial_world_size: bool = True,
    ) -> None:
        self._model = model
        self._clip = clip
        self._engine = engine
        self._divides_by_all = divide_by_initial_world_size
        self._params = set(params_of(model).values())
        self._repeat = repeat
        self._given: list[tuple[str, Any]] = [("step", optimizer) for optimizer in optimizers]
        self._last: list[tuple[str, Any]] | None = None  # what followed the backward of the last step
        self._now: list[tuple[str, Any]] | None = None  # what has followed the latest one; None: no step is under way
        self._teaches = False  # this step is told to those that have run out, one thing after the other
        self._settings: list[_Settings] = []  # of this step's optimizers, told to those that have run out
        self._is_shadow = False
        ref: weakref.ref[UnevenSteps] = weakref.ref(self)
        engine.uneven = ref
        engine.ranks.is_uneven = repeat is None
        handle = register_optimizer_step_pre_hook(_weakly(self))
        # When Join lets go of its hooks, also because of an exception, of which it tells nobody.
        self._end = weakref.finalize(self, _leave, engine, ref, weakref.ref(model), handle)

    # -- on ranks that have inputs --------------------------------------------------------------------------------

    def before_pass(self) -> None:
        """A pass begins: one of this rank's own is announced to the others."""
        if self._is_shadow:
            return
        engine, has_grad = self._engine, torch.is_grad_enabled()
        if has_grad:
            self._close_step()
        Join.notify_join_context(self._model)  # type: ignore[arg-type]  # has all that a Joinable has
        self._meet(has_grad, engine.is_synced, engine.casts_next)
        if has_grad and engine.is_synced:
            self._now = []

    def _close_step(self) -> None:
        if self._now is None:
            return
        before, self._last, self._now = self._last, self._now, None
        if self._repeat is None and before is not None and before != self._last:
            raise ShardingError(
                "uneven inputs (Join): a rank that has run out repeats its last step, so the same has to follow every "
                f"backward; it was {_shown(before)}, then {_shown(self._last)}. Put no_sync() around micro-batches "
                "without optimizer.step(), or say what is to be done: Join([model], repeat=function)"
            )

    def before_clipping(self, max_norm: float, norm_type: float, skip_above: float | None) -> None:
        """``model.clip_grad_norm_`` was called."""
        if self._now is not None:
            self._now.append(("clip_grad_norm_", (max_norm, norm_type, skip_above)))
            if self._teaches:
                self._tell(self._now[-1])

    def on_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step.

        Raises:
            ShardingError: with other settings than ranks that have run out were told.
        """
        if self._params.isdisjoint(param for group in optimizer.param_groups for param in group["params"]):
            return
        if self._now is not None:
            place = _names(self._now).count("step")
            self._now.append(("step", optimizer))
            told = self._settings
            if self._repeat is None and place < len(told) and told[place] != _settings_of(optimizer):
                raise ShardingError(
                    "uneven inputs (Join): the optimizer's settings, such as its learning rate, were changed between "
                    "the forward and step(), and a rank that has run out is told the old ones: change them before "
                    "the forward"
                )
            if self._teaches:
                self._tell(("step", None))

    # -- on ranks that have none left -----------------------------------------------------------------------------

    def main_hook(self) -> None:
        """One iteration of the others."""
        engine, model = self._engine, self._model
        if self._now is not None:
            self._close_step()
            model.zero_grad()  # of this rank's own last step; it may be what the next one would have begun with
        self._is_shadow = True
        try:
            kind = self._meet(False, False, False)
            engine.match_next_pass(is_synced=kind.is_synced, casts=kind.casts)
            with torch.set_grad_enabled(kind.has_grad):
                engine.open_forward(frozenset(range(len(engine.units))))
                pass_ = engine.close_forward(None)
            if pass_ is None:
                return
            backward_of(engine, pass_)
            if kind.is_synced:
                self._follow_step()
                model.zero_grad()
        finally:
            self._is_shadow = False

    def post_hook(self, is_last_joiner: bool) -> None:
        """All ranks have run out: everything is as before the context."""
        self._engine.buffers.sync()  # from a rank that was among the last
        self._engine.match_next_pass(is_synced=True, casts=True)
        self._end()

    def _follow_step(self) -> None:
        settings = iter(self._settings)
        if self._repeat is not None:
            for name, what in self._last or self._given:
                if name == "step":
                    _take_settings(what, next(settings, ()))
            self._repeat()
            return
        for name, what in list(self._last or ()) if not self._teaches else self._hear():
            if name == "step":
                _take_settings(what, next(settings, ()))
                outermost(what).step()
            else:
                max_norm, norm_type, skip_above = what
                self._clip(max_norm, norm_type, skip_above=skip_above)

    def _hear(self) -> Iterator[tuple[str, Any]]:
        """What follows backward, as ranks with inputs tell it, until all optimizers have stepped."""
        optimizers = [what for name, what in self._last or self._given if name == "step"]
        heard: list[tuple[str, Any]] = []
        while _names(heard).count("step") < len(optimizers):
            name, what = self._tell(None)
            heard.append((name, optimizers[_names(heard).count("step")] if name == "step" else what))
            yield heard[-1]
        self._last = heard

    # -- both -----------------------------------------------------------------------------------------------------

    def _meet(self, has_grad: bool, is_synced: bool, casts: bool) -> _PassKind:
        engine, ranks = self._engine, self._engine.ranks
        places = range(ranks.total_size)
        flags = torch.zeros(2 * len(places) + _FLAGS, device=engine.streams.device)
        if self._is_shadow:
            knows = self._last or self._repeat is not None
            flags[len(places) + ranks.number] = 0.0 if knows else _PUPIL if self._given else _LOST
        else:
            flags[ranks.number] = 1.0
            flags[-_FLAGS:] = torch.tensor([has_grad, is_synced, casts], dtype=flags.dtype)
        ranks.all_reduce(flags, everyone=True)
        said = flags.tolist()
        active, lost = [r for r in places if said[r]], [r for r in places if said[len(places) + r] == _LOST]
        kind = _PassKind(*(flag > 0.0 for flag in said[-_FLAGS:]))
        self._teaches = _PUPIL in said[len(places) :] and kind.has_grad and kind.is_synced
        if lost and kind.has_grad:
            raise ShardingError(
                f"uneven inputs (Join): rank {lost[0]} has run out before its first optimizer step, so it does not "
                "know the optimizer of its shard: Join([model], optimizers=[optimizer])"
            )
        if kind.has_grad and kind.is_synced:
            self._settings = [_settings_of(what) for name, what in self._last or self._given if name == "step"]
            if len(active) < len(places):
                self._settings = ranks.gather_objects(self._settings)[active[0]]
        engine.reductions.grad_scale = 1.0 if self._divides_by_all else len(places) / len(active)
        engine.buffers.source = active[-1]  # a rank that has inputs now, the same one as under DDP
        return kind

    def _tell(self, what: tuple[str, Any] | None) -> tuple[str, Any]:
        """`what` is next; what the first rank with inputs says."""
        told: list[tuple[str, Any] | None] = self._engine.ranks.gather_objects(what)
        return next(each for each in told if each is not None)


_Settings = list[dict[str, Any]]  # by param group


def _settings_of(optimizer: Optimizer) -> _Settings:
    return copy.deepcopy([{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups])


def _take_settings(optimizer: Optimizer, settings: _Settings | tuple[()]) -> None:
    for group, theirs in zip(optimizer.param_groups, settings, strict=False):
        group.update(theirs)


def _names(step: Iterable[tuple[str, Any]]) -> list[str]:
    return [name for name, _ in step]


def _shown(step: Iterable[tuple[str, Any]]) -> str:
    """For messages: ``clip_grad_norm_(1.0, 2.0, None), AdamW.step()``."""
    parts = [f"{type(what).__name__}.step()" if name == "step" else f"{name}{what}" for name, what in step]
    return ", ".join(parts) or "nothing"


def _leave(engine: Engine, hook: object, model: weakref.ref[nn.Module], handle: RemovableHandle) -> None:
    """Everything is as it was before the context, unless the next one has begun."""
    handle.remove()
    if engine.uneven is not hook:
        return
    engine.uneven = None
    engine.ranks.is_uneven = False
    engine.reductions.grad_scale = 1.0
    engine.buffers.source = 0
    if (root := model()) is not None:
        root.__dict__.pop("_join_config", None)


def _weakly(uneven: UnevenInputs) -> Any:
    """A global hook that does not keep the model alive when the context was left by an exception."""
    ref = weakref.ref(uneven)

    def on_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if (alive := ref()) is not None:
            alive.on_step(optimizer)

    return on_step


def make_hook(
    model: nn.Module, engine: Engine, arguments: dict[str, Any], clip: Callable[..., torch.Tensor]
) -> UnevenInputs:
    """The join hook with the keyword arguments that Join hands to all hooks, of which others may be for other models.

    Raises:
        ConfigError: `optimizers` holds something else, or an optimizer of other parameters; `repeat` is no function.
    """
    optimizers, repeat = arguments.get("optimizers", ()), arguments.get("repeat")
    optimizers = [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)
    for optimizer in optimizers:
        engine_of_both(optimizer, model)
    if repeat is not None and not callable(repeat):
        raise ConfigError(f"repeat={repeat!r}: wanted a function without arguments, or None")
    return UnevenInputs(model, engine, clip, optimizers, repeat, arguments.get("divide_by_initial_world_size", True))
