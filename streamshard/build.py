"""From a plain model to a streamed one: validate, plan, allocate, attach, in this order."""

from __future__ import annotations

import inspect
import math
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from streamshard.checkpoint import huggingface
from streamshard.comm.connect import connect
from streamshard.comm.groups import Groups, groups_of, refuse_together, resolve_group
from streamshard.comm.ranks import Ranks
from streamshard.comm.shared_memory import share_memory
from streamshard.comm.streams import StreamName, Streams
from streamshard.config import PieceAlignment, Precision, Settings
from streamshard.device import check_tried, module_of, training_device
from streamshard.engine.attach import attach
from streamshard.engine.buffer_sync import BufferSync, buffers_of, check_buffers, describe_state
from streamshard.engine.empty import Empty
from streamshard.engine.engine import Engine
from streamshard.engine.grad_check import GradCheck
from streamshard.engine.grad_inputs import answer_for
from streamshard.engine.handle import handle_of, registered_names
from streamshard.engine.reductions import Reductions
from streamshard.engine.replicas import Replicas
from streamshard.errors import ConfigError, RankMismatchError, ShardingError, warn_user
from streamshard.plan.discovery import (
    FoundParam,
    FoundUnit,
    UnitsArgument,
    coalesce,
    find_large,
    find_units,
    group_params,
    warn_of_edge,
)
from streamshard.plan.layout import ParamLayout, ParamSize, UnitLayout, plan_unit
from streamshard.plan.memory import Category, Sizing, choose_slots, holds_main_grads, read_budget
from streamshard.plan.slots import SlotPlan, plan_slots
from streamshard.plan.structure import (
    check_params,
    is_meta,
    modules_inside,
    modules_of,
    params_of,
    refuse_transforms,
    tie_on_meta,
)
from streamshard.unit.buffers import GradSlot, Ledger, Scratch, WeightSlot
from streamshard.unit.grads import UnitGrads
from streamshard.unit.optimizer_hooks import before_step
from streamshard.unit.shard import UnitShard
from streamshard.unit.unit import StreamedUnit

__all__ = ["shard_model"]

register_optimizer_step_pre_hook(before_step)

_TOGETHER_BYTES = 1 << 20  # of weights in one message: smaller ones take no less time
_MOST_PADDING = 2  # times the elements that units have without `align_pieces_to`


class _Checked(NamedTuple):
    """What one rank wants to shard, before it has heard of the others.

    Attributes:
        settings: the user's.
        here: where its parameters are.
        device: where it will be trained.
        budget: bytes, None if slots are counted.
        found: the units.
        groups: parameters by unit, those of the edge unit first.
        on_meta: names of its parameters and buffers that have no values.
    """

    settings: Settings
    here: torch.device
    device: torch.device
    budget: int | None
    found: list[FoundUnit]
    groups: list[list[FoundParam]]
    on_meta: list[str]


def shard_model(
    base: type,
    module: nn.Module,
    units: UnitsArgument = None,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    **given: Any,
) -> nn.Module:
    """Shard `module` in place and let its class derive from `base`. Arguments and errors: see `StreamShard`.

    Args:
        base, module, units, mesh: see there.
        **given: what the user has said of `Settings`.
    """
    refuse_transforms()  # not together with other ranks: a transform wraps the tensors of collectives too
    who = None if mesh is None else groups_of(mesh)
    try:
        checked = _check(module, units, who, given)
    except Exception as error:  # a predicate of the user's may raise anything
        if who is not None or dist.is_initialized():
            refuse_together(who.all_ranks if who is not None else None, error)
        raise
    ranks, replicas = _connect(who, checked.here, checked.device)
    _check_ranks_agree(ranks, module, checked)
    empty = _agree_on_empty(ranks, checked.on_meta, checked.settings.broadcast_weights)
    engine = _make_engine(module, checked, ranks, replicas)
    empty_buffers = _fill(engine, module, checked, empty)
    if checked.settings.check_grads:
        shards = {shard.param: shard for shard in engine.param_shards}
        ordered = [shards[param] for param in params_of(module).values()]
        engine.reductions.check = GradCheck(ordered, engine.ranks).check
    attach(base, module, checked.found, engine)
    answer_for(engine)
    if empty or empty_buffers:
        without = {shard.name: shard for shard in engine.param_shards if shard.name in empty and shard.layout.numel}
        engine.empty = Empty(module, [without[name] for name in params_of(module) if name in without], empty_buffers)
    return module


def _make_engine(module: nn.Module, checked: _Checked, ranks: Ranks, replicas: Replicas | None) -> Engine:
    """Plan, and allocate what was planned."""
    settings, found = checked.settings, checked.found
    layouts = _plan_layouts(found, checked.groups, ranks.world_size, settings)
    share_memory(ranks, _most_bytes(layouts), len(layouts))
    ranks.names = [layout.name or "the edge unit" for layout in layouts]
    ledger = Ledger(ranks.streams, ranks.transport.allocate_visible)
    trains = [any(found_param.param.requires_grad for found_param in params) for params in checked.groups]
    copies = ranks.total_size // ranks.world_size
    scratch_numel = _scratch_numel(ranks, settings.precision)
    drawback = ranks.transport.find_drawback(settings.precision)
    if drawback is not None and ranks.is_first:
        warn_user(drawback)
    sizing = Sizing(layouts, _share_slots(found), trains, settings.precision, scratch_numel, copies)
    plan, reason = _choose_slots(sizing, settings, checked.budget, ranks)
    streamed = _allocate(sizing, plan, ranks, ledger)
    reductions = Reductions(streamed, ranks, ledger, replicas)
    buffers = BufferSync(module, ranks)
    engine = Engine(streamed, plan, ranks, ranks.streams, ledger, buffers, sizing, reductions)
    engine.why_slots = reason
    return engine


# -- validate -----------------------------------------------------------------------------------------------------


def _check(module: nn.Module, units: UnitsArgument, who: Groups | None, given: Mapping[str, Any]) -> _Checked:
    """Everything that one rank can see by itself."""
    _check_module(module)
    if all(is_meta(param) for param in params_of(module).values()):
        huggingface.tie_weights(module)
    tie_on_meta(module)
    settings = Settings(**{name: value for name, value in given.items() if name != "precision" or value is not None})
    here = check_params(module)
    check_tried(here, allows_untested=settings.allow_untested_accelerator)
    check_buffers(module)
    group = who.shard if who is not None else dist.group.WORLD if dist.is_initialized() else None
    device = training_device(here, group, None if who is None else who.device_type)
    budget = None
    if settings.memory_budget is not None:
        real = (param for param in params_of(module).values() if not is_meta(param))
        replaced = sum(param.nbytes for param in real) if here == device else 0
        budget = read_budget(settings.memory_budget, device, replaced)
    named = (*params_of(module).items(), *buffers_of(module).items())
    on_meta = [name for name, tensor in named if is_meta(tensor)]
    return _Checked(settings, here, device, budget, *_find_groups(module, units, settings), on_meta)


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise ShardingError(f"StreamShard takes an nn.Module, got {type(module).__name__}")
    for name, child in modules_of(module):
        name = name or type(module).__name__
        if handle_of(child) is not None:
            raise ShardingError(f"{name!r} is already sharded: StreamShard takes a model once")
        if isinstance(child, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise ShardingError(f"{name!r} is a {type(child).__name__}: shard the model inside it")
        if isinstance(child, torch.jit.ScriptModule) and any(True for _ in child.parameters()):
            raise ShardingError(
                f"{name!r} is TorchScript, which keeps its parameters where they cannot be exchanged: shard the module "
                "that it was made from. Scripted functions and modules without parameters may stay"
            )
    _check_names(module)


def _check_names(module: nn.Module) -> None:
    """Refuse what torch itself would take for ours, or we for torch's. Other names stay the user's: `watched_class`."""
    kind = type(module).__name__
    for name in ("join_hook", "join_device", "join_process_group"):
        if inspect.getattr_static(module, name, None) is not None or name in registered_names(module):
            raise ShardingError(
                f"{kind} has a {name} of its own, which torch.distributed.algorithms.Join([model]) would call instead "
                "of StreamShard's: rename it"
            )
    if ignored := list(getattr(module, "_ddp_params_and_buffers_to_ignore", ())):
        raise ShardingError(
            f"{kind} has {ignored[0]!r} among the names that DistributedDataParallel shall leave alone "
            "(_ddp_params_and_buffers_to_ignore). StreamShard shards every parameter and keeps every buffer equal: "
            "move it out of the model, or delete the attribute"
        )


def _find_groups(
    module: nn.Module, units: UnitsArgument, settings: Settings
) -> tuple[list[FoundUnit], list[list[FoundParam]]]:
    """The units, small ones put together, and the parameters of each; those of the edge unit first.

    Units that are not given are the layers, and what is large beside them.
    """
    found = find_units(module, units)
    groups = group_params(module, found)
    if settings.min_unit_bytes:
        sizes = [_param_bytes(params, settings.precision) for params in groups[1:]]
        found = coalesce(found, sizes, settings.min_unit_bytes)
        groups = group_params(module, found)
    if units is None and found:
        warn_of_edge(module, groups)
        found = find_large(module, found, -(-settings.min_unit_bytes // settings.precision.param_dtype.itemsize))
        groups = group_params(module, found)
    return found, groups


def _connect(who: Groups | None, here: torch.device, device: torch.device) -> tuple[Ranks, Replicas | None]:
    """Meet the other ranks, none of which refuses its model."""
    if device != here:
        module_of(device).set_device(device)  # what the user makes from now on is there too
    if device.type == "cuda" and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        warn_user(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 (Megatron's scripts set it) puts all streams of a GPU into one queue: "
            "nothing that StreamShard communicates will overlap with computation. Unset it"
        )
    if who is None:
        who = groups_of(resolve_group(device))
    refuse_together(who.all_ranks, None)
    streams = Streams(device)
    ranks = connect(who.shard, streams, StreamName.COMM, who.all_ranks, who.replica)
    if who.replicate is None:
        return ranks, None
    return ranks, Replicas(connect(who.replicate, streams, StreamName.REPLICA, who.all_ranks))


def _check_ranks_agree(ranks: Ranks, module: nn.Module, checked: _Checked) -> None:
    """Compare what every rank is about to shard."""
    settings = checked.settings.rows()
    rows = settings + [
        f"unit {index} {' = '.join(p.names)} {tuple(p.param.shape)} {p.param.dtype} "
        f"requires_grad={p.param.requires_grad}"
        for index, params in enumerate(checked.groups)
        for p in params
    ]
    rows += describe_state(module)
    if ranks.are_equal("\n".join(rows)):
        return
    gathered = ranks.gather_objects(rows)
    for rank, theirs in enumerate(gathered):
        pairs = zip(gathered[0] + ["no more"], theirs + ["no more"], strict=False)
        for number, (first, other) in enumerate(pairs):
            if first != other:
                what = "settings" if number < len(settings) else "models"
                raise RankMismatchError(f"ranks have different {what}: rank 0 has {first}, rank {rank} has {other}")


def _agree_on_empty(ranks: Ranks, on_meta: list[str], broadcast: bool) -> set[str]:
    """The parameters and buffers that will be empty: what is on meta on the rank whose weights count.

    Raises:
        RankMismatchError: it has nothing where another rank has values, or every rank's count and they differ.
    """
    if not ranks.any_rank(bool(on_meta)):
        return set()
    if ranks.are_equal("\n".join(on_meta)):
        return set(on_meta)
    firsts: list[str] = ranks.of_first(on_meta)
    lost = next((name for name in firsts if name not in set(on_meta)), None)
    if lost is None and not broadcast:
        lost = next((name for name in on_meta if name not in set(firsts)), None)
    if ranks.any_rank(lost is not None):
        name = next(name for name in ranks.gather_objects(lost) if name is not None)
        which = "rank 0's weights count for all" if broadcast else "every rank's count (broadcast_weights=False)"
        raise RankMismatchError(
            f"{name!r} is on the meta device on some ranks and has values on others, and {which}: let rank 0 have the "
            "values and broadcast_weights=True, or none"
        )
    return set(firsts)


# -- plan and allocate --------------------------------------------------------------------------------------------


def _share_slots(found: Sequence[FoundUnit]) -> list[bool]:
    """By unit, edge unit first, whether it takes turns in the block slots. See [Note: slots]."""
    kinds = Counter(type(layer) for unit in found for layer in unit.modules)
    return [False, *(not unit.is_lone and all(kinds[type(layer)] > 1 for layer in unit.modules) for unit in found)]


def _param_bytes(params: Sequence[FoundParam], precision: Precision) -> int:
    return sum(found.param.numel() for found in params) * precision.param_dtype.itemsize


def _plan_layouts(
    found: Sequence[FoundUnit],
    groups: Sequence[Sequence[FoundParam]],
    world_size: int,
    settings: Settings,
) -> list[UnitLayout]:
    names = ["", *(unit.name for unit in found)]
    sizes = [[ParamSize(p.names[0], tuple(p.param.shape)) for p in params] for params in groups]

    def plan(pieces: PieceAlignment) -> list[UnitLayout]:
        itemsize, pad = settings.precision.param_dtype.itemsize, settings.pad_units_to
        return [
            plan_unit(name, own, world_size, element_bytes=itemsize, pad_numel=pad, align_pieces_to=pieces)
            for name, own in zip(names, sizes, strict=True)
        ]

    layouts = plan(settings.align_pieces_to)
    wanted, needed = (sum(layout.padded_numel for layout in each) for each in (layouts, plan(1)))
    if wanted > _MOST_PADDING * needed:
        raise ConfigError(
            f"align_pieces_to={settings.align_pieces_to!r} would pad the model's {needed:,} elements to {wanted:,} on "
            f"{world_size} ranks: wanted a smaller number of elements, or fewer ranks; between rows of lengths that "
            "have few common multiples parameters can be cut at few places"
        )
    return layouts


def _choose_slots(sizing: Sizing, settings: Settings, budget: int | None, ranks: Ranks) -> tuple[SlotPlan, str]:
    """The slots that were asked for, or as many as fit on the rank with the least memory; and why."""
    if budget is not None:
        return choose_slots(sizing, min(ranks.gather_objects(budget)))
    plan = plan_slots(sizing.shared, settings.weight_slots, settings.grad_slots)
    return plan, f"weight_slots={settings.weight_slots!r}, grad_slots={settings.grad_slots!r}"


def _scratch_numel(ranks: Ranks, precision: Precision) -> Callable[[int, bool], int]:
    def scratch_numel(shard_numel: int, adds: bool) -> int:
        return ranks.transport.scratch_numel(shard_numel, precision.reduction_mode, adds=adds)

    return scratch_numel


def _most_bytes(layouts: Sequence[UnitLayout]) -> int:
    """More than other ranks can ever have to read: main weights, compute shards and both slots of all units in fp32."""
    return sum(16 * layout.padded_numel + 4096 for layout in layouts)


def _allocate(sizing: Sizing, plan: SlotPlan, ranks: Ranks, ledger: Ledger) -> list[StreamedUnit]:
    """Slots, each as large as its largest unit, and the units that take turns in them."""
    layouts, precision = sizing.layouts, sizing.precision
    streams, grad_dtype, is_alone = ranks.streams, precision.slot_grad_dtype, ranks.world_size == 1
    in_slots = holds_main_grads(sizing, plan)
    scratch = [sizing.scratch_numel(layout.shard_numel, not in_slots) for layout in layouts]
    padded = [layout.padded_numel for layout in layouts]
    weight_slots: dict[int, WeightSlot] = {}
    grad_slots: dict[int, GradSlot] = {}
    if not is_alone:
        for slot, numel in _largest(plan.weights, padded).items():
            # The compute shards of slots that hold one unit each lie in them: then other ranks read the slot.
            dtype, is_visible = precision.param_dtype, plan.keeps_weights
            is_users = dtype is torch.float32  # main weights and compute shards are one there
            buffer = ledger.allocate(Category.WEIGHT_SLOTS, numel, dtype, is_visible=is_visible, is_users=is_users)
            takes_turns = any(s and number == slot for s, number in zip(plan.shared, plan.weights, strict=True))
            weight_slots[slot] = WeightSlot(buffer, streams, f"weight slot {slot}", is_shared=takes_turns)
        room = {number: Scratch(numel, grad_dtype, ledger) for number, numel in _largest(plan.scratch, scratch).items()}
        scratch_of = dict(zip(plan.grads, plan.scratch, strict=True))
        for slot, numel in _largest(plan.grads, padded).items():
            beside = room[scratch_of[slot]]
            what = f"grad slot {slot}"
            grad_slots[slot] = GradSlot(numel, grad_dtype, ledger, streams, beside, what, holds_main_grads=in_slots)
    units = []
    for index, layout in enumerate(layouts):
        weight_slot, grad_slot, own = None, None, None
        if not is_alone:
            weight_slot, grad_slot = weight_slots[plan.weights[index]], grad_slots[plan.grads[index]]
            if plan.keeps_weights:
                own = weight_slot.buffer.narrow(0, ranks.rank * layout.shard_numel, layout.shard_numel)
        shard = UnitShard(layout, ranks, ledger, precision.param_dtype, own)
        if weight_slot is None:
            weight_slot = WeightSlot(shard.compute, streams, f"compute shard {index}", is_shared=False)
        name = layout.name or "the edge unit"
        grads = UnitGrads(index, shard, grad_slot, ranks, ledger, precision.reduction_mode, scratch[index])
        units.append(StreamedUnit(index, name, shard, weight_slot, grads, ranks, takes_turns=plan.shared[index]))
    return units


def _largest(slot_of: Sequence[int], numel: Sequence[int]) -> dict[int, int]:
    largest: dict[int, int] = {}
    for slot, size in zip(slot_of, numel, strict=True):
        largest[slot] = max(largest.get(slot, 0), size)
    return largest


def _fill(engine: Engine, module: nn.Module, checked: _Checked, empty: set[str]) -> set[str]:
    """Weights into shards, views onto slots, room for the gradients of what trains, buffers to the device.

    Args:
        engine, module, checked: of the model.
        empty: names of parameters and buffers that have no values on the rank that gives them.

    Returns:
        The names of this rank's buffers that have none.
    """
    broadcast = checked.settings.broadcast_weights
    for unit, is_trained in zip(engine.units, engine.sizing.trains, strict=True):
        if is_trained:  # before a parameter's memory is freed, of which a device's allocator would give parts
            unit.grads.reserve()
    for unit, params, is_trained in zip(engine.units, checked.groups, engine.sizing.trains, strict=True):
        _take_weights(unit, params, engine.ranks, broadcast, empty)
        unit.make_views(_on_grad_of(engine))
        if is_trained:
            unit.grads.allocate()
    _place_buffers(module, engine.streams.device, engine.precision.buffer_dtype)
    sent = engine.buffers.start(send=broadcast)
    if engine.streams.module is not None:  # what the parameters took is the device's again, for whoever needs it
        engine.streams.module.empty_cache()
    return {name for name in buffers_of(module) if name in empty or (name in checked.on_meta and name not in sent)}


def _on_grad_of(engine: Engine) -> Callable[[StreamedUnit, int, torch.Tensor], None]:
    """What units call with gradients. The engine holds the units, and nothing of it holds the engine but modules."""
    engine_of = weakref.ref(engine)

    def on_grad(unit: StreamedUnit, param_index: int, grad: torch.Tensor) -> None:
        if (alive := engine_of()) is not None:
            alive.on_grad(unit, param_index, grad)

    return on_grad


def _take_weights(
    unit: StreamedUnit, params: Sequence[FoundParam], ranks: Ranks, broadcast: bool, empty: set[str]
) -> None:
    """Cut rank 0's (or this rank's own) weights into pieces, one parameter at a time, or several small ones."""
    together: list[tuple[FoundParam, ParamLayout, torch.Tensor]] = []
    nbytes = 0

    def take() -> None:
        nonlocal nbytes
        fulls = [full.view(-1) for *_, full in together]
        if broadcast and fulls:
            flat = fulls[0] if len(fulls) == 1 else torch.cat(fulls)  # of several dtypes: in one that holds them all
            ranks.broadcast(flat)
            fulls = list(flat.split([full.numel() for full in fulls]))
        for (found, layout, _), full in zip(together, fulls, strict=True):
            unit.shard.add(layout, found.names[1:], found.param, full)
        together.clear()
        nbytes = 0

    for found, layout in zip(params, unit.shard.layout.params, strict=True):
        if layout.name in empty:
            take()
            unit.shard.add(layout, found.names[1:], found.param, None)
            continue
        full = _room_for(_trainable(found.param.detach()), unit.shard.main.device).contiguous()
        if nbytes + full.nbytes > _TOGETHER_BYTES:
            take()
        together.append((found, layout, full))
        nbytes += full.nbytes
    take()


def _place_buffers(module: nn.Module, device: torch.device, dtype: torch.dtype | None) -> None:
    """Buffers to the device, floating-point ones to `dtype`; what is one buffer under two names stays one."""
    placed: dict[torch.Tensor, torch.Tensor] = {}
    for owner in modules_inside(module):
        for name, buffer in owner._buffers.items():
            if buffer is None:
                continue
            if buffer not in placed:
                cast = dtype if dtype is not None and buffer.is_floating_point() else buffer.dtype
                with torch.no_grad():  # a copy that autograd knew of would be no leaf
                    placed[buffer] = _room_for(_trainable(buffer), device, cast)
                if buffer.requires_grad:
                    placed[buffer].requires_grad_()
            owner._buffers[name] = placed[buffer]


def _room_for(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`tensor` on `device`; of one on meta what it would be, of NaN."""
    if not is_meta(tensor):
        return tensor.to(device=device, dtype=dtype)
    room = torch.zeros_like(tensor, device=device, dtype=dtype)
    return room.fill_(math.nan) if room.is_floating_point() else room


def _trainable(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy if it was made inside ``torch.inference_mode()`` and could never be written again."""
    return tensor.clone() if tensor.is_inference() else tensor
