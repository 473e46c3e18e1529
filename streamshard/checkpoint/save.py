"""`save_checkpoint`: write a training run to disk.

collect -> copy to the host, if training goes on meanwhile -> make a partial directory (rank 0) ->
write and fsync one file (every rank) -> publish by renaming (rank 0)
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.checkpoint.background import (
    Saving,
    background_ranks,
    copy_to_host,
    finish_running,
    has_connections,
    run_in_background,
)
from streamshard.checkpoint.directory import (
    Partial,
    checkpoint_name,
    create_partial,
    next_number,
    publish_checkpoint,
    remove_partial,
)
from streamshard.checkpoint.disk_layout import Piece
from streamshard.checkpoint.manifest import Manifest, PieceRecord, TensorRecord
from streamshard.checkpoint.run_parts import Collected, Parts, collect, name_parts
from streamshard.checkpoint.safetensors_file import FileLayout, TensorSpec, lay_out, write_file
from streamshard.comm.objects import RankGroup, describe, gather_from_all_ranks, run_on_all_ranks
from streamshard.config import __version__, parse_path
from streamshard.errors import CheckpointError, ConfigError, RankMismatchError, StreamShardError, log, warn_user
from streamshard.unit.sharded_parameter import is_unreduced

__all__ = ["Models", "Optimizers", "save_checkpoint", "write_checkpoint"]

Models = nn.Module | Mapping[str, nn.Module]
Optimizers = Optimizer | Mapping[str, Optimizer]


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    *,
    step: int | None = None,
    wait: bool = True,
) -> Any:
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
        scheduler: anything with ``state_dict()`` and ``load_state_dict()``, or a dict of several.
        scaler: the same, such as `torch.amp.GradScaler`.
        extra: by name, values (numbers, strings, lists, dicts, tensors) and objects with ``state_dict()``, such as a
            data loader. Ranks may give different ones; then the number of ranks that load has to be the same.
        keep: how many of the newest checkpoints to keep; older ones are deleted once the new one is whole.
        step: the checkpoint's number, as in ``checkpoint-1000``; None is one more than the largest that is there. If
            ``checkpoint-1000`` exists, the new one is called ``checkpoint-1000-2``: nothing is overwritten.
        wait: False: return when everything is copied to host memory; a thread writes the files. See `Saving`.

    Returns:
        The checkpoint's path; with ``wait=False`` a `Saving`. The call first waits for an earlier save that still runs.

    Raises:
        CheckpointError: on every rank; names the rank, the file and the cause. Nothing is left of the new checkpoint,
            and older ones are untouched. The next call, or the handle's ``wait()``, raises the error of a save in the
            background.
        ConfigError: an argument that cannot work.
        RankMismatchError: `directory`, `keep`, `step`, `wait`, or which models and optimizers there are, differs
            between ranks.
        ShardingError: no model is sharded, or it is called inside a forward or backward.
    """
    began = time.perf_counter()
    root = parse_path("directory", directory)
    for name, value, least in (("keep", keep, 1), ("step", step, 0)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigError(f"{name}={value!r}: wanted an integer of at least {least}, or None")
    parts = name_parts("save_checkpoint", model, optimizer, scheduler, scaler, extra, accepts_empty=False)
    ranks = parts.engine.ranks
    number, connects = _agree(root, keep, step, wait, parts)
    if not wait:
        group = background_ranks(ranks, connects=connects)
        return _write_in_background(root, number, keep, parts.engine.streams.device, collect(parts), group)
    path = write_checkpoint(root, number, keep, ranks, collect(parts))
    log.info("saved %s in %.1f s", path, time.perf_counter() - began)
    return path


def _agree(root: Path, keep: int | None, step: int | None, wait: bool, parts: Parts) -> tuple[int, bool]:
    """The checkpoint's number, where all ranks mean the same one, with the same in it.

    Returns:
        The number, and whether a rank has no connections for a save in the background.
    """
    ranks = parts.engine.ranks
    mine: dict[str, Any] = {"directory": str(root), "keep": keep, "step": step, "wait": bool(wait)}
    mine |= {"models": list(parts.models), "optimizers": list(parts.optimizers)}

    def find() -> tuple[int, dict[str, Any], bool]:
        finish_running()
        _say_what_is_lost(parts)
        number = next_number(root) if step is None and ranks.is_first else step or 0
        return number, mine, has_connections(ranks)

    found = gather_from_all_ranks(ranks, f"save to {root}", find)
    number, firsts, _ = found[0]
    for rank, (_, theirs, _) in enumerate(found):
        for name, value in theirs.items():
            if value != firsts[name]:
                raise RankMismatchError(
                    f"save_checkpoint has {name}={firsts[name]!r} on rank 0 and {name}={value!r} on rank {rank}: "
                    "wanted the same on all ranks"
                )
    return number, not all(is_connected for _, _, is_connected in found)


def _write_in_background(
    root: Path, number: int, keep: int | None, device: torch.device, collected: Collected, group: RankGroup
) -> Saving:
    """Copy what is saved, and let a thread do the rest. The thread tells other ranks if this rank cannot copy."""
    root = Path(os.path.abspath(root))  # the process may change its directory meanwhile
    state = collected._replace(pieces=[])  # the run's own go as soon as they are copied

    def write(finish: Callable[[], list[Piece]] | Exception) -> Path:
        began = time.perf_counter()
        try:
            copied = run_on_all_ranks(group, f"save to {root}", lambda: _finish(finish))
            path = write_checkpoint(root, number, keep, group, state._replace(pieces=copied))
        except StreamShardError:  # on all ranks
            raise
        except BaseException as error:
            group.fail(describe(error))
            raise
        log.info("saved %s in the background in %.1f s", path, time.perf_counter() - began)
        return path

    finish: Callable[[], list[Piece]] | Exception
    try:
        try:
            finish = copy_to_host(collected.pieces, device)
        except Exception as error:  # the thread tells all ranks
            finish = error
        return run_in_background(Saving(root / checkpoint_name(number), lambda: write(finish)))
    except BaseException as error:  # other ranks have begun to write, and wait for this one
        group.fail(describe(error))
        raise


def _finish(finish: Callable[[], list[Piece]] | Exception) -> list[Piece]:
    if isinstance(finish, Exception):
        raise finish
    return finish()


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

_Row = tuple[str, tuple[int, ...], str, int, int]  # what ranks tell each other of a piece: see `_rows`


def write_checkpoint(
    root: Path,
    number: int,
    keep: int | None,
    group: RankGroup,
    collected: Collected,
) -> Path:
    """Write this rank's file, and let the first rank publish all of them. Collective.

    Args:
        root: the directory of checkpoints.
        number: of the checkpoint.
        keep: how many to keep; None: all.
        group: the ranks.
        collected: what this rank saves.

    Returns:
        The checkpoint's path.
    """
    doing = f"save {root / checkpoint_name(number)}"
    pieces = {piece.name: piece.data for piece in collected.pieces}
    mine: list[Partial] = []  # the first rank's, which alone deletes and renames it
    layouts: list[FileLayout] = []

    def start() -> tuple[list[_Row], dict[str, Any], Path | None]:
        name = f"rank-{group.number:05d}-of-{group.total_size:05d}.safetensors"
        specs = [TensorSpec(each.name, (each.data.numel(),), each.data.dtype) for each in collected.pieces]
        layouts.append(lay_out(name, [spec for spec in specs if spec.size_bytes]))
        if group.is_first:
            mine.append(create_partial(root, checkpoint_name(number)))
        return _rows(collected.pieces), collected.differing, mine[0].path if mine else None

    try:
        told = gather_from_all_ranks(group, doing, start)
        partial: Any = told[0][2]
        records = gather_from_all_ranks(group, doing, lambda: write_file(partial, layouts[0], pieces.__getitem__))

        def publish() -> Path | None:
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")
            versions = {"streamshard": __version__, "torch": torch.__version__, "saved_at": now}
            by_rank = {tree: {"ranks": [theirs[tree] for _, theirs, _ in told]} for tree in collected.differing}
            state = {**collected.state, "trees": {**collected.state["trees"], **by_rank}}
            tensors, replicas = _tensor_records([rows for rows, _, _ in told]), group.total_size // group.world_size
            manifest = Manifest(number, group.total_size, replicas, versions, tuple(records), tensors, state)
            return publish_checkpoint(mine[0], manifest, keep)

        path: Any = gather_from_all_ranks(group, doing, lambda: publish() if group.is_first else None)[0]
    except BaseException:
        for each in mine:
            remove_partial(each)
        with contextlib.suppress(StreamShardError):  # raises at once if ranks cannot reach each other any more
            run_on_all_ranks(group, doing, lambda: None)  # no rank returns before the directory is gone
        raise
    return Path(path)


def _rows(pieces: Sequence[Piece]) -> list[_Row]:
    """Name, shape and dtype of each tensor, and which elements this rank has."""
    return [
        (piece.name, piece.shape, str(piece.data.dtype).removeprefix("torch."), piece.start, piece.stop)
        for piece in pieces
    ]


def _tensor_records(by_rank: list[list[_Row]]) -> dict[str, TensorRecord]:
    found: dict[str, tuple[tuple[int, ...], str, list[PieceRecord]]] = {}
    for file, rows in enumerate(by_rank):
        for name, shape, dtype, start, stop in rows:
            own = found.setdefault(name, (shape, dtype, []))
            if own[:2] != (shape, dtype):
                raise CheckpointError(
                    f"{name!r} is {own[1]} {list(own[0])} on one rank and {dtype} {list(shape)} on another"
                )
            if start < stop:
                own[2].append(PieceRecord(file, start, stop))
    tensors = {}
    for name, (shape, dtype, pieces) in found.items():
        pieces.sort(key=lambda piece: piece.start)
        ends = [0, *(piece.stop for piece in pieces)]
        if [piece.start for piece in pieces] != ends[:-1] or ends[-1] != math.prod(shape):
            raise CheckpointError(
                f"{name!r}: ranks have the elements {[(p.start, p.stop) for p in pieces]} of {list(shape)}"
            )
        tensors[name] = TensorRecord(shape, dtype, tuple(pieces))
    return tensors
