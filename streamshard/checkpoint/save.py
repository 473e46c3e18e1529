"""Saving: each rank writes its file, the first rank publishes all of them; at once, or beside training.

    make the directory (rank 0) -> write and fsync (every rank) -> publish by renaming (rank 0)

Beside training a thread does it, of copies. Owns the save that is running, of which there is one in a process; the
copies' memory, which is kept from save to save; and the group over which ranks talk meanwhile.

[Note: state that is copied late]
A call copies at once whatever anybody may change at any time: main weights, buffers, values. Two thirds of a run with
AdamW are moments, which nothing but a step changes; they are copied while the next forward and backward run, and a step
that comes earlier waits. Who puts other tensors in their place (``load_state_dict``) need not wait: the copy is made of
those that were there. Who writes to them in place is found by autograd's count of changes, and that save fails, so that
no checkpoint has half of an edit. The count grows when a write is over, so it is looked at as late as may be: by the
next step, which comes after what its thread has done before and counts changes of its own, or once all is written, by
when a write that the copy has met is long over. On the CPU the thread that writes copies, and the step blocks; on a
device a stream copies, for which the step's stream waits and no host.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from streamshard.checkpoint.directory import (
    Partial,
    checkpoint_name,
    create_partial,
    publish_checkpoint,
    remove_partial,
)
from streamshard.checkpoint.manifest import Manifest, PieceRecord, TensorRecord
from streamshard.checkpoint.run_parts import Collected, Piece
from streamshard.checkpoint.safetensors_file import FileLayout, FileRecord, TensorSpec, lay_out, write_file
from streamshard.comm.flight_recorder import Board, Guard, Kind
from streamshard.comm.groups import close_connections
from streamshard.comm.objects import RankGroup, gather_bytes, gather_from_all_ranks, run_on_all_ranks
from streamshard.comm.ranks import Ranks
from streamshard.compiling import skip, untraced
from streamshard.config import __version__
from streamshard.device import has_streams, module_of, on_device
from streamshard.engine.engine import Engine
from streamshard.errors import CheckpointError, CommunicationError, StreamShardError
from streamshard.log import log, progress

__all__ = [
    "BackgroundRanks",
    "HostCopies",
    "SaveJob",
    "Saving",
    "background_ranks",
    "finish_running",
    "has_connections",
    "plan_job",
    "run_in_background",
]

MADE_WITHIN = datetime.timedelta(seconds=20)  # a group, once ranks have met
WRITTEN_WITHIN = datetime.timedelta(minutes=30)  # how long the fastest rank waits for the slowest one's disk
SHOWN_WITHIN_S = 5.0  # how long a rank waits, after a failure, for others to show that they are alive


# ------------------------------------------------------------------------------------------------ writing


class SaveJob(NamedTuple):
    """All that is needed to write a checkpoint."""

    root: Path
    number: int
    keep: int | None
    layout: FileLayout
    pieces: list[Piece]
    tensors: dict[str, TensorRecord]
    replicas: int
    state: Mapping[str, Any]

    @property
    def path(self) -> Path:
        return self.root / checkpoint_name(self.number)

    def write(
        self,
        group: RankGroup,
        data_of: Callable[[str], torch.Tensor] | None = None,
        check: Callable[[], object] = lambda: None,
    ) -> Path:
        """Write this rank's file, and let the first rank publish all of them. Collective.

        Args:
            group: the ranks.
            data_of: makes the data of a piece when it is written, by the name of its tensor; None: they have them.
            check: called once this rank's file is written; raises if that must not be published.
        """
        doing = f"save {self.path}"
        mine: list[Partial] = []  # the first rank's, which alone deletes and renames it

        def create() -> Path:
            if group.is_first:
                mine.append(create_partial(self.root, self.number))
            return mine[0].path if mine else Path()

        try:
            partial = gather_from_all_ranks(group, doing, create)[0]
            held = {piece.name: piece.data for piece in self.pieces}

            def write() -> FileRecord:
                with progress(f"saving {self.path.name}", self.layout.size_bytes, shows=group.is_first) as advance:
                    record = write_file(partial, self.layout, data_of or held.__getitem__, advance)
                check()
                return record

            def publish() -> None:
                for each in mine:
                    publish_checkpoint(each, self._manifest(records), self.keep)

            records = gather_from_all_ranks(group, doing, write)
            run_on_all_ranks(group, doing, publish)
        except BaseException:
            for each in mine:
                remove_partial(each)
            with contextlib.suppress(StreamShardError):  # raises at once if ranks cannot reach each other any more
                run_on_all_ranks(group, doing, lambda: None)  # no rank returns before the directory is gone
            raise
        return self.path

    def _manifest(self, records: list[FileRecord]) -> Manifest:
        now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="microseconds")
        versions = {"streamshard": __version__, "torch": torch.__version__, "saved_at": now}
        return Manifest(self.number, len(records), self.replicas, versions, tuple(records), self.tensors, self.state)


def plan_job(root: Path, number: int, keep: int | None, ranks: RankGroup, collected: Collected) -> SaveJob:
    """What each rank writes where. Collective: ranks meet once."""
    state, differing, pieces, _ = collected
    name = f"rank-{ranks.number:05d}-of-{ranks.total_size:05d}.safetensors"
    layouts: list[FileLayout] = []

    def plan() -> tuple[list[_Row], dict[str, Any]]:
        specs = [TensorSpec(each.name, (each.data.numel(),), each.data.dtype) for each in pieces if each.data.numel()]
        layouts.append(lay_out(name, specs))
        rows = [
            _Row(piece.name, piece.shape, str(piece.data.dtype).removeprefix("torch."), piece.start, piece.stop)
            for piece in pieces
        ]
        return rows, differing

    told = gather_from_all_ranks(ranks, f"save to {root}", plan)
    tensors = _tensor_records([rows for rows, _ in told])
    by_rank = {tree: {"ranks": [theirs[tree] for _, theirs in told]} for tree in differing}
    state = {**state, "trees": {**state["trees"], **by_rank}}
    return SaveJob(root, number, keep, layouts[0], pieces, tensors, ranks.total_size // ranks.world_size, state)


class _Row(NamedTuple):
    """What ranks tell each other of a piece."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int


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


# ------------------------------------------------------------------------------------------------ copies


_memory: weakref.WeakKeyDictionary[Engine, dict[str, torch.Tensor]] = weakref.WeakKeyDictionary()


class HostCopies:
    """Copies of what one save writes. Made when it is called; what cannot be copied is told by `finish`.

    Args:
        engine: keeps the memory.
        pieces: what is saved.
        late: names of those that may be copied later than now. See [Note: state that is copied late].
    """

    def __init__(self, engine: Engine, pieces: list[Piece], late: Set[str]) -> None:
        self._device = engine.streams.device
        self._copies: list[Piece] = []
        self._late: list[tuple[torch.Tensor, Piece, int]] = []  # a copy, what it is of, and the changes until now
        self._event: Any = None  # on a device: everything is copied
        self._is_copied = threading.Event()
        self._lock = threading.Lock()  # between a step and the thread
        self._edited: list[str] | None = None
        self._failure: Exception | None = None
        try:
            self._begin(_memory_for(engine, pieces), pieces, late)
        except Exception as error:  # the other ranks hear of it where they meet next
            self._failure = error

    def finish(self) -> list[Piece]:
        """The copies, once they are complete. Called once, by a thread beside training.

        Raises:
            Exception: whatever kept the call from copying.
        """
        try:
            if self._failure is not None:
                raise self._failure
            if self._event is not None:
                with on_device(self._device):
                    self._event.synchronize()
            else:
                for copy, piece, _ in self._late:
                    copy.copy_(piece.data)
            return self._copies
        finally:
            self._is_copied.set()

    def let_step(self) -> None:
        """Return when a step may change everything; on a device, once the current stream waits until it may."""
        if self._event is None:
            self._is_copied.wait()
        elif not self._is_copied.is_set():
            module_of(self._device).current_stream(self._device).wait_event(self._event)
        self._look_for_edits()

    def check(self) -> None:
        """To be called after `finish`, when nothing is left to be done but to publish.

        Raises:
            CheckpointError: names what was written to meanwhile.
        """
        if edited := self._look_for_edits():
            others = f" (and {len(edited) - 1} others)" if edited[1:] else ""
            raise CheckpointError(
                f"{edited[0]!r} was written to in place{others} while it was being saved, by something that is no step "
                "of its optimizer: edit an optimizer's state before save_checkpoint(..., wait=False), after the next "
                "step(), or after the handle's wait()"
            )

    def _begin(self, memory: dict[str, torch.Tensor], pieces: list[Piece], late: Set[str]) -> None:
        for piece in pieces:
            copy = memory[piece.name]
            self._copies.append(piece._replace(data=copy))
            if piece.name in late and not piece.data.is_inference():  # which has no count of changes
                self._late.append((copy, piece, piece.data._version))
            else:
                copy.copy_(piece.data, non_blocking=True)
        if has_streams(self._device):
            module = module_of(self._device)
            stream = module.Stream(self._device)
            stream.wait_stream(module.current_stream(self._device))
            with module.stream(stream):
                for copy, piece, _ in self._late:
                    copy.copy_(piece.data, non_blocking=True)
            event = module.Event()
            event.record(stream)
            self._event = event

    def _look_for_edits(self) -> list[str]:
        """What has changed since the call, when this is asked first; lets go of what is copied."""
        with self._lock:
            if self._edited is None:
                self._edited = [piece.name for _, piece, before in self._late if piece.data._version != before]
            if self._is_copied.is_set():
                self._late.clear()
            return self._edited


def _memory_for(engine: Engine, pieces: list[Piece]) -> dict[str, torch.Tensor]:
    """A tensor in host memory for each of `pieces`, the same as the last time."""
    kept = _memory.setdefault(engine, {})
    for name in kept.keys() - {piece.name for piece in pieces}:
        del kept[name]
    for piece in pieces:
        copy = kept.get(piece.name)
        if copy is None or copy.dtype != piece.data.dtype or copy.shape != piece.data.shape:
            with torch.inference_mode(False):  # to be written to again, outside of it
                pinned = engine.streams.device.type != "cpu"
                kept[piece.name] = torch.empty(piece.data.shape, dtype=piece.data.dtype, pin_memory=pinned)
    return kept


# ------------------------------------------------------------------------------------------------ beside training


class Saving:
    """A checkpoint that is being written while training goes on, as it was at the call.

    The optimizer's moments are copied while the next forward and backward run; the next ``step()`` waits until they
    are. They may be replaced at any time. Writing to them in place before that step, ``wait()`` or ``done``, makes the
    save fail with a `CheckpointError` that names them; writes that autograd does not count (``.data``, numpy) it cannot
    see. Everything else is the caller's again at once.

    An interpreter that ends, after an error or Ctrl-C too, waits for the save. SIGTERM ends the process at once, as
    always: the checkpoint is not finished then, earlier ones are whole, and the next save removes what is left. To
    finish it, call ``wait()`` in a handler of your own and exit after that; Python calls handlers once the main thread
    is not in a collective.

    Attributes:
        path: where it will be.
    """

    def __init__(self, path: Path, copies: HostCopies, write: Callable[[], None]) -> None:
        self.path = path
        self._copies: HostCopies | None = copies
        self._error: BaseException | None = None
        self._is_told = False
        self._write = write
        # No daemon: an interpreter that ends waits for it.
        self._thread = threading.Thread(target=self._run, name=f"save {path}")
        self._thread.start()

    def __repr__(self) -> str:
        return f"Saving({str(self.path)!r}, done={self.done})"

    @property
    def done(self) -> bool:
        """Whether it is over, for good or ill."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """Return where the checkpoint is, once it is there.

        Raises:
            CheckpointError: it could not be written; names the rank and the cause. If a rank has died or was
                interrupted: on all others as soon as they notice, after 30 minutes of silence at the latest.
        """
        self._thread.join()
        if self._error is not None:
            self._is_told = True
            raise self._error
        return self.path

    def finish(self) -> None:
        """Wait, and raise what went wrong unless it has been raised here: once."""
        self._thread.join()
        if self._error is not None and not self._is_told:
            self.wait()

    def let_step(self) -> None:
        """Return when a step may change the state of optimizers."""
        copies = self._copies
        if copies is not None and not self.done:  # in a forked process no thread copies
            copies.let_step()

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:
            self._error = error
            if isinstance(error, CommunicationError):
                self._error = CheckpointError(f"{self.path} was not saved: {error}")
                self._error.__cause__ = error
            log.error("%s", self._error)
        finally:
            del self._write  # what it holds
            self._copies = None


_running: Saving | None = None


def run_in_background(saving: Saving) -> Saving:
    """Remember `saving`, which runs, for the next call to wait for."""
    global _running
    _running = saving
    return saving


def finish_running() -> None:
    """Wait for the save in the background, if there is one.

    Raises:
        Exception: what went wrong, unless ``wait()`` has raised it on this rank. The caller tells the other ranks.
    """
    global _running
    saving = _running
    if saving is not None:
        saving.finish()
        _running = None


@skip
def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Global hook before optimizer steps, of whichever: those that are not saved wait as well."""
    if _running is not None:
        untraced(_running.let_step)


register_optimizer_step_pre_hook(before_step)


# Groups that only saves in the background use, by the group of all ranks. Weak: destroy_process_group() has to end
# gloo's threads, which must not outlive Python (they take its lock).
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]] = weakref.WeakKeyDictionary()


class BackgroundRanks:
    """The ranks, as a thread beside training talks to them: over a group that nobody else uses, nor destroys.

    What fails is told as everywhere: see `Guard`.

    Args:
        ranks: all that save.
        group: over which they talk; None: this is the only rank.
    """

    def __init__(self, ranks: Ranks, group: dist.ProcessGroup | None) -> None:
        self.is_first = ranks.is_first
        self.replica = ranks.replica
        self.number = ranks.number
        self.world_size = ranks.world_size
        self.total_size = ranks.total_size
        self.failure: str | None = None
        self.watch: Any = SimpleNamespace(wait=None)  # nobody looks: a disk may be slow
        self._group = group
        if group is not None:
            self.board = Board(group, self.number, self.total_size)

    def gather_bytes(self, data: bytes, /) -> list[bytes]:
        """Every rank's `data`, in rank order.

        Raises:
            CommunicationError: a rank has died, has failed or does not answer; says which. No later call works.
        """
        assert self._group is not None
        with Guard(self, "saving in the background", ""):
            self.board.log.add(Kind.MEETING)
            try:
                return gather_bytes(self._group, data, WRITTEN_WITHIN)
            except RuntimeError:
                close_connections(self._group)  # so the others find out as well
                self._await_others()
                raise

    def fail(self, failure: str) -> None:
        """This rank cannot go on: all others end with these words. The first failure counts."""
        if self.failure is None:
            self.failure = failure
        if self._group is not None:
            for ranks in [ranks for ranks, group_of in _groups.items() if group_of() is self._group]:
                del _groups[ranks]
            self.board.post_failure(failure)  # before the others' waits end: they read it then
            close_connections(self._group)

    def _await_others(self) -> None:
        """Return once it is known who has failed, or who has come as far as this rank."""
        deadline = time.monotonic() + SHOWN_WITHIN_S
        while time.monotonic() < deadline and self.board.read_failure() is None and self.board.describe_missing():
            time.sleep(0.02)


def has_connections(ranks: Ranks) -> bool:
    """Whether this rank need not make a group for a save in the background."""
    group_of = _groups.get(ranks.all_ranks)
    return group_of is not None and group_of() is not None


def background_ranks(ranks: Ranks, *, connects: bool) -> BackgroundRanks:
    """The ranks, for one save in the background.

    To be called where ranks have just met: to make a group they meet at the store, which does not say that one of them
    has died on the way there.

    Args:
        ranks: all that save.
        connects: make a new group, which is collective: a rank has none, see `has_connections`.

    Raises:
        CommunicationError: another rank did not come.
    """
    if ranks.total_size == 1:
        return BackgroundRanks(ranks, None)
    if connects:
        with ranks.guard("making a group for saves in the background"):
            members = dist.get_process_group_ranks(ranks.all_ranks)
            group = dist.new_group(members, MADE_WITHIN, backend="gloo", use_local_synchronization=True)
        _groups[ranks.all_ranks] = weakref.ref(group)
    return BackgroundRanks(ranks, _groups[ranks.all_ranks]())
