"""No bit of what lies on the disk changes unnoticed."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoint.flips import flip_often
from tests.ranks import RankContext, on_ranks


@on_ranks(2)
def test_a_flipped_bit_is_reported_by_the_name_of_its_file(context: RankContext, tmp_path: Path) -> None:
    """Of a checkpoint and of an export, manifest, index and checksums too."""
    noticed = flip_often(context, tmp_path, 24, seed=2)
    assert noticed.total() == 24
    assert len(noticed) > 6
