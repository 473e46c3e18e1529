"""``torch.autograd.grad`` and ``backward(inputs=...)`` with respect to sharded parameters.

[Note: gradients that are asked for]
Layers compute with compute views, so a graph leads to those and never to the user's parameters: autograd would find
them unused. Every backward that Python starts goes through one function of torch's, where sharded parameters among its
``inputs`` are joined by their compute views. docs/internals/decisions/0013 says why there.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from streamshard.compiling import skip, untraced
from streamshard.engine.engine import Engine, in_backward
from streamshard.engine.reach import backward_of, passes_of
from streamshard.errors import ShardingError
from streamshard.unit.unit import StreamedUnit, take_grad
from streamshard.unit.unreduced_grad import UnreducedGrad

__all__ = ["answer_for", "sharded_name"]

_STARTS_BACKWARD = "_engine_run_backward"  # in torch.autograd; grad() and backward() look it up at each call


class _Asked(NamedTuple):
    """A sharded parameter of which a gradient is wanted.

    Attributes:
        param: the user's.
        engine: that it is trained by.
        unit, param_index: whose, and which of the unit's it is.
    """

    param: nn.Parameter
    engine: Engine
    unit: StreamedUnit
    param_index: int

    @property
    def view(self) -> nn.Parameter:
        """What its layer computes with."""
        return self.unit.views[self.param_index]

    @property
    def name(self) -> str:
        """Fully qualified, for messages."""
        return self.unit.params[self.param_index].name


_engines: MutableMapping[int, Engine] = weakref.WeakValueDictionary()  # in the order in which they were made
_numbers = itertools.count()
_known: MutableMapping[torch.Tensor, Callable[[], _Asked | None]] = WeakIdKeyDictionary()


def answer_for(engine: Engine) -> None:
    """Gradients with respect to the parameters of `engine` can be asked for from now on."""
    engine_of = weakref.ref(engine)
    _engines[next(_numbers)] = engine
    for index, unit in enumerate(engine.units):
        for param_index, shard in enumerate(unit.params):
            _known[shard.param] = functools.partial(_find, weakref.ref(shard.param), engine_of, index, param_index)
    start = getattr(torch.autograd, _STARTS_BACKWARD)
    if not isinstance(start, _RunBackward):
        setattr(torch.autograd, _STARTS_BACKWARD, _RunBackward(start))


def sharded_name(value: object) -> str | None:
    """The fully qualified name of a parameter in the model that shards it; None if none does."""
    found = _asked(value)
    return None if found is None else found.name


def _find(
    param_of: Callable[[], nn.Parameter | None], engine_of: Callable[[], Engine | None], index: int, param_index: int
) -> _Asked | None:
    param, engine = param_of(), engine_of()
    return None if param is None or engine is None else _Asked(param, engine, engine.units[index], param_index)


class _RunBackward:
    """torch's function, for inputs among which there may be sharded parameters; arguments as it has them."""

    def __init__(self, start: Callable[..., Any]) -> None:
        self._start = start
        self._running: set[int] = set()  # threads that are in it
        functools.update_wrapper(self, start)

    @skip
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Hooks that backward calls are not compiled either, where the caller is."""
        return untraced(functools.partial(self._begin, *args, **kwargs))

    def _begin(
        self,
        tensors: Any,
        grad_tensors: Any,
        keep_graph: bool,
        create_graph: bool,
        inputs: Sequence[Any] = (),
        allow_unreachable: bool = False,
        accumulate_grad: bool = False,
    ) -> Any:
        def start(inputs: Sequence[Any], *, allow_unreachable: bool) -> Any:
            run = self._start if in_backward() else self._run
            begun = [(engine, engine.backwards) for engine in {each.engine for each in asked.values()}]
            with torch._C._EnableTorchFunction():  # asked of parameters it is off, and hooks would see bare pieces
                found = run(tensors, grad_tensors, keep_graph, create_graph, inputs, allow_unreachable, accumulate_grad)
            for engine, count in begun:
                if engine.backwards == count and not engine.is_alone and not in_backward():
                    _join_in(engine, tensors)
            return found

        asked = {position: each for position, value in enumerate(inputs) if (each := _asked(value)) is not None}
        for engine in {each.engine for each in asked.values()}:
            engine.settle()
        for unit in {each.unit for each in asked.values()}:
            unit.take_trainability()  # views that do not need gradients are no inputs
        if not asked or accumulate_grad:
            views = [each.view for each in asked.values() if each.view.requires_grad]
            return start((*inputs, *views), allow_unreachable=allow_unreachable)
        _check(asked.values(), grad_tensors)
        return _grad(start, inputs, asked, allow_unused=allow_unreachable)

    def _run(self, *args: Any) -> Any:
        """A backward that is inside no other. Engines hear if it fails, for autograd tells nobody."""
        self._running.add(threading.get_ident())
        try:
            return self._start(*args)
        except BaseException as error:
            if len(self._running) == 1:  # else it may be another thread's that is under way
                for engine in list(_engines.values()):
                    engine.fail_backward(error)
            raise
        finally:
            self._running.discard(threading.get_ident())


def _join_in(engine: Engine, tensors: Sequence[torch.Tensor]) -> None:
    """Nothing that was asked for has a part in this rank's graph; in those of other ranks it may."""
    for pass_ in passes_of(tensors, engine):
        backward_of(engine, pass_)


def _asked(value: object) -> _Asked | None:
    find = _known.get(value) if isinstance(value, torch.Tensor) else None
    return None if find is None else find()


def _grad(
    start: Callable[..., Any], inputs: Sequence[Any], asked: Mapping[int, _Asked], *, allow_unused: bool
) -> tuple[torch.Tensor | None, ...]:
    """``torch.autograd.grad``: gradients are reduced as in any backward, and returned instead of left in ``.grad``."""
    kept = [(each, each.param.grad) for each in asked.values()]
    trained = [each for each in asked.values() if each.view.requires_grad]
    views, hooks = [each.view for each in trained], [_take_of(each) for each in trained]
    engines = {each.engine for each in asked.values()}
    for each in asked.values():
        each.param.grad = None
    try:
        for engine in engines:
            engine.delivers = False
        found = start((*inputs, *views), allow_unreachable=True)
        results: list[torch.Tensor | None] = list(found[: len(inputs)])
        for position, each in asked.items():
            results[position] = _sum(each.param.grad, results[position])
    finally:
        for engine in engines:
            engine.delivers = True
        for hook in hooks:
            hook.remove()
        for each, grad in kept:
            each.param.grad = grad
    if not allow_unused and any(result is None for result in results):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if "
            "this is the desired behavior."
        )
    return tuple(results)


def _check(asked: Iterable[_Asked], grad_tensors: Sequence[torch.Tensor | None]) -> None:
    is_batched = any(torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grad_tensors if grad is not None)
    for each in asked:
        of = f"torch.autograd.grad with respect to the sharded parameter {each.name!r}"
        if each.engine.is_computing:
            raise ShardingError(
                f"{of} inside a forward or a backward: its gradient is reduced at the end of a backward"
            )
        if isinstance(each.param.grad, UnreducedGrad) or each.engine.leaves_unreduced_next:
            raise ShardingError(f"{of} while gradients accumulate inside no_sync(): they are not reduced until its end")
        if is_batched:
            raise ShardingError(f"{of} with is_grads_batched=True: gradients are reduced one backward at a time")


def _take_of(asked: _Asked) -> Any:
    """Take the gradient of a view that autograd would return, which then has one element in its stead."""

    def take(grad: torch.Tensor) -> torch.Tensor:
        take_grad(asked.unit, asked.param_index, grad)
        return grad.new_zeros(()).expand(grad.shape)

    with torch._C.DisableTorchFunctionSubclass():  # it may be absent
        return asked.view.register_hook(take)


def _sum(reduced: torch.Tensor | None, direct: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient that came from all ranks, and what this rank has by itself, from a penalty on its pieces perhaps."""
    if reduced is None or direct is None:
        return direct if reduced is None else reduced
    return reduced.add_(direct)
