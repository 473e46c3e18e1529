"""Clips gradients by their norm over all ranks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from streamshard.core.engine import Engine
from streamshard.errors import ConfigError
from streamshard.guards.sharded_parameter import grad_of, refuse_unreduced
from streamshard.guards.sharded_tensor import piece_of
from streamshard.norms import global_norm, local_norms


def clip_grads(engine: Engine, params: Collection[nn.Parameter], max_norm: float, norm_type: float) -> torch.Tensor:
    """See `StreamShard.clip_grad_norm_`; `params` are the model's."""
    if not isinstance(max_norm, int | float | torch.Tensor) or not max_norm >= 0.0:  # nan too
        raise ConfigError(f"max_norm={max_norm!r}: wanted a number of at least 0")
    order = float(norm_type)  # it may be the text "inf"
    if not order > 0.0:
        raise ConfigError(f"norm_type={norm_type!r}: wanted a number above 0, or inf")
    refuse_unreduced(params, "clip_grad_norm_")
    # A piece's own `numel` is the full gradient's.
    filled = [param for param in params if param.grad is not None and param.grad.as_subclass(torch.Tensor).numel()]
    host = engine.host
    # A rank without elements takes part too: the norm is a collective.
    norms: Sequence[torch.Tensor] = [torch.zeros((), dtype=torch.float64, device=engine.streams.device)]
    # Copies on several ranks count once; all of them are multiplied.
    if counted := [param for param in filled if (piece := piece_of(param)) is None or piece.counts]:
        grads = [*map(grad_of, counted)]
        norms = local_norms(grads, order) if host is None else host.grads.norms(counted, order)
    total = global_norm(torch.linalg.vector_norm(torch.stack(list(norms)), order), order, engine.ranks)
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch's own function
    if filled and host is not None:
        host.grads.multiply(filled, factor)
    elif filled:
        torch._foreach_mul_([*map(grad_of, filled)], factor)
    return total
