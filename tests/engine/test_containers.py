"""Tensors in what functions take and return: all are found; only what holds a changed one is another object."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from streamshard.engine.hooks import map_tensors, tensors_in


class Pair(NamedTuple):
    """A tensor and a number."""

    tensor: Any
    number: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    """As outputs are in some models."""

    tensor: Any
    number: int = 3


class Output(OrderedDict[str, Any]):
    """A dict of a class of its own, which needs more than items to be made."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what


def _output(tensor: Tensor) -> Output:
    output = Output("logits")
    output["tensor"] = tensor
    return output


BUILDS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda tensor: tensor,
    "list": lambda tensor: [1, tensor],
    "tuple": lambda tensor: (tensor, None),
    "named tuple": lambda tensor: Pair(tensor, 3),
    "dict": lambda tensor: {"number": 3, "tensor": tensor},
    "dataclass": Frozen,
    "dict of a class of its own": _output,
    "all of them": lambda tensor: {"outer": [(Frozen([Pair(tensor, 3)]), _output(torch.zeros(2)))]},
    "torch's": lambda tensor: torch.return_types.max((tensor, torch.zeros(1))),
}


@pytest.mark.parametrize("name", list(BUILDS))
def test_tensors_are_replaced_wherever_they_are(name: str) -> None:
    """By an object of the same kind; what was given is as it was, but for dicts that nobody knows how to make."""
    old, new = torch.zeros(1), torch.ones(1)
    value = BUILDS[name](old)
    changed = map_tensors(value, lambda tensor: new if tensor is old else tensor)
    assert type(changed) is type(value)
    assert any(tensor is new for tensor in tensors_in(changed))
    assert all(tensor is not old for tensor in tensors_in(changed))
    assert len(list(tensors_in(changed))) == len(list(tensors_in(BUILDS[name](old))))
    if name == "dict of a class of its own":
        assert changed is value
        assert changed.what == "logits"
    else:
        assert any(tensor is old for tensor in tensors_in(value))


@pytest.mark.parametrize("name", list(BUILDS))
def test_what_holds_no_changed_tensor_stays_the_object_that_it_is(name: str) -> None:
    """A cache that layers pass on is the cache that the caller looks at."""
    value = BUILDS[name](torch.zeros(1))
    assert map_tensors(value, lambda tensor: tensor) is value


@pytest.mark.parametrize(
    "value", [None, 3, "text", torch.Size([2]), Frozen, {1: {2}}, object()], ids=lambda value: type(value).__name__
)
def test_what_holds_no_tensor_stays_too(value: Any) -> None:
    """Classes, sizes and sets among them."""
    assert map_tensors(value, lambda tensor: torch.ones(1)) is value
    assert not list(tensors_in(value))
