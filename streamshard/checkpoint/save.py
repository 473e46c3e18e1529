"""`save_checkpoint`: write a training run to disk.

collect -> copy to the host, if training goes on meanwhile -> make a partial directory (rank 0) ->
write and fsync one file (every rank) -> publish by renaming (rank 0)
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from streamshard.checkpoint.background import (
    Saving,
    background_ranks,
    copy_to_host,
    finish_running,
    run_in_background,
)
from streamshard.checkpoint.directory import (
    Partial,
    checkpoint_name,
    next_number,
    publish_checkpoint,
    write_together,
)
from streamshard.checkpoint.disk_layout import Piece
from streamshard.checkpoint.manifest import Manifest, TensorRecord, join_records
from streamshard.checkpoint.run_parts import Models, Optimizers, Parts, collect, name_parts
from streamshard.checkpoint.safetensors_file import FileRecord, TensorSpec, lay_out, write_file
from streamshard.comm.objects import RankGroup, describe, gather_from_all_ranks, run_on_all_ranks
from streamshard.config import __version__, parse_path
from streamshard.errors import ConfigError, RankMismatchError, StreamShardError, log, warn_user
from streamshard.unit.sharded_parameter import is_unreduced


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    keep: int | None = None,
    step: int | None = None,
    wait: bool = True,
) -> Saving:
    """Save the run as a new checkpoint in `directory`. Call it on every rank, between steps.

    A checkpoint holds main weights, buffers, the optimizer's state, random states of every rank, and everything else
    that you pass. Each rank writes a file of its own, so nothing is gathered. The files are safetensors, the manifest
    is JSON with checksums of each file; there is no pickle and no code. A checkpoint is complete or absent, even if a
    rank is killed at any time.

    Gradients are not saved: save after ``optimizer.step()``, not between the micro-batches of one step. Inside
    ``no_sync()`` a warning says so.

    Args:
        directory: on storage that all ranks share; holds the checkpoints of one run, side by side. Made if it is not
            there.
        model: made by `StreamShard`, or a dict of several, some of which may be plain modules.
        optimizer: over its parameters, or a dict of several.
        extra: by name, objects with ``state_dict()`` and ``load_state_dict()``, such as a scheduler, a gradient scaler
            or a data loader, and values (numbers, strings, lists, dicts, tensors). Ranks may give different ones; then
            the number of ranks that load has to be the same.
        keep: how many of the newest checkpoints to keep; older ones are deleted once the new one is whole.
        step: the checkpoint's number, as in ``checkpoint-1000``; None is one more than the largest that is there. If
            ``checkpoint-1000`` exists, the new one is called ``checkpoint-1000-2``: nothing is overwritten.
        wait: False: return when everything is copied to host memory; a thread writes the files. See `Saving`.

    Returns:
        The handle, with the checkpoint's path. The call first waits for an earlier save that still runs.

    Raises:
        CheckpointError: on every rank; names the rank, the file and the cause. Nothing is left of the new checkpoint,
            and older ones are untouched. The next call, or the handle's ``wait()``, raises the error of a save in the
            background.
        ConfigError: an argument that cannot work.
        RankMismatchError: `directory`, `keep`, `step`, `wait`, or which models and optimizers there are, differs
            between ranks.
        ShardingError: no model is sharded, or it is called inside a forward or backward.
    """
    began, root = time.perf_counter(), parse_path("directory", directory)
    for name, value, least in (("keep", keep, 1), ("step", step, 0)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigError(f"{name}={value!r}: wanted an integer of at least {least}, or None")
    parts = name_parts("save_checkpoint", model, optimizer, extra, accepts_empty=False)
    number = _agree(root, keep, step, wait, parts)
    if not wait:
        return _save_in_background(root, number, keep, parts)
    path = write_checkpoint(root, number, keep, parts.engine.ranks, *collect(parts))
    log.info("saved %s in %.1f s", path, time.perf_counter() - began)
    return Saving(path)


def _agree(root: Path, keep: int | None, step: int | None, wait: bool, parts: Parts) -> int:
    """The checkpoint's number, where all ranks mean the same one, with the same in it."""
    ranks = parts.engine.ranks
    mine: dict[str, Any] = {"directory": str(root), "keep": keep, "step": step, "wait": bool(wait)}
    mine |= {"models": list(parts.models), "optimizers": list(parts.optimizers)}

    def find() -> tuple[int, dict[str, Any]]:
        finish_running()
        _say_what_is_lost(parts)
        return next_number(root) if step is None and ranks.is_first else step or 0, mine

    found = gather_from_all_ranks(ranks, f"save to {root}", find)
    number, first = found[0]
    if any(theirs != first for _, theirs in found):
        given = "; ".join(f"rank {rank}: {theirs}" for rank, (_, theirs) in enumerate(found) if theirs != first)
        raise RankMismatchError(f"save_checkpoint wants the same on all ranks. Rank 0 gives {first}; {given}")
    return number


def _save_in_background(root: Path, number: int, keep: int | None, parts: Parts) -> Saving:
    """Copy what is saved, and let a thread write the copies."""
    ranks, root = parts.engine.ranks, Path(os.path.abspath(root))  # the process may change its directory meanwhile
    group = background_ranks(ranks)
    state, pieces = collect(parts)
    finish = run_on_all_ranks(ranks, f"save to {root}", lambda: copy_to_host(pieces, parts.engine.streams.device))
    pieces.clear()  # the run's own go as soon as they are copied

    def write() -> Path:
        began = time.perf_counter()
        try:
            path = write_checkpoint(root, number, keep, group, state, finish())
        except StreamShardError:  # on all ranks
            raise
        except BaseException as error:
            group.fail(describe(error))
            raise
        log.info("saved %s in the background in %.1f s", path, time.perf_counter() - began)
        return path

    try:
        return run_in_background(root / checkpoint_name(number), write)
    except BaseException as error:  # other ranks have begun to write, and wait for this one
        group.fail(describe(error))
        raise


def _say_what_is_lost(parts: Parts) -> None:
    """Warn if unreduced gradients wait inside ``no_sync()``. Elsewhere gradients may be those of the last step."""
    for name, (_, engine) in parts.models.items():
        params = [shard.param for shard in engine.param_shards if shard.param.grad is not None]
        if params and (not engine.casts.is_synced or any(map(is_unreduced, params))):
            warn_user(
                f"{name}: a checkpoint has no gradients, and some have been accumulated for the next step (no_sync()): "
                "a run that goes on from it begins that step's micro-batches with none; save after optimizer.step()"
            )


# ------------------------------------------------------------------------------------------------ writing


def write_checkpoint(
    root: Path, number: int, keep: int | None, group: RankGroup, state: Mapping[str, Any], pieces: Sequence[Piece]
) -> Path:
    """Write this rank's file, and let the first rank publish all of them. Collective.

    Args:
        root: the directory of checkpoints.
        number: of the checkpoint.
        keep: how many to keep; None: all.
        group: the ranks.
        state: what is saved beside tensors: JSON, the same on all ranks.
        pieces: this rank's pieces of tensors.

    Returns:
        The checkpoint's path.
    """
    name = checkpoint_name(number)
    file = f"rank-{group.number:05d}-of-{group.total_size:05d}.safetensors"
    data_of = {piece.name: piece.data for piece in pieces}

    def write(partial: Path, _: None) -> tuple[FileRecord, dict[str, TensorRecord]]:
        specs = [TensorSpec(each.name, (each.data.numel(),), each.data.dtype) for each in pieces if each.data.numel()]
        written = write_file(partial, lay_out(file, specs), data_of)
        return written, {piece.name: piece.record(group.number) for piece in pieces}

    def publish(partial: Partial, _: None, written: list[tuple[FileRecord, dict[str, TensorRecord]]]) -> Path:
        saved_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")
        versions = {"streamshard": __version__, "torch": torch.__version__, "saved_at": saved_at}
        files, replicas = tuple(file for file, _ in written), group.total_size // group.world_size
        tensors = join_records(records for _, records in written)
        manifest = Manifest(number, group.total_size, replicas, versions, files, tensors, state)
        return publish_checkpoint(partial, manifest, keep)

    doing = f"save {root / name}"
    return write_together(group, doing, root, name, prepare=lambda _: None, write=write, publish=publish)
