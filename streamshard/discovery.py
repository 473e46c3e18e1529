"""Which modules are units, and which parameters lie in which unit. Looks at the model, changes nothing."""

from __future__ import annotations

import inspect
import itertools
import operator
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import nn

from streamshard.errors import ShardingError, UnitError

__all__ = [
    "FoundParam",
    "FoundUnit",
    "Structure",
    "UnitsArgument",
    "check_params",
    "coalesce",
    "find_units",
    "group_params",
    "owners_of",
]

UnitsArgument = (
    type[nn.Module] | str | Iterable[type[nn.Module] | str | nn.Module] | Callable[..., bool] | None
)  # what StreamShard(units=...) accepts


class FoundUnit(NamedTuple):
    """What becomes a unit: one layer, or several that `coalesce` has put together."""

    name: str
    modules: tuple[nn.Module, ...]


class FoundParam(NamedTuple):
    """One parameter with all the names it is registered under, the first one in ``names[0]``."""

    names: tuple[str, ...]
    param: nn.Parameter


def find_units(root: nn.Module, units: UnitsArgument) -> list[FoundUnit]:
    """The units of `root` in registration order, as `StreamShard` documents for its argument `units`.

    Raises:
        UnitError: a unit is not part of the model, is the root, overlaps another or has no parameters; nothing fits.
    """
    names = {module: name for name, module in root.named_modules()}
    found = _detect(root) if units is None else _select(root, units, names)
    _check_units(root, found)
    order = {module: place for place, module in enumerate(names)}
    return [FoundUnit(names[module], (module,)) for module in sorted(found, key=order.__getitem__)]


def _detect(root: nn.Module) -> list[nn.Module]:
    """``_no_split_modules`` of a transformers model, else the repeated children of the longest container."""
    wanted = set(getattr(root, "_no_split_modules", None) or ())
    found = _repeated(_outermost(root, lambda module: type(module).__name__ in wanted)) if wanted else []
    if not found:
        containers = [m for m in root.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
        found = max((_repeated_children(container) for container in containers), key=len, default=[])
    if not found:
        warnings.warn(
            f"{type(root).__name__} has no repeated layers that StreamShard can find: it becomes one unit, whose "
            "weights are all gathered at once. Name its layers with units=[...] to stream them",
            stacklevel=6,  # who called StreamShard
        )
    return found


def _outermost(root: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[nn.Module]:
    found: dict[nn.Module, None] = {}
    inside: set[nn.Module] = set()
    for module in root.modules():
        if module is not root and module not in inside and _has_params(module) and wanted(module):
            found[module] = None
            inside.update(module.modules())
    return list(found)


def _repeated_children(container: nn.Module) -> list[nn.Module]:
    children = [child for child in dict.fromkeys(container.children()) if _has_params(child)]
    counts = Counter(type(child) for child in children)
    return [child for child in children if counts[type(child)] > 1]


def _repeated(modules: list[nn.Module]) -> list[nn.Module]:
    """Those of a class that occurs more than once: transformers lists a model's embeddings beside its layers."""
    counts = Counter(type(module) for module in modules)
    return [module for module in modules if counts[type(module)] > 1] or modules


def _has_params(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _select(root: nn.Module, units: UnitsArgument, names: dict[nn.Module, str]) -> list[nn.Module]:
    if isinstance(units, type | str | nn.Module) and not isinstance(units, nn.ModuleList):
        units = [units]
    if callable(units) and not isinstance(units, nn.Module):
        return _selected_by(root, units)
    if units is not None and not isinstance(units, Iterable):
        raise UnitError(f"units={units!r}: wanted module classes, modules, names, a predicate or None")
    by_name = {name: module for module, name in names.items()}
    found: list[nn.Module] = []
    for wanted in units or ():
        if isinstance(wanted, type):
            matches = [m for m in names if m is not root and type(m) is wanted] or [
                m for m in names if m is not root and isinstance(m, wanted)
            ]
            if not matches:
                raise UnitError(f"units names the class {wanted.__name__}, but the model has no module of that class")
            found.extend(matches)
        elif isinstance(wanted, str):
            if wanted not in by_name:
                raise UnitError(f"units names {wanted!r}, but the model has no module of that name")
            found.append(by_name[wanted])
        elif isinstance(wanted, nn.Module):
            if wanted not in names:
                raise UnitError(f"units holds a {type(wanted).__name__} that is not part of the model")
            found.append(wanted)
        else:
            raise UnitError(f"units holds {wanted!r}: wanted module classes, modules or names")
    if not found:
        raise UnitError("units selects no module")
    return found


def _selected_by(root: nn.Module, predicate: Callable[..., bool]) -> list[nn.Module]:
    arity = len(inspect.signature(predicate).parameters)
    found = [
        module
        for name, module in root.named_modules()
        if module is not root and (predicate(name, module) if arity > 1 else predicate(module))
    ]
    if not found:
        raise UnitError("the predicate given as units selects no module")
    return found


def _check_units(root: nn.Module, found: list[nn.Module]) -> None:
    names = {module: name for name, module in root.named_modules()}
    chosen: set[nn.Module] = set()
    for unit in found:
        if unit is root:
            raise UnitError("units holds the whole model: wanted layers inside it")
        if not _has_params(unit):
            raise UnitError(f"unit {names[unit]!r} has no parameters")
        if type(unit).forward is nn.Module.forward:
            raise UnitError(
                f"unit {names[unit]!r} is a {type(unit).__name__}, which has no forward: nobody calls it, so its "
                f"weights would never be gathered. Name the layers in it: units=list(model.{names[unit]})"
            )
        if unit in chosen:
            raise UnitError(f"unit {names[unit]!r} is given twice")
        chosen.add(unit)
    for unit in found:
        for module in unit.modules():
            if module is not unit and module in chosen:
                raise UnitError(f"unit {names[unit]!r} overlaps unit {names[module]!r}, which lies inside it")


def coalesce(units: Sequence[FoundUnit], sizes: Sequence[int], at_least: int) -> list[FoundUnit]:
    """Put consecutive units together until each has `at_least` bytes; what is left over joins the last of them.

    Args:
        units: in registration order.
        sizes: bytes of each.
        at_least: wanted of each unit that is returned.
    """
    groups: list[list[FoundUnit]] = [[]]
    missing = at_least
    for unit, size in zip(units, sizes, strict=True):
        if missing <= 0:
            groups.append([])
            missing = at_least
        groups[-1].append(unit)
        missing -= size
    if missing > 0 and len(groups) > 1:
        rest = groups.pop()
        groups[-1].extend(rest)
    return [_together(group) for group in groups if group]


def _together(units: Sequence[FoundUnit]) -> FoundUnit:
    name = units[0].name if len(units) == 1 else f"{units[0].name} .. {units[-1].name}"
    return FoundUnit(name, tuple(module for unit in units for module in unit.modules))


def owners_of(units: Sequence[FoundUnit]) -> dict[nn.Module, int]:
    """Which unit each module belongs to, by place from 1; 0 for a module that several units share."""
    owner: dict[nn.Module, int] = {}
    for place, unit in enumerate(units, 1):
        for module in itertools.chain.from_iterable(top.modules() for top in unit.modules):
            owner[module] = place if owner.get(module, place) == place else 0
    return owner


def group_params(root: nn.Module, units: Sequence[FoundUnit]) -> list[list[FoundParam]]:
    """The parameters of the edge unit (first) and of each unit, in registration order.

    A parameter that more than one unit holds, or a unit and the rest of the model, is tied across them: it lies in the
    edge unit, whose weights are in place throughout a pass.
    """
    owner = owners_of(units)
    names: dict[nn.Parameter, list[str]] = {}
    holders: dict[nn.Parameter, set[int]] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        for key, param in module._parameters.items():
            if param is not None:
                names.setdefault(param, []).append(_join(prefix, key))
                holders.setdefault(param, set()).add(owner.get(module, 0))
    groups: list[list[FoundParam]] = [[] for _ in range(len(units) + 1)]
    for param, where in holders.items():
        place = next(iter(where)) if len(where) == 1 else 0
        groups[place].append(FoundParam(tuple(names[param]), param))
    return groups


def check_params(root: nn.Module) -> torch.device:
    """Raise if the parameters cannot be sharded; the device they all are on.

    Raises:
        ShardingError: none at all, several devices, meta, a dtype other than bf16, fp16, fp32, or a gradient there.
    """
    first: tuple[str, torch.device] | None = None
    for name, param in root.named_parameters():
        if param.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            kind = "complex" if param.is_complex() else "quantized or integer" if not param.is_floating_point() else ""
            raise ShardingError(
                f"parameter {name!r} is {param.dtype}{f' ({kind})' if kind else ''}: main weights are fp32, so only "
                "fp32, bf16 and fp16 parameters can be sharded"
            )
        if param.layout is not torch.strided or type(param) is not nn.Parameter:
            raise ShardingError(
                f"parameter {name!r} is a {type(param).__name__} ({param.layout}), wanted a dense Parameter"
            )
        if param.device.type == "meta":
            raise ShardingError(
                f"parameter {name!r} is on the meta device: materialise the model first (to_empty, init)"
            )
        if param.grad is not None:
            raise ShardingError(
                f"parameter {name!r} has a gradient from before StreamShard(model), of this rank's loss alone: step or "
                "model.zero_grad() first"
            )
        if hasattr(param, "_in_backward_optimizers"):
            refuse_step_in_backward(name)
        if first is None:
            first = name, param.device
        elif param.device != first[1]:
            raise ShardingError(
                f"parameters are on several devices: {first[0]!r} on {first[1]}, {name!r} on {param.device}; move the "
                "model to one"
            )
    if first is None:
        raise ShardingError(f"{type(root).__name__} has no parameters: there is nothing to shard")
    return first[1]


def refuse_step_in_backward(name: str) -> NoReturn:
    """Raise: autograd never accumulates a gradient of parameter `name`, which the optimizer waits for."""
    raise ShardingError(
        f"the optimizer that _apply_optimizer_in_backward gave parameter {name!r} would never step, its gradient is "
        "made by a reduction: step in param.register_post_accumulate_grad_hook, which is called with the sharded "
        "gradient"
    )


class Structure:
    """Which modules and parameters a model was made of when it was sharded, to notice what was put in their place.

    A parameter or layer that is assigned afterwards would compute with weights of this rank alone.

    Args:
        root: the model, unsharded parameters not yet replaced by views.
    """

    def __init__(self, root: nn.Module) -> None:
        self._known = set(root.parameters())
        self._params = [
            (module._parameters, tuple(module._parameters.values()), name) for name, module in root.named_modules()
        ]
        self._children = {
            name: (module._modules, tuple(module._modules.values())) for name, module in root.named_modules()
        }

    def check(self) -> None:
        """Raise if a parameter was added, removed or replaced, or a module with parameters of its own was.

        Raises:
            ShardingError: names the parameter or the module.
        """
        for entries, wanted, name in self._params:
            if len(entries) != len(wanted) or not all(map(operator.is_, entries.values(), wanted)):
                self._refuse_params(entries, wanted, name)
        for name, (modules, children) in self._children.items():
            if len(modules) != len(children) or not all(map(operator.is_, modules.values(), children)):
                self._refuse_modules(modules, name)

    def _refuse_params(
        self, entries: dict[str, nn.Parameter | None], wanted: tuple[nn.Parameter | None, ...], name: str
    ) -> None:
        changed = [key for key, param in entries.items() if not any(param is known for known in wanted)]
        what = ", ".join(repr(_join(name, key)) for key in changed) or f"a parameter of {name or 'the model'!r}"
        raise ShardingError(
            f"{what} was {'replaced or added' if changed else 'removed'} after StreamShard(model): the new one would "
            "be trained by this rank alone. Assign to its data (param.data.copy_, load_state_dict, "
            "summon_full_params(writeback=True)), or change the model before it is sharded"
        )

    def _refuse_modules(self, modules: dict[str, nn.Module | None], name: str) -> None:
        for key, child in modules.items():
            if child is not None and not self._known.issuperset(child.parameters()):
                raise ShardingError(
                    f"module {_join(name, key)!r} was replaced or added after StreamShard(model), and has parameters "
                    "of its own: they would be trained by this rank alone. Change the model before it is sharded"
                )
        self._children[name] = (modules, tuple(modules.values()))  # something without parameters, or taken away


def _join(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key
