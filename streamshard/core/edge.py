"""Where torch calls a pass: module calls, nodes of the graph, gradients, the end of a backward, weights read.

Each function here reports one such event to the pass under way. `streamshard.core.forward` and
`streamshard.core.backward` decide what follows. The file owns every closure that torch holds for passes, and no state.
Hooks of loading and saving are in `streamshard.core.attach`, hooks of optimizers in `streamshard.core.optimizer_hooks`.

The watched class of a module has a ``__call__`` that reports to the engine. Unlike a forward hook, ``__call__`` sees
every exception, and is neither compiled by ``module.compile()`` nor recomputed by a checkpointing layer.

[Note: the end of a backward]
torch tells of the end of a backward by `queue_callback` only if the backward succeeds. If an exception ends the
backward, autograd drops the callback and tells nobody: graph tasks have no other hook, and the number of the running
task does not help, because a reentrant checkpoint runs a backward of its own inside. So a weak reference to the
callback tells of both ends.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn

from streamshard.core.backward import Backward, refuse_changed
from streamshard.core.engine import Engine, Graph, Use
from streamshard.core.forward import Forward, begin_forward
from streamshard.core.lookups import Lookup, lookups_in
from streamshard.core.module_state import Handle, handle_of
from streamshard.core.params import Param
from streamshard.core.saved_tensors import holding_back_weights, noting_weights
from streamshard.core.tied import TiedHead
from streamshard.core.unit import Unit
from streamshard.errors import ShardingError
from streamshard.guards.modules import HANDLE, ModuleEdits, ShardedModule, watched_class
from streamshard.guards.weights import advice, weight_at
from streamshard.nested import Copies, cast, cast_inputs, cast_output, moved, refuse_lost_writes, tensors_in, waited
from streamshard.planning.structure import modules_inside
from streamshard.torch_private import (
    AsTensors,
    active_ddp,
    get_grad,
    keep,
    kept,
    queue_callback,
    saved_as_it_is,
    saved_tensors_hooks,
    sequence_number,
    set_grad,
    skip,
    untraced,
)


class Watched(ShardedModule):
    """Comes before the class of a layer or wrapper module, and reports its calls."""

    @skip
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, reported to the engine."""
        handle: Handle = self.__dict__[HANDLE]
        call = call_unit if handle.unit is not None else call_pass
        return call(handle, super().__call__, args, kwargs)


class WatchedRoot(Watched):
    """Comes before the class of a whole model."""

    def __getattr__(self, name: str) -> Any:
        """Type checkers allow the attributes of any model: its class, StreamShard's subclass, is made at run time."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name != "module":
                raise
            raise AttributeError(
                f"{error}: StreamShard makes no wrapper, use the model itself. To save it: export_safetensors(model, "
                "directory), save_checkpoint(directory, model, optimizer), or model.full_state_dict()"
            ) from None


def watch(module: nn.Module, handle: Handle, edits: ModuleEdits, base: type = Watched) -> None:
    """Replace `module`'s class by a watched one that also derives from `base`, and set its handle."""
    edits.set_entry(module, HANDLE, handle)
    edits.set_class(module, watched_class(type(module), base))


# -- calls --------------------------------------------------------------------------------------------------------


@skip
def call_pass(handle: Handle, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a module around units, or with parameters of the root unit. The outermost call is the forward pass."""
    engine, micro_batch = handle.engine, handle.engine.micro_batch
    if engine.current is not None and (micro_batch is None or micro_batch.is_inside):
        if handle.tied is None:
            output = call(*args, **kwargs)
        else:
            module: Any = getattr(call, "__self__", None)
            keys = untraced(handle.tied.put, module)
            try:
                output = call(*args, **kwargs)
            finally:
                untraced(handle.tied.take_away, module, keys)
        if handle.looks_up:
            untraced(_watch_lookups, output, engine, engine.root_unit)
        return output
    if active_ddp() is not None:
        raise ShardingError(
            "a StreamShard model runs inside DistributedDataParallel, which takes its pieces for replicas and averages "
            "them: shard the part around it too, or leave DDP away"
        )
    if engine.host is not None:
        args, kwargs = untraced(moved, (args, kwargs), engine.host.device)
    if handle.cast_dtype is not None:
        args, kwargs = untraced(cast, (args, kwargs), handle.cast_dtype)
    if micro_batch is not None:  # the pass is that of all micro-batches
        with micro_batch.calling():
            output = call(*args, **kwargs)
        return output if handle.output_dtype is None else untraced(cast_output, output, handle.output_dtype)
    forward: Forward = untraced(
        functools.partial(begin_forward, engine, handle.units, (args, kwargs), is_whole_model=handle.is_root)
    )
    error: BaseException | None = None
    try:
        with contextlib.ExitStack() as watched:
            for head in engine.tied if torch.is_grad_enabled() else ():
                watched.enter_context(head.watch(saved_tensors_hooks(False)))
            output = call(*args, **kwargs)
    except BaseException as caught:
        error = caught
        raise
    finally:
        graph = untraced(forward.finish, error)
        error = None  # its traceback refers to this frame, which would keep the forward's graph alive
    if graph is not None:
        untraced(_watch_nodes, output, 0, 0, set(), engine, graph)
        if handle.is_root and engine.is_loss_unseen:
            untraced(_warn_of_rounded_loss, output, engine)
    return output if handle.output_dtype is None else untraced(cast_output, output, handle.output_dtype)


@skip
def call_unit(handle: Handle, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a layer of a unit. The unit's weights are in place before; its outputs' nodes will report in backward."""
    engine, unit, micro_batch = handle.engine, handle.unit, handle.engine.micro_batch
    assert unit is not None
    if micro_batch is not None:
        untraced(micro_batch.pause, unit)
    phase = engine.current  # another one after the pause
    if phase is None:  # called by itself, outside of the model's forward
        return call_pass(
            handle._replace(output_dtype=None), lambda *a, **k: call_unit(handle, call, a, k), args, kwargs
        )
    if engine.ranks.n_parts > 1:
        args, kwargs = untraced(waited, (args, kwargs))
    copies: Copies = []
    if handle.cast_dtype is not None:
        args, kwargs, copies = untraced(cast_inputs, args, kwargs, handle.cast_dtype)
    use: Use = untraced(phase.pre_forward, unit)
    if micro_batch is not None:
        unit.bind_leaves(micro_batch.leaves_of(unit))
        if unit is micro_batch.unit:
            args, kwargs = untraced(micro_batch.cut_inputs, args, kwargs)
    first, outer = sequence_number(), saved_tensors_hooks(False)
    # Sequence numbers are per thread. A recomputation may run in another thread than the forward.
    given = set() if phase.is_forward else {tensor.grad_fn for tensor in untraced(tensors_in, (args, kwargs))}
    try:
        if unit.weight_slot.is_shared and (outer is not None or unit.index in engine.plan.weightless):
            need = functools.partial(_need_weights, engine)
            with holding_back_weights(use, need, *(outer or (keep, kept))):
                output = call(*args, **kwargs)
        elif engine.ends is not None and not unit.is_streamed:
            with noting_weights(unit, engine.ends.saved, *(outer or (keep, kept))):
                output = call(*args, **kwargs)
        else:
            output = call(*args, **kwargs)
        if handle.looks_up:
            untraced(_watch_lookups, output, engine, unit)
        if unit.is_streamed:
            output = untraced(unit.weight_slot.without_weights, output)
    finally:
        untraced(phase.post_forward, unit)
    if copies:
        untraced(refuse_lost_writes, copies, output, unit.name)
    latest = untraced(_watch_nodes, output, 0, first, given, engine, use)
    if max(first, latest + 1) < sequence_number():  # backward comes first to a node that is not an output's
        untraced(_watch_nodes, [output, args, kwargs], 3, first, given, engine, use)
        attributes = untraced(_attributes_in, getattr(call, "__self__", None))
        untraced(_watch_nodes, attributes, 0, first, given, engine, use)
    return output if micro_batch is None or unit is not micro_batch.unit else untraced(micro_batch.cut_output, output)


def _attributes_in(layer: Any) -> list[Any]:
    """Attributes of the modules in `layer`: an auxiliary loss may be one."""
    modules = modules_inside(layer) if isinstance(layer, nn.Module) else ()
    others = ("_parameters", "_buffers", "_modules")
    return [value for module in modules for key, value in vars(module).items() if key not in others]


def compute_in_fp32(module: nn.Module, edits: ModuleEdits) -> None:
    """Let `module`, which is no unit, compute in fp32: cast its inputs to fp32, and its outputs to the inputs' dtype.

    Code around the module sees no difference. Units need no such cast: the module that takes their outputs casts.
    """

    def forward(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = next((t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()), None)
        args, kwargs = cast((args, kwargs), torch.float32)
        output = method(*args, **kwargs)
        return output if given is None else cast(output, given)

    _wrap_method(module, "forward", forward, edits)


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let calls of ``module.name(...)`` be passes, as calls of the module are: with full weights, and gradients.

    For methods beside ``forward`` that compute with the module's own weights: ``encode``, ``get_image_features``.
    Methods that only call layers, or run only inside a forward, need no registration.

    Args:
        module: a model made by `StreamShard`, a layer of it that is a unit, or a module around them.
        name: the method's name.

    Raises:
        ShardingError: `module` is not sharded, or is a part of a layer.
        AttributeError: `module` has no such method.
    """
    handle = handle_of(module)
    if handle is None:
        raise ShardingError(
            f"{type(module).__name__} is not sharded: wanted a model made by StreamShard, a layer that it streams, "
            "or a module around them"
        )
    call = call_pass if handle.unit is None else call_unit
    edits = handle.engine.edits_of()
    assert edits is not None  # `module` is a part of the model
    _wrap_method(module, name, lambda method, *args, **kwargs: call(handle, method, args, kwargs), edits)


def _wrap_method(module: nn.Module, name: str, wrapper: Callable[..., Any], edits: ModuleEdits) -> None:
    """Let ``module.name(...)`` call ``wrapper(method, ...)``; `method` is the old ``module.name``."""
    method: Any = getattr(module, name)
    # Not the bound method, which would keep the module that keeps it.
    bind = weakref.WeakMethod(method) if inspect.ismethod(method) else lambda: method

    @functools.wraps(getattr(method, "__func__", method))
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(bind(), *args, **kwargs)

    edits.set_entry(module, name, wrapped)


# -- backward ------------------------------------------------------------------------------------------------------


def _watch_lookups(output: Any, engine: Engine, unit: Unit) -> None:
    """Let backward keep the gradients of look-ups in weights of `unit`, from which `output` was computed.

    Inside the saved-tensor hooks of other code, such as a checkpoint's, backward makes the whole gradient.
    """
    if engine.phase is None or not engine.phase.is_forward:
        return
    for node in lookups_in(output):
        guard, place = weight_at(node.next_functions[0][0])
        if guard is not unit.guard or (indices := saved_as_it_is(node._raw_saved_indices)) is None:
            continue
        param = unit.params[place]
        if param.has_room and not param.form.inner:
            padding = node._saved_padding_idx
            padding = padding if padding < param.layout.shape[0] else -1  # unsigned
            keep = functools.partial(_keep_lookup, engine, unit, param, indices, padding)
            node.register_prehook(functools.partial(untraced, keep))


def _keep_lookup(
    engine: Engine, unit: Unit, param: Param, indices: torch.Tensor, padding: int, grads: tuple[torch.Tensor | None]
) -> tuple[None] | None:
    """Backward has come to a look-up: keep the gradient of its output, unless that of the weight is smaller."""
    (grad,) = grads
    if grad is None or grad.numel() >= param.layout.numel or not engine.reductions.is_open or torch.is_grad_enabled():
        return None
    with AsTensors():
        if not param.unsharded.requires_grad:
            return None
    param.lookups.append(Lookup(grad, indices, padding))
    engine.reductions.note(unit.index)
    return (None,)  # autograd makes no gradient of the weight then


def _watch_nodes(
    values: Any, depth: int, first: int, given: Collection[Any], engine: Engine, origin: Graph | Use
) -> int:
    """Let backward report before it runs a node of the tensors in `values` that a call has made.

    Args:
        values: outputs of the call, which may be inputs of it.
        depth: see `tensors_in`.
        first: sequence number of the first node of the call.
        given: nodes of the call's inputs.
        engine: of the model.
        origin: the call of a unit's layer, or the graph of the whole forward.

    Returns:
        The sequence number of the latest one; -1: there are none.
    """
    function: Callable[..., None] = _need_weights if isinstance(origin, Use) else _reach_pass
    latest = -1
    for tensor in tensors_in(values, depth=depth):
        # An in-place edit of a view replaces the view's node. The node of its base stays.
        for each in (tensor, tensor._base):
            node = None if each is None else each.grad_fn
            if node is not None and (number := node._sequence_nr()) >= first and node not in given:
                node.register_prehook(functools.partial(untraced, function, engine, origin))  # keeps `origin` alive
                latest = max(latest, number)
    return latest


def _warn_of_rounded_loss(output: Any, engine: Engine) -> None:
    """Warn if the first pass with gradients returns a loss in half precision, computed from such logits."""
    engine.is_loss_unseen = False
    for tensor in tensors_in(output):
        if tensor.dim() == 0 and tensor.dtype in (torch.bfloat16, torch.float16) and tensor.requires_grad:
            engine.warn_once(
                f"the model's forward computes its loss in {tensor.dtype}, which has 3 digits at most. For a loss in "
                "fp32 let forward compute it from logits.float(), or return the logits and compute it outside"
            )


def _begin_backward(engine: Engine) -> Backward:
    """The backward under way, or a new one. See [Note: the end of a backward]."""
    phase = engine.phase
    if isinstance(phase, Backward):
        if phase.callback_of() is not None:
            return phase
        phase.recover()
    backward = Backward(engine)
    finish = functools.partial(untraced, backward.finish)
    backward.callback_of = weakref.ref(finish, backward.break_off)
    queue_callback(finish)
    engine.phase = backward
    backward.begin()
    return backward


def _reach_pass(engine: Engine, graph: Graph, grads: object = None) -> None:
    """Backward has come to the outputs of the pass that made `graph`. A prehook of their nodes."""
    if engine.phase is None or not engine.phase.is_forward:
        _begin_backward(engine).reach(graph)


def _need_weights(engine: Engine, use: Use, grads: object = None) -> None:
    """Backward is about to read the weights of a unit. A prehook of nodes. Any number of calls for one use.

    Raises:
        ShardingError: ``create_graph=True``, or a backward inside a forward, and the unit's weights leave their slot.
    """
    unit, phase = use.unit, engine.phase
    if phase is not None and phase.is_forward:
        if unit.weight_slot.is_shared and not unit.is_bound:
            raise ShardingError(
                f"torch.autograd.grad or backward() inside the model's forward goes through {unit.name!r}, whose "
                "weights have left their slot: keep them in place, StreamShard(model, resident=["
                f"{unit.name!r}]), or differentiate outside of the forward"
            )
        refuse_changed(unit, use.versions)
        if engine.ends is not None:
            engine.ends.elsewhere.add(unit.index)
        return
    if torch.is_grad_enabled() and (unit.weight_slot.is_shared or unit.grads.slot.weights is not None):
        raise ShardingError(
            f"backward with create_graph=True through {unit.name!r}, whose weights leave their slot afterwards: take "
            "gradients of inputs, torch.autograd.grad(loss, inputs, create_graph=True), with weight_slots='all'"
        )
    _begin_backward(engine).need(use)


def register_gradient_hooks(engine: Engine, engine_of: Callable[[], Engine | None]) -> None:
    """From now on the engine knows of each gradient that autograd makes for an unsharded parameter.

    `engine_of` is weak, because the garbage collector does not see references of a tensor's hook.
    """
    for unit in engine.units:
        for place, param in enumerate(unit.params):
            if not param.form.is_packed:
                hook = functools.partial(_on_gradient, engine_of, unit.index, place)
                param.unsharded.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def register_tied_hook(engine_of: Callable[[], Engine | None], number: int, alias: nn.Parameter) -> None:
    """From now on the engine knows of gradients of ``engine.tied[number].alias``. For `engine_of` see above."""
    hook = functools.partial(_on_tied_gradient, engine_of, number)
    alias.register_post_accumulate_grad_hook(hook)


@skip
def _on_tied_gradient(engine_of: Callable[[], Engine | None], number: int, alias: torch.Tensor) -> None:
    """Autograd has made the gradient of a head: it takes the place of its weight, or waits as any other's."""
    if (engine := engine_of()) is not None:
        untraced(_take_tied_gradient, engine_of, engine, engine.tied[number], alias)


def _take_tied_gradient(engine_of: Callable[[], Engine | None], engine: Engine, head: TiedHead, alias: Any) -> None:
    unit, param = head.unit, head.param
    with AsTensors():
        grad = get_grad(alias)
        set_grad(alias, None)
    if grad is None:
        return
    is_ordinary = engine.reductions.is_open and not torch.is_grad_enabled() and param.has_room and not grad.is_sparse
    if is_ordinary and head.pass_by():
        engine.reductions.begin_grad(unit, param, grad)
        return
    with AsTensors():
        own = get_grad(param.unsharded)
        set_grad(param.unsharded, grad if own is None else own + grad)
    _on_gradient(engine_of, unit.index, param.unsharded.place, param.unsharded)


@skip
def _on_gradient(engine_of: Callable[[], Engine | None], index: int, place: int, view: torch.Tensor) -> None:
    """Autograd has made a gradient. It stays in ``.grad`` of the unsharded parameter until its unit is reduced."""
    if (engine := engine_of()) is None:
        return
    param = engine.units[index].params[place]
    if not param.has_room or not engine.reductions.is_open or torch.is_grad_enabled():
        untraced(_accept_gradient, engine, param, view)
    engine.reductions.note(index)


def _accept_gradient(engine: Engine, param: Param, view: torch.Tensor) -> None:
    """Raise if the gradient of `param` cannot be reduced. Begin a backward if none runs."""
    with AsTensors():
        grad = get_grad(view)
        set_grad(view, None)
    if grad is None:  # the parameter was frozen in this backward
        return
    refuse_without_room(param)
    if grad.requires_grad:
        raise ShardingError(
            f"backward(create_graph=True): gradients of {param.name!r} cannot be differentiated again. Gradients of "
            "inputs can, with weight_slots='all': torch.autograd.grad(loss, inputs, create_graph=True)"
        )
    if engine.phase is not None and engine.phase.is_forward:
        raise ShardingError(
            f"backward() inside the model's forward has made a gradient of {param.name!r}, which is reduced over ranks "
            "only in a backward after it: use torch.autograd.grad(..., inputs) for what the forward needs"
        )
    _begin_backward(engine)
    with AsTensors():
        set_grad(view, grad)


def refuse_without_room(param: Param) -> None:
    """Raise if there is no memory for the gradient of `param`, which has one now."""
    if not param.has_room:
        raise ShardingError(
            f"parameter {param.name!r} was frozen when StreamShard(model) was called and trains now: there is no room "
            "for its gradient. Freeze it after StreamShard(model), as often as you like"
        )


def run_empty_backward(engine: Engine, graph: Graph) -> None:
    """Run a backward through `graph` without any gradient: all its collectives, with zeros."""
    loss = torch.zeros((), requires_grad=True) * 1.0
    _watch_nodes(loss, 0, 0, (), engine, graph)
    loss.backward()


# -- weights that are read outside of their layer ---------------------------------------------------------------------


def ask_for(engine_of: Callable[[], Engine | None], index: int, layer: str) -> Callable[[str], None]:
    """A function that puts unit `index` in place, because code computes with one of its absent weights.

    See [Note: absent weights]. `layer` is the name of the class of the unit's layer.
    """

    def ask(name: str) -> None:
        engine = engine_of()
        if engine is None or (phase := engine.current) is None:
            raise ShardingError(
                f"{name!r} was read inside a forward and is used after it, where every rank has its piece only: "
                "compute with it inside, keep a clone(), or read it inside summon_full_params()"
            )
        unit = engine.units[index]
        if unit.is_streamed and index not in engine.plan.ends:
            raise ShardingError(
                f"the weight {name!r} is computed with while its layer does not run, when other layers have its "
                f"buffer: keep it in place, {advice(name)}, or all layers of its class, resident=[{layer!r}]; or call "
                "the layer itself (not its forward, nor a module in it)"
            )
        phase.read(unit, name)

    return ask


@skip  # torch.compile breaks its graph where weights are read
def read_weight(engine: Engine, unit: int, index: int) -> nn.Parameter:
    """An unsharded parameter, for a look-up inside a pass. A resident unit is all-gathered first."""
    phase, read = engine.current, engine.units[unit]
    if phase is not None and (not read.is_streamed or unit in engine.plan.ends):
        untraced(phase.read, read)
    if engine.micro_batch is not None:
        return engine.micro_batch.leaves_of(read)[index]
    unsharded: nn.Parameter = read.params[index].unsharded
    return unsharded
