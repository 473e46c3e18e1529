"""Models with DTensors: the ranks of tensor or expert parallelism, and plain Parameters in the place of DTensors.

The mesh of the DTensors has one axis. If it lies across the shard group, a matrix is cut over the mesh, and each part
over the shard group. If it lies inside, the DTensors are experts: ranks with the same experts cut them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from streamshard.comm.groups import Experts, Groups, TensorParallel, group_of_ranks
from streamshard.comm.ranks import raise_if, refuse_together
from streamshard.errors import ConfigError, RankMismatchError, ShardingError
from streamshard.forms import DTensorForm, form_of, lower
from streamshard.planning.discovery import FoundUnit
from streamshard.planning.structure import InFp32, join_names, modules_inside, modules_of, params_of

Place = tuple[int, list[int]]
"""This rank's number in the mesh of its DTensors, and the ranks of the mesh."""


def groups_with_dtensors(who: Groups | None, module: nn.Module, check: Callable[[], None]) -> Groups | None:
    """`who`, and the groups of the model's DTensors. Collective if there is a process group.

    Args:
        who: the groups of the user's mesh; None: all ranks.
        module: the model.
        check: raises if the model was changed by another library.

    Raises:
        ConfigError: see `_groups_with`. Or there is no mesh, and a DTensor of more than two dims: it may be of experts.
        RankMismatchError: on all ranks of `who`: only some of them have DTensors.
        ShardingError: on all ranks of `who`: a rank's model was changed by another library, or has DTensors on another
            mesh than one of one axis.
    """
    mesh = mine = error = None
    try:
        check()
        mesh = mesh_of_dtensors(module)
        mine = None if mesh is None else _place_in(mesh)
    except Exception as raised:
        error = raised
    base = dist.group.WORLD if who is None else who.all_ranks
    told = [] if base is None else refuse_together(base, error, mine)
    raise_if(error)
    if None not in told and mesh is not None:
        if who is None and any(param.ndim > 2 for param, _ in _dtensors_of(module).values()):
            raise ConfigError(
                'the model has DTensors of more than two dims: give mesh=, such as mesh["dp"] for tensor parallelism, '
                "or all ranks, mesh=torch.distributed.group.WORLD, for experts"
            )
        return _groups_with(who, mesh, told)
    if base is not None and any(told):
        ranks, empty = dist.get_process_group_ranks(base), told.index(None)
        full = next(number for number, place in enumerate(told) if place is not None)
        raise RankMismatchError(
            f"ranks have different models: rank {ranks[full]} has DTensors, and rank {ranks[empty]} has none: "
            "parallelize the model on all ranks, with one plan"
        )
    return who


def _dtensors_of(module: object) -> dict[str, tuple[nn.Parameter, DTensorForm]]:
    """The DTensors among the parameters, by name."""
    params = params_of(module) if isinstance(module, nn.Module) else {}
    forms = {name: (param, form_of(param)) for name, param in params.items() if not is_lazy(param)}
    return {name: (param, form) for name, (param, form) in forms.items() if isinstance(form, DTensorForm)}


def mesh_of_dtensors(module: object) -> DeviceMesh | None:
    """The mesh of the DTensors among the parameters; None: there are none.

    Raises:
        ShardingError: they are on several meshes, or on one of several axes; PEFT's adapters are of this rank's part.
    """
    found = {name: form.mesh for name, (_, form) in _dtensors_of(module).items()}
    if found:
        _refuse_local_adapters(module)
    for name, mesh in found.items():
        first = next(iter(found))
        if mesh.ndim > 1:
            axes = f"{name!r} is a DTensor on a mesh of axes {mesh.mesh_dim_names}: wanted one axis, across the ranks "
            raise ShardingError(axes + 'that shard it (torchtitan: parallelism.spmd_backend="partial_dtensor")')
        if mesh != found[first]:
            raise ShardingError(f"{first!r} and {name!r} are DTensors on different meshes: wanted one mesh")
    return next(iter(found.values()), None)


def _groups_with(who: Groups | None, mesh: DeviceMesh, told: Sequence[Place]) -> Groups:
    """The groups of a model with DTensors on `mesh`. Collective.

    Args:
        who: the groups of the user's mesh; None: the model is sharded over all ranks with the same place in `mesh`.
        mesh: has one axis. If its ranks are ranks of the shard group, the DTensors are experts.
        told: the places of all ranks of `who`; None: of all ranks.

    Raises:
        ConfigError: on all ranks: some ranks of `mesh` are ranks of `who`, and others are not.
    """
    base = dist.group.WORLD if who is None else who.all_ranks
    assert base is not None
    mine = _place_in(mesh)
    beside = dict(zip(dist.get_process_group_ranks(base), told, strict=True))
    if who is None:
        shard = group_of_ranks([rank for rank, (place, _) in beside.items() if place == mine[0]])
        who = Groups(shard, None, shard, device_type=mesh.device_type)
    data, shard_ranks = (dist.get_process_group_ranks(group) for group in (who.all_ranks, who.shard))
    if mesh.size() > 1 and set(shard_ranks).issuperset(mine[1]):
        same = [rank for rank in data if beside[rank][0] == mine[0]]
        own = [rank for rank in same if rank in shard_ranks]
        if len(own) * mesh.size() == len(shard_ranks):
            across = TensorParallel(mesh.size(), mine[0], who.shard, group_of_ranks(same))
            return who._replace(experts=Experts(group_of_ranks(own), across))
    model, everyone = (sorted({each for rank in ranks for each in beside[rank][1]}) for ranks in (shard_ranks, data))
    if len(everyone) != len(data) * mesh.size():
        raise ConfigError(
            f"the model has DTensors on {mesh}, and is sharded over ranks {data}: wanted a mesh of other axes, such as "
            'StreamShard(model, mesh=world["dp"]) after parallelize_module(model, world["tp"], plan); or with DTensors '
            "of experts a mesh that the ranks of the experts divide evenly"
        )
    across = TensorParallel(mesh.size(), mine[0], group_of_ranks(model), who.all_ranks)
    return who._replace(all_ranks=group_of_ranks(everyone), tensor_parallel=across)


def _place_in(mesh: DeviceMesh) -> Place:
    """See `Place`."""
    return mesh.get_local_rank(), mesh.mesh.flatten().tolist()


def _refuse_local_adapters(module: Any) -> None:
    """Raise if PEFT has made plain adapters for this rank's part of a matrix: ranks would take them for copies."""
    for name, child in modules_of(module):
        whole = getattr(getattr(child, "base_layer", None), "weight", None)
        if whole is None or not isinstance(form_of(whole), DTensorForm):
            continue
        for key, param in params_of(child).items():
            fits = param.shape[-1:] == whole.shape[-1:] or param.shape[:1] == whole.shape[:1]
            if not key.startswith("base_layer.") and param.ndim == 2 and not fits:
                raise ShardingError(
                    f"adapter {join_names(name, key)!r} {list(param.shape)} is made for this rank's part of a matrix "
                    f"{list(whole.shape)}: load the model by from_pretrained(.., distributed_config=DistributedConfig("
                    "tp_size=N)), for which PEFT makes DTensors"
                )


def refuse_others_than_experts(module: nn.Module) -> None:
    """Raise if a DTensor inside the shard group is no expert: its gradient would be summed over the wrong ranks."""
    experts = _dtensors_of(module)
    for name, (_, form) in experts.items():
        if not form.box:
            raise ShardingError(
                f"{name!r} is a copy (Replicate) on the mesh of the experts, {form.mesh}: leave it a plain Parameter"
            )
        if form.cut_along != 0:
            raise ShardingError(
                f"{name!r} is cut along dim {form.cut_along} on {form.mesh}, whose ranks shard the model: so only "
                'experts are cut, along dim 0. For tensor parallelism shard over other ranks, such as mesh=world["dp"]'
            )
    # After the loop: a tensor parallel plan also cuts vocabularies unevenly, and above it gets the better message.
    for name, (param, form) in experts.items():
        if param.shape[0] % form.mesh.size():
            raise ShardingError(
                f"{name!r} has {param.shape[0]} experts over {form.mesh.size()} ranks: wanted the same number on each"
            )


def lower_model(module: nn.Module, found: Sequence[FoundUnit], in_fp32: InFp32) -> tuple[list[FoundUnit], InFp32]:
    """Put plain Parameters in the place of DTensors, also into `found` and `in_fp32`. See `streamshard.forms.lower`."""
    lowered = {param: lower(name, param) for name, param in params_of(module).items()}
    for owner in modules_inside(module):
        for key, param in owner._parameters.items():
            if param is not None and lowered[param] is not param:
                owner._parameters[key] = lowered[param]
    units = []
    for unit in found:
        params = tuple(each._replace(param=lowered[each.param]) for each in unit.params)
        units.append(unit._replace(params=params))
    return units, in_fp32._replace(params=frozenset(map(lowered.__getitem__, in_fp32.params)))
