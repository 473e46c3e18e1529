"""Averages of weights: `update_parameters` averages a sharded model's pieces and buffers into a second one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_swa_multi_avg_fn

from streamshard.core.module_state import engine_at_rest, not_a_layer
from streamshard.errors import ConfigError, ShardingError
from streamshard.guards.sharded_tensor import piece_of
from streamshard.planning.structure import params_of

_Pair = tuple[torch.Tensor, torch.Tensor]


def update_parameters(
    averaged_model: nn.Module,
    model: nn.Module,
    n_averaged: int,
    *,
    avg_fn: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor] | None = None,
    multi_avg_fn: Callable[[Any, Any, int], object] | None = None,
    use_buffers: bool = False,
) -> None:
    """Average `model` into `averaged_model`, as ``torch.optim.swa_utils.AveragedModel.update_parameters`` does.

    Call it on every rank. Each rank averages its own pieces, and sends nothing if both models are cut at the same
    places: with the same settings, and the same parameters frozen or all of the average's. Integer buffers, such as the
    counter of batch norm, are copied.

    Args:
        averaged_model: made by `StreamShard`, of the model's class. It may be frozen, and its
            state may lie elsewhere (``offload``). The average is computed there.
        model: made by `StreamShard`.
        n_averaged: how many models are in the average so far. With 0 the average becomes a copy of `model`; it may be
            empty before.
        avg_fn: called with an averaged tensor, the model's tensor, and `n_averaged`; returns the new average, such as
            ``torch.optim.swa_utils.get_ema_avg_fn(0.999)``.
        multi_avg_fn: called with a list of averaged tensors, a list of the model's tensors, and `n_averaged`; changes
            the averaged tensors in place, such as ``torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)``. Without
            `avg_fn` and `multi_avg_fn`: the mean of all models.
        use_buffers: average floating-point buffers too. False: copy them.

    Raises:
        ConfigError: `n_averaged` is not a number of models, or both functions are given.
        ShardingError: nothing has changed; names the first parameter or buffer that only one model has, or that has
            another shape, dtype or ranks in the other model.
    """
    if not isinstance(n_averaged, int) or n_averaged < 0:
        raise ConfigError(f"n_averaged={n_averaged!r}: wanted the number of models in the average so far, at least 0")
    if avg_fn is not None and multi_avg_fn is not None:
        raise ConfigError("avg_fn and multi_avg_fn: wanted one of them at most")
    averaged = engine_at_rest(not_a_layer(averaged_model), "update_parameters", accepts_empty=n_averaged == 0)
    engine_at_rest(not_a_layer(model), "update_parameters")
    buffers = _pairs("buffer", dict(averaged_model.named_buffers()), dict(model.named_buffers()))
    params = _pairs("parameter", params_of(averaged_model), params_of(model))
    with torch.no_grad():
        mean = multi_avg_fn or get_swa_multi_avg_fn()
        alike: dict[tuple[torch.dtype, torch.device], list[_Pair]] = {}
        for pairs, is_averaged in ((params, n_averaged > 0), (buffers, n_averaged > 0 and use_buffers)):
            for mine, theirs in pairs:
                if not is_averaged or not mine.is_floating_point():
                    mine.copy_(theirs)
                elif avg_fn is not None:
                    mine.copy_(avg_fn(mine, theirs.to(mine.device), n_averaged))
                elif mine.device != theirs.device:  # ``offload``: one at a time, copies take memory
                    mean([mine], [theirs.to(mine.device)], n_averaged)
                else:
                    alike.setdefault((mine.dtype, mine.device), []).append((mine, theirs))
        for pairs in alike.values():
            mean([mine for mine, _ in pairs], [theirs for _, theirs in pairs], n_averaged)
    averaged.fill(list(averaged.empty))
    averaged.buffers.expect_changes()


def _pairs(kind: str, mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> list[_Pair]:
    """Each tensor of the averaged model with the model's tensor of the same name.

    Raises:
        ShardingError: the models do not fit together. All ranks get the same error.
    """
    if odd := next((name for name in (*mine, *theirs) if name not in mine or name not in theirs), None):
        who = "the model" if odd in theirs else "the averaged model"
        raise ShardingError(f"update_parameters: {who} alone has the {kind} {odd!r}: wanted two models of one class")
    for name, tensor in mine.items():
        other = theirs[name]
        pieces = piece_of(tensor), piece_of(other)
        are_exchanged = pieces[0] is None or pieces[1] is None or pieces[0].can_recut(pieces[1])
        found, wanted = (f"{tuple(each.shape)} {each.dtype}" for each in (tensor, other))
        if found != wanted or not are_exchanged:
            raise ShardingError(
                f"update_parameters: {kind} {name!r} has another shape, dtype or ranks in the averaged model ({found}, "
                f"{pieces[0] or 'whole'}) than in the model ({wanted}, {pieces[1] or 'whole'}): shard two models of "
                "one class on the same ranks"
            )
    return [(tensor.detach(), theirs[name].detach()) for name, tensor in mine.items()]
