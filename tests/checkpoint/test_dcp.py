"""Training goes on where FSDP2 has stopped, and the other way round, through torch.distributed.checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from streamshard import StreamShard, load_checkpoint, save_checkpoint
from streamshard.checkpoint.dcp import DcpFiles, from_dcp, to_dcp
from streamshard.checkpoint.directory import open_verified
from streamshard.comm.ranks import RankGroup
from streamshard.errors import CheckpointError, ConfigError
from streamshard.tools.command import main
from tests.checkpoint import runs
from tests.checkpoint.crafted import write_dcp
from tests.faults import case
from tests.models import DIM, next_token_loss, token_batch
from tests.ranks import RankContext, RankPool, on_ranks
from tests.reference import FP32

ROWS = 4


class Counted(runs.Counted):
    """Without extra state, which is not converted."""

    get_extra_state = nn.Module.get_extra_state
    set_extra_state = nn.Module.set_extra_state


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two, so that their order and their options matter."""
    decayed = [param for param in model.parameters() if param.ndim > 1]
    others = [param for param in model.parameters() if param.ndim <= 1]
    return [{"params": decayed, "weight_decay": 0.1, "lr": 3e-3}, {"params": others, "weight_decay": 0.0}]


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Mean losses of batches [first, last), of which each rank has its rows."""
    losses = []
    model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    rank, rows = dist.get_rank(), ROWS // dist.get_world_size()
    for number in range(first, last):
        tokens = token_batch(number, 0, rows=ROWS)[rank * rows : (rank + 1) * rows]
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def _ours(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: Any = StreamShard(Counted(), precision=FP32)
    return model, torch.optim.AdamW(_groups(model))


def _theirs(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """FSDP2, as its tutorial has it."""
    torch.manual_seed(seed)
    model = Counted()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(_groups(model))


def _train_ours(context: RankContext, directory: Path) -> list[float]:
    model, optimizer = _ours(0)
    _train(model, optimizer, 0, 3)
    save_checkpoint(directory, model, optimizer, extra={"position": 3})
    return _train(model, optimizer, 3, 6)


def _go_on_with_fsdp2(context: RankContext, directory: Path, flatten: bool) -> list[float]:
    model, optimizer = _theirs(1)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    weights, moments = get_state_dict(model, optimizer, options=options)
    state = {"model": weights, "optimizer": moments}
    state_dict_loader.load(state, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)
    return _train(model, optimizer, 3, 6)


def test_fsdp2_goes_on_where_we_have_stopped(ranks: RankPool, tmp_path: Path) -> None:
    """Weights, a tied one, buffers, moments, steps and both groups' options: the same losses, however it names them."""
    wanted = ranks(2).run(_train_ours, tmp_path / "run")[0]
    out = tmp_path / "out"
    assert main(["convert", str(tmp_path / "run"), str(out), "--to", "dcp"]) == 0
    for flatten in (False, True):
        found = ranks(2).run(_go_on_with_fsdp2, out, flatten)[0]
        assert found == pytest.approx(wanted, rel=1e-5)


def _train_theirs(context: RankContext, directories: tuple[Path, Path], flatten: bool) -> list[float]:
    model, optimizer = _theirs(0)
    _train(model, optimizer, 0, 3)
    weights, moments = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flatten))
    if directories[0] == directories[1]:
        state_dict_saver.save({"model": weights, "optimizer": moments, "position": 3}, checkpoint_id=directories[0])
    else:
        state_dict_saver.save({"model": weights}, checkpoint_id=directories[0])
        state_dict_saver.save({"optimizer": moments}, checkpoint_id=directories[1])
    return _train(model, optimizer, 3, 6)


def _go_on_with_ours(context: RankContext, directory: Path) -> list[float]:
    model, optimizer = _ours(1)
    load_checkpoint(directory, model, optimizer)
    return _train(model, optimizer, 3, 6)


@pytest.mark.parametrize(("layout", "flatten"), [("dcp", True), ("accelerate", False)])
def test_we_go_on_where_fsdp2_has_stopped(ranks: RankPool, tmp_path: Path, layout: str, flatten: bool) -> None:
    """Both ways of FSDP2 to name param groups, and Accelerate's directories; on another number of ranks too."""
    theirs = tmp_path / "theirs"
    own = ("pytorch_model_fsdp_0", "optimizer_0") if layout == "accelerate" else ("", "")
    wanted = ranks(2).run(_train_theirs, (theirs / own[0], theirs / own[1]), flatten)[0]
    assert main(["convert", str(theirs), str(tmp_path / "run"), "--from", "dcp"]) == 0
    assert main(["inspect", str(tmp_path / "run")]) == 0
    found = ranks(1).run(_go_on_with_ours, tmp_path / "run")[0]
    assert found == pytest.approx(wanted, rel=1e-5)


@on_ranks(1)
def test_what_does_not_fit_is_refused(context: RankContext, tmp_path: Path) -> None:
    """DCP does not name the optimizer's class, but has its options; a weight that is tied there only is seen."""
    _train_ours(context, tmp_path / "run")
    to_dcp(tmp_path / "run", tmp_path / "dcp")
    from_dcp(tmp_path / "dcp", tmp_path / "back")
    model, untied = _ours(1)[0], Counted()
    untied.head.weight = nn.Parameter(torch.zeros(48, DIM))
    other = StreamShard(untied, precision=FP32)
    for run, told in (
        ((model, torch.optim.SGD(_groups(model))), "it is not of a SGD"),
        ((other, torch.optim.AdamW(_groups(other))), "only one of checkpoint and run has 'model/head.weight'"),
    ):
        with pytest.raises(CheckpointError, match=told):
            load_checkpoint(tmp_path / "back", *run)


def test_directories_that_cannot_work_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """None of DCP; other keys; a file that is missing. Nothing is left of it."""
    run = tmp_path / "run"
    with pytest.raises(CheckpointError, match=r"is no directory of torch\.distributed\.checkpoint"):
        from_dcp(tmp_path, run)
    weight = torch.ones(2, 3)
    write_dcp(tmp_path / "app", {"app": {"model": {"weight": weight}}})
    with pytest.raises(ConfigError, match="model='model': no key of .* begins so; they begin with app"):
        from_dcp(tmp_path / "app", run)
    assert main(["convert", str(tmp_path / "app"), str(run), "--from", "dcp"]) == 2
    assert "--model-key" in capsys.readouterr().err
    stored = next((tmp_path / "app").glob("*.distcp"))
    for damage, told in ((lambda: stored.write_bytes(b""), r"\S"), (stored.unlink, "FileNotFoundError")):
        damage()
        with pytest.raises(CheckpointError, match=f"cannot read .*app: {told}"):
            from_dcp(tmp_path / "app", run, model="app.model")
    assert not list(run.glob("*"))
    with pytest.raises(CheckpointError, match="app exists: convert into a new directory"):
        to_dcp(tmp_path, tmp_path / "app")


def test_other_prefixes_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a state that has the model further inside; what is not taken is said."""
    write_dcp(tmp_path / "dcp", {"app": {"net": {"weight": torch.ones(2, 3)}}, "seen": 3})
    run = tmp_path / "run"
    assert main(["convert", str(tmp_path / "dcp"), str(run), "--from", "dcp", "--model-key", "app.net"]) == 0
    assert "left out: seen" in capsys.readouterr().out
    assert torch.equal(open_verified(run / "checkpoint-1", RankGroup()).read_whole("model/weight"), torch.ones(2, 3))
    bare = {"weight": torch.zeros(2), "optimizer": {"state": {"weight": {"step": torch.tensor(3.0)}}}}
    write_dcp(tmp_path / "bare", bare)
    path, left_out = from_dcp(tmp_path / "bare", run, model="")
    assert (path.name, left_out) == ("checkpoint-2", [])
    assert open_verified(path, RankGroup()).manifest.tensors.keys() == {"model/weight"}


STATE = {"model": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, 3)}}


def test_tensors_and_values_that_torch_writes_come_back(tmp_path: Path) -> None:
    """Tensors of many dtypes and strides, scalars, empty tensors, and values."""
    dtypes = [torch.uint16, torch.uint64, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int8]
    state: dict[str, Any] = {str(dtype): torch.tensor([1, 0, 1]).to(dtype) for dtype in dtypes}
    state |= {"turned": torch.arange(6.0).view(2, 3).t(), "expanded": torch.ones(1).expand(3)}
    state |= {"number": torch.tensor(3), "empty": torch.zeros(0, 3)}
    state["list"] = [-5, 2**70, 1.5, "é", None, True, (1, dtypes)]
    write_dcp(tmp_path / "dcp", state)
    files = DcpFiles(tmp_path / "dcp")
    assert files.entries.keys() == state.keys()
    for key, wanted in state.items():
        found = files.read(key)
        if isinstance(wanted, torch.Tensor):
            assert found.dtype == wanted.dtype and torch.equal(found, wanted)
        else:
            assert found == wanted


class _Attack:
    """Unpickling it makes a directory."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


def test_pickles_in_dcp_directories_run_no_code(tmp_path: Path) -> None:
    """Neither the metadata's pickle nor a value's."""
    attack: Any = _Attack(tmp_path / "mark")
    write_dcp(tmp_path / "one", STATE, lambda metadata: setattr(metadata, "planner_data", attack))
    from_dcp(tmp_path / "one", tmp_path / "run")
    write_dcp(tmp_path / "two", STATE | {"optimizer": {"param_groups": [{"params": ["weight"], "lr": attack}]}})
    with pytest.raises(CheckpointError, match=r"cannot read 'optimizer.*lr' of .*two: it holds posix.mkdir"):
        from_dcp(tmp_path / "two", tmp_path / "run")
    assert not (tmp_path / "mark").exists()


def _part(metadata: Any, **others: Any) -> None:
    """Change where a part of tensor "a" lies."""
    vars(next(part for index, part in metadata.storage_data.items() if index.fqn == "model.a")).update(others)


def _tensor(metadata: Any, size: list[int], **others: Any) -> None:
    vars(metadata.state_dict_metadata["model.a"]).update(size=torch.Size(size), **others)


CHUNK = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([3, 2]))
WRONG: dict[str, tuple[Callable[[Any], object], str]] = {
    "a file outside": (lambda each: _part(each, relative_path="../x"), "wanted a file in the directory"),
    "a larger shape": (lambda each: _tensor(each, [2**40, 3]), "do not hold each element of a tensor"),
    "another shape": (lambda each: _tensor(each, [3, 2], chunks=[CHUNK]), r"does not hold a piece of shape \[3, 2\]"),
    "a part that is cut off": (lambda each: _part(each, length=100), "BadZipFile"),
    "no places": (lambda each: setattr(each, "storage_data", None), "of .*dcp: AttributeError: .*NoneType"),
}


def test_files_that_do_not_fit_their_metadata_are_refused(tmp_path: Path) -> None:
    for what, (change, told) in WRONG.items():
        write_dcp(tmp_path / what / "dcp", STATE, change)
        with case(what), pytest.raises(CheckpointError, match=f"cannot read .*({told})"):
            from_dcp(tmp_path / what / "dcp", tmp_path / "run")
    file = tmp_path / "flipped" / "dcp" / "__0_0.distcp"
    write_dcp(file.parent, STATE)
    file.write_bytes(file.read_bytes().replace(torch.arange(6.0).numpy().tobytes(), bytes(24)))
    with pytest.raises(CheckpointError, match=r"cannot read 'model.a' of .*data/0 in __0_0.distcp is damaged"):
        from_dcp(file.parent, tmp_path / "run")
    assert not (tmp_path / "run").exists()
