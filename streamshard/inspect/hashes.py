"""Whether all ranks see the same weights: hashes of what each of them gathers, and of its buffers, compared.

Megatron-LM has the same for its replicas (``check_param_hashes_across_dp_replicas``). Ranks differ if memory or a link
is faulty, if code edits weights on one rank alone, or between two averages of local SGD.
"""

from __future__ import annotations

from collections.abc import Iterator

from streamshard.engine.buffer_sync import digest
from streamshard.engine.engine import Engine
from streamshard.errors import RankMismatchError


def compare_weights(engine: Engine) -> None:
    """Raise on all ranks unless their weights and buffers are equal to the bit. Collective; a unit at a time.

    Raises:
        RankMismatchError: names the first parameter or buffer that differs, and the ranks that differ from the first.
    """
    engine.recover()
    mine = dict(_hashes(engine))
    gathered: list[dict[str, str]] = engine.ranks.gather_objects(mine)
    for name, value in gathered[0].items():
        others = [rank for rank, theirs in enumerate(gathered) if theirs.get(name) != value]
        if others:
            raise RankMismatchError(
                f"{name!r} is not the same on all ranks: rank 0 has one value, {others} have others"
            )


def _hashes(engine: Engine) -> Iterator[tuple[str, str]]:
    for unit in engine.units:
        wholes = unit.gather_whole([shard.main for shard in unit.params])
        for shard, whole in zip(unit.params, wholes, strict=True):
            if whole is not None:
                yield shard.name, digest(whole)
    for name, buffer in engine.buffers.equal_ones():
        yield name, digest(buffer)
