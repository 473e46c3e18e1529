"""Scripts of docs/examples: the short ones train what DDP trains; the main job goes on, and says why it ends."""

from __future__ import annotations

import functools
import json
import multiprocessing
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from streamshard import StreamShard
from streamshard.checkpoint.directory import open_verified
from streamshard.checkpoint.json_codec import decode
from streamshard.comm.ranks import RankGroup
from tests.compare import difference, full_weights
from tests.launched import ROOT, Launched, run_by_torchrun, run_file
from tests.ranks import RankContext, on_ranks

STEPS = 6
pytestmark = pytest.mark.filterwarnings("ignore:.*barrier.*using the device:UserWarning")


def _script(name: str) -> dict[str, Any]:
    """The names of a script, whose models compute in fp32."""
    names = runpy.run_path(str(ROOT / f"docs/examples/{name}.py"))
    names["main"].__globals__["StreamShard"] = lambda model: StreamShard(model, precision="fp32")
    return names


@on_ranks(2)
@pytest.mark.parametrize("name", ["gan", "distillation", "vision_language", "unet"])
def test_a_recipe_trains_as_under_ddp(context: RankContext, name: str) -> None:
    """The U-Net's second model is its average."""
    if name == "vision_language":
        pytest.importorskip("transformers")
    script = _script(name)
    models, losses = script["main"](STEPS)
    plain = script["make_models"]() if "make_models" in script else [script["make_model"]()]
    wrapped = [
        DistributedDataParallel(each, find_unused_parameters=True)
        if any(param.requires_grad for param in each.parameters())
        else each
        for each in plain
    ]
    if name == "unet":
        wrapped.append(AveragedModel(plain[0], multi_avg_fn=get_ema_multi_avg_fn(script["DECAY"])))
        plain.append(wrapped[1].module)
    wanted = script["train"](*wrapped, STEPS, context.rank)
    assert losses == pytest.approx(wanted, rel=1e-5)
    for model, other in zip(models, plain[: len(models)], strict=True):
        assert difference(full_weights(model), full_weights(other)) < 1e-5
        buffers: list[dict[str, Tensor]] = [dict(each.named_buffers()) for each in (model, other)]
        assert difference({"": torch.zeros(1), **buffers[0]}, {"": torch.zeros(1), **buffers[1]}) < 1e-5


@on_ranks(2)
def test_the_best_and_latest_checkpoints_continue_and_export_the_best(context: RankContext, tmp_path: Path) -> None:
    main: Callable[..., Any] = _script("best_and_latest")["main"]
    _, whole = main(20, tmp_path / "whole", 0.3)  # the loss rises again
    main(10, tmp_path / "halves", 0.3)
    model, halves = main(20, tmp_path / "halves", 0.3)
    assert halves == whole and min(whole) < whole[-1]
    best = _script("best_and_latest")["evaluate"](model, context.rank, "cpu")
    assert best == pytest.approx(min(whole))
    latest = sorted(path.name for path in (tmp_path / "whole/latest").glob("checkpoint-*"))
    assert latest == ["checkpoint-15", "checkpoint-20"]


JOB = "docs/examples/train_llama.py"
SIZES = "--hidden 64 --layers 2 --batch-size 8 --seq-len 16 --held-out-every 20 --save-every 3 --precision fp32"


def _launch(directory: Path, *arguments: str, samples: bool = False) -> Launched:
    directory.mkdir()
    run = functools.partial(_run_plainly, directory / "samples") if samples else _leave_out
    return Launched(2, directory, _run_rank, [JOB, *arguments], run)


def _run(directory: Path, *arguments: str, samples: bool = False) -> str:
    return _end(_launch(directory, *arguments, samples=samples), code=0)


def _end(job: Launched, code: int) -> str:
    (first, told), (other, _) = job.end(timeout_s=200.0)
    assert (first, other) == (code, code), told
    return told


def _run_rank(arguments: list[str], run: Callable[..., None]) -> None:
    real = subprocess.run

    def choose(command: list[str], **settings: Any) -> Any:
        return (run if command[0] == sys.executable else real)(command, **settings)  # matplotlib asks for fonts

    with mock.patch.object(subprocess, "run", choose):
        run_file(arguments)


def _leave_out(*_: object, **__: object) -> None:
    pass


def _run_plainly(directory: Path, command: list[str], *, check: bool, env: dict[str, str]) -> None:
    """In the place of ``subprocess.run``: a process that is forked from this one, whose group has ended."""
    assert check
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & set(env)
    directory.mkdir()
    ((code, told),) = Launched(0, directory, run_file, command[1:], start=multiprocessing.get_context("fork")).end()
    print(told)
    assert code == 0, told


def _curve(out: Path) -> dict[str, list[float]]:
    curve: dict[str, list[float]] = json.loads((out / "result.json").read_text())["curve"]
    del curve["seconds"]
    return curve


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_the_main_job_goes_on_after_it_was_killed_and_after_its_end(tmp_path: Path) -> None:
    """All ranks get SIGKILL after the first checkpoints. The resumed run has the losses of an uninterrupted run.

    A complete run takes more steps, none, but not fewer.
    """
    data = tmp_path / "text.txt"
    data.write_text("".join(f"{number} squared is {number * number}.\n" for number in range(2000)))
    sizes = [*SIZES.split(), "--data", str(data), "--steps", "40"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    _run(tmp_path / "first", *sizes, "--out", str(whole))
    assert [path.name for path in sorted((whole / "checkpoints").iterdir())] == ["checkpoint-39", "checkpoint-40"]

    job = _launch(tmp_path / "killed ranks", *sizes, "--out", str(killed))
    while job.processes[0].is_alive() and len(list(killed.glob("checkpoints/checkpoint-*[0-9]"))) < 2:
        time.sleep(0.01)
    job.kill()
    assert not (killed / "result.json").exists()

    told = _run(tmp_path / "second", "--resume", str(killed), samples=True)
    assert "of 40 steps; going on" in told
    assert f"loaded {killed / 'model'}: LlamaForCausalLM" in told
    assert _curve(killed) == _curve(whole)

    assert "40 of 40 steps; all are done" in _run(tmp_path / "again", "--resume", str(whole))
    assert _curve(whole) == _curve(killed)
    told = _run(tmp_path / "more", "--resume", str(whole), "--steps", "60", "--held-out-every", "30")
    assert "40 of 60 steps; going on" in told
    longer, first = _curve(whole), _curve(killed)
    assert longer["held_out_step"] == [20, 40, 60]
    assert longer["train_loss"][: len(first["train_loss"])] == first["train_loss"]
    files = open_verified(whole / "checkpoints" / "checkpoint-60", RankGroup())
    (saved,) = files.manifest.state["optimizers"].values()
    rates = {group["lr"] for group in decode(saved["param_groups"], files.read_whole, torch.device("cpu"))}
    assert [*rates] == [pytest.approx(2e-3 / 10)]  # the end of the cosine of 60 steps

    fewer = _launch(tmp_path / "fewer", "--resume", str(whole), "--steps", "50")
    assert f"error: --steps 50: {whole} has 60 steps already; wanted more, or no --steps" in _end(fewer, code=2)
    assert json.loads((whole / "arguments.json").read_text())["steps"] == 60


def _launch_wrongly() -> None:
    """As torchrun does, whose processes would import torch anew; prints what it ends with."""
    try:
        run_by_torchrun(1, run_file, [JOB, "--bogus"])
    except ChildFailedError as error:
        print(error)


@pytest.mark.ranks
def test_the_launchers_last_words_are_the_jobs_error(tmp_path: Path) -> None:
    ((code, told),) = Launched(0, tmp_path, _launch_wrongly).end()
    assert code == 0
    *_, before, last, after, border = told.rstrip().splitlines()
    assert last == "error: unrecognized arguments: --bogus (--help lists the options)"
    assert (before, after, set(border)) == ("", "", {"="})
