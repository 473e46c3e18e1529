"""From a plain model to a streamed one: validate, plan, allocate, attach, in this order."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from streamshard import __version__
from streamshard.comm.communicator import Communicator, PlannedRanks
from streamshard.comm.groups import Groups, groups_of, resolve_group
from streamshard.comm.ranks import raise_if, refuse_together
from streamshard.comm.streams import StreamName, Streams
from streamshard.config import Settings, parse_bytes, parse_precision, refuse_unknown
from streamshard.conventions import conventions
from streamshard.core.allocation import TakeWeights, allocate_units
from streamshard.core.attach import attach
from streamshard.core.buffer_sync import BufferSync, check_buffers
from streamshard.core.ends import Ends
from streamshard.core.engine import Engine
from streamshard.core.host import HostState
from streamshard.core.module_state import handle_of
from streamshard.core.optimizer_hooks import watch_optimizers
from streamshard.core.outer_shards import OuterShards
from streamshard.core.params import FlatParam
from streamshard.core.reductions import Reductions
from streamshard.core.replicas import Replicas
from streamshard.core.slots import Ledger
from streamshard.core.unit import Home
from streamshard.device import has_streams, module_of, training_device
from streamshard.dtensors import groups_with_dtensors, lower_model, mark_experts, warn_of_shared_sequences
from streamshard.errors import ConfigError, RankMismatchError, ShardingError, is_of_this_rank
from streamshard.forms import form_of
from streamshard.guards.loop import refuse_transforms
from streamshard.planning.discovery import FoundUnit, ResidentArgument, UnitsArgument, find_units
from streamshard.planning.layout import UnitLayout, plan_units
from streamshard.planning.memory import plan_host, plan_slots
from streamshard.planning.structure import (
    InFp32,
    check_params,
    find_fp32,
    modules_inside,
    modules_of,
    params_of,
    tie_on_meta,
)


class Checked(NamedTuple):
    """One rank's plan, before it meets the other ranks.

    Attributes:
        settings: the user's.
        here: the device of the parameters now.
        found: the units, root unit first.
        in_fp32: parameters and modules that compute in fp32 whatever ``param_dtype`` is.
        on_meta: names of parameters and buffers without values.
    """

    settings: Settings
    here: torch.device
    found: list[FoundUnit]
    in_fp32: InFp32
    on_meta: list[str]


class Connected(NamedTuple):
    """The ranks of a model, connected.

    Attributes:
        ranks: they cut the state.
        replicas: the replicate axis, whose ranks have the same state; None on a 1-D mesh.
        experts: the ranks with the same experts; None: the model has no DTensors of experts.
        levels: if `ranks` are all ranks of a 2-D mesh: its shard group, and its replicate axis.
    """

    ranks: Communicator
    replicas: Replicas | None = None
    experts: Communicator | None = None
    levels: tuple[Communicator, Communicator] | None = None


def _accept_model(
    module: nn.Module,
    units: UnitsArgument = None,
    *,
    resident: ResidentArgument = (),
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    **given: Any,
) -> tuple[Checked, Connected]:
    """Check `module` on every rank, then connect the ranks. Arguments and errors: see `StreamShard`.

    Args:
        module, units, resident, mesh: see there.
        **given: the user's other arguments, fields of `Settings`.
    """
    refuse_transforms()  # before meeting other ranks: a transform also wraps the tensors of collectives
    check = functools.partial(_check_module, module)
    who = groups_with_dtensors(None if mesh is None else groups_of(mesh), module, check)
    if isinstance(mesh, DeviceMesh) and who is not None:
        warn_of_shared_sequences(mesh, who)
    try:
        checked = check_model(module, units, resident, given)
        if who is not None and who.experts is not None:
            found = mark_experts(module, checked.found, dist.get_process_group_ranks(who.shard))
            checked = checked._replace(found=found)
        group = who.shard if who is not None else dist.group.WORLD if dist.is_initialized() else None
        device = training_device(checked.here, group, None if who is None else who.device_type)
    except Exception as error:  # the user's model, or an object in an argument, may raise anything
        if who is not None or dist.is_initialized():
            refuse_together(who.all_ranks if who is not None else None, error)
        raise
    return checked, _connect(who, device, checked.settings)


def shard_model(base: type, module: nn.Module, *args: Any, **given: Any) -> tuple[nn.Module, Engine]:
    """Shard `module` in place and let its class derive from `base`. Collective. For the rest see `StreamShard`."""
    checked, connected = _accept_model(module, *args, **given)
    ranks = connected.ranks
    try:
        _check_ranks_agree(ranks, module, checked)
        parts = {name for name, param in params_of(module).items() if form_of(param).box}
        empty = _agree_on_empty(ranks, checked.on_meta, parts)
        # Behind the comparison: after an error there the user's model still has its DTensors.
        found, in_fp32 = lower_model(module, checked.found, checked.in_fp32)
        checked = checked._replace(found=found, in_fp32=in_fp32)
        # Before `FlatParam` counts the tensors beside packed weights: a move makes new ones.
        for each in params_of(module).values():
            form_of(each).move(each, ranks.streams.device)
        taking = _taking_weights(checked, ranks, empty)
        engine = _make_engine(checked, connected, taking)
        for unit in engine.units:
            unit.make_unsharded()
        if engine.host is not None:
            engine.host.begin(engine.units)
        for param in engine.params:
            for tensor in param.form.beside(param.sharded).values():
                ranks.broadcast(tensor)  # rank 0's, as the weights beside them
        _place_buffers(module, engine.streams.device)
        # Behind `_place_buffers`: NCCL sends no host memory.
        engine.buffers.start(module)
        if engine.streams.module is not None:
            engine.streams.module.empty_cache()
    except BaseException as error:
        if is_of_this_rank(error):  # such as out of memory: other ranks wait in the next collective
            ranks.fail(f"StreamShard(model) ended with {type(error).__name__}: {error}")
        raise
    # Outside of the ``try``: from here on no collective is left in which other ranks would wait.
    attach(base, module, checked.found, engine, checked.in_fp32)
    conventions().replace_methods(module)
    watch_optimizers()
    # Parameters without elements need no values.
    without_elements = {param.name for param in engine.params if not param.piece.full.numel()}
    params = [name for name in params_of(module) if name in empty and name not in without_elements]
    engine.set_empty([*params, *(name for name, _ in module.named_buffers() if name in empty)])
    return module, engine


def _make_engine(checked: Checked, connected: Connected, take: TakeWeights) -> Engine:
    """Plan and allocate.

    Args:
        checked: the model.
        connected: its ranks. With `PlannedRanks` buffers are on the meta device, and take no memory.
        take: fills each unit's shards.
    """
    ranks, replicas, experts, levels = connected
    inner, outer_ranks = levels or (None, None)
    settings, found = checked.settings, checked.found
    weight_slots, grad_slots = settings.slots_on(ranks.world_size)
    sizes = ranks.world_size, 0 if experts is None else experts.world_size
    given = found, settings.precision, checked.in_fp32.params, *sizes
    layouts = plan_units(*given, align_pieces_to=settings.align_pieces_to, adds_in_slots=grad_slots == "all")
    mover = inner or ranks  # of the units' bytes in a step
    flat_params = [flat_param for layout in layouts for flat_param in layout.flat_params]
    # An upper bound of the bytes that other ranks read: main weights, inputs, both slots of all units, all fp32. Pages
    # that nobody writes take no memory.
    parts = ranks.world_size // mover.world_size  # of each all-gather and reduction
    n_bytes = sum(16 * flat.layout.padded_numel + 4096 for flat in flat_params)
    mover.share_memory(n_bytes, parts * len(flat_params))
    if experts is not None:
        experts.share_memory_of(ranks)  # both issue in one order, so one rank's counters tell the progress of both
    names = [layout.name or "the root unit" for layout in layouts for _ in layout.flat_params]
    for each in filter(None, (ranks, experts)):
        each.recorder.names = names
    mover.transport.parts = parts
    ledger = Ledger(ranks.streams, mover.transport)  # behind `share_memory`, which may exchange the transport
    budget = parse_bytes("device_budget", settings.device_budget, at_least=0)
    on_host = [settings.offload is not None and each for each in plan_host(layouts, budget)]
    # Before the units: the ledger takes their host memory from it.
    host = ledger.host = HostState(layouts, on_host, ranks, ledger) if any(on_host) else None
    mover.transport.check_precision(settings.precision)  # not before: shared memory sums in fp32 in every mode
    outer = None
    if outer_ranks is not None:
        outer = OuterShards(layouts, outer_ranks, ledger, is_in_order=settings.precision.sums_in_rank_order)
    streamed = [not unit.is_resident for unit in found]
    plan = plan_slots(streamed, weight_slots, grad_slots, is_serial=mover.transport.is_serial)
    reason = f"weight_slots={weight_slots!r}, grad_slots={grad_slots!r}"
    homes: list[Home | None] = [host if each else outer for each in on_host]
    units = allocate_units(
        *(layouts, plan, ranks, experts or ranks, ledger, take, homes, inner),
        reduces_at_once=outer is not None and outer.is_in_order,
        keeps_main_grads=settings.keep_main_grads,
    )
    reductions = Reductions(units, ranks, ledger, replicas, outer)
    buffers = BufferSync(ranks)
    engine = Engine(units, plan, reason, ranks, ledger, buffers, settings.precision, reductions, host, outer)
    ends = {index: unit.modules[0] for index, unit in enumerate(found) if unit.may_join}
    # `FlatParam.move_weights` moves no wire buffer.
    if ends and not plan.keeps_weights and not any(layout.flat_params[-1].wire.stop for layout in layouts):
        tables = [index for index, module in ends.items() if isinstance(module, nn.Embedding)]
        engine.ends = Ends(ends, tables, units, ledger)
    return engine


def plan_engine(
    checked: Checked,
    ranks: PlannedRanks,
    experts: PlannedRanks | None = None,
    replicas: PlannedRanks | None = None,
    *,
    parts: bool,
) -> Engine:
    """The engine that the model would have on `ranks`, which are `PlannedRanks`: its buffers are on the meta device.

    Args:
        checked, ranks, experts: see `_make_engine`.
        replicas: the replicate axis, `PlannedRanks` too; None on a 1-D mesh.
        parts: the model has DTensors of tensor parallelism.

    Raises:
        ConfigError: state cannot lie where the settings say.
    """
    _refuse_combinations(checked.settings, replicas=replicas is not None, experts=experts is not None, parts=parts)
    axis = levels = None
    if replicas is not None and checked.settings.cuts_over_replicas:
        kind = "nccl" if ranks.kind == "nccl" else "sockets"  # between machines
        levels = ranks, PlannedRanks(replicas.world_size, kind)
        ranks = PlannedRanks(ranks.world_size * replicas.world_size, kind)
    elif replicas is not None:
        axis = Replicas(replicas)
    engine = _make_engine(checked, Connected(ranks, axis, experts, levels), lambda layout, flat_params: None)
    engine.predict_ends()
    return engine


def _taking_weights(checked: Checked, ranks: Communicator, empty: set[str]) -> TakeWeights:
    """A function that cuts rank 0's weights of a unit into shards, one parameter at a time, except those in `empty`."""
    params = [found for unit in checked.found for found in unit.params]
    most = max((p.param.nbytes for p in params if p.param.is_meta and p.names[0] not in empty), default=0)
    room = torch.empty(most, dtype=torch.uint8, device=ranks.streams.device)  # for a parameter that is on meta here

    def take(unit: UnitLayout, flat_params: Sequence[FlatParam]) -> None:
        for flat_param, plan in zip(flat_params, unit.flat_params, strict=True):
            for found, layout in zip(plan.found, plan.layout.params, strict=True):
                full, param = None, form_of(found.param).memory(found.param).detach()
                if layout.name not in empty:
                    full = room[: param.nbytes].view(param.dtype) if param.is_meta else param.to(room.device)
                    full = full.contiguous().view(-1)  # a weight in channels_last is not
                    flat_param.ranks.broadcast(full, is_part=bool(form_of(found.param).box))
                flat_param.add(layout, found.names[1:], found.param, full)
        if ranks.streams.module is not None:  # give the memory of the full parameters back to the device
            ranks.streams.module.empty_cache()

    return take


# -- validate -----------------------------------------------------------------------------------------------------


def check_model(
    module: nn.Module, units: UnitsArgument, resident: ResidentArgument, given: Mapping[str, Any]
) -> Checked:
    """Check everything that needs no other rank. Ties again what ``init_empty_weights`` has untied.

    Args and errors: see `_accept_model`.
    """
    # Plans come here without `_accept_model`, which checks before it looks for DTensors.
    _check_module(module)
    if all(param.is_meta for param in params_of(module).values()):
        conventions().tie_weights(module)
    tie_on_meta(module)
    known = ("units", "resident", "mesh", *(field.name for field in fields(Settings)))
    # Before `Settings`, whose TypeError would name a class that the user has not called.
    refuse_unknown(given, known, "argument of StreamShard")
    settings = Settings(**{**given, "precision": parse_precision(given.get("precision"))})
    here = check_params(module)
    check_buffers(module)
    named = (*params_of(module).items(), *module.named_buffers())
    on_meta = [name for name, tensor in named if tensor.is_meta]
    dtype = settings.precision.param_dtype
    min_bytes = parse_bytes("min_unit_size", settings.min_unit_size, at_least=0)
    min_numel = math.ceil(min_bytes / (dtype or torch.float32).itemsize)
    found = find_units(module, units, resident, min_numel=min_numel)
    in_fp32 = find_fp32(module, settings.precision, conventions().kept_in_fp32(module, dtype))
    return Checked(settings, here, found, in_fp32, on_meta)


def _check_module(module: nn.Module) -> None:
    if not isinstance(module, nn.Module):
        raise ShardingError(f"StreamShard takes an nn.Module, got {type(module).__name__}")
    for name, child in modules_of(module):
        name = name or type(module).__name__
        if (handle := handle_of(child)) is not None:
            once = "and StreamShard takes a model once: leave it as it is, or shard only the module around it"
            part = "as a part of another model: give this one a copy.deepcopy of it, made before either is sharded"
            raise ShardingError(f"{name!r} is already sharded, {once if handle.is_root else part}")
        if isinstance(child, nn.parallel.DistributedDataParallel | nn.DataParallel):
            what = f"{name!r} is a {type(child).__name__}, which reduces gradients too: leave it out"
            raise ShardingError(f"{what}, and shard the model that it was given")
        if any(kind.__name__ == "FSDPModule" for kind in type(child).__mro__):
            raise ShardingError(
                f"{name!r} was given to fully_shard, whose parameters are DTensors on its own mesh: leave fully_shard "
                "out, and shard the model as it was built"
            )
        if isinstance(child, torch.jit.ScriptModule) and any(True for _ in child.parameters()):
            raise ShardingError(
                f"{name!r} is TorchScript, which keeps its parameters where they cannot be exchanged: shard the module "
                "that it was made from. Scripted functions and modules without parameters may stay"
            )
    if ignored := list(getattr(module, "_ddp_params_and_buffers_to_ignore", ())):
        raise ShardingError(
            f"{type(module).__name__} has {ignored[0]!r} among the names that DDP leaves alone "
            "(_ddp_params_and_buffers_to_ignore). StreamShard shards every parameter and keeps every buffer equal: "
            "move it out of the model, or delete the attribute"
        )


def _connect(who: Groups | None, device: torch.device, settings: Settings) -> Connected:
    """Connect to the other ranks. All have accepted their models."""
    if device.type not in ("cpu", "meta"):  # also if the model is there: else NCCL and capture use another device
        module_of(device).set_device(device)
    if who is None:
        who = groups_of(resolve_group(device))
    has_host = settings.offload is not None
    problem: ConfigError | None = None
    try:
        if has_host and not has_streams(device):
            where = f"the model trains on {device}, whose memory is the host's"
            raise ConfigError(f'offload="state": {where}: leave it out')
        has = {"experts": who.experts is not None, "parts": who.tensor_parallel is not None}
        _refuse_combinations(settings, replicas=who.replicate is not None, **has)
        if settings.cuts_over_replicas and who.replicate is not None:
            # State is cut in the order of all ranks, in which `FlatParam` takes the ranks of a replica for neighbours.
            size, everyone = who.shard.size(), dist.get_process_group_ranks(who.all_ranks)
            if dist.get_process_group_ranks(who.shard) != everyone[who.replica * size : (who.replica + 1) * size]:
                raise ConfigError(f"{_cut_by(settings)}: wanted a mesh whose ranks ascend, row by row")
    except ConfigError as error:
        problem = error
    # Ranks that have refused their model in `_accept_model` meet the others here.
    # A `problem` is told too: ranks compare settings only once they are connected, so one rank alone may have it.
    refuse_together(who.all_ranks, problem)
    raise_if(problem)
    streams = Streams(device, has_host=has_host)
    if settings.cuts_over_replicas and who.replicate is not None:
        inner = Communicator(who.shard, streams, StreamName.COMM, who.all_ranks, who.replica)
        outer = Communicator(who.replicate, streams, StreamName.REPLICA, who.all_ranks)
        ranks = Communicator(who.all_ranks, streams)
        ranks.include(inner, outer)
        return Connected(ranks, levels=(inner, outer))
    ranks = Communicator(who.shard, streams, StreamName.COMM, who.all_ranks, who.replica, who.tensor_parallel)
    experts = replicas = None
    if who.replicate is not None:
        holders = Communicator(who.replicate, streams, StreamName.REPLICA, who.all_ranks)
        replicas = Replicas(holders)
    if who.experts is not None:
        group, parts = who.experts
        experts = Communicator(group, streams, StreamName.COMM, who.all_ranks, who.replica, parts)
    return Connected(ranks, replicas, experts)


def _refuse_combinations(settings: Settings, *, replicas: bool, experts: bool, parts: bool) -> None:
    """Raise a `ConfigError` if state cannot lie where `settings` say, with replicas or DTensors (experts, or parts)."""
    if settings.offload is not None and experts:
        raise ConfigError('offload="state": the model has DTensors of experts, whose state stays on the device')
    if settings.offload is not None and replicas:
        what = 'offload="state" on a 2-D mesh: averages over replicas would need main grads on the device'
        raise ConfigError(f"{what}. Shard over all ranks: leave mesh away, or give a 1-D mesh")
    if settings.shard_over_replicas and not replicas:
        what = "shard_over_replicas=True without replicas"
        raise ConfigError(f"{what}: give a 2-D mesh, replicate x shard (a plan: replicas=2), or leave it away")
    if settings.cuts_over_replicas and replicas and (experts or parts):
        advice = "leave it away, or give a 1-D mesh of the ranks with the same part"
        raise ConfigError(f"{_cut_by(settings)}, and the model has DTensors: {advice}")


def _cut_by(settings: Settings) -> str:
    """The setting that cuts state over replicas, in words."""
    if settings.shard_over_replicas:
        return "shard_over_replicas=True"
    return "sums_in_rank_order=True with replicas, which cuts state over them too"


def _check_ranks_agree(ranks: Communicator, module: nn.Module, checked: Checked) -> None:
    """Raise unless all ranks are about to shard the same model in the same way."""
    settings = [f"StreamShard {__version__} and torch {torch.__version__}"]
    settings += [f"{field.name}={getattr(checked.settings, field.name)!r}" for field in fields(Settings)]
    rows = settings + [
        f"unit {index} {' = '.join(p.names)} {tuple(p.param.shape)} {p.param.dtype} "
        f"requires_grad={p.param.requires_grad} {form_of(p.param).facts(p.param)}".rstrip()
        for index, unit in enumerate(checked.found)
        for p in unit.params
    ]
    rows += [f"resident {unit.name}" for unit in checked.found if unit.is_resident]
    rows += [f"buffer {name} {tuple(buffer.shape)} {buffer.dtype}" for name, buffer in module.named_buffers()]
    doing = "compare models and settings"
    if ranks.are_equal(doing, "\n".join(rows)):
        return
    # Only for the error: rows of a large model are long.
    gathered = ranks.gather_objects(doing, rows)
    for rank, theirs in enumerate(gathered):
        # One list may be the beginning of the other one.
        pairs = zip(gathered[0] + ["no more"], theirs + ["no more"], strict=False)
        for number, (first, other) in enumerate(pairs):
            if first != other:
                what = "settings" if number < len(settings) else "models"
                raise RankMismatchError(f"ranks have different {what}: rank 0 has {first}, rank {rank} has {other}")


def _agree_on_empty(ranks: Communicator, on_meta: list[str], parts: set[str]) -> set[str]:
    """The parameters and buffers that will be empty: those on meta on rank 0.

    Raises:
        RankMismatchError: rank 0 has no values where another rank has some.
    """
    told = ranks.gather_objects("find empty parameters", on_meta)
    different = [set(each) for each in {id(each): each for each in told}.values()]  # equal ones are one object
    firsts, everywhere = different[0], set.intersection(*different)
    if lost := parts.intersection(set.union(*different) - everywhere):
        raise RankMismatchError(
            f"{min(lost)!r}, a DTensor, is on the meta device on some ranks only: load each rank's part, or none"
        )
    if lost := firsts - everywhere:
        raise RankMismatchError(
            f"{min(lost)!r} is on the meta device on rank 0 and has values on another rank, and rank 0's weights count "
            "for all: let rank 0 have the values, or none"
        )
    return firsts


def _place_buffers(module: nn.Module, device: torch.device) -> None:
    """Move buffers to the device; those on meta get memory filled with NaN. One under two names stays one buffer."""
    placed: dict[torch.Tensor, torch.Tensor] = {}
    for owner in modules_inside(module):
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                if buffer not in placed:
                    value = math.nan if buffer.is_floating_point() else 0
                    empty = buffer.is_meta
                    placed[buffer] = torch.full_like(buffer, value, device=device) if empty else buffer.to(device)
                owner._buffers[name] = placed[buffer]
