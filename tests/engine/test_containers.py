"""Tensors in what functions take and return: all are found; only what holds a changed one is another object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamshard.engine.hooks import map_tensors, tensors_in
from tests.reference import case


class Pair(NamedTuple):
    """A tensor and a number."""

    tensor: Any
    number: int


BUILDS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda tensor: tensor,
    "tuple": lambda tensor: (tensor, None),
    "named tuple": lambda tensor: Pair(tensor, 3),
    "dict": lambda tensor: {"number": 3, "tensor": tensor},
    "all of them": lambda tensor: {"outer": [([Pair(tensor, 3)], torch.zeros(2), {1: {2}}, "text")]},
    "torch's": lambda tensor: torch.return_types.max((tensor, torch.zeros(1))),
}


def test_tensors_are_replaced_wherever_they_are() -> None:
    """By an object of the same kind. An object without a changed tensor is passed on as it is, a cache for example."""
    old, new = torch.zeros(1), torch.ones(1)
    for name, build in BUILDS.items():
        with case(name):
            value = build(old)
            changed = map_tensors(value, lambda tensor: new if tensor is old else tensor)
            assert type(changed) is type(value)
            assert any(tensor is new for tensor in tensors_in(changed))
            assert all(tensor is not old for tensor in tensors_in(changed))
            assert len(list(tensors_in(changed))) == len(list(tensors_in(value)))
            assert any(tensor is old for tensor in tensors_in(value))
            assert map_tensors(value, lambda tensor: tensor) is value
