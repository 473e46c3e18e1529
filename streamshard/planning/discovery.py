"""Which modules are units, and which parameters lie in which unit. Looks at the model, and changes nothing.

[Note: layers]
Layers are the repeated children of a list, dict or sequence of modules; the outermost ones, never one inside another.
A list of layers is streamed if it holds a twentieth of the weights, embeddings not counted, or if its layers hold a
million parameters each: to all-gather so many takes longer than the latency of a collective. The list
``_no_split_modules`` of transformers' models is ignored: some entries are parts of layers, and some models leave a
tower out.

[Note: towers]
A model for images and text has a second list of layers, its image tower. Some ranks run the tower several times in a
step, or not at all, as their batches want. Streamed layers cannot do this: all ranks run them in one order. Resident
layers can. So every list beside the largest one is resident if this takes little memory: it holds at most a quarter of
the weights, or less than a million parameters per layer.
"""

from __future__ import annotations

import inspect
import itertools
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from streamshard.config import did_you_mean
from streamshard.conventions import conventions
from streamshard.errors import UnitError
from streamshard.planning.structure import join_names, modules_inside, modules_of, params_of

_NamedModules = type[nn.Module] | str | nn.Module | Iterable[type[nn.Module] | str | nn.Module]
UnitsArgument = _NamedModules | None  # what StreamShard(units=...) accepts
ResidentArgument = _NamedModules  # resident=...

_SUBSTANTIAL = 0.05  # see [Note: layers]
_SMALL_TOWER = 0.25  # see [Note: towers]
_WORTH_A_GATHER = 2**20
_LARGE = 0.5  # share of the largest layer that makes a module worth a unit of its own


class FoundParam(NamedTuple):
    """One parameter.

    Attributes:
        names: all names under which it is registered, the first one first.
        param: the Parameter.
        is_expert: this rank's part of stacked experts. Ranks with the same experts cut it, not the shard group.
    """

    names: tuple[str, ...]
    param: nn.Parameter
    is_expert: bool = False


class FoundUnit(NamedTuple):
    """A layer, several layers that `coalesce` has combined, a large module beside them, or the root unit.

    Attributes:
        name: fully qualified; "" for the root unit.
        modules: the unit's layers. Of the root unit: modules inside other units' layers whose parameters it has.
        is_resident: the unit has a slot of its own.
        params: its parameters, in registration order.
        may_join: the unit may take turns with the layers after all, see [Note: ends] in `streamshard.planning.memory`.
    """

    name: str
    modules: tuple[nn.Module, ...]
    is_resident: bool = False
    params: tuple[FoundParam, ...] = ()
    may_join: bool = False


def find_units(
    root: nn.Module, units: UnitsArgument, resident: ResidentArgument = (), *, min_numel: int = 0
) -> list[FoundUnit]:
    """The root unit and the units of `root` in registration order, as `StreamShard` documents.

    A unit is resident too if no other layer has its layers' class.

    Args:
        root: the model.
        units: the user's argument, or None for repeated layers and large modules beside them.
        resident: the user's argument. A layer named here, or inside a module named here, becomes a resident unit. The
            parameters of a module inside a layer move to the root unit.
        min_numel: consecutive small layers are combined until they have this many elements.

    Raises:
        UnitError: a unit is not part of the model, is the root, overlaps another or has no parameters.
    """
    names = {module: name for name, module in modules_of(root)}
    order = {module: position for position, module in enumerate(names)}
    # Empty means none here. For `units` it is a mistake, which `_select` refuses.
    wanted = dict.fromkeys(_select(resident, names, "resident") if resident not in ((), []) else ())
    chosen, towers = _detect_layers(root) if units is None else (_select(units, names, "units"), [])
    layers = sorted(set(chosen), key=order.__getitem__)
    held = {inner for layer in layers for inner in modules_inside(layer)}
    around = {module: _inside(module, held) for module in wanted if module not in held}
    # `_check_units` refuses the root.
    beside = [module for module, inside in around.items() if not inside or module is root]
    # Of a class some may lie inside others, such as nn.Sequential: the outer ones hold them.
    covered = {inner for module in beside for inner in modules_inside(module) if inner is not module}
    beside = [module for module in beside if module not in covered]
    _check_units(layers, beside, names)
    resident_layers = {*wanted, *towers, *itertools.chain.from_iterable(around.values())}
    inside_layers = [module for layer in layers if layer not in resident_layers for module in _inside(layer, wanted)]
    root_unit = FoundUnit("", tuple(inside_layers), is_resident=True)
    found = [FoundUnit(names[layer], (layer,), layer in resident_layers) for layer in layers]
    found = coalesce(_with_params(root, [root_unit, *found])[1:], min_numel)
    large = _find_large(root, layers, beside, min_numel) if units is None and layers else []
    found += [FoundUnit(names[module], (module,), is_resident=True) for module in beside]
    found += [FoundUnit(names[module], (module,), is_resident=True, may_join=True) for module in large]
    # Until ranks have learnt in which order passes use units, the program follows registration.
    found.sort(key=lambda unit: order[unit.modules[0]])
    kinds = Counter(type(layer) for unit in found for layer in unit.modules)
    for position, unit in enumerate(found):
        # It has no twin to take turns with, and would size the slots of the others.
        if any(kinds[type(layer)] == 1 for layer in unit.modules):
            found[position] = unit._replace(is_resident=True)
    # Once more: `coalesce` needed sizes, and large modules take their parameters from the root unit.
    return _with_params(root, [root_unit, *found])


def owners_of(units: Sequence[FoundUnit]) -> dict[nn.Module, int]:
    """By module, the number of its unit. Modules that units share, or that are resident inside one, get 0.

    Args:
        units: root unit first.
    """
    root_unit, *others = units
    owner: dict[nn.Module, int] = {}
    for number, unit in enumerate(others, 1):
        for module in itertools.chain.from_iterable(map(modules_inside, unit.modules)):
            owner[module] = number if owner.get(module, number) == number else 0
    for module in root_unit.modules:
        owner.update(dict.fromkeys(modules_inside(module), 0))
    return owner


def _with_params(root: nn.Module, units: Sequence[FoundUnit]) -> list[FoundUnit]:
    """`units`, root unit first, with their parameters.

    A parameter that several units share, or a unit and the rest of the model, lies in the root unit, whose weights are
    in place throughout a pass.
    """
    owner = owners_of(units)
    names: dict[nn.Parameter, list[str]] = {}
    holders: dict[nn.Parameter, set[int]] = {}
    for prefix, module in modules_of(root, remove_duplicate=False):
        for key, param in module._parameters.items():
            if param is not None:
                names.setdefault(param, []).append(join_names(prefix, key))
                holders.setdefault(param, set()).add(owner.get(module, 0))
    groups: list[list[FoundParam]] = [[] for _ in units]
    for param, where in holders.items():
        number = next(iter(where)) if len(where) == 1 else 0
        groups[number].append(FoundParam(tuple(names[param]), param))
    return [unit._replace(params=tuple(group)) for unit, group in zip(units, groups, strict=True)]


# -- small layers -------------------------------------------------------------------------------------------------


def coalesce(units: Sequence[FoundUnit], at_least: int) -> list[FoundUnit]:
    """Combine consecutive streamed units until each has `at_least` elements. A smaller rest stays a unit.

    Args:
        units: in registration order.
        at_least: the fewest elements of a combined unit.
    """
    combined: list[FoundUnit] = []
    missing = 0  # elements that the last unit may still take
    first = ""  # the name of its first layer
    for unit in units:
        if missing <= 0 or unit.is_resident:
            combined.append(unit)
            missing, first = at_least, unit.name
        else:
            combined[-1] = FoundUnit(f"{first} .. {unit.name}", (*combined[-1].modules, *unit.modules))
        missing = 0 if unit.is_resident else missing - sum(each.param.numel() for each in unit.params)
    return combined


# -- modules that the user names ----------------------------------------------------------------------------------


def _select(given: _NamedModules, names: dict[nn.Module, str], what: str) -> list[nn.Module]:
    """The modules that `given` names; `what` is the argument's name, for errors."""
    # A ModuleList stands for the modules in it.
    if isinstance(given, type | str | nn.Module) and not isinstance(given, nn.ModuleList):
        given = [given]
    found: list[nn.Module] = []
    for wanted in given if isinstance(given, Iterable) else [given]:
        matches = [module for module, name in names.items() if wanted is module or wanted == name]
        if not matches:
            matches = [module for module, name in names.items() if name and _is_of_class(module, wanted)]
        if not matches:
            hint = did_you_mean(wanted, {*names.values(), *(type(module).__name__ for module in names)})
            raise UnitError(
                f"{what} names {wanted!r}, which is neither a module inside the model nor the class of one: wanted "
                "modules of model.named_modules(), their names, their classes or the names of their classes" + hint
            )
        found.extend(matches)
    if not found:
        raise UnitError(f"{what} selects no module")
    return found


def _is_of_class(module: nn.Module, wanted: object) -> bool:
    return any(wanted in (base, base.__name__) for base in type(module).__mro__)


def _check_units(layers: Sequence[nn.Module], beside: Sequence[nn.Module], names: dict[nn.Module, str]) -> None:
    """Raise if one of `layers`, or of the resident modules `beside` them, cannot be a unit."""
    streamed, units = set(layers), {*layers, *beside}
    for unit in (*layers, *beside):
        name = names[unit]
        if not name:
            raise UnitError("units or resident hold the whole model: wanted modules inside it")
        if not params_of(unit):
            raise UnitError(f"unit {name!r} has no parameters")
        if unit in streamed and not _is_callable(unit):
            raise UnitError(
                f"unit {name!r} is a {type(unit).__name__}, which has no forward: no call would all-gather its "
                f"weights. Name the layers in it: units=list(model.{name})"
            )
        for module in _inside(unit, units):
            raise UnitError(f"unit {name!r} overlaps unit {names[module]!r}, which lies inside it")


def _inside(module: nn.Module, wanted: Container[nn.Module]) -> tuple[nn.Module, ...]:
    """The modules of `wanted` that lie inside `module`, without `module` itself."""
    return tuple(inner for inner in modules_inside(module) if inner is not module and inner in wanted)


# -- layers that repeat -------------------------------------------------------------------------------------------


def _detect_layers(root: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Find the lists worth a unit per layer, always the largest one, and return their layers. See [Note: layers].

    Returns:
        All layers, and the layers of small towers, see [Note: towers].
    """
    embeddings = embedding_params(root)
    lists = [(layers, _numel(*layers, left_out=embeddings)) for layers in _find_lists(root, set())]
    # Without embeddings: of mT5 they are five sixths of the weights.
    enough = min(_SUBSTANTIAL * _numel(root, left_out=embeddings), max((own for _, own in lists), default=0))
    large = [
        (layers, own) for layers, own in lists if 0 < own >= enough or _numel(*layers) >= _WORTH_A_GATHER * len(layers)
    ]
    found = [layer for layers, _ in large for layer in layers]
    main = max(reversed(large), key=lambda each: each[1], default=None)  # of equal ones the last: images come first
    towers = [
        layer
        for layers, own in large
        if main is not None and layers is not main[0]
        if own <= _SMALL_TOWER * _numel(root) or own < _WORTH_A_GATHER * len(layers)
        for layer in layers
    ]
    return found, towers


def _find_lists(module: nn.Module, taken: set[nn.Module]) -> Iterator[list[nn.Module]]:
    """Lists of repeated layers in `module`, outermost first. Skips modules in `taken`, and adds visited ones to it.

    The layers of all stages (of a Swin transformer, say) form one list.
    """
    if module in taken:
        return
    taken.add(module)
    layers = [layer for layer in _layers_of(module) if layer not in taken]
    if layers and _are_stages(layers):  # half a vision model may be one stage
        yield [layer for stage in layers for inner in _find_lists(stage, taken) for layer in inner]
    elif layers:
        for layer in layers:
            taken.update(modules_inside(layer))
        yield layers
    for child in module._modules.values():
        if child is not None:
            yield from _find_lists(child, taken)


def _layers_of(module: nn.Module) -> list[nn.Module]:
    """The repeated children of a list, dict or sequence. A nested list without a forward stands for its children."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return []
    layers: dict[nn.Module, None] = {}
    waiting = [*reversed(module._modules.values())]
    while waiting:
        child = waiting.pop()
        if isinstance(child, nn.ModuleList | nn.ModuleDict) and not _is_callable(child):
            waiting.extend(reversed(child._modules.values()))
        elif child is not None and _is_callable(child) and _numel(child):
            layers[child] = None
    counts = Counter(type(layer) for layer in layers)
    return [layer for layer in layers if counts[type(layer)] > 1]


def _are_stages(layers: Sequence[nn.Module]) -> bool:
    """Whether `layers` are stages with layers inside.

    They are if one is a sequence of at least as many layers as there are stages, or if the layers inside one hold a
    third of all weights. A list inside a stage holds over 80% of its weights; lists of experts lie deeper, beside
    attention.
    """
    weights = _numel(*layers)
    for layer in layers:
        lists = [_layers_of(inner) for inner in (layer, *layer.children())]
        inner = next((found for found in lists if _numel(*found) > 0.8 * _numel(layer)), [])
        if (isinstance(layer, nn.Sequential) and len(inner) >= len(layers)) or 3 * _numel(*inner) > weights:
            return True
    return False


# -- large modules beside the layers ------------------------------------------------------------------------------


def _find_large(
    root: nn.Module, layers: Sequence[nn.Module], beside: Sequence[nn.Module], at_least: int
) -> list[nn.Module]:
    """Each large module outside of the layers: above all embedding and head.

    A module is large if it holds half as many parameters as the largest layer. Input and output embeddings always are
    large. A module with tied parameters stays in the root unit.

    Args:
        root: the model.
        layers, beside: the units so far.
        at_least: the least number of parameters of a large module.
    """
    enough = dict.fromkeys(modules_inside(root), _LARGE * max(map(_numel, layers)))
    # Whatever the layers' size: half a layer of experts may be a gigabyte.
    for embeddings in conventions().embeddings(root):
        for module in modules_inside(embeddings):  # adapters beside the weights are small
            enough[module] = min(enough[module], _LARGE * _numel(embeddings))
    users = Counter(param for module in modules_inside(root) for param in module._parameters.values())
    inside = {inner for unit in (*layers, *beside) for inner in modules_inside(unit)}
    large: list[nn.Module] = []
    for module in modules_inside(root):
        is_large = module is not root and _own_numel(module) >= max(at_least, enough[module], 1)
        if not is_large or not _is_callable(module):
            continue
        within = set(modules_inside(module))
        uses = Counter(param for inner in within for param in inner._parameters.values() if param is not None)
        if within.isdisjoint(inside) and all(users[param] == count for param, count in uses.items()):
            large.append(module)
            inside |= within
    return large


def embedding_params(root: nn.Module) -> set[nn.Parameter]:
    """The weights of embedding modules, and of the input and output embeddings that the model's library knows."""
    tables = [module for module in modules_inside(root) if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    return {param for module in (*tables, *conventions().embeddings(root)) for param in params_of(module).values()}


def _own_numel(module: nn.Module) -> int:
    """The number of elements of the parameters of `module` itself, not of modules inside it."""
    return sum(param.numel() for param in module._parameters.values() if param is not None)


def _is_callable(module: nn.Module) -> bool:
    # Statically: a scripted class computes its forward when it is asked for it.
    return "forward" in module.__dict__ or inspect.getattr_static(type(module), "forward") is not nn.Module.forward


def _numel(*modules: nn.Module, left_out: Collection[nn.Parameter] = ()) -> int:
    return sum(param.numel() for module in modules for param in params_of(module).values() if param not in left_out)
