"""Settings: frozen, keyword-only, validated when built."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from streamshard.errors import ConfigError

__all__ = ["Precision", "parse_bytes"]

_PARAM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Which dtype each stage of a unit's journey has. Main weights and main grads are always fp32.

    Three reductions follow from `grad_dtype` and `reduce_dtype` (shown for bf16):

    ================  ================  ==========================================================================
    grad_dtype        reduce_dtype      reduction
    ================  ================  ==========================================================================
    fp32              fp32              gradients widened on their way into the grad slot, reduced in fp32
    bf16              fp32              16-bit wire, summed in fp32 in rank order (Megatron-LM's
                                        ``reduce_scatter_with_fp32_accumulation``)
    bf16              bf16              plain 16-bit reduce-scatter (gloo sums in fp32 all the same)
    ================  ================  ==========================================================================

    Args:
        param_dtype: what layers compute with and all-gathers send. bf16, fp16 or fp32.
        reduce_dtype: what gradients are summed in over ranks. fp32, or `param_dtype`.
        grad_dtype: what grad slots hold and reductions send; None means `reduce_dtype`.
        output_dtype: floating-point outputs of the model are cast to it; None leaves them.
        buffer_dtype: floating-point buffers are cast to it once, at construction; None leaves them.
        cast_inputs: cast floating-point inputs of the model and of each unit to `param_dtype`.

    Raises:
        ConfigError: a dtype is not one of those above.
    """

    param_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_inputs: bool = True

    def __post_init__(self) -> None:
        _want("param_dtype", self.param_dtype, _PARAM_DTYPES)
        _want("reduce_dtype", self.reduce_dtype, (torch.float32, self.param_dtype))
        _want("grad_dtype", self.grad_dtype, (None, self.reduce_dtype, self.param_dtype))
        for name in ("output_dtype", "buffer_dtype"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise ConfigError(f"{name}={value!r}: wanted a floating-point torch.dtype or None")

    @property
    def slot_grad_dtype(self) -> torch.dtype:
        """The dtype of grad slots: `grad_dtype`, or `reduce_dtype` where that is None."""
        return self.grad_dtype if self.grad_dtype is not None else self.reduce_dtype


def _want(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(str(choice) for choice in dict.fromkeys(allowed))
        raise ConfigError(f"{name}={value!r}: wanted one of {choices}")


_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(name: str, size: object, *, at_least: int = 1) -> int:
    """A number of bytes from a number, or text such as ``"5GB"`` or ``"70GiB"``.

    Args:
        name: of the argument, for messages.
        size: what was given for it.
        at_least: the smallest number allowed, 1 or 0.

    Raises:
        ConfigError: it is neither, or too small.
    """
    wanted = f'wanted {"a positive number of" if at_least else "0 or more"} bytes, or text such as "5GB" or "70GiB"'
    count: float | None = None
    if isinstance(size, int) and not isinstance(size, bool):
        count = size
    elif isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B)\s*", size.upper())
        if match:
            count = float(match[1]) * _BYTES[match[2]]
    if count is None or int(count) < at_least:
        raise ConfigError(f"{name}={size!r}: {wanted}")
    return int(count)
