"""Which modules are units, and which parameters lie in which unit. Looks at the model, changes nothing."""

from __future__ import annotations

import difflib
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from torch import nn

from streamshard.errors import UnitError
from streamshard.plan.detection import detect_layers, find_large, has_params, is_callable, warn_of_edge
from streamshard.plan.structure import join_names, modules_inside, modules_of

__all__ = [
    "FoundParam",
    "FoundUnit",
    "UnitsArgument",
    "coalesce",
    "find_groups",
    "owners_of",
]

UnitsArgument = (
    type[nn.Module] | str | Iterable[type[nn.Module] | str | nn.Module] | Callable[..., bool] | None
)  # what StreamShard(units=...) accepts


class FoundUnit(NamedTuple):
    """What becomes a unit: one layer, or several that `coalesce` has put together; or what is large beside the layers.

    Attributes:
        name: fully qualified.
        modules: its layers.
        is_lone: it takes no turns in the block slots, whatever else is of its class.
    """

    name: str
    modules: tuple[nn.Module, ...]
    is_lone: bool = False


class FoundParam(NamedTuple):
    """One parameter with all the names it is registered under, the first one in ``names[0]``."""

    names: tuple[str, ...]
    param: nn.Parameter


def find_groups(
    root: nn.Module, units: UnitsArgument, *, param_bytes: int = 1, min_unit_bytes: int = 0
) -> tuple[list[FoundUnit], list[list[FoundParam]]]:
    """The units of `root` in registration order, as `StreamShard` documents for its argument `units`.

    Args:
        root: the model.
        units: the user's, or None for the layers and what is large beside them.
        param_bytes: of an element.
        min_unit_bytes: small units are put together until they have so many.

    Returns:
        The units, and the parameters of each; those of the edge unit first.

    Raises:
        UnitError: a unit is not part of the model, is the root, overlaps another or has no parameters; nothing fits.
    """
    found = _find_units(root, units)
    groups = _group_params(root, found)
    if min_unit_bytes:
        sizes = [param_bytes * sum(each.param.numel() for each in group) for group in groups[1:]]
        found = coalesce(found, sizes, min_unit_bytes)
        groups = _group_params(root, found)
    if units is None and found:
        layers = [layer for unit in found for layer in unit.modules]
        large = find_large(root, layers, -(-min_unit_bytes // param_bytes))
        order = {module: position for position, module in enumerate(modules_inside(root))}
        found += [FoundUnit(name, (module,), is_lone=True) for module, name in large.items()]
        found.sort(key=lambda unit: order[unit.modules[0]])
        groups = _group_params(root, found)
        warn_of_edge(root, layers, {each.param for each in groups[0]})
    return found, groups


def _find_units(root: nn.Module, units: UnitsArgument) -> list[FoundUnit]:
    names = {module: name for name, module in modules_of(root)}
    found = detect_layers(root) if units is None else _select(root, units, names)
    _check_units(root, found)
    order = {module: position for position, module in enumerate(names)}
    return [FoundUnit(names[module], (module,)) for module in sorted(found, key=order.__getitem__)]


def _select(root: nn.Module, units: UnitsArgument, names: dict[nn.Module, str]) -> list[nn.Module]:
    if isinstance(units, type | str | nn.Module) and not isinstance(units, nn.ModuleList):
        units = [units]
    if callable(units) and not isinstance(units, nn.Module):
        return _selected_by(root, units)
    if units is not None and not isinstance(units, Iterable):
        raise UnitError(f"units={units!r}: wanted module classes, modules, names of either, a predicate or None")
    by_name = {name: module for module, name in names.items()}
    inside = [module for module in names if module is not root]
    found: list[nn.Module] = []
    for wanted in units or ():
        if isinstance(wanted, type):
            matches = _of_class(inside, wanted)
            if not matches:
                raise UnitError(f"units names the class {wanted.__name__}, but the model has no module of that class")
            found.extend(matches)
        elif isinstance(wanted, str):
            matches = [by_name[wanted]] if wanted in by_name else _of_class(inside, wanted)
            if not matches:
                similar = _names_like(wanted, [*by_name, *dict.fromkeys(type(module).__name__ for module in inside)])
                raise UnitError(
                    f"units names {wanted!r}, but no module inside the model, nor the class of one, has that name"
                    f"{similar}"
                )
            found.extend(matches)
        elif isinstance(wanted, nn.Module):
            if wanted not in names:
                raise UnitError(f"units holds a {type(wanted).__name__} that is not part of the model")
            found.append(wanted)
        else:
            raise UnitError(f"units holds {wanted!r}: wanted module classes, modules, or names of either")
    if not found:
        raise UnitError("units selects no module")
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
    return FoundUnit(name, tuple(module for unit in units for module in unit.modules))


def owners_of(units: Sequence[FoundUnit]) -> dict[nn.Module, int]:
    """Which unit each module belongs to, by number from 1; 0 for a module that several units share."""
    owner: dict[nn.Module, int] = {}
    for number, unit in enumerate(units, 1):
        for module in itertools.chain.from_iterable(map(modules_inside, unit.modules)):
            owner[module] = number if owner.get(module, number) == number else 0
    return owner


def _group_params(root: nn.Module, units: Sequence[FoundUnit]) -> list[list[FoundParam]]:
    """The parameters of the edge unit (first) and of each unit, in registration order.

    A parameter that more than one unit holds, or a unit and the rest of the model, is tied across them: it lies in the
    edge unit, whose weights are in place throughout a pass.
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
