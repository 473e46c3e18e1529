"""accelerate on rank processes of tests, on the GPU where there is one: as if each had been launched anew."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests import ranks
from tests.compare import assert_same
from tests.models import Stack
from tests.ranks import RankContext

SAMPLES = 48
on_ranks = functools.partial(ranks.on_ranks, backend="of accelerator")


def load_example(path: str) -> Any:
    """A new module of docs/examples, in which nothing of an earlier test is left."""
    file = Path(__file__).parents[2] / "docs" / "examples" / path
    sys.path.insert(0, str(file.parent))
    try:
        spec = importlib.util.spec_from_file_location(f"example_{file.stem}", file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.parent))
    return module


def _reset() -> None:
    """Forget what accelerate keeps of the Accelerators of this process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextlib.contextmanager
def launched(context: RankContext, **environment: str) -> Iterator[None]:
    """Inside, the environment is torchrun's, and accelerate has not been used yet.

    Ranks that share a GPU are, to accelerate, each a machine's only one; so are they to NCCL.
    """
    before = dict(os.environ)
    rank, count = str(context.rank), str(context.world_size)
    on_cpu = context.device.type == "cpu"
    local_rank, local_count = (rank, count) if on_cpu else ("0", "1")
    os.environ.update(RANK=rank, LOCAL_RANK=local_rank, WORLD_SIZE=count, LOCAL_WORLD_SIZE=local_count)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1", ACCELERATE_USE_CPU=str(on_cpu))
    os.environ.update(environment)
    _reset()
    try:
        set_seed(3)
        yield
    finally:
        _reset()
        os.environ.clear()
        os.environ.update(before)


def stock(**kwargs: Any) -> Accelerator:
    """accelerate's own, which trains with DistributedDataParallel."""
    return Accelerator(**kwargs)


def make_model(seed: int = 5) -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(seed)
    return Stack((5, 12, 12, 12, 12))


def loader(batch_size: int = 4, samples: int = SAMPLES, shuffle: bool = True) -> DataLoader[Any]:
    """Batches of x [batch_size, 5] and y [batch_size, 1], the same data on every rank."""
    x = torch.randn(samples, 5, generator=torch.Generator().manual_seed(11))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=batch_size, shuffle=shuffle)


class Trained:
    """A training run on one rank: what it showed, and what it left.

    Args:
        make: the Accelerator's class.
        steps: how many batches to train on, over as many epochs as it takes.
        clip: what to do to gradients.
        data: batches.
        **settings: of the Accelerator.
    """

    def __init__(
        self, make: Callable[..., Any], *, steps: int = 0, clip: str = "norm", data: Any = None, **settings: Any
    ) -> None:
        self.accelerator = make(**settings)
        model = make_model()
        made = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(made, 3, 0.9)
        prepared = self.accelerator.prepare(model, made, data or loader(), scheduler)
        self.model, self.optimizer, self.data, self.scheduler = prepared
        self.clip = clip
        self.losses: list[float] = []
        self.norms: list[float] = []
        while len(self.losses) < steps:
            self.epoch(steps - len(self.losses))
        self.final = self.weights()  # while accelerate still knows of it

    def epoch(self, most: int = 10**6, data: Any = None) -> None:
        for number, (x, y) in enumerate(self.data if data is None else data, 1):
            self.step(x, y)
            if number == most:
                return

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        accelerator, params = self.accelerator, self.model.parameters()
        with accelerator.accumulate(self.model):
            loss = (self.model(x) - y).square().mean()
            accelerator.backward(loss)
            if accelerator.sync_gradients and self.clip == "norm":
                self.norms.append(float(accelerator.clip_grad_norm_(params, 0.5)))
            elif accelerator.sync_gradients:
                accelerator.clip_grad_value_(params, 0.01)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
        self.losses.append(float(accelerator.gather_for_metrics(loss.detach()[None]).mean()))

    def accumulate(self, micro_batches: list[Any]) -> None:
        """A step of at most four micro-batches, layer by layer."""

        def loss_of(model: Any, micro_batch: Any) -> torch.Tensor:
            x, y = micro_batch
            losses.append((model(x) - y).square().mean())
            return self.accelerator.scaler.scale(losses[-1] / 4) if self.accelerator.scaler else losses[-1] / 4

        losses: list[torch.Tensor] = []
        self.model.accumulate(micro_batches, loss_of)
        self.norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)))
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.losses += (float(self.accelerator.gather(loss.detach()[None]).mean()) for loss in losses)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.accelerator.get_state_dict(self.model).items()}


def same(ours: Trained, theirs: Trained) -> None:
    torch.testing.assert_close(ours.losses, theirs.losses, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.norms, theirs.norms, rtol=1e-4, atol=1e-6)
    assert_same(ours.final, theirs.final, "weights")
