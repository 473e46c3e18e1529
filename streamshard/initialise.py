"""`init_weights`: a model from the meta device gets its weights from its own initialisation, with no rank holding it.

Every rank runs the whole initialisation, in the order in which the unsharded model would, from the same seed. So the
numbers are those of the unsharded model, whatever the number of ranks and units. What is not held is the result: while
initialisation runs, modules have a `WholeWeight` for each parameter, whose memory comes when something is done to it,
and goes, with this rank's piece kept, when others need the room. See `streamshard.whole_weight`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from streamshard.checkpoint import huggingface
from streamshard.device import module_of
from streamshard.engine.buffer_sync import buffers_of
from streamshard.engine.engine import Engine
from streamshard.errors import ConfigError, RankMismatchError, ShardingError
from streamshard.plan.structure import is_meta, join_names, modules_inside, modules_of
from streamshard.whole_weight import Room

__all__ = ["compute_buffers", "initialise"]

Init = Callable[[nn.Module], object]

_RESETS = ("reset_parameters", "_reset_parameters")  # torch's modules have the one or the other


def initialise(engine: Engine, model: nn.Module, init: Init | None, seed: int | None) -> None:
    """What `streamshard.init_weights` does to `model`, of `engine`."""
    if init is not None and not callable(init):
        raise ConfigError(f"init={init!r}: wanted a function that is called with each module, or None")
    seed = _agree_on_seed(engine, seed)
    if engine.empty is None:
        return
    params, buffers = set(engine.empty.params()), set(engine.empty.buffers())
    if init is None:
        _refuse_without_method(model, params | buffers)
    _run(engine, model, init, params, buffers, seed)
    if left := [*engine.empty.params(), *engine.empty.buffers()]:
        raise ShardingError(
            f"the initialisation has left {', '.join(map(repr, left[:8]))}{' and more' * (len(left) > 8)} empty; what "
            "it has written to is filled. Call init_weights(model, function) with one that fills these too: it is "
            "called with every module that has something empty in it"
        )
    engine.empty = None


def compute_buffers(engine: Engine, model: nn.Module) -> None:
    """Fill empty buffers that no file has, as far as the model can compute them: tables of its own. Collective.

    They are computed as `initialise` does, which leaves all weights as they are here.
    """
    if engine.empty is not None and (buffers := set(engine.empty.buffers())):
        _run(engine, model, None, set(), buffers, seed=0)


def _agree_on_seed(engine: Engine, seed: int | None) -> int:
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise ConfigError(f"seed={seed!r}: wanted an integer, or None")
    if not engine.ranks.are_equal(repr(seed)):
        raise RankMismatchError(f"init_weights has seed={seed!r} here, and another on another rank: give all the same")
    return int(engine.ranks.of_first(torch.initial_seed())) if seed is None else seed


def _run(engine: Engine, model: nn.Module, init: Init | None, params: set[str], buffers: set[str], seed: int) -> None:
    """Initialise modules in which something is to be filled; nothing else changes, whatever is done to it.

    Args:
        engine, model: of one another.
        init: called with each module, its children first; None: what the model's classes do.
        params, buffers: names of what is to be filled.
        seed: of all random numbers.

    Raises:
        ShardingError: on every rank, what went wrong on one. All that should have been filled is empty again.
    """
    room = Room(engine, params)
    needed = _modules_of(model, params | buffers, engine)
    found = {name: buffer for name, buffer in buffers_of(model).items() if name in buffers}

    def initialise() -> None:
        with torch.no_grad(), _seeded(engine.streams.device, seed), _kept(engine, model, buffers):
            with room.in_modules(model):
                _initialise(model, init, needed, room, model, buffers)
            room.finish()

    try:
        engine.ranks.gather_results("initialise the model", initialise)
        room.check_equal()
    except Exception:
        for name, buffer in found.items():
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner)._buffers[key] = buffer
        assert engine.empty is not None
        engine.empty.renew([shard for shard in engine.param_shards if shard.name in params], found)
        raise


def _initialise(
    module: nn.Module, init: Init | None, needed: set[nn.Module], room: Room, root: nn.Module, buffers: set[str]
) -> None:
    """As ``nn.Module.apply``: children first."""
    if module not in needed:
        return
    if init is None and huggingface.is_transformers_model(module):
        with _marked(module, root, room, buffers):
            module.initialize_weights()  # type: ignore[operator]  # of transformers' class
        return
    for child in module.children():
        _initialise(child, init, needed, room, root, buffers)
    if init is not None:
        init(module)
    elif (reset := _reset_of(module)) is not None:
        reset()


def _reset_of(module: nn.Module) -> Callable[[], object] | None:
    return next((found for name in _RESETS if callable(found := getattr(module, name, None))), None)


# -- what is to be done -----------------------------------------------------------------------------------------------


def _modules_of(model: nn.Module, names: set[str], engine: Engine) -> set[nn.Module]:
    """The modules that own a parameter or buffer of `names`, by any of its names, and those around them."""
    wanted = set(names)
    for shard in engine.param_shards:
        if shard.name in names:
            wanted.update(shard.aliases)
    around = {name[:place] for name in wanted for place, letter in enumerate(name) if letter == "."} | {""}
    return {module for name, module in modules_of(model, remove_duplicate=False) if name in around} if names else set()


def _refuse_without_method(root: nn.Module, names: set[str]) -> None:
    """Raise if something of `names` is in a module that neither initialises it nor lies in one that might.

    Raises:
        ShardingError: names all such modules.
    """
    strays = [f"{name or 'the model'!r} ({type(module).__name__})" for name, module in _without_method("", root, names)]
    if strays:
        more = f" and {len(strays) - 8} more" if len(strays) > 8 else ""
        raise ShardingError(
            f"nothing says how to initialise {', '.join(strays[:8])}{more}: wanted a method reset_parameters() of the "
            "module that has parameters or buffers, or a function, init_weights(model, function), that is called with "
            "every module"
        )
    for name, module in modules_of(root):
        adapters = huggingface.adapters_in(module)
        stray = next(
            (each for each in sorted(names) if any(each.startswith(f"{join_names(name, key)}.") for key in adapters)),
            "",
        )
        if stray:
            raise ShardingError(
                f"{stray!r} is of an adapter that was made on the meta device, and PEFT initialises adapters as it "
                "makes them: make them outside of `with torch.device('meta')`, or give a function, init_weights(model, "
                "function)"
            )


def _without_method(prefix: str, module: nn.Module, names: set[str]) -> Iterator[tuple[str, nn.Module]]:
    if _reset_of(module) is not None or huggingface.is_transformers_model(module):
        return
    if any(join_names(prefix, key) in names for key in (*module._parameters, *module._buffers)):
        yield prefix, module
    for key, child in module._modules.items():
        if child is not None:
            yield from _without_method(join_names(prefix, key), child, names)


# -- around it --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, random numbers are those that follow ``torch.manual_seed(seed)``; outside they go on as they were."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.default_generator.manual_seed(seed)
        if devices:
            module_of(device).manual_seed(seed)
        yield


@contextlib.contextmanager
def _kept(engine: Engine, model: nn.Module, names: set[str]) -> Iterator[None]:
    """Afterwards the buffers of `names` are on the device, and all others are what they were."""
    values = {buffer: buffer.clone() for name, buffer in buffers_of(model).items() if name not in names}
    before = [
        (module, key, buffer)
        for module in modules_inside(model)
        for key, buffer in module._buffers.items()
        if buffer in values
    ]
    try:
        yield
    finally:
        for module, key, buffer in before:
            module._buffers[key] = buffer
        for buffer, value in values.items():
            if not torch.equal(buffer, value):
                buffer.copy_(value)
        device, dtype = engine.streams.device, engine.precision.buffer_dtype
        for module in modules_inside(model):
            for key, made in module._buffers.items():
                if made is not None and not is_meta(made):
                    cast = dtype if made.is_floating_point() else None
                    module._buffers[key] = made.to(device=device, dtype=cast)


@contextlib.contextmanager
def _marked(module: nn.Module, root: nn.Module, room: Room, buffers: set[str]) -> Iterator[None]:
    """Let transformers know what it shall leave alone, by the mark that ``from_pretrained`` uses.

    That is what has its values, and, of tied weights, all names but the one that counts. Modules that were initialised
    on meta, as under ``accelerate.init_empty_weights``, are not.
    """
    for each in modules_inside(module):
        each.__dict__.pop(huggingface.INITIALISED, None)
    kept = [buffer for name, buffer in buffers_of(root).items() if name not in buffers]
    for tensor in (*kept, *room.kept_weights(module, huggingface.tied_names(module))):
        setattr(tensor, huggingface.INITIALISED, True)
    try:
        yield
    finally:
        for tensor in kept:
            tensor.__dict__.pop(huggingface.INITIALISED, None)
