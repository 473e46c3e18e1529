"""Writing a checkpoint that has been collected: nothing here looks at the run, so it may happen beside it.

make the directory (rank 0) -> write and fsync (every rank) -> publish by renaming (rank 0)
"""

from __future__ import annotations

import contextlib
import datetime
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from streamshard.checkpoint import partial as partials
from streamshard.checkpoint.collect import Collected
from streamshard.checkpoint.directory import checkpoint_name, create_partial, publish_checkpoint
from streamshard.checkpoint.manifest import FileRecord, Manifest, PieceRecord, TensorRecord
from streamshard.checkpoint.piece_file import Piece, plan_piece_file, write_piece_file
from streamshard.checkpoint.safetensors_file import FileLayout
from streamshard.checkpoint.writer import RankGroup, gather_from_all_ranks, run_on_all_ranks, run_on_first_rank
from streamshard.errors import CheckpointError, StreamShardError
from streamshard.log import progress
from streamshard.version import __version__

__all__ = ["SaveJob", "plan_job"]


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
        mine: list[partials.Partial] = []  # the first rank's, which alone deletes and renames it

        def create() -> Path:
            if group.is_first:
                mine.append(create_partial(self.root, self.number))
            return mine[0].path if mine else Path()

        try:
            partial = gather_from_all_ranks(group, doing, create)[0]
            held = {piece.name: piece.data for piece in self.pieces}

            def write() -> FileRecord:
                with progress(f"saving {self.path.name}", self.layout.size_bytes, shows=group.is_first) as advance:
                    record = write_piece_file(partial, self.layout, data_of or held.__getitem__, advance)
                check()
                return record

            records = gather_from_all_ranks(group, doing, write)
            run_on_first_rank(group, doing, lambda: publish_checkpoint(mine[0], self._manifest(records), self.keep))
        except BaseException:
            for each in mine:
                partials.remove(each)
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
        layouts.append(plan_piece_file(name, [piece for piece in pieces if piece.data.numel()]))
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
