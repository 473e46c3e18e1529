"""Ray Train: a run whose worker is killed has the losses and weights of an undisturbed run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from streamshard import ConfigError, StopOnSignal, StreamShard, load_checkpoint
from tests.compare import full_weights
from tests.launched import ROOT, Launched, free_port, launched_environment

LAST, KILLED_AT = 8, 5


def _make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)))


class _Batch(NamedTuple):
    step: int
    rows: Tensor  # [4, 16] fp32
    losses: Path


def _rows(step: int, rank: int) -> Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(2 * step + rank))


class _Batches:
    """Kills rank 1 once, at a step that comes two steps behind a checkpoint."""

    def __init__(self, storage: Path) -> None:
        self._storage = storage

    def __call__(self, step: int) -> _Batch:
        rank = torch.distributed.get_rank()
        if (rank, step) == (1, KILLED_AT) and not (self._storage / "killed").exists():
            (self._storage / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return _Batch(step, _rows(step, rank), self._storage / f"losses of rank {rank}")


def _loss_of(model: nn.Module, batch: _Batch) -> Tensor:
    if batch.step == 0:  # as the page says
        with pytest.raises(ConfigError, match="main thread"):
            StopOnSignal(model)
    loss: Tensor = model(batch.rows).square().mean()
    with batch.losses.open("a") as file:
        file.write(f"{batch.step} {loss.item()!r}\n")
    return loss


def _drive(code: str, storage: Path) -> None:
    """Run the page's script as the driver of a Ray cluster of its own, then collect the weights that it has saved."""
    import ray

    warnings.resetwarnings()
    ray_train = {
        "HEALTH_CHECK_INTERVAL_S": "0.2",
        "WORKER_GROUP_START_TIMEOUT_S": "600",
        "ENABLE_PREEMPTION_WATCHER": "0",
    }
    os.environ.update({f"RAY_TRAIN_{name}": value for name, value in ray_train.items()})
    os.environ.update(OMP_NUM_THREADS="1", RAY_USAGE_STATS_ENABLED="0")
    session = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: the path of a socket has at most 107 characters
    try:
        ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=2**27, _temp_dir=session)
        given = {"make_model": _make_model, "batch": _Batches(storage), "loss_of": _loss_of, "last": LAST}
        names: dict[str, Any] = {**given, "save_every": 2, "storage": str(storage), "__name__": "__main__"}
        exec(code, names)
        ray.shutdown()
    finally:
        shutil.rmtree(session, ignore_errors=True)
    os.environ.update(launched_environment(0, 1, free_port()))
    model = StreamShard(_make_model(), precision="fp32")
    assert load_checkpoint(names["result"].checkpoint.path, model)["step"] == LAST
    torch.save(full_weights(model), storage / "weights.pt")


def _train_plainly() -> tuple[dict[str, Tensor], list[list[float]]]:
    """Weights of one process that trains on the batches of both ranks; losses by step and rank."""
    model, losses = _make_model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(LAST):
        each = [model(_rows(step, rank)).square().mean() for rank in range(2)]
        torch.stack(each).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return model.state_dict(), losses


@pytest.mark.ranks
@pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install streamshard[ray]")
@pytest.mark.timeout(600)
def test_a_run_goes_on_after_a_worker_was_killed(tmp_path: Path) -> None:
    """The script is the page's, but for the precision: so it can be compared with plain PyTorch."""
    page = (ROOT / "docs/guide/trainers.md").read_text().partition("\n## Ray Train\n")[2]
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert code.count("(make_model())") == 1
    code = code.replace("(make_model())", "(make_model(), precision='fp32')")
    ((exit_code, output),) = Launched(0, tmp_path, _drive, code, tmp_path).end(timeout_s=500)
    assert exit_code == 0, output[-5000:]

    weights, losses = _train_plainly()
    for rank in range(2):
        lines = [line.split() for line in (tmp_path / f"losses of rank {rank}").read_text().splitlines()]
        # The latest checkpoint is that of step 4, so step 4 ran twice.
        assert [int(step) for step, _ in lines] == [0, 1, 2, 3, 4, 4, 5, 6, 7]
        for step, loss in lines:
            assert float(loss) == pytest.approx(losses[int(step)][rank], rel=1e-5)
    torch.testing.assert_close(torch.load(tmp_path / "weights.pt"), dict(weights), rtol=1e-5, atol=1e-6)
