"""Which parts of a half-precision model compute in fp32 all the same. Looks at the model, changes nothing."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from streamshard.config import Precision
from streamshard.errors import ConfigError
from streamshard.plan.structure import modules_inside, modules_of, params_of

__all__ = ["InFp32", "find_fp32"]


class InFp32(NamedTuple):
    """What computes in fp32 in a model whose ``param_dtype`` is another.

    Attributes:
        params: its parameters.
        listed: the modules that the user has listed, without those inside others: they are given fp32, too.
    """

    params: frozenset[nn.Parameter]
    listed: tuple[nn.Module, ...]

    @property
    def modules(self) -> set[nn.Module]:
        """Those that were listed, and all inside them."""
        return {inner for module in self.listed for inner in modules_inside(module)}


def find_fp32(root: nn.Module, precision: Precision, kept: Collection[str]) -> InFp32:
    """What ``Precision.fp32_modules`` lists, what `kept` names, and norms that update fp32 statistics.

    torch has no batch norm of half-precision weights and fp32 statistics, which nobody wants in half precision: they
    would stand still. With weights of fp32 it takes inputs of either (FSDP's mixed precision leaves them out as well).

    Args:
        root: the model.
        precision: of it.
        kept: names of parameters that the model's own class keeps in fp32.

    Raises:
        ConfigError: the model has nothing of what an entry lists.
    """
    params = params_of(root)
    found = {params[name] for name in kept if name in params}
    listed: dict[nn.Module, None] = {}
    for entry in precision.fp32_modules:
        own = [module for name, module in modules_of(root) if name and _is_meant(entry, name, module)]
        direct = {param for name, param in params.items() if isinstance(entry, str) and _has_part(name, entry)}
        if not own and not direct:
            what = repr(entry) if isinstance(entry, str) else f"of class {entry.__name__}"
            raise ConfigError(f"fp32_modules: {type(root).__name__} has no module or parameter {what}")
        found |= direct
        listed.update(dict.fromkeys(own))
    if precision.param_dtype is torch.float32:
        return InFp32(frozenset(), ())
    inside = {inner for module in listed for inner in modules_inside(module) if inner is not module}
    for module in (*listed, *_norms(root, precision)):
        found.update(params_of(module).values())
    return InFp32(frozenset(found), tuple(module for module in listed if module not in inside))


def _is_meant(entry: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    return _has_part(name, entry) if isinstance(entry, str) else isinstance(module, entry)


def _has_part(name: str, part: str) -> bool:
    """Whether `part` is `name`, or whole words of it: "norm" of "layers.0.norm.weight", not of "layernorm"."""
    return re.search(rf"(^|\.){re.escape(part)}(\.|$)", name) is not None


def _norms(root: nn.Module, precision: Precision) -> Iterator[nn.Module]:
    for module in modules_inside(root):
        mean = module.running_mean if isinstance(module, _NormBase) else None
        if mean is not None and (precision.buffer_dtype or mean.dtype) is torch.float32:
            yield module
