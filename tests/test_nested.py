"""Nested values keep their classes, attributes and other items, and nothing is written into the caller's objects."""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutputWithPast

from streamshard.errors import ShardingError
from streamshard.nested import cast, map_tensors, moved, tensors_in

BF16 = torch.bfloat16


@dataclasses.dataclass
class _Plain:
    x: Tensor
    other: object = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Frozen:
    x: Tensor
    other: object = None


@dataclasses.dataclass
class _Derived:
    given: dataclasses.InitVar[Tensor]
    x: Tensor = dataclasses.field(init=False)
    other: object = None

    def __post_init__(self, given: Tensor) -> None:
        self.x = given


class _Row(NamedTuple):
    x: Tensor
    other: object = None


class _Tagged(tuple[Tensor, ...]):
    tag: str

    def __new__(cls, tag: str, *items: Tensor) -> _Tagged:
        new = super().__new__(cls, items)
        new.tag = tag
        return new


class _Attributes(dict[str, Any]):
    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


_CONTAINERS: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda x: [x, None],
    "tuple": lambda x: (x, "text"),
    "dict": lambda x: {"x": x, "other": 1},
    "defaultdict": lambda x: defaultdict(list, x=x),
    "transformers' batch, a UserDict": lambda x: BatchEncoding({"x": x, "input_ids": torch.zeros(2, dtype=torch.long)}),
    "transformers' output, an OrderedDict": lambda x: CausalLMOutputWithPast(logits=x),
    "dict with attributes": lambda x: _Attributes(x=x, other=1),
    "subclass of tuple": lambda x: _Tagged("tag", x),
    "namedtuple": _Row,
    "torch.return_types": lambda x: x.max(0),
    "packed sequence": lambda x: pack_padded_sequence(x, torch.tensor([2, 1])),
    "dataclass": _Plain,
    "frozen dataclass with slots": _Frozen,
    "dataclass with a field that is no argument": _Derived,
    "nested, twice the same": lambda x: ({"a": [_Plain(x), 1]}, x),
}


@pytest.mark.parametrize("kind", _CONTAINERS)
def test_a_cast_container_is_a_new_object_of_its_class(kind: str) -> None:
    given = _CONTAINERS[kind](torch.full((2, 2), 1.001))
    before, attributes = tensors_in(given), dict(getattr(given, "__dict__", {}))
    result = cast(given, BF16)
    assert type(result) is type(given) and result is not given
    assert {t.dtype for t in before if t.is_floating_point()} == {torch.float32}
    assert {t.dtype for t in tensors_in(result) if t.is_floating_point()} == {BF16}
    assert all(now is was for now, was in zip(tensors_in(result), before, strict=True) if now.dtype is not BF16)
    assert len({*map(id, tensors_in(result))}) == len({*map(id, before)})
    for key, value in result.items() if hasattr(result, "items") else ():
        assert getattr(result, key, value) is value
    for now, was in zip(tensors_in(given), before, strict=True):
        assert now is was, "the caller's object was changed"
    assert getattr(result, "tag", None) == getattr(given, "tag", None)
    assert getattr(result, "default_factory", None) is getattr(given, "default_factory", None)
    assert getattr(given, "__dict__", {}).keys() == attributes.keys()
    assert cast(result, BF16) is result, "nothing to change, and yet a copy"


def test_modules_and_other_objects_are_left_alone() -> None:
    """Their attributes are found on request, such as the features of spconv's sparse tensors."""

    class Sparse:
        def __init__(self) -> None:
            self.features = torch.ones(2)

    @dataclasses.dataclass(eq=False)
    class Module(nn.Module):
        scale: Tensor

        def __post_init__(self) -> None:
            super().__init__()

    sparse, linear = Sparse(), nn.Linear(2, 2)
    for value in (sparse, linear, Module(torch.ones(2)), _Plain, copy, 1.5, "text", torch.Size([1, 2]), {1, 2}):
        assert tensors_in(value) == []
        assert map_tensors([value], torch.clone)[0] is value
    assert tensors_in([sparse, linear], depth=3) == [sparse.features]


@pytest.mark.parametrize("search", [tensors_in, lambda value: cast(value, BF16)])
def test_a_container_that_contains_itself_is_refused(search: Callable[[Any], object]) -> None:
    """Such as a tree whose nodes know their parents."""
    child = _Plain(torch.ones(2))
    child.other = [_Plain(torch.ones(2), child)]
    with pytest.raises(ShardingError, match="contains itself, such as a tree whose nodes know their parents"):
        search(child)


@pytest.mark.parametrize("has_another", [False, True])
def test_values_move_to_a_device_if_none_is_there(has_another: bool) -> None:
    device = torch.device("meta")
    given: Any = {"x": [torch.ones(2), 3], "row": _Row(torch.ones(3), "other")}
    if has_another:
        given["there"] = torch.ones(1, device=device)
    found = moved(given, device)
    assert (found is given) == has_another
    assert has_another or [each.device for each in tensors_in(found)] == [device, device]
    assert [each.device.type for each in tensors_in(given["x"])] == ["cpu"]
