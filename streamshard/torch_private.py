"""torch's private functions and classes: all that the package uses, each with its reason. No other module names one.

What a layer's forward or backward calls is an alias, because a wrapper would cost host time for each layer. Attributes
of modules and tensors (``_parameters``, ``_version``) and the documented ``torch._foreach_`` functions are used where
they are needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.decorators import skip
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY, _get_registry
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]  # not in stubs
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = [
    "AllgatherOptions",
    "AsTensors",
    "OpOverload",
    "TorchDispatchMode",
    "backend_of",
    "count_collectives",
    "data_attribute",
    "forget_composable",
    "grad_attribute",
    "graph_task_id",
    "innermost_transform",
    "is_traceable_wrapper_subclass",
    "is_traced",
    "saved_tensors_hooks",
    "skip",
    "swap_tensor",
    "tree_leaves",
    "tree_map_only",
    "untraced",
]

_T = TypeVar("_T")

# Inside it operations see a tensor subclass as a plain tensor. torch has no public name for it.
AsTensors = torch._C.DisableTorchFunctionSubclass

# ``param.data`` and ``param.grad`` as autograd has them: each goes through __torch_function__ unless it is looked up
# here, and every module and optimizer asks for them in each step.
data_attribute: Any = torch._C.TensorBase.data
grad_attribute: Any = torch._C.TensorBase.grad

# The number of the backward that this thread runs, -1 outside: torch.autograd does not say whether a backward runs.
graph_task_id = torch._C._current_graph_task_id

# The user's saved-tensor hooks that ours stand in front of, to be called as well; torch has setters only.
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks

# Puts another tensor under a Parameter object that the user holds. torch.utils.swap_tensors refuses weak references,
# which RNNs keep to their weights.
swap_tensor = torch._C._swap_tensor_impl

# skip: torch.compile breaks its graph at this function, runs it as it is and goes on compiling in what it calls.
# torch.compiler.disable would leave what it calls uncompiled as well.


@skip
def untraced(function: Callable[..., _T], *args: Any) -> _T:
    """Call `function`, never compiled."""
    if get_eval_frame_callback() in (None, False):
        return function(*args)
    result: _T = torch._dynamo.disable(function)(*args)
    return result


def is_traced() -> bool:
    """Whether torch.compile or torch.export traces the calling code."""
    return TracingContext.try_get() is not None


def innermost_transform() -> str | None:
    """The name of a torch.func transform around the calling code that is no vmap; None if there is none."""
    if torch._C._functorch.maybe_current_level() is None:
        return None
    kinds = [interpreter.key() for interpreter in torch._C._functorch.get_interpreter_stack() or ()]
    return next((kind.name.lower() for kind in kinds if kind != torch._C._functorch.TransformType.Vmap), None)


def forget_composable(module: torch.nn.Module, names: set[str]) -> set[str]:
    """Those of `names` that torch's composable APIs (fully_shard, replicate) have put on `module`, which forgets them.

    They mark modules in a private register only.
    """
    found = names.intersection(_get_registry(module) or ())
    if found:
        module.__dict__.pop(REGISTRY_KEY)
        module.__dict__.pop(STATE_KEY, None)
    return found


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of `group` for `device`; its public name may be "undefined", or several.

    Raises:
        RuntimeError: there is none.
    """
    return group._get_backend(device)


def count_collectives() -> int:
    """How many collectives this rank has called on the default process group; 0 if there is none that counts.

    torch's own flight recorder counts too, but only on NCCL.
    """
    with contextlib.suppress(RuntimeError, AttributeError):
        world: Any = dist.group.WORLD
        return int(world._get_sequence_number_for_group())
    return 0
