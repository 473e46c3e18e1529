"""Where a run goes: the values of `RunLog`, by a clock of the test's own, in files, trackers and Trainer's logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from streamshard import ConfigError, RunLog
from streamshard.integrations.run_log import flops_per_s_of
from tests.counts import Operators
from tests.integrations.accelerating import on_ranks
from tests.integrations.models import make_model, make_rows
from tests.integrations.trainers import launched, train
from tests.models import TinyConfig, TinyLM
from tests.ranks import RankContext
from tests.reference import sharded_model


def _steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.open()]


@on_ranks(2)
def test_values_are_means_and_rates_over_steps_and_ranks(context: RankContext, tmp_path: Path) -> None:
    """Rank r takes r + 1 seconds and has 10 (r + 1) tokens in a step, and the losses r, r + 1 ..."""
    model, rank, n, now = TinyLM(TinyConfig(tied=True)), context.rank, context.world_size, [100.0]
    model.norm.requires_grad_(False)
    flops = sum((6 if param.requires_grad else 4) * param.numel() for param in model.parameters())
    sharded = sharded_model(lambda: model)
    log = RunLog(sharded, path=tmp_path / "log.jsonl", every=2, step=4, flops_per_s=1e6, clock=lambda: now[0])
    found: list[Any] = []
    for step in range(4):
        now[0] += rank + 1
        found.append(log.step(10 * (rank + 1), torch.tensor(float(rank + step), device=context.device)))
        with log.paused():
            now[0] += 50
    assert found[0] is found[2] is None
    per_s = 10 * n * (n + 1) / 2 / n  # the last rank takes n seconds
    wanted = {"step_s": n, "tokens_per_s": per_s, "tokens_per_s_per_rank": per_s / n, "mfu": flops * per_s / n / 1e6}
    for values, loss in ((found[1], 0.5), (found[3], 2.5)):
        assert values.pop("peak_memory_bytes") > 0
        assert values == pytest.approx({**wanted, "loss": loss + (n - 1) / 2})
    torch.distributed.barrier()
    assert _steps(tmp_path / "log.jsonl") == [6, 8]
    assert log.write() == {}


@on_ranks(2)
def test_the_host_reads_the_device_only_at_the_end_of_an_interval(context: RankContext, tmp_path: Path) -> None:
    model, loss = TinyLM(), torch.ones((), device=context.device)
    model.experts = nn.Linear(4, 4)
    log = RunLog(sharded_model(lambda: model), path=tmp_path / "log.jsonl", every=3, flops_per_s=1.0)
    for _ in range(2):
        with Operators() as between:
            log.step(8, loss)
        assert [*between.counts] == ["aten.detach.default"]
    with Operators() as at_the_end:
        values = log.step(8, loss)
    assert values is not None and "mfu" not in values  # a token does not pass all experts
    assert at_the_end.counts["aten._local_scalar_dense.default"] == 1


@on_ranks(2)
def test_a_run_that_was_killed_leaves_whole_lines_and_appends(context: RankContext, tmp_path: Path) -> None:
    path, model = tmp_path / "log.jsonl", sharded_model()
    for first in (0, 2):
        log = RunLog(model, path=path, every=1, step=first)
        log.step(8)
        log.step(8)
        if context.rank == 0:
            assert path.read_text().endswith("}\n")
            path.write_text(path.read_text() + '{"step": 9, "tok')  # as the machine fails
        torch.distributed.barrier()
    RunLog(model, path=path)
    assert _steps(path) == [1, 2, 3, 4]


@on_ranks(2)
def test_mistakes_are_told_on_all_ranks(context: RankContext, tmp_path: Path) -> None:
    model, text = sharded_model(), tmp_path / "text"
    text.write_text("of the user")
    mistakes: dict[str, dict[str, Any]] = {
        "neither an accelerator nor a path": {},
        "Not a directory|File exists": {"path": text / "log"},
        "is not a RunLog's": {"path": text},
        "every=0: wanted a positive": {"path": text, "every": 0},
    }
    for message, given in mistakes.items():
        with pytest.raises(ConfigError, match=message):
            RunLog(model, **given)
    assert text.read_text() == "of the user"
    for loss, said in ((3.0, "is float"), ([torch.ones(())], r"is list.*sum\(losses\)"), (torch.ones(2), "2,")):
        with pytest.raises(ConfigError, match=said):
            RunLog(model, path=tmp_path / "log.jsonl").step(1, loss)
    RunLog(model, path=tmp_path / "log.jsonl").step(1, sum([torch.ones(()), torch.ones(())]))


def test_rates_are_those_of_whole_devices() -> None:
    names = ("H100 80GB HBM3", "H100 PCIe", "H200 NVL", "A100-SXM4-80GB", "GH200 480GB", "A100-SXM4-40GB MIG 1g.5gb")
    assert [flops_per_s_of(f"NVIDIA {name}") for name in names] == [989e12, 756e12, 835e12, 312e12, None, None]


@on_ranks(2)
def test_trackers_of_accelerate_get_the_values(context: RankContext) -> None:
    from accelerate.tracking import GeneralTracker

    from streamshard.integrations.accelerate import StreamShardAccelerator

    class Tracker(GeneralTracker):  # type: ignore[misc]  # accelerate has no types
        name, requires_logging_directory, tracker = "kept", False, None
        kept: list[tuple[int, dict[str, float]]] = []

        def log(self, values: dict[str, float], step: int | None, **_: Any) -> None:
            self.kept.append((step or 0, values))

    with launched(context):
        accelerator = StreamShardAccelerator(log_with=Tracker())
        accelerator.init_trackers("run")
        log = RunLog(accelerator.prepare(TinyLM()), accelerator, every=2)
        found = [log.step(8, torch.ones((1,) * (number % 2), device=context.device)) for number in range(4)]
    assert Tracker.kept == ([(2, found[1]), (4, found[3])] if context.rank == 0 else [])


@on_ranks(2)
def test_trainer_logs_them_beside_its_loss(context: RankContext, tmp_path: Path) -> None:
    from streamshard.integrations.transformers import StreamShardTrainer

    data = make_rows("llama")
    given = {"streamshard": {"flops_per_s": 1e9}, "eval_dataset": data[:4]}
    often = {"max_steps": 4, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    with launched(context):
        run = train(StreamShardTrainer, make_model("llama"), tmp_path, data, given=given, **often)
    names = {"tokens_per_s", "tokens_per_s_per_rank", "mfu", "step_s", "peak_memory_bytes"}
    history = run.trainer.state.log_history
    logged = [entry for entry in history if "loss" in entry]
    assert [entry["step"] for entry in logged] == [2, 4] and all(names <= entry.keys() for entry in logged)
    assert not any(names & entry.keys() for entry in history if "loss" not in entry)
    tokens = 2 * 2 * len(data[0]["input_ids"])  # of a step of two ranks
    assert [entry["tokens_per_s"] * entry["step_s"] for entry in logged] == pytest.approx([tokens] * 2)
