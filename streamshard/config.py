"""Settings: frozen, keyword-only, validated when built."""

from __future__ import annotations

import difflib
import enum
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from streamshard.errors import ConfigError

SlotCount = int | Literal["all"]
GradSlots = Literal["all"] | None
Offload = Literal["state"] | None
AnyPath = str | os.PathLike[str]

_PARAM_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ReductionMode(enum.Enum):
    """The dtype in which ranks send gradients, and the dtype of their sum.

    `Precision.reduction_mode` chooses the mode. Each transport implements every mode in `Transport.start_reduce`, with
    the memory of `Transport.scratch_numel`. gloo and shared memory always sum in fp32, in rank order.
    """

    FP32 = enum.auto()
    """fp32 is sent and summed. 16-bit gradients are converted part by part, on the way out of their slot. The sum goes
    straight into main grads, unless it is added to earlier gradients."""
    IN_ORDER = enum.auto()
    """Chunks are exchanged in the dtype of their slot. Each rank adds the chunks that it receives to its main grads, in
    fp32 and in rank order. Megatron-LM's ``reduce_scatter_with_fp32_accumulation`` exchanges chunks too."""
    SUM_16 = enum.auto()
    """The backend sends and sums 16-bit numbers; the result is converted to fp32."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The dtypes of all-gathers, compute and reductions. Main weights and main grads are always fp32.

    Parameters that are frozen when the model is sharded keep their own dtype if layers compute in half precision.

    `grad_dtype`, `reduce_dtype` and `sums_in_rank_order` decide the `ReductionMode` (shown for bf16):

    ================  ================  ======================  ======================
    grad_dtype        reduce_dtype      sums_in_rank_order      reduction
    ================  ================  ======================  ======================
    fp32              fp32              False                   `FP32`
    fp32 or bf16      fp32              True                    `IN_ORDER`
    bf16              fp32              False                   `IN_ORDER`
    bf16              bf16              False                   `SUM_16`
    ================  ================  ======================  ======================

    On GPUs:

    - `IN_ORDER` sends half as many bytes as `FP32` within a machine. Between M machines of G GPUs each it sends
      G (1 - 1/M) / 2 times as many bytes: more on three or more machines of four GPUs, or on two machines of eight.
      Gradients that are computed in fp32 take twice as many bytes as in bf16.
    - `SUM_16` adds up in 16 bits. A bf16 sum stops growing after 256 equal gradients, an fp16 sum after 2048, so
      `StreamShard` refuses more ranks.

    On CPUs every rank sends to every other rank in all three modes, and sums are in fp32.

    Args:
        param_dtype: dtype of compute. bf16, fp16 or fp32; None: each parameter's own, and inputs are not cast.
        wire_dtype: dtype of all-gathers, no wider than `param_dtype`; None means `param_dtype`. Weights are rounded to
            it. bf16 with fp32 compute sends half as many bytes, and needs a buffer beside each weight slot.
        reduce_dtype: dtype of the sum of gradients over ranks. fp32, or `param_dtype`.
        grad_dtype: dtype of the gradients that are sent, and with ``grad_slots="all"`` of the sum over backwards inside
            ``no_sync()``; None means `reduce_dtype`.
        sums_in_rank_order: add gradients over ranks in rank order, beginning at main grads, so that sums have the same
            bits on any number of ranks. Within a shard group CPU ranks always do. On a 2-D mesh it cuts state over
            replicas, as ``shard_over_replicas`` does. Parameters that compute in fp32 are included.
        output_dtype: dtype of the model's floating-point outputs, so that a loss outside is in fp32; None: outputs are
            not cast. float64, ``cache`` and ``past_key_values`` are not cast either. If an output has a ``loss``
            (transformers, with labels), only the loss and other scalars are cast: no second copy of the logits is made.
            A part of the model that is called by itself returns its own dtype.
        cast_inputs: cast floating-point inputs of the model and of each unit to `param_dtype`.
        fp32_modules: modules and parameters that stay in fp32: module classes, or names that contain these whole words
            (``"router"``, ``"model.norm"``). Their all-gathers, compute and reductions are in fp32. Their
            floating-point inputs are cast to fp32. A unit returns fp32; any other module returns the dtype of its
            inputs. You need not list modules that a transformers class keeps in fp32 (``_keep_in_fp32_modules_strict``;
            in fp16 ``_keep_in_fp32_modules`` too), nor norms whose running statistics are in fp32.

    Raises:
        ConfigError: a dtype is not one of those above, `fp32_modules` is not a list of classes and names, or
            `sums_in_rank_order` is given together with sums in 16 bits.
    """

    param_dtype: torch.dtype | None = torch.bfloat16
    wire_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype = torch.float32
    grad_dtype: torch.dtype | None = None
    sums_in_rank_order: bool = False
    output_dtype: torch.dtype | None = torch.float32
    cast_inputs: bool = True
    fp32_modules: Sequence[str | type[nn.Module]] = ()

    def __post_init__(self) -> None:
        _want("param_dtype", self.param_dtype, (*_PARAM_DTYPES, None))
        own = self.param_dtype
        narrower = [dtype for dtype in _PARAM_DTYPES if own is not None and dtype.itemsize < own.itemsize]
        _want("wire_dtype", self.wire_dtype, (None, own, *narrower))
        _want("reduce_dtype", self.reduce_dtype, (torch.float32, own or torch.float32))
        _want("grad_dtype", self.grad_dtype, (None, self.reduce_dtype, self.param_dtype))
        if self.sums_in_rank_order and self.reduce_dtype is not torch.float32:
            what = f"sums_in_rank_order=True, reduce_dtype={self.reduce_dtype}"
            raise ConfigError(f"{what}: sums in rank order are in fp32: leave reduce_dtype out")
        output = self.output_dtype
        if output is not None and not (isinstance(output, torch.dtype) and output.is_floating_point):
            raise ConfigError(f"output_dtype={output!r}: wanted a floating-point torch.dtype or None")
        # A string would be a sequence of names of one letter.
        entries = self.fp32_modules
        if not isinstance(entries, list | tuple) or not all(map(_is_name_or_class, entries)):
            raise ConfigError(f"fp32_modules={entries!r}: wanted a list or tuple of names and of module classes")

    @property
    def sent_grad_dtype(self) -> torch.dtype:
        """The dtype of gradients that are sent: `grad_dtype`, or `reduce_dtype` if that is None."""
        return self.grad_dtype if self.grad_dtype is not None else self.reduce_dtype

    @property
    def reduction_mode(self) -> ReductionMode:
        """The `ReductionMode` of parameters that compute in half precision."""
        if self.reduce_dtype is not torch.float32:
            return ReductionMode.SUM_16
        return self.fp32_reduction_mode if self.sent_grad_dtype is torch.float32 else ReductionMode.IN_ORDER

    @property
    def fp32_reduction_mode(self) -> ReductionMode:
        """The `ReductionMode` of parameters that compute in fp32."""
        return ReductionMode.IN_ORDER if self.sums_in_rank_order else ReductionMode.FP32


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def parse_dtype(name: str, dtype: object, otherwise: str) -> torch.dtype:
    """Read a floating-point dtype from a dtype, or from its name: "bf16", "bfloat16" or "torch.bfloat16".

    Args:
        name: the argument's name, for messages.
        dtype: the argument's value.
        otherwise: what else the argument may be, for messages.

    Raises:
        ConfigError: `dtype` is not a floating-point dtype.
    """
    word = str(dtype).removeprefix("torch.")
    found = getattr(torch, _SHORT.get(word, word), None)
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        hint = did_you_mean(dtype, (*_SHORT, *_SHORT.values()))
        wanted = 'a floating-point torch.dtype, its name such as "bf16"'
        raise ConfigError(f"{name}={dtype!r}: wanted {wanted}, or {otherwise}{hint}")
    return found


def parse_precision(precision: object) -> Precision:
    """Make a `Precision` from a `Precision`, from its ``param_dtype`` or the name of it, or from None (bf16).

    Raises:
        ConfigError: `precision` is something else.
    """
    if isinstance(precision, Precision):
        return precision
    dtype = "bf16" if precision is None else precision
    return Precision(param_dtype=parse_dtype("precision", dtype, "a streamshard.Precision"))


SHARED_MEMORY = "STREAMSHARD_SHARED_MEMORY"  # "0": ranks of one machine do not read each other's memory


def _is_name_or_class(entry: object) -> bool:
    return bool(entry) if isinstance(entry, str) else isinstance(entry, type) and issubclass(entry, nn.Module)


def _want(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        choices = ", ".join(str(choice) for choice in dict.fromkeys(allowed))
        hint = did_you_mean(value, [str(choice) for choice in allowed])
        raise ConfigError(f"{name}={value!r}: wanted one of {choices}{hint}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The keyword arguments of `streamshard.StreamShard`, except units, resident and mesh. See there.

    Raises:
        ConfigError: a value is not allowed, or two values contradict each other.
    """

    precision: Precision = Precision()
    weight_slots: SlotCount | None = None
    grad_slots: GradSlots = None
    min_unit_size: int | str = 0
    align_pieces_to: int = 1
    offload: Offload = None
    device_budget: int | str = 0
    keep_main_grads: bool = False
    shard_over_replicas: bool = False

    def __post_init__(self) -> None:
        count = self.weight_slots
        # Two: one layer computes while the next one's weights arrive.
        if count is not None and count != "all" and (not _is_int(count) or count < 2):
            raise ConfigError(f"weight_slots={count!r}: wanted an integer of at least 2, 'all', or None")
        if self.grad_slots not in (None, "all"):
            raise ConfigError(
                f"grad_slots={self.grad_slots!r}: wanted 'all', or None: gradients take the slots of their weights"
            )
        if not _is_int(self.align_pieces_to) or self.align_pieces_to < 1:
            raise ConfigError(f"align_pieces_to={self.align_pieces_to!r}: wanted a positive number of elements")
        parse_bytes("min_unit_size", self.min_unit_size, at_least=0)
        _want("offload", self.offload, (None, "state"))
        if parse_bytes("device_budget", self.device_budget, at_least=0) and not self.offload:
            raise ConfigError(
                f'device_budget={self.device_budget!r}: without offload="state" all state is on the device. Leave '
                "device_budget away"
            )
        if self.offload and "all" in (self.weight_slots, self.grad_slots):
            what = 'offload="state" streams layers from host memory through a few slots'
            raise ConfigError(f'{what}, and "all" slots hold the model: leave weight_slots and grad_slots away')

    @property
    def cuts_over_replicas(self) -> bool:
        """State is cut over replicas, if there are any: sums in rank order are over all ranks at once."""
        return self.shard_over_replicas or self.precision.sums_in_rank_order

    def slots_on(self, world_size: int) -> tuple[SlotCount, GradSlots]:
        """The numbers of weight slots and gradient slots on `world_size` ranks.

        By default 2, and gradients take weight slots, but over sockets two slots of their own. On one rank without
        ``offload`` "all", of both.
        """
        is_alone = world_size == 1 and self.offload is None  # its all-gathers would only copy
        weights = self.weight_slots or ("all" if is_alone else 2)
        return weights, self.grad_slots or ("all" if is_alone and weights == "all" else None)


_ELSEWHERE = {  # words of other systems: ours
    "auto_wrap_policy": "units",
    "cpu": "state",
    "cpu_offload": "offload",
    "device_mesh": "mesh",
    "mixed_precision": "precision",
    "mp_policy": "precision",
    "offload_policy": "offload",
    "process_group": "mesh",
    "reshard_after_forward": "weight_slots",
    "sharding_strategy": "weight_slots",
}


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """End of a message: the word of `known` that means or resembles `given`; "" if there is none."""
    if not isinstance(given, str):
        return ""
    known = list(known)
    similar = [_ELSEWHERE.get(given), *difflib.get_close_matches(given, known, 1)]
    return next((f". Did you mean {word!r}?" for word in similar if word in known), "")


def refuse_unknown(names: Iterable[str], known: Sequence[str], what: str) -> None:
    """Check that `names` are among `known`.

    Args:
        names, known: names of keyword arguments.
        what: the kind of the names, such as "argument of StreamShard".

    Raises:
        ConfigError: with the unknown name, the most similar known name, and all known names.
    """
    for name in names:
        if name not in known:
            raise ConfigError(f"{name} is no {what}: wanted one of {', '.join(known)}{did_you_mean(name, known)}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_BYTES = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(name: str, size: object, *, at_least: int = 1) -> int:
    """Read a number of bytes from an integer, or from text such as ``"5GB"``, ``"5G"`` (the same) or ``"70GiB"``.

    Args:
        name: the argument's name, for messages.
        size: the argument's value.
        at_least: the smallest number allowed, 1 or 0.

    Raises:
        ConfigError: `size` is neither a number nor such text, or is too small.
    """
    wanted = f'wanted {"a positive number of" if at_least else "0 or more"} bytes, or text such as "5GB" or "70GiB"'
    count: float = -1 if isinstance(size, bool) or not isinstance(size, int) else size
    if isinstance(size, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT](?:I?B)?)\s*", size.upper())):
        count = float(match[1]) * _BYTES[match[2].removesuffix("B") + "B"]
    if int(count) < at_least:
        raise ConfigError(f"{name}={size!r}: {wanted}")
    return int(count)


def is_utf8(text: str) -> bool:
    """Whether `text` can be written as UTF-8. In file names Python has lone surrogates in the place of other bytes."""
    return text == text.encode(errors="replace").decode()


# Not a drive, which has one letter. Colons too: fsspec chains URLs, as in `simplecache::s3://bucket/run`.
_URL = re.compile(r"(?!(?:file|local)://)[A-Za-z][A-Za-z0-9+.:-]+:/(/?).*")


def parse_url(name: str, path: object) -> str | None:
    """The URL that `path` is, without needless slashes; None if it is a path of this machine, or no text.

    Raises:
        ConfigError: `path` is a pathlib.Path made of a URL, which has lost a slash, or fsspec would read another path.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(text, str) or (match := _URL.fullmatch(text)) is None:
        return None
    if not match[1] and isinstance(path, os.PathLike):
        raise ConfigError(f"{name}={path!r}: pathlib takes one slash of a URL away. Give it as text")
    if not match[1]:
        return None
    if set("*?[#") & set(text):  # packages delete what a pattern matches, and gcsfs takes "#1" for a version
        raise ConfigError(f"{name}={path!r}: fsspec reads *, ?, [ and # in URLs as patterns or versions: rename it")
    return re.sub("(?<=[^:/])/+(?=/|$)", "", text)  # keeps those of `memory://`


def parse_path(name: str, path: object, call: str = "") -> Path:
    """Make a path from text (``file://`` may come first) or an ``os.PathLike`` object.

    Args:
        name: the argument's name, for messages.
        path: the argument's value.
        call: the right call, for the message to a caller who passes a model.

    Raises:
        ConfigError: `path` is neither text nor an ``os.PathLike``, or it is a path of bytes, is not in UTF-8, or is the
            URL of object storage.
    """
    text = os.fspath(path) if isinstance(path, os.PathLike) else path
    if isinstance(text, nn.Module):  # whose repr is long
        meant = f". Did you mean {call}?" if call else ""
        raise ConfigError(f"{name} is a {type(text).__name__}: wanted a path{meant}")
    if not isinstance(text, str):
        raise ConfigError(f"{name}={path!r}: wanted a path, as text or a pathlib.Path")
    if not is_utf8(text):
        raise ConfigError(f"{name}={path!r}: wanted a path in UTF-8, the safetensors library opens no other: rename it")
    if (url := parse_url(name, path)) is not None:
        raise ConfigError(f"{name}={url!r}: wanted a path of this machine. Checkpoints and exports may be at URLs")
    return Path(text.removeprefix("local://").removeprefix("file://"))
