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
        on_host: dict[torch.Tensor, torch.Tensor] = {}  # most parameters have one factor: the host waits for it once
        for param, factors in pending.items():
            for factor in factors:
                if factor not in on_host:
                    on_host[factor] = factor.to(param.main_grad.device)
                param.main_grad.mul_(on_host[factor])

    @property
    def multiplied(self) -> Set[Param]:
        """Parameters whose main grads in memory are still to be multiplied."""
        return self._factors.keys()

    def factors_of(self, param: Param) -> Sequence[torch.Tensor]:
        """The factors by which the main grads in memory are still to be multiplied."""
        return tuple(self._factors.get(param, ()))

    # -- clipping -------------------------------------------------------------------------------------------------

    def _owner_of(self, grad: Any) -> Param | None:
        """The parameter whose main grads `grad` is; None: they are on the device, or the user has replaced `grad`."""
        param = self._by_name.get(grad.piece.name)
        return param if param is not None and param.is_given(grad) else None

    def norms(self, params: Iterable[nn.Parameter], order: float) -> list[torch.Tensor]:
        """[] fp64 on the device, the norm of this rank's part of each gradient, wherever it lies."""
        norms: list[torch.Tensor] = []
        for param in params:
            grad: Any = param.grad
            owner = self._owner_of(grad)
            # Reductions take 2-norms, and factors come later.
            if owner is not None and order == 2.0 and owner in self._normed and owner not in self._factors:
                norms.append(self._norm_of[owner])
            else:
                grad.piece.settle()
                norms += local_norms([grad_of(param).to(self._device)], order)
        return norms

    def multiply(self, params: Iterable[nn.Parameter], factor: torch.Tensor) -> None:
        """Multiply gradients by `factor` [], on the device. Main grads in host memory are multiplied when next read."""
        for param in params:
            grad: Any = param.grad
            owner = self._owner_of(grad)
            if owner is not None:
                self._factors.setdefault(owner, []).append(factor)
            else:
                grad.piece.settle()
                grad_of(param).mul_(factor.to(grad.device))


def cut(buffer: torch.Tensor, places: Iterable[tuple[int, int]]) -> Sequence[torch.Tensor]:
    """Views of `buffer`, in the order of its memory, each from a begin on and of a length. One operator."""
    sizes, end = [], 0
    for begin, numel in places:
        sizes += [begin - end, numel]
        end = begin + numel
    return buffer.split_with_sizes([*sizes, buffer.numel() - end])[1::2]
