"""Unsharded parameters, `UnshardedParameter` in the code: the weights that layers compute with, and writes to them.

A forward that writes to a weight raises: the slot is all-gathered anew, so the change would be lost. `Writes` compares
version counters. Writes through ``.data`` leave no trace in the counters. So the first read of ``.data`` copies the
weight, and the values are compared when the use of the unit ends. (transformers' Gemma 3n clamps ``.data`` in every
forward, and hardly ever changes a value.)

[Note: absent weights]
A streamed unit has its weights in a slot only while one of its layers runs. At other times its unsharded parameters
have another class, `AbsentWeight`, which answers questions about shape, dtype and device. Any other operation needs the
values: it raises and names the weight if the unit is streamed, and all-gathers the unit if it is resident. An unsharded
parameter stays the same object, in graphs and in Python, so code that keeps one never reads another layer's weight.
Saved tensors have no such class. So the version counters of absent weights, and of their views, have other numbers, one
inside a forward and one outside: if a backward reads weights that are not in place, or views that were computed with
while they were not, autograd raises its error of in-place changes. The numbers say which unit it was.
Changing the class is one assignment per parameter and use, 30 ns. torch offers nothing else: a tensor whose storage was
exchanged reads whatever lies there, and no storage raises when it is read.
"""

from __future__ import annotations

import atexit
import re
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from streamshard.errors import ShardingError, log, uncaught
from streamshard.nested import tensors_in
from streamshard.torch_private import AsTensors, get_data, set_data, set_versions, skip, untraced
from streamshard.unit.global_ops import answers_without_values, name_of


class UnshardedParameter(nn.Parameter):
    """An unsharded parameter: a weight in its slot. See `Writes`."""

    @property
    @skip
    def data(self) -> torch.Tensor:
        """As in torch. Copies the weight first, so that `Writes` notices a change."""
        if (known := _known.get(self)) is not None and (writes := known.writes_of()) is not None:
            untraced(writes.remember, known.place)
        data: torch.Tensor = get_data(self)
        return data

    @data.setter
    @skip
    def data(self, data: torch.Tensor) -> None:
        if (known := _known.get(self)) is not None and data.data_ptr() != self.data_ptr():
            _refuse(known.name, "was given other memory (param.data = ...)")
        set_data(self, data)

    @skip
    def set_(self, *source: Any) -> torch.Tensor:
        """As in torch. Setting a weight to itself is allowed: torch's parametrizations and PEFT's adapters do so."""
        if len(source) == 1 and isinstance(source[0], torch.Tensor) and source[0].data_ptr() == self.data_ptr():
            return self
        return super().set_(*source)


class AbsentWeight(nn.Parameter):
    """An unsharded parameter whose unit is not in place. See [Note: absent weights]."""

    @classmethod
    @skip  # torch.compile breaks its graph here: it cannot trace an all-gather
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer questions about shape, dtype and device. Put the unit in place, or raise, before anything else."""
        kwargs, called, name = kwargs or {}, getattr(func, "__name__", ""), name_of(func)
        if name in ("requires_grad", "requires_grad_") or (name == "grad" and called == "__get__"):
            param: Any = _known[args[0]].param_of()  # an absent view may be out of date: the sharded one counts
            if called == "__get__":
                return getattr(param, name)
            return setattr(param, name, args[1]) if called == "__set__" else param.requires_grad_(*args[1:], **kwargs)
        if answers_without_values(func) and name != "untyped_storage":
            with AsTensors():
                return func(*args, **kwargs)
        for value in tensors_in((args, kwargs)):
            if isinstance(value, AbsentWeight):
                untraced(_known[value].ask)
        if called == "__get__":
            return getattr(args[0], name)
        return setattr(args[0], name, args[1]) if called == "__set__" else func(*args, **kwargs)


class Writes:
    """Notices writes of forwards to the unsharded parameters of one unit, and lets absent ones raise in a backward.

    Args:
        name: of the unit.
    """

    def __init__(self, name: str) -> None:
        self._absent_version = _ABSENT + 2 * len(_unit_names)
        _unit_names.append(name)
        self._names: list[str] = []
        self._views: list[UnshardedParameter] = []
        self._aliases: list[torch.Tensor] = []  # with the views' version counters: a view may be absent
        self._versions: list[int] = []  # while the weights are in place
        self._absent: list[int] = []  # while they are not
        self._before: dict[int, torch.Tensor] = {}  # by index, copies of weights whose .data was read

    def watch(self, view: UnshardedParameter, alias: torch.Tensor, param: nn.Parameter, name: str) -> None:
        """Watch `view`, the unsharded parameter of `param`, called `name`; `alias` has its version counter."""
        _known[view] = _Known(name, weakref.ref(param), None, weakref.ref(self), len(self._names))
        self._names.append(name)
        self._views.append(view)
        self._aliases.append(alias)
        self._versions.append(alias._version)
        self._absent.append(self._absent_version)

    def forget(self) -> None:
        """The weights are in place, and layers are about to compute: forget earlier writes."""
        set_versions(self._aliases, self._versions)
        self._before.clear()

    def remember(self, index: int) -> None:
        """Copy the weight at `index`, because the forward may be about to write it through ``.data``."""
        if index not in self._before:
            self._before[index] = self._bytes(index).clone()

    def expire(self, *, in_forward: bool | None = None) -> None:
        """The weights may leave their slot: a backward that reads them raises. See [Note: absent weights].

        Args:
            in_forward: whether a forward is under way, from now on; None: as before.
        """
        if in_forward is not None:
            self._absent = [self._absent_version + in_forward] * len(self._aliases)
        set_versions(self._aliases, self._absent)

    def refuse(self) -> None:
        """Raise if a view was written to since `forget`.

        Raises:
            ShardingError: names the parameter.
        """
        now, seen, before = [alias._version for alias in self._aliases], self._versions, dict(self._before)
        if now == seen and not before:
            return
        self.forget()
        for index, name in enumerate(self._names):
            if now[index] != seen[index] or index in before and not torch.equal(before[index], self._bytes(index)):
                _refuse(name, "was changed in place")

    def _bytes(self, index: int) -> torch.Tensor:
        """[n bytes] uint8: bytes are compared, so NaN equals NaN, and 0 differs from -0."""
        with AsTensors():
            flat: torch.Tensor = get_data(self._views[index]).reshape(-1)
        return flat.view(torch.uint8)


class _Known(NamedTuple):
    """Facts about an unsharded parameter.

    Attributes:
        name: fully qualified.
        param_of: returns the sharded parameter; weak.
        ask: puts the unit in place, or raises; None: the parameter is never absent.
        writes_of: returns the unit's `Writes`; weak.
        place: index of the parameter there.
    """

    name: str
    param_of: Callable[[], nn.Parameter | None]
    ask: Any
    writes_of: Callable[[], Writes | None]
    place: int


_known: MutableMapping[torch.Tensor, _Known] = WeakIdKeyDictionary()


def let_be_absent(view: UnshardedParameter, ask: Callable[[], None]) -> None:
    """Make `view` absent, until `be_present`. `ask` puts its unit in place, or raises."""
    _known[view] = _known[view]._replace(ask=ask)
    be_absent((view,))


def advice(name: str) -> str:
    """How to keep the layer of weight `name` in place, for messages."""
    return f"StreamShard(model, resident=[{name.rpartition('.')[0]!r}])"


def be_absent(views: Iterable[UnshardedParameter]) -> None:
    """The unit of `views` has left its slot, or may leave it."""
    for view in views:
        view.__class__ = AbsentWeight  # type: ignore[assignment]  # of the same memory layout


def be_present(views: Iterable[UnshardedParameter]) -> None:
    """The unit of `views` is in place."""
    for view in views:
        view.__class__ = UnshardedParameter


def _refuse(name: str, what: str) -> NoReturn:
    raise ShardingError(
        f"parameter {name!r} {what} inside a forward, which computes with a copy of the weights: the change would be "
        "lost. Change weights between steps, on all ranks alike, for example after optimizer.step(), under "
        "torch.no_grad(); make what a forward updates, such as an EMA codebook, a buffer; renormalise the rows of "
        "nn.Embedding(max_norm=...) between steps"
    )


# -- backward reads absent weights ------------------------------------------------------------------------------------

_ABSENT = 1 << 24  # the first version of absent weights: others count in-place changes
_unit_names: list[str] = []  # of all units so far; each has two versions


@atexit.register
def _explain_at_exit() -> None:
    if (why := explain_version(uncaught())) is not None:
        log.error("%s", why)


def explain_version(error: BaseException | None) -> str | None:
    """What a user has done if `error` is autograd's about a version that `Writes.expire` has set; None if it is not."""
    if _unit_names and "is a view and its base or another view of its base has been modified inplace" in str(error):
        return (
            "if your code changes nothing in place, backward has come to a layer by a tensor that this layer has not "
            "returned, such as attention maps that a hook took. Let the layer return it, or make the layer resident"
        )
    found = re.search(r"is at version (\d+); expected version (\d+)", str(error))
    now, saved = (int(version) - _ABSENT for version in found.groups()) if found is not None else (-1, -1)
    if max(now, saved) < 0:
        return None
    if saved >= 0:
        return _why_a_view_is_refused(saved)
    name = _unit_names[now // 2]
    return (
        f"backward has come to {name!r} by a tensor that this layer has not returned: one that a hook took, or an "
        f"attribute. Let the layer return it, {_keep(name)}. If compiled autograd runs this backward: it is not "
        "supported, because it reads the weights of all layers first"
    )


def refuse_absent(tensor: torch.Tensor) -> None:
    """Raise if `tensor`, with which a layer computes, is a view of an absent weight."""
    if tensor._version >= _ABSENT:
        raise ShardingError(_why_a_view_is_refused(tensor._version - _ABSENT))


def _why_a_view_is_refused(version: int) -> str:
    name = _unit_names[version // 2]
    return f"a layer computes with a view of a weight of {name!r}, which does not run: give it a clone(), {_keep(name)}"


def _keep(name: str) -> str:
    return f"or keep the layer's weights in place: StreamShard(model, resident=[{name!r}])"
