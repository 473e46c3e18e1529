"""One micro-batch on its way through the model: a forward that pauses between layers, and the segments of its graph.

[Note: segments]
A forward pauses where it calls a streamed unit. The graph nodes that it makes between two pauses are a *segment*: they
have the sequence numbers between those of the pauses. Backward runs one segment at a time, from the edges that segments
behind it have left gradients for, to the edges into segments before it. So backward of all micro-batches can go through
one layer before the next one, in the order of micro-batches, and each frees its segment's memory.

autograd runs every node from which a wanted gradient can be reached. So the wanted ones must not be reached through
other segments:

- A weight that several segments use has a leaf in each: a parameter in the memory of the unsharded one.
- Inputs and outputs of a layer, which later segments may use beside what they make of them, are *cut*: the forward goes
  on with the same memory under a new node, which leads nowhere. The nodes of the layer and those behind it are *parts*
  of the segment. Backward runs them one after the other.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import itertools
import operator
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from streamshard.core.graph_hooks import refuse_without_room
from streamshard.core.params import Lookup, Param
from streamshard.core.unit import Unit
from streamshard.errors import ConfigError, ShardingError, StateError
from streamshard.guards.weights import WeightGuard, weight_at
from streamshard.layer_major.own_state import Attributes, ThreadState, Values, take_state
from streamshard.nested import map_tensors, tensors_in
from streamshard.planning.structure import replacing
from streamshard.torch_private import RUN_AUTOGRAD, AsTensors, run_autograd, sequence_number, set_grad

_CUT = "_streamshard_cut"  # the entry of a tensor's ``__dict__``: its cut
_ACCUMULATE = "torch::autograd::AccumulateGrad"

Edge = tuple[Any, int]  # a graph node, and the number of its input

_version_of = operator.attrgetter("_version")
_anchor = torch.zeros((), device="cpu", requires_grad=True)  # lets a cut have a node


class _Cut(torch.autograd.Function):
    """A tensor under a new node, which never runs. It may be changed in place, unlike a leaf."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        """`tensor`, in the same memory."""
        return tensor.detach()


_cut: Callable[..., torch.Tensor] = _Cut.apply


class MicroBatch:
    """See the module.

    Args:
        forward: computes the loss.
        units: by their guards.
        state: torch's state of the thread, in which the forward begins.
        new: makes a greenlet.
        last: the unit that passes use last. A forward waits there too if it is resident.
        attributes: see `Attributes`.

    Attributes:
        unit: the unit before whose layer the forward waits, or whose segment runs; None before the first one.
        is_inside: the forward is inside a call of the model.
    """

    def __init__(
        self,
        forward: Callable[[], torch.Tensor],
        units: Mapping[WeightGuard, Unit],
        state: ThreadState,
        new: Callable[..., Any],
        last: Unit,
        attributes: Attributes,
    ) -> None:
        self.unit: Unit | None = None
        self.is_inside = False
        self.state = state
        self._forward, self._units, self._last = forward, units, last
        self._device = last.ranks.streams.device
        self._attributes = attributes
        self._set: Values = {}
        self._greenlet = new(self._run)
        self._greenlet.gr_context = contextvars.copy_context()  # a greenlet begins in an empty context
        self._segments: list[list[int]] = []  # the sequence numbers at which their parts begin, and the last one ends
        self._cuts: dict[Any, Edge] = {}  # by the node of a cut, the edge to the node that it stands for
        self._given: list[tuple[torch.Tensor, Any]] = []  # cuts that the layer has got, and their nodes
        self._left: dict[Edge, torch.Tensor] = {}  # gradients for edges into segments that backward has not run
        # By node, what keeps it alive. Before torch 2.13 the node of a Function in Python does not do so itself.
        self._owners: dict[Any, Any] = {}
        self._leaves: dict[int, list[Any]] = {}  # by unit, of the segment that runs
        # Gradients that wait until their unit's are added up: [full shape] compute dtype, and of weights of embeddings.
        self._dense: dict[Param, torch.Tensor] = {}
        self._lookups: dict[Param, list[Lookup]] = {}

    # -- forward --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        loss = self._forward()
        self.loss = loss.detach()
        if loss.grad_fn is None:
            loss.backward()  # raises, as it does for any such loss
        self._left[self._edge_of(loss)] = torch.ones_like(loss)

    @property
    def is_done(self) -> bool:
        """Whether the forward has returned."""
        return bool(self._greenlet.dead)

    def begin_segment(self) -> None:
        """The forward is about to go on."""
        self._segments.append([sequence_number()])
        self._leaves.clear()

    def resume(self) -> None:
        """Run the forward until it waits again, or returns."""
        with replacing((*RUN_AUTOGRAD, self._run_autograd)):
            self._switch(self._greenlet.switch)

    def _run_autograd(self, outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        """A backward inside the forward. It may go through one layer, and must not end at a cut."""
        nodes = [output.node if isinstance(output, GradientEdge) else output.grad_fn for output in outputs]
        seen = set(nodes)
        for node in nodes:
            if node in self._cuts:
                raise ShardingError(
                    "accumulate: torch.autograd.grad or backward() inside loss_of goes through several layers, whose "
                    "graphs are apart: loop over micro-batches with loss.backward()"
                )
            for following, _ in () if node is None else node.next_functions:
                if following not in seen:
                    seen.add(following)
                    nodes.append(following)
        return run_autograd(outputs, *args, **kwargs)

    def _switch(self, switch: Callable[[], Any]) -> None:
        outer = take_state(self._device)
        self.state.put()
        self._attributes.enter(self._set)
        try:
            switch()
        finally:
            self._set = self._attributes.leave()
            self._segments[-1].append(sequence_number())
            self.state = take_state(self._device)
            outer.put()

    def pause(self, unit: Unit, given: Any) -> None:
        """The forward is about to call a layer of `unit`: wait there, if another unit's segment runs.

        Args:
            unit: of the layer.
            given: the layer's arguments.

        Raises:
            ShardingError: another micro-batch has changed one of them meanwhile.
        """
        # Resident units stay in place: no other micro-batch has to come there first.
        if unit is self.unit or not (unit.is_streamed or unit is self._last):
            return
        _refuse_inside_function(unit)
        tensors = [tensor for tensor in tensors_in(given) if not tensor.is_inference()]  # these have no version
        versions = list(map(_version_of, tensors))
        self.unit = unit
        self._greenlet.parent.switch()
        if versions != list(map(_version_of, tensors)):
            raise ShardingError(
                f"accumulate: {unit.name!r} gets a tensor that all micro-batches change in place, as by mask.copy_: it "
                "would see the last one's. Make a new tensor, or loop over micro-batches with loss.backward()"
            )

    def end(self) -> None:
        """The step has failed: end the forward where it waits."""
        if self._greenlet:  # it has begun, and has not returned
            with contextlib.suppress(Exception):  # the step raises its own
                self._switch(self._greenlet.throw)

    def calling(self) -> contextlib.AbstractContextManager[None]:
        """Inside a call of the model."""
        return replacing((vars(self), "is_inside", True))

    def leaves_of(self, unit: Unit) -> list[Any]:
        """The parameters of `unit` for this segment, see [Note: segments]."""
        if unit.index not in self._leaves:
            self._leaves[unit.index] = unit.new_leaves()
        return self._leaves[unit.index]

    def cut_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The tensors among the arguments of a layer, cut from the graph before it. See [Note: segments]."""
        for tensor in tensors_in((args, kwargs)):
            getattr(tensor, "grad_fn")  # noqa: B009  # makes that of a view whose base was changed in place
        self._segments[-1].append(sequence_number())  # they may have been cast since the pause
        self._given.clear()
        return tuple(map(self._cut_input, args)), {name: self._cut_input(value) for name, value in kwargs.items()}

    def _cut_input(self, value: Any) -> Any:
        """`value` with cut tensors. A list or dict stays the caller's own, into which a layer may write."""
        if type(value) is tuple:
            return tuple(map(self._cut_input, value))
        if not isinstance(value, torch.Tensor):
            return value
        cut = self._cut_tensor(value)
        if cut is not value:  # code around the layer may add `value` to what the layer returns
            if value._backward_hooks or value.retains_grad:
                _refuse_hook()
            value.__dict__.update(_NO_HOOKS)
        self._given.append((cut, cut.grad_fn))
        return cut

    def cut_output(self, output: Any) -> Any:
        """`output` of a layer, cut from the graph that has made it.

        Raises:
            ShardingError: the layer has changed an input in place, which its caller has too.
        """
        is_changed = any(cut.grad_fn is not node for cut, node in self._given)
        self._given.clear()
        if is_changed:
            raise ShardingError(
                f"accumulate: {self.unit.name if self.unit else ''!r} changes its input in place, which its caller "
                "has too: let it compute a new tensor, or loop over micro-batches with loss.backward()"
            )
        self._segments[-1].append(sequence_number())
        return map_tensors(output, self._cut_tensor)

    def _cut_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.grad_fn is None or tensor.grad_fn in self._cuts or not torch.is_grad_enabled():
            return tensor
        # One cut for all layers that get the tensor, so that autograd adds their gradients one after the other.
        cut, edge = tensor.__dict__.get(_CUT), self._edge_of(tensor)
        if cut is None or self._cuts.get(cut.grad_fn) != edge:  # changed in place since
            cut = tensor.__dict__[_CUT] = _cut(tensor.detach(), _anchor)
            cut.__dict__.update(_NO_HOOKS)
            self._cuts[cut.grad_fn] = edge
        return cast(torch.Tensor, cut)

    def _edge_of(self, tensor: torch.Tensor) -> Edge:
        node, place, owner = get_gradient_edge(tensor)
        self._owners[node] = owner
        return node, place

    # -- backward -------------------------------------------------------------------------------------------------

    def run_segment_backward(self) -> None:
        """Run backward of the last segment that it has not run for."""
        places = self._segments.pop()
        for start, end in reversed(list(itertools.pairwise(places))):
            self._run_part_backward(range(start, end))
        if not self._segments and self._left:
            refuse_shared()

    def _run_part_backward(self, part: range) -> None:
        roots: dict[Edge, torch.Tensor] = {}
        for edge in list(self._left):
            root = self._cuts.get(edge[0], edge)
            if root[0]._sequence_nr() in part:
                grad = self._left.pop(edge)
                roots[root] = roots[root] + grad if root in roots else grad
                self._cuts.pop(edge[0], None)  # it holds the part's graph
        held = [(node, self._owners.pop(node, None)) for node, _ in roots]
        inputs, leaves = self._inputs_of([node for node, _ in roots], part)
        edges = [*inputs, *leaves]
        if not edges:
            return
        # A gradient that later segments have left for an input comes first in autograd's sum, as in one backward.
        roots.update((edge, self._left.pop(edge)) for edge in inputs if edge in self._left)
        outputs, wanted = ([GradientEdge(*edge) for edge in each] for each in (roots, edges))
        # Unused: a look-up keeps the gradient of its output, and makes none of the weight.
        made = torch.autograd.grad(outputs, wanted, list(roots.values()), allow_unused=True)
        del roots  # their gradients are freed before others are added
        # Not strict: `made` goes on with the gradients of leaves.
        for edge, grad in zip(inputs, made, strict=False):
            if grad is not None:
                self._left[edge] = grad
                if edge[0] not in self._cuts:  # else it never runs
                    self._owners.setdefault(edge[0], held)
        for (node, _), grad in zip(leaves, made[len(inputs) :], strict=True):
            self._keep(node, grad)

    def _inputs_of(self, roots: Sequence[Any], part: range) -> tuple[list[Edge], list[Edge]]:
        """The edges from a part's nodes to cuts and nodes of earlier parts, and to leaves.

        Args:
            roots: nodes of the part, from which backward begins.
            part: the sequence numbers of its nodes.

        Raises:
            ShardingError: an edge leads to another micro-batch.
        """
        inputs: dict[Edge, None] = {}
        leaves: dict[Edge, None] = {}
        seen = set(roots)
        nodes = list(seen)
        for node in nodes:
            for edge in node.next_functions:
                following = edge[0]
                if following is None or following in seen:
                    continue
                if following.name() == _ACCUMULATE:
                    leaves[edge] = None
                elif following in self._cuts or (number := following._sequence_nr()) < part.start:
                    inputs[edge] = None
                elif number < part.stop:
                    seen.add(following)
                    nodes.append(following)
                else:
                    refuse_shared()
        self._refuse_beneath(inputs, {*inputs, *leaves})
        return list(inputs), list(leaves)

    def _refuse_beneath(self, inputs: Collection[Edge], wanted: Collection[Edge]) -> None:
        """Raise if autograd would reach an edge of `wanted` through `inputs`, and run the nodes between twice."""
        nodes = [node for node, _ in inputs if node not in self._cuts]
        seen = set(nodes)
        for node in nodes:
            for edge in node.next_functions:
                if edge in wanted:
                    raise ShardingError(
                        "accumulate: behind later layers the model uses tensors of which one was computed from the "
                        "other, and the first is no input or output of a layer: hidden states that a hook took in a "
                        "layer, skips between layers (a U-Net), a weight that code keeps in a variable. Return such "
                        "tensors from layers, read the weight from its module each time, name modules that contain "
                        "them as units, StreamShard(model, units=[...]), or loop over micro-batches with "
                        "loss.backward()"
                    )
                if edge[0] is not None and edge[0] not in seen and edge[0] not in self._cuts:
                    seen.add(edge[0])
                    nodes.append(edge[0])

    def _keep(self, node: Any, grad: torch.Tensor | None) -> None:
        """Keep the gradient of a leaf, unless the leaf is the user's own.

        Raises:
            ShardingError: there is no memory for the gradient of its parameter, or it is another model's.
        """
        guard, number = weight_at(node)
        if guard is None:
            if grad is not None:
                _add_to_own(node.variable, grad)
            return
        if guard not in self._units:
            refuse_other(guard.names[number])
        param = self._units[guard].params[number]
        if param.lookups:
            self._lookups.setdefault(param, []).extend(param.lookups)
            param.lookups.clear()
        if grad is not None:
            refuse_without_room(param)
            dense = self._dense
            dense[param] = dense[param] + grad if param in dense else grad  # not in place: others may hold it

    def refuse_left(self) -> None:
        """Raise if gradients wait that no unit has been given."""
        for param in (*self._dense, *self._lookups):
            raise StateError(f"the gradient of {param.name!r}", "left", "a given one")

    def give(self, unit: Unit, at_least: int = 0) -> bool:
        """Give parameters of `unit` with so many elements the gradients that wait for them. Whether there were some."""
        params = [param for param in unit.params if param.layout.numel >= at_least]
        waiting = [param for param in params if param in self._dense or param in self._lookups]
        for param in waiting:
            param.lookups.extend(self._lookups.pop(param, ()))
            if (grad := self._dense.pop(param, None)) is not None:
                with AsTensors():
                    set_grad(param.unsharded, grad)
        return bool(waiting)


def _refuse_hook(*args: Any) -> NoReturn:
    """Raise: autograd would call a hook for each part of the tensor's gradient."""
    raise ShardingError(
        "accumulate: register_hook or retain_grad of a tensor between layers, whose gradient comes in several parts: "
        "call it on a tensor inside a layer, or loop over micro-batches with loss.backward()"
    )


# Entries of the ``__dict__`` of tensors that layers get and return, whose gradients come in several parts.
_NO_HOOKS = {"register_hook": _refuse_hook, "retain_grad": _refuse_hook}


def _refuse_inside_function(unit: Unit) -> None:
    """Raise if a layer of `unit` is called inside ``forward`` of an autograd Function, such as a reentrant checkpoint.

    torch's C++ code is on the stack there, whose state of the thread a pause would mix up.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            raise ShardingError(
                f"accumulate: {unit.name!r} is called inside a reentrant checkpoint, or another autograd Function: "
                "take use_reentrant=False, or loop over micro-batches with loss.backward()"
            )
        frame = frame.f_back


def _add_to_own(leaf: torch.Tensor, grad: torch.Tensor) -> None:
    """Accumulate the gradient of a tensor of the user's, whose hooks autograd has called."""
    leaf.grad = grad if leaf.grad is None else leaf.grad + grad  # not in place: the user may hold it
    for hook in (leaf._post_accumulate_grad_hooks or {}).values():
        hook(leaf)


def new_greenlets() -> Callable[..., Any]:
    """The class that makes forwards pause.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        kind: Callable[..., Any] = importlib.import_module("greenlet").greenlet
    except ImportError as error:
        raise ConfigError(
            "model.accumulate pauses forwards between layers by the package greenlet, which is not installed: "
            "pip install 'streamshard[accumulate]', or loop over micro-batches with loss.backward()"
        ) from error
    return kind


def refuse_shared() -> NoReturn:
    """Raise, because the loss of a micro-batch depends on the forward of another one."""
    raise ShardingError(
        "accumulate: the loss of a micro-batch depends on the forward of another one, because the model keeps tensors "
        "of a forward outside of it, in an attribute of a module or in a global list (an auxiliary loss, say), where "
        "forwards that take turns overwrite them: return them from the layers instead, or loop over micro-batches with "
        "loss.backward()"
    )


def refuse_other(name: str) -> NoReturn:
    """Raise, because the loss trains the weight `name` of another model, which reduces in the order of a backward."""
    raise ShardingError(
        f"accumulate: the loss trains {name!r} of another sharded model too. If only this model is to train, as a "
        "GAN's generator is, call other.requires_grad_(False) before and other.requires_grad_(True) after. Else loop "
        "over micro-batches with loss.backward()"
    )


def refuse_pause(unit: Unit) -> NoReturn:
    """Raise, because a micro-batch calls a layer behind the last one."""
    raise ShardingError(
        f"accumulate: a micro-batch calls {unit.name!r} behind the layer that was the last one of earlier steps, when "
        "its backward has begun: loop over micro-batches with loss.backward() instead"
    )
