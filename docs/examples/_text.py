"""Byte-level text for the example job: files in, token streams, windows and the byte-frequency baseline out.

A token is a byte, so no tokenizer has to be downloaded: 0..255 are bytes, BOS and EOS stand at the ends of a file.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch

BOS = 256
EOS = 257
VOCAB = 264  # 258 tokens, rounded up to a multiple of 8: what matrix units like

# Installed by some Python builds only, so leaving them out keeps the text much the same everywhere.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}


class TextError(Exception):
    """The text asked for cannot be read, or is too little."""


class Text(NamedTuple):
    """Two token streams, [tokens] int16 on the CPU, and where they came from."""

    train: torch.Tensor
    held_out: torch.Tensor
    source: str


def read_text(data: Path | None, seq_len: int) -> Text:
    """Read the standard library's sources, or `data`, and split off a tenth as held-out text.

    The split is by file and depends on file names only; a single file is split near its end.

    Args:
        data: a file, a directory (all its files, hidden ones left out), or None for the standard library.
        seq_len: tokens a window needs; both streams must hold one at least.

    Raises:
        TextError: nothing there, or too little; says what was found and what is wanted.
    """
    root = Path(sysconfig.get_path("stdlib")) if data is None else data
    if not root.exists():
        raise TextError(f"{root} does not exist: wanted a file or a directory of files (--data PATH)")
    try:
        files = _read_files(root, python_only=data is None)
    except OSError as error:
        raise TextError(f"{error.filename} cannot be read: {error.strerror}") from error
    if not files:
        raise TextError(f"{root} holds no text: every file in it is empty, or there are none")
    if len(files) == 1:
        cut = len(files[0][1]) * 9 // 10
        train, held_out = [files[0][1][:cut]], [files[0][1][cut:]]
    else:
        by_hash = sorted(files, key=lambda file: hashlib.sha256(file[0].encode()).digest())
        chosen = {name for name, _ in by_hash[: -(-len(files) // 10)]}
        train = [content for name, content in files if name not in chosen]
        held_out = [content for name, content in files if name in chosen]
    text = Text(_tokens(train), _tokens(held_out), f"{root} ({len(files)} files)")
    for part, stream in (("train", text.train), ("held-out", text.held_out)):
        if len(stream) < seq_len:
            raise TextError(
                f"{root} is too little text: {len(stream)} {part} tokens, wanted --seq-len = {seq_len} at least"
            )
    return text


def _read_files(root: Path, python_only: bool) -> list[tuple[str, bytes]]:
    """The non-empty files below `root` as (relative name, content), in order of name."""
    if root.is_file():
        content = root.read_bytes()
        return [(root.name, content)] if content else []
    files = []
    for folder, folders, names in os.walk(root):
        skipped = _SKIPPED_FOLDERS if python_only else set()
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skipped]
        for name in names:
            path = Path(folder, name)
            wanted = name.endswith(".py") if python_only else not name.startswith(".")
            if wanted and path.is_file():
                content = path.read_bytes()
                if content:
                    files.append((path.relative_to(root).as_posix(), content))
    return sorted(files)


def _tokens(contents: Iterable[bytes]) -> torch.Tensor:
    """One stream [tokens] int16: BOS, the bytes, EOS, file after file."""
    pieces = []
    for content in contents:
        piece = torch.empty(len(content) + 2, dtype=torch.int16)
        piece[0], piece[-1] = BOS, EOS
        if content:
            piece[1:-1] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        pieces.append(piece)
    return torch.cat(pieces)


def windows(stream: torch.Tensor, starts: torch.Tensor, seq_len: int) -> torch.Tensor:
    """Windows [len(starts), seq_len] int64 of `stream`, one from each start."""
    return stream[starts[:, None] + torch.arange(seq_len)].long()


def random_starts(stream: torch.Tensor, seq_len: int, count: int, seed: int) -> torch.Tensor:
    """`count` places [count] int64 where a window fits, the same on every rank for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, len(stream) - seq_len + 1, (count,), generator=generator)


def even_windows(stream: torch.Tensor, seq_len: int, count: int) -> torch.Tensor:
    """`count` windows [count, seq_len] int64 spread evenly over `stream`: the fixed held-out set."""
    starts = torch.linspace(0, len(stream) - seq_len, count, dtype=torch.float64).long()
    return windows(stream, starts, seq_len)


def byte_frequency_loss(train: torch.Tensor, held_out: torch.Tensor) -> float:
    """Mean loss (nats per token) of predicting each token from its frequency in the train text alone.

    Args:
        train: the train stream [tokens] int16; one is added to each count, so that no token is impossible.
        held_out: the windows [count, seq_len] int64 the model is judged on; their first tokens are not predicted.
    """
    counts = torch.bincount(train.long(), minlength=EOS + 1).double() + 1
    log_frequency = (counts / counts.sum()).log()
    return -log_frequency[held_out[:, 1:]].mean().item()


def decode(tokens: list[int]) -> str:
    """The text of `tokens`; what is not a byte is left out."""
    return bytes(token for token in tokens if token < BOS).decode("utf-8", errors="replace")
