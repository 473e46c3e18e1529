"""Private functions and classes of torch that the package uses, each with its reason. No other module imports one.

Functions that each pass or each layer's forward or backward calls are aliases: a wrapper would cost host time. Other
modules do use private attributes of modules, tensors, graph nodes and optimizers (``_parameters``, ``_version``) and
the ``torch._foreach_`` functions.

Imported under torch's own names:

- ``AsyncCollectiveTensor``: a tensor that waits for a functional collective when it is used.
- ``AllgatherOptions``, ``ReduceScatterOptions``: of the methods of a process group. The functions of torch.distributed
  have no timeout, and make such an object in each call.
- ``FakeTensorMode``: runs a model with tensors that have no memory. On meta, attention and experts do not run.
- ``OpOverload``: the type of the operations that a ``TorchDispatchMode`` sees.
- ``TorchDispatchMode``: sees every operation on tensors. torch's notes on extending PyTorch describe it.
- ``is_traceable_wrapper_subclass``: finds tensors that consist of other tensors, such as DTensor.
- ``skip``: torch.compile breaks its graph at this function, runs it uncompiled, and compiles the functions that it
  calls. ``torch.compiler.disable`` would leave those uncompiled too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo import compiled_autograd
from torch._dynamo.decorators import skip as skip
from torch._guards import TracingContext
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import AllgatherOptions as AllgatherOptions  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import ReduceScatterOptions as ReduceScatterOptions
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

_T = TypeVar("_T")

# A context in which operations treat a tensor subclass as a plain tensor. torch has no public name for it
# (pytorch/pytorch#88218 gave it this one).
AsTensors = torch._C.DisableTorchFunctionSubclass

# ``param.data`` and ``param.grad`` without __torch_function__, which a subclass's attribute would call. Every module
# and optimizer reads them in each step.
_TensorBase: Any = torch._C.TensorBase
get_data: Callable[[torch.Tensor], torch.Tensor] = _TensorBase.data.__get__
set_data: Callable[[torch.Tensor, torch.Tensor], None] = _TensorBase.data.__set__
get_grad: Callable[[torch.Tensor], torch.Tensor | None] = _TensorBase.grad.__get__
set_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = _TensorBase.grad.__set__

# Makes a tensor of a subclass in the memory of another tensor, as torch's own nn.Parameter does. Subclasses may have
# constructors that want more.
make_subclass: Any = torch.Tensor._make_subclass

# Changes the timeout of a process group that exists. Public since torch 2.14; torch 2.15 warns of the private name.
set_timeout: Callable[..., None] = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout

# The address of a CUDA device's current stream; None without CUDA. torch.cuda.current_stream makes an object for each
# call, ten times as slow.
current_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# The number of the backward that runs on this thread, or -1. torch.autograd has no public function for it; torch's own
# torch/autograd/graph.py uses this one.
graph_task_id = torch._C._current_graph_task_id

# Calls a function at the end of the backward that runs. torch's own DistributedDataParallel and FSDP2 use it.
queue_callback: Callable[[Callable[[], None]], None] = torch.autograd.Variable._execution_engine.queue_callback

# Sets the version counters of tensors, by which autograd notices that a saved tensor has changed. torch has a context
# manager around it, torch.autograd._unsafe_preserve_version_counter, which can only restore versions.
set_versions: Any = torch._C._autograd._unsafe_set_version_counter

# Exchanges the tensors inside two Parameter objects; the user's object stays. torch.utils.swap_tensors refuses tensors
# with weak references (pytorch/pytorch#186796), which RNN modules keep to their weights.
swap_tensor = torch._C._swap_tensor_impl

# Whether a backward that begins now runs in compiled autograd. torch has no public function for it.
is_autograd_compiled: Callable[[], bool] = functools.partial(
    getattr, compiled_autograd, "compiled_autograd_enabled", False
)

# Whether a torch profiler runs. torch's own FSDP2 asks nobody and pays for its names always.
is_profiled: Callable[[], bool] = functools.partial(getattr, torch.autograd.profiler, "_is_profiler_enabled")

# The DistributedDataParallel module whose forward runs; None if none does. torch.compile asks for it like this.
active_ddp: Callable[[], object] = functools.partial(
    getattr, torch.nn.parallel.DistributedDataParallel, "_active_ddp_module"
)

# The saved-tensor hooks that are active now. torch.autograd.graph can set hooks, but not read them.
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class ThreadStack(NamedTuple):
    """A stack that torch keeps for each thread. Its public context managers enter and leave in order only."""

    pop: Callable[[], Any]  # the innermost entry; None: there is none
    push: Callable[[Any], None]

    def take(self) -> list[Any]:
        """All entries, innermost last, which the thread has no more."""
        return list(iter(self.pop, None))[::-1]


def _pop_hooks() -> Any:
    if (top := saved_tensors_hooks(False)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
    return top


def _pop_function_mode() -> Any:
    return torch._C._pop_torch_function_stack() if torch._C._len_torch_function_stack() else None


def _pop_dispatch_mode() -> Any:
    return torch.utils._python_dispatch._pop_mode() if torch._C._len_torch_dispatch_stack() else None


# Saved-tensor hooks, function modes and dispatch modes.
THREAD_STACKS = (
    ThreadStack(_pop_hooks, lambda hooks: torch._C._autograd._push_saved_tensors_default_hooks(*hooks)),
    ThreadStack(_pop_function_mode, torch._C._push_on_torch_function_stack),
    ThreadStack(_pop_dispatch_mode, torch.utils._python_dispatch._push_mode),
)

# Where torch.autograd.grad and backward() find the function that runs them, and this function. torch tells nobody of a
# backward that begins.
RUN_AUTOGRAD: tuple[dict[str, Any], str] = vars(torch.autograd), "_engine_run_backward"
run_autograd: Callable[..., Any] = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

# Where to replace the hooks around the steps of all optimizers by none: see `streamshard.planning.structure.replacing`.
# torch can only add hooks, and remove each by its handle.
NO_STEP_HOOKS: Any = [
    (vars(importlib.import_module("torch.optim.optimizer")), f"_global_optimizer_{when}_hooks", {})
    for when in ("pre", "post")
]

# The mesh of which a mesh is a slice. torch has no public function for it.
root_mesh: Callable[[DeviceMesh], DeviceMesh] = DeviceMesh._get_root_mesh

# Waits for the result of a functional collective, such as those of DTensors. The public functions return such results.
wait_tensor: OpOverload = torch.ops._c10d_functional.wait_tensor.default

# The sequence number of the next graph node that this thread makes. Nodes have no public number.
sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


# How often torch's graphs refer to a tensor itself; and its Python object, once.
tensor_uses: Callable[[torch.Tensor], int] = _TensorBase._use_count


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors share the memory of `tensor`, in Python and in graphs."""
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses - 1  # the storage object made here


@skip
def untraced(function: Callable[..., _T], *args: Any) -> _T:
    """Call `function`, and the functions that it calls, uncompiled.

    Outside of torch.compile the call is direct: ``torch._dynamo.disable`` costs host time.
    """
    if get_eval_frame_callback() in (None, False):
        return function(*args)
    result: _T = _uncompiled(function, *args)
    return result


def _call(function: Callable[..., _T], *args: Any) -> _T:
    return function(*args)


_uncompiled = torch._dynamo.disable(_call)  # one for all functions: making it takes longer than most of the calls


def is_traced() -> bool:
    """Whether this thread traces for torch.compile or torch.export.

    ``torch.compiler.is_compiling`` is true only in code that is traced, not in code that the tracer itself runs.
    """
    return TracingContext.try_get() is not None


# How many torch.func transforms are around the caller; None without any. torch.func has no public function for it.
transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level


def innermost_transform() -> str | None:
    """The innermost torch.func transform around the caller, such as "grad", except vmap; None if there is none.

    torch.func does not say which transforms are active.
    """
    kinds = [interpreter.key() for interpreter in torch._C._functorch.get_interpreter_stack() or ()]
    return next((kind.name.lower() for kind in kinds if kind != torch._C._functorch.TransformType.Vmap), None)


def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The backend of `group` for `device`. ``dist.get_backend`` gives a name, which may be "undefined" or several.

    Raises:
        RuntimeError: the group has no backend for `device`.
    """
    return group._get_backend(device)


def count_collectives() -> int:
    """How many collectives this rank has called on the default process group; 0 if no group counts them.

    torch's own flight recorder counts only NCCL's.
    """
    with contextlib.suppress(RuntimeError, AttributeError):
        world: Any = dist.group.WORLD
        return int(world._get_sequence_number_for_group())
    return 0


@contextlib.contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """Inside, this process is rank 0 of `count` ranks. The others do not exist: collectives return at once.

    torch has no public name for such a process group; its own tests use this one. There must be no other.
    """
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    store = dist.HashStore()  # type: ignore[attr-defined]  # not re-exported in stubs
    dist.init_process_group("fake", store=store, rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


class Kept(NamedTuple):
    """A saved tensor, held as autograd does without hooks. Detached, because an output would hold its own graph."""

    tensor: torch.Tensor
    version: int


def keep(tensor: torch.Tensor) -> Kept:
    """Hold a saved tensor."""
    return Kept(tensor.detach(), tensor._version)


def kept(held: Kept) -> torch.Tensor:
    """The tensor that `keep` holds.

    Raises:
        RuntimeError: it was changed in place since.
    """
    tensor, version = held
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"{list(tensor.shape)} of {tensor.dtype} is at version {tensor._version}, expected version {version}"
        )
    return tensor


def saved_as_it_is(saved: Any) -> torch.Tensor | None:
    """The tensor in `saved`, a raw saved tensor of a graph node; None if hooks of other code have packed it.

    To unpack it there would recompute a checkpoint, which lets nobody unpack a tensor twice. torch 2.11 does not say
    who has packed it: None.
    """
    data = getattr(saved, "data", None)
    if isinstance(data, tuple) and data and isinstance(data[0], Kept):  # inside `streamshard.core.edge`
        data = data[0]
    if isinstance(data, Kept):
        return data.tensor
    is_plain = isinstance(data, torch.Tensor) and getattr(saved, "unpack_hook", data) is None
    return data if is_plain else None
