"""States of the user's objects are restored as they were, or refused by their path."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamshard.checkpoint.json_codec import decode, encode
from streamshard.errors import CheckpointError
from tests.faults import case

CPU = torch.device("cpu")


def there_and_back(value: Any) -> Any:
    """Through the text of JSON, as in a file."""
    encoded, tensors = encode(value, "value")
    return decode(json.loads(json.dumps(encoded, allow_nan=False)), lambda name, _: tensors[name].clone(), CPU)


NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just(torch.float32),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.just("$"), inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers(), st.text()), inner)
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
    ),
    max_leaves=12,
)


def _typed(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [(_typed(key), _typed(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [_typed(each) for each in value]
    return type(value)


@given(NESTED)
def test_nested_values_come_back_with_their_types(value: Any) -> None:
    """`==` alone does not tell 1 from True."""
    found = there_and_back(value)
    assert found == value
    assert _typed(found) == _typed(value)


def test_tensors_and_numbers_come_back() -> None:
    for dtype, shape in ((torch.float32, ()), (torch.bfloat16, (0,)), (torch.int64, (2, 3)), (torch.bool, ())):
        tensor = torch.ones(shape, dtype=dtype)
        found = there_and_back({"a": [tensor]})["a"][0]
        assert found.dtype == dtype and torch.equal(found, tensor)
    assert there_and_back(torch.tensor(-math.inf)).item() == -math.inf
    assert there_and_back([numpy.float32(0.5), numpy.int64(3), numpy.bool_(True), math.inf]) == [0.5, 3, True, math.inf]
    assert math.isnan(there_and_back(math.nan))
    alike = there_and_back({"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}})  # a key may have a dot in it
    assert (alike["a.b"].item(), alike["a"]["b"].item()) == (0, 1)
    assert there_and_back(OrderedDict(b=1, a=2)) == {"b": 1, "a": 2}


ARRAYS: dict[str, Any] = {
    **{
        str(dtype): numpy.array([[1, 0, 1]], dtype)
        for dtype in ["?", "b", "h", "i", "l", "B", "H", "I", "L", "e", "f", "d", "F", "D"]
    },
    "state of a generator": numpy.random.get_state()[1],
    "largest number": numpy.array(2**64 - 1, numpy.uint64),
    "one number": numpy.array(0.5, numpy.float16),
    "empty": numpy.zeros((0, 3)),
    "turned": numpy.arange(6).reshape(2, 3).T,
    "backwards": numpy.arange(3)[::-1],
    "read-only": numpy.broadcast_to(numpy.float32(2), (2, 2)),
}


def test_arrays_come_back_as_arrays() -> None:
    """Of every dtype that torch has too, and of any strides; NumPy's numbers come back as Python's."""
    for name, array in ARRAYS.items():
        with case(name):
            found = there_and_back({"a": [array]})["a"][0]
            assert type(found) is numpy.ndarray
            assert (found.dtype, found.shape) == (array.dtype, array.shape)
            assert numpy.array_equal(found, array)
            if array.dtype.kind != "c":
                number = array.reshape(-1)[:1].sum()
                assert type(there_and_back(number)) in (bool, int, float)
                assert there_and_back(number) == number


REFUSED: list[Any] = [
    *(object(), {1, 2}, b"bytes", deque(), torch.ones(2).to_sparse(), torch.empty(2, device="meta"), len),
    *(numpy.ones(2, numpy.longdouble), numpy.longdouble(1), numpy.timedelta64(3, "ns"), numpy.ones(2, ">f4")),
    *(numpy.array(["text"]), numpy.array([{}]), numpy.ma.ones(2), numpy.zeros(2, "i4,f4"), numpy.datetime64("now")),
]


def test_other_values_are_refused_by_their_path() -> None:
    """Some would need code to be read back."""
    for value in REFUSED:
        with case(type(value)), pytest.raises(CheckpointError, match=r"value(\.a)? is"):
            encode({"a": value}, "value")


def test_json_that_encode_does_not_give_is_refused() -> None:
    """A stranger may have written it. `load_checkpoint` turns every error into a CheckpointError."""
    for saved in (
        *({"$": "load"}, {"$": "tuple"}, {"$": "tuple", "items": 3}, {"$": "dict", "items": [[1]]}, {"$": []}),
        *({"$": "dtype", "value": "load"}, {"$": "number", "dtype": "float32", "value": "x"}),
        {"$": "tensor", "tensor": "nothing"},
    ):
        with case(saved), pytest.raises((CheckpointError, LookupError, TypeError, ValueError)):
            decode([saved], lambda name, _: {}[name], CPU)
