"""Context parallelism: ranks hold parts of the same sequences, and train what one process trains on whole ones."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from streamshard import StreamShard
from tests.ranks import RankContext, on_ranks
from tests.reference import Tolerance, assert_same, full_weights
from tests.training.test_tensor_parallel import example

pytest.importorskip("transformers")

ROUNDING = Tolerance(relative=2e-5, absolute=2e-6)  # sums in another order, through several steps of AdamW
STEPS = 5


_example = functools.partial(example, "context")


@on_ranks(4)
def test_the_example_trains_what_one_process_trains(context: RankContext) -> None:
    """Losses, gradient norms and weights after five steps of AdamW, with sums of losses."""
    model, losses, norms = _example()["main"](STEPS, 2)
    plain = _example()["make_model"]("sdpa")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3)
    for step in range(STEPS):  # the loss of a step is its mean over all tokens that count
        batch = _example()["whole_batch"](step)
        logits = plain(input_ids=batch.tokens, position_ids=batch.position_ids, use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
        loss = loss / (batch.labels != -100).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert (losses[step], norms[step]) == pytest.approx((float(loss.detach()), float(norm)), rel=1e-5), step
        optimizer.step()
        optimizer.zero_grad()
    assert_same(full_weights(model), full_weights(plain), "weights", ROUNDING)
    assert losses[-1] < losses[0] - 0.3


@on_ranks(4)
def test_a_mesh_without_the_ranks_that_share_a_sequence_is_warned_of(context: RankContext) -> None:
    """By the first rank. The mesh that the warning names raises no warning: all other tests use it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    warning = pytest.warns(UserWarning, match=r"leaves out ranks along 'cp': ranks \[0, 1\] .*'cp'\]\._flatten\(")
    with warning if context.rank == 0 else contextlib.nullcontext():
        StreamShard(_example()["make_model"]("sdpa"), mesh=mesh["dp"])
