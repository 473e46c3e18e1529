"""Unsharded parameters: refuses reads of absent weights, and writes of a forward to weights.

A forward that writes to a weight raises: the slot is all-gathered anew, so the change would be lost. `WeightGuard`
compares version counters. Writes through ``.data`` leave no trace in the counters. So the first read of ``.data``
copies the weight, and the values are compared when the use of the unit ends. (transformers' Gemma 3n clamps ``.data``
in every forward, and hardly ever changes a value.)

[Note: absent weights]
A streamed unit has its weights in a slot only while one of its layers runs. At other times its unsharded parameters
have another class, `AbsentWeight`, which answers questions about shape, dtype and device. Any other operation needs the
values: it raises and names the weight if a layer is streamed, and all-gathers a resident unit, or an embedding or head
at its turn. An unsharded parameter stays the same object, in graphs and in Python, so code that keeps one never reads
another layer's weight. Gradients may take the slot of a resident unit or of the root unit. Its weights are absent then,
until the unit is gathered again. A read of the root unit's weights raises then.

Saved tensors have no such class. So while a weight is absent, its version counter, which its views share, holds a
special number, 16777216 or more. Autograd then refuses to use it: its error says that a tensor "is at version
16777217". The end of each forward with gradients adds one. So autograd refuses behind it what it has saved of absent
weights.

Changing the class is one assignment per parameter and use, 30 ns. torch offers nothing else: a tensor with an exchanged
storage reads that storage, and no storage raises when it is read.
"""

from __future__ import annotations

import atexit
import functools
import operator
import re
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, cast

import torch
from torch import nn

from streamshard.errors import ShardingError, log, uncaught
from streamshard.guards.torch_functions import answers_without_values, name_of
from streamshard.nested import tensors_in
from streamshard.planning.structure import MARKS, refuse_marks
from streamshard.torch_private import AsTensors, get_data, make_subclass, set_data, set_versions, skip, untraced

_version_of = operator.attrgetter("_version")

ABSENT_VERSION = 1 << 24  # the first of absent weights, see the note. Versions of others count in-place changes


class _Guarded(torch.Tensor):
    """An unsharded parameter of any class."""

    __slots__ = ()
    guard_of: Callable[[], Any]  # returns the `WeightGuard` of the unit; weak, because the guard holds this object
    place: int  # in the lists of the guard


class _Weight(_Guarded, nn.Parameter):
    """An unsharded parameter. Its attributes are its sharded parameter's, so its own are slots."""

    __slots__ = ("guard_of", "place")


class UnshardedParameter(_Weight):
    """An unsharded parameter while its weights are in the slot."""

    __slots__ = ()

    @property
    @skip
    def data(self) -> torch.Tensor:
        """As in torch. Copies the weight first, so that the guard notices a change."""
        untraced(self.guard_of().remember, self.place)
        return get_data(self)

    @data.setter
    @skip
    def data(self, data: torch.Tensor) -> None:
        if data.data_ptr() != self.data_ptr():
            _refuse(self.guard_of().names[self.place], "was given other memory (param.data = ...)")
        set_data(self, data)

    @skip
    def set_(self, *source: Any) -> torch.Tensor:
        """As in torch. Setting a weight to itself is allowed: torch's parametrizations and PEFT's adapters do so."""
        if len(source) == 1 and isinstance(source[0], torch.Tensor) and source[0].data_ptr() == self.data_ptr():
            return self
        return super().set_(*source)


class _Absent(_Guarded):
    """An unsharded parameter of any class while its unit is not in place."""

    __slots__ = ()

    @classmethod
    @skip  # torch.compile breaks its graph here: it cannot trace an all-gather
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer questions about shape, dtype and device. Put the unit in place, or raise, before anything else."""
        kwargs, called, name = kwargs or {}, getattr(func, "__name__", ""), name_of(func)
        if name in ("requires_grad", "requires_grad_") or (name == "grad" and called == "__get__"):
            args = (args[0].guard_of().params[args[0].place], *args[1:])  # the unsharded parameter may be out of date
        # Its storage is the slot, in which other weights may be.
        elif answers_without_values(func) and name != "untyped_storage":
            with AsTensors():
                return func(*args, **kwargs)
        for value in tensors_in((args, kwargs)):
            if isinstance(value, _Absent):
                guard = value.guard_of()
                untraced(guard.ask, guard.names[value.place])
        # The weight has another class now, so its attributes are looked up anew.
        if called == "__get__":
            return getattr(args[0], name)
        return setattr(args[0], name, args[1]) if called == "__set__" else func(*args, **kwargs)


class AbsentWeight(_Absent, _Weight):
    """An unsharded parameter while its unit is not in place. See [Note: absent weights]."""

    __slots__ = ()


@functools.cache
def classes_of(kind: type, inner: str) -> tuple[type, type]:
    """The classes of an unsharded parameter that is absent, and in place.

    Args:
        kind: the class before sharding.
        inner: see `Form`. The operations of a tensor that consists of others want exactly its class.
    """
    if kind is nn.Parameter:
        return AbsentWeight, UnshardedParameter
    entries: dict[str, Any] = {"__slots__": (), "__module__": kind.__module__}
    if inner:
        entries[inner] = property(functools.partial(_present, kind, inner))
        return type(kind.__name__, (_Absent, kind), entries), kind
    absent, present = (type(kind.__name__, (base, kind), dict(entries)) for base in (AbsentWeight, UnshardedParameter))
    return absent, present


def _present(kind: Any, inner: str, weight: _Absent) -> torch.Tensor:
    """A part of an absent weight, which operations read before torch knows of them: put its unit in place, or raise."""
    guard = weight.guard_of()
    guard.ask(guard.names[weight.place])
    return _inner_of(kind, inner, weight)


def _inner_of(kind: Any, inner: str, weight: torch.Tensor) -> torch.Tensor:
    """The part `inner` of a tensor of class `kind`, which may have another class now."""
    slot = vars(kind).get(inner)  # of a class with slots, as DTensor
    tensor: torch.Tensor = vars(weight)[inner] if slot is None else slot.__get__(weight)
    return tensor


class WeightGuard:
    """Guards the unsharded parameters of one unit.

    Args:
        is_shared: the unit shares its weight slot with others.

    Attributes:
        views: the unsharded parameters.
        names: their names.
        params: the sharded parameters.
        ask: puts the weights in place, or raises; called with the name of a weight that is absent.
        is_gone: see `mark_gone`.
    """

    def __init__(self, is_shared: bool) -> None:
        self.views: list[UnshardedParameter] = []
        self.names: list[str] = []
        self._kinds: tuple[list[type], list[type]] = ([], [])  # of the views while absent, and in place
        self.params: list[nn.Parameter] = []
        self._addresses: list[int | None] = []  # of their pieces; None of empty ones
        self.ask: Callable[[str], object] = lambda name: None
        self.is_gone = False
        self._is_shared = is_shared
        self._aliases: list[torch.Tensor] = []  # with the views' version counters: a view may be absent
        self._places: list[int] = []  # of the aliases' views
        self._versions: list[int] = []  # while the weights are in place
        self._absent = ABSENT_VERSION  # of all of them while they are not
        self._before: dict[int, torch.Tensor] = {}  # by index, copies of weights: their .data was read

    def watch(
        self,
        view: UnshardedParameter,
        classes: tuple[type, type],
        aliases: Sequence[torch.Tensor],
        param: nn.Parameter,
        name: str,
    ) -> None:
        """Watch a parameter.

        Args:
            view: the unsharded parameter.
            classes: see `classes_of`.
            aliases: tensors with the version counters of `view` and of the memory that it is around.
            param, name: the sharded parameter, in the memory that StreamShard has given it, and its name.
        """
        view.guard_of, view.place = weakref.ref(self), len(self.views)
        self.views.append(view)
        for kinds, kind in zip(self._kinds, classes, strict=True):
            kinds.append(kind)
        self.names.append(name)
        self.params.append(param)
        with AsTensors():
            self._addresses.append(param.data_ptr() if param.numel() else None)
        for alias in aliases:
            self._aliases.append(alias)
            self._places.append(view.place)
            self._versions.append(alias._version)

    def use_memory(self, place: int, weights: torch.Tensor, whole: torch.Tensor, inner: str) -> None:
        """Let the parameter at `place` use other memory. The object stays, and its version counters.

        Args:
            place: see above.
            weights: the flat parameter in that memory.
            whole: the parameter in that memory, of the class before sharding.
            inner: see `Form`.
        """
        flat, *others = (alias for alias, each in zip(self._aliases, self._places, strict=True) if each == place)
        kind = self._kinds[1][place]
        with AsTensors():
            set_data(flat, weights)
            for tensor in (self.views[place], *others):
                set_data(*(each if not inner else _inner_of(kind, inner, each) for each in (tensor, whole)))

    def check(self) -> None:
        """A pass begins, which casts the weights.

        Raises:
            ShardingError: a parameter has a hook that would never run, or memory that its collectives would not see.
        """
        with AsTensors():
            for param, name, address in zip(self.params, self.names, self._addresses, strict=True):
                if param._backward_hooks or not MARKS.isdisjoint(param.__dict__):
                    refuse_marks(name, param)
                    raise ShardingError(
                        f"a hook on parameter {name!r} would never run, its gradient is made by a reduction: use "
                        "register_post_accumulate_grad_hook, which is called with the sharded gradient"
                    )
                if address is not None and param.data_ptr() != address:
                    raise ShardingError(
                        f"parameter {name!r} was given other memory (param.data = ..., .half(), .to()), and layers "
                        "compute with the memory that StreamShard has given it: copy into that (param.data.copy_). "
                        "Instead of .half() use Precision(param_dtype=...), for full tensors load_state_dict or "
                        "summon_full_params()"
                    )

    @property
    def kinds(self) -> list[type]:
        """The classes of the unsharded parameters while they are in place."""
        return self._kinds[1]

    def share(self) -> None:
        """Other units use the slot too from now on. The weights are not in place."""
        self._is_shared, self.is_gone = True, False
        self.set_present(False)

    def set_classes(self, *, is_present: bool) -> None:
        """From now on the weights answer as in place, or as absent. Autograd, which asks versions, sees no change."""
        for view, kind in zip(self.views, self._kinds[is_present], strict=True):
            view.__class__ = kind

    def set_present(self, is_present: bool) -> None:
        """The weights are in place, and layers are about to compute (True); or they may leave their slot (False)."""
        self.set_classes(is_present=is_present)
        if is_present:
            self.begin_use()
        elif self._is_shared:  # weights with a slot of their own stay in it for backward
            set_versions(self._aliases, [self._absent] * len(self._aliases))

    def set_class(self, place: int, *, is_present: bool) -> type:
        """The weight at `place` alone is in place, or not. Returns its class."""
        self.views[place].__class__ = kind = self._kinds[is_present][place]
        return kind

    def begin_use(self) -> None:
        """Layers are about to compute: forget earlier writes."""
        self.is_gone = False
        # Autograd has saved weights of this slot at these versions, and finds them unchanged.
        set_versions(self._aliases, self._versions)
        self._before.clear()

    def mark_gone(self) -> None:
        """Gradients take the slot of a resident unit. Until `set_present` the weights are absent, in backward too."""
        self.is_gone = True
        self.set_classes(is_present=False)
        set_versions(self._aliases, [ABSENT_VERSION] * len(self._aliases))

    def remember(self, index: int) -> None:
        """Copy the weight at `index`, because the forward may be about to write it through ``.data``."""
        if index not in self._before:
            self._before[index] = self._bytes(index).clone()

    def end_use(self) -> None:
        """Layers have computed.

        Raises:
            ShardingError: a weight was written to since `begin_use`; names the parameter.
        """
        now = list(map(_version_of, self._aliases))
        if now == self._versions and not self._before:
            return
        before = dict(self._before)  # `begin_use` forgets them, and comes first: a use after the error begins anew
        self.begin_use()
        versions = zip(now, self._versions, self._places, strict=True)
        changed = {place for version, known, place in versions if version != known}
        changed.update(index for index in before if not torch.equal(before[index], self._bytes(index)))
        if changed:
            _refuse(self.names[min(changed)], "was changed in place")

    def end_pass(self) -> None:
        """A forward has ended: a backward that reads the weights raises. See [Note: absent weights]."""
        if self._is_shared:
            self._absent += 1
            set_versions(self._aliases, [self._absent] * len(self._aliases))

    def _bytes(self, index: int) -> torch.Tensor:
        """[n bytes] uint8: bytes are compared, so NaN equals NaN, and 0 differs from -0."""
        with AsTensors():
            return get_data(self.views[index]).reshape(-1).view(torch.uint8)


def leaf_of(weight: UnshardedParameter, kind: type) -> nn.Parameter:
    """A parameter in the memory of `weight`, with a gradient of its own; `weight` itself if it is frozen.

    It shares the version counter, so writes and reads of absent weights are noticed in backward.

    Args:
        weight: an unsharded parameter.
        kind: its class while it is in place.
    """
    if not weight.requires_grad:
        return weight
    leaf = make_subclass(kind, weight, True)
    leaf.guard_of, leaf.place = weight.guard_of, weight.place
    leaf.__dict__.update(weight.__dict__)
    return cast(nn.Parameter, leaf)


def weight_at(node: Any) -> tuple[WeightGuard | None, int]:
    """The guard of the weight whose gradient the graph node `node` takes, and its place there; None: of no weight."""
    leaf = getattr(node, "variable", None)
    return (leaf.guard_of(), leaf.place) if isinstance(leaf, _Guarded) else (None, -1)


def advice(name: str) -> str:
    """How to keep the layer of weight `name` in place, for messages."""
    return f"StreamShard(model, resident=[{name.rpartition('.')[0]!r}])"


def refuse_read(name: str, otherwise: str = "") -> NoReturn:
    """Raise, because the weight `name` is read while other layers have its buffer. `otherwise`: further advice."""
    raise ShardingError(
        f"the weight {name!r} is computed with while its layer does not run, when other layers have its buffer: keep "
        f"it in place, {advice(name)}{otherwise}"
    )


def refuse_absent(tensor: torch.Tensor, layer: str) -> None:
    """Raise if `tensor`, with which `layer` computes, is a view of an absent weight."""
    if tensor._version >= ABSENT_VERSION:
        raise ShardingError(
            f"{layer!r} computes with a view {list(tensor.shape)} of a weight of another layer, which does not run: "
            "give it a clone(), or keep the other layer's weights in place: StreamShard(model, resident=[layer])"
        )


def _refuse(name: str, what: str) -> NoReturn:
    raise ShardingError(
        f"parameter {name!r} {what} inside a forward, which computes with a copy of the weights: the change would be "
        "lost. Change weights between steps, on all ranks alike, for example after optimizer.step(), under "
        "torch.no_grad(); make what a forward updates, such as an EMA codebook, a buffer; renormalise the rows of "
        "nn.Embedding(max_norm=...) between steps"
    )


# 8 digits: `ABSENT_VERSION` or more.
_MODIFIED = re.compile(r"version \d{8,}|another view of its base has been modified")  # in autograd's error


def explain_version(error: BaseException | None) -> str | None:
    """The mistakes that may be behind autograd's `error`, if it is about an absent weight; else None."""
    if _MODIFIED.search(str(error)) is None:
        return None
    return (
        "if your code changes nothing in place, backward has come to a layer by a tensor that this layer has not "
        "returned, such as an attribute, or attention maps that a hook took; or a layer computes with a view of a "
        "weight of another layer, which does not run. Let the layer return the tensor, give the view a clone(), or "
        "keep weights in place: StreamShard(model, resident=[layer]). A loss of derivatives (of a tangent of "
        "torch.autograd.forward_ad, of a gradient) needs weight_slots='all'. Leave compiled autograd out: it reads the "
        "weights of all layers first"
    )


# Autograd raises its error by itself: it can be explained when it has ended the process.
@atexit.register
def _explain_at_exit() -> None:
    if (why := explain_version(uncaught())) is not None:
        log.error("%s", why)
