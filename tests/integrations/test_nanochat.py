"""The lines that the page about nanochat adds to a script: they train as the script's own distributed optimizer does.

nanochat itself is no package. The model and the optimizer here have its form: an optimizer in one class for matrices
and the rest, which averages gradients by itself if there is a process group.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, rms_norm

from streamshard import StreamShard
from tests.compare import full_weights
from tests.launched import ROOT
from tests.ranks import RankContext, on_ranks

WORDS, WIDTH, LAYERS, STEPS = 32, 16, 4, 6


class MuonAdamW(torch.optim.Optimizer):
    """Steps matrices of a group together, each by its norm, and keeps their momentum with the first one."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure
        is_distributed = dist.is_available() and dist.is_initialized()
        for group in self.param_groups:
            for param in group["params"] if is_distributed else ():
                dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
            if group["kind"] == "muon":
                self._step_matrices(group)
            else:
                for param in group["params"]:
                    self._step_elements(group, param)

    def _step_matrices(self, group: dict[str, Any]) -> None:
        params = group["params"]
        grads = torch.stack([param.grad for param in params])
        momentum = self.state[params[0]].setdefault("momentum_buffer", torch.zeros_like(grads))
        momentum.lerp_(grads, 1 - group["momentum"])
        norms = momentum.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10)
        for param, change in zip(params, momentum / norms, strict=True):
            param.sub_(group["lr"] * change)

    def _step_elements(self, group: dict[str, Any], param: Tensor) -> None:
        assert param.grad is not None
        momentum = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
        momentum.lerp_(param.grad, 0.2)
        param.sub_(group["lr"] * momentum)


class _GPT(nn.Module):
    """Its root has scalars that it reads one by one, and embeddings that it reads between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.h = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()) for _ in range(LAYERS))
        self.value_embeds = nn.ModuleDict({str(n): nn.Embedding(WORDS, WIDTH) for n in range(1, LAYERS, 2)})
        self.lambdas = nn.Parameter(torch.ones(LAYERS))

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.wte(tokens)
        for number, layer in enumerate(self.h):
            x = self.lambdas[number] * x + layer(rms_norm(x, (WIDTH,)))
            if str(number) in self.value_embeds:
                x = x + self.value_embeds[str(number)](tokens)
        logits: Tensor = self.head(rms_norm(x, (WIDTH,))).float()
        return logits if targets is None else cross_entropy(logits.flatten(0, 1), targets.flatten())

    def setup_optimizer(self, *_: Any) -> Any:
        others = [self.wte.weight, self.head.weight, self.lambdas, *self.value_embeds.parameters()]
        matrices = {"kind": "muon", "params": list(self.h.parameters()), "lr": 0.1, "momentum": 0.9}
        optimizer = MuonAdamW([{"kind": "adamw", "params": others, "lr": 0.01}, matrices])
        for group in optimizer.param_groups:
            group["initial_lr"] = group["lr"]
        return optimizer


def _made() -> _GPT:
    torch.manual_seed(0)
    return _GPT()


def _train(model: Any, optimizer: Any, rank: int, steps: range) -> list[float]:
    """Steps of two micro-batches, with a schedule that writes into the groups. Returns the losses."""
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(2 * step + rank)
        for _ in range(2):
            tokens = torch.randint(0, WORDS, (2, 8), generator=generator)
            loss = model(tokens, tokens.roll(-1, 1))
            (loss / 2).backward()
            losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * (1 - step / 10)
            if group["kind"] == "muon":
                group["momentum"] = 0.8 + step / 100
        optimizer.step()
        model.zero_grad(set_to_none=True)
    return losses


@contextlib.contextmanager
def _as_nanochat() -> Iterator[None]:
    """Inside, this module is `nanochat.optim`."""
    here, package = sys.modules[__name__], ModuleType("nanochat")
    package.optim = here  # type: ignore[attr-defined]
    sys.modules["nanochat"], sys.modules["nanochat.optim"] = package, here
    try:
        with mock.patch.object(here, "dist", dist):  # which the page replaces
            yield
    finally:
        del sys.modules["nanochat"], sys.modules["nanochat.optim"]


@on_ranks(2)
def test_the_lines_of_the_page_train_as_the_distributed_optimizer(context: RankContext, tmp_path: Path) -> None:
    """And continue from the files that they save. Before the lines each rank has all weights."""
    page = (ROOT / "docs/guide/optimizers.md").read_text().partition("\n## nanochat\n")[2]
    before, saving = (
        re.sub(r"^(-.*|[+ ])", "", block, flags=re.MULTILINE)
        for block in re.findall(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    )
    assert before.count('precision="bf16"') == 1
    before = before.replace('precision="bf16"', 'precision="fp32"')

    plain = _made()
    optimizer = plain.setup_optimizer()
    wanted = _train(plain, optimizer, context.rank, range(STEPS))

    def save(directory: Path, step: int, weights: Any, state: Any, *_: Any) -> None:
        torch.save((weights, state), directory / f"{step} of rank {context.rank}")
        torch.distributed.barrier()

    def train(model: _GPT, state: Any, steps: range) -> tuple[StreamShard, list[float]]:
        names: dict[str, Any] = {"torch": torch, "model": model, "resuming": state is not None}
        names |= {"optimizer_data": state, "save_checkpoint": save, "checkpoint_dir": tmp_path, "step": steps.stop}
        with _as_nanochat():
            exec(before, names)
            losses = _train(names["model"], names["optimizer"], context.rank, steps)
            exec(saving, names)
        return names["orig_model"], losses

    with mock.patch.object(torch, "compile", lambda model, **_: model):  # compiling takes most of the time
        _, losses = train(_made(), None, range(STEPS // 2))
        weights, _ = torch.load(tmp_path / f"{STEPS // 2} of rank 0")
        _, state = torch.load(tmp_path / f"{STEPS // 2} of rank {context.rank}")
        continued = _made()
        continued.load_state_dict(weights, assign=True)
        sharded, more = train(continued, state, range(STEPS // 2, STEPS))
    torch.testing.assert_close(losses + more, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(full_weights(sharded), dict(plain.state_dict()), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        tokens = torch.arange(8).view(1, 8)
        torch.testing.assert_close(sharded.forward(tokens), plain(tokens), rtol=1e-4, atol=1e-5)
