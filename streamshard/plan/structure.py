"""What a model is made of: modules and parameters, whether they can be sharded, whether they still are the same.

Everything here looks at modules' own registers. ``named_modules()``, ``parameters()`` and their kin are methods that
models redefine, to leave out what is frozen or to rename.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from streamshard.errors import ShardingError

__all__ = [
    "Structure",
    "check_params",
    "is_meta",
    "join_names",
    "leave_inference_mode",
    "leave_meta_device",
    "modules_inside",
    "modules_of",
    "params_of",
    "refuse_marks",
    "refuse_transforms",
    "tie_on_meta",
]


def leave_inference_mode() -> AbstractContextManager[object]:
    """For what lives on: tensors made inside ``torch.inference_mode()`` could never be written outside of it."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def leave_meta_device() -> AbstractContextManager[object]:
    """For what computes, inside of ``with torch.device("meta")`` as well."""
    return torch.device("cpu") if torch.get_default_device().type == "meta" else contextlib.nullcontext()


def refuse_transforms() -> None:
    """Raise inside ``torch.func.grad`` and its kin; ``vmap`` maps over what a layer computes, which is fine."""
    if torch._C._functorch.maybe_current_level() is None:
        return
    for interpreter in torch._C._functorch.get_interpreter_stack() or ():
        kind = interpreter.key()
        if kind != torch._C._functorch.TransformType.Vmap:
            raise ShardingError(
                f"a StreamShard model inside torch.func ({kind.name.lower()}): a transform differentiates a function "
                "that writes nothing, and layers' weights are written as they are gathered. Use backward() or "
                "torch.autograd.grad of the inputs; for forward-mode derivatives torch.autograd.forward_ad"
            )


def modules_of(root: nn.Module, *, remove_duplicate: bool = True) -> list[tuple[str, nn.Module]]:
    """What ``root.named_modules()`` gives for a class that leaves it alone: models leave parts out of their lists."""
    found: list[tuple[str, nn.Module]] = []
    _walk("", root, set() if remove_duplicate else None, found)
    return found


def _walk(prefix: str, module: nn.Module, seen: set[int] | None, found: list[tuple[str, nn.Module]]) -> None:
    if seen is not None:
        if id(module) in seen:
            return
        seen.add(id(module))
    found.append((prefix, module))
    for key, child in module._modules.items():
        if child is not None:
            _walk(join_names(prefix, key), child, seen, found)


def params_of(root: nn.Module) -> dict[str, nn.Parameter]:
    """Each parameter once, by its first name: what ``root.named_parameters()`` gives, likewise."""
    params: dict[str, nn.Parameter] = {}
    seen: set[int] = set()
    for prefix, module in modules_of(root):
        for key, param in module._parameters.items():
            if param is not None and id(param) not in seen:
                seen.add(id(param))
                params[join_names(prefix, key)] = param
    return params


def modules_inside(module: nn.Module) -> Iterator[nn.Module]:
    """`module` and all modules in it, each once."""
    return (inner for _, inner in modules_of(module))


def join_names(prefix: str, key: str) -> str:
    """The name of what is called `key` in the module `prefix`, "" for the root."""
    return f"{prefix}.{key}" if prefix else key


def is_meta(tensor: torch.Tensor) -> bool:
    """Whether `tensor` has a shape and no values: it was made on the meta device."""
    return tensor.device.type == "meta"


def tie_on_meta(root: nn.Module) -> None:
    """Let parameters on the meta device that are one memory, in one shape, be one Parameter again.

    ``accelerate.init_empty_weights`` makes a new Parameter of each that is registered, also of one that is registered a
    second time, to tie it.
    """
    known: dict[tuple[object, ...], nn.Parameter] = {}
    for module in modules_inside(root):
        for key, param in module._parameters.items():
            if param is not None and not is_lazy(param) and param.layout is torch.strided and is_meta(param):
                place = (_memory_of(param), _start(param), param.shape, param.stride(), param.dtype)
                first = known.setdefault(place, param)
                if first is not param:
                    module._parameters[key] = first


def check_params(root: nn.Module) -> torch.device:
    """Raise if the parameters cannot be sharded; the device they all are on, but for those on meta.

    Raises:
        ShardingError: there are none; names one that is on another device, is not bf16, fp16 or fp32, was made in
            inference mode, has a gradient, or shares memory.
    """
    first: tuple[str, torch.device] | None = None
    params = params_of(root)
    for name, param in params.items():
        if is_lazy(param):
            raise ShardingError(
                f"parameter {name!r} of a lazy module has no shape yet: run one forward of the model, with inputs of "
                "the shapes that it will train with, before StreamShard(model)"
            )
        if param.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            kind = "complex" if param.is_complex() else "quantized or integer" if not param.is_floating_point() else ""
            raise ShardingError(
                f"parameter {name!r} is {param.dtype}{f' ({kind})' if kind else ''}: main weights are fp32, so only "
                "fp32, bf16 and fp16 parameters can be sharded"
            )
        if param.layout is not torch.strided or type(param) is not nn.Parameter:
            raise ShardingError(
                f"parameter {name!r} is a {type(param).__name__} ({param.layout}), wanted a dense torch.nn.Parameter: "
                "shard the model as it was built, without fully_shard, tensor parallelism or quantization before"
            )
        if param.is_inference():
            raise ShardingError(
                f"parameter {name!r} was made inside torch.inference_mode(), and torch never lets it train: build or "
                "load the model outside of it (torch.no_grad() will do)"
            )
        if param.grad is not None:
            raise ShardingError(
                f"parameter {name!r} has a gradient from before StreamShard(model), of this rank's loss alone: step or "
                "model.zero_grad() first"
            )
        refuse_marks(name, param)
        if is_meta(param):
            continue
        if first is None:
            first = name, param.device
        elif param.device != first[1]:
            raise ShardingError(
                f"parameters are on several devices: {first[0]!r} on {first[1]}, {name!r} on {param.device}; move the "
                "model to one"
            )
    if not params:
        raise ShardingError(f"{type(root).__name__} has no parameters: there is nothing to shard")
    _check_memory(root)
    return torch.device("cpu") if first is None else first[1]


def refuse_marks(name: str, param: nn.Parameter) -> None:
    """Raise if another library has left an attribute on parameter `name` which says that it takes gradients itself."""
    if "_in_backward_optimizers" in param.__dict__:
        raise ShardingError(
            f"the optimizer that _apply_optimizer_in_backward gave parameter {name!r} would never step, its gradient "
            "is made by a reduction: step in param.register_post_accumulate_grad_hook, which is called with the "
            "sharded gradient"
        )
    if "grad_sample" in param.__dict__:
        raise ShardingError(
            f"opacus's GradSampleModule keeps each sample's whole gradient of parameter {name!r}, in its grad_sample; "
            "ranks would not average these. Train without opacus; or without StreamShard, and with opacus's own "
            "opacus.distributed.DifferentiallyPrivateDistributedDataParallel or opacus.utils.fsdp_utils.FSDP2Wrapper"
        )


def _check_memory(root: nn.Module) -> None:
    """Raise if a parameter shares elements with another, with a buffer or with itself: its pieces would not."""
    tensors: list[tuple[str, torch.Tensor]] = [*params_of(root).items()]
    for name, param in tensors:
        if param.numel() > _extent(param):
            raise ShardingError(
                f"parameter {name!r} is {tuple(param.shape)} over memory for {_extent(param)} elements (an expanded "
                "tensor): with memory for all of them it would train differently. Register what is expanded, and "
                "expand it in forward; or give it memory of its own (.clone())"
            )
    for prefix, module in modules_of(root):
        for key, buffer in module._buffers.items():
            if buffer is None or is_lazy(buffer):
                continue
            if buffer.layout is torch.strided:
                tensors.append((join_names(prefix, key), buffer))
    reach: tuple[str, torch.Tensor] | None = None  # of those that begin before, which ends last
    filled = (pair for pair in tensors if pair[1].numel())
    for name, tensor in sorted(filled, key=lambda pair: (_memory_of(pair[1]), _start(pair[1]))):
        if reach is not None and _memory_of(tensor) != _memory_of(reach[1]):
            reach = None
        if reach is not None and _start(tensor) < _end(reach[1]):
            _check_apart(reach, (name, tensor))
        if reach is None or _end(tensor) > _end(reach[1]):
            reach = name, tensor


def _check_apart(*pair: tuple[str, torch.Tensor]) -> None:
    """Raise if two tensors whose ranges of memory overlap share elements, and one is a parameter."""
    kinds = ["parameter" if isinstance(tensor, nn.Parameter) else "buffer" for _, tensor in pair]
    if "parameter" in kinds and _share_elements(pair[0][1], pair[1][1]):
        what = " and ".join(f"{kind} {name!r}" for kind, (name, _) in zip(kinds, pair, strict=True))
        raise ShardingError(
            f"{what} share memory, so that what is written to the one is in the other; sharded they would not. Tie "
            "parameters by registering one Parameter under both names (b.weight = a.weight), take views of a parameter "
            "in forward, or give each memory of its own (.clone())"
        )


def _extent(tensor: torch.Tensor) -> int:
    """From the first to the last element in memory, in elements."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _memory_of(tensor: torch.Tensor) -> int:
    """0 for what has addresses; on meta every storage is a memory of its own, told apart by its object."""
    return int(tensor.untyped_storage()._cdata) if is_meta(tensor) else 0


def _start(tensor: torch.Tensor) -> int:
    """The place of the first element in memory, in bytes."""
    return int(tensor.storage_offset()) * tensor.element_size() if is_meta(tensor) else tensor.data_ptr()


def _end(tensor: torch.Tensor) -> int:
    return _start(tensor) + _extent(tensor) * tensor.element_size()


def _share_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors whose ranges of memory overlap do more than interleave, as columns of one matrix do."""
    if a.is_contiguous() or b.is_contiguous():
        return True
    addresses = []
    for tensor in (a, b):
        elements = torch.tensor(_start(tensor))
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            elements = elements[..., None] + torch.arange(size) * (stride * tensor.element_size())
        addresses.append(elements.flatten())
    return bool(torch.isin(addresses[0], addresses[1]).any())


class Structure:
    """Which modules and parameters a model was made of when it was sharded, to notice what was put in their place.

    A parameter or layer that is assigned afterwards would compute with weights of this rank alone.

    Args:
        root: the model, unsharded parameters not yet replaced by views.
    """

    def __init__(self, root: nn.Module) -> None:
        self._known = set(params_of(root).values())
        self._params = [
            (module._parameters, tuple(module._parameters.values()), name) for name, module in modules_of(root)
        ]
        self._children = {name: (module._modules, tuple(module._modules.values())) for name, module in modules_of(root)}

    def check(self) -> None:
        """Raise if a parameter was added, removed or replaced, or a module with parameters of its own was.

        Raises:
            ShardingError: names the parameter or the module.
        """
        for entries, wanted, name in self._params:
            if len(entries) != len(wanted) or not all(map(operator.is_, entries.values(), wanted)):
                self._refuse_params(entries, wanted, name)
        for name, (modules, children) in self._children.items():
            if len(modules) != len(children) or not all(map(operator.is_, modules.values(), children)):
                self._refuse_modules(modules, name)

    def _refuse_params(
        self, entries: dict[str, nn.Parameter | None], wanted: tuple[nn.Parameter | None, ...], name: str
    ) -> None:
        changed = [key for key, param in entries.items() if not any(param is known for known in wanted)]
        what = ", ".join(repr(join_names(name, key)) for key in changed) or f"a parameter of {name or 'the model'!r}"
        raise ShardingError(
            f"{what} was {'replaced or added' if changed else 'removed'} after StreamShard(model): the new one would "
            "be trained by this rank alone. Assign to its data (param.data.copy_, load_state_dict, "
            "summon_full_params(writeback=True)), or change the model before it is sharded. torch.func.functional_call "
            "replaces parameters too"
        )

    def _refuse_modules(self, modules: dict[str, nn.Module | None], name: str) -> None:
        for key, child in modules.items():
            if child is not None and not self._known.issuperset(params_of(child).values()):
                raise ShardingError(
                    f"module {join_names(name, key)!r} was replaced or added after StreamShard(model), and has "
                    "parameters of its own: they would be trained by this rank alone. Change the model before it is "
                    "sharded"
                )
        self._children[name] = (modules, tuple(modules.values()))  # something without parameters, or taken away
