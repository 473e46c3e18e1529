"""Read a pickle as data. Nothing that a pickle names is imported, called or changed, so anybody may have made it.

Python's and torch's unpicklers find a class or function for each name in a pickle, call it, and set attributes of the
results. `read_pickle` only records the name, the arguments and the state. Its time and memory are in proportion to the
bytes that it reads.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

from streamshard.checkpoint.json_codec import dtype_named
from streamshard.errors import CheckpointError

# Pickles of Python's pickle module nest a few containers, and put at most 2,000 entries on the stack for each.
_MAX_STACK = 10_000
# A few bytes of a pickle can stand for a list of lists of lists with the same elements, and so for any number of them.
_MAX_VALUES = 1_000_000

_LITERALS = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE")
_CONSTANTS: dict[str, Callable[[], Any]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Named(NamedTuple):
    """A class or function that a pickle names."""

    module: str
    name: str


@dataclass(eq=False)
class Made:
    """An object that unpickling would make.

    Attributes:
        by: the class or function; None: the program that unpickles, from `arguments` (a persistent id).
        arguments: of the call.
        state: attributes that the object would get.
    """

    by: Any
    arguments: Any
    state: Any = None


def read_pickle(file: BinaryIO) -> Any:
    """The content of a pickle: None, numbers, strings, lists, tuples, dicts, `Named` and `Made`.

    Keys of dicts are strings and `Made`: numbers can be chosen so that a dict of them takes quadratic time.

    Args:
        file: at the pickle's first byte. Nothing is read after its last one.

    Raises:
        CheckpointError: the pickle uses an instruction that DCP's files do not need, or too large a stack.
        ValueError, LookupError, TypeError: the pickle is malformed.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}

    def take(number: int) -> list[Any]:
        """The last entries."""
        if number > len(stack):
            raise IndexError("the stack is empty")
        taken = stack[len(stack) - number :]
        del stack[len(stack) - number :]
        return taken

    value: Any
    for instruction, value, _ in pickletools.genops(file):
        name = instruction.name
        if name == "STOP":
            return stack.pop()
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[value])
        elif name in _LITERALS:
            stack.append(value)
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            memo[len(memo) if value is None else value] = stack[-1]
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name]())
        elif name in _TUPLES:
            stack.append(tuple(take(_TUPLES[name])))
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "TUPLE":
            stack.append(tuple(take(len(stack) - marks.pop())))
        elif name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "BUILD"):
            many = {"APPEND": 1, "SETITEM": 2, "BUILD": 1}
            items = take(many[name] if name in many else len(stack) - marks.pop())
            _fill(stack[-1], name, items)
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            stack.append(_named(*(value.split(" ", 1) if name == "GLOBAL" else take(2))))
        elif name in ("REDUCE", "NEWOBJ"):
            stack.append(_made(*take(2)))
        elif name == "BINPERSID":
            stack.append(Made(None, stack.pop()))
        elif name not in ("PROTO", "FRAME"):
            raise CheckpointError(f"it has the instruction {name}, which DCP's files do not need")
        if len(stack) + len(marks) > _MAX_STACK:
            raise CheckpointError(f"it puts more than {_MAX_STACK:,} entries on the stack, as DCP's files do not")


def _fill(target: Any, how: str, items: list[Any]) -> None:
    """Add items to a list or dict, or give an object its state."""
    if how.startswith("APPEND") and type(target) is list:
        target += items
    elif how.startswith("SETITEM") and type(target) is dict:
        if not all(isinstance(key, str | Made) for key in items[::2]):
            raise CheckpointError("it has a dict with keys that are neither strings nor records")
        target.update(zip(items[::2], items[1::2], strict=True))
    elif how == "BUILD" and isinstance(target, Made) and target.state is None:
        target.state = items[0]
    else:
        raise CheckpointError(f"it applies the instruction {how} to {_kind_of(target)}")


def _named(module: Any, name: Any) -> Named:
    if not isinstance(module, str) or not isinstance(name, str):
        raise CheckpointError("it has something else in the place of a name")
    return Named(module, name)


def _made(by: Any, arguments: Any) -> Any:
    """The object that a call would return. Sizes are tuples here, and ordered dicts are dicts."""
    if by == ("torch", "Size"):
        (size,) = arguments
        return size
    return {} if by == ("collections", "OrderedDict") and arguments == () else Made(by, arguments)


def plain_value(found: Any) -> Any:
    """The value that `read_pickle` has found, if it consists of numbers, strings, lists, tuples, dicts and dtypes.

    Raises:
        CheckpointError: names the kind of another value, or there are more than a million values.
        RecursionError: the value contains itself.
    """
    count = 0

    def copy(each: Any) -> Any:
        nonlocal count
        count += 1
        if count > _MAX_VALUES:
            raise CheckpointError(f"it stands for more than {_MAX_VALUES:,} values")
        if each is None or isinstance(each, bool | int | float | str):
            return each
        if type(each) in (list, tuple):
            return type(each)(map(copy, each))
        if type(each) is dict and all(isinstance(key, str) for key in each):
            return {key: copy(item) for key, item in each.items()}
        if isinstance(each, Named) and each.module == "torch":
            return dtype_named(each.name)
        raise CheckpointError(
            f"it holds {_kind_of(each)}; StreamShard reads numbers, strings, lists, tuples, dicts and dtypes only"
        )

    return copy(found)


def _kind_of(found: Any) -> str:
    named = found.by if isinstance(found, Made) else found
    if isinstance(named, Named):
        return f"{f'{named.module}.{named.name}':.80}"
    return f"a {type(found).__name__}"
