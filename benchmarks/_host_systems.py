"""Systems that keep the state of training in host memory, on one device, and the same model that computes alone.

Run by `host_memory`. All systems compute in bf16, recompute each layer in backward, keep fp32 main weights, sum
gradients in fp32, clip them by their exact norm, and step with AdamW.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import resource
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _measure import Clock, counted, summary
from _models import LLAMAS, flops_per_token, llama
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

__all__ = ["SYSTEMS", "NotRunError", "measure"]

PREPARATION_STEPS = 2  # the second one carries out StreamShard's first late step, which makes the moments
LOSS_TOKENS = 8192  # whose logits exist at a time
CELL_S = 6.0  # of steps, for one number of tokens
MOST_STEPS, LEAST_STEPS = 4, 2
LEARNING_RATE, MAX_NORM = 1e-4, 1.0
_CGROUP = Path("/sys/fs/cgroup")
Step = Callable[[torch.Tensor], torch.Tensor]
Tell = Callable[[str, dict[str, Any]], None]


class NotRunError(Exception):
    """A system cannot run here. The text says why."""


class WithLoss(nn.Module):
    """A Llama whose output is its loss. Logits exist for a part of the tokens at a time, and again in backward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.llama = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[rows, sequence] int64 -> [] fp32, the mean over all tokens that have a next one."""
        hidden = self.llama.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        targets = tokens[:, 1:].flatten()
        parts = zip(hidden.split(LOSS_TOKENS), targets.split(LOSS_TOKENS), strict=True)
        sums = [checkpoint(self._sum, *part, use_reentrant=False) for part in parts]
        return torch.stack(sums).sum() / targets.numel()

    def _sum(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.llama.lm_head(hidden).float(), targets, reduction="sum")


# -- systems -----------------------------------------------------------------------------------------------------------


def _alone(model: WithLoss, device: torch.device) -> Step:
    """Layers stay on the device, and nothing steps."""
    for param in model.parameters():
        param.data = param.data.bfloat16()

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss = model(tokens)
        loss.backward()
        model.zero_grad()
        return loss

    return step


def _streamshard(model: WithLoss, device: torch.device, **settings: Any) -> Step:
    from streamshard import StreamShard

    sharded: Any = StreamShard(model, offload="state", **settings)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=LEARNING_RATE, fused=True)
    return _training(sharded, optimizer, lambda: sharded.clip_grad_norm_(MAX_NORM))


def _partly(model: WithLoss, device: torch.device) -> Step:
    """40 % of the state stays on the device: that of the first layers."""
    numel = sum(param.numel() for param in model.parameters())
    return _streamshard(model, device, device_budget=int(0.4 * 18 * numel))


def _fsdp2(model: WithLoss, device: torch.device) -> Step:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    settings: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    for layer in model.llama.model.layers:
        fully_shard(layer, **settings)
    sharded: Any = fully_shard(model, **settings)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=LEARNING_RATE, fused=True)
    return _training(sharded, optimizer, lambda: nn.utils.clip_grad_norm_(sharded.parameters(), MAX_NORM))


def _training(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[], object]) -> Step:
    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(tokens)
        loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _deepspeed(model: WithLoss, device: torch.device) -> Step:
    """ZeRO-Offload: weights stay on the device in bf16, main weights and moments are stepped by the CPU."""
    try:
        import deepspeed
    except ImportError:
        raise NotRunError("not installed") from None
    offload = {"device": "cpu", "pin_memory": True}
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2, "offload_optimizer": offload},
        "bf16": {"enabled": True},
        "gradient_clipping": MAX_NORM,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE}},
    }
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=settings, dist_init_required=False
    )

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = engine(tokens)
        engine.backward(loss)
        engine.step()
        return loss

    return step


class System(NamedTuple):
    """How a system is made, and bytes of host memory that it takes per parameter."""

    make: Callable[[WithLoss, torch.device], Step]
    host_bytes: int


SYSTEMS = {
    "alone": System(_alone, 0),
    "streamshard": System(_streamshard, 18),
    "streamshard-40": System(_partly, 11),
    "fsdp2": System(_fsdp2, 20),  # 16, and what torch's pinned allocator adds: it rounds up to powers of two
    "deepspeed": System(_deepspeed, 18),
}


# -- measuring ---------------------------------------------------------------------------------------------------------


def measure(size: str, name: str, counts: Sequence[int], device: torch.device, tell: Tell) -> None:
    """Build one system, and train it with each number of tokens in turn. A step is one micro-batch.

    Args:
        size: a key of `LLAMAS`.
        name: a key of `SYSTEMS`.
        counts: tokens of a step.
        device: trains.
        tell: is called with ``"built"``, and with ``"cell"`` for each number of tokens.

    Raises:
        NotRunError: the system is not here, or there is too little host memory.
    """
    config, free = LLAMAS[size], _free_host_bytes()
    numel = sum(param.numel() for param in llama(size, torch.device("meta")).parameters())
    if (needed := SYSTEMS[name].host_bytes * numel) > free:
        raise NotRunError(f"needs {needed / 1e9:.0f} GB of host memory, and {free / 1e9:.0f} are free")
    start = time.perf_counter()
    torch.manual_seed(0)
    model = WithLoss(llama(size, device))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of transformers 5.23, whose new name older ones do not have
        model.llama.gradient_checkpointing_enable({"use_reentrant": False})
    sequence, layers, width = (config[key] for key in ("max_position_embeddings", "num_hidden_layers", "hidden_size"))
    flops = flops_per_token(model, layers=layers, width=width, sequence=sequence)
    step = SYSTEMS[name].make(model, device)
    del model
    for index in range(PREPARATION_STEPS):
        step(_tokens(size, min(counts), index, device))
    tokens = _tokens(size, min(counts), PREPARATION_STEPS, device)
    with counted(device) as steady:  # whether the host waits for a copy
        step(tokens)
    _wait(device)
    built = {"seconds": time.perf_counter() - start, "parameters": numel, **_host_bytes(free)}
    tell("built", {**built, "steady_step": dataclasses.asdict(steady)})
    for count in counts:
        try:
            facts = _steps(step, size, count, device)
        except torch.OutOfMemoryError as error:
            tell("cell", {"tokens": count, "not_run": str(error).splitlines()[0]})
            gc.collect()
            torch.cuda.empty_cache()
            continue
        seconds = facts["step_ms"]["median"] / 1e3
        rates = {"tokens_per_s": count / seconds, "tflops": count * flops / seconds / 1e12}
        tell("cell", {"tokens": count, **facts, **rates, **_host_bytes(free)})


def _steps(step: Step, size: str, count: int, device: torch.device) -> dict[str, Any]:
    """Milliseconds of steps in a row. Each ends where the next one begins, late steps included."""
    start = time.perf_counter()
    step(_tokens(size, count, 0, device))
    _wait(device)
    repeats = min(max(int(CELL_S / (time.perf_counter() - start)), LEAST_STEPS), MOST_STEPS)
    batches = [_tokens(size, count, 1 + index, device) for index in range(repeats)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    clock = Clock(device)
    clock.lap()
    for tokens in batches:
        loss = step(tokens).detach()
        clock.lap()
    laps_ms = clock.laps_ms()
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    with counted(device) as steady:
        step(batches[-1])
    waits = {"synchronizations": steady.synchronizations, "synchronized_at": steady.synchronized_at}
    return {"step_ms": summary(laps_ms), "steps_ms": laps_ms, "peak_device_bytes": peak, "loss": loss.item(), **waits}


def _tokens(size: str, count: int, index: int, device: torch.device) -> torch.Tensor:
    """[rows, sequence] int64, together `count`: the same for every system."""
    sequence = min(LLAMAS[size]["max_position_embeddings"], count)
    generator = torch.Generator().manual_seed(index)
    shape = (count // sequence, sequence)
    return torch.randint(LLAMAS[size]["vocab_size"], shape, generator=generator).to(device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- host memory -------------------------------------------------------------------------------------------------------


def _host_bytes(free_before: int) -> dict[str, int]:
    """By how much the machine's free memory has become less, and the most that this process has had in place."""
    rss_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"host_bytes": max(free_before - _free_host_bytes(), 0), "peak_rss_bytes": rss_bytes}


def _free_host_bytes() -> int:
    """What this process may still take: of the machine, and of its container."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError):  # another version of cgroups, or "max"
            free = min(free, int((_CGROUP / limit).read_text()) - int((_CGROUP / used).read_text()))
    return free
