"""`save_checkpoint` and `load_checkpoint`: a training run to disk, and back at any number of ranks.

collect -> copy to the host, if training goes on meanwhile -> write, see `save_job.py`
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.checkpoint.directory import (
    checkpoint_name,
    find_checkpoint,
    latest,
    next_number,
    open_checkpoint,
    whole_checkpoints,
)
from streamshard.checkpoint.manifest import CheckpointFiles
from streamshard.checkpoint.restore import Plan, plan_restore
from streamshard.checkpoint.run_parts import Collected, Parts, collect, name_parts
from streamshard.checkpoint.save import (
    BackgroundRanks,
    HostCopies,
    Saving,
    background_ranks,
    finish_running,
    has_connections,
    plan_job,
    run_in_background,
)
from streamshard.comm.objects import describe, gather_from_all_ranks, run_on_all_ranks
from streamshard.comm.ranks import Ranks
from streamshard.config import parse_path
from streamshard.engine.engine import Engine
from streamshard.errors import CheckpointError, ConfigError, RankMismatchError, StreamShardError, warn_user
from streamshard.initialise import compute_buffers
from streamshard.log import log, progress
from streamshard.unit.sharded_parameter import is_unreduced

__all__ = ["Loaded", "load_checkpoint", "save_checkpoint"]

Models = nn.Module | Mapping[str, nn.Module]
Optimizers = Optimizer | Mapping[str, Optimizer]


class Loaded(dict[str, Any]):
    """The values of ``extra`` that were saved, by key.

    Attributes:
        path: the checkpoint.
        left_out: what it holds and nobody asked for or, with ``strict=False``, what did not fit; lines for people.
    """

    def __init__(self, values: Mapping[str, Any], path: Path, left_out: list[str]) -> None:
        super().__init__(values)
        self.path = path
        self.left_out = left_out


@overload
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
    wait: Literal[True] = True,
) -> Path: ...
@overload
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
    wait: Literal[False],
) -> Saving: ...


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
) -> Path | Saving:
    """Save all that a run needs to go on, as a new checkpoint in `directory`. Call it on every rank, between steps.

    Main weights, buffers, the optimizer's state, random states of every rank, and whatever else is given. Each rank
    writes what it owns into a file of its own, so nothing is gathered; on CPUs nothing is copied either. The files are
    safetensors, the rest is JSON with a checksum of each file; there is no pickle and no code. A checkpoint is there
    whole or not at all, whenever a rank is killed.

    Gradients are not saved. Between the micro-batches of one step, those so far are lost to a run that goes on from
    there: save after ``optimizer.step()``. Inside ``no_sync()`` it warns.

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
        step: the checkpoint's number, as in ``checkpoint-1000``; None is one more than the largest that is there. One
            that has this number already is replaced once the new one is whole.
        wait: False: return once weights and values are copied to host memory, which is kept for the next time. The
            optimizer's moments are copied until its next ``step()``, which waits for it; the rest happens in the
            background. See `Saving`.

    Returns:
        The checkpoint's path; with ``wait=False`` a handle. A save that is running is waited for first.

    Raises:
        CheckpointError: on every rank; names the rank, the file and the cause. Nothing is left of the new checkpoint
            then, and older ones are untouched. What went wrong in the background is raised by the next call, or by
            the handle's ``wait()``.
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
    group = None if wait else background_ranks(ranks, connects=connects)
    collected = collect(parts)
    if group is not None:
        return _write_in_background(root, number, keep, parts.engine, collected, group, began)
    path = plan_job(root, number, keep, ranks, collected).write(ranks)
    log.info("saved %s in %.1f s", path, time.perf_counter() - began)
    return path


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: Models,
    optimizer: Optimizers | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    extra: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
) -> Loaded:
    """Go on where `save_checkpoint` was called: on any number of ranks, with any units, slots and meshes.

    On as many ranks as have saved, what follows is what would have followed, to the bit. Every file is verified before
    anything changes; each rank reads what it owns.

    Args:
        directory: a checkpoint, or a directory of them, of which the latest that is whole is taken. If another process
            deletes that one meanwhile (``keep=``), the one that is the latest then is taken.
        model: as given when it was saved; so are `optimizer`, `scheduler` and `scaler`, of which those that are left
            out stay as they are.
        extra: objects that were saved under the same keys, whose ``load_state_dict`` is called. Values need not be
            given.
        strict: whatever was saved and whatever is there have to fit. False: load what fits, name for name, and list
            the rest.

    Returns:
        What was saved as `extra`, by key, and what was left out.

    Raises:
        CheckpointError: on every rank, before any weight changes; names the file that is damaged or missing and the
            newest intact checkpoint, or all parameters that do not fit.
        ConfigError: an argument that cannot work.
        ShardingError: no model is sharded, or it is called inside a forward or backward.
    """
    began = time.perf_counter()
    root = parse_path("directory", directory)
    parts = name_parts("load_checkpoint", model, optimizer, scheduler, scaler, extra, accepts_empty=True)
    ranks = parts.engine.ranks
    with contextlib.ExitStack() as opened:
        files, plan = _open(root, parts, opened, strict=strict)
        path = files.root
        run_on_all_ranks(ranks, f"load {path}", lambda: _load_objects(plan))
        # From here on only the storage itself can fail.
        half = f"finish loading {path}, and half of it is loaded now: load again before going on"
        run_on_all_ranks(ranks, half, lambda: _read(plan, files, shows=ranks.is_first))
    for name, (each, engine) in parts.models.items():
        engine.fill(plan.filled.get(name, ()))
        compute_buffers(engine, each)
    log.info("loaded %s in %.1f s", path, time.perf_counter() - began)
    for line in plan.left_out:
        log.info("%s: left out: %s", path, line)
    return Loaded(plan.values, path, plan.left_out)


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
    root: Path,
    number: int,
    keep: int | None,
    engine: Engine,
    collected: Collected,
    group: BackgroundRanks,
    began: float,
) -> Saving:
    """Copy what is saved, and let a thread do the rest. Other ranks hear of what cannot be copied from that thread."""
    root = Path(os.path.abspath(root))  # where the process is by then may be elsewhere
    state = collected._replace(pieces=[])  # those of the run go as soon as they are copied

    def write(copies: HostCopies) -> None:
        try:
            copied = run_on_all_ranks(group, f"save to {root}", copies.finish)
            job = plan_job(root, number, keep, group, state._replace(pieces=copied))
            path = job.write(group, check=copies.check)
        except StreamShardError:  # on all ranks
            raise
        except BaseException as error:
            group.fail(describe(error))
            raise
        log.info("saved %s in the background, %.1f s after the call", path, time.perf_counter() - began)

    try:
        copies = HostCopies(engine, collected.pieces, collected.moments)
        return run_in_background(Saving(root / checkpoint_name(number), copies, lambda: write(copies)))
    except BaseException as error:  # other ranks have begun to write, and wait for this one
        group.fail(describe(error))
        raise


def _say_what_is_lost(parts: Parts) -> None:
    """Gradients that are certain to wait for more: elsewhere they may be those that a step has used."""
    for name, (_, engine) in parts.models.items():
        params = [shard.param for shard in engine.param_shards if shard.param.grad is not None]
        if params and (not engine.casts.is_synced or any(map(is_unreduced, params))):
            warn_user(
                f"{name}: a checkpoint has no gradients, and some have been accumulated for the next step (no_sync()): "
                "a run that goes on from it begins that step's micro-batches with none; save after optimizer.step()"
            )


def _open(root: Path, parts: Parts, opened: contextlib.ExitStack, *, strict: bool) -> tuple[CheckpointFiles, Plan]:
    """The checkpoint that all ranks load, verified and compared with what is there. Collective.

    Of a directory of checkpoints the latest is taken. If that is deleted meanwhile, because another process saves with
    ``keep=1``, the one that is the latest then is taken.
    """
    ranks = parts.engine.ranks

    def find() -> Path:
        finish_running()
        return find_checkpoint(root) if ranks.is_first else Path()

    path = gather_from_all_ranks(ranks, f"load {root}", find)[0]
    while True:
        doing, is_verified = f"load {path}", False
        try:
            files = run_on_all_ranks(ranks, doing, lambda: opened.enter_context(open_checkpoint(path)))  # noqa: B023
            manifest = files.manifest
            if not ranks.are_equal(repr((manifest.files, manifest.versions))):
                raise CheckpointError(
                    f"could not {doing}: ranks see different checkpoints there; it has to be on shared storage"
                )
            files.verify_together(ranks)
            is_verified = True
            plan = run_on_all_ranks(
                ranks,
                doing,
                lambda: plan_restore(parts, manifest, files.read_whole, strict=strict),  # noqa: B023
            )
            run_on_all_ranks(ranks, doing, lambda: files.open_for(plan.reads))  # noqa: B023
            return files, plan
        except CheckpointError as error:  # the same on all ranks
            opened.close()
            again = gather_from_all_ranks(ranks, doing, lambda: _look_again(root, path, ranks))[0]  # noqa: B023
            if again.newest is None:
                others = () if is_verified else again.others
                intact = next((other for other in others if _is_intact(other, ranks)), None)
                advice = "" if intact is None else f". The newest intact checkpoint beside it is {intact}"
                raise CheckpointError(f"{error}{advice}") from error
            path = again.newest


class _Again(NamedTuple):
    """What is there once a checkpoint could not be loaded.

    Attributes:
        newest: the latest checkpoint, if that is another one now.
        others: those beside it, the newest first.
    """

    newest: Path | None
    others: list[Path]


def _look_again(root: Path, path: Path, ranks: Ranks) -> _Again:
    """On the first rank."""
    if not ranks.is_first:
        return _Again(None, [])
    newest = latest(root) if path != root else path
    return _Again(newest if newest != path else None, [each for each in whole_checkpoints(path.parent) if each != path])


def _is_intact(path: Path, ranks: Ranks) -> bool:
    """Whether a checkpoint's files are what their checksums say. Collective."""
    with (
        contextlib.suppress(CheckpointError),
        run_on_all_ranks(ranks, f"verify {path}", lambda: open_checkpoint(path)) as files,
    ):
        files.verify_together(ranks)
        return True
    return False


def _load_objects(plan: Plan) -> None:
    for name, load in plan.loads.items():
        try:
            load()
        except Exception as error:
            raise CheckpointError(f"{name} does not take its state: {type(error).__name__}: {error}") from error


def _read(plan: Plan, files: CheckpointFiles, *, shows: bool) -> None:
    total = sum(read.target.nbytes for read in plan.reads)
    with torch.no_grad(), progress(f"loading {files.root.name}", total, shows=shows) as advance:
        for each in plan.reads:
            files.read_tensor(each)
            advance(each.target.nbytes)
    files.check_unchanged()
    for finish in plan.finish:
        finish()
