"""accelerate's examples with one line changed: with `StreamShardAccelerator` they give what they give with DDP."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from streamshard.integrations.accelerate import StreamShardAccelerator
from tests.integrations.accelerating import launched, load_example, on_ranks, stock
from tests.ranks import RankContext


def _run(context: RankContext, name: str, make: Callable[..., Any], **arguments: Any) -> list[float]:
    """What the example's ``main`` returns, with `make` in the place of the class that the changed line imports."""
    example = load_example(f"accelerate/{name}.py")
    assert example.Accelerator is StreamShardAccelerator
    with launched(context), contextlib.redirect_stdout(io.StringIO()):
        accelerators: list[Any] = []

        def made(*args: Any, **kwargs: Any) -> Any:
            accelerators.append(make(*args, **kwargs))
            accelerators[-1].state.destroy_process_group = lambda: None  # which is the test's
            return accelerators[-1]

        example.Accelerator = made
        return example.main(**arguments)


def _same_as_ddp(context: RankContext, name: str, **arguments: Any) -> list[float]:
    theirs = _run(context, name, stock, **arguments)
    ours = _run(context, name, StreamShardAccelerator, **arguments)
    assert ours
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    return ours


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "name"),
    [
        (2, "automatic_gradient_accumulation"),
        (2, "cross_validation"),
        (2, "early_stopping"),
        (1, "gradient_accumulation"),
        (2, "gradient_accumulation_for_autoregressive_models"),
        (1, "memory"),
        (2, "memory"),
        (2, "multi_process_metrics"),
        (2, "schedule_free"),
    ],
)
def test_an_accelerate_example_gives_the_results_of_ddp(context: RankContext, name: str) -> None:
    _same_as_ddp(context, name)


@on_ranks(2)
def test_checkpointing_and_going_on_within_an_epoch(context: RankContext, tmp_path: Path) -> None:
    """Both classes go on from their own checkpoints with the same losses."""
    losses = []
    for make in (stock, StreamShardAccelerator):
        where = tmp_path / make.__name__
        losses.append(_run(context, "checkpointing", make, directory=str(where)))
        for done in (2, 4):
            again = {"directory": str(where / "again"), "resume": str(where / f"step_{done}")}
            losses.append(_run(context, "checkpointing", make, **again))
            assert len(losses[-1]) == len(losses[-1 - done // 2]) - done
    torch.testing.assert_close(losses[3:], losses[:3], rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_local_sgd(context: RankContext) -> None:
    """Which is no numbers of DDP's: it trains, and processes have other weights between averages."""
    example = load_example("accelerate/local_sgd.py")
    with launched(context), contextlib.redirect_stdout(io.StringIO()):
        example.StreamShardAccelerator.end_training = lambda self: None
        try:
            losses = example.main()
        finally:
            del example.StreamShardAccelerator.end_training
    assert losses[-1] < losses[0]
