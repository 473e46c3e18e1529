"""Files of digests are equal for runs of the same numbers, and name the first difference of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from streamshard import ConfigError, fingerprints
from streamshard.errors import StreamShardError
from streamshard.tools.command import main
from streamshard.tools.fingerprints import compare
from tests.models import TinyConfig, TinyLM, token_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import adamw, next_token_loss, sharded_model
from tests.simulated import simulated_device

STEPS = 3


# By name: a fault before the optimizer's second step, and what is said of it.
FAULTS: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "a gradient": (lambda model, _: model.blocks[1].up.weight.grad.mul_(1 + 2**-20),
                   "step 1 differs first: gradients of 'blocks.1.up.weight'. All before is equal"),
    "a rate": (lambda _, optimizer: optimizer.param_groups[0].update(lr=0.0101),
               "step 1 differs first: weights of 'positions' and 52 more"),
}  # fmt: skip


def _run(context: RankContext, path: str, fault: str = "", *, tokens_of: int = 0, **given: Any) -> None:
    model: Any = sharded_model(lambda: TinyLM(TinyConfig(dim=20)), **given)
    model.set_gradient_divide_factor(1.0)
    optimizer = adamw(model)
    with fingerprints(model, path) as note:
        for step in range(STEPS):
            for index in range(context.rank, 6, context.world_size):
                tokens = token_batch(step + tokens_of * (step == 2), index)
                loss = next_token_loss(model(tokens), tokens).double() / 6
                number = loss.item()
                note(loss)
                assert loss.item() == number  # it was read in place
                loss.backward()
            model.clip_grad_norm_(0.01)
            if fault and step == 1:
                FAULTS[fault][0](model, optimizer)
            optimizer.step()
            optimizer.zero_grad()


def test_runs_of_the_same_numbers_write_the_same_digests(ranks: Any, tmp_path: Path, capsys: Any) -> None:
    paths = [str(tmp_path / f"{count}.jsonl") for count in (1, 3)]
    for count, path in zip((1, 3), paths, strict=True):
        ranks(count).run(_run, path)
    assert main(["compare", *paths]) == 0
    assert capsys.readouterr().out == "equal: 3 steps, 53 parameters\n"
    lines = Path(paths[0]).read_text().splitlines()
    assert len(lines) == 1 + STEPS
    Path(paths[0]).write_text("\n".join(lines)[:-1000])  # its run was killed while it wrote
    assert main(["compare", *paths]) == 0
    assert capsys.readouterr().out.startswith("equal: 2 steps, 53 parameters; ")


def test_the_first_difference_is_named(ranks: Any, tmp_path: Path, capsys: Any) -> None:
    right, wrong = str(tmp_path / "right"), str(tmp_path / "wrong")
    ranks(1).run(_run, right)
    for fault, (_, told) in FAULTS.items():
        ranks(2).run(_run, wrong, fault)
        assert main(["compare", right, wrong]) == 1
        assert told in capsys.readouterr().err
    ranks(1).run(_run, wrong, tokens_of=100)
    assert main(["compare", right, wrong]) == 1
    assert "step 2 differs first: losses. All before is equal" in capsys.readouterr().err


@on_ranks(2)
def test_gradients_in_host_memory_have_the_digests_of_those_on_the_device(context: RankContext, tmp_path: Path) -> None:
    """Also if they are clipped: the factor is applied before they are read."""
    with simulated_device():
        for place in (None, "state"):
            _run(context, str(tmp_path / str(place)), offload=place, weight_slots=2)
    if context.rank == 0:
        assert compare(tmp_path / "None", tmp_path / "state") == "equal: 3 steps, 53 parameters"


@on_ranks(2)
def test_a_file_that_cannot_be_written_raises_on_all_ranks(context: RankContext) -> None:
    model = sharded_model()
    with pytest.raises(ConfigError, match="No such file"), fingerprints(model, "/nowhere/a.jsonl"):
        pass


def test_other_files_are_refused(tmp_path: Path) -> None:
    others = "", "[]\n", '{"a": 1}\n', '{"streamshard fingerprints": 3}\n[]\n'
    for text, told in (
        *((other, "no file of fingerprints") for other in others),
        ('{"streamshard fingerprints": 2}\n', "of another version"),
        ('{"streamshard fingerprints": 3}\n', "no step in common"),
    ):
        (tmp_path / "a").write_text(text)
        with pytest.raises(StreamShardError, match=told):
            compare(tmp_path / "a", tmp_path / "a")
