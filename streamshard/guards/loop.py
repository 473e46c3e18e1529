"""Mistakes of a training loop around the model: transforms, different inputs, exchanged modules, no backward."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn

from streamshard.comm.communicator import Communicator
from streamshard.comm.streams import Streams
from streamshard.errors import RankMismatchError, ShardingError
from streamshard.guards.sharded_tensor import CALL_BACKWARD
from streamshard.nested import sums_of_bits, tensors_in
from streamshard.planning.structure import join_names, modules_of, params_of
from streamshard.torch_private import (
    graph_task_id,
    innermost_transform,
    is_autograd_compiled,
    is_traceable_wrapper_subclass,
    transform_level,
)


def refuse_transforms(streams: Streams | None = None) -> None:
    """Raise inside ``torch.func.grad`` and similar transforms, compiled autograd, and the capture of a device graph.

    ``vmap`` is allowed: it only maps over a layer's inputs.

    Args:
        streams: of the model; None while it is sharded.

    Raises:
        ShardingError: names the transform.
    """
    device = None if streams is None else streams.module
    if getattr(device, "is_current_stream_capturing", bool)():  # not every device has graphs; bool() is False
        raise ShardingError(
            "a pass of a StreamShard model is captured in a device graph: a replay would repeat this step's "
            "collectives without the host, which decides what follows them. Capture layers: torch.compile(layer, "
            'mode="reduce-overhead"), whose weights stay at the same addresses'
        )
    if is_autograd_compiled():
        raise ShardingError(
            "compiled autograd is on, which reads the weights of all layers before backward begins, and a StreamShard "
            "model has them in place one at a time: leave out torch's setting compiled_autograd = True. Compiling "
            "layers or the model (layer.compile(), torch.compile(model)) compiles their backward too"
        )
    if transform_level() is not None and (transform := innermost_transform()) is not None:
        raise ShardingError(
            f"a StreamShard model inside torch.func ({transform}): such transforms allow no writes, and an all-gather "
            "writes weights. Use backward(), torch.autograd.grad of inputs, or torch.autograd.forward_ad"
        )


def refuse_other_inputs(ranks: Communicator, inputs: object) -> None:
    """Raise if ranks along the axis of DTensors, which compute one loss together, get different inputs. Collective.

    DTensors in `inputs` may be cut. Sparse and nested tensors are not compared.

    Raises:
        RankMismatchError: on all ranks.
    """
    plain = [t for t in tensors_in(inputs) if not is_traceable_wrapper_subclass(t) and t.layout is torch.strided]
    told = [f"{tuple(t.shape)} {t.dtype} {sums_of_bits([t])}" for t in plain]
    first: dict[int, tuple[int, list[str]]] = {}
    # Along an axis only: ranks of other axes have batches of their own.
    for rank, (axis, theirs) in enumerate(ranks.gather_objects("compare inputs", (ranks.axis, told))):
        number, wanted = first.setdefault(axis, (rank, theirs))
        if theirs != wanted:
            raise RankMismatchError(
                f"ranks {number} and {rank} of the model have parts of the same tensors (tensor parallelism, experts "
                "beside the ranks that shard), and their forwards got different inputs: give all ranks along such an "
                'axis the same batches, as DistributedSampler(data, num_replicas=mesh["dp"].size(), '
                'rank=mesh.get_local_rank("dp")) does, and seed random inputs alike. If experts are on ranks with '
                "batches of their own, give mesh= with all of these ranks"
            )


class Members:
    """The modules and parameters of a sharded model, whose modules hold the sharded parameters.

    A parameter or layer that is assigned afterwards would be trained by this rank alone.

    Args:
        root: the model.
    """

    def __init__(self, root: nn.Module) -> None:
        self._params: list[tuple[str, dict[str, Any], tuple[Any, ...]]] = []
        self._children: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {}
        for name, module in modules_of(root):
            # The objects are kept, not their ids: a freed parameter's id may be a new one's.
            if isinstance(module._parameters, dict):  # TorchScript's is none, and has no parameters
                self._params.append((name, module._parameters, tuple(module._parameters.values())))
            self._children[name] = module._modules, tuple(module._modules.values())

    def check(self) -> None:
        """A pass begins.

        Raises:
            ShardingError: a parameter was added, removed or replaced, or a module with others was added; names it.
        """
        # dict's own values(): a sharded module's `_parameters` has a slow one.
        for name, params, known in self._params:
            if len(params) != len(known) or not all(map(operator.is_, dict.values(params), known)):
                changed = (key for key, param in params.items() if not any(param is old for old in known))
                # There is none to name if a parameter was only removed.
                _refuse_change("parameter", name, next(changed, ""))
        for name, (children, before) in self._children.items():
            if len(children) != len(before) or not all(map(operator.is_, children.values(), before)):
                sharded = {param for _, _, known in self._params for param in known}
                for key, child in children.items():
                    # A module around the old one is allowed.
                    if child is not None and not sharded.issuperset(params_of(child).values()):
                        _refuse_change("module", name, key)
                self._children[name] = children, tuple(children.values())  # modules without parameters may change


def _refuse_change(what: str, owner: str, key: str) -> NoReturn:
    name = repr(join_names(owner, key)) if key else f"of {owner or 'the model'!r}"
    raise ShardingError(
        f"{what} {name} was replaced, added or removed after StreamShard(model): this rank alone would train the new "
        "one. Change the model before it is sharded, or assign to a parameter's data (param.data.copy_, "
        "load_state_dict, summon_full_params()). torch.func.functional_call replaces parameters too"
    )


class Progress:
    """How far the training of a model has come. The engine holds it; passes and steps set it.

    Attributes:
        is_unreached: the model has run forward with gradients, and not backward since.
        calls_hooks: hooks of the user's run inside backward, for gradients that are complete: they may step.
        has_stepped: an optimizer has stepped the model's parameters since ranks last exchanged flags.
        is_local: gradients are not averaged over replicas, so only `LocalSGD` may step.
        names: of the model's parameters.
    """

    def __init__(self) -> None:
        self.calls_hooks = self.is_local = False
        self.is_unreached = False
        self.has_stepped = True
        self.names: Mapping[Any, str] = {}

    def begin(self, names: Mapping[nn.Parameter, str]) -> None:
        """Look at all steps from now on."""
        self.names = names
        _models.add(self)


_models: WeakSet[Progress] = WeakSet()  # an engine goes with its model


def check_step(params: Sequence[torch.Tensor], *, makes_grads: bool) -> None:
    """An optimizer, any of the process, is about to step `params`.

    Args:
        params: some of them perhaps of models.
        makes_grads: the step has a closure.

    Raises:
        ShardingError: they have no gradients, because no backward has come to their model. Or it steps inside a
            backward, with a gradient that is not complete, or outside of local SGD.
    """
    for progress in list(_models):
        first = next(filter(progress.names.__contains__, params), None)  # in C: each step of any optimizer asks
        if first is None:
            continue
        name = progress.names[first]
        if progress.is_unreached and not makes_grads and all(param.grad is None for param in params):
            trained = (progress.names[param] for param in params if param.requires_grad and param in progress.names)
            if (missed := next(trained, None)) is not None:
                raise ShardingError(
                    f"an optimizer steps, and neither {missed!r} nor any other of its parameters has a gradient, "
                    "although the model has run forward: no backward has come to it. backward(inputs=...) does not "
                    "find sharded parameters, because layers compute with all-gathered copies: " + CALL_BACKWARD
                )
        if not progress.calls_hooks and graph_task_id() != -1:
            raise ShardingError(
                f"an optimizer steps {name!r} inside backward, with a part of its gradient: a hook of "
                "register_post_accumulate_grad_hook has got the gradient of a penalty on the weight itself, such as "
                "p.norm() in the loss. Step after backward(), or leave the penalty to the optimizer (weight_decay)"
            )
        if progress.is_local:
            raise ShardingError(
                f"an optimizer steps {name!r} outside of LocalSGD, since which gradients are not averaged over "
                "replicas: their weights would drift apart for good. Put this optimizer into a LocalSGD too; to "
                "average gradients again, delete the other one, and let the new one have warmup_steps"
            )


def note_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """`optimizer`, any of the process, has stepped. A step that raises, on one rank alone perhaps, does not come here.

    A hook of torch's, with its arguments.
    """
    for progress in list(_models):
        for group in optimizer.param_groups:
            if not progress.names.keys().isdisjoint(group["params"]):
                progress.has_stepped = True
