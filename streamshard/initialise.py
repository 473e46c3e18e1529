"""`init_weights`: runs the initialisation of a model from the meta device, with one full unit per rank in memory.

[Note: initialising unit by unit]
The model's initialisation runs once for each unit. During a run the unit's empty parameters are full and in memory. All
other parameters are on the meta device, where writes do nothing and reading values raises. So a parent may write to its
children's weights (torchtitan's ``init_weights()``, GPT-2's ``c_proj``), and a rank has one unit in memory. Each unit
has its own seed, derived from the user's seed and the unit's number. The first rank draws each unit and broadcasts it,
so the weights do not depend on the number of ranks.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from streamshard.comm.ranks import run_on_all_ranks
from streamshard.conventions import conventions
from streamshard.core.engine import Engine
from streamshard.core.module_state import engine_at_rest, not_a_layer
from streamshard.core.params import Param
from streamshard.device import module_of
from streamshard.errors import ShardingError
from streamshard.forms import form_of
from streamshard.full import under_params
from streamshard.planning.structure import join_names, leave_inference_mode, leave_meta_device, modules_of

Init = Callable[[nn.Module], Any]

_RESETS = ("reset_parameters", "_reset_parameters")  # modules of torch have one of these
_DOING = "initialise the model"


def init_weights(model: nn.Module, init: Init | None = None, *, seed: int | None = None) -> None:
    """Fill empty parameters and buffers by the model's own initialisation. Call it on every rank.

    A tensor is empty if it was on the meta device when the model was sharded, and was not loaded since. Other tensors
    keep their values. The initialisation runs once for each unit. In each run the unit's weights are full tensors; all
    other weights are on the meta device, where writing does nothing and reading raises. The weights have the model's
    own distribution and are equal on any number of ranks. Other `units` give other random numbers.

    Args:
        model: made by `StreamShard`.
        init: called in each run with each module, children first, as by ``model.apply(init)``. None: calls
            ``initialize_weights`` of transformers' models, ``init_weights()`` of modules that have it without arguments
            (it must initialise all modules inside), and ``reset_parameters`` of other modules.
        seed: seed of torch's random numbers; None: ``torch.initial_seed()``. Rank 0's seed counts.

    Raises:
        ShardingError: names a module whose ``init_weights`` or ``_init_weights`` takes arguments, parameters and
            buffers that nothing fills, or a parameter that the initialisation has replaced. Then all stay empty.
    """
    engine = engine_at_rest(not_a_layer(model), "init_weights", accepts_empty=True)
    with leave_inference_mode(), leave_meta_device():
        _draw_all(engine, model, init, seed)


def _draw_all(engine: Engine, model: nn.Module, init: Init | None, seed: int | None) -> None:
    seed = engine.ranks.of_first("agree on a seed", torch.initial_seed() if seed is None else seed)
    before = dict(engine.empty)
    if init is None:
        conventions().refuse_initialisation(model, before)
    try:
        compute_buffers(engine, model, init, seed)
        for number, unit in enumerate(engine.units):
            if params := [param for param in unit.params if param.name in before]:
                _draw(engine, model, init, params, seed + number)
        # Parameters have values by now, or have raised: what is left are buffers.
        _refuse_left(list(engine.empty), model, "buffer")
    except Exception:
        engine.set_empty(before)  # the next call draws all weights again: weights of two calls must not be mixed
        raise


def compute_buffers(engine: Engine, model: nn.Module, init: Init | None = None, seed: int = 0) -> None:
    """Fill empty buffers, such as rotary tables, which are in no file. Changes nothing else. Collective.

    Buffers that the initialisation does not fill stay empty, and the next forward names them.
    """
    empty = {name: buffer for name, buffer in model.named_buffers() if name in engine.empty}
    # Together: the run below is a collective.
    if not any(engine.ranks.gather_objects("find empty buffers", bool(empty))):
        return

    def run() -> list[str]:
        filled = []
        versions = {name: buffer._version for name, buffer in empty.items()}
        _run(engine, model, init, empty, seed)
        for prefix, module in modules_of(model):
            for key, buffer in module._buffers.items():
                name = join_names(prefix, key)
                if name in empty and buffer is not None and not buffer.is_meta:
                    # An empty buffer of floats is full of NaN. One that still has some was filled in part.
                    is_new = buffer is not empty[name] or buffer._version != versions[name]
                    if is_new and not bool(buffer.isnan().any()):
                        filled.append(name)
                    module._buffers[key] = buffer.to(engine.streams.device)  # it may be a new one
        return filled

    engine.fill(run_on_all_ranks(engine.ranks, _DOING, run, ShardingError))


def _draw(engine: Engine, model: nn.Module, init: Init | None, params: Sequence[Param], seed: int) -> None:
    """Let the first rank draw `params`, the empty parameters of one unit. Every rank takes its pieces."""
    ranks, names = engine.ranks, {param.name for param in params}
    drawn = run_on_all_ranks(
        ranks, _DOING, lambda: _run(engine, model, init, names, seed) if ranks.is_first else {}, ShardingError
    )
    for param in params:
        tensor = drawn.pop(param.name, None)  # each is freed before the next one is sent
        if tensor is None:
            tensor = torch.empty(param.piece.shape, dtype=param.dtype, device=engine.streams.device)
        ranks.broadcast(tensor)
        param.main.copy_(param.piece.cut(tensor).view(-1))
    engine.fill([param.name for param in params])


# -- one run ----------------------------------------------------------------------------------------------------------


def _run(engine: Engine, model: nn.Module, init: Init | None, empty: Collection[str], seed: int) -> dict[str, Tensor]:
    """Run the model's initialisation; see [Note: initialising unit by unit].

    Args:
        engine, model: the model and its engine.
        init: called with each module, children first; None: use the methods of the model's classes.
        empty: names of the parameters to draw, or of the buffers to compute. Other tensors keep their values.
        seed: the seed of all random numbers in this run.

    Returns:
        By name, the full parameters in their dtype before sharding, on the device.
    """
    device = engine.streams.device
    params = [param for param in engine.params if param.name in empty]
    unsharded = {}
    for param in engine.params:
        where = device if param.name in empty else "meta"
        # NaN shows what the initialisation leaves out.
        unsharded[param] = torch.full(param.piece.shape, math.nan, dtype=param.dtype, device=where)
    with torch.no_grad(), _seeded(device, seed), _keeping(model, empty), under_params(engine, unsharded) as full:
        try:
            if init is not None:
                model.apply(init)  # it may write to weights of any module, such as children of its argument
            else:
                _initialise(model, "", empty, draws=bool(params))
        except RuntimeError as error:
            if "meta" not in str(error):
                raise
            raise ShardingError(
                "the initialisation reads a weight that has no values now: it runs once per unit, with other weights "
                "on the meta device. Read shapes only, or load the weights that need them by load_state_dict: "
                f"{error}"
            ) from error
    engine.check_structure()  # raises if a parameter or module was replaced
    drawn = {param: full[param] for param in params}
    left = [each.name for each, new in drawn.items() if bool(new.isnan().any()) or new.shape != each.piece.shape]
    _refuse_left(left, model, "parameter")
    return {param.name: tensor.detach().to(device, param.dtype).contiguous() for param, tensor in drawn.items()}


def _initialise(module: nn.Module, name: str, empty: Collection[str], *, draws: bool) -> None:
    """Initialise `module`, called `name`, if a tensor in `empty` is inside: children first, as in ``nn.Module.apply``.

    If its class initialises everything inside (transformers, torchtitan), only call the class's method. If parameters
    are drawn (`draws`), raise for a class with an ``init_weights`` or ``_init_weights`` that takes arguments.
    """
    is_filled = not any(each.startswith(join_names(name, "")) for each in empty)
    if is_filled or conventions().initialise(module):
        return
    own = getattr(module, "init_weights", None)
    if callable(own) and takes(own):
        own()
        return
    # A constructor calls these, and may do more before and after.
    method = "init_weights" if callable(own) else "_init_weights"
    if draws and callable(getattr(module, method, None)):
        what = f"{name or 'the model'!r} ({type(module).__name__}) has a method {method} that takes arguments"
        raise ShardingError(f"{what}: call init_weights(model, function); function may be model.{method}")
    for key, child in module._modules.items():
        if child is not None:
            _initialise(child, join_names(name, key), empty, draws=draws)
    if reset := next((found for each in _RESETS if callable(found := getattr(module, each, None))), None):
        reset()


def takes(function: Callable[..., object], *arguments: object) -> bool:
    """Whether `function` can be called with `arguments`, such as none for torchtitan's ``init_weights``."""
    try:
        inspect.signature(function).bind(*arguments)
    except (TypeError, ValueError):
        return False
    return True


# -- refused ----------------------------------------------------------------------------------------------------------


def _refuse_left(names: Sequence[str], model: nn.Module, what: str) -> None:
    """Raise if the initialisation has left tensors empty: `names`."""
    if names:
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        kind = type(model.get_submodule(names[0].rpartition(".")[0])).__name__
        raise ShardingError(
            f"the initialisation leaves {what} {', '.join(map(repr, names[:8]))}{more} without a value of its shape "
            f"(the first is of a {kind}): load it, or write reset_parameters(), or a function, init_weights(model, f)"
        )


# -- around a run -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _seeded(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, torch draws the numbers that follow ``torch.manual_seed(seed)``. Generators get their old states back."""
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        # `torch.manual_seed` seeds all devices, of which `fork_rng` restores this one alone.
        torch.default_generator.manual_seed(seed)
        if devices:
            module_of(device).manual_seed(seed)
        yield


@contextlib.contextmanager
def _keeping(model: nn.Module, empty: Collection[str]) -> Iterator[None]:
    """Afterwards all buffers except `empty` are the same tensors, with the same values.

    Inside, those that are DTensors are plain: one rank draws weights, and making a DTensor is collective.
    """
    kept = [
        (module._buffers, key, buffer, buffer.clone())
        for prefix, module in modules_of(model)
        for key, buffer in module._buffers.items()
        if buffer is not None and join_names(prefix, key) not in empty
    ]
    for buffers, key, buffer, _ in kept:
        buffers[key] = form_of(buffer).memory(buffer)
    try:
        yield
    finally:
        for buffers, key, buffer, values in kept:
            buffers[key] = buffer.copy_(values)
