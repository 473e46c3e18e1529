"""Methods of PEFT's and transformers' models that need whole weights, on sharded ones.

A model of transformers is exported. Adapters, of a PeftModel or of ``add_adapter``, are saved by the model's own
``save_pretrained``, since only PEFT knows what each of its methods saves. The first rank calls it, while whole tensors
lie under the parameters of the adapters. Only these are gathered, unit by unit.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from streamshard.checkpoint.disk_layout import saved_names
from streamshard.checkpoint.export import export_shards
from streamshard.checkpoint.safetensors_file import SUMS_NAME
from streamshard.comm.objects import run_on_all_ranks
from streamshard.engine.engine import Engine
from streamshard.engine.handle import Uncopyable, engine_at_rest, engine_of, handle_of, not_a_layer
from streamshard.errors import CheckpointError, CommunicationError, ShardingError
from streamshard.full import summon
from streamshard.huggingface import is_transformers_model
from streamshard.plan.structure import modules_inside
from streamshard.unit.pieces import holds_pieces, piece_of
from streamshard.unit.shard import ParamShard, SegmentShard
from streamshard.unit.sharded_parameter import be_piece, be_whole, data_of
from streamshard.unit.sharded_tensor import ShardedTensor

__all__ = [
    "adapt_methods",
    "called_on_all_ranks",
    "find_piece",
    "forget_sums",
    "has_adapters",
    "plain_classes",
    "refuse_pieces",
    "save_adapters",
    "save_whole",
]

_BASES = {"base_layer", "original_module", "model", "base_model"}  # children of PEFT's modules that are not its own


def is_peft_model(model: nn.Module) -> bool:
    """Whether `model` is a PeftModel."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def has_adapters(model: nn.Module) -> bool:
    """Whether ``save_pretrained`` saves adapters, and not the model: a PeftModel, or one with ``add_adapter``."""
    return is_peft_model(model) or (is_transformers_model(model) and getattr(model, "_hf_peft_config_loaded", False))


def adapt_methods(model: nn.Module) -> None:
    """Let methods that need whole weights have them: the classes of a sharded model's modules are ours by now."""
    kind: Any
    for module in modules_inside(model):
        if is_transformers_model(module):
            kind = type(module)
            _replace(kind, _save_model)
            kind.resize_token_embeddings = _resize
    if not is_peft_model(model):
        return
    kind = type(model)
    _replace(kind, _save_pretrained)
    for name, does in _NEED_WHOLE.items():
        if hasattr(model, name):  # not where prompts are learnt
            setattr(kind, name, functools.partialmethod(does, name))


def save_adapters(
    model: nn.Module, engine: Engine, directory: str | os.PathLike[str], dtype: torch.dtype | None = None, **given: Any
) -> list[str]:
    """What ``save_pretrained`` of an unsharded model with adapters writes. Collective; the first rank writes.

    Args:
        model: a sharded model that `has_adapters`.
        engine: its engine.
        directory: where to. Files there are replaced one by one when all are complete, the configs last.
        dtype: of floating-point weights; None is what each parameter had before sharding.
        **given: arguments of its ``save_pretrained``, the same on every rank.

    Returns:
        Names of the files with weights.

    Raises:
        CheckpointError: on every rank; names the rank on which it went wrong.
    """
    ranks = engine.ranks
    if engine.is_whole:
        whole = {}
    else:
        wanted = run_on_all_ranks(ranks, "find what PEFT saves", lambda: _wanted(model, engine.param_shards, given))
        whole = _gather(engine, wanted, dtype)

    own: Any = super(type(model), model)  # the model's method, which ours hides
    save = functools.partial(own.save_pretrained, **given)
    made = _save_on_first(model, engine, directory, f"save adapters to {directory}", save, whole)
    return [str(path) for path in made if path.name.startswith("adapter_model.")]


def save_whole(
    model: nn.Module, engine: Engine, directory: str | os.PathLike[str], save: Callable[[str], object]
) -> None:
    """Let the first rank call `save` while whole weights are under its parameters, in CPU memory. Collective.

    Args:
        model: sharded; it computes as an unsharded model while `save` runs.
        engine: its engine.
        directory: where to. Files there are replaced one by one when `save` has written all of them.
        save: is called with another directory, to write them to.

    Raises:
        CheckpointError: on every rank; names the rank on which it went wrong.
    """
    whole = {} if engine.is_whole else _gather(engine, engine.param_shards, None)
    _save_on_first(model, engine, directory, f"save to {directory}", save, whole)


def refuse_pieces(state_dict: Mapping[str, Any], what: str) -> None:
    """Raise if `state_dict` holds pieces, on this rank: nothing is sent.

    Args:
        state_dict: is about to be saved by one rank.
        what: would save it.

    Raises:
        CheckpointError: names the first tensor that is a piece.
    """
    if (name := find_piece(state_dict)) is not None:
        raise CheckpointError(
            f"{what}: {name!r} in the state dict is one rank's piece, as model.state_dict() gives it. Let all ranks "
            "call accelerator.get_state_dict(model) or model.full_state_dict() and give what rank 0 gets, or let all "
            "ranks save without state_dict: trainer.save_model(directory), model.save_pretrained(directory)"
        )


def find_piece(state_dict: Mapping[str, Any]) -> str | None:
    """The name of the first tensor in `state_dict` that is one rank's piece; None if all are whole."""
    for name, value in state_dict.items():
        if isinstance(value, ShardedTensor) or (isinstance(value, torch.Tensor) and holds_pieces(value)):
            return name
    return None


@contextlib.contextmanager
def called_on_all_ranks(method: str) -> Iterator[None]:
    """Around a collective save: if the other ranks do not come, the error says that all ranks have to call `method`."""
    try:
        yield
    except CommunicationError as error:
        raise CommunicationError(
            f"{method} of a sharded model could not go on. All ranks have to call it, so call it outside of `if "
            "trainer.is_world_process_zero()`, `if accelerator.is_main_process` and the like: rank 0 alone writes what "
            f"is written once. Earlier saves are untouched. {error}"
        ) from error


def forget_sums(directory: Path) -> None:
    """Remove the checksums of an earlier export from `directory`: something else is about to write weights there."""
    (directory / SUMS_NAME).unlink(missing_ok=True)


# -- methods of models --------------------------------------------------------------------------------------------


def _replace(kind: Any, save: Callable[..., None]) -> None:
    kind.save_pretrained, kind.push_to_hub = save, _push


def _resize(
    self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *args: Any, **given: Any
) -> nn.Module:
    """transformers' ``resize_token_embeddings``, which makes new parameters; as ever where no row is added or removed.

    Raises:
        ShardingError: the embedding has another number of rows.
    """
    rows = self.get_input_embeddings().weight.shape[0]
    if pad_to_multiple_of is not None or new_num_tokens not in (None, rows):
        raise ShardingError(
            f"resize_token_embeddings of {type(self).__name__}, which is sharded by StreamShard: the new embedding and "
            "head would be this rank's alone. Resize before the model is sharded, that is before StreamShard(model), "
            "accelerator.prepare(model) or trainer.train()"
        )
    own: nn.Module = super(type(self), self).resize_token_embeddings(new_num_tokens, None, *args, **given)
    return own


def _save_model(self: Any, save_directory: str | os.PathLike[str], *args: Any, **given: Any) -> None:
    """transformers' ``save_pretrained``, called on all ranks: `export_safetensors`.

    With ``state_dict=``, and where parameters are whole, it is transformers' own, on whatever rank.

    Raises:
        CheckpointError: as for the export; an argument that only transformers' own can do; pieces in `state_dict`.
    """
    own = super(type(self), self).save_pretrained
    known = inspect.signature(own).parameters
    given |= dict(zip(list(known)[1:], args, strict=False))
    engine = engine_of(self)
    handle = handle_of(self)
    is_part = engine.is_alone and handle is not None and not handle.is_root  # such as what PEFT's merging leaves
    state_dict = given.get("state_dict")
    if state_dict is not None or engine.is_whole or is_part:
        refuse_pieces(state_dict or {}, "save_pretrained(state_dict=..)")
        if given.get("is_main_process", True):
            forget_sums(Path(save_directory))
        own(save_directory, **given)
        return
    engine = engine_at_rest(not_a_layer(self), "save_pretrained")
    given.pop("is_main_process", None)
    if has_adapters(self):
        with called_on_all_ranks("save_pretrained()"):
            save_adapters(self, engine, save_directory, **given)
        return
    max_shard_size = given.pop("max_shard_size", known["max_shard_size"].default)
    if others := [name for name, value in given.items() if name in known and value != known[name].default]:
        raise CheckpointError(
            f"save_pretrained({others[0]}={given[others[0]]!r}) of a sharded model: transformers alone does that, of "
            "whole weights. Call weights = model.full_state_dict() on all ranks, and on rank 0 "
            f"model.save_pretrained(directory, state_dict=weights, {others[0]}=..)"
        )
    with called_on_all_ranks("save_pretrained()"):
        export_shards(self, engine.param_shards, engine.ranks, save_directory, None, max_shard_size)


def _push(self: Any, repo_id: str, *_: Any, **__: Any) -> None:
    """``push_to_hub``, which saves to a directory of each rank's own."""
    raise CheckpointError(
        "push_to_hub() of a sharded model: call model.save_pretrained(directory) on all ranks, and on rank 0 "
        f"huggingface_hub.upload_folder(repo_id={repo_id!r}, folder_path=directory)"
    )


def _save_pretrained(self: Any, save_directory: str, safe_serialization: bool = True, *args: Any, **given: Any) -> None:
    """PEFT's ``save_pretrained``, called on all ranks: the first writes, and only adapters are gathered.

    With ``state_dict=`` it is PEFT's own, on whatever rank: that has whole weights.
    """
    names = ("selected_adapters", "save_embedding_layers", "is_main_process")  # the order of PEFT's arguments
    given |= {"safe_serialization": safe_serialization, **dict(zip(names, args, strict=False))}
    if given.get("state_dict") is not None:
        refuse_pieces(given["state_dict"], "save_pretrained(state_dict=..)")
        super(type(self), self).save_pretrained(save_directory, **given)
        return
    engine = engine_at_rest(self, "save_pretrained", accepts_whole=True)
    given.pop("is_main_process", None)
    with called_on_all_ranks("save_pretrained()"):
        save_adapters(self, engine, save_directory, **given)


def _change_whole(self: Any, name: str, *args: Any, **given: Any) -> Any:
    """``merge_adapter`` and ``unmerge_adapter``, called on all ranks: weights are whole meanwhile."""
    engine = engine_at_rest(self, name, accepts_whole=True)
    with summon(engine, writeback=not engine.is_whole, with_grads=False):
        return getattr(self.base_model, name)(*args, **given)


def _unload(self: Any, name: str, *args: Any, **given: Any) -> Any:
    """``merge_and_unload`` and ``unload``: what they leave is another model, which is not sharded as this one is."""
    engine = engine_of(self)
    if not (engine.is_whole or engine.is_alone):
        raise ShardingError(
            f"{name}() makes another model of this one, of whose weights each rank has pieces. For its files: with "
            f"model.summon_full_params(): merged = model.{name}(), and inside, on rank 0, merged.save_pretrained(..); "
            "the sharded model is of no use afterwards. To go on with merged weights: model.merge_adapter()"
        )
    return getattr(self.base_model, name)(*args, **given)


_NEED_WHOLE = {
    "merge_adapter": _change_whole,
    "unmerge_adapter": _change_whole,
    "merge_and_unload": _unload,
    "unload": _unload,
}


# -- what is needed -----------------------------------------------------------------------------------------------


def _wanted(model: Any, shards: Sequence[ParamShard], given: dict[str, Any]) -> list[ParamShard]:
    """What PEFT reads to save adapters: its own parameters, those that train, and embeddings that it saves as well."""
    if given.get("path_initial_model_for_weight_conversion") is not None:
        raise CheckpointError(
            "path_initial_model_for_weight_conversion loads a second adapter to subtract it, which a sharded model has "
            "no room for: save the adapter, and convert it without sharding"
        )
    own = set(_own_params(model))
    names = saved_names(model, shards)
    metas = {source: torch.empty(shard.layout.shape, device="meta") for shard in shards for source in (shard.name,)}
    # Buffers too: PEFT looks there for the projections that VeRA's adapters share.
    state = {name: metas[source] if source in metas else model.get_buffer(source) for name, source in names.items()}
    save = importlib.import_module("peft").get_peft_model_state_dict
    used: set[int] = set()
    for adapter in given.get("selected_adapters") or list(model.peft_config):
        if adapter in model.peft_config and not model.peft_config[adapter].is_prompt_learning:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # heard when it saves
                embeddings = given.get("save_embedding_layers", "auto")
                saved = save(model, dict(state), adapter_name=adapter, save_embedding_layers=embeddings)
            used.update(id(tensor) for tensor in saved.values())
    return [
        shard for shard in shards if shard.param.requires_grad or shard.param in own or id(metas[shard.name]) in used
    ]


def _own_params(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters of PEFT's modules in `module`, without those of what they have adapted."""
    is_own = any(each.__module__.partition(".")[0] == "peft" for each in type(module).__mro__)
    for name, child in module._modules.items():
        if child is None:
            continue
        if is_own and name not in _BASES:
            for inner in modules_inside(child):
                yield from (param for param in inner._parameters.values() if param is not None)
        else:
            yield from _own_params(child)
    if is_own:
        yield from (param for param in module._parameters.values() if param is not None)


def _gather(engine: Engine, wanted: Sequence[ParamShard], dtype: torch.dtype | None) -> dict[ParamShard, torch.Tensor]:
    """The whole of each, in its own dtype or `dtype`, in CPU memory of the first rank. Collective."""
    names = {shard.name for shard in wanted}
    whole: dict[ParamShard, torch.Tensor] = {}
    for segment in engine.segments:
        shards = [shard for shard in segment.params if shard.name in names]
        if shards:
            for shard, tensor in zip(shards, _gather_some(engine, segment, shards), strict=True):
                whole[shard] = tensor.to("cpu", dtype or shard.dtype, copy=True).view(shard.layout.shape)
    return whole if engine.ranks.is_first else {}


def _gather_some(engine: Engine, segment: SegmentShard, shards: Sequence[ParamShard]) -> list[torch.Tensor]:
    """[numel] main_dtype of each, on this device; of its segment nothing else is sent. Collective."""
    mine = torch.cat([shard.main.view(-1) for shard in shards])
    if engine.is_alone:
        return list(mine.split([shard.layout.numel for shard in shards]))
    layout = segment.layout
    ranges = [[layout.local_range(shard.layout, rank) for shard in shards] for rank in range(layout.world_size)]
    width = max(sum(each.numel for each in theirs) for theirs in ranges)
    flat = mine.new_zeros(width)
    flat[: mine.numel()] = mine
    full = mine.new_empty(width * layout.world_size)
    engine.ranks.transport.gather_now(flat, full, segment.tag)
    whole = [mine.new_empty(shard.layout.numel) for shard in shards]
    for rank, theirs in enumerate(ranges):
        place = rank * width
        for tensor, each in zip(whole, theirs, strict=True):
            tensor[each.start : each.stop] = full[place : place + each.numel]
            place += each.numel
    return whole


# -- writing ------------------------------------------------------------------------------------------------------


def _save_on_first(
    model: nn.Module,
    engine: Engine,
    directory: str | os.PathLike[str],
    doing: str,
    save: Callable[[str], object],
    whole: dict[ParamShard, torch.Tensor],
) -> list[Path]:
    """Let the first rank write with these tensors under its parameters. Collective.

    Returns:
        The files, on every rank.
    """

    def write() -> list[Path]:
        if not engine.ranks.is_first:
            return []
        with _under_params(model, engine, whole):
            return _write(Path(directory), save)

    made: list[Path] = engine.ranks.of_first(run_on_all_ranks(engine.ranks, doing, write))
    return made


@contextlib.contextmanager
def _under_params(model: nn.Module, engine: Engine, whole: dict[ParamShard, torch.Tensor]) -> Iterator[None]:
    """Inside, these tensors lie under their parameters on this rank, and modules compute with what they hold.

    Prompt encoders compute when they are saved, and so do models that write an example into their model card.
    """
    before = [(shard.param, data_of(shard.param), piece_of(shard.param)) for shard in whole]
    was_whole = engine.is_whole
    try:
        engine.set_whole(True)
        for shard, tensor in whole.items():
            be_whole(shard.param)
            shard.param.data = tensor
        with plain_classes(model):
            yield
    finally:
        engine.set_whole(was_whole)
        for param, data, piece in before:
            param.data = data
            if piece is not None:
                be_piece(param, piece)


@contextlib.contextmanager
def plain_classes(model: nn.Module) -> Iterator[None]:
    """Inside, modules of a sharded model have their own classes: calls gather nothing, and run none of our methods."""
    kinds = [(module, type(module)) for module in modules_inside(model) if isinstance(module, Uncopyable)]
    try:
        for module, kind in kinds:
            plain = next(each for each in kind.__mro__ if not issubclass(each, Uncopyable))
            object.__setattr__(module, "__class__", plain)
        yield
    finally:
        for module, kind in kinds:
            object.__setattr__(module, "__class__", kind)


_LAST = ("adapter_config.json", "modules.json")  # what says that the other files are there


def _write(directory: Path, save: Callable[[str], object]) -> list[Path]:
    """Let `save` fill a directory beside, and put what it has made into `directory`, the configs last."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".partial", dir=directory.parent))
    try:
        if (directory / "README.md").exists():  # which PEFT adds to
            shutil.copy(directory / "README.md", staging)
        save(str(staging))
        made = sorted(path.relative_to(staging) for path in staging.rglob("*") if path.is_file())
        if any(path.name.startswith("model") for path in made):
            forget_sums(directory)
        for path in sorted(made, key=lambda path: path.name in _LAST):
            with open(staging / path, "rb") as file:
                os.fsync(file.fileno())
            (directory / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(staging / path, directory / path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return made
