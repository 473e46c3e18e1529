"""Reading a parameter is asking for its unit: what a weight is while its own layer does not run.

Inside a pass a unit's weights are in their slot only while one of its layers runs. Code that reads them at another time
(the root's forward, another layer, a method other than ``forward``, a recomputation that nobody announced) gets an
`AwayWeight`: it has the weight's shape, dtype and device, no memory, and each operation on it asks the engine for the
unit, computes with the slot, and lets the slot go on to whom it was taken from. Nobody ever holds memory that becomes
another layer's. See [Note: away].

[Note: away]
``nn.Module.__getattr__`` is reached for parameters, buffers and submodules only, and looks parameters up in the
module's ``_parameters``. A bound module has a plain dict there. An unbound one has a `ShardedParameters`, whose
look-ups answer for the time being: outside of passes with the sharded parameter, inside with an `AwayWeight`, or, where
the unit has a slot of its own, with the compute view, once it has arrived. Lists of parameters hold `AwayWeight`s of
what the pass has not used yet: who asks for the dtype of the first needs no weights.

Compute views themselves may be kept by whoever got hold of one: a list, another module, a closure. While their member
is not bound they are of a class of their own, `AwayView`, and do as an `AwayWeight` does; bound, they are Parameters
again. It is done for all of them at each turn (30 ns per parameter), since nothing says whether somebody keeps one, and
what Python holds may differ between ranks.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from streamshard.compiling import skip
from streamshard.engine.borrow import borrow, read
from streamshard.engine.containers import map_tensors, tensors_in
from streamshard.engine.engine import Engine
from streamshard.engine.hooks import holding_back_weights
from streamshard.engine.outside import OutsideParameters
from streamshard.errors import ShardingError
from streamshard.unit.unit import Member, StreamedUnit, take_grad

__all__ = ["AwayView", "AwayWeight", "Home", "ShardedParameters", "UnitParam", "let_keep"]

# Answered from the outside, without the values: properties and methods of tensors.
_KNOWN = frozenset(
    name
    for line in (
        "shape dtype device ndim layout itemsize nbytes names is_cuda is_cpu is_meta is_xpu is_mps is_sparse is_nested",
        "is_sparse_csr is_quantized is_mkldnn is_leaf grad_fn _version _base size dim numel nelement ndimension stride",
        "storage_offset element_size is_floating_point is_complex is_contiguous is_signed is_inference get_device",
        "__len__ has_names is_shared",
    )
    for name in line.split()
)
_OF_THE_PARAMETER = ("requires_grad", "grad", "_backward_hooks", "_post_accumulate_grad_hooks")


class AwayWeight(torch.Tensor):
    """Stands for a weight whose unit may be elsewhere in the program. Shape, dtype and device of the compute view.

    Attributes:
        home: what it is a weight of.
        param_index: of the parameter in its unit.
        is_detached: whether operations on it are not part of a graph (``.data``, ``.detach()``).
    """

    _home_of: weakref.ref[Home]
    param_index: int
    is_detached: bool

    @staticmethod
    def make(home: Home, param_index: int, *, is_detached: bool = False) -> AwayWeight:
        """The weight of parameter `param_index` of `home`."""
        view = home.unit.views[param_index]
        weight: AwayWeight = torch.Tensor._make_wrapper_subclass(
            AwayWeight, view.shape, dtype=view.dtype, device=view.device, requires_grad=not is_detached
        )
        weight._home_of = weakref.ref(home)
        weight.param_index = param_index
        weight.is_detached = is_detached
        weight._is_param = True  # what isinstance(.., nn.Parameter) asks
        if not is_detached:
            with torch._C.DisableTorchFunctionSubclass():
                weight.register_post_accumulate_grad_hook(_give_grad)  # type: ignore[no-untyped-call]
        return weight

    @property
    def home(self) -> Home:
        """Alive as long as the model is."""
        home = self._home_of()
        if home is None:
            raise ShardingError("a weight is used after its model is gone")
        return home

    @property
    def param_name(self) -> str:
        """Fully qualified, for messages."""
        return self.home.unit.params[self.param_index].name

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Questions are answered; in-place changes raise; everything else computes with the weight itself."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__"):
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            weight = args[0]
            if attribute in _OF_THE_PARAMETER:
                return (
                    getattr(weight.home.unit.params[weight.param_index].param, attribute)
                    if name == "__get__"
                    else (setattr(weight.home.unit.params[weight.param_index].param, attribute, args[1]))
                )
            if name == "__set__":
                _refuse_change(weight, f".{attribute} = ...")
            if attribute == "data":
                return AwayWeight.make(weight.home, weight.param_index, is_detached=True)
            if attribute in _KNOWN:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
        elif name in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        elif name == "detach":
            return AwayWeight.make(args[0].home, args[0].param_index, is_detached=True)
        elif name == "requires_grad_":
            args[0].home.unit.params[args[0].param_index].param.requires_grad_(*args[1:], **kwargs)
            return args[0]
        elif name == "__repr__":
            return f"AwayWeight({args[0].param_name!r}, {tuple(args[0].shape)}, {args[0].dtype})"
        elif name in ("__deepcopy__", "__reduce_ex__", "data_ptr", "untyped_storage"):
            _refuse_memory(args[0], name)
        for target in _changed_by(name, args, kwargs):
            _refuse_change(target, name)
        return _compute(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch passes the function as well
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Reached by code that goes around ``__torch_function__``."""
        weight = next(each for each in _away_in((args, kwargs or {})))
        _refuse_memory(weight, str(func))


class AwayView(AwayWeight):
    """A compute view while its member is not bound, for who has kept it. Its memory is somebody else's by then."""

    is_detached = False
    _is_param = True

    @property
    def home(self) -> Home:
        """As any away weight's."""
        return _kept[self].home

    @property
    def param_index(self) -> int:  # type: ignore[override]  # a view has no attributes of its own: the parameter's
        """As any away weight's."""
        return _kept[self].param_index


class ShardedParameters(OutsideParameters):
    """A module's parameters while its unit is not bound. The sharded parameters themselves, but for look-ups in a pass.

    Args:
        sharded: name to sharded parameter.
        unit_params: which of its unit's each of them is; tied ones are the edge unit's.
        engine: the model's.
    """

    __slots__ = ("_unit_params",)

    def __init__(
        self, sharded: Mapping[str, nn.Parameter | None], unit_params: Mapping[Any, UnitParam], engine: Engine
    ) -> None:
        super().__init__(sharded, engine)
        self._unit_params: dict[Any, UnitParam] = {
            param: unit_params[param] for param in sharded.values() if param is not None
        }

    def __getitem__(self, key: str) -> Any:
        """The parameter `key`, as it is for the time being."""
        unit_param = self._unit_params.get(self.get(key))
        if unit_param is not None and unit_param.home.is_in_pass:
            return unit_param.home.weight(unit_param.param_index)
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        """What was looked up may be put back (``torch.func.functional_call`` does): as the sharded parameter again."""
        for param, unit_param in self._unit_params.items():
            if unit_param.home.stands_for(value, unit_param.param_index):
                value = param
        super().__setitem__(key, value)

    def items(self) -> Any:
        """As `__getitem__`, for ``module.parameters()`` inside a forward; a backward's hooks see what is sharded."""
        items = super().items()
        if not any(each.home.is_in_forward for each in self._unit_params.values()):
            return items
        listed = {param: each.home.listed(each.param_index) for param, each in self._unit_params.items()}
        return [(key, listed.get(value, value)) for key, value in items]

    def values(self) -> Any:
        """As `items`."""
        return [value for _, value in self.items()]


class UnitParam(NamedTuple):
    """Which of its unit's a parameter is."""

    home: Home
    param_index: int


# What each compute view of units that take turns is the weight of.
_kept: MutableMapping[torch.Tensor, UnitParam] = WeakIdKeyDictionary()


def let_keep(member: Member, unit_params: Iterable[UnitParam]) -> None:
    """Compute views of `member` may be kept: while it is not bound they stand for their weights.

    Args:
        member: of a unit that takes turns in slots.
        unit_params: what its modules hold; those of other units, such as the edge unit, are let be.
    """
    for home, param_index in dict.fromkeys(unit_params):
        if home.unit is member.unit:
            _kept[home.unit.views[param_index]] = UnitParam(home, param_index)
            member.add_view(home.unit.views[param_index], AwayView)


class Home:
    """A unit and its engine, for its weights that are away. One per unit.

    Args:
        unit: whose.
        engine: asked for it. Both are held weakly: modules hold this, and the engine, whose the unit is.
    """

    def __init__(self, unit: StreamedUnit, engine: Engine) -> None:
        self._unit_of = weakref.ref(unit)
        self._engine_of = weakref.ref(engine)
        self._away: dict[int, AwayWeight] = {}

    @property
    def unit(self) -> StreamedUnit:
        """See above."""
        unit = self._unit_of()
        if unit is None:
            raise ShardingError("a weight is used after its model is gone")
        return unit

    @property
    def engine(self) -> Engine:
        """Alive as long as a module of it is."""
        engine = self._engine_of()
        if engine is None:
            raise ShardingError("a weight is used after its model is gone")
        return engine

    @property
    def is_in_forward(self) -> bool:
        """Whether a pass is under way."""
        return self.engine.is_in_forward

    @property
    def is_in_pass(self) -> bool:
        """The same, or a backward: it may recompute."""
        return self.engine.is_in_pass

    def away(self, param_index: int) -> AwayWeight:
        """The weight of parameter `param_index`, made once."""
        if param_index not in self._away:
            self._away[param_index] = AwayWeight.make(self, param_index)
        return self._away[param_index]

    def stands_for(self, value: Any, param_index: int) -> bool:
        """Whether `value` is what the weight of parameter `param_index` is computed with, or stands for it."""
        if isinstance(value, AwayWeight):
            return value.home is self and value.param_index == param_index
        return value is self.unit.views[param_index]

    def listed(self, param_index: int) -> torch.Tensor:
        """The weight of parameter `param_index` in a list of all."""
        return self.unit.views[param_index] if self.engine.is_in_place(self.unit) else self.away(param_index)

    @skip  # torch.compile breaks its graph where weights are read
    def weight(self, param_index: int) -> torch.Tensor:
        """What code that reads the weight of parameter `param_index` gets."""
        return self.away(param_index) if self.unit.takes_turns else self.in_place(param_index)

    def in_place(self, param_index: int) -> torch.Tensor:
        """The weight of parameter `param_index` in its slot, which the unit stays in, arrived."""
        read(self.engine, self.unit)
        return self.unit.views[param_index]


def _compute(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """`func` with every away weight in its arguments replaced by the weight.

    With one unit its slot is computed with directly; what comes out as a view of it is copied. Weights of several units
    may need the same slot, so they are copied one after the other. Those of units that stay are simply there.
    """
    found = list(_away_in((args, kwargs)))
    weights: dict[AwayWeight, torch.Tensor] = {}
    homes: set[Home] = set()
    for weight in found:
        if not weight.home.engine.is_in_pass:
            raise ShardingError(
                f"{weight.param_name!r} was read inside a forward and is used after it, where every rank has its piece "
                "only: compute with it inside, keep a clone(), or read it inside summon_full_params()"
            )
        if weight.home.unit.takes_turns:
            homes.add(weight.home)
        else:
            view = weight.home.in_place(weight.param_index)
            weights[weight] = view.detach() if weight.is_detached else view
    if len(homes) != 1:
        for weight in found:
            if weight.home in homes:
                weights[weight] = _compute(torch.clone, (weight,), {})
        return _call(func, args, kwargs, weights)
    (home,) = homes
    unit = home.unit
    slot = unit.weight_slot
    for tensor in tensors_in((args, kwargs)):  # another layer's weights in the same slot, such as the running one's
        if slot.content != unit.index and not isinstance(tensor, AwayWeight) and slot.holds(tensor):
            weights[tensor] = tensor.clone()  # type: ignore[index]  # by identity
    wanted = [(weight, unit.views[weight.param_index], weight.is_detached) for weight in found if weight.home is home]
    borrowed = borrow(home.engine, unit)
    holding_back = contextlib.nullcontext() if borrowed.use is None else holding_back_weights(home.engine, borrowed.use)
    try:
        with _as_parameters(view for _, view, _ in wanted), holding_back:
            for weight, view, is_detached in wanted:
                view = view.detach() if is_detached else view
                weights[weight] = view if borrowed.use is not None else view.clone()
            result = _call(func, args, kwargs, weights)
            return map_tensors(result, lambda tensor: tensor.clone() if slot.holds(tensor) else tensor)
    finally:
        borrowed.give_back()


@contextlib.contextmanager
def _as_parameters(views: Iterable[nn.Parameter]) -> Iterator[None]:
    """Inside, operations compute with `views` themselves, which are in their slot."""
    away: list[Any] = [view for view in views if isinstance(view, AwayView)]
    for view in away:
        view.__class__ = nn.Parameter
    try:
        yield
    finally:
        for view in away:
            view.__class__ = AwayView


def _call(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], weights: Mapping[Any, torch.Tensor]) -> Any:
    """`func` with the keys of `weights` replaced in its arguments."""
    args, kwargs = map_tensors((args, kwargs), lambda tensor: weights.get(tensor, tensor))
    return func(*args, **kwargs)


def _give_grad(weight: AwayWeight) -> None:
    """A Function of the user's, which autograd calls with the weight as it is, has made a gradient of it."""
    with torch._C.DisableTorchFunctionSubclass():
        grad, weight.grad = weight.grad, None
    unit = weight.home.unit
    if grad is not None and unit.views[weight.param_index].requires_grad:
        take_grad(unit, weight.param_index, grad)


def _away_in(value: Any) -> Iterator[AwayWeight]:
    return (tensor for tensor in tensors_in(value) if isinstance(tensor, AwayWeight))


def _changed_by(name: str, args: Any, kwargs: Mapping[str, Any]) -> Iterable[AwayWeight]:
    """The away weights that an operation would write to: its name ends in ``_``, or they are given as ``out``."""
    is_in_place = name.endswith("_") and not name.endswith("__") or name in ("__setitem__", "__iadd__", "__imul__")
    yield from _away_in(args[0]) if is_in_place and args else ()
    yield from _away_in(kwargs.get("out"))


def _refuse_change(weight: AwayWeight, what: str) -> NoReturn:
    raise ShardingError(
        f"{what} on parameter {weight.param_name!r} inside a forward, while its layer is not running: the whole weight "
        "exists in a buffer that other layers use next, so the change would be lost. Change it outside of forward "
        "(pieces, element by element, or summon_full_params(writeback=True))"
    )


def _refuse_memory(weight: AwayWeight, what: str) -> NoReturn:
    raise ShardingError(
        f"{what} of parameter {weight.param_name!r} inside a forward, while its layer is not running: the weight has "
        "no memory of its own then. clone() it first"
    )
