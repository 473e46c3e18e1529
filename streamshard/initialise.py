"""`init_weights`: runs the initialisation of a model from the meta device, with one full unit per rank in memory.

[Note: initialising unit by unit]
The model's initialisation runs once for each unit. During a run modules hold stand-ins for their parameters. Those of
this unit's empty parameters are full and in memory. All others are on the meta device, where writes do nothing and
reading values raises. So a parent may write to its children's weights (torchtitan's ``init_weights()``, GPT-2's
``c_proj``), and a rank has one unit in memory. Each unit has its own seed, derived from the user's seed and the unit's
number, so the weights do not depend on the number of ranks. Different ranks draw different units, and broadcast them.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from streamshard.device import module_of
from streamshard.engine.buffer_sync import buffers_of
from streamshard.engine.engine import Engine
from streamshard.errors import ConfigError, RankMismatchError, ShardingError
from streamshard.integrations import huggingface
from streamshard.plan.structure import is_meta, join_names, modules_inside, modules_of
from streamshard.unit.shard import ParamShard

__all__ = ["compute_buffers", "initialise"]

Init = Callable[[nn.Module], object]

_RESETS = ("reset_parameters", "_reset_parameters")  # torch's modules have the one or the other
_DOING = "initialise the model"


def initialise(engine: Engine, model: nn.Module, init: Init | None, seed: int | None) -> None:
    """See `streamshard.init_weights`; `engine` is the engine of `model`."""
    if init is not None and not callable(init):
        raise ConfigError(f"init={init!r}: wanted a function that is called with each module, or None")
    seed = _agree_on_seed(engine, seed)
    before = dict(engine.empty)
    if init is None:
        params = [shard.param for shard in engine.param_shards if shard.name in before]
        buffers = [buffer for name, buffer in buffers_of(model).items() if name in before]
        _refuse_unclear(model, "", _around(model, [*params, *buffers]))
    try:
        compute_buffers(engine, model, init, seed, strict=True)
        _fill_params(engine, model, init, seed)
    except Exception:
        engine.set_empty(before)  # the next call draws all again: weights of two calls must not be mixed
        raise


def compute_buffers(
    engine: Engine, model: nn.Module, init: Init | None = None, seed: int = 0, *, strict: bool = False
) -> None:
    """Fill empty buffers, such as rotary tables, which are in no file. Changes nothing else. Collective.

    Args:
        engine, model, init, seed: see `initialise`.
        strict: raise if a buffer stays empty.
    """
    empty = {name: buffer for name, buffer in buffers_of(model).items() if name in engine.empty}
    if not engine.ranks.any_rank(bool(empty)):
        return
    filled: list[str] = []

    def run() -> None:
        if not empty:
            return
        versions = {name: buffer._version for name, buffer in empty.items()}
        _run(engine, model, init, [], empty, seed)
        for name, buffer in buffers_of(model).items():
            if name in empty and not is_meta(buffer):
                is_new = buffer is not empty[name] or buffer._version != versions[name]
                if is_new and not bool(buffer.isnan().any()):
                    filled.append(name)
        if strict:
            _refuse_left([name for name in empty if name not in filled], model, "buffer")

    engine.ranks.gather_results(_DOING, run)
    engine.fill(filled)


def _fill_params(engine: Engine, model: nn.Module, init: Init | None, seed: int) -> None:
    """Each rank draws one unit at a time and broadcasts it; every rank takes its pieces."""
    ranks = engine.ranks
    units = [[shard for shard in unit.params if shard.name in engine.empty] for unit in engine.units]
    seeds = torch.randint(2**62, (len(units),), generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    work = [number for number, shards in enumerate(units) if shards]
    most = max((_nbytes(shard) for shards in units for shard in shards), default=0)
    room = torch.empty(most if ranks.total_size > 1 else 0, dtype=torch.uint8, device=engine.streams.device)
    for start in range(0, len(work), ranks.total_size):
        turn = work[start : start + ranks.total_size]
        wholes: dict[str, torch.Tensor] = {}

        def run(turn: Sequence[int] = turn, wholes: dict[str, torch.Tensor] = wholes) -> None:
            if ranks.number < len(turn):
                number = turn[ranks.number]
                wholes.update(_run(engine, model, init, units[number], {}, int(seeds[number])))

        ranks.gather_results(_DOING, run)
        for source, number in enumerate(turn):
            for shard in units[number]:
                own = wholes.pop(shard.name, None)
                whole = room[: _nbytes(shard)].view(shard.dtype) if own is None else own.view(-1)
                ranks.broadcast(whole, source)
                shard.main.copy_(whole[shard.local.start : shard.local.stop])
                del own, whole  # before the next unit is drawn
            engine.fill([shard.name for shard in units[number]])


def _nbytes(shard: ParamShard) -> int:
    return shard.layout.numel * shard.dtype.itemsize


def _agree_on_seed(engine: Engine, seed: int | None) -> int:
    if seed is not None and (not isinstance(seed, int) or isinstance(seed, bool)):
        raise ConfigError(f"seed={seed!r}: wanted an integer, or None")
    if not engine.ranks.are_equal(repr(seed)):
        raise RankMismatchError(f"init_weights has seed={seed!r} here, and another on another rank: give all the same")
    return int(engine.ranks.of_first(torch.initial_seed())) if seed is None else seed


# -- one run ----------------------------------------------------------------------------------------------------------


def _run(
    engine: Engine,
    model: nn.Module,
    init: Init | None,
    shards: Sequence[ParamShard],
    buffers: Mapping[str, torch.Tensor],
    seed: int,
) -> dict[str, torch.Tensor]:
    """Run the model's initialisation; see [Note: initialising unit by unit].

    Args:
        engine, model: the model and its engine.
        init: called with each module, children first; None: the methods of the model's classes.
        shards: the parameters to draw.
        buffers: the buffers to compute, by name; all others keep their values.
        seed: of all random numbers in this run.

    Returns:
        By name, the full parameters: [full shape] in their dtype before sharding, on the device.
    """
    device = engine.streams.device
    stand_ins = {shard.param: _stand_in(shard, torch.device("meta")) for shard in engine.param_shards}
    drawn = {shard.name: _stand_in(shard, device) for shard in shards}
    stand_ins.update({shard.param: drawn[shard.name] for shard in shards})
    versions = {shard.name: shard.param._version for shard in engine.param_shards}
    with torch.no_grad(), _seeded(device, seed), _kept(engine, model, buffers), _standing_in(model, stand_ins):
        try:
            # A function may write to weights of any module, whichever it is called with.
            everywhere = set(modules_inside(model)) if init is not None else None
            _initialise(model, init, everywhere or _around(model, [*drawn.values(), *buffers.values()]))
        except (RuntimeError, NotImplementedError) as error:
            if "meta" not in str(error):
                raise
            raise ShardingError(
                "the initialisation reads a weight that has no values now: while a unit is initialised, only its own "
                "empty weights are in memory, and all others are on the meta device. Read shapes only, or set these "
                f"weights by load_state_dict(strict=False): {error}"
            ) from error
    for shard in engine.param_shards:
        if shard.param._version != versions[shard.name]:
            raise ShardingError(
                f"the initialisation has written to parameter {shard.name!r} by way of a list or an attribute outside "
                "of its module's parameters, where this rank has its piece only: take it from the module "
                "(module.weight, module.parameters())"
            )
        shard.param.requires_grad_(stand_ins[shard.param].requires_grad)
    for shard in shards:
        if drawn[shard.name].shape != shard.layout.shape:
            raise ShardingError(
                f"the initialisation gives parameter {shard.name!r} the shape {tuple(drawn[shard.name].shape)}, which "
                f"was {tuple(shard.layout.shape)} when the model was sharded: change the model before it is"
            )
    _refuse_left([name for name, whole in drawn.items() if bool(whole.amin().isnan())], model, "parameter")
    return {shard.name: drawn[shard.name].detach().to(device, shard.dtype).contiguous() for shard in shards}


def _initialise(module: nn.Module, init: Init | None, needed: set[nn.Module]) -> None:
    """Initialise the modules in `needed`, children first, as ``nn.Module.apply`` would.

    A module whose class initialises everything inside it (transformers, torchtitan) does so instead.
    """
    if module not in needed:
        return
    if init is None and huggingface.is_transformers_model(module):
        for each in modules_inside(module):  # what initialised itself on meta, or in the run before, says so
            each.__dict__.pop(huggingface.INITIALISED, None)
        module.initialize_weights()  # type: ignore[operator]  # of transformers' class
        return
    if init is None and (own := _own_init(module)) is not None:
        own()
        return
    for child in module.children():
        _initialise(child, init, needed)
    if init is not None:
        init(module)
    elif reset := next((found for name in _RESETS if callable(found := getattr(module, name, None))), None):
        reset()


def _own_init(module: nn.Module) -> Callable[[], object] | None:
    """The module's ``init_weights``, for itself and all inside, if it needs no arguments (torchtitan's convention)."""
    method = getattr(module, "init_weights", None)
    if not callable(method):
        return None
    try:
        inspect.signature(method).bind()
    except (TypeError, ValueError):
        return None
    return method  # type: ignore[no-any-return]  # a module's attribute


def _around(root: nn.Module, tensors: Sequence[torch.Tensor]) -> set[nn.Module]:
    """The modules that have one of `tensors` registered, and those around them."""
    wanted, found = set(map(id, tensors)), set()

    def search(module: nn.Module) -> bool:
        inside = [search(child) for child in module.children()]
        own = (id(tensor) in wanted for tensor in (*module._parameters.values(), *module._buffers.values()))
        if any(inside) or any(own):
            found.add(module)
        return module in found

    search(root)
    return found


# -- what is refused --------------------------------------------------------------------------------------------------


def _refuse_unclear(module: nn.Module, name: str, needed: set[nn.Module], *, is_clear: bool = False) -> None:
    """Raise before anything is drawn if a class has an initialisation that cannot be called as intended.

    Args:
        module, name: a module and its name; searched with all inside.
        needed: modules with empty parameters or buffers inside.
        is_clear: a module around `module` initialises it.

    Raises:
        ShardingError: names the module, and says what to do.
    """
    if module not in needed:
        return
    for key in huggingface.adapters_in(module):
        if module._modules[key] in needed:
            raise ShardingError(
                f"{join_names(name, key)!r} is an adapter that was made on the meta device, and PEFT initialises "
                "adapters as it makes them: make them outside of `with torch.device('meta')`, or give a function, "
                "init_weights(model, function)"
            )
    is_clear = is_clear or huggingface.is_transformers_model(module) or _own_init(module) is not None
    method = next((each for each in ("init_weights", "_init_weights") if callable(getattr(module, each, None))), None)
    if method is not None and not is_clear:
        raise ShardingError(
            f"{name or 'the model'!r} ({type(module).__name__}) has a method {method}, and only its constructor knows "
            "how to call it, and what else to do: write init_weights(model, function). function(module) is called with "
            f"every module, children first, as by model.apply(function), and may be model.{method}"
        )
    for key, child in module._modules.items():
        if child is not None:
            _refuse_unclear(child, join_names(name, key), needed, is_clear=is_clear)


def _refuse_left(names: Sequence[str], model: nn.Module, what: str) -> None:
    """Raise if `names`, the tensors that the initialisation has left empty, has any."""
    if names:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        kind = type(model.get_submodule(names[0].rpartition(".")[0])).__name__
        raise ShardingError(
            f"the initialisation leaves {what} {', '.join(map(repr, names[:8]))}{more} without a value (the first is "
            f"of a {kind}): wanted reset_parameters() of its module, init_weights() of a module around it, or a "
            "function, init_weights(model, function), that is called with every module and fills it. Or load it: "
            "load_safetensors, load_state_dict"
        )


# -- around a run -----------------------------------------------------------------------------------------------------


def _stand_in(shard: ParamShard, device: torch.device) -> nn.Parameter:
    """A stand-in for the full parameter: [full shape], NaN to show what stays unfilled; on meta without values."""
    data = torch.full(shard.layout.shape, math.nan, dtype=shard.dtype, device=device)
    stand_in = nn.Parameter(data, requires_grad=shard.param.requires_grad)
    stand_in.__dict__.update({key: value for key, value in vars(shard.param).items() if key != huggingface.INITIALISED})
    return stand_in


@contextlib.contextmanager
def _standing_in(model: nn.Module, stand_ins: Mapping[nn.Parameter, nn.Parameter]) -> Iterator[None]:
    """Inside, modules hold `stand_ins` for parameters. Names that transformers ties to others get one on meta.

    Raises:
        ShardingError: at the end, if the initialisation has replaced a parameter.
    """
    tied = {
        join_names(prefix, name)
        for prefix, module in modules_of(model)
        if huggingface.is_transformers_model(module)
        for name in huggingface.tied_names(module)
    }
    before = [(name, module, module._parameters) for name, module in modules_of(model) if module._parameters]
    held: dict[nn.Module, dict[str, nn.Parameter | None]] = {}
    for name, module, params in before:
        held[module] = {key: None if param is None else stand_ins[param] for key, param in params.items()}
        for key, stand_in in held[module].items():
            if stand_in is not None and join_names(name, key) in tied:
                held[module][key] = nn.Parameter(torch.empty_like(stand_in, device="meta"))
    try:
        for module, params in held.items():
            module.__dict__["_parameters"] = dict(params)
        yield
        for name, module, _ in before:
            now = module._parameters
            for key in (key for key in {**held[module], **now} if now.get(key) is not held[module].get(key)):
                raise ShardingError(
                    f"the initialisation puts another parameter in the place of {join_names(name, key)!r}, which the "
                    "optimizer may have: write into it (torch.nn.init, param.copy_)"
                )
    finally:
        for _, module, params in before:
            module.__dict__["_parameters"] = params


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, random numbers are those after ``torch.manual_seed(seed)``; generators get their old states back."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        torch.default_generator.manual_seed(seed)
        if devices:
            module_of(device).manual_seed(seed)
        yield


@contextlib.contextmanager
def _kept(engine: Engine, model: nn.Module, names: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Afterwards the buffers of `names` are on the device, and all others have their old values."""
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
