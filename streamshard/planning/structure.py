"""A model's modules and parameters: which of them can be sharded, and which compute in fp32.

The functions read ``_modules`` and ``_parameters``, because models redefine ``named_modules()``, ``parameters()`` and
the like to leave out frozen parts or to rename parameters.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from streamshard.config import Precision
from streamshard.errors import ConfigError, ShardingError
from streamshard.forms import form_of


def leave_inference_mode() -> AbstractContextManager[object]:
    """A context for ordinary new tensors: tensors of ``torch.inference_mode()`` cannot be written outside of it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def leave_meta_device() -> AbstractContextManager[object]:
    """A context that makes tensors with values, also inside ``with torch.device("meta")``."""
    return torch.device("cpu") if torch.get_default_device().type == "meta" else contextlib.nullcontext()


@contextlib.contextmanager
def replacing(*changes: tuple[MutableMapping[str, Any], str, Any]) -> Iterator[None]:
    """A context in which each mapping, such as an object's ``__dict__``, has another value at the key, or a new key."""
    before = [(mapping, key, {key: mapping[key]} if key in mapping else {}) for mapping, key, _ in changes]
    try:
        for mapping, key, value in changes:
            mapping[key] = value
        yield
    finally:
        for mapping, key, entry in before:
            mapping.update(entry)  # in its place: the order of parameters stays
            if not entry:
                mapping.pop(key, None)


def modules_of(root: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, nn.Module]]:
    """All modules with their names, in the order of ``nn.Module.named_modules``, which a model may redefine."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()
    waiting = [("", root)]  # a loop is faster: planning asks for the modules inside each list and layer
    while waiting:
        prefix, module = waiting.pop()
        if module in seen and remove_duplicate:
            continue
        seen.add(module)
        found.append((prefix, module))
        if children := module._modules:  # TorchScript's is no dict, and cannot be reversed
            inside = [(join_names(prefix, key), child) for key, child in children.items() if child is not None]
            waiting += reversed(inside)
    return found


def params_of(root: nn.Module) -> dict[str, nn.Parameter]:
    """Each parameter once, by its first name."""
    names: dict[nn.Parameter, str] = {}
    for prefix, module in modules_of(root):
        for key, param in module._parameters.items():
            if param is not None and param not in names:
                names[param] = join_names(prefix, key)
    return {name: param for param, name in names.items()}


def modules_inside(module: nn.Module) -> Iterator[nn.Module]:
    """`module` and all modules in it, each once."""
    return (inner for _, inner in modules_of(module))


def join_names(prefix: str, key: str) -> str:
    """The full name of `key` in the module called `prefix`. The root's name is ""."""
    return f"{prefix}.{key}" if prefix else key


def list_of(name: str) -> str:
    """``layers.*``, the list of the module called ``layers.3``. The name itself if the module is in no list."""
    return re.sub(r"\.\d+$", ".*", name)


def tie_on_meta(root: nn.Module) -> None:
    """Make parameters on the meta device one Parameter again if they have the same memory and shape.

    ``accelerate.init_empty_weights`` makes a new Parameter at each registration, which unties tied weights.
    """
    known: dict[tuple[object, ...], nn.Parameter] = {}
    for module in modules_inside(root):
        for key, param in module._parameters.items():
            # Lazy and sparse ones have no storage to compare.
            if param is not None and not is_lazy(param) and param.layout is torch.strided and param.is_meta:
                storage = param.untyped_storage()._cdata  # on meta all addresses are 0
                place = (storage, param.storage_offset(), param.shape, param.stride(), param.dtype)
                first = known.setdefault(place, param)
                if first is not param:
                    module._parameters[key] = first


# -- whether a model can be sharded -------------------------------------------------------------------------------


def check_params(root: nn.Module) -> torch.device:
    """Raise if the parameters cannot be sharded.

    Returns:
        The device of all parameters that have values.

    Raises:
        ShardingError: names the parameter, and says what is wrong with it.
    """
    params = params_of(root)
    if not params:
        raise ShardingError(f"{type(root).__name__} has no parameters: there is nothing to shard")
    for name, param in params.items():
        if (problem := _problem_with(param)) is not None:
            raise ShardingError(f"parameter {name!r} {problem}")
        refuse_marks(name, param)
    # Behind the checks of each one: lazy and sparse parameters have no address.
    _refuse_shared_memory(root, params)
    devices = {param.device: name for name, param in params.items() if not param.is_meta}
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ShardingError(f"parameters are on several devices: {places}; move the model to one")
    # All on meta count as on the CPU: then `training_device` takes this rank's accelerator.
    return next(iter(devices), torch.device("cpu"))


def _problem_with(param: nn.Parameter) -> str | None:
    if is_lazy(param):  # first: all others ask for its shape
        return "of a lazy module has no shape yet: run one forward of the model before StreamShard(model)"
    form = form_of(param)
    if (problem := form.problem_with(param)) is not None:
        return problem
    if param.layout is not torch.strided or not form.is_packed and not form.inner and type(param) is not nn.Parameter:
        return (
            f"is a {type(param).__name__} ({param.layout}), wanted a dense torch.nn.Parameter: shard the model as it "
            "was built, without fully_shard, quantization or enable_fsdp_float8_all_gather before"
        )
    if not form.is_packed and param.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        instead = "register the real and the imaginary part" if param.is_complex() else "register it as a buffer"
        if param.dtype is torch.float64:
            instead = 'StreamShard(model.float(), precision="fp32") trains it in fp32, and casts its inputs'
        return f"is {param.dtype}: wanted fp32, bf16 or fp16, since main weights are fp32: {instead}"
    if "_local_type" in vars(param):
        return (
            "has a type of spmd_types, which says how ranks cut it: StreamShard reads DTensors on one mesh axis "
            '(torchtitan: parallelism.spmd_backend="partial_dtensor")'
        )
    if param.is_inference():
        return "was made inside torch.inference_mode(), and cannot train: build or load the model outside of it"
    if param.grad is not None:
        return "has a gradient from before StreamShard(model), of this rank's loss alone: step or zero_grad() first"
    memory = form.memory(param)
    if memory.numel() > _extent(memory):
        return (
            f"is {tuple(param.shape)} over memory for {_extent(memory)} elements (an expanded tensor): register the "
            "small tensor, and expand it in forward; or give it memory of its own (.clone())"
        )
    return None


MARKS = frozenset(("_in_backward_optimizers", "grad_sample"))  # attributes that other libraries set on parameters


def refuse_marks(name: str, param: nn.Parameter) -> None:
    """Raise if an attribute of `param` shows that another library takes the gradient of parameter `name`.

    Raises:
        ShardingError: names the parameter and the library.
    """
    for mark in MARKS.intersection(param.__dict__):
        raise ShardingError(
            f"parameter {name!r} has {mark}: _apply_optimizer_in_backward or opacus takes its gradient before "
            "ranks average it. Leave that out; param.register_post_accumulate_grad_hook gets the sharded gradient"
        )


def _refuse_shared_memory(root: nn.Module, params: Mapping[str, nn.Parameter]) -> None:
    """Raise if a parameter shares memory with another parameter or a buffer: shards would not share it."""
    tensors = [(name, form_of(param).memory(param)) for name, param in params.items()]
    for prefix, module in modules_of(root):
        for key, buffer in module._buffers.items():
            if buffer is not None and not is_lazy(buffer) and buffer.layout is torch.strided:
                tensors.append((join_names(prefix, key), buffer))
    ends: dict[bool, tuple[int, str]] = {}  # by whether it is a parameter, the one so far whose memory ends last
    # By address: then only the one that ends last so far can reach into the next one.
    for name, tensor in sorted(tensors, key=lambda each: each[1].data_ptr()):
        if tensor.is_meta or not tensor.numel():  # neither has an address
            continue
        is_param = name in params
        for other_is_param, (end, other) in ends.items():
            if tensor.data_ptr() < end and (is_param or other_is_param):  # buffers stay whole, and may share
                raise ShardingError(
                    f"{other!r} and {name!r} share memory, which shards do not. Tie parameters by registering one "
                    "Parameter under both names (b.weight = a.weight), take views of a parameter in forward, or give "
                    "each memory of its own (.clone())"
                )
        end = tensor.data_ptr() + _extent(tensor) * tensor.element_size()
        ends[is_param] = max(ends.get(is_param, (0, "")), (end, name))


def _extent(tensor: torch.Tensor) -> int:
    """Elements of memory from the first to the last element."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


# -- modules that compute in fp32 ---------------------------------------------------------------------------------


class InFp32(NamedTuple):
    """The parts that compute in fp32 in a model with another ``param_dtype``.

    Attributes:
        params: the parameters that layers compute with in fp32.
        listed: the outermost modules that ``Precision.fp32_modules`` lists. Their inputs are cast to fp32.
    """

    params: frozenset[nn.Parameter]
    listed: tuple[nn.Module, ...]

    @property
    def modules(self) -> set[nn.Module]:
        """The listed modules, and all inside them."""
        return {inner for module in self.listed for inner in modules_inside(module)}


def find_fp32(root: nn.Module, precision: Precision, kept: Collection[str]) -> InFp32:
    """The parts in ``Precision.fp32_modules``, the parameters in `kept`, and norms that update fp32 statistics.

    torch has no batch norm with half-precision weights and fp32 statistics, and updates of half-precision statistics
    round to nothing. With fp32 weights batch norm takes inputs of either dtype. FSDP's mixed precision also leaves
    batch norm in fp32.

    Args:
        root: the model.
        precision: the model's.
        kept: names of parameters that the model's own class keeps in fp32.

    Raises:
        ConfigError: an entry matches nothing in the model.
    """
    params = params_of(root)
    found = {params[name] for name in kept if name in params}
    listed: dict[nn.Module, None] = {}
    for entry in precision.fp32_modules:
        own = [module for name, module in modules_of(root) if name and _matches(entry, name, module)]
        direct = {param for name, param in params.items() if isinstance(entry, str) and _has_part(name, entry)}
        if not own and not direct:
            what = repr(entry) if isinstance(entry, str) else f"of class {entry.__name__}"
            raise ConfigError(f"fp32_modules: {type(root).__name__} has no module or parameter {what}")
        found |= direct
        listed.update(dict.fromkeys(own))
    if precision.param_dtype is torch.float32:  # not before: entries that match nothing raise in any dtype
        return InFp32(frozenset(), ())
    # Of nested ones only the outermost casts its inputs: inside it everything is fp32 already.
    inside = {inner for module in listed for inner in modules_inside(module) if inner is not module}
    norms = [module for module in modules_inside(root) if isinstance(module, _NormBase)]
    for module in (*listed, *(norm for norm in norms if getattr(norm.running_mean, "dtype", None) is torch.float32)):
        found.update(params_of(module).values())
    return InFp32(frozenset(found), tuple(module for module in listed if module not in inside))


def _matches(entry: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    return _has_part(name, entry) if isinstance(entry, str) else isinstance(module, entry)


def _has_part(name: str, part: str) -> bool:
    """Whether whole words of `name` are `part`: "norm" is part of "layers.0.norm.weight", not of "layernorm"."""
    return re.search(rf"(^|\.){re.escape(part)}(\.|$)", name) is not None
