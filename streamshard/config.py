"""Settings: frozen, keyword-only, validated when built."""

from __future__ import annotations

import enum
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from streamshard.errors import ConfigError

__all__ = [
    "MemoryBudget",
    "Precision",
    "ReductionMode",
    "Settings",
    "SlotCount",
    "__version__",
    "parse_bytes",
    "parse_path",
    "read_environment",
]

__version__ = "0.1.0"  # the packaging reads it here

SlotCount = int | Literal["all"]
MemoryBudget = int | float | str  # bytes, "70GiB", or a share of the free memory: 0.9

_PARAM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ReductionMode(enum.Enum):
    """How gradients become their mean over ranks: what is sent, and in what it is summed.

    `Precision.reduction_mode` says which; each transport has a branch for each in `Transport.start_reduce`, and says in
    `Transport.scratch_numel` what that needs. Through gloo and shared memory all are summed in fp32, in rank order.
    """

    FP32 = enum.auto()
    """Gradients are widened on their way into the grad slot. fp32 is sent and summed, straight into main grads where
    nothing is there to add to."""
    EXCHANGE_16 = enum.auto()
    """16-bit chunks are exchanged, and summed by whom they are for, in fp32 in rank order (Megatron-LM's
    ``reduce_scatter_with_fp32_accumulation``)."""
    SUM_16 = enum.auto()
    """16 bits are sent and summed by the backend; the result is widened."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Which dtype each stage of a unit's journey has. Main weights and main grads are fp32.

    What is frozen when the model is sharded stays in the dtype that it came in, if layers compute in half precision.

    How gradients are reduced follows from `grad_dtype` and `reduce_dtype`, see `ReductionMode` (shown for bf16):

    ================  ================  ======================
    grad_dtype        reduce_dtype      reduction
    ================  ================  ======================
    fp32              fp32              `FP32`
    bf16              fp32              `EXCHANGE_16`
    bf16              bf16              `SUM_16`
    ================  ================  ======================

    On GPUs those with 16 bits on the wire are not for any number of ranks (`StreamShard` refuses too many).
    `EXCHANGE_16` sends half of the bytes of `FP32` within a machine, but G (1 - 1/M) / 2 times as many between M
    machines of G GPUs each: more, from three machines of four or two of eight on. `SUM_16` adds up in 16 bits, where a
    sum of more than 256 gradients that are alike grows no more (2048 in fp16). On CPUs all three send to each other
    rank, and sum in fp32.

    Args:
        param_dtype: what layers compute with and all-gathers send. bf16, fp16 or fp32.
        reduce_dtype: what gradients are summed in over ranks. fp32, or `param_dtype`.
        grad_dtype: what grad slots hold and reductions send; None means `reduce_dtype`.
        output_dtype: floating-point outputs of the model are cast to it; None leaves them.
        buffer_dtype: floating-point buffers are cast to it once, at construction; None leaves them.
        cast_inputs: cast floating-point inputs of the model and of each unit to `param_dtype`.
        fp32_modules: what computes in fp32 all the same: module classes, and names, which are whole words of modules'
            or parameters' (``"router"``, ``"model.norm"``). They are gathered in fp32, and their gradients reduced in
            fp32. Such modules are given fp32; units give it on, others give what they were given. What a transformers
            model's class keeps in fp32 (``_keep_in_fp32_modules_strict``; in fp16 ``_keep_in_fp32_modules`` too), and
            norms with running statistics in fp32, need not be listed.

    Raises:
        ConfigError: a dtype is not one of those above, or `fp32_modules` is none of what is said there.
    """

    param_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_inputs: bool = True
    fp32_modules: Sequence[str | type[nn.Module]] = ()

    def __post_init__(self) -> None:
        _want("param_dtype", self.param_dtype, _PARAM_DTYPES)
        _want("reduce_dtype", self.reduce_dtype, (torch.float32, self.param_dtype))
        _want("grad_dtype", self.grad_dtype, (None, self.reduce_dtype, self.param_dtype))
        for name in ("output_dtype", "buffer_dtype"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise ConfigError(f"{name}={value!r}: wanted a floating-point torch.dtype or None")

        entries = self.fp32_modules
        if not isinstance(entries, list | tuple) or not all(map(_is_name_or_class, entries)):
            raise ConfigError(f"fp32_modules={entries!r}: wanted a list or tuple of names and of module classes")

    @property
    def slot_grad_dtype(self) -> torch.dtype:
        """The dtype of grad slots: `grad_dtype`, or `reduce_dtype` where that is None."""
        return self.grad_dtype if self.grad_dtype is not None else self.reduce_dtype

    @property
    def reduction_mode(self) -> ReductionMode:
        """How gradients are reduced."""
        if self.slot_grad_dtype is torch.float32:
            return ReductionMode.FP32
        return ReductionMode.EXCHANGE_16 if self.reduce_dtype is torch.float32 else ReductionMode.SUM_16


def _is_name_or_class(entry: object) -> bool:
    return bool(entry) if isinstance(entry, str) else isinstance(entry, type) and issubclass(entry, nn.Module)


def _want(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(str(choice) for choice in dict.fromkeys(allowed))
        raise ConfigError(f"{name}={value!r}: wanted one of {choices}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `streamshard.StreamShard` can be told, beside the model and who trains it; see there for what each means.

    Raises:
        ConfigError: one is none of its values, or two of them contradict each other.
    """

    precision: Precision = Precision()
    weight_slots: SlotCount = 2
    grad_slots: SlotCount = 2
    memory_budget: MemoryBudget | None = None
    min_unit_size: int | str = 0
    pad_units_to: int = 1
    align_pieces_to: int = 1
    broadcast_weights: bool = True
    check_grads: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.precision, Precision):
            raise ConfigError(
                f"precision={self.precision!r}: wanted a streamshard.Precision, such as "
                "Precision(param_dtype=torch.float32)"
            )
        for name in ("weight_slots", "grad_slots"):
            count = getattr(self, name)
            if count != "all" and (not _is_int(count) or count < 2):
                raise ConfigError(f"{name}={count!r}: wanted an integer of at least 2, or 'all'")
            if self.memory_budget is not None and count != 2:
                raise ConfigError(
                    f"{name}={count!r} and memory_budget={self.memory_budget!r}: the budget chooses the slots"
                )
        for name in ("pad_units_to", "align_pieces_to"):
            if not _is_int(value := getattr(self, name)) or value < 1:
                raise ConfigError(f"{name}={value!r}: wanted a positive number of elements")
        for name in ("broadcast_weights", "check_grads"):
            if not isinstance(flag := getattr(self, name), bool):
                raise ConfigError(f"{name}={flag!r}: wanted True or False")
        parse_bytes("min_unit_size", self.min_unit_size, at_least=0)

    @property
    def min_unit_bytes(self) -> int:
        """`min_unit_size` in bytes."""
        return parse_bytes("min_unit_size", self.min_unit_size, at_least=0)

    def rows(self) -> list[str]:
        """A line for each, ``name=value``; the same on all ranks."""
        return [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self)]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_PREFIX = "STREAMSHARD_"
_NO_SETTINGS = ("SHARED_MEMORY", "TEST_", "BENCHMARK", "COMMIT")  # what else goes by that prefix
_LISTS = ("units", "resident")  # of names


def read_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """What the environment says of `Settings`, of `Precision` and of units, by name.

    ``STREAMSHARD_WEIGHT_SLOTS=4`` is ``weight_slots=4``, ``STREAMSHARD_GRAD_DTYPE=bfloat16`` is
    ``grad_dtype=torch.bfloat16``, ``STREAMSHARD_UNITS=Block,Head`` is ``units=["Block", "Head"]``, and so is
    ``STREAMSHARD_RESIDENT``. `Settings` checks the values.

    Raises:
        ConfigError: a variable has the prefix and is none of them.
    """
    known = {field.name for field in (*fields(Settings), *fields(Precision))} - {"precision"} | set(_LISTS)
    found: dict[str, Any] = {}
    for variable, text in environment.items():
        name = variable.removeprefix(_PREFIX).lower()
        if not variable.startswith(_PREFIX) or variable.startswith(tuple(_PREFIX + other for other in _NO_SETTINGS)):
            continue
        if name not in known:
            wanted = ", ".join(sorted(_PREFIX + each.upper() for each in known))
            raise ConfigError(f"the environment has {variable}={text!r}, which is no setting: wanted one of {wanted}")
        found[name] = [each.strip() for each in text.split(",")] if name in _LISTS else _read_value(text)
    return found


def _read_value(text: str) -> Any:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            pass
    dtype = getattr(torch, text.removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else text


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


def parse_path(name: str, path: object) -> Path:
    """A path from text or an object that stands for one.

    Args:
        name: of the argument, for messages.
        path: what was given for it.

    Raises:
        ConfigError: it is neither, or stands for bytes.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str):
        raise ConfigError(f"{name}={path!r}: wanted a path, as text or a pathlib.Path")
    return Path(text)
