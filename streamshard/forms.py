"""Forms: parameters whose memory does not hold numbers of their dtype. StreamShard moves their bytes as they are.

A `Form` is what a parameter is to its module. Planning, slots, transports and checkpoints see the parameter's plain
memory. Every parameter has a form; a plain one has `PlainForm`, so that no code asks whether there is one.

bitsandbytes and torchao are not imported here: their parameters tell what they are.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import torch
from torch import nn


class Form:
    """What a parameter is to its module.

    Attributes:
        is_packed: the bytes are never cast, have no gradient, and never train.
        part: the parameter's attribute that is its memory; empty: the parameter itself is.
    """

    is_packed = False
    part = ""

    def problem_with(self, param: nn.Parameter) -> str | None:
        """Why `param` cannot be sharded, in words that follow its name; None: it can."""
        return None

    def numel(self, param: torch.Tensor) -> int:
        """How many of the model's own parameters `param`, which is not sharded yet, holds."""
        return param.numel()

    def memory(self, param: torch.Tensor) -> torch.Tensor:
        """The plain tensor that ranks cut, before and after sharding."""
        return param

    def around(self, memory: torch.Tensor) -> torch.Tensor:
        """What the module computes with, in `memory`, the whole parameter's. No copy."""
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


class PlainForm(Form):
    """Numbers: the parameter is cast to the compute dtype, and may train."""


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
        self.part = max(names, key=lambda name: self._parts[name].nbytes)
        are_plain = all(type(each) is torch.Tensor and each.is_contiguous() for each in self._parts.values())
        self.can_be_cut = are_plain and self.part in vars(param)
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
        context = str(self._context).replace(repr(param.device), "")
        return f"{self._kind.__name__} {self.part} {tuple(self._size)} {self._dtype} {context}"

    def move(self, param: torch.Tensor, device: torch.device) -> None:
        """See `Form`."""
        for name, tensor in self._parts.items():
            setattr(param, name, tensor.to(device))


_PLAIN, _INTEGERS, _FOUR_BIT = PlainForm(), IntegerForm(), FourBitForm()
_TORCHAO = "torchao.quantization", "torchao.dtypes"  # the modules of quantized tensors; others cast in each forward


def form_of(param: torch.Tensor) -> Form:
    """The form of a parameter, before it is sharded."""
    if any(kind.__name__ == "Params4bit" for kind in type(param).__mro__):
        return _FOUR_BIT
    is_torchao = type(param).__module__.startswith(_TORCHAO) and hasattr(param, "__tensor_flatten__")
    if is_torchao and not param.requires_grad and (form := TorchaoForm(param)).can_be_cut:
        return form
    is_integer = not param.dtype.is_floating_point and not param.dtype.is_complex and param.dtype is not torch.bool
    return _INTEGERS if type(param) is nn.Parameter and is_integer and not param.requires_grad else _PLAIN
