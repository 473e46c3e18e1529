"""Loading reads what was exported, and refuses what does not fit."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from streamshard.checkpoint import load as loading
from streamshard.checkpoint.load import Difference, StoredDirectory, load_shards
from streamshard.errors import CheckpointError
from tests.checkpoint.exporting import (
    MODELS,
    Plain,
    export,
    filled,
    on_threads,
    shards_for,
    succeed,
)
from tests.families import bert, llama, mixtral


def load(model: nn.Module, directory: Path, world_size: int) -> dict[str, torch.Tensor]:
    """Load into simulated ranks of `model`; the whole parameters, put together."""
    ranks = [shards_for(model, rank, world_size) for rank in range(world_size)]
    for shards in ranks:
        for shard in shards:
            shard.piece.fill_(torch.nan)
    succeed(on_threads(world_size, lambda group: load_shards(model, ranks[group.rank], group, directory)))
    whole = {}
    for pieces in zip(*ranks, strict=True):
        flat = torch.cat([shard.main for shard in pieces])
        for name in (pieces[0].name, *pieces[0].aliases):
            whole[name] = flat.view(pieces[0].layout.shape)
    return whole


def errors_of_load(model: nn.Module, directory: Path) -> list[str]:
    """What each of two simulated ranks raises. No weight has changed, those of `model` being in `directory`."""
    ranks = [shards_for(model, rank, 2) for rank in range(2)]
    before = [shard.main.clone() for shards in ranks for shard in shards]
    outcomes = on_threads(2, lambda group: load_shards(model, ranks[group.rank], group, directory))
    after = [shard.main for shards in ranks for shard in shards]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(isinstance(outcome, CheckpointError) for outcome in outcomes)
    return [str(outcome) for outcome in outcomes]


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("original_format", [True, False])
def test_load_reads_what_save_pretrained_writes(
    make: Callable[[], nn.Module], original_format: bool, tmp_path: Path
) -> None:
    """At another number of ranks, from several files, in either of the layouts transformers can write."""
    model = filled(make)
    model.save_pretrained(tmp_path, max_shard_size="3KB", save_original_format=original_format)
    whole = load(make(), tmp_path, 3)
    for name, param in model.named_parameters(remove_duplicate=False):
        assert torch.equal(whole[name], param), name


def test_load_converts_and_fills_buffers(tmp_path: Path) -> None:
    """A 16-bit file fills fp32 main weights; buffers arrive whole, also where they are not contiguous."""
    model = filled(Plain)
    model.counts.copy_(torch.randint(100, (3, 2)))
    model.norm.running_mean.copy_(torch.randn(7))
    export(model, tmp_path, 2, dtype="bfloat16")
    other: Any = Plain()
    whole = load(other, tmp_path, 2)
    assert torch.equal(whole["last.weight"], model.last.weight.bfloat16().float())
    assert torch.equal(whole["scale"], model.scale.bfloat16().float())
    assert torch.equal(other.counts, model.counts)
    assert torch.equal(other.norm.running_mean, model.norm.running_mean.bfloat16().float())


def test_load_takes_any_of_the_tied_names(tmp_path: Path) -> None:
    """Another tool may have kept another name of the same parameter."""
    model = filled(Plain)
    tensors = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    del tensors["first.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(load(Plain(), tmp_path, 2)["first.weight"], model.first.weight)


def test_load_names_what_does_not_fit_and_changes_nothing(tmp_path: Path) -> None:
    """Missing, unexpected, of another shape, of another kind: each is named, on every rank."""
    model = filled(Plain)
    tensors = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
    del tensors["scale"]
    tensors["stray"] = torch.zeros(2)
    tensors["first.bias"] = torch.zeros(3)
    tensors["last.bias"] = torch.zeros(7, dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    for error in errors_of_load(model, tmp_path):
        assert "does not fit Plain: missing scale; unexpected stray; mismatched first.bias (is [3], " in error
        assert "last.bias (is torch.int8, wanted torch.float32)" in error


# ------------------------------------------------------------------------------------------------ what files hold


def _save(tensors: dict[str, torch.Tensor], directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def _loaded(model: nn.Module, directory: Path, **settings: bool) -> tuple[Difference, set[str]]:
    """Load on one simulated rank."""
    shards = shards_for(model, 0, 1)
    return succeed(on_threads(1, lambda group: load_shards(model, shards, group, directory, **settings)))[0]


def test_names_of_older_files_are_those_that_transformers_knows(tmp_path: Path) -> None:
    """A norm's gamma and beta, and a table that was saved when every layer had one."""
    model = filled(bert)
    model.save_pretrained(tmp_path)
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = load_file(tmp_path / "model.safetensors")
    for new, old in names.items():
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    assert any("gamma" in name for name in tensors)
    whole = load(bert(), _save(tensors, tmp_path / "old"), 2)
    for name, param in model.named_parameters():
        assert torch.equal(whole[name], param), name
    tensors = {**filled(llama).state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    assert _loaded(llama(), _save(tensors, tmp_path))[0] == ([], [], [])


@pytest.mark.parametrize("gives", [True, False])
def test_a_base_model_and_one_with_a_head_load_each_others_weights(gives: bool, tmp_path: Path) -> None:
    """The one's names begin with its place in the other. What the one does not have is left out, by name."""
    whole, base = filled(llama), filled(llama).model
    giver, taker = (whole, base) if gives else (base, whole)
    giver.save_pretrained(tmp_path)
    kind = "unexpected" if gives else "missing"
    with pytest.raises(CheckpointError, match=f"does not fit .*: {kind} lm_head.weight\\. "):
        _loaded(taker, tmp_path)
    other = llama().model if gives else llama()
    shards = shards_for(other, 0, 1)
    for shard in shards:
        shard.piece.fill_(3.0)
    outcomes = on_threads(1, lambda group: load_shards(other, shards, group, tmp_path, strict=False))
    left_out, loaded = succeed(outcomes)[0]
    assert left_out._asdict() == {"missing": [], "unexpected": [], "mismatched": [], kind: ["lm_head.weight"]}
    for shard in shards:
        name = shard.name.removeprefix("model.")
        wanted = torch.full(shard.layout.shape, 3.0) if name == "lm_head.weight" else base.get_parameter(name)
        assert torch.equal(shard.main.view(shard.layout.shape), wanted), name
        assert (shard.name in loaded) == (name != "lm_head.weight")


def test_experts_of_which_one_is_missing_are_named(tmp_path: Path) -> None:
    """And are left out altogether."""
    model = filled(mixtral)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w1.weight"]
    tensors["model.layers.0.block_sparse_moe.experts.0.w2.weight"] = torch.zeros(3, 3)
    directory = _save(tensors, tmp_path)
    with pytest.raises(
        CheckpointError, match="mismatched model.layers.0.mlp.experts.down_proj .*layers.1.mlp.experts.gate"
    ):
        _loaded(mixtral(), directory)
    left_out, loaded = _loaded(mixtral(), directory, strict=False)
    assert [len(names) for names in left_out] == [0, 0, 2]
    assert "model.layers.1.mlp.experts.gate_up_proj" not in loaded


def test_a_snapshot_of_the_hub_is_read_through_its_links(tmp_path: Path) -> None:
    """Files are named by their contents, and linked to by the names that one looks for."""
    model = filled(llama)
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    model.save_pretrained(blobs, max_shard_size="3KB")
    snapshot.mkdir(parents=True)
    for path in list(blobs.iterdir()):
        blob = path.rename(blobs / path.name[::-1].replace(".", ""))
        (snapshot / path.name).symlink_to(Path("..") / ".." / "blobs" / blob.name)
    whole = load(llama(), snapshot, 2)
    assert torch.equal(whole["lm_head.weight"], model.lm_head.weight)


# ------------------------------------------------------------------------------------------------ all ranks or none


def _other_weights(directory: Path, target: Path) -> None:
    """`directory` again with other values: headers are the same."""
    shutil.copytree(directory, target)
    for path in target.iterdir():
        tensors = {name: tensor + 1 for name, tensor in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})


@pytest.mark.parametrize("same", [True, False])
def test_equal_copies_on_several_disks_load_and_different_ones_raise(
    same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host may have a copy; copies that differ are refused on every rank, before anything changes."""
    copies = [tmp_path / "0", tmp_path / "1"]
    model = filled(Plain)
    export(model, copies[0], 1)
    if same:
        shutil.copytree(*copies, copy_function=shutil.copyfile)
    else:
        _other_weights(*copies)
    own = lambda root, names: StoredDirectory(copies[int(threading.current_thread().name[-1])])  # noqa: E731
    monkeypatch.setattr(loading, "StoredDirectory", own)
    if same:
        assert torch.equal(load(Plain(), tmp_path, 2)["last.bias"], model.last.bias)
        return
    assert all("ranks see different files there" in error for error in errors_of_load(model, tmp_path))


def test_file_replaced_while_it_is_read_is_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Header and data come from one opening, although another dtype has another layout."""
    model = filled(Plain)
    export(model, tmp_path, 1, dtype="float16")
    read = loading.copy_range

    def replace_first(*args: Any) -> None:
        monkeypatch.setattr(loading, "copy_range", read)
        export(Plain(), tmp_path, 1)
        read(*args)

    monkeypatch.setattr(loading, "copy_range", replace_first)
    assert torch.equal(load(Plain(), tmp_path, 1)["last.bias"], model.last.bias.half().float())


def test_read_error_on_one_rank_is_raised_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks raise, and the error says that weights have changed."""
    model = filled(Plain)
    export(model, tmp_path, 1)
    read = loading.copy_range

    def fail(*args: Any) -> None:
        if threading.current_thread().name == "rank 1":
            raise OSError("the disk is gone")
        read(*args)

    monkeypatch.setattr(loading, "copy_range", fail)
    for error in errors_of_load(model, tmp_path):
        assert "the model holds some of its weights now: load again" in error
        assert "rank 1: OSError: the disk is gone" in error
