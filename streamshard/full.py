"""Full tensors inside `summon_full_params`, and full state dicts."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from streamshard.comm.ranks import raise_if, run_on_all_ranks
from streamshard.core.engine import Engine
from streamshard.core.optimizer_kinds import params_in
from streamshard.core.params import Param
from streamshard.errors import RankMismatchError, ShardingError, StreamShardError
from streamshard.forms import DTensorForm, form_of
from streamshard.guards.sharded_parameter import be_piece, be_whole, data_of, exchange
from streamshard.nested import sums_of_bits
from streamshard.torch_private import is_traceable_wrapper_subclass

_Take = Callable[[Param, torch.Tensor], torch.Tensor]


def gather_full(
    engine: Engine, take: _Take | None, wanted: Collection[nn.Parameter] | None = None
) -> tuple[dict[Param, torch.Tensor], Exception | None]:
    """All-gather full tensors, one flat parameter at a time. Collective; the host waits.

    Args:
        engine: the model's.
        take: turns a full tensor, in new memory on the device and in the dtype of the main weights, into the tensor
            that this rank keeps, such as a copy in CPU memory; None: keep none.
        wanted: the parameters to gather; None: all.

    Returns:
        By parameter, the tensors from `take`; and the error that `take` has raised, such as too little memory. After an
        error this rank goes on with the all-gathers, without `take`.
    """
    full: dict[Param, torch.Tensor] = {}
    failure: Exception | None = None
    for flat_param in (flat_param for unit in engine.units for flat_param in unit.flat_params):
        params = [param for param in flat_param.params if wanted is None or param.sharded in wanted]
        if not params:
            continue
        # A copy: `Param.main` settles what lies in host memory, and finds data that the user has moved.
        gathered = own = torch.zeros_like(flat_param.main, device=engine.streams.device)
        for param in params:
            own.narrow(0, param.local.shard_offset, param.local.numel).copy_(param.main)
        if not flat_param.layout.is_whole:
            gathered = own.new_empty(flat_param.layout.padded_numel)
            flat_param.ranks.gather_now(own, gathered, flat_param.tag)
        for param in params:
            whole = param.form.whole(flat_param.part_of(gathered, param.layout))
            try:
                if take is not None:
                    full[param] = take(param, whole)
            except Exception as error:
                take, failure = None, error
    return full, failure


@contextlib.contextmanager
def under_params(engine: Engine, full: Mapping[Param, torch.Tensor]) -> Iterator[Mapping[Param, nn.Parameter]]:
    """Inside, parameters hold the tensors of `full`, without gradients; afterwards they hold their pieces again.

    No pass can begin inside. No collective: other ranks need not call this.

    Args:
        engine: the model's.
        full: by parameter, [full shape] on any device, meta too.

    Yields:
        By parameter, a new Parameter that gets the full tensor, as changed inside, when the context ends.
    """
    full_params: dict[Param, nn.Parameter] = {}
    plain: dict[Param, nn.Parameter | None] = {}
    engine.is_summoned = True
    try:
        for param, tensor in full.items():
            full_param = nn.Parameter(param.form.around(tensor), param.sharded.requires_grad)
            exchange(param.sharded, full_param, param.form.part)
            full_params[param] = full_param
            plain[param] = be_whole(param.sharded)
        yield full_params
    finally:
        # Only of those exchanged so far: an error may have come in the middle.
        for param, full_param in full_params.items():
            exchange(param.sharded, full_param, param.form.part)
            be_piece(param.sharded, param.piece, plain.get(param))
            param.sharded.requires_grad_(full_param.requires_grad)  # as changed inside
        engine.is_summoned = False


@contextlib.contextmanager
def summon(engine: Engine) -> Iterator[None]:
    """See `StreamShard.summon_full_params`.

    Raises:
        ShardingError: inside: from a forward or an optimizer's step. At the end, after all pieces are back: a tensor
            has another shape, or a gradient, which would be lost.
        RankMismatchError: at the end: ranks would write back pieces of different tensors.
    """
    # This `take` cannot fail, so there is no error.
    full, _ = gather_full(engine, lambda _, tensor: tensor)
    # For all optimizers, also those that are made inside.
    steps = register_optimizer_step_pre_hook(functools.partial(_refuse_step, {param.sharded for param in full}))
    edited: dict[Param, torch.Tensor] = {}
    failure: Exception | None = None
    try:
        with under_params(engine, full):
            try:
                yield
                edited = _edited(engine, full)
            except Exception as error:
                failure = error  # raised when the pieces are back, on all ranks
        _refuse_different(engine, edited, failure)
        with torch.no_grad():
            for param, tensor in edited.items():
                local = param.piece.cut(tensor).view(-1)
                data_of(param.form.memory(param.sharded)).as_subclass(torch.Tensor).view(-1).copy_(local)
    finally:
        steps.remove()
        engine.expire_weights()  # the next pass casts the weights again, in no_sync() too


def _edited(engine: Engine, full: Mapping[Param, torch.Tensor]) -> dict[Param, torch.Tensor]:
    """By parameter, the tensor that it holds now, with dtype and device of `full`.

    Args:
        engine: the model's.
        full: the tensors that the parameters held at the start.

    Raises:
        ShardingError: a parameter was replaced, has a gradient, or holds a tensor of another shape.
    """
    engine.check_structure()
    memory = {param: param.form.memory(param.sharded) for param in full}
    for param, tensor in full.items():
        what, shape = f"parameter {param.name!r} got", tuple(memory[param].shape)
        if param.sharded.grad is not None:
            raise ShardingError(f"{what} a gradient inside summon_full_params(): compute the loss outside")
        if shape != tensor.shape:
            raise ShardingError(f"{what} other data inside summon_full_params(): {shape}, wanted {param.piece.shape}")
    return {param: memory[param].detach().to(tensor) for param, tensor in full.items()}


def _refuse_different(engine: Engine, edited: Mapping[Param, torch.Tensor], failure: Exception | None) -> None:
    """Raise on all ranks if this rank has a `failure`, or if the tensors of ranks differ. Collective.

    So either all ranks write their pieces back, or none. Tensors differ if ranks drew other random numbers, or one rank
    alone changed a weight. In local SGD replicas have weights of their own: each replica compares its own ranks.
    """
    ranks, replicas = engine.ranks, engine.reductions.replicas
    with_replicas = replicas is None or replicas.averages_grads

    def sums() -> list[int]:
        raise_if(failure)
        return sums_of_bits(edited.values())

    try:
        doing = "write back what changed inside summon_full_params"
        gathered = ranks.gather_results(doing, sums, ShardingError, with_replicas=with_replicas)
    except StreamShardError:
        raise_if(failure)  # its own class, not the report to all ranks
        raise
    for param, *found in zip(edited, *gathered, strict=True):
        if len(set(found)) > 1:
            rank = next(rank for rank, each in enumerate(found) if each != found[0])
            raise RankMismatchError(
                f"parameter {param.name!r} has other values on rank {rank} than on rank 0 at the end of "
                "summon_full_params(): make the same change on all ranks, with the same seed for random numbers"
            )


def warn_of_different_copies(engine: Engine) -> None:
    """Warn if ranks along the axis of DTensors differ in a parameter of which each has a copy. Collective."""
    ranks = engine.ranks
    if ranks.n_parts == 1:
        return
    if engine.host is not None:
        engine.host.settle()  # `data_of` does not
    copies = [param for param in engine.params if not param.piece.box]
    first: dict[int, tuple[int, list[int]]] = {}
    sums = sums_of_bits(data_of(param.sharded).as_subclass(torch.Tensor) for param in copies)
    for rank, (axis, theirs) in enumerate(ranks.gather_objects("compare copies of parameters", (ranks.axis, sums))):
        number, wanted = first.setdefault(axis, (rank, theirs))
        if differing := [param.name for param, *both in zip(copies, theirs, wanted, strict=True) if len({*both}) > 1]:
            engine.warn_once(
                f"ranks {number} and {rank} of the model, which have parts of the same tensors, have other values of "
                f"{differing[0]!r}, of which each has a copy, and the checkpoint has one of them: have these ranks got "
                "other batches or random numbers? All ranks along the axis have equal copies again after "
                "load_checkpoint"
            )


def _refuse_step(params: set[nn.Parameter], optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not params.isdisjoint(params_in(optimizer.param_groups)):
        raise ShardingError(f"{type(optimizer).__name__}.step() inside summon_full_params(): step before or after")


# -- state dicts --------------------------------------------------------------------------------------------------


def gather_state_dict(engine: Engine, model: nn.Module, *, rank0_only: bool) -> dict[str, Any]:
    """See `StreamShard.full_state_dict`. Every tensor is in new memory on the CPU; tied names share one."""
    wanted = not rank0_only or engine.ranks.is_first
    full, failure = gather_full(engine, (lambda _, tensor: tensor.to("cpu", copy=True)) if wanted else None)

    def finish() -> dict[str, Any]:
        raise_if(failure)
        if not wanted:
            return {}
        new = {tensor.untyped_storage().data_ptr() for tensor in full.values()}  # these need no copy
        with under_params(engine, full):
            state: dict[str, Any] = model.state_dict()
            for name, value in state.items():  # HQQ's modules give Parameters, which are pieces again afterwards
                if isinstance(value, torch.Tensor):
                    if isinstance(form := form_of(value), DTensorForm):  # a buffer of which each rank has a copy
                        value = form.memory(value)
                    is_new = is_traceable_wrapper_subclass(value)  # a packed parameter, around a tensor in new memory
                    is_new = is_new or value.layout is torch.strided and value.untyped_storage().data_ptr() in new
                    state[name] = value.detach() if is_new else value.detach().to("cpu", copy=True)
        return state

    return run_on_all_ranks(engine.ranks, "collect the model's state dict", finish, ShardingError)
