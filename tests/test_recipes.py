"""The short scripts of docs/examples train what DistributedDataParallel trains."""

from __future__ import annotations

import copy
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from streamshard import StreamShard
from tests.launched import ROOT
from tests.ranks import RankContext, on_ranks
from tests.reference import difference, full_weights

STEPS = 6
pytestmark = pytest.mark.filterwarnings("ignore:.*barrier.*using the device:UserWarning")


def _script(name: str) -> dict[str, Any]:
    """The names of a script, whose models compute in fp32."""
    names = runpy.run_path(str(ROOT / f"docs/examples/{name}.py"))
    names["main"].__globals__["StreamShard"] = lambda model: StreamShard(model, precision="fp32")
    return names


def _ddp(model: nn.Module) -> Any:
    return DistributedDataParallel(model, find_unused_parameters=True)


def _assert_same(models: Sequence[Any], losses: list[float], plain: Sequence[nn.Module], wanted: list[float]) -> None:
    assert losses == pytest.approx(wanted, rel=1e-5)
    for model, other in zip(models, plain, strict=True):
        assert difference(full_weights(model), full_weights(other)) < 1e-5
        buffers: list[dict[str, Tensor]] = [dict(each.named_buffers()) for each in (model, other)]
        assert difference({"": torch.zeros(1), **buffers[0]}, {"": torch.zeros(1), **buffers[1]}) < 1e-5


@on_ranks(2)
@pytest.mark.parametrize("name", ["gan", "distillation", "vision_language"])
def test_a_recipe_trains_as_under_ddp(context: RankContext, name: str) -> None:
    """Losses, weights and buffers."""
    if name == "vision_language":
        pytest.importorskip("transformers")
    script = _script(name)
    models, losses = script["main"](STEPS)
    plain = script["make_models"]() if "make_models" in script else (script["make_model"](),)
    wrapped = [_ddp(each) if any(param.requires_grad for param in each.parameters()) else each for each in plain]
    wanted = script["train"](*wrapped, STEPS, context.rank)
    _assert_same(models, losses, plain[: len(models)], wanted)


@on_ranks(2)
def test_the_u_net_and_its_average_train_as_under_ddp(context: RankContext) -> None:
    """torch's own AveragedModel beside DDP; running statistics included."""
    script = _script("unet")
    models, losses = script["main"](STEPS)
    plain = script["make_model"]()
    wrapped = _ddp(plain)
    average = AveragedModel(copy.deepcopy(plain), multi_avg_fn=get_ema_multi_avg_fn(script["DECAY"]), use_buffers=False)

    def update_average(step: int) -> None:
        average.update_parameters(plain)

    wanted = script["train"](wrapped, update_average, STEPS, context.rank)
    _assert_same(models, losses, (plain, average.module), wanted)


@on_ranks(2)
def test_the_best_and_latest_checkpoints_continue_and_export_the_best(context: RankContext, tmp_path: Path) -> None:
    """A run in two halves has the losses of one run; the export is the best model, not the last one."""
    main: Callable[..., Any] = _script("best_and_latest")["main"]
    _, whole = main(20, tmp_path / "whole", 0.3)  # the loss rises again
    main(10, tmp_path / "halves", 0.3)
    model, halves = main(20, tmp_path / "halves", 0.3)
    assert halves == whole and min(whole) < whole[-1]
    best = _script("best_and_latest")["evaluate"](model, context.rank, "cpu")
    assert best == pytest.approx(min(whole))
    latest = sorted(path.name for path in (tmp_path / "whole/latest").glob("checkpoint-*"))
    assert latest == ["checkpoint-15", "checkpoint-20"]
