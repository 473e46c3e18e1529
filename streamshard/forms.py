"""Forms: parameters that are not plain tensors. StreamShard moves their memory as it is.

A `Form` is what a parameter is to its module: packed bytes, or this rank's part of a DTensor. Planning, slots,
transports and checkpoints see the parameter's plain memory. Every parameter has a form; a plain one has `Form` itself,
so that no code asks whether there is one.

bitsandbytes and torchao are not imported here: their parameters tell what they are.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from streamshard.errors import ShardingError
from streamshard.nested import tensors_in
from streamshard.torch_private import AsTensors

Box = tuple[tuple[int, int, int], ...]
"""A part of a tensor: for each dim its start, its length, and the size of the whole dim.

The sizes may split a dim of the tensor in two. So a part may consist of rows that are not neighbours, such as rows of a
gate and rows of an up projection in one matrix.
"""


def part_of(whole: torch.Tensor, box: Box) -> torch.Tensor:
    """The elements of `whole` in `box`, in the shape of its lengths. An empty box has all elements."""
    if not box:
        return whole
    return whole.reshape([size for *_, size in box])[tuple(slice(start, start + length) for start, length, _ in box)]


class Form:
    """What a parameter is to its module. Of this class itself: numbers, cast to the compute dtype, which may train.

    Attributes:
        is_packed: the bytes are never cast, have no gradient, and never train.
        part: the attribute of the parameter that is its memory; empty: the parameter itself is.
        inner: the attribute of the unsharded parameter that is its memory; empty: the unsharded parameter itself is.
        box: the range that this rank holds of a larger tensor. Other ranks hold the rest. Empty: this rank holds all.
    """

    is_packed = False
    part = inner = ""
    box: Box = ()

    def problem_with(self, param: nn.Parameter) -> str | None:
        """Why `param` cannot be sharded, in words that follow its name; None: it can."""
        return None

    def numel(self, param: torch.Tensor) -> int:
        """How many of the model's own parameters `param`, which is not sharded yet, holds."""
        return param.numel()

    def memory(self, param: torch.Tensor) -> torch.Tensor:
        """The plain tensor that ranks cut, before and after sharding."""
        return param

    def shape(self, param: torch.Tensor) -> tuple[int, ...]:
        """The shape of the whole parameter, in elements of its memory."""
        return tuple(self.memory(param).shape)

    def around(self, memory: torch.Tensor) -> torch.Tensor:
        """The whole parameter in `memory`, [whole shape]. No copy."""
        return memory

    def unsharded(self, memory: torch.Tensor) -> torch.Tensor:
        """What the module computes with, in `memory`, this rank's part of the whole parameter. No copy."""
        return self.around(memory)

    def local_grad(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of this rank's memory, of the gradient that autograd has made."""
        return grad

    def whole(self, memory: torch.Tensor) -> torch.Tensor:
        """[whole shape]: the parts of all ranks of which `memory` is one. Collective, if there is a `box`."""
        return memory

    def beside(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """Tensors that belong to `param` and stay whole on each rank, by name."""
        return {}

    def facts(self, param: torch.Tensor) -> str:
        """Everything else that ranks, and a checkpoint, have to agree on."""
        return ""

    def prepare(self) -> dict[str, Any]:
        """Attributes to set on a module that owns such a parameter."""
        return {}

    def move(self, param: torch.Tensor, device: torch.device) -> None:
        """Move the tensors beside `param` to `device`."""


class IntegerForm(Form):
    """A frozen parameter of integers, such as HQQ's packed weights. It counts as many parameters as integers."""

    is_packed = True

    def problem_with(self, param: nn.Parameter) -> str | None:
        """See `Form`."""
        return "is packed and on the meta device: load it before StreamShard(model)" if param.is_meta else None


class FourBitForm(Form):
    """bitsandbytes' ``Params4bit``: packed weights of any storage dtype, and a ``quant_state``."""

    is_packed = True

    def problem_with(self, param: nn.Parameter) -> str | None:
        """See `Form`."""
        state: Any = getattr(param, "quant_state", None)
        if param.is_meta or state is None:
            return "is not quantized yet: load the model to its device before StreamShard(model)"
        if getattr(state, "packing_format_for_cpu", False):
            return (
                "was repacked for a CPU by a forward in eval mode, which changes its bytes: call StreamShard(model) "
                "before the first forward"
            )
        return "requires a gradient, and packed weights cannot train: freeze it" if param.requires_grad else None

    def numel(self, param: torch.Tensor) -> int:
        """See `Form`."""
        return math.prod(param.__dict__["quant_state"].shape)

    def beside(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `Form`."""
        found: dict[str, torch.Tensor] = {}
        state: Any = param.__dict__["quant_state"]
        for prefix, each in (("", state), ("nested_", state.state2)):
            for name in ("absmax", "code", "offset"):
                value = getattr(each, name, None)
                if isinstance(value, torch.Tensor):
                    found[prefix + name] = value
        return found

    def facts(self, param: torch.Tensor) -> str:
        """See `Form`."""
        state: Any = param.__dict__["quant_state"]
        both = [each for each in (state, state.state2) if each is not None]
        return " ".join(f"{each.quant_type} {each.blocksize} {each.dtype} {each.shape}" for each in both)

    def prepare(self) -> dict[str, Any]:
        """See `Form`. On some CPUs a forward in eval mode would repack the weights in place."""
        return {"support_avx512bf16_for_cpu": False}

    def move(self, param: torch.Tensor, device: torch.device) -> None:
        """See `Form`."""
        param.__dict__["quant_state"].to(device)


class TorchaoForm(IntegerForm):
    """A frozen tensor of torchao's, made of other tensors. Ranks cut the bytes of the largest; the others stay whole.

    Args:
        param: not sharded yet.
    """

    def __init__(self, param: Any) -> None:
        names, self._context = param.__tensor_flatten__()
        self._parts: dict[str, torch.Tensor] = {name: getattr(param, name) for name in names}
        self._kind, self._size, self._stride, self._dtype = type(param), param.shape, param.stride(), param.dtype
        # The others are small: scales, which stay whole.
        self.part = self.inner = max(names, key=lambda name: self._parts[name].nbytes)
        are_plain = all(type(each) is torch.Tensor and each.is_contiguous() for each in self._parts.values())
        self.can_be_cut = are_plain and self.part in vars(param)  # `memory` looks for it there
        self._part_dtype = self._parts.pop(self.part).dtype

    def memory(self, param: torch.Tensor) -> torch.Tensor:
        """See `Form`: [the part's shape] uint8."""
        part: torch.Tensor | None = vars(param).get(self.part)
        return param if part is None else part.view(torch.uint8)

    def around(self, memory: torch.Tensor) -> torch.Tensor:
        """See `Form`."""
        parts = {name: tensor.to(memory.device) for name, tensor in self._parts.items()}
        parts[self.part] = memory.view(self._part_dtype)
        context = {
            key: dataclasses.replace(value, device=memory.device) if hasattr(value, "device") else value
            for key, value in self._context.items()
        }
        whole: Any = self._kind.__tensor_unflatten__(parts, context, self._size, self._stride)
        whole._is_param = True  # nn.Parameter(whole) would give the parts version counters of their own
        return cast(torch.Tensor, whole)

    def beside(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        """See `Form`."""
        return self._parts

    def facts(self, param: torch.Tensor) -> str:
        """See `Form`."""
        context = str(self._context).replace(repr(param.device), "")  # which differs between ranks
        return f"{self._kind.__name__} {self.part} {tuple(self._size)} {self._dtype} {context}"

    def move(self, param: torch.Tensor, device: torch.device) -> None:
        """See `Form`."""
        for name, tensor in self._parts.items():
            setattr(param, name, tensor.to(device))


class DTensorForm(Form):
    """A DTensor: this rank's part of a parameter that tensor parallelism has cut, or a copy of it.

    Args:
        param: not sharded yet, on a mesh with one axis.
    """

    inner = "_local_tensor"

    def __init__(self, param: Any) -> None:
        self.kind, self.mesh, self.placements = type(param), param.device_mesh, param.placements
        # The part lies in its slot in row-major order, whatever strides the DTensor has.
        self._shape, self._stride = param.shape, torch.empty(param.shape, device="meta").stride()
        place, ranks = self.placements[0], self.mesh.size()
        # By name: `_StridedShard` is private, and in torch 2.13 no `Shard`.
        self.cut_along = place.dim % len(self._shape) if type(place).__name__ in ("Shard", "_StridedShard") else None
        # Meshes of several axes have no box: `axes_of` refuses them, with the parameter's name.
        if self.cut_along is not None and self.mesh.ndim == 1 and ranks > 1:
            blocks = getattr(place, "split_factor", 1)  # each is cut: a gate and an up projection, say
            size, box = self._shape[self.cut_along] // blocks, [(0, length, length) for length in self._shape]
            step = -(-size // ranks)  # as torch.chunk
            start = min(self.mesh.get_local_rank() * step, size)
            box[self.cut_along : self.cut_along + 1] = [(0, blocks, blocks), (start, min(step, size - start), size)]
            self.box = tuple(box[: self.cut_along] + box[self.cut_along + (blocks == 1) :])

    def problem_with(self, param: Any) -> str | None:
        """See `Form`."""
        place, numel = self.placements[0], math.prod(length for _, length, _ in self.box)
        blocks = getattr(place, "split_factor", 1) * self.mesh.size()
        is_known = self.cut_along is not None or type(place).__name__ == "Replicate"
        is_even = blocks == self.mesh.size() or self._shape[self.cut_along] % blocks == 0
        if not is_known or not is_even or param.to_local().numel() != (numel if self.box else self.numel(param)):
            return f"is a DTensor with {place}: wanted Shard, a strided Shard of equal parts, or Replicate"
        return None

    def numel(self, param: torch.Tensor) -> int:
        """See `Form`."""
        return math.prod(self._shape)

    def shape(self, param: torch.Tensor) -> tuple[int, ...]:
        """See `Form`."""
        return tuple(self._shape)

    def memory(self, param: Any) -> torch.Tensor:
        """See `Form`."""
        return cast(torch.Tensor, param.to_local()) if isinstance(param, self.kind) else param

    def unsharded(self, memory: torch.Tensor) -> torch.Tensor:
        """See `Form`."""
        given = {"run_check": False, "shape": self._shape, "stride": self._stride}  # a check is collective
        with torch.no_grad():
            # Without a graph: modules compute with a leaf of autograd.
            whole: Any = self.kind.from_local(memory, self.mesh, self.placements, **given)
        whole._is_param = True  # for isinstance(whole, nn.Parameter)
        return cast(torch.Tensor, whole.requires_grad_())

    def local_grad(self, grad: Any) -> torch.Tensor:
        """See `Form`. Collective if the gradient is a sum over ranks, as of a norm in sequence parallelism."""
        if grad.placements != self.placements:
            grad = grad.redistribute(placements=self.placements)
        return cast(torch.Tensor, grad.to_local())

    def whole(self, memory: torch.Tensor) -> torch.Tensor:
        """See `Form`. By hand: `full_tensor` of torch 2.11 refuses strided parts."""
        if not self.box:
            return memory
        ranks, lengths = self.mesh.size(), [length for _, length, _ in self.box]
        at = cast(int, self.cut_along) + len(self.box) - len(self._shape)  # behind the number of blocks
        own, size = lengths[at], self.box[at][2]
        lengths[at] = -(-size // ranks)  # the last ranks may have less
        sent = memory.new_zeros(lengths)
        sent.narrow(at, 0, own).copy_(memory.detach().reshape(sent.narrow(at, 0, own).shape))
        parts = [torch.empty_like(sent) for _ in range(ranks)]
        dist.all_gather(parts, sent, self.mesh.get_group())
        return torch.cat(parts, at).narrow(at, 0, size).reshape(self._shape)

    def facts(self, param: torch.Tensor) -> str:
        """See `Form`."""
        return f"{self.placements[0]} over {self.mesh.size()} ranks"


_FORM = "dtensor_form"  # the attribute of a parameter that was a DTensor
_ABOUT_LOWERED = frozenset(("__hash__", "__repr__", "dtype", "device", "is_leaf", "requires_grad", "shape", "size"))


class _Lowered(torch.Tensor):
    """A DTensor in whose place a model has a plain Parameter. Its values are not those of the model any more.

    Attributes:
        lowered: the name of the parameter.
        successor: the Parameter in its place.
    """

    __slots__ = ()
    lowered: str
    successor: nn.Parameter

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        # An attribute comes as the `__get__` of its descriptor, which has the name.
        name = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else name
        if name not in _ABOUT_LOWERED:
            old = next(each for each in tensors_in((args, kwargs)) if isinstance(each, _Lowered))
            raise ShardingError(
                f"{name} of the DTensor {old.lowered!r}: the sharded model has another Parameter in its place. Take "
                "model.parameters() after StreamShard(model), for optimizers too"
            )
        with AsTensors():
            return func(*args, **(kwargs or {}))


def lower(name: str, param: nn.Parameter) -> nn.Parameter:
    """A plain Parameter in the place of the DTensor `param`: this rank's part. Any other parameter is returned itself.

    A DTensor cannot become a ``ShardedParameter``: its class has another layout in memory. From now on it raises.
    """
    form = form_of(param)
    if not isinstance(form, DTensorForm):
        return param
    plain = nn.Parameter(form.memory(param.detach()), param.requires_grad)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):  # the first pass refuses the former
        setattr(plain, hooks, getattr(param, hooks))
    plain.__dict__.update({**vars(param), _FORM: form})
    plain.__dict__.pop("_is_param")  # torch's mark of Parameters of other classes
    old: Any = param
    old.lowered, old.successor = name, plain
    old._local_tensor = torch.empty(0)  # an optimizer or a list may keep the DTensor
    # Code that has kept it would train nothing.
    old.__class__ = type("DTensor", (_Lowered, form.kind), {"__slots__": ()})
    return plain


def successor(param: nn.Parameter) -> nn.Parameter:
    """The Parameter in whose place `param` was; itself, if it is still there."""
    return param.successor if isinstance(param, _Lowered) else param


_PLAIN, _INTEGERS, _FOUR_BIT = Form(), IntegerForm(), FourBitForm()
_TORCHAO = "torchao.quantization", "torchao.dtypes"  # the modules of quantized tensors; others cast in each forward


def take_form(param: torch.Tensor) -> Form:
    """The form of a parameter that is about to be sharded. Afterwards the parameter does not know it."""
    form = form_of(param)
    vars(param).pop(_FORM, None)
    return form


def form_of(param: torch.Tensor) -> Form:
    """The form of a parameter. Of packed ones only before it is sharded."""
    if (known := vars(param).get(_FORM)) is not None:
        return cast(Form, known)
    if hasattr(param, "placements") and hasattr(param, "device_mesh"):
        return DTensorForm(param)
    if any(kind.__name__ == "Params4bit" for kind in type(param).__mro__):
        return _FOUR_BIT
    is_torchao = type(param).__module__.startswith(_TORCHAO) and hasattr(param, "__tensor_flatten__")
    if is_torchao and not param.requires_grad and (form := TorchaoForm(param)).can_be_cut:
        return form
    is_integer = not param.dtype.is_floating_point and not param.dtype.is_complex and param.dtype is not torch.bool
    return _INTEGERS if type(param) is nn.Parameter and is_integer and not param.requires_grad else _PLAIN
