"""Where autograd calls a backward: nodes of the graph, gradients of look-ups, heads and parameters, and its end.

Each function here reports one such event to `streamshard.core.backward`, and begins the backward if none runs. The
engine's hooks of autograd's nodes and parameters are here, and no state; hooks of saved tensors are in
`streamshard.core.edge`.

[Note: the end of a backward]
torch tells of the end of a backward by `queue_callback` only if the backward succeeds. If an exception ends the
backward, autograd drops the callback and tells nobody: graph tasks have no other hook, and the number of the running
task does not help, because a reentrant checkpoint runs a backward of its own inside. So a weak reference to the
callback tells of both ends.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import nn

from streamshard.core.backward import Backward, refuse_changed
from streamshard.core.engine import Engine, Graph, Use
from streamshard.core.params import Lookup, Param
from streamshard.core.tied import TiedHead
from streamshard.core.unit import Unit
from streamshard.errors import ShardingError
from streamshard.guards.weights import weight_at
from streamshard.nested import tensors_in
from streamshard.torch_private import (
    AsTensors,
    get_grad,
    graph_task_id,
    queue_callback,
    saved_as_it_is,
    set_grad,
    skip,
    untraced,
)

_NODES = 32  # between the outputs of a layer and its look-ups: sums, norms, dropout
_node_of = operator.attrgetter("grad_fn")


def watch_lookups(output: Any, engine: Engine, unit: Unit) -> None:
    """Let backward keep the gradients of look-ups in weights of `unit`, from which `output` was computed.

    Inside the saved-tensor hooks of other code, such as a checkpoint's, backward makes the whole gradient.
    """
    if engine.phase is None or not engine.phase.is_forward:
        return
    for node in _lookups_in(output):
        guard, place = weight_at(node.next_functions[0][0])  # an embedding's first input is its weight
        if guard is not unit.guard or (indices := saved_as_it_is(node._raw_saved_indices)) is None:
            continue
        param = unit.params[place]
        if param.has_room and not param.form.inner:
            padding = node._saved_padding_idx
            padding = padding if padding < param.layout.shape[0] else -1  # unsigned
            keep = functools.partial(_keep_lookup, engine, unit, param, indices, padding)
            node.register_prehook(functools.partial(untraced, keep))


def _lookups_in(output: Any) -> Iterator[Any]:
    """The graph nodes of look-ups that `output` was computed from. Nodes farther than a layer are not found."""
    nodes: list[Any] = list(map(_node_of, tensors_in(output)))
    seen = set(nodes)
    for node in nodes:
        if node is None or len(seen) > _NODES:
            continue
        if node.name() == "EmbeddingBackward0":
            if not node._saved_sparse and not node._saved_scale_grad_by_freq:  # `write_lookups` makes neither
                yield node
            continue
        for following, _ in node.next_functions:
            if following not in seen:
                seen.add(following)
                nodes.append(following)


def _keep_lookup(
    engine: Engine, unit: Unit, param: Param, indices: torch.Tensor, padding: int, grads: tuple[torch.Tensor | None]
) -> tuple[None] | None:
    """Backward has come to a look-up: keep the gradient of its output, unless that of the weight is smaller."""
    (grad,) = grads
    # Only an open backward reduces look-ups. With ``create_graph=True`` the weight's gradient itself needs a graph.
    if grad is None or grad.numel() >= param.layout.numel or not engine.reductions.is_open or torch.is_grad_enabled():
        return None
    with AsTensors():
        if not param.unsharded.requires_grad:
            return None
    param.lookups.append(Lookup(grad, indices, padding))
    engine.reductions.note(unit.index)
    return (None,)  # autograd makes no gradient of the weight then


def watch_nodes(
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
    function: Callable[..., None] = need_weights if isinstance(origin, Use) else _enter_pass
    latest = -1
    for tensor in tensors_in(values, depth=depth):
        # An in-place edit of a view replaces the view's node. The node of its base stays.
        for each in (tensor, tensor._base):
            node = None if each is None else each.grad_fn
            if node is not None and (number := node._sequence_nr()) >= first and node not in given:
                node.register_prehook(functools.partial(untraced, function, engine, origin))  # keeps `origin` alive
                latest = max(latest, number)
    return latest


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
    queue_callback(finish)  # from here on only autograd holds `finish`
    engine.phase = backward  # before `begin`: if that raises, `break_off` has something to end
    backward.begin()
    return backward


def _enter_pass(engine: Engine, graph: Graph, grads: object = None) -> None:
    """Backward has come to the outputs of the pass that made `graph`. A prehook of their nodes."""
    if engine.phase is None or not engine.phase.is_forward:
        _begin_backward(engine).enter(graph)


def need_weights(engine: Engine, use: Use, grads: object = None) -> None:
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
        if use.versions != unit.versions():
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
    if grad is None or not param.unsharded.requires_grad:  # the weight was frozen in this backward
        return
    is_ordinary = engine.reductions.is_open and not torch.is_grad_enabled() and param.has_room and not grad.is_sparse
    phase = engine.phase
    # In a backward inside the backward, of a reentrant checkpoint, the next chunk may need the weight.
    is_outer = isinstance(phase, Backward) and phase.task == graph_task_id()
    if is_ordinary and is_outer and head.pass_by():  # `pass_by` last: it lets reads of the weight be noticed
        engine.reductions.write_tied(unit, param, grad)
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
    # True for the first gradient of a backward, or before an error. All others pay for this line only.
    if not param.has_room or not engine.reductions.is_open or torch.is_grad_enabled():
        untraced(_accept_gradient, engine, param, view)
    engine.reductions.note(index)


def _accept_gradient(engine: Engine, param: Param, view: torch.Tensor) -> None:
    """Raise if the gradient of `param` cannot be reduced. Begin a backward if none runs."""
    with AsTensors():
        grad = get_grad(view)
        set_grad(view, None)  # while this may raise: a refused one is never reduced
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
    loss = torch.zeros((), requires_grad=True) * 1.0  # a node, for the prehook
    watch_nodes(loss, 0, 0, (), engine, graph)
    loss.backward()
