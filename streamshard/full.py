"""Whole tensors: parameters for a while, state dicts; and gradients clipped by the norm of the whole.

While ``summon_full_params`` is open the user's Parameters hold whole tensors, each rank's own, and nothing else of the
model's machinery does: a pass would compute with the pieces, an optimizer has moments of pieces. Both raise instead.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from streamshard.comm.objects import raise_if
from streamshard.engine.engine import Engine
from streamshard.errors import ConfigError, ShardingError
from streamshard.plan.structure import leave_inference_mode
from streamshard.unit.global_ops import global_norm
from streamshard.unit.pieces import piece_of
from streamshard.unit.shard import ParamShard
from streamshard.unit.sharded_parameter import be_piece, be_whole, data_of, grad_of, refuse_unreduced
from streamshard.unit.sharded_tensor import ShardedTensor
from streamshard.unit.sharding import Sharding

__all__ = ["clip_grads", "gather_state_dict", "summon"]


@contextlib.contextmanager
def summon(engine: Engine, *, writeback: bool, with_grads: bool) -> Iterator[None]:
    """See `StreamShard.summon_full_params`. Opened inside itself it adds what the outer one lacks, gradients, say.

    Raises:
        ShardingError: at the end, with every piece back in its place: a tensor that was to be written back has another
            shape, or gradients have been made that would be lost.
    """
    outer = _open.get(engine)
    summoned = _Summoned(engine) if outer is None else outer
    brings_grads = with_grads and not summoned.has_grads
    try:
        with leave_inference_mode():
            if outer is None:
                summoned.open()
            if brings_grads:
                summoned.open_grads()
        yield
        with leave_inference_mode():
            summoned.check(writeback)
            if writeback:
                summoned.write_back()
    finally:
        with leave_inference_mode():
            if brings_grads:
                summoned.close_grads()
            if outer is None:
                summoned.close()


class _Sharded(NamedTuple):
    """What a Parameter held before: its piece, and its gradient's."""

    shard: ParamShard
    piece: torch.Tensor
    grad: torch.Tensor | None


class _Summoned:
    """The whole parameters of one engine, while they are open. Owns them, and the hook that refuses optimizers' steps.

    Attributes:
        has_grads: gradients are whole as well.
    """

    def __init__(self, engine: Engine) -> None:
        self.has_grads = False
        self._engine = engine
        self._sharded: list[_Sharded] = []
        self._steps = register_optimizer_step_pre_hook(self._refuse_step)

    def open(self) -> None:
        """Put whole tensors under all parameters. Collective."""
        _open[self._engine] = self
        self._engine.set_whole(True)
        for unit in self._engine.units:
            wholes = unit.gather_whole([shard.main for shard in unit.params])
            for shard, whole in zip(unit.params, wholes, strict=True):
                assert whole is not None
                self._sharded.append(_Sharded(shard, data_of(shard.param), grad_of(shard.param)))
                be_whole(shard.param)
                shard.param.grad = None
                shard.param.data = whole
        self._meet_next_pass()

    def close(self) -> None:
        """Parameters are pieces again."""
        self._steps.remove()
        for shard, piece, grad in self._sharded:
            shard.param.grad = None
            shard.param.data = piece
            shard.param.grad = grad
            be_piece(shard.param, shard.what(self._engine.ranks))
        self._engine.set_whole(False)
        del _open[self._engine]

    def open_grads(self) -> None:
        """Put whole gradients beside the whole parameters. Collective."""
        refuse_unreduced((shard.param for shard, _, _ in self._sharded), "summon_full_params(with_grads=True)")
        for shard, _, _ in self._sharded:
            if shard.param.grad is not None:
                _refuse_grad(shard)
        self.has_grads = True
        grads = {shard.param: grad for shard, _, grad in self._sharded}
        for unit in self._engine.units:
            pieces = [
                None if grad is None else grad.as_subclass(torch.Tensor).view(-1)
                for shard in unit.params
                for grad in (grads[shard.param],)
            ]
            wholes = unit.gather_whole(pieces, torch.float32)
            for shard, whole in zip(unit.params, wholes, strict=True):
                if whole is not None and grads[shard.param] is not None:
                    shard.param.grad = whole.to(shard.param.dtype)

    def close_grads(self) -> None:
        """Whole parameters have no gradients again."""
        self.has_grads = False
        for shard, _, _ in self._sharded:
            shard.param.grad = None

    def check(self, writeback: bool) -> None:
        """Raise if what was done inside would be lost, or cannot be written back."""
        if writeback:
            self._engine.casts.check_structure()
        for shard, _, _ in self._sharded:
            param = shard.param
            if writeback and param.shape != shard.layout.shape:
                raise ShardingError(
                    f"parameter {shard.name!r} was given other data inside summon_full_params(writeback=True): "
                    f"{tuple(param.shape)}, wanted {shard.layout.shape}. No parameter was written back"
                )
            if param.grad is not None and not self.has_grads:
                _refuse_grad(shard)

    def write_back(self) -> None:
        """Take over this rank's pieces of the whole tensors."""
        for index, (shard, piece, grad) in enumerate(self._sharded):
            local = slice(shard.local.start, shard.local.stop)
            piece.view(-1).copy_(shard.param.detach().reshape(-1)[local])
            if not self.has_grads:
                continue
            whole = shard.param.grad
            if whole is None:
                grad = None
            else:
                if grad is None:
                    what = shard.what(self._engine.ranks)
                    grad = ShardedTensor.wrap(torch.empty_like(piece), Sharding.of_piece(what, is_weight=False))
                grad.view(-1).copy_(whole.detach().reshape(-1)[local])
            self._sharded[index] = _Sharded(shard, piece, grad)
        self._meet_next_pass()

    def _meet_next_pass(self) -> None:
        """The next pass looks at the weights, inside ``no_sync()`` too."""
        self._engine.casts.match(is_synced=self._engine.casts.is_synced, are_due=True)

    def _refuse_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        params = {shard.param for shard, _, _ in self._sharded}
        if any(param in params for group in optimizer.param_groups for param in group["params"]):
            raise ShardingError(
                f"{type(optimizer).__name__}.step() inside summon_full_params: its state is of this rank's pieces, "
                "which is what parameters are outside. Step before or after"
            )


def _refuse_grad(shard: ParamShard) -> NoReturn:
    raise ShardingError(
        f"parameter {shard.name!r} was given a gradient inside summon_full_params, where it is this rank's alone and "
        "would be lost. Compute the loss outside, or take what is yours over with summon_full_params(writeback=True, "
        "with_grads=True)"
    )


_open: WeakKeyDictionary[Engine, _Summoned] = WeakKeyDictionary()


# -- state dicts --------------------------------------------------------------------------------------------------


def gather_state_dict(engine: Engine, model: nn.Module, *, rank0_only: bool) -> dict[str, Any]:
    """See `StreamShard.full_state_dict`."""
    wanted = not rank0_only or engine.ranks.is_first
    whole: list[tuple[ParamShard, torch.Tensor]] = []
    failure: Exception | None = None
    for unit in engine.units:
        shards = unit.params
        if engine.is_alone or any(piece_of(shard.param) for shard in shards):
            wholes = unit.gather_whole([shard.main for shard in shards])
        else:  # inside summon_full_params
            wholes = [shard.param.detach() for shard in shards]
        try:
            if wanted and failure is None:
                found = zip(shards, wholes, strict=True)
                whole.extend((shard, tensor.to("cpu", copy=True)) for shard, tensor in found if tensor is not None)
        except Exception as error:  # such as too little memory on the one rank that wants it: others gather on
            failure = error
    states: list[dict[str, Any]] = []

    def finish() -> None:
        raise_if(failure)
        states.append(_state_dict_of(model, whole) if wanted else {})

    engine.ranks.gather_results("collect the model's state dict", finish)
    return states[0]


def _state_dict_of(model: nn.Module, whole: Sequence[tuple[ParamShard, torch.Tensor]]) -> dict[str, Any]:
    """The model's ``state_dict()`` with whole tensors, of new memory on the CPU, under the parameters; all copied."""
    before = [(shard.param, data_of(shard.param), piece_of(shard.param)) for shard, _ in whole]
    try:
        for shard, tensor in whole:
            be_whole(shard.param)
            shard.param.data = tensor
        state: dict[str, Any] = model.state_dict()
    finally:
        for param, data, piece in before:
            param.data = data
            if piece is not None:
                be_piece(param, piece)
    ours = {tensor.untyped_storage().data_ptr(): tensor for _, tensor in whole}
    for name, value in state.items():
        if isinstance(value, torch.Tensor):
            own = ours.get(value.untyped_storage().data_ptr()) if value.layout is torch.strided else None
            if own is None:
                state[name] = value.detach().to("cpu", copy=True)
            else:  # tied names share it
                state[name] = own if _is_same(own, value) else value.detach()
    return state


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    views = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (one, other)]
    return views[0] == views[1]


# -- clipping -----------------------------------------------------------------------------------------------------


def clip_grads(
    engine: Engine, params: Collection[nn.Parameter], max_norm: float, norm_type: float, skip_above: float | None
) -> torch.Tensor:
    """See `StreamShard.clip_grad_norm_`; `params` are the model's."""
    if not isinstance(max_norm, int | float | torch.Tensor) or not max_norm >= 0.0:
        raise ConfigError(f"max_norm={max_norm!r}: wanted a number of at least 0")
    if skip_above is not None and not (isinstance(skip_above, int | float) and skip_above > 0.0):
        raise ConfigError(f"skip_above={skip_above!r}: wanted a positive number, or None")
    order = _order(norm_type)
    engine.inputs.on_clipping(max_norm, norm_type, skip_above)
    refuse_unreduced(params, "clip_grad_norm_")
    grads = [grad.as_subclass(torch.Tensor) for grad in (param.grad for param in params) if grad is not None]
    filled = [grad for grad in grads if grad.numel()]
    if filled:
        local = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(filled, order)), order)
    else:
        local = torch.zeros((), device=engine.streams.device)
    total = global_norm(local, order, engine.ranks)
    if skip_above is not None and not (math.isfinite(norm := total.item()) and norm <= skip_above):
        for param in params:
            param.grad = None
        return total
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    if filled:
        torch._foreach_mul_(filled, scale)
    return total


def _order(norm_type: object) -> float:
    try:
        order = float(norm_type)  # type: ignore[arg-type]  # "inf" is a way to say it
    except (TypeError, ValueError):
        order = math.nan
    if math.isnan(order):
        raise ConfigError(f"norm_type={norm_type!r}: wanted a number, inf for the maximum")
    return order
