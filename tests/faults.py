"""Errors that tests raise in models, and the names of their cases."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import Tensor, nn


@contextlib.contextmanager
def case(name: object) -> Iterator[None]:
    """Add the name of a table's entry to an error that is raised inside."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"case {name!r}: {error}") from error


class Trouble(Exception):
    """What tests raise."""


class Stop(BaseException):
    """Something like KeyboardInterrupt."""


@contextlib.contextmanager
def failing(module: Any, error: type[BaseException] = Trouble, *, backward: bool = True) -> Iterator[None]:
    """Raise `error` when a backward comes to the output of `module`, or else before the forward of `module`."""

    def fail(*_: Any) -> NoReturn:
        raise error

    def watch(module: nn.Module, args: Any, out: Tensor) -> None:
        out.register_hook(fail)

    hook = module.register_forward_hook(watch) if backward else module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def let_dynamo_look() -> None:
    """Dynamo looks at `.grad` of every tensor it meets and hides the warning, but only where warnings are no errors."""
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
