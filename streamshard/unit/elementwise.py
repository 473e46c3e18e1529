"""The optimizers that are known to work element by element, so that they may step on pieces.

Known means the exact class, unpatched. A subclass may do anything, and so may another class of the same package.
`elementwise` declares further ones.
"""

from __future__ import annotations

from typing import TypeVar

from torch.optim import Optimizer

from streamshard.errors import ConfigError

__all__ = ["elementwise", "is_elementwise_class"]

# By module of the public name or of the definition: both are looked at.
_KNOWN: dict[str, tuple[str, ...]] = {
    "torch.optim": (
        *("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam"),
        *("RMSprop", "Adagrad", "Adadelta", "Rprop", "ASGD"),
    ),
    "schedulefree": ("SGDScheduleFree", "AdamWScheduleFree", "RAdamScheduleFree"),
    "lion_pytorch": ("Lion",),
    "apex": ("FusedAdam", "FusedSGD", "FusedAdagrad"),
    "deepspeed": ("FusedAdam", "DeepSpeedCPUAdam", "DeepSpeedCPUAdagrad", "DeepSpeedCPULion", "FusedLion"),
    "transformer_engine": ("FusedAdam", "FusedSGD"),
    "bitsandbytes": (
        *("SGD", "SGD32bit", "SGD8bit", "Adam", "Adam32bit", "Adam8bit", "AdamW", "AdamW32bit", "AdamW8bit"),
        *("PagedAdam", "PagedAdam32bit", "PagedAdam8bit", "PagedAdamW", "PagedAdamW32bit", "PagedAdamW8bit"),
        *("Lion", "Lion32bit", "Lion8bit", "PagedLion", "PagedLion32bit", "PagedLion8bit"),
        *("RMSprop", "RMSprop32bit", "RMSprop8bit", "Adagrad", "Adagrad32bit", "Adagrad8bit"),
    ),
    "torchao": ("Adam8bit", "Adam4bit", "AdamFp8", "AdamW8bit", "AdamW4bit", "AdamWFp8", "_AdamW"),
}

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
    """Whether `kind` is known, or declared, to work element by element."""
    if kind in _declared:
        return True
    names = _KNOWN.get(kind.__module__.partition(".")[0], ())
    if kind.__module__.startswith("torch."):
        names = _KNOWN["torch.optim"] if kind.__module__.startswith("torch.optim.") else ()
    return kind.__name__ in names
