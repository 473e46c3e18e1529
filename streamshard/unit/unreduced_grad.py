"""What stands for a gradient that has not been reduced yet."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch

from streamshard.errors import ShardingError
from streamshard.unit.op_kinds import OpKind, kind_of

__all__ = ["UnreducedGrad", "flat"]

# What Optimizer.zero_grad and printing ask.
_QUESTIONS = ("__get__", "requires_grad_", "detach_", "data_ptr", "is_floating_point")


class UnreducedGrad(torch.Tensor):
    """Stands for a gradient that waits in a grad slot for its reduction: ``grad_slots="all"`` inside ``no_sync()``.

    Clearing it or setting it to zero forgets the gradient. Its values are nobody's yet: looking at them raises.

    Attributes:
        on_zero: what ``zero_()`` does.
    """

    on_zero: Callable[[], None]
    param_name: str
    whole: torch.Tensor

    @classmethod
    def wrap(cls, piece: torch.Tensor, name: str, whole: torch.Tensor) -> UnreducedGrad:
        """A stand-in of the shape of `piece`, for messages that of parameter `name`, of the form of `whole`."""
        with torch._C.DisableTorchFunctionSubclass():
            stand_in = piece.detach().as_subclass(cls)
        stand_in.param_name, stand_in.whole = name, whole
        return stand_in

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What ``zero_grad`` does, and questions about shape, dtype and device; anything else raises."""
        name = getattr(func, "__name__", "")
        if name in ("zero_", "_foreach_zero_"):
            for grad in args[0] if name == "_foreach_zero_" else args[:1]:
                if isinstance(grad, cls):
                    grad.on_zero()
                else:
                    grad.zero_()
            return args[0]
        if kind_of(func) is OpKind.FORM:
            return func(args[0].whole, *args[1:], **(kwargs or {}))
        if name in _QUESTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        next(arg for arg in flat(args) if isinstance(arg, cls)).refuse(name or str(func))

    def refuse(self, what: str) -> NoReturn:
        """Raise: `what` cannot be done with it."""
        raise ShardingError(
            f"{what}: the gradient of {self.param_name!r} was accumulated inside no_sync() and has not been reduced "
            "over ranks: run the last backward outside of it before using gradients"
        )


def flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from flat(value)
        else:
            yield value
