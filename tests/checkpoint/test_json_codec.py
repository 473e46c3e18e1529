"""State of users' objects comes back as it was, and what cannot is refused by its path."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamshard.checkpoint.json_codec import check_tree, decode, encode
from streamshard.errors import CheckpointError

CPU = torch.device("cpu")


def there_and_back(value: Any) -> Any:
    """Through the text of JSON, as in a file."""
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, "value", tensors), allow_nan=False)
    return decode(json.loads(text), lambda name: tensors[name].clone(), CPU)


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.sampled_from([torch.float32, torch.device("cpu")])
)
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.just("$"), inner)
        | st.dictionaries(st.integers() | st.tuples(st.integers(), st.text()), inner)
        | st.dictionaries(st.text(), inner).map(OrderedDict)
        | st.sets(st.integers())
        | st.dictionaries(st.integers(), st.integers()).map(Counter)
    ),
    max_leaves=12,
)


@given(NESTED)
def test_nested_values_come_back_with_their_types(value: Any) -> None:
    """Equal, and of the same types throughout."""
    found = there_and_back(value)
    assert found == value
    assert _typed(found) == _typed(value)  # == does not tell 1 from True, nor the types of items


def _typed(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [(_typed(key), _typed(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [_typed(each) for each in value]
    return type(value), repr(sorted(value)) if isinstance(value, set) else value


def test_numbers_that_are_not_finite_come_back() -> None:
    """JSON has none."""
    found = there_and_back([math.inf, -math.inf, math.nan, -0.0])
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])
    assert math.copysign(1.0, found[3]) == -1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Values, shape and dtype, of transposed ones too."""
    value = torch.randn(shape).mul(3).to(dtype)
    for each in (value, value.mT if value.ndim == 2 else value):
        found = there_and_back({"a": (each,)})["a"][0]
        assert found.dtype == dtype
        assert found.shape == each.shape
        assert torch.equal(found, each)


def test_numbers_in_tensors_that_are_not_finite_come_back() -> None:
    """A scaler's scale may be."""
    assert there_and_back(torch.tensor(math.inf)) == math.inf
    assert torch.isnan(there_and_back(torch.tensor(math.nan)))


def test_arrays_and_numbers_of_numpy_come_back() -> None:
    """Arrays as arrays, numbers as Python's."""
    found = there_and_back({"a": numpy.arange(6).reshape(2, 3), "n": numpy.int64(3), "f": numpy.float32(0.5)})
    assert isinstance(found["a"], numpy.ndarray)
    assert (found["a"] == numpy.arange(6).reshape(2, 3)).all()
    assert (found["n"], found["f"]) == (3, 0.5)


def test_tensors_whose_paths_are_alike_stay_apart() -> None:
    """The path of an item and that of a key that looks like it."""
    value = {"a": {"b": torch.tensor([1.0])}, "a.b": torch.tensor([2.0])}
    found = there_and_back(value)
    assert found["a"]["b"] == 1.0
    assert found["a.b"] == 2.0


class Unknown:
    """Nobody knows how to save this."""


@pytest.mark.parametrize(
    "value",
    [
        Unknown(),
        print,
        torch.nn.Linear(1, 1),
        1j,
        numpy.arange(3).astype(numpy.dtype("int64").newbyteorder()),  # of another machine's byte order
        torch.sparse_coo_tensor(torch.tensor([[0]]), torch.tensor([1.0]), (2,), check_invariants=True),
        torch.empty(2, device="meta"),
        type("Row", (tuple,), {})((1, 2)),
    ],
)
def test_what_would_need_code_is_refused_by_its_path(value: Any) -> None:
    """Early, and by name."""
    with pytest.raises(CheckpointError, match=r"extra\.loader\.state\[1\] is"):
        encode({"state": [0, value]}, "extra.loader", {})


def test_what_contains_itself_is_refused_by_its_path() -> None:
    """Wherever the way back begins; what is there twice is no way back."""
    ring: dict[str, Any] = {"next": [0]}
    ring["next"].append((ring,))
    with pytest.raises(CheckpointError, match=r"extra\.ring\.next\[1\]\[0\] is extra\.ring again"):
        encode({"ring": ring}, "extra", {})
    keyed: dict[Any, Any] = {}
    keyed[1] = keyed
    with pytest.raises(CheckpointError, match=r"extra\[1\] is extra again"):
        encode(keyed, "extra", {})
    twice = [1]
    assert there_and_back([twice, {"a": twice}, twice]) == [[1], {"a": [1]}, [1]]


def test_what_is_nested_too_deeply_is_refused_when_it_is_saved() -> None:
    """It could not be read back; what is accepted can be, of whatever kind it is."""
    for wrap in (lambda value: [value], lambda value: (value,), lambda value: {1: value}, lambda value: {"a": value}):
        value: Any = 0
        for _ in range(64):
            value = wrap(value)
        encoded = encode(value, "extra.deep", {})
        check_tree(encoded, ())
        assert decode(encoded, {}.__getitem__, CPU) == value
        with pytest.raises(CheckpointError, match="extra.deep.* is nested in 64 containers"):
            encode(wrap(value), "extra.deep", {})


@pytest.mark.parametrize(
    "saved",
    [
        {"$": "dtype", "value": "load"},
        {"$": "dtype", "value": ["load"]},
        {"$": "device", "value": "nowhere"},
        {"$": "number", "dtype": "load", "value": 1},
        {"$": "number", "dtype": "uint8", "value": 300},
        {"$": "float", "value": "high"},
        {"$": "tensor", "tensor": "missing"},
        {"$": "tuple"},
        {"$": "set", "items": [[1]]},
        {"$": "dict", "items": [1]},
        {"$": "module", "items": []},
        {"$": ["dict"], "items": []},
    ],
)
def test_what_encode_does_not_give_is_refused(saved: Any) -> None:
    """By an error of this package; nothing of torch is looked up that is no dtype."""
    with pytest.raises(CheckpointError):
        decode([saved], {}.__getitem__, CPU)
