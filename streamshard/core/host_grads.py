"""Norms and factors of main grads in host memory (``offload="state"``), so that clipping waits for no copy.

Norms are taken on the device, before a reduction's result is stored. A factor is applied when the gradient is stepped,
on the device, or read, on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import nn

from streamshard.core.params import FlatParam, Param
from streamshard.guards.sharded_parameter import grad_of
from streamshard.norms import local_norms


class HostGrads:
    """Norms of main grads, and factors that are due, known without a look at main grads. Owns no memory.

    Args:
        device: the accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._by_name: dict[str, Param] = {}
        self._norm_of: dict[Param, torch.Tensor] = {}  # [] fp64, of main grads as the last reduction has left them
        self._normed: set[Param] = set()  # nobody can have read or written their main grads since
        self._factors: dict[Param, list[torch.Tensor]] = {}  # that nobody has applied

    def add(self, param: Param, norm: torch.Tensor | None) -> None:
        """Know `param` of the model. Its norms are kept in `norm` [] fp64; None: it is frozen."""
        self._by_name[param.name] = param
        if norm is not None:
            self._norm_of[param] = norm

    # -- reductions -----------------------------------------------------------------------------------------------

    def take_norms(self, flats: Iterable[tuple[FlatParam, torch.Tensor]]) -> None:
        """Take the norms of reduced gradients, by flat parameter. Comm stream."""
        pieces: list[torch.Tensor] = []
        norms: list[torch.Tensor] = []
        for flat, result in flats:
            params = [param for param in flat.params if param.local.numel]
            pieces += cut(result, [(param.local.shard_offset, param.local.numel) for param in params])
            norms += [self._norm_of[param] for param in params]
        if pieces:
            torch._foreach_copy_(norms, torch._foreach_norm(pieces, 2.0, torch.float64))  # as in `local_norms`

    def replace(self, params: Iterable[Param]) -> None:
        """The main grads of `params` are about to be those whose norms were taken."""
        for param in params:
            self._factors.pop(param, None)  # of earlier gradients
            if param.has_room:
                self._normed.add(param)

    def settle(self) -> None:
        """Apply all factors. The host is about to use main grads, and has waited for copies."""
        self._normed.clear()  # not all writes show in version counters: a loss scaler's on the CPU does not
        pending, self._factors = self._factors, {}
        for param, factors in pending.items():
            for factor in factors:
                param.main_grad.mul_(factor.to(param.main_grad.device))

    @property
    def multiplied(self) -> Set[Param]:
        """Parameters whose main grads in memory are still to be multiplied."""
        return self._factors.keys()

    def factors_of(self, param: Param) -> Sequence[torch.Tensor]:
        """The factors by which the main grads in memory are still to be multiplied."""
        return tuple(self._factors.get(param, ()))

    # -- clipping -------------------------------------------------------------------------------------------------

    def is_given(self, grad: Any) -> bool:
        """Whether `grad`, a gradient of this model, lies in the main grads."""
        return self._owner_of(grad) is not None

    def _owner_of(self, grad: Any) -> Param | None:
        param = self._by_name.get(grad.piece.name)
        return param if param is not None and param.is_given(grad) else None

    def norm_of(self, grad: Any) -> torch.Tensor | None:
        """[] fp64 on the device, the norm of this rank's part of `grad`; None: unknown without a wait."""
        param = self._owner_of(grad)
        if param is None or param not in self._normed or param in self._factors:
            return None
        return self._norm_of[param].clone()

    def multiply(self, grads: Iterable[Any], factor: torch.Tensor) -> None:
        """Multiply gradients, which lie in the main grads, by `factor` [] when they are read or used next."""
        factor = factor.clone()  # the user may change it
        for param in filter(None, map(self._owner_of, grads)):
            self._factors.setdefault(param, []).append(factor)

    def norms(self, params: Iterable[nn.Parameter], order: float) -> list[torch.Tensor]:
        """[] fp64 on the device, the norm of this rank's part of each gradient, wherever it lies."""
        norms: list[torch.Tensor] = []
        for param in params:
            grad: Any = param.grad
            norm = self.norm_of(grad) if order == 2.0 else None
            if norm is None:
                grad.piece.settle()
                norms += local_norms([grad_of(param).to(self._device)], order)
            else:
                norms.append(norm)
        return norms

    def multiply_all(self, params: Iterable[nn.Parameter], factor: torch.Tensor) -> None:
        """Multiply gradients by `factor` [] on the device: now, or, of main grads in host memory, see `multiply`."""
        late = []
        for param in params:
            grad: Any = param.grad
            if self.is_given(grad):
                late.append(grad)
            else:
                grad.piece.settle()
                grad_of(param).mul_(factor.to(grad.device))
        self.multiply(late, factor)


def cut(buffer: torch.Tensor, places: Iterable[tuple[int, int]]) -> Sequence[torch.Tensor]:
    """Views of `buffer`, in the order of its memory, each from a begin on and of a length. One operator."""
    sizes, end = [], 0
    for begin, numel in places:
        sizes += [begin - end, numel]
        end = begin + numel
    return buffer.split_with_sizes([*sizes, buffer.numel() - end])[1::2]
