"""The optimizers that are known to work element by element, so that they may step on pieces.

Known means the exact class, unpatched. A subclass may do anything, and so may another class of the same package.
`elementwise` declares further ones.
"""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import TypeVar

from torch.optim import Optimizer

from streamshard.errors import ConfigError

__all__ = ["BLOCK_NUMEL", "elementwise", "find_patch", "is_elementwise_class", "works_in_blocks"]


def _in(module: str, *names: str) -> set[str]:
    return {f"{module}.{name}" for name in names}


# By the full names of their definitions.
_KNOWN = {
    *(f"torch.optim.{name.lower()}.{name}" for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop")),
    *(f"torch.optim.{name.lower()}.{name}" for name in ("Adagrad", "Adadelta", "Rprop", "ASGD")),
    "schedulefree.sgd_schedulefree.SGDScheduleFree",
    "schedulefree.adamw_schedulefree.AdamWScheduleFree",
    "schedulefree.radam_schedulefree.RAdamScheduleFree",
    "lion_pytorch.lion_pytorch.Lion",
    "apex.optimizers.fused_adam.FusedAdam",
    "apex.optimizers.fused_sgd.FusedSGD",
    "apex.optimizers.fused_adagrad.FusedAdagrad",
    "deepspeed.ops.adam.fused_adam.FusedAdam",
    "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
    "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad",
    "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion",
    "deepspeed.ops.lion.fused_lion.FusedLion",
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
    "transformer_engine.pytorch.optimizers.fused_sgd.FusedSGD",
    *_in("bitsandbytes.optim.sgd", "SGD", "SGD32bit"),
    *_in("bitsandbytes.optim.adam", "Adam", "Adam32bit", "PagedAdam", "PagedAdam32bit"),
    *_in("bitsandbytes.optim.adamw", "AdamW", "AdamW32bit", "PagedAdamW", "PagedAdamW32bit"),
    *_in("bitsandbytes.optim.lion", "Lion", "Lion32bit", "PagedLion", "PagedLion32bit"),
    *_in("bitsandbytes.optim.rmsprop", "RMSprop", "RMSprop32bit"),
    *_in("bitsandbytes.optim.adagrad", "Adagrad", "Adagrad32bit"),
}
# Moments in blocks of as many elements at most have a scale each: known on pieces that are cut between blocks.
_IN_BLOCKS = {
    *_in("bitsandbytes.optim.sgd", "SGD8bit"),
    *_in("bitsandbytes.optim.adam", "Adam8bit", "PagedAdam8bit"),
    *_in("bitsandbytes.optim.adamw", "AdamW8bit", "PagedAdamW8bit"),
    *_in("bitsandbytes.optim.lion", "Lion8bit", "PagedLion8bit"),
    *_in("bitsandbytes.optim.rmsprop", "RMSprop8bit"),
    *_in("bitsandbytes.optim.adagrad", "Adagrad8bit"),
    *_in("torchao.optim.adam", "Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW"),
}
BLOCK_NUMEL = 4096  # the packages leave smaller tensors in fp32, and a multiple of all their blocks

_AROUND = ("step", "zero_grad", "state_dict", "load_state_dict", "add_param_group")

_Class = TypeVar("_Class", bound=type[Optimizer])
_declared: set[type] = set()


def elementwise(optimizer_class: _Class) -> _Class:
    """Declare that an optimizer works element by element, so that it may step on pieces of parameters.

    The update of each element may depend on that element's gradient, weight and state, and on numbers that are the same
    for all elements; not on a norm, a mean, a shape or a neighbour. Nothing checks this. Can be used as a decorator.

    Args:
        optimizer_class: exactly this class; subclasses have to be declared by themselves.

    Returns:
        The same class.

    Raises:
        ConfigError: it is no optimizer's class.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise ConfigError(f"elementwise({optimizer_class!r}): wanted a subclass of torch.optim.Optimizer")
    _declared.add(optimizer_class)
    return optimizer_class


def is_elementwise_class(kind: type) -> bool:
    """Whether `kind` is known, or declared, to work element by element, perhaps in blocks of `BLOCK_NUMEL`."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return kind in _declared or name in _KNOWN or name in _IN_BLOCKS


def works_in_blocks(kind: type) -> bool:
    """Whether pieces of parameters have to be cut between blocks of `BLOCK_NUMEL` for `kind`."""
    return kind not in _declared and f"{kind.__module__}.{kind.__qualname__}" in _IN_BLOCKS


def find_patch(optimizer: Optimizer) -> str | None:
    """The name of an attribute by which `optimizer` computes something else than its class does; None: it does not.

    What is around the computation may be replaced: schedulers and accelerate wrap ``step``.
    """
    kind = type(optimizer)
    package = kind.__module__.partition(".")[0]
    for name, value in (*vars(kind).items(), *vars(optimizer).items()):
        if isinstance(value, FunctionType | MethodType) and name not in _AROUND:
            module = str(value.__module__)
            if module.partition(".")[0] not in (package, "torch"):
                return name
    return None
