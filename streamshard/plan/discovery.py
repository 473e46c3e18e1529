"""Which modules are units, and which parameters lie in which unit. Looks at the model, changes nothing."""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import nn

from streamshard.errors import UnitError
from streamshard.plan.detection import detect_layers, find_large, has_params, is_callable, warn_of_root_unit
from streamshard.plan.structure import join_names, modules_inside, modules_of

__all__ = [
    "FoundParam",
    "FoundUnit",
    "ResidentArgument",
    "UnitsArgument",
    "coalesce",
    "find_groups",
    "owners_of",
]

UnitsArgument = (
    type[nn.Module] | str | Iterable[type[nn.Module] | str | nn.Module] | Callable[..., bool] | None
)  # what StreamShard(units=...) accepts
ResidentArgument = type[nn.Module] | str | nn.Module | Iterable[type[nn.Module] | str | nn.Module]  # resident=...


class FoundUnit(NamedTuple):
    """What becomes a unit: one layer, or several that `coalesce` has put together; or what is large beside the layers.

    Attributes:
        name: fully qualified.
        modules: its layers.
        is_resident: it is resident: it takes no turns in the block slots, whatever else is of its class.
        resident: modules inside, whose parameters lie in the root unit.
    """

    name: str
    modules: tuple[nn.Module, ...]
    is_resident: bool = False
    resident: tuple[nn.Module, ...] = ()


class FoundParam(NamedTuple):
    """One parameter with all the names it is registered under, the first one in ``names[0]``."""

    names: tuple[str, ...]
    param: nn.Parameter


def find_groups(
    root: nn.Module,
    units: UnitsArgument,
    resident: ResidentArgument = (),
    *,
    param_bytes: int = 1,
    min_unit_bytes: int = 0,
) -> tuple[list[FoundUnit], list[list[FoundParam]]]:
    """The units of `root` in registration order, as `StreamShard` documents for its arguments `units` and `resident`.

    Args:
        root: the model.
        units: the user's, or None for the layers and what is large beside them.
        resident: the user's. A layer that is one of these modules is resident; of one inside a layer the parameters lie
            in the root unit.
        param_bytes: of an element.
        min_unit_bytes: small units are put together until they have so many.

    Returns:
        The units, and the parameters of each; those of the root unit first.

    Raises:
        UnitError: a unit is not part of the model, is the root, overlaps another or has no parameters; nothing fits.
    """
    names = {module: name for name, module in modules_of(root)}
    is_none = isinstance(resident, list | tuple) and not resident
    wanted = [] if is_none else _select(root, resident, names, "resident")
    found = [_with_resident(unit, wanted) for unit in _find_units(root, units, names)]
    layers = [layer for unit in found for layer in unit.modules]
    if min_unit_bytes:
        groups = _group_params(root, found)
        sizes = [param_bytes * sum(each.param.numel() for each in group) for group in groups[1:]]
        found = _coalesce_between(found, sizes, min_unit_bytes)
    if units is None and found:
        large = find_large(root, layers, -(-min_unit_bytes // param_bytes))
        inside = {inner for module in wanted for inner in modules_inside(module) if inner is not module}
        found += [
            FoundUnit(name, (module,), is_resident=True) for module, name in large.items() if module not in inside
        ]
    held = {inner for unit in found for layer in unit.modules for inner in modules_inside(layer)}
    beside = [module for module in dict.fromkeys(wanted) if module not in held]
    _check_resident(beside, found, names)
    found += [FoundUnit(names[module], (module,), is_resident=True) for module in beside]
    order = {module: position for position, module in enumerate(names)}
    found.sort(key=lambda unit: order[unit.modules[0]])
    groups = _group_params(root, found)
    for unit, group in zip(found, groups[1:], strict=True):
        if not group and unit.resident:
            raise UnitError(f"resident names all modules of layer {unit.name!r} that have parameters: name the layer")
        if not group and unit.modules[0] in beside:
            raise UnitError(
                f"resident names {unit.name!r}, whose parameters other modules share: they are in place throughout a "
                "step already. Leave it out"
            )
    if units is None and found:
        warn_of_root_unit(root, layers, {each.param for each in groups[0]})
    return found, groups


def _with_resident(unit: FoundUnit, modules: Sequence[nn.Module]) -> FoundUnit:
    """`unit`, of one layer, resident if it is one of `modules`; else with those of them that lie in it."""
    if unit.modules[0] in modules:
        return unit._replace(is_resident=True)
    inside = set(modules_inside(unit.modules[0]))
    return unit._replace(resident=tuple(module for module in modules if module in inside))


def _coalesce_between(units: Sequence[FoundUnit], sizes: Sequence[int], at_least: int) -> list[FoundUnit]:
    """`coalesce`, of what takes turns and has no resident layer between."""
    runs = itertools.groupby(zip(units, sizes, strict=True), key=lambda each: each[0].is_resident)
    together: list[FoundUnit] = []
    for is_resident, run in runs:
        members, their_sizes = zip(*run, strict=True)
        together += members if is_resident else coalesce(members, their_sizes, at_least)
    return together


def _check_resident(modules: Sequence[nn.Module], units: Sequence[FoundUnit], names: dict[nn.Module, str]) -> None:
    """Raise if one of `modules`, which lie in no unit, cannot be a unit of its own."""
    layers = {layer: unit.name for unit in units for layer in unit.modules}
    for module in modules:
        name = names[module]
        if not name:
            raise UnitError("resident names the whole model: name layers, or modules beside them")
        if not has_params(module):
            raise UnitError(f"resident names {name!r}, which has no parameters")
        for inner in modules_inside(module):
            if inner in layers:
                raise UnitError(
                    f"resident names {name!r}, in which the layer {layers[inner]!r} lies: name layers, or modules "
                    "beside them"
                )
            if inner is not module and inner in modules:
                raise UnitError(f"resident names {name!r}, and {names[inner]!r}, which lies in it: name one of them")


def _find_units(root: nn.Module, units: UnitsArgument, names: dict[nn.Module, str]) -> list[FoundUnit]:
    found = detect_layers(root) if units is None else _select(root, units, names, "units")
    _check_units(root, found)
    order = {module: position for position, module in enumerate(names)}
    return [FoundUnit(names[module], (module,)) for module in sorted(found, key=order.__getitem__)]


def _select(root: nn.Module, units: UnitsArgument, names: dict[nn.Module, str], what: str) -> list[nn.Module]:
    """The modules that `units`, the argument `what`, names."""
    if isinstance(units, type | str | nn.Module) and not isinstance(units, nn.ModuleList):
        units = [units]
    if callable(units) and not isinstance(units, nn.Module) and what == "units":
        return _selected_by(root, units)
    if units is not None and not isinstance(units, Iterable):
        others = ", a predicate or None" if what == "units" else ""
        raise UnitError(f"{what}={units!r}: wanted module classes, modules, names of either{others}")
    by_name = {name: module for module, name in names.items()}
    inside = [module for module in names if module is not root]
    found: list[nn.Module] = []
    for wanted in units or ():
        if isinstance(wanted, type):
            matches = _of_class(inside, wanted)
            if not matches:
                raise UnitError(f"{what} names the class {wanted.__name__}, but the model has no module of that class")
            found.extend(matches)
        elif isinstance(wanted, str):
            matches = [by_name[wanted]] if wanted in by_name else _of_class(inside, wanted)
            if not matches:
                similar = _names_like(wanted, [*by_name, *dict.fromkeys(type(module).__name__ for module in inside)])
                raise UnitError(
                    f"{what} names {wanted!r}, but no module inside the model, nor the class of one, has that name"
                    f"{similar}"
                )
            found.extend(matches)
        elif isinstance(wanted, nn.Module):
            if wanted not in names:
                raise UnitError(f"{what} holds a {type(wanted).__name__} that is not part of the model")
            found.append(wanted)
        else:
            raise UnitError(f"{what} holds {wanted!r}: wanted module classes, modules, or names of either")
    if not found:
        raise UnitError(f"{what} selects no module")
    return found


def _of_class(modules: Sequence[nn.Module], wanted: type | str) -> list[nn.Module]:
    """Those whose class `wanted` is, or names; if there are none, those whose class derives from it."""
    exact = [module for module in modules if wanted in (type(module), type(module).__name__)]
    return exact or [
        module for module in modules if any(wanted in (base, base.__name__) for base in type(module).__mro__)
    ]


def _names_like(wanted: str, names: Sequence[str]) -> str:
    """What may have been meant by a name that is none of `names`."""
    similar = difflib.get_close_matches(wanted, names, n=3)
    return f"; like it are {', '.join(map(repr, similar))}" if similar else "; model.named_modules() has the names"


def _selected_by(root: nn.Module, predicate: Callable[..., bool]) -> list[nn.Module]:
    arity = len(inspect.signature(predicate).parameters)
    found = [
        module
        for name, module in modules_of(root)
        if module is not root and (predicate(name, module) if arity > 1 else predicate(module))
    ]
    if not found:
        raise UnitError("the predicate given as units selects no module")
    return found


def _check_units(root: nn.Module, found: list[nn.Module]) -> None:
    names = {module: name for name, module in modules_of(root)}
    chosen: set[nn.Module] = set()
    for unit in found:
        if unit is root:
            raise UnitError("units holds the whole model: wanted layers inside it")
        if not has_params(unit):
            raise UnitError(f"unit {names[unit]!r} has no parameters")
        if not is_callable(unit):
            raise UnitError(
                f"unit {names[unit]!r} is a {type(unit).__name__}, which has no forward: nobody calls it, so its "
                f"weights would never be gathered. Name the layers in it: units=list(model.{names[unit]})"
            )
        if unit in chosen:
            raise UnitError(f"unit {names[unit]!r} is given twice")
        chosen.add(unit)
    for unit in found:
        for module in modules_inside(unit):
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
    resident = tuple(module for unit in units for module in unit.resident)
    return FoundUnit(name, tuple(module for unit in units for module in unit.modules), resident=resident)


def owners_of(units: Sequence[FoundUnit]) -> dict[nn.Module, int]:
    """Which unit each module belongs to, by number from 1; 0 for one that several units share, or that is resident."""
    owner: dict[nn.Module, int] = {}
    for number, unit in enumerate(units, 1):
        for module in itertools.chain.from_iterable(map(modules_inside, unit.modules)):
            owner[module] = number if owner.get(module, number) == number else 0
    for module in (inner for unit in units for resident in unit.resident for inner in modules_inside(resident)):
        owner[module] = 0
    return owner


def _group_params(root: nn.Module, units: Sequence[FoundUnit]) -> list[list[FoundParam]]:
    """The parameters of the root unit (first) and of each unit, in registration order.

    A parameter that more than one unit holds, or a unit and the rest of the model, is tied across them: it lies in the
    root unit, whose weights are in place throughout a pass.
    """
    owner = owners_of(units)
    names: dict[nn.Parameter, list[str]] = {}
    holders: dict[nn.Parameter, set[int]] = {}
    for prefix, module in modules_of(root, remove_duplicate=False):
        for key, param in module._parameters.items():
            if param is not None:
                names.setdefault(param, []).append(join_names(prefix, key))
                holders.setdefault(param, set()).add(owner.get(module, 0))
    groups: list[list[FoundParam]] = [[] for _ in range(len(units) + 1)]
    for param, where in holders.items():
        number = next(iter(where)) if len(where) == 1 else 0
        groups[number].append(FoundParam(tuple(names[param]), param))
    return groups
