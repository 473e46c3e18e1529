"""What ``.grad`` gives while a gradient waits in its slot for a later backward: it can be dropped, nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch

from streamshard.errors import ShardingError

__all__ = ["UnreducedGrad", "flat"]


class UnreducedGrad(torch.Tensor):
    """``.grad`` inside ``no_sync()`` with ``grad_slots="all"``. It has no values: everything that reads it raises.

    It is not None, as FSDP2 has it, because ``Optimizer.zero_grad()`` passes over None, and so do norms and scalers: a
    micro-batch that was dropped would be stepped with.
    """

    param_name: str

    @classmethod
    def of(cls, param_name: str) -> UnreducedGrad:
        """That of parameter `param_name`."""
        grad = torch.empty(0).as_subclass(cls)
        grad.param_name = param_name
        return grad

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> NoReturn:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__"):  # of an attribute
            name = getattr(getattr(func, "__self__", None), "__name__", name)
        next(each for each in flat((*args, *(kwargs or {}).values())) if isinstance(each, cls)).refuse(name)

    def refuse(self, what: str) -> NoReturn:
        """Raise: `what` needs a gradient that all ranks have reduced."""
        raise ShardingError(
            f"{what}: the gradient of {self.param_name!r} was accumulated inside no_sync() and has not been reduced "
            "over ranks. Run the last backward outside of no_sync() before you step, clip or read gradients; "
            "zero_grad(set_to_none=True) drops what was accumulated"
        )


def flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from flat(value)
        else:
            yield value
