"""Does StreamShard train right, and hold as many bytes as it plans? Against plain PyTorch with main weights by hand.

    python benchmarks/parity.py                                       # one rank
    python benchmarks/_ranks.py 2 benchmarks/parity.py                # two, which share the GPU if there is only one
    python benchmarks/_ranks.py 2 benchmarks/parity.py --backend gloo # where NCCL lets no ranks share one: no overlap

Each rank also trains the plain model, on the batches of all ranks, and compares its own losses and all weights. The
exit code is the number of cases that differ.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import os
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from _measure import RESULTS, environment, own_device, write_json
from _models import LLAMAS, llama, next_token_loss

import streamshard.comm.communicator
import streamshard.device
from streamshard import Precision, StreamShard

TIMEOUT = datetime.timedelta(seconds=40)
LEARNING_RATE = 1e-3
ROWS, STEPS = 2, 6
Weights = dict[str, torch.Tensor]


class Case(NamedTuple):
    """Settings that have to train like plain PyTorch in `dtype`: to which share of the loss, and of the update."""

    dtype: torch.dtype
    settings: dict[str, Any]
    loss_off: float
    weights_off: float


_FP32, _BF16 = torch.float32, torch.bfloat16
_ALL_SLOTS = {"weight_slots": "all", "grad_slots": "all"}
_HOST = {"precision": Precision(param_dtype=_BF16), "offload": "state"}
CASES = {
    "fp32": Case(_FP32, {"precision": Precision(param_dtype=_FP32)}, 1e-3, 0.02),
    "bf16": Case(_BF16, {"precision": Precision(param_dtype=_BF16)}, 2e-3, 0.2),
    "bf16, ZeRO-1": Case(_BF16, {"precision": Precision(param_dtype=_BF16), **_ALL_SLOTS}, 2e-3, 0.2),
    "bf16, 16 bits sent": Case(_BF16, {"precision": Precision(param_dtype=_BF16, reduce_dtype=_BF16)}, 2e-3, 0.2),
    "bf16, host memory": Case(_BF16, _HOST, 2e-3, 0.2),
}


def main() -> None:
    """Train every case on this rank; rank 0 writes what is known after each."""
    arguments = _parse()
    for name, alone in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_WORLD_SIZE", "1")):
        os.environ.setdefault(name, alone)
    rank, ranks, device = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), own_device()
    config = {
        "model": "tiny" if arguments.rehearse else "8M",
        "ranks": ranks,
        "backend": arguments.backend,
        "steps": 2 if arguments.rehearse else STEPS,
    }
    result: dict[str, Any] = {"benchmark": "parity", "environment": environment(device), "config": config, "cases": {}}
    with _group(arguments.backend, device, rank, ranks):
        result["first_all_reduce_s"] = _meet(device)
        run = _Run(config["model"], config["steps"], device, rank)
        for name, case in CASES.items():
            if device.type == "cpu" and "offload" in case.settings:
                continue  # its memory is the host's
            if rank == 0:
                write_json(result, arguments.output)
            result["cases"][name] = run.compare(case)
            print(f"rank {rank}, {name}: {result['cases'][name]}", flush=True)
    if rank == 0:
        write_json(result, arguments.output)
    raise SystemExit(sum(not case["is_right"] for case in result["cases"].values()))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="of the GPU; the CPU's is gloo")
    parser.add_argument("--rehearse", action="store_true", help="tiny: whether it runs at all")
    parser.add_argument("--output", type=Path, default=RESULTS / "parity.json")
    return parser.parse_args()


@contextlib.contextmanager
def _group(backend: str, device: torch.device, rank: int, ranks: int) -> Iterator[None]:
    """The default group. StreamShard takes gloo for no GPU's backend: here it has to."""
    backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" and backend == "nccl" else "gloo"
    store = dist.HashStore() if ranks == 1 else None  # None: the launcher's
    dist.init_process_group(backends, rank=rank, world_size=ranks, store=store, timeout=TIMEOUT)
    with contextlib.ExitStack() as patches:
        if device.type == "cuda" and backend == "gloo":
            for module in (streamshard.device, streamshard.comm.communicator):
                patches.enter_context(mock.patch.object(module, "serves", lambda group, kind: True))
        yield
    dist.destroy_process_group()


def _meet(device: torch.device) -> float:
    """Seconds of the first collective, in which NCCL connects."""
    start = time.perf_counter()
    total = torch.ones(1, device=device)
    dist.all_reduce(total)
    if total.item() != dist.get_world_size():
        raise RuntimeError(f"a sum of ones over {dist.get_world_size()} ranks is {total.item()}")
    return time.perf_counter() - start


class _Run:
    """Trains on one rank. Owns the plain results, one for each dtype."""

    def __init__(self, size: str, steps: int, device: torch.device, rank: int) -> None:
        self._size = size
        self._steps: int = steps
        self._device = device
        self._rank = rank
        self._plain: dict[torch.dtype, tuple[list[float], Weights, Weights]] = {}

    def compare(self, case: Case) -> dict[str, Any]:
        """Train `case`: its losses and weights beside the plain ones, and its bytes beside the plan's."""
        if case.dtype not in self._plain:
            self._plain[case.dtype] = self._train_plain(case.dtype)
        wanted, first, last = self._plain[case.dtype]
        start = time.perf_counter()
        losses, weights, memory = self._train_sharded(case)
        passed_s = time.perf_counter() - start
        loss_off = max(abs(loss - plain) / abs(plain) for loss, plain in zip(losses, wanted, strict=True))
        weights_off = _norm(weights, last) / _norm(first, last)
        is_right = loss_off <= case.loss_off and weights_off <= case.weights_off
        found = {"is_right": is_right, "loss_off": loss_off, "weights_off": weights_off, "seconds": passed_s}
        return {**found, **memory, "losses": losses, "plain_losses": wanted}

    def _train_plain(self, dtype: torch.dtype) -> tuple[list[float], Weights, Weights]:
        """This rank's losses, and the weights before and after, of training on the mean gradients of all ranks."""
        model, ranks = self._model(), dist.get_world_size()
        main = {name: param.detach().clone().requires_grad_() for name, param in model.named_parameters()}
        first = {name: weight.detach().clone() for name, weight in main.items()}
        for param in model.parameters():
            param.data = param.data.to(dtype)  # not the whole model: rotary tables stay in fp32
        optimizer, losses = torch.optim.AdamW(main.values(), lr=LEARNING_RATE), []
        for step in range(self._steps):
            optimizer.zero_grad()
            for rank in range(ranks):
                loss = self._loss(model, step, rank)
                loss.backward()
                if rank == self._rank:
                    losses.append(loss.item())
                for name, param in model.named_parameters():
                    share = param.grad.float() / ranks
                    main[name].grad = share if main[name].grad is None else main[name].grad + share
                    param.grad = None
            optimizer.step()
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), list(main.values()))
        return losses, first, {name: weight.detach() for name, weight in main.items()}

    def _train_sharded(self, case: Case) -> tuple[list[float], Weights, dict[str, Any]]:
        """This rank's losses, all weights after, and bytes."""
        gc.collect()  # what the case before has held
        before = self._allocated()
        model: Any = StreamShard(self._model(), **case.settings)
        gc.collect()
        memory = {"planned_bytes": model.memory_report().start_bytes, "held_bytes": self._allocated() - before}
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        losses = []
        for step in range(self._steps):
            loss = self._loss(model, step, self._rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        weights = {name: weight.to(self._device) for name, weight in model.full_state_dict(rank0_only=False).items()}
        return losses, weights, memory if self._device.type == "cuda" and "offload" not in case.settings else {}

    def _model(self) -> Any:
        torch.manual_seed(0)
        return llama(self._size, self._device)

    def _loss(self, model: Any, step: int, rank: int) -> torch.Tensor:
        sizes = LLAMAS[self._size]
        generator = torch.Generator().manual_seed(100 * step + rank)
        shape = (ROWS, sizes["max_position_embeddings"])
        tokens = torch.randint(sizes["vocab_size"], shape, generator=generator).to(self._device)
        return next_token_loss(model(input_ids=tokens, use_cache=False).logits, tokens)

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0


def _norm(ours: Weights, theirs: Weights) -> float:
    """Of the difference of all weights."""
    return float(torch.stack([(ours[name] - weight).norm() for name, weight in theirs.items()]).norm())


if __name__ == "__main__":
    try:
        main()
    except Exception:  # NCCL would wait for the other rank while this process ends, and that rank for this one
        traceback.print_exc()
        os._exit(1)
