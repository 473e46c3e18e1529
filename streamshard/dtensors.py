"""Models with DTensors: the ranks of tensor and expert parallelism, and plain Parameters in the place of DTensors.

DTensors lie on meshes of one axis. *Across* the shard group: tensor parallelism. A matrix is cut over the axis, and
each part over the shard group. *Inside*: experts. The axis has several ranks of the shard group, and ranks with the
same experts cut them. A model may have both. Then the axis of experts may have ranks with other parts of matrices too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

from streamshard.comm.groups import Experts, Groups, Parts, group_of_ranks
from streamshard.comm.ranks import raise_if, refuse_together
from streamshard.errors import ConfigError, RankMismatchError, ShardingError, warn_user
from streamshard.forms import DTensorForm, form_of, lower
from streamshard.planning.discovery import FoundParam, FoundUnit
from streamshard.planning.structure import InFp32, join_names, modules_inside, modules_of, params_of
from streamshard.torch_private import root_mesh

_ranks_of: Callable[[dist.ProcessGroup], list[int]] = dist.get_process_group_ranks
_OF_SEQUENCES = re.compile("cp|context|seq")  # names of mesh axes whose ranks share sequences


class Axis(NamedTuple):
    """The mesh of DTensors, as a rank sees it.

    Attributes:
        number: of the rank on the axis.
        ranks: of the axis, global numbers.
        device_type: of the mesh.
    """

    number: int
    ranks: tuple[int, ...]
    device_type: str

    @classmethod
    def of(cls, form: DTensorForm) -> Axis:
        """The axis of a DTensor, as this rank sees it."""
        return cls(form.mesh.get_local_rank(), tuple(form.mesh.mesh.flatten().tolist()), form.mesh.device_type)

    def is_inside(self, shard: Sequence[int]) -> bool:
        """Whether DTensors on the axis are experts, if the ranks of `shard` shard the model."""
        # This rank is in both, so one common rank says nothing.
        return len(set(self.ranks).intersection(shard)) > 1


class Axes(NamedTuple):
    """The axes of a model's DTensors; None: there are no such DTensors."""

    across: Axis | None = None
    inside: Axis | None = None


def groups_with_dtensors(who: Groups | None, module: nn.Module, check: Callable[[], None]) -> Groups | None:
    """`who`, and the groups of the model's DTensors. Collective if there is a process group.

    Args:
        who: the groups of the user's mesh; None: all ranks.
        module: the model.
        check: raises if the model was changed by another library.

    Raises:
        ConfigError: on all ranks: an axis and the ranks of `who` do not make up the model's ranks. Or there is no mesh,
            and the DTensors may be experts.
        RankMismatchError: on all ranks of `who`: ranks have DTensors on different axes.
        ShardingError: on all ranks of `who`: a rank's model was changed by another library, or has DTensors on a mesh
            of several axes, or on several axes of one kind.
    """
    error, axes = None, Axes()
    try:
        check()
        axes = axes_of(module, None if who is None else _ranks_of(who.shard))
    except Exception as raised:
        error = raised  # told to the ranks that wait below
    base = dist.group.WORLD if who is None else who.all_ranks
    told: list[Axes] = [] if base is None else refuse_together(base, error, axes)
    raise_if(error)  # if there were no ranks to tell
    if base is not None:
        _refuse_different_models(_ranks_of(base), told)
    if axes.across is not None:
        assert base is not None
        beside = {
            rank: each.across for rank, each in zip(_ranks_of(base), told, strict=True) if each.across is not None
        }
        who = _with_tensor_parallel(who, axes.across, beside)
    if axes.inside is not None:
        assert who is not None
        who = _with_experts(who, axes.inside)
    return who


def _refuse_different_models(ranks: Sequence[int], told: Sequence[Axes]) -> None:
    """Raise if some ranks have DTensors of a kind that others do not have."""
    for kind, axes in zip(("", " of experts"), zip(*told, strict=True), strict=True):
        if None in axes and any(axes):
            full = ranks[next(number for number, axis in enumerate(axes) if axis is not None)]
            raise RankMismatchError(
                f"ranks have different models: rank {full} has DTensors{kind}, and rank {ranks[axes.index(None)]} has "
                "none: parallelize the model on all ranks, with one plan"
            )


def warn_of_shared_sequences(mesh: DeviceMesh, who: Groups) -> None:
    """Warn if ranks that share a sequence, by the name of their axis of the whole mesh, do not train one model."""
    root, model = root_mesh(mesh), set(_ranks_of(who.all_ranks))
    for name in filter(_OF_SEQUENCES.search, root.mesh_dim_names or ()):
        ranks = _ranks_of(root.get_group(name))
        if not model.issuperset(ranks) and dist.get_rank() == root.mesh.flatten()[0]:  # one rank warns
            warn_user(
                f"mesh= leaves out ranks along {name!r}: ranks {ranks} would train copies of the model that nothing "
                "averages. If they share sequences (context parallelism), they shard the model together: "
                f'StreamShard(model, mesh=mesh["dp", {name!r}]._flatten("all"))'
            )


def _dtensors_of(module: object) -> dict[str, tuple[nn.Parameter, DTensorForm]]:
    """The DTensors among the parameters, by name."""
    params = params_of(module) if isinstance(module, nn.Module) else {}
    forms = {name: (param, form_of(param)) for name, param in params.items() if not is_lazy(param)}
    return {name: (param, form) for name, (param, form) in forms.items() if isinstance(form, DTensorForm)}


def axes_of(module: nn.Module, shard: Sequence[int] | None) -> Axes:
    """The axes of the DTensors among the parameters.

    Args:
        module: the model.
        shard: the ranks that shard it; None: not known, and none of the DTensors may be experts.

    Raises:
        ConfigError: `shard` is None, and a DTensor may be of experts.
        ShardingError: see `groups_with_dtensors`.
    """
    found = _dtensors_of(module)
    if found:
        _refuse_local_adapters(module)
    names: tuple[dict[Axis, str], dict[Axis, str]] = {}, {}
    for name, (param, form) in found.items():
        if form.mesh.ndim > 1:
            axes = f"{name!r} is a DTensor on a mesh of axes {form.mesh.mesh_dim_names}: wanted one axis, across the "
            raise ShardingError(axes + 'ranks that shard it (torchtitan: parallelism.spmd_backend="partial_dtensor")')
        if shard is None and param.ndim > 2 and form.cut_along == 0:  # experts are stacked along dim 0
            raise ConfigError(
                f'{name!r} is a DTensor and may be of experts: give mesh=, such as mesh["dp"] for tensor parallelism, '
                "or all ranks, mesh=torch.distributed.group.WORLD, for experts"
            )
        axis = Axis.of(form)
        # A model may have one mesh across the shard group, and one inside it.
        others = names[axis.is_inside(shard or ())]
        for other in others.keys() - {axis}:
            raise ShardingError(f"{others[other]!r} and {name!r} are DTensors on different meshes: wanted one mesh")
        others.setdefault(axis, name)
    return Axes(*(next(iter(each), None) for each in names))


def _with_tensor_parallel(who: Groups | None, axis: Axis, beside: dict[int, Axis]) -> Groups:
    """The groups of a model that is cut over `axis`. Collective.

    Args:
        who: the groups of the user's mesh; None: all ranks with the same number on the axis shard the model.
        axis: of this rank.
        beside: by rank of `who`, its axis.

    Raises:
        ConfigError: on all ranks: see `_refuse_to_divide`.
    """
    if who is None:
        shard = group_of_ranks([rank for rank, other in beside.items() if other.number == axis.number], beside)
        who = Groups(shard, None, shard, device_type=axis.device_type)
    model, everyone = (
        sorted({each for rank in _ranks_of(group) for each in beside[rank].ranks})
        for group in (who.shard, who.all_ranks)
    )
    if len(everyone) != who.all_ranks.size() * len(axis.ranks):  # ranks of one axis would be counted twice
        _refuse_to_divide(who, axis)
    parts = Parts(len(axis.ranks), axis.number, group_of_ranks(model, everyone), who.all_ranks, axis=axis.ranks[0])
    # A group with the same ranks is taken again: NCCL's communicators take hundreds of MB each.
    return who._replace(all_ranks=group_of_ranks(everyone, everyone, parts.model), tensor_parallel=parts)


def _with_experts(who: Groups, axis: Axis) -> Groups:
    """`who`, and the groups of experts on `axis`. Collective.

    Raises:
        ConfigError: on all ranks: see `_refuse_to_divide`.
    """
    across = who.tensor_parallel
    model = who.shard if across is None else across.model
    numbers = refuse_together(who.all_ranks, None, axis.number)  # nobody refuses: this exchanges numbers
    same = [rank for rank, number in zip(_ranks_of(who.all_ranks), numbers, strict=True) if number == axis.number]
    # If ranks with other parts of matrices are not on the axis, they have copies of this rank's experts.
    has_copies = across is not None and set(axis.ranks).issubset(_ranks_of(who.shard))
    cut_by = who.shard if has_copies else model
    own = [rank for rank in same if rank in _ranks_of(cut_by)]
    if len(own) * len(axis.ranks) != cut_by.size() or not set(axis.ranks).issubset(_ranks_of(model)):
        _refuse_to_divide(who, axis)
    counts = across is None or not has_copies or across.number == 0  # of copies the first one
    everyone = _ranks_of(who.all_ranks)
    shard = group_of_ranks(own, everyone)
    parts = Parts(len(axis.ranks), axis.number, model, group_of_ranks(same, everyone, shard), counts)
    return who._replace(experts=Experts(shard, parts))


def _refuse_to_divide(who: Groups, axis: Axis) -> NoReturn:
    """Raise, because the ranks of `who` and of `axis` do not make up the ranks of a model."""
    raise ConfigError(
        f"the model has DTensors on ranks {list(axis.ranks)}, and is sharded over ranks {_ranks_of(who.shard)}: wanted "
        'other axes, such as StreamShard(model, mesh=world["dp"]) after parallelize_module(model, world["tp"], plan); '
        "or with DTensors of experts a mesh that the ranks of the experts divide evenly"
    )


def _refuse_local_adapters(module: Any) -> None:
    """Raise if PEFT has made plain adapters for this rank's part of a matrix: ranks would take them for copies."""
    for name, child in modules_of(module):
        whole = getattr(getattr(child, "base_layer", None), "weight", None)
        if whole is None or not isinstance(form_of(whole), DTensorForm):
            continue
        for key, param in params_of(child).items():
            # LoRA's A has the inputs of the whole matrix, B its outputs.
            fits = param.shape[-1:] == whole.shape[-1:] or param.shape[:1] == whole.shape[:1]
            if not key.startswith("base_layer.") and param.ndim == 2 and not fits:
                raise ShardingError(
                    f"adapter {join_names(name, key)!r} {list(param.shape)} is made for this rank's part of a matrix "
                    f"{list(whole.shape)}: load the model by from_pretrained(.., distributed_config=DistributedConfig("
                    "tp_size=N)), for which PEFT makes DTensors"
                )


def mark_experts(module: nn.Module, found: Sequence[FoundUnit], shard: Sequence[int]) -> list[FoundUnit]:
    """`found`, with the DTensors inside the shard group marked as experts.

    Args:
        module, found: the model, and its units.
        shard: ranks of the shard group.

    Raises:
        ShardingError: such a DTensor is no expert: its gradient would be summed over the wrong ranks.
    """
    inside = {
        name: (param, form) for name, (param, form) in _dtensors_of(module).items() if Axis.of(form).is_inside(shard)
    }
    stacked = {name.rpartition(".")[0] for name, (param, _) in inside.items() if param.ndim > 2}
    for name, (_, form) in inside.items():
        if not form.box:
            raise ShardingError(
                f"{name!r} is a copy (Replicate) on the mesh of the experts, {form.mesh}: leave it a plain Parameter"
            )
        if form.cut_along != 0 or name.rpartition(".")[0] not in stacked:
            raise ShardingError(
                f"{name!r} is cut along dim {form.cut_along} on {form.mesh}, whose ranks shard the model: wanted "
                "experts stacked along dim 0, in three dims, and biases beside them. For tensor parallelism shard over "
                'other ranks, such as mesh=world["dp"]'
            )
    # After the loop: a tensor parallel plan also cuts vocabularies unevenly, and above it gets the better message.
    for name, (param, form) in inside.items():
        if param.shape[0] % form.mesh.size():
            raise ShardingError(
                f"{name!r} has {param.shape[0]} experts over {form.mesh.size()} ranks: wanted the same number on each"
            )
    return _with_params(found, lambda each: each._replace(is_expert=each.names[0] in inside))


def lower_model(module: nn.Module, found: Sequence[FoundUnit], in_fp32: InFp32) -> tuple[list[FoundUnit], InFp32]:
    """Put plain Parameters in the place of DTensors, also into `found` and `in_fp32`. See `streamshard.forms.lower`."""
    # Once for each: a tied one stays tied.
    lowered = {param: lower(name, param) for name, param in params_of(module).items()}
    for owner in modules_inside(module):
        for key, param in owner._parameters.items():
            if param is not None and lowered[param] is not param:
                owner._parameters[key] = lowered[param]
    units = _with_params(found, lambda each: each._replace(param=lowered[each.param]))
    return units, in_fp32._replace(params=frozenset(map(lowered.__getitem__, in_fp32.params)))


def _with_params(found: Sequence[FoundUnit], change: Callable[[FoundParam], FoundParam]) -> list[FoundUnit]:
    return [unit._replace(params=tuple(map(change, unit.params))) for unit in found]
