"""Which layers of a model repeat, and what is large beside them. Looks at the model, changes nothing.

[Note: layers]
Layers are the repeated children of a list, dict or sequence of modules, outermost first, none inside another. A list is
worth streaming if it holds a twentieth of the weights, embeddings not counted, or if its layers hold a million
parameters each: gathering so many takes longer than beginning to. What a model says of itself is not asked: of what
transformers lists in ``_no_split_modules`` some are parts of layers, and some models leave a tower out.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from torch import nn

from streamshard.errors import warn_user
from streamshard.plan.structure import join_names, modules_inside, params_of

__all__ = ["detect_layers", "embedding_params", "find_large", "has_params", "is_callable", "warn_of_root_unit"]

_SUBSTANTIAL = 0.05  # see [Note: layers]
_WORTH_A_GATHER = 2**20
_LARGE = 0.5  # share of the largest layer that makes a module worth a gather and a reduction of its own
_TOO_MUCH = 0.25  # share of the weights outside of units that the user hears of


def detect_layers(root: nn.Module) -> list[nn.Module]:
    """The layers of every list that is worth streaming, at least of the one with most weights. See [Note: layers].

    Warns if there are none.
    """
    lists = list(_find_lists(root, set()))
    embeddings = embedding_params(root)
    weights = [_numel_without(embeddings, *layers) for layers in lists]
    enough = min(_SUBSTANTIAL * _numel_without(embeddings, root), max(weights, default=0))
    found = [
        layer
        for layers, own in zip(lists, weights, strict=True)
        if 0 < own >= enough or sum(map(_numel, layers)) >= _WORTH_A_GATHER * len(layers)
        for layer in layers
    ]
    if not found:
        warn_user(
            f"{type(root).__name__} has no repeated layers that StreamShard can find: it becomes one unit, whose "
            "weights are all gathered at once. Name its layers with units=[...] to stream them",
        )
    return found


def _find_lists(module: nn.Module, taken: set[nn.Module]) -> Iterator[list[nn.Module]]:
    """Lists of repeated layers in `module`, outermost first, none inside another; `taken` is left out and added to.

    The layers of all stages are one list.
    """
    if module in taken:
        return
    taken.add(module)
    layers = [layer for layer in _layers_of(module) if layer not in taken]
    if layers and _are_stages(layers):
        yield [layer for stage in layers for inner in _find_lists(stage, taken) for layer in inner]
    elif layers:
        for layer in layers:
            taken.update(modules_inside(layer))
        yield layers
    for child in module._modules.values():
        if child is not None:
            yield from _find_lists(child, taken)


def _layers_of(module: nn.Module) -> list[nn.Module]:
    """The repeated children of a list, dict or sequence; a list among them, which nobody calls, is looked into."""
    if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        return []
    layers: dict[nn.Module, None] = {}
    waiting = [*reversed(module._modules.values())]
    while waiting:
        child = waiting.pop()
        if child is not None and isinstance(child, nn.ModuleList | nn.ModuleDict) and not is_callable(child):
            waiting.extend(reversed(child._modules.values()))
        elif child is not None and is_callable(child) and has_params(child):
            layers[child] = None
    counts = Counter(type(layer) for layer in layers)
    return [layer for layer in layers if counts[type(layer)] > 1]


def _are_stages(layers: Sequence[nn.Module]) -> bool:
    """Whether these are stages with layers inside: one has as many of them as there are stages, or a third of all."""
    total = sum(map(_numel, layers))
    return any(
        (isinstance(layer, nn.Sequential) and len(inner) >= len(layers)) or 3 * sum(map(_numel, inner)) > total
        for layer in layers
        if (inner := _layers_of(layer) or _layers_in(layer))
    )


def _layers_in(stage: nn.Module) -> list[nn.Module]:
    """The layers of the list that is nearly all there is in a stage. Lists of experts lie deeper, beside attention."""
    lists = [layers for child in stage._modules.values() if child is not None and (layers := _layers_of(child))]
    return next((layers for layers in lists if sum(map(_numel, layers)) > 0.8 * _numel(stage)), [])


def find_large(root: nn.Module, layers: Sequence[nn.Module], at_least: int = 0) -> dict[nn.Module, str]:
    """Each large module outside of the layers, and its name: embedding and head, above all.

    Large is what holds half as many parameters as the largest layer. A transformers model's input and output embeddings
    are large whatever they hold. A module stays in the root unit if one of its parameters is in use elsewhere: tied, or
    in a list that another module keeps.

    Args:
        root: the model.
        layers: detected.
        at_least: smaller modules, in parameters, are not large.
    """
    inside = {inner for layer in layers for inner in modules_inside(layer)}
    enough: dict[nn.Module, float] = dict.fromkeys(
        modules_inside(root), max(at_least, _LARGE * max(map(_numel, layers), default=0))
    )
    for embeddings in _embeddings(root):
        for module in modules_inside(embeddings):  # adapters beside the weights are small
            enough[module] = max(at_least, min(enough[module], _LARGE * _numel(embeddings)))
    users = _users(root)
    large: dict[nn.Module, str] = {}

    def look_into(module: nn.Module, prefix: str) -> None:
        for key, child in module._modules.items():
            if child is None or child in inside:
                continue
            own = sum(param.numel() for param in child._parameters.values() if param is not None)
            within = set(modules_inside(child))
            if (
                0 < own >= enough[child]
                and is_callable(child)
                and within.isdisjoint(inside)
                and all(users[param] <= within for param in params_of(child).values())
            ):
                large[child] = join_names(prefix, key)
                inside.update(within)
            else:
                look_into(child, join_names(prefix, key))

    look_into(root, "")
    return large


def warn_of_root_unit(root: nn.Module, layers: Sequence[nn.Module], outside: Collection[nn.Parameter]) -> None:
    """Warn if more than a quarter of the weights, embeddings not counted, are `outside` of units; say where they are.

    Args:
        root: the model.
        layers: detected.
        outside: the parameters of the root unit.
    """
    embeddings = embedding_params(root)
    tied = {param for layer in layers for param in params_of(layer).values()}  # nowhere else, whatever one names
    loose = set(outside) - embeddings - tied
    numel = sum(param.numel() for param in loose)
    whole = _numel_without(embeddings, root)
    if numel <= _TOO_MUCH * whole:
        return
    found = Counter(type(layer).__name__ for layer in layers)
    warn_user(
        f"{numel / whole:.0%} of the weights of {type(root).__name__} are outside of the layers that StreamShard has "
        f"found ({', '.join(found)}): they are all gathered at once, and stay until the backward is over. Most are in "
        f"{', '.join(map(repr, _holders(root, loose)))}. Name the layers there beside those that were found: "
        f"units=[{', '.join(found)}, ..]"
    )


def _holders(root: nn.Module, params: Collection[nn.Parameter]) -> list[str]:
    """Names of the up to three modules, as deep as each holds its share, that hold most of `params`."""

    def held(module: nn.Module) -> int:
        return sum(param.numel() for param in params_of(module).values() if param in params)

    def children(prefix: str, module: nn.Module) -> list[tuple[int, str, nn.Module]]:
        named = ((join_names(prefix, key), child) for key, child in module._modules.items() if child is not None)
        return sorted(((held(child), name, child) for name, child in named), key=lambda each: -each[0])

    def innermost(numel: int, name: str, module: nn.Module) -> str:
        for inner, key, child in children(name, module)[:1]:
            if inner > 0.9 * numel:
                return innermost(inner, key, child)
        return name

    def most(name: str, module: nn.Module) -> list[str]:
        parts = [each for each in children(name, module)[:3] if each[0] > 0.1 * held(module)]
        if len(parts) == 1:  # the model of a wrapper
            return most(*parts[0][1:])
        return [innermost(*part) for part in parts] or [name]

    return [name or type(root).__name__ for name in most("", root)]


def embedding_params(root: nn.Module) -> set[nn.Parameter]:
    """The weights of embeddings, and those of what a transformers model says are its input and output embeddings."""
    tables = [module for module in modules_inside(root) if isinstance(module, nn.Embedding | nn.EmbeddingBag)]
    return {param for module in (*tables, *_embeddings(root)) for param in params_of(module).values()}


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


def has_params(module: nn.Module) -> bool:
    return any(param is not None for inner in modules_inside(module) for param in inner._parameters.values())


def is_callable(module: nn.Module) -> bool:
    # Statically: a scripted class computes its forward when it is asked for it.
    return "forward" in module.__dict__ or inspect.getattr_static(type(module), "forward") is not nn.Module.forward


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in params_of(module).values())


def _numel_without(left_out: Collection[nn.Parameter], *modules: nn.Module) -> int:
    return sum(param.numel() for module in modules for param in params_of(module).values() if param not in left_out)
