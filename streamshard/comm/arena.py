"""Arenas: anonymous memory files, one per rank, that all ranks of a machine map. Made, offered, mapped, forked.

An arena can neither be cut nor grown (it is sealed: whoever reads beyond the end of a file that became shorter dies of
SIGBUS), nobody can open it any more once all ranks have mapped it (no descriptor is kept), and a forked child has no
part in it. See [Note: forks].

[Note: forks]
A child that is forked (a worker of a DataLoader, a saver that wants a snapshot) must neither see what this rank does
afterwards nor write into what other ranks read. So the kernel does not hand arenas on (MADV_DONTFORK). Where the
arena holds what belongs to the user (main weights in fp32, main grads that lie in their slot), the child finds it as it
was at the fork, in private memory at the same addresses: it is copied just before, which costs as much as it is large.
Forks one after the other share one copy. A child that was forked behind Python's back, or for which there was no memory
left, finds nothing there.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import secrets
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from streamshard.comm.flight_recorder import Log

if sys.platform == "linux":
    import fcntl

__all__ = ["Arena", "Counter", "Offer", "State", "arena_bytes", "map_all", "offer_memory"]

_ALIGNMENT = 64  # bytes, of a buffer in an arena: a cache line
_COOKIE_BYTES = 32  # at the start of an arena: it is the one meant, not some other process's file of that number
_WORD_BYTES = 8
_VOTES = 2
_PUBLICATIONS = 2  # as many are compared at the same time at most
_MAP_NORESERVE, _MREMAP_MAYMOVE_FIXED = 0x4000, 3  # Linux's, which Python does not name
_MAP_FAILED = ctypes.c_void_p(-1).value


class Counter(enum.IntEnum):
    """See [Note: counters]."""

    PUBLISHED = 0
    RETRACTED = 1
    WRITTEN = 2
    SUMMED = 3
    VOTED = 4


class State(enum.IntEnum):
    """Whether a rank's counters may still change."""

    TAKES_PART = 0
    HAS_LEFT = 1
    HAS_FAILED = 2


class Offer(NamedTuple):
    """What peers need to map an arena.

    Attributes:
        system: `_system` of the process; elsewhere its number means another process, or none.
        descriptor, process: where the file is.
        cookie: what it begins with.
    """

    system: str
    descriptor: int
    process: int
    cookie: bytes


class Process:
    """Another process of this machine. Owns a descriptor, so that it costs none to ask and no other process is meant.

    Args:
        directory: descriptor of its directory under /proc.

    Raises:
        OSError: it cannot be looked at.
    """

    def __init__(self, directory: int) -> None:
        self._stat = os.open("stat", os.O_RDONLY, dir_fd=directory)
        weakref.finalize(self, os.close, self._stat)

    def is_running(self) -> bool:
        """False only if it has certainly ended: one that is stopped, or that we cannot ask about, is alive."""
        try:
            return os.pread(self._stat, 4096, 0).rpartition(b")")[2].split()[0] not in (b"Z", b"X")
        except ProcessLookupError:
            return False
        except OSError:
            return True


def arena_bytes(nbytes: int, units: int) -> int:
    """How large a file an arena with room for `nbytes` of buffers needs."""
    words = len(Counter) + 1 + _VOTES + _PUBLICATIONS + Log.WORDS + 2 * units
    return _COOKIE_BYTES + _WORD_BYTES * words + nbytes


class Arena:
    """One rank's memory as a process sees it: counters, where its compute shards are, and the buffers.

    Args:
        memory: the mapped file.
        units: how many shards are published.
        process: whose it is; None: this process's own.

    Attributes:
        counters: [5], by `Counter`.
        votes: [2], what it has said in its last votes, by count.
        published: what its log came to when it published last, and the time before, by count.
        log_words: what it has issued, see `Log.words`.
        shards: [units], where its compute shards begin, in bytes.
        written: [units], what its log came to at its last reductions, by count: it is ahead of others by as many as it
            has slots at most.
    """

    def __init__(self, memory: ctypes.Array[ctypes.c_char], units: int, process: Process | None) -> None:
        self.memory = memory
        self.process = process
        self._used = _COOKIE_BYTES
        self.counters = self._words(len(Counter))
        self._state = self._words(1)
        self.votes = self._words(_VOTES)
        self.published = self._words(_PUBLICATIONS)
        self.log_words = self._words(Log.WORDS)
        self.shards = self._words(units)
        self.written = self._words(units)
        self.start = ctypes.addressof(memory)
        self._users: list[tuple[int, int]] = []
        self._copy: int | None = None
        if process is None:
            _own.add(self)

    @property
    def state(self) -> State:
        """Whether its counters may still change."""
        return State(self._state[0])

    def leave(self, state: State) -> None:
        """Its counters will not change any more; the first reason is the one that counts."""
        if self._state[0] == State.TAKES_PART:
            self._state[0] = state

    def view(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The elements [numel] at `offset` bytes."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.memory, dtype=dtype, count=numel, offset=offset)

    def allocate(self, numel: int, dtype: torch.dtype, *, is_users: bool) -> torch.Tensor:
        """A new buffer [numel] of zeros. Only on the rank whose arena it is.

        Args:
            numel, dtype: how much, of which type.
            is_users: whether the user sees it, hence a forked child gets a copy.
        """
        offset = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        nbytes = numel * dtype.itemsize
        buffer = self.view(offset, numel, dtype)
        self._used = offset + nbytes
        if is_users:
            self._users.append((offset, nbytes))
        return buffer

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Where `tensor` lies, in bytes; None if that is somewhere else."""
        offset = tensor.data_ptr() - self.start
        return offset if 0 < offset < self._used else None

    def _words(self, count: int) -> memoryview:
        start, self._used = self._used, self._used + _WORD_BYTES * count
        return memoryview(self.memory).cast("B")[start : self._used].cast("q")

    # -- forks --------------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Copy what is the user's, unless there is a copy from the fork before and nothing has changed since."""
        if self._copy is None:
            self._copy = _map_private(len(self.memory))
        if self._copy is not None:
            for offset, nbytes in self._users:
                if _libc.memcmp(self._copy + offset, self.start + offset, nbytes):
                    ctypes.memmove(self._copy + offset, self.start + offset, nbytes)

    def after_fork_in_child(self) -> None:
        """Put the copy where the arena was."""
        copy, self._copy = self._copy, None
        if copy is not None:
            size = len(self.memory)
            _libc.mremap(copy, size, size, _MREMAP_MAYMOVE_FIXED, ctypes.c_void_p(self.start))

    def forget_copy(self) -> None:
        """What is the user's is about to change, or goes."""
        copy, self._copy = self._copy, None
        if copy is not None:
            _libc.munmap(copy, len(self.memory))

    def __del__(self) -> None:
        self.forget_copy()


# -- the system's -----------------------------------------------------------------------------------------------------


def offer_memory(nbytes: int) -> tuple[ctypes.Array[ctypes.c_char], Offer] | None:
    """A new sealed anonymous memory file and what peers need to map it; None where there is no such thing.

    The offer's descriptor is the caller's, to be closed when all have mapped it.
    """
    if sys.platform != "linux":
        return None
    descriptor = None
    try:
        descriptor = os.memfd_create("streamshard", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
        memory = _map_shared(descriptor, nbytes)
        system = _system()
    except (OSError, ValueError):
        if descriptor is not None:
            os.close(descriptor)
        return None
    cookie = secrets.token_bytes(_COOKIE_BYTES)
    memoryview(memory).cast("B")[:_COOKIE_BYTES] = cookie
    return memory, Offer(system, descriptor, os.getpid(), cookie)


def map_all(
    offers: Iterable[Offer | None], own: int, memory: ctypes.Array[ctypes.c_char], units: int
) -> list[Arena] | None:
    """All ranks' arenas; None unless all of them are sealed memory of this machine that we may map.

    Of a process of another machine or container nothing is opened.

    Args:
        offers: all ranks', by rank.
        own, memory: this rank, and its own memory.
        units: how many shards are published.
    """
    arenas = []
    for rank, offer in enumerate(offers):
        arena = None
        if rank == own:
            arena = Arena(memory, units, None)
        elif offer is not None:
            arena = _map_other(offer, len(memory), units)
        if arena is None:
            return None
        arenas.append(arena)
    return arenas


def _map_other(offer: Offer, nbytes: int, units: int) -> Arena | None:
    directory = file = None
    try:
        if offer.system != _system():
            return None
        directory = os.open(f"/proc/{offer.process}", os.O_PATH | os.O_DIRECTORY)
        file = os.open(f"fd/{offer.descriptor}", os.O_RDWR | os.O_CLOEXEC, dir_fd=directory)
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _seals() != _seals() or os.fstat(file).st_size != nbytes:
            return None
        memory = _map_shared(file, nbytes)
        if memoryview(memory).cast("B")[:_COOKIE_BYTES] != offer.cookie:
            return None
        return Arena(memory, units, Process(directory))
    except (OSError, ValueError):
        return None
    finally:
        for descriptor in (directory, file):
            if descriptor is not None:
                os.close(descriptor)


def _system() -> str:
    """The running kernel and the namespace of process numbers: where both are the same, a number is one process."""
    namespace = os.stat("/proc/self/ns/pid")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return f"{boot} {namespace.st_dev} {namespace.st_ino}"


def _seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _load_libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.mremap.restype = ctypes.c_void_p
    size, pointer, word = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes = [pointer, size, word, word, word, ctypes.c_long]
    libc.munmap.argtypes = [pointer, size]
    libc.madvise.argtypes = [pointer, size, word]
    libc.mremap.argtypes = [pointer, size, size, word]  # and, with these flags, where to
    libc.memcmp.argtypes = [pointer, pointer, size]
    return libc


_libc: Any = _load_libc() if sys.platform == "linux" else None


def _map_shared(descriptor: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """Not Python's mmap, which keeps a descriptor. Unmapped when nothing points into it any more."""
    address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, 0)
    if address == _MAP_FAILED:
        raise OSError(ctypes.get_errno(), "mmap")
    memory = (ctypes.c_char * nbytes).from_address(address)
    # Not at exit, where other threads may still read it.
    weakref.finalize(memory, _libc.munmap, address, nbytes).atexit = False
    if _libc.madvise(address, nbytes, mmap.MADV_DONTFORK):
        raise OSError(ctypes.get_errno(), "madvise")
    return memory


def _map_private(nbytes: int) -> int | None:
    """Zeros, which take memory only where they are written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address: int = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    return None if address == _MAP_FAILED else address


_own: weakref.WeakSet[Arena] = weakref.WeakSet()  # of this process


def _before_fork() -> None:
    for arena in list(_own):
        arena.before_fork()


def _after_fork_in_child() -> None:
    for arena in list(_own):
        arena.after_fork_in_child()


if sys.platform == "linux":
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
