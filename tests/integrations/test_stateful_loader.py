"""torchdata's StatefulDataLoader: a run that is saved within an epoch goes on there, with nothing skipped by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from streamshard import load_checkpoint, save_checkpoint
from streamshard.integrations.accelerate import StreamShardAccelerator
from tests.checkpoint.runs import Run, start
from tests.integrations.accelerating import SAMPLES, Trained, launched, loader, make_model, on_ranks
from tests.models import VOCABULARY, next_token_loss
from tests.ranks import RankContext
from tests.reference import assert_same


@on_ranks(2)
@pytest.mark.parametrize("kind", ["shuffled", "seedable", "in order"])
@pytest.mark.parametrize("after", [4, SAMPLES])
def test_a_prepared_one_goes_on_within_an_epoch(context: RankContext, tmp_path: Path, kind: str, after: int) -> None:
    """With the batches and random numbers that were left, as they would have come; or behind its last batch.

    Also from what is saved right after it was loaded.
    """
    settings: dict[str, Any] = {
        "dataloader_config": DataLoaderConfiguration(
            use_seedable_sampler=kind == "seedable", use_stateful_dataloader=True
        ),
        "data": loader(shuffle=kind != "in order"),
        "dropout": 0.2,
    }
    with launched(context):
        run = Trained(StreamShardAccelerator, **settings)
        run.epoch()
        after = min(after, len(run.data))
        for number, (x, y) in enumerate(run.data, 1):
            run.step(x, y)
            if number == after:
                run.accelerator.save_state(tmp_path)
                run.losses.clear()
        run.epoch()
    for where in (tmp_path, tmp_path / "again"):
        with launched(context):
            other = Trained(StreamShardAccelerator, **settings)
            other.epoch(1)  # of which nothing must be left
            other.accelerator.load_state(where)
            if where == tmp_path:
                other.accelerator.save_state(tmp_path / "again")
            other.losses.clear()
            if after < len(other.data):
                other.epoch()
            other.epoch()
            assert other.losses == run.losses
            assert_same(other.weights(), run.weights(), "weights")


class _Stream(IterableDataset[torch.Tensor]):
    """Has a place of its own, and no sampler."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while self.place < 24:
            yield torch.tensor(float(self.place))
            self.place += 1
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        """Where it is."""
        return {"place": self.place + 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go there."""
        self.place = state["place"]


@on_ranks(2)
def test_a_stream_goes_on_from_what_is_saved_right_after_it_was_loaded(context: RankContext, tmp_path: Path) -> None:
    """Its loader would say that it begins until it is entered."""
    found: list[list[Any]] = []
    for number in range(3):
        with launched(context):
            config = DataLoaderConfiguration(use_stateful_dataloader=True, dispatch_batches=False)
            accelerator = StreamShardAccelerator(dataloader_config=config)
            data, _ = accelerator.prepare(DataLoader(_Stream(), batch_size=2), make_model())
            if number:
                accelerator.load_state(tmp_path / str(number - 1))
                accelerator.save_state(tmp_path / str(number))
            batches = []
            for place, batch in enumerate(data):
                batches.append(batch.tolist())
                if not number and place == 1:
                    accelerator.save_state(tmp_path / "0")
            found.append(batches)
    assert found[1] == found[2] == found[0][2:]


def _batches(context: RankContext) -> Any:
    tokens = torch.randint(0, VOCABULARY, (24, 6), generator=torch.Generator().manual_seed(context.rank))
    return StatefulDataLoader(tokens, batch_size=2, shuffle=True)  # type: ignore[arg-type]


def _train(run: Run, batches: Any, most: int) -> list[float]:
    losses = []
    for number, tokens in enumerate(batches, 1):
        tokens = tokens.to(next(run.model.parameters()).device)
        loss = next_token_loss(run.model(tokens), tokens)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        losses.append(loss.item())
        if number == most:
            break
    return losses


@on_ranks(2)
@pytest.mark.parametrize("wait", [True, False])
def test_one_that_is_given_as_extra_goes_on_within_an_epoch(context: RankContext, tmp_path: Path, wait: bool) -> None:
    """Each rank's own. To begin to read from it draws a random number, which a run that goes on takes back."""
    run, batches = start(0), _batches(context)
    iterator = iter(batches)
    _train(run, iterator, 5)
    save_checkpoint(tmp_path, *run, extra={"loader": batches}, wait=wait)
    wanted = _train(run, iterator, 99) + _train(run, batches, 3)
    other, batches = start(1), _batches(context)
    load_checkpoint(tmp_path, *other, extra={"loader": batches})
    random_state = torch.get_rng_state()
    iterator = iter(batches)
    torch.set_rng_state(random_state)
    assert _train(other, iterator, 99) + _train(other, batches, 3) == wanted
    assert len(wanted) == 12 - 5 + 3
