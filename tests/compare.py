"""Tensors of sharded and of plain models, by name and in full shapes, and how far two may differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from streamshard import StreamShard
from streamshard.core.module_state import engine_of as engine_inside
from streamshard.core.params import Param
from streamshard.full import gather_full


@dataclass(frozen=True)
class Tolerance:
    """How far from the reference a tensor may be: `relative` of its largest element, and `absolute`."""

    relative: float = 2e-5
    absolute: float = 2e-7

    def allows(self, found: Tensor, wanted: Tensor) -> bool:
        """Whether every element is close enough; NaN never is."""
        if wanted.numel() == 0:
            return found.numel() == 0
        limit = self.relative * float(wanted.abs().max()) + self.absolute
        return float((found - wanted).abs().max()) <= limit


ROUNDING = Tolerance()
EXACT = Tolerance(relative=0.0, absolute=0.0)
NEAR = Tolerance(1e-4, 1e-5)  # sums in another order, through an optimizer


def piece_of(tensor: Tensor) -> Tensor:
    """The piece alone of a sharded parameter or gradient: its elements on this rank, on the same memory."""
    return tensor.detach().as_subclass(Tensor)


def full_grads(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients by name, full shapes; of a sharded model they are collected from all ranks."""
    if isinstance(model, StreamShard):
        engine, own = engine_inside(model), dict[Param, Tensor]()
        for param in engine.params:
            if (grad := param.sharded.grad) is not None:
                own[param] = grad.clone().as_subclass(Tensor).view(-1)
        with mock.patch.object(Param, "main", property(own.__getitem__)):
            full, failure = gather_full(
                engine, lambda param, whole: whole.to(own[param].dtype, copy=True), {param.sharded for param in own}
            )
        assert failure is None
        names = {name: param for param in engine.params for name in (param.name, *param.aliases)}
        return {name: full.get(names[name]) for name, _ in model.named_parameters(remove_duplicate=False)}
    named = model.named_parameters(remove_duplicate=False)
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in named}


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, full shapes, on every rank, in CPU memory as `full_state_dict`'s."""
    state = model.full_state_dict(rank0_only=False) if isinstance(model, StreamShard) else model.state_dict()
    return {name: value.detach().to("cpu", copy=True) for name, value in parts_of(state).items()}


def difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest difference of two elements with the same place. The names have to be the same."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def assert_same_state(found: Any, wanted: Any) -> None:
    """Compare the full states of two optimizers, to the bit."""
    for number, values in wanted["state"].items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(found["state"][number][key]), torch.as_tensor(value)), (number, key)


def parts_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state`; of a tensor that consists of others, as torchao's, those."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        parts = value.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(value) else ()
        found.update({f"{name}.{part}": getattr(value, part) for part in parts} or {name: value})
    return found


def assert_same(
    found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None], what: str, tolerance: Tolerance = ROUNDING
) -> None:
    """Compare by name: the same names, None in the same places, the same shapes, values within tolerance."""
    wrong = []
    if list(found) != list(wanted):
        wrong.append(f"names {sorted(set(found) ^ set(wanted))} are in one only, or the order differs")
    for name in wanted:
        pair = (found.get(name), wanted[name])
        a, b = (None if t is None else t.as_subclass(Tensor).detach().cpu() for t in pair)  # pieces as such
        if a is None or b is None or a.shape != b.shape:
            if a is not b:
                wrong.append("{}: {}, wanted {}".format(name, *(None if t is None else [*t.shape] for t in (a, b))))
        elif not _has_same_bits(a, b) and not tolerance.allows(a.float(), b.float()):
            off, largest = (float(t.abs().max()) for t in (a.float() - b.float(), b.float()))
            wrong.append(f"{name}: off by {off:.3e}, the largest element is {largest:.6g}")
    if wrong:
        raise AssertionError(f"{what}: {len(wrong)} of {len(wanted)} differ\n  " + "\n  ".join(wrong))


def _has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Packed weights may look like NaN."""
    if one.dtype is not other.dtype or one.layout is not torch.strided:
        return False
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))
