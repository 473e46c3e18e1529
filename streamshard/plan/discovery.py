"""Which modules are units, and which parameters lie in which unit. Looks at the model, changes nothing."""

from __future__ import annotations

import inspect
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from streamshard.errors import UnitError, warn_user
from streamshard.plan.structure import join_names, modules_inside, modules_of, params_of

__all__ = [
    "FoundParam",
    "FoundUnit",
    "UnitsArgument",
    "coalesce",
    "find_large",
    "find_units",
    "group_params",
    "owners_of",
    "warn_of_edge",
]

UnitsArgument = (
    type[nn.Module] | str | Iterable[type[nn.Module] | str | nn.Module] | Callable[..., bool] | None
)  # what StreamShard(units=...) accepts


class FoundUnit(NamedTuple):
    """What becomes a unit: one layer, or several that `coalesce` has put together; or what `find_large` has found.

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


def find_units(root: nn.Module, units: UnitsArgument) -> list[FoundUnit]:
    """The units of `root` in registration order, as `StreamShard` documents for its argument `units`.

    Raises:
        UnitError: a unit is not part of the model, is the root, overlaps another or has no parameters; nothing fits.
    """
    names = {module: name for name, module in modules_of(root)}
    found = _detect(root) if units is None else _select(root, units, names)
    _check_units(root, found)
    order = {module: position for position, module in enumerate(names)}
    return [FoundUnit(names[module], (module,)) for module in sorted(found, key=order.__getitem__)]


_SUBSTANTIAL = 0.1  # share of the parameters that makes a list of layers worth streaming, beside the largest one


def _detect(root: nn.Module) -> list[nn.Module]:
    """``_no_split_modules`` of a transformers model, and every substantial list of repeated layers outside of them."""
    wanted = set(getattr(root, "_no_split_modules", None) or ())
    found = _repeated(_outermost(root, lambda module: type(module).__name__ in wanted)) if wanted else []
    lists = list(_find_lists(root, {inner for layer in found for inner in modules_inside(layer)}))
    sizes = [sum(map(_numel, layers)) for layers in lists]
    enough = _SUBSTANTIAL * _numel(root)
    if not found:
        enough = min(enough, max(sizes, default=0))
    found += [layer for layers, size in zip(lists, sizes, strict=True) if size >= enough for layer in layers]
    if not found:
        warn_user(
            f"{type(root).__name__} has no repeated layers that StreamShard can find: it becomes one unit, whose "
            "weights are all gathered at once. Name its layers with units=[...] to stream them",
        )
    return found


def _outermost(root: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[nn.Module]:
    found: dict[nn.Module, None] = {}
    inside: set[nn.Module] = set()
    for module in modules_inside(root):
        if module is not root and module not in inside and _has_params(module) and wanted(module):
            found[module] = None
            inside.update(modules_inside(module))
    return list(found)


def _find_lists(module: nn.Module, taken: set[nn.Module]) -> Iterator[list[nn.Module]]:
    """Lists of repeated layers in `module`, outermost first, none inside another; `taken` is left out and added to."""
    if module in taken:
        return
    taken.add(module)
    layers = [layer for layer in _layers_of(module) if layer not in taken]
    if layers and not _are_stages(layers):
        for layer in layers:
            taken.update(modules_inside(layer))
        yield layers
    for child in module._modules.values():
        if child is not None:
            yield from _find_lists(child, taken)


def _layers_of(module: nn.Module) -> list[nn.Module]:
    """The repeated children of a list or sequence of modules; a list among them, which nobody calls, is looked into."""
    if not isinstance(module, nn.ModuleList | nn.Sequential):
        return []
    layers: dict[nn.Module, None] = {}
    waiting = [*reversed(module._modules.values())]
    while waiting:
        child = waiting.pop()
        if child is not None and isinstance(child, nn.ModuleList) and not _is_callable(child):
            waiting.extend(reversed(child._modules.values()))
        elif child is not None and _is_callable(child) and _has_params(child):
            layers[child] = None
    counts = Counter(type(layer) for layer in layers)
    return [layer for layer in layers if counts[type(layer)] > 1]


def _are_stages(layers: Sequence[nn.Module]) -> bool:
    """Whether these are stages with layers inside: one has as many of them as there are stages, or a third of all."""
    total = sum(map(_numel, layers))
    return any(
        len(inner) >= len(layers) or 3 * sum(map(_numel, inner)) > total
        for layer in layers
        if (inner := _layers_of(layer))
    )


def _repeated(modules: list[nn.Module]) -> list[nn.Module]:
    """Those of a class that occurs more than once: transformers lists a model's embeddings beside its layers."""
    counts = Counter(type(module) for module in modules)
    return [module for module in modules if counts[type(module)] > 1] or modules


def _has_params(module: nn.Module) -> bool:
    return any(param is not None for inner in modules_inside(module) for param in inner._parameters.values())


def _is_callable(module: nn.Module) -> bool:
    # Statically: a scripted class computes its forward when it is asked for it.
    return "forward" in module.__dict__ or inspect.getattr_static(type(module), "forward") is not nn.Module.forward


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in params_of(module).values())


def warn_of_edge(root: nn.Module, groups: Sequence[Sequence[FoundParam]]) -> None:
    """Warn if much of the model lies in the edge unit, in parameters that streamed layers could hold.

    Such are no larger than the largest unit; an embedding often is, and nothing can be done about it.

    Args:
        groups: of the units that were found, those of the edge unit first.
    """
    sizes = [sum(found.param.numel() for found in group) for group in groups]
    loose = [found for found in groups[0] if found.param.numel() <= max(sizes[1:], default=0)]
    numel = sum(found.param.numel() for found in loose)
    if 2 * numel > sum(sizes):
        examples = ", ".join(repr(found.names[0]) for found in loose[:3])
        warn_user(
            f"{numel / sum(sizes):.0%} of the parameters of {type(root).__name__} are outside of the layers that "
            f"StreamShard has found ({examples}, ..): they are all gathered at once. Name the layers that hold them "
            "with units=[...] to stream them too",
        )


_LARGE = 0.5  # share of the largest layer that makes a module worth a gather and a reduction of its own


def find_large(root: nn.Module, found: Sequence[FoundUnit], at_least: int = 0) -> list[FoundUnit]:
    """`found`, and each large module outside of its layers as a unit of its own: embedding and head, above all.

    Large is what holds half as many parameters as the largest layer. A transformers model's input and output embeddings
    are large whatever they hold. A module stays in the edge unit if one of its parameters is in use elsewhere: tied, or
    in a list that another module keeps.

    Args:
        root: the model.
        found: its layers, detected.
        at_least: smaller modules, in parameters, are not large.

    Returns:
        All of them, in registration order.
    """
    layers = [module for unit in found for module in unit.modules]
    inside = {inner for layer in layers for inner in modules_inside(layer)}
    enough: dict[nn.Module, float] = dict.fromkeys(
        modules_inside(root), max(at_least, _LARGE * max(map(_numel, layers), default=0))
    )
    for embeddings in _embeddings(root):
        for module in modules_inside(embeddings):  # adapters beside the weights are small
            enough[module] = max(at_least, min(enough[module], _LARGE * _numel(embeddings)))
    users = _users(root)
    units = [*found]

    def look_into(module: nn.Module, prefix: str) -> None:
        for key, child in module._modules.items():
            if child is None or child in inside:
                continue
            own = sum(param.numel() for param in child._parameters.values() if param is not None)
            within = set(modules_inside(child))
            if (
                0 < own >= enough[child]
                and _is_callable(child)
                and within.isdisjoint(inside)
                and all(users[param] <= within for param in params_of(child).values())
            ):
                units.append(FoundUnit(join_names(prefix, key), (child,), is_lone=True))
                inside.update(within)
            else:
                look_into(child, join_names(prefix, key))

    look_into(root, "")
    order = {module: position for position, module in enumerate(modules_inside(root))}
    return sorted(units, key=lambda unit: order[unit.modules[0]])


def _embeddings(root: nn.Module) -> Iterator[nn.Module]:
    """What a transformers model says are its embeddings."""
    for name in ("get_input_embeddings", "get_output_embeddings"):
        try:
            module = getattr(root, name)()
        except (AttributeError, NotImplementedError):  # another kind of model; one that has none
            continue
        if isinstance(module, nn.Module):
            yield module


def _users(root: nn.Module) -> dict[nn.Parameter, set[nn.Module]]:
    """Which modules hold each parameter: registered, or in a list or dict of their own."""
    users: dict[nn.Parameter, set[nn.Module]] = {}
    for module in modules_inside(root):
        held = [value for key, value in module.__dict__.items() if key not in ("_buffers", "_modules")]
        for param in _params_in(held):
            users.setdefault(param, set()).add(module)
    return users


def _params_in(value: object, depth: int = 4) -> Iterator[nn.Parameter]:
    if isinstance(value, weakref.ref):
        value = value()
    if isinstance(value, nn.Parameter):
        yield value
    elif depth and isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _params_in(item, depth - 1)


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
        if not _has_params(unit):
            raise UnitError(f"unit {names[unit]!r} has no parameters")
        if not _is_callable(unit):
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


def group_params(root: nn.Module, units: Sequence[FoundUnit]) -> list[list[FoundParam]]:
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
