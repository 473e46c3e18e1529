"""`RunLog`: loss, tokens per second, model FLOPs utilisation and memory of a run, for a tracker or a file.

A step adds to lists on the host. At the end of an interval one all-reduce of a few numbers per rank brings all ranks'
values together, and the host waits for the device once. The all-reduce is worth its microseconds: ranks have different
numbers of tokens where batches are packed or padded, a rank's loss is not that of the others, and the rank with the
least memory left is the one that fails.

Model FLOPs utilisation is that of PaLM (arXiv:2204.02311, appendix B), without attention, which depends on the lengths
of sequences: 6 FLOPs per token for each parameter that trains, 4 for each frozen one (it needs no gradient), none for
an embedding's lookup. Recomputation in backward is not counted.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamshard.comm.ranks import run_on_all_ranks
from streamshard.comm.streams import Streams
from streamshard.core.engine import Engine
from streamshard.core.module_state import engine_at_rest, not_a_layer
from streamshard.errors import ConfigError, want_positive
from streamshard.planning.structure import modules_inside

# Dense bf16 and fp16: half of what the vendor states with sparsity, on the pages a100, h100 and h200 of
# nvidia.com/en-us/data-center. In torch's names of the devices; the first that fits.
_FLOPS_PER_S = {
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
}
_BEGINNING = b'{"step": '  # of each line


class RunLog:
    """Writes where a run goes, every few steps: to trackers, or a JSON object per line to a file. Collective::

        log = RunLog(model, path="log.jsonl")
        for step in range(1, steps + 1):
            ...
            log.step(batch.numel(), loss)

    A line has ``step`` and, over the steps since the last one and over all ranks:

    - ``loss``: the mean.
    - ``step_s``: seconds of a step, of the slowest rank. ``tokens_per_s``, ``tokens_per_s_per_rank``.
    - ``mfu``: FLOPs of the model per second, as a share of `flops_per_s` of all ranks. See
      `streamshard.integrations.run_log` for what is counted. Left out where the device's rate is unknown.
    - ``peak_memory_bytes``: of the rank with the most, since its start: torch's ``max_memory_allocated`` on its device;
      on CPUs the resident memory of the process.

    Args:
        model: made by `StreamShard`.
        accelerator: accelerate's; the values go to its trackers, by ``accelerator.log(values, step=step)``.
        path: of a file, to which the first rank appends. A run that goes on from a checkpoint may write a step again.
        every: steps of an interval; None: only `write` ends one.
        step: number of the last step that was done before.
        flops_per_s: the peak of a rank's device in the dtype in which layers compute. None: known for H100, H200 and
            A100 in bf16 and fp16.
        flops_per_token: of the model, forward and backward. None: as above; unknown for a mixture of experts, and for
            models with an encoder and a decoder.
        clock: seconds.

    Raises:
        ConfigError: on all ranks: there is neither `accelerator` nor `path`, the file cannot be written or has other
            content, or a number is not positive.
        ShardingError: `model` was not sharded by StreamShard.
    """

    def __init__(
        self,
        model: nn.Module,
        accelerator: Any = None,
        *,
        path: str | os.PathLike[str] | None = None,
        every: int | None = 10,
        step: int = 0,
        flops_per_s: float | None = None,
        flops_per_token: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        engine = engine_at_rest(not_a_layer(model), "RunLog", accepts_empty=True)
        self._ranks, self._accelerator, self._every, self._clock = engine.ranks, accelerator, every, clock

        def opened() -> Path | None:
            if accelerator is None and path is None:
                raise ConfigError("RunLog has neither an accelerator nor a path: wanted one of them")
            want_positive({"every": every, "flops_per_s": flops_per_s, "flops_per_token": flops_per_token})
            return _open(Path(path).absolute()) if path is not None and engine.ranks.is_first else None

        self._path = run_on_all_ranks(engine.ranks, "start a RunLog", opened, ConfigError)
        self._flops_per_s = flops_per_s or _known_rate(engine)
        self._flops_per_token = flops_per_token or _flops_per_token(engine, model)
        self._number = step
        self._steps = self._tokens = 0
        self._losses: list[torch.Tensor] = []
        self._start = clock()

    def step(self, tokens: int, loss: torch.Tensor | None = None) -> dict[str, float] | None:
        """Count an optimizer step. The host does not wait for the device, except at the end of an interval.

        Args:
            tokens: of this rank, in all micro-batches.
            loss: of this rank, one number, which is kept without its graph; on all ranks or on none.

        Returns:
            On all ranks, at the end of an interval: what `write` returns. Otherwise None.

        Raises:
            ConfigError: `loss` is something else.
        """
        if loss is not None and (not isinstance(loss, torch.Tensor) or loss.numel() != 1):
            what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ConfigError(
                f"RunLog.step: loss is {what}: wanted a tensor with one element. Of model.accumulate's losses give "
                "sum(losses), and of a loss the tensor itself, not loss.item(), for which the host waits"
            )
        self._number += 1
        self._steps += 1
        self._tokens += tokens
        if loss is not None:
            self._losses.append(loss.detach())
        return self.write() if self._every is not None and self._number % self._every == 0 else None

    def write(self) -> dict[str, float]:
        """End the interval, on all ranks at the same step. Returns its values without ``step``; {} without steps."""
        if not self._steps:
            return {}
        values = self._measure()
        self._steps = self._tokens = 0
        self._losses = []
        if self._accelerator is not None:
            self._accelerator.log(values, step=self._number)
        if self._path is not None:
            with self._path.open("a") as file:  # writes the line in one call, so that a killed run leaves whole lines
                file.write(json.dumps({"step": self._number, **values}) + "\n")
        self._start = self._clock()  # behind trackers and the file: their time is no step's
        return values

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside out: of an evaluation, or a save."""
        if self._steps:
            self._wait()  # steps that the device has not done yet are no pause
        start = self._clock()
        try:
            yield
        finally:
            self._start += self._clock() - start

    def _wait(self) -> float:
        """Wait until the device has done the interval's steps. Returns this rank's mean loss; 0 without losses."""
        # Without losses a number on the device: to read it waits as well.
        losses = self._losses or [torch.zeros((), device=self._ranks.streams.device)]
        return torch.stack([loss.reshape(()) for loss in losses]).double().mean().item()  # they may have a dim of 1

    def _measure(self) -> dict[str, float]:
        """The interval's values. Collective: one all-reduce, which brings a row of each rank to all ranks."""
        ranks, loss = self._ranks, self._wait()
        own = (loss, self._tokens, self._clock() - self._start, _peak_memory_bytes(ranks.streams))
        rows = torch.zeros(ranks.total_size, len(own), dtype=torch.float64, device="cpu")  # fp64 counts bytes exactly
        rows[ranks.total_rank] = torch.tensor(own, dtype=torch.float64, device="cpu")
        ranks.all_reduce(rows, with_replicas=True)
        losses, tokens, seconds, memory = rows.t().tolist()
        values = {"loss": sum(losses) / len(losses)} if self._losses else {}
        values["step_s"] = max(seconds) / self._steps
        if any(tokens) and max(seconds) > 0:
            per_s = sum(tokens) / ranks.n_parts / max(seconds)  # tensor parallel ranks have the same tokens
            values |= {"tokens_per_s": per_s, "tokens_per_s_per_rank": per_s / ranks.total_size}
            if self._flops_per_s is not None and self._flops_per_token is not None:
                values["mfu"] = self._flops_per_token * per_s / ranks.total_size / self._flops_per_s
        return {**values, "peak_memory_bytes": int(max(memory))}


def _open(path: Path) -> Path:
    """Make the file `path` and its directory. If its machine has failed, leave out a last line that is not whole."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+b") as file:
            size = file.tell()
            file.seek(max(size - 4096, 0))  # a line is shorter
            rest = file.read().rpartition(b"\n")[2]
            if rest[: len(_BEGINNING)] != _BEGINNING[: len(rest)]:
                raise ConfigError(f"path={str(path)!r}: its last line has no end, and is not a RunLog's")
            if rest:
                file.truncate(size - len(rest))
    except OSError as error:
        raise ConfigError(f"path={str(path)!r}: {error.strerror}") from error
    return path


def _peak_memory_bytes(streams: Streams) -> int:
    """The most memory of this rank until now: see `RunLog`."""
    if streams.has_streams:
        return int(streams.module.max_memory_allocated(streams.device))  # never reset: others read torch's peak too
    import resource  # not on all systems

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB


def flops_per_s_of(name: str) -> float | None:
    """The peak of the device that torch calls `name`. None: unknown, or a part of a device (MIG)."""
    found = (rate for known, rate in _FLOPS_PER_S.items() if re.search(rf"\b{known}\b", name) and "MIG" not in name)
    return next(found, None)


def _known_rate(engine: Engine) -> float | None:
    """The peak of this rank's device, if it is known in the dtype in which the model computes."""
    device = engine.streams.device
    if device.type != "cuda" or engine.precision.param_dtype not in (torch.bfloat16, torch.float16):
        return None
    return flops_per_s_of(engine.streams.module.get_device_name(device))


def _flops_per_token(engine: Engine, model: nn.Module) -> float | None:
    """Of `model`, forward and backward; None if not all tokens pass all parameters."""
    is_two = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if is_two or any("expert" in param.name for param in engine.params):
        return None
    modules = [module for module in modules_inside(model) if not isinstance(module, nn.Embedding)]
    used = {id(param) for module in modules for param in module._parameters.values()}
    looked_up = [param.sharded for param in engine.params if id(param.sharded) not in used]
    flats = [flat for unit in engine.units for flat in unit.layout.flat_params]
    every = sum((6 if flat.kind.trains else 4) * flat.numel for flat in flats)
    return every - sum((6 if param.requires_grad else 4) * param.numel() for param in looked_up)
