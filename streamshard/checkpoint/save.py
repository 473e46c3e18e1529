"""`save_checkpoint`: write a training run to disk, optionally in the background.

    collect -> copy to the host, if training goes on meanwhile -> make a partial directory (rank 0) ->
    write and fsync one file (every rank) -> publish by renaming (rank 0)

Weights and moments are saved by the parameter's name and by ranges of elements. So a checkpoint does not depend on
units, slots or the number of ranks. All other values are trees (see `json_codec.encode`): one tree if all ranks have
equal values, else one per rank.

This module owns the process groups of saves in the background, `saving.py` the threads.
"""

from __future__ import annotations

import datetime
import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from streamshard import __version__
from streamshard.checkpoint.directory import next_number, publish_checkpoint, write_together
from streamshard.checkpoint.disk_layout import TensorPiece, local_pieces
from streamshard.checkpoint.json_codec import encode
from streamshard.checkpoint.manifest import Manifest, TensorRecord, join_records, name_of_rank
from streamshard.checkpoint.optimizer_state import (
    LocalState,
    join_states,
    local_state,
    of_replica,
    refuse_other_options,
    settle,
)
from streamshard.checkpoint.run_parts import Models, Optimizers, RunParts, facts_of, has_state
from streamshard.checkpoint.safetensors_file import FileRecord, digest_of, lay_out, write_file
from streamshard.checkpoint.saving import Saving, finish_running, start_saving
from streamshard.checkpoint.storage import Location, parse_location, storage_of
from streamshard.comm.communicator import Communicator
from streamshard.comm.host_groups import make_host_group, state_of, weak
from streamshard.comm.ranks import RankGroup, raise_if, refuse_differences, run_on_all_ranks, run_on_first
from streamshard.device import has_streams, module_of
from streamshard.errors import CheckpointError, CommunicationError, ConfigError, RankMismatchError, log, warn_user
from streamshard.full import warn_of_different_copies
from streamshard.guards.sharded_parameter import is_unreduced
from streamshard.guards.sharded_tensor import piece_of

# The longest wait of a rank that has written: for the slowest disk, and for the first rank to publish.
WRITTEN_WITHIN = datetime.timedelta(minutes=30)
# torch rounds the size of pinned memory up to a power of two. One buffer for all pieces could take twice their bytes.
_BUFFER_BYTES = 1 << 28  # of one buffer; a larger piece gets a buffer of its own
_ALIGN_BYTES = 64  # of a view in any dtype


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

    A checkpoint holds main weights, buffers, the optimizer's state, the random states of every rank, and `extra`. Each
    rank writes its own safetensors file, so nothing is gathered. The manifest is JSON, with checksums of each file.
    There is no pickle and no code. A checkpoint is complete or absent, even if a rank is killed at any time.

    Gradients are not saved: save after ``optimizer.step()``, not between the micro-batches of one step. The call warns
    if gradients wait inside ``no_sync()``. It first waits for an earlier save in the background.

    Args:
        directory: the checkpoints of one run, on storage that all ranks share. Made if it does not exist. Or a URL of
            object storage that fsspec knows, such as ``s3://bucket/run``.
        model: made by `StreamShard`, or a dict of such models.
        optimizer: an optimizer of the model's parameters, or a dict of optimizers.
        extra: by name, objects with ``state_dict()`` and ``load_state_dict()``, such as a scheduler, a gradient scaler,
            a data loader or a plain module, and values (numbers, strings, lists, dicts, tensors, arrays). All ranks
            pass the same names. Their objects and values may differ: see `load_checkpoint`.
        keep: number of checkpoints to keep. Older ones are deleted when the new one is complete. None: keep all.
        step: the checkpoint's number, as in ``checkpoint-1000``. None: one more than the largest in `directory`. If
            ``checkpoint-1000`` exists, the new one is called ``checkpoint-1000-2``: nothing is overwritten. On object
            storage a random token follows, as in ``checkpoint-1000.89abcdef``.
        wait: False: return when the copies to host memory have started. A thread writes the files. See `Saving`.

    Returns:
        A handle, with the checkpoint's path.

    Raises:
        CheckpointError: on every rank; names the rank, the file and the cause. The new checkpoint is removed, older
            ones are unchanged. For a save in the background, the next call or the handle's ``wait()`` raises.
        ConfigError: an argument has a wrong type or value.
        RankMismatchError: `directory`, `keep`, `step`, `wait`, the names of models, optimizers or objects, or an
            optimizer's options or step counts differ between ranks. Nothing is written.
        ShardingError: a model is not sharded, or the call is inside a forward or backward.
    """
    root = parse_location("directory", directory, "save_checkpoint(directory, model, optimizer)")
    for name, value, least in (("keep", keep, 1), ("step", step, 0)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            raise ConfigError(f"{name}={value!r}: wanted an integer of at least {least}, or None")
    parts = RunParts.of("save_checkpoint", model, optimizer, extra, accepts_empty=False)
    number = _agree(root, keep, step, wait, parts)
    if not wait:
        return _save_in_background(root, number, keep, parts)
    state, pieces = collect(parts)
    return Saving(write_checkpoint(root, number, keep, parts.engine.ranks, state, lambda: pieces))


def _agree(root: Location, keep: int | None, step: int | None, wait: bool, parts: RunParts) -> int:
    """The checkpoint's number. Raises unless all ranks pass the same arguments, models and optimizers."""
    mine: dict[str, Any] = {"directory": str(root), "keep": keep, "step": step, "wait": bool(wait)}
    mine |= {"models": list(parts.models), "optimizers": list(parts.optimizers), "objects": sorted(parts.trees)}

    def begin() -> dict[str, Any]:
        storage_of(root)  # raises if a package is missing
        finish_running()
        _say_what_is_lost(parts)
        return mine

    ranks = parts.engine.ranks
    refuse_differences("save_checkpoint", ranks.gather_results("begin a save", begin, at=f"to {root}"))
    for _, engine in parts.models.values():
        warn_of_different_copies(engine)
    if step is not None:
        return step
    return run_on_first(ranks, "number a save", lambda: next_number(root), at=f"to {root}")


def _say_what_is_lost(parts: RunParts) -> None:
    """Warn if unreduced gradients wait inside ``no_sync()``. Other gradients may be left over from the last step."""
    for name, (_, engine) in parts.models.items():
        params = [param.sharded for param in engine.params if param.sharded.grad is not None]
        if engine.ranks.is_first and params and (not engine.is_synced or any(map(is_unreduced, params))):
            warn_user(
                f"{name}: a checkpoint has no gradients, and some have been accumulated for the next step (no_sync()): "
                "a run that continues from it loses them. Save after optimizer.step()"
            )


# ------------------------------------------------------------------------------------------------ collecting


def collect(parts: RunParts) -> tuple[dict[str, Any], list[TensorPiece]]:
    """Collect everything to save. Collective.

    Returns:
        JSON, complete on the first rank, and this rank's pieces of tensors: its own memory, not copies.

    Raises:
        CheckpointError: on every rank; names a part that cannot be saved.
        RankMismatchError: on every rank; names an option of an optimizer that differs between ranks.
    """
    ranks = parts.engine.ranks
    saved: dict[str, dict[str, Any]] = {"models": {}, "optimizers": {}, "trees": {}}
    pieces: list[TensorPiece] = []
    states, values = dict[str, LocalState](), dict[str, Any]()
    trees: dict[str, tuple[Any, dict[str, torch.Tensor]]] = {}
    for optimizer in parts.optimizers.values():
        settle(optimizer, ranks)  # not in `collect_here`, which may raise on one rank: this is collective

    def collect_here() -> dict[str, tuple[str, bool]]:
        """By name of a tree: a digest, pieces left out, and whether it has pieces."""
        found = {}
        for name, (model, engine) in parts.models.items():
            saved["models"][name] = facts_of(model, engine)
            own = local_pieces(model, engine, buffers=engine.ranks.is_first).values()
            pieces.extend(of_replica((piece._replace(name=f"{name}/{piece.name}") for piece in own), engine))
        for name, optimizer in parts.optimizers.items():
            states[name] = local_state(name, optimizer, *parts.names_of(optimizer), ranks)
            pieces.extend(states[name].pieces)
        for name, value in parts.trees.items():
            # Called once: a data loader's may start its workers.
            values[name] = value.state_dict() if has_state(value) else value
            trees[name] = tree, tensors = encode(values[name], name, keeps_pieces=True)
            # Pieces differ between ranks even if the object is the same.
            common = {key: tensor for key, tensor in tensors.items() if piece_of(tensor) is None}
            found[name] = digest_of(tree, common), len(common) < len(tensors)
        return found

    found = ranks.gather_results("save", collect_here)
    for name, state in states.items():
        refuse_other_options(name, state.options, ranks)
    for name in (differing := _differing(found)):
        trees[name] = encode(values[name], name_of_rank(name, ranks.total_rank), keeps_pieces=True)
    mine = {name: own.state for name, own in states.items()}, {name: trees[name][0] for name in differing}

    def join(told: list[tuple[dict[str, Any], dict[str, Any]]]) -> RankMismatchError | None:
        try:
            for name, own in states.items():
                joined = join_states(name, [their_states[name] for their_states, _ in told])
                saved["optimizers"][name] = {**own.options, "state": joined}
        except RankMismatchError as error:
            return error  # not raised here: it would become a CheckpointError on all ranks
        for name, (tree, _) in trees.items():
            saved["trees"][name] = [theirs[name] for _, theirs in told] if name in differing else [tree]
        return None

    raise_if(ranks.join_results("save", lambda: mine, join))
    for name, (_, tensors) in trees.items():
        if name in differing or ranks.is_first:
            pieces.extend(TensorPiece.wholes(tensors))
        pieces.extend(of_replica(TensorPiece.sharded(tensors), parts.engine))
    return saved, pieces


def _differing(found: Sequence[Mapping[str, tuple[str, bool]]]) -> set[str]:
    """The trees whose digests differ between ranks.

    Args:
        found: by rank and name of a tree, its digest, and whether it has pieces.

    Raises:
        CheckpointError: one of them has pieces, which belong to all ranks.
    """
    differing = {name for name in found[0] if len({theirs[name][0] for theirs in found}) > 1}
    # By what all ranks have told: an object may have pieces on some of them, and all have to raise.
    if cut := sorted(name for name in differing if any(theirs[name][1] for theirs in found)):
        raise CheckpointError(f"{', '.join(cut)} has pieces of parameters, and other values that differ between ranks")
    return differing


# ------------------------------------------------------------------------------------------------ in the background


def _save_in_background(root: Location, number: int, keep: int | None, parts: RunParts) -> Saving:
    """Start to copy the pieces to host memory, and let a thread write the copies."""
    ranks, root = parts.engine.ranks, root.absolute()  # the process may change its directory meanwhile
    own_ranks = background_ranks(ranks)
    state, pieces = collect(parts)
    device = parts.engine.streams.device
    finish = run_on_all_ranks(ranks, "copy for a save", lambda: start_copies(pieces, device), at=f"to {root}")
    pieces.clear()  # the run's own go as soon as they are copied

    path = root / f"checkpoint-{number}"
    group = own_ranks.users_group if own_ranks.total_size > 1 else None

    def write() -> Location:
        nonlocal group
        try:
            return write_checkpoint(root, number, keep, own_ranks, state, finish)
        except CommunicationError as error:
            advice = "latest() passes over a checkpoint that is not complete"
            raise CheckpointError(f"{path} may not be complete ({advice}): {error}") from error
        finally:
            group = None  # kept until here, because a script may end with destroy_process_group()

    try:
        return start_saving(path, write)
    except BaseException:  # other ranks have begun to write, and wait for this one
        own_ranks.fail("interrupted before it began to write")
        raise


def start_copies(pieces: Sequence[TensorPiece], device: torch.device) -> Callable[[], list[TensorPiece]]:
    """Start to copy `pieces` into new host memory, on the current stream of `device`. The host does not wait for it.

    Later work on this stream, such as the next optimizer step, comes behind the copies. The host memory is freed with
    the copies; torch keeps pinned memory for the next save.

    Returns:
        A function that waits until the copies are complete, and returns them. Any thread may call it.
    """
    sizes, places = [0], []
    for piece in pieces:
        n_bytes = -(-piece.data.nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
        if sizes[-1] and sizes[-1] + n_bytes > _BUFFER_BYTES:
            sizes.append(0)
        places.append((len(sizes) - 1, sizes[-1]))
        sizes[-1] += n_bytes
    buffers = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=device.type != "cpu") for size in sizes]
    module = module_of(device) if has_streams(device) else None
    copies, sources = [], []  # `sources` keeps tensors alive that the user may free before they are copied
    for piece, (number, start) in zip(pieces, places, strict=True):
        # The event below is of this device only: copies from elsewhere end before the call does.
        copy, is_here = buffers[number].narrow(0, start, piece.data.nbytes), piece.data.device == device
        copy = copy.view(piece.data.dtype).copy_(piece.data, non_blocking=is_here)
        copies.append(piece._replace(data=copy))
        sources.append(piece.data)
    if module is None:
        return lambda: copies
    copied = module.Event()
    copied.record(module.current_stream(device))

    def finish() -> list[TensorPiece]:
        copied.synchronize()
        sources.clear()
        return copies

    return finish


def background_ranks(ranks: Communicator) -> RankGroup:
    """The ranks, with a new process group for one save in the background. Collective.

    Ranks make the group at the store, which does not notice a dead rank. So all ranks synchronise right before.

    Raises:
        CommunicationError: another rank is missing.
    """
    if ranks.total_size == 1:
        return RankGroup()
    kept = state_of(ranks.users_group)
    group = kept.background_of()
    is_usable = group is not None and not state_of(group).is_closed
    if not all(ranks.gather_objects("find the group for saves in the background", is_usable)):  # all make one, or none
        with ranks.waiting("making a group for saves in the background"):
            group = make_host_group(ranks.users_group, WRITTEN_WITHIN)
            kept.background_of = weak(group)
    meeting = "saving in the background"
    return RankGroup(group, meeting=meeting, timeout=WRITTEN_WITHIN, is_beside_training=True)


# ------------------------------------------------------------------------------------------------ writing


def write_checkpoint(
    root: Location,
    number: int,
    keep: int | None,
    ranks: RankGroup,
    state: Mapping[str, Any],
    take: Callable[[], Sequence[TensorPiece]],
) -> Location:
    """Write this rank's file, then let rank 0 publish all files. Collective.

    Args:
        root: the directory of checkpoints.
        number: the checkpoint's number.
        keep: number of checkpoints to keep; None: all.
        ranks: the ranks.
        state: everything except tensors, as JSON, of the first rank.
        take: returns this rank's pieces of tensors.

    Returns:
        The checkpoint's path.
    """
    name = f"checkpoint-{number}"
    file = f"rank-{ranks.total_rank:05d}-of-{ranks.total_size:05d}.safetensors"

    def write(partial: Location) -> tuple[FileRecord, dict[str, TensorRecord]]:
        pieces = take()  # waits for the copies here, where ranks hear of each other's errors
        held = {piece.name: [(0, piece.data)] for piece in pieces}
        if len(held) < len(pieces):
            twice = Counter(piece.name for piece in pieces).most_common(1)[0][0]
            raise CheckpointError(f"several tensors are named {twice!r}: give other keys in extra= or model=")
        layout = lay_out(file, {piece.name: piece.data for piece in pieces if piece.data.numel()})
        written = write_file(partial, layout, held)
        # Of a tensor without elements from all, else from those that have some: the first rank gets all of these.
        told = [piece for piece in pieces if piece.data.numel() or not math.prod(piece.shape)]
        return written, {piece.name: piece.record(ranks.total_rank) for piece in told}

    def publish(partial: Location, written: Sequence[tuple[FileRecord, dict[str, TensorRecord]]]) -> Location:
        saved_at = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")
        versions = {"streamshard": __version__, "torch": torch.__version__, "saved_at": saved_at}
        files, tensors = tuple(file for file, _ in written), join_records(records for _, records in written)
        manifest = Manifest(number, ranks.total_size, versions, files, tensors, state)
        return publish_checkpoint(partial, manifest, keep)

    path = write_together(ranks, f"save {root / name}", root, name, write=write, publish=publish)
    log.info("saved %s", path)
    return path
