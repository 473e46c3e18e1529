"""Forms: parameters whose memory does not hold numbers of their dtype. StreamShard moves their bytes as they are.

A `Form` is what a parameter is to its module. Planning, slots, transports and checkpoints see the parameter's plain
memory. Every parameter has a form; a plain one has `PlainForm`, so that no code asks whether there is one.

bitsandbytes is not imported here: its parameters tell what they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class Form:
    """What a parameter is to its module.

    Attributes:
        is_packed: the bytes are never cast, have no gradient, and never train.
    """

    is_packed = False

    def problem_with(self, param: nn.Parameter) -> str | None:
        """Why `param` cannot be sharded, in words that follow its name; None: it can."""
        return None

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
    """A frozen parameter of integers, such as HQQ's packed weights."""

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


_PLAIN, _INTEGERS, _FOUR_BIT = PlainForm(), IntegerForm(), FourBitForm()


def form_of(param: torch.Tensor) -> Form:
    """The form of a parameter, before it is sharded."""
    if any(kind.__name__ == "Params4bit" for kind in type(param).__mro__):
        return _FOUR_BIT
    is_integer = not param.dtype.is_floating_point and not param.dtype.is_complex and param.dtype is not torch.bool
    return _INTEGERS if type(param) is nn.Parameter and is_integer and not param.requires_grad else _PLAIN
