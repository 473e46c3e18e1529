"""Context parallelism: ranks hold parts of the same sequences, and train what one process trains on whole ones."""

from __future__ import annotations

import contextlib
import functools
import runpy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from streamshard import StreamShard
from tests.launched import ROOT
from tests.ranks import RankContext, on_ranks
from tests.reference import Tolerance, assert_same, full_weights

pytest.importorskip("transformers")

ROUNDING = Tolerance(relative=2e-5, absolute=2e-6)  # sums in another order, through several steps of AdamW
STEPS, LR = 5, 3e-3
Course = tuple[list[float], list[float], dict[str, Tensor]]  # losses, norms, weights


@functools.cache
def _example() -> Any:
    """The names of the script."""
    return runpy.run_path(str(ROOT / "docs/examples/context_parallel.py"))


def _summed_loss(model: Any, batch: Any) -> Tensor:
    logits = model(input_ids=batch.tokens, position_ids=batch.position_ids, use_cache=False).logits
    return cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")


def _plain() -> Course:
    """One process trains a plain model on all sequences; the loss of a step is its mean over all tokens that count."""
    model = _example()["make_model"]("sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses, norms = [], []
    for step in range(STEPS):
        batch = _example()["whole_batch"](step)
        loss = _summed_loss(model, batch) / (batch.labels != -100).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, full_weights(model)


def _assert_equal(found: Course, wanted: Course) -> None:
    for name, ours, theirs in zip(("loss", "norm"), found[:2], wanted[:2], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5), name
    assert_same(found[2], wanted[2], "weights", ROUNDING)


@on_ranks(4)
def test_the_example_trains_what_one_process_trains(context: RankContext) -> None:
    """Losses, gradient norms and weights after five steps of AdamW, with sums of losses."""
    model, losses, norms = _example()["main"](STEPS, 2)
    _assert_equal((losses, norms, full_weights(model)), _plain())
    assert losses[-1] < losses[0] - 0.3


@on_ranks(4)
def test_a_mesh_without_the_ranks_that_share_a_sequence_is_warned_of(context: RankContext) -> None:
    """By the first rank. The mesh that the warning names raises no warning: all other tests use it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    warning = pytest.warns(UserWarning, match=r"leaves out ranks along 'cp': ranks \[0, 1\] .*'cp'\]\._flatten\(")
    with warning if context.rank == 0 else contextlib.nullcontext():
        StreamShard(_example()["make_model"]("sdpa"), mesh=mesh["dp"])
