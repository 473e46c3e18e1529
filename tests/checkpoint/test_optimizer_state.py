"""Full optimizer state in memory: the messages in which ranks send their pieces."""

from __future__ import annotations

import pytest
import torch

from streamshard.checkpoint import optimizer_state
from streamshard.checkpoint.manifest import PieceRecord, TensorRecord


def test_ranks_send_many_pieces_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece once; all of one message from one rank and of one dtype, and no more bytes than a message has."""
    monkeypatch.setattr(optimizer_state, "_MESSAGE_BYTES", 64)
    cut = (PieceRecord(0, 0, 5), PieceRecord(1, 5, 6), PieceRecord(2, 6, 8))
    records = {f"moment {number}": TensorRecord((8,), torch.float32, cut) for number in range(10)}
    records["step"] = TensorRecord((), torch.int64, (PieceRecord(0, 0, 1),))
    records["large"] = TensorRecord((40,), torch.float32, (PieceRecord(1, 0, 40),))
    messages = list(optimizer_state._messages(records))
    sent = [(name, piece) for _, _, pieces in messages for name, piece in pieces]
    assert sorted(sent) == sorted((name, piece) for name, record in records.items() for piece in record.pieces)
    for source, dtype, pieces in messages:
        assert {piece.file for _, piece in pieces} == {source}
        assert {records[name].dtype for name, _ in pieces} == {dtype}
        n_bytes = sum((piece.stop - piece.start) * dtype.itemsize for _, piece in pieces)
        assert n_bytes <= 64 or len(pieces) == 1
    # Five elements of rank 0 fit three times, one of rank 1 and two of rank 2 fit in 40 and 80 bytes.
    assert sorted(source for source, *_ in messages) == [0] * 5 + [1] * 2 + [2] * 2
