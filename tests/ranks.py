"""Rank processes for tests: started once per session, reused by every test, replaced when a test breaks them.

Owns the worker processes, their process groups and the way a failure travels back to pytest.

    @on_ranks(2, 3)
    def test_sum_is_the_same_on_all_ranks(context: RankContext) -> None: ...   # the body runs on every rank

    def test_other(ranks: RankPool) -> None:
        results = ranks(2).run(function, argument)                             # one result per rank

Every run has a fresh default process group of exactly its ranks, so nothing a test leaves behind in a group
reaches the next one. After any failure the workers that took part are killed and started anew.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import multiprocessing.context
import os
import pickle
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
import unittest
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # not re-exported in stubs

from tests.gpu import IS_PLAYED, enter_gpu, has_gpu

# By what ranks are forked from. Dynamo is imported by the first step of any optimizer.
PRELOADED = ["torch", "torch.distributed", "torch._dynamo", "pytest", "streamshard.api", "tests.reference"]
# By the same, where the tests that were collected have imported what stands first: then ranks are going to, or more.
PRELOADED_TOO = {
    "accelerate": "accelerate",
    "hypothesis": "hypothesis",
    "torch._functorch.aot_autograd": "torch._functorch.aot_autograd",
    "transformers": "transformers",
}
# These ask for a GPU when they are imported, or what they import does: only where torch was built for none.
PRELOADED_ON_CPUS = {
    "torch._inductor.utils": "torch._inductor.cudagraph_trees",
    "transformers": "transformers.models.llama.modeling_llama",
    "bitsandbytes": "bitsandbytes",
    "peft": "peft",
    "trl": "trl",
    "torchao.float8": "torchao.float8",
    "torchao.optim": "torchao.optim",
    "tests.integrations.trainers": "transformers.trainer",
}
PRELOADED_LAST = ["tests.fork_origin"]
GROUP_TIMEOUT_S = float(os.environ.get("TEST_GROUP_TIMEOUT_S", "60"))
RUN_TIMEOUT_S = float(os.environ.get("TEST_RUN_TIMEOUT_S", "90"))
# "default": shown. For a first run with other versions, or on another machine: what they warn of is not what is tested.
WARNINGS = os.environ.get("TEST_WARNINGS", "error")
GRACE_S = 3.0  # how long the other ranks may go on once one has failed

# Warnings of other people's code that no test can avoid: (message, category).
FOREIGN_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    # By what torch.compile and torch.distributed.optim import.
    *((r"`torch\.jit\.\w+` is deprecated", kind) for kind in (DeprecationWarning, FutureWarning)),
    (r"A saved_tensors_hooks context", FutureWarning),  # by torch 2.15 where checkpoints choose what they keep
    (r"You are using a Backend .* as a ProcessGroup", UserWarning),  # by torch.distributed.rpc about its own group
    (r"'set_vital' is deprecated", UserWarning),  # by torch where torchdata's loader is made
    (r"Warning: Profiler clears events at the end of each cycle", UserWarning),  # by torch 2.11's profiler, always
    # By PEFT, which asks a model of transformers for it.
    (r"`(is_gradient_checkpointing|gradient_checkpointing_enable)` is deprecated", FutureWarning),
    # By accelerate, where tensors of GPUs are gathered, and where it waits for all ranks.
    (r"`torch\.distributed\.all_gather_into_tensor` is deprecated", FutureWarning),
    (r"barrier\(\): using the device under current context", UserWarning),
    (r"TensorFloat32 tensor cores", UserWarning),  # by Inductor on Ampere and newer GPUs
    (r"the model trains on the CPU while", UserWarning),  # ours, where a machine with GPUs runs the tests for CPUs
)


class Call(NamedTuple):
    """One call of a step function: `weight` multiplies the loss, and is 1/N where one process plays all ranks."""

    step: int
    rank: int
    world_size: int
    weight: float

    def backward(self, loss: Tensor, **options: Any) -> Tensor:
        """Run backward of the weighted loss; returns the loss itself, detached."""
        (loss * self.weight).backward(**options)  # type: ignore[no-untyped-call]
        return loss.detach()


@dataclass(frozen=True)
class RankContext:
    """What a rank function knows about where it runs. The default process group has exactly these ranks."""

    rank: int
    world_size: int
    device: torch.device

    def call(self, step: int) -> Call:
        return Call(step, self.rank, self.world_size, 1.0)


class RankFailure(AssertionError):
    """A rank function raised, died or hung; the message has the story of every rank that did."""


class _Request(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rank: int
    world_size: int
    backend: str
    prefix: str
    group_timeout_s: float


class _Reply(NamedTuple):
    kind: str  # "result", "failure" or "skip"
    value: Any


def warnings_are_errors() -> None:
    """Turn warnings into errors in this process, except those of `FOREIGN_WARNINGS`."""
    warnings.resetwarnings()
    warnings.simplefilter(WARNINGS)  # type: ignore[arg-type]  # the user's word
    for message, category in FOREIGN_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category)


def _serve(connection: Connection, store_port: int, dump_path: str, environment: dict[str, str]) -> None:
    """Answer requests until the parent hangs up."""
    os.environ.update(environment)
    dump_file = open(dump_path, "w")  # noqa: SIM115 - lives as long as the process
    faulthandler.enable(file=dump_file)
    torch.set_num_threads(1)
    warnings_are_errors()
    store = TCPStore("127.0.0.1", store_port, is_master=False)
    while True:
        faulthandler.unregister(signal.SIGUSR1)  # a test may have handled it itself
        faulthandler.register(signal.SIGUSR1, file=dump_file, all_threads=True)
        try:
            payload = connection.recv_bytes()
        except EOFError:
            return
        reply = _answer(payload, store)
        try:
            answer = pickle.dumps(reply)
        except Exception:
            answer = pickle.dumps(_Reply("failure", traceback.format_exc()))
        connection.send_bytes(answer)
        del reply, answer
        _collect_garbage()


def _answer(payload: bytes, store: Store) -> _Reply:
    try:
        request: _Request = pickle.loads(payload)
        _start_clean()
        needs_gpu = request.backend == "nccl"
        device = enter_gpu() if needs_gpu else torch.device("cpu")
        dist.init_process_group(
            "gloo" if needs_gpu and IS_PLAYED else request.backend,
            store=PrefixStore(request.prefix, store),
            rank=request.rank,
            world_size=request.world_size,
            timeout=datetime.timedelta(seconds=request.group_timeout_s),
        )
        context = RankContext(request.rank, request.world_size, device)
        return _Reply("result", request.function(context, *request.args, **request.kwargs))
    except (unittest.SkipTest, pytest.skip.Exception) as skip:
        return _Reply("skip", str(skip))
    except BaseException:
        return _Reply("failure", traceback.format_exc())


_modules_frozen = 0
_MOST_UNFROZEN = 20_000  # objects; torch alone has ten times as many


def _collect_garbage() -> None:
    """Collect, without looking through torch each time: that took 0.2 s of every test. It may be unfrozen since."""
    global _modules_frozen
    gc.collect()
    if len(sys.modules) != _modules_frozen or len(gc.get_objects(generation=2)) > _MOST_UNFROZEN:
        _modules_frozen = len(sys.modules)
        gc.freeze()


_leaving: threading.Thread | None = None


def _leave_groups() -> None:
    """End an earlier run's process groups. At that run's end a slower rank might still read from this one.

    gloo's threads look for the end every 10 ms, and are waited for: that is left to a thread, which does nothing else.
    """
    await_groups_of_before()
    if not dist.is_initialized():
        return
    groups = list(dist.distributed_c10d._world.pg_map)
    dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:  # it would take an earlier run's mesh for a later run's equal one
        with contextlib.suppress(ImportError):  # of torch 2.11
            from torch.distributed.tensor._redistribute import clear_redistribute_planner_cache
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache

            _clear_sharding_prop_cache()
            clear_redistribute_planner_cache()
    global _leaving
    _leaving = threading.Thread(target=groups.clear)
    _leaving.start()


def await_groups_of_before() -> None:
    """Return when the groups of earlier runs have closed their connections: for tests that count what is open."""
    if _leaving is not None:
        _leaving.join()


def _start_clean() -> None:
    _leave_groups()
    _collect_garbage()
    if "torch._dynamo" in sys.modules:
        importlib.import_module("torch._dynamo").reset()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.manual_seed(0)
    random.seed(0)
    warnings_are_errors()


def forkserver() -> multiprocessing.context.ForkServerContext:
    """Makes processes that have imported already what most tests need."""
    os.environ["OMP_NUM_THREADS"] = "1"  # read when the fork server imports torch
    start = multiprocessing.get_context("forkserver")
    too = [*PRELOADED_TOO.items(), *(() if torch.accelerator.current_accelerator() else PRELOADED_ON_CPUS.items())]
    wanted = [module for collected, module in too if collected in sys.modules]
    start.set_forkserver_preload([*PRELOADED, *wanted, *PRELOADED_LAST])
    return start


class _Worker:
    """One rank process. Owns the process, its pipe and the file its stacks are dumped to."""

    def __init__(self, store_port: int, environment: dict[str, str]) -> None:
        handle, self.dump_path = tempfile.mkstemp(prefix="rank_stacks_")
        os.close(handle)
        start = forkserver()
        self.connection, theirs = start.Pipe()
        args = theirs, store_port, self.dump_path, environment
        self.process: BaseProcess = start.Process(target=_serve, args=args, daemon=True)
        self.process.start()
        theirs.close()

    def stacks(self) -> str:
        """The current stack of each thread."""
        before = Path(self.dump_path).stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, signal.SIGUSR1)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            time.sleep(0.1)
            if Path(self.dump_path).stat().st_size > before:
                break
        return Path(self.dump_path).read_text()[before:]

    def kill(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()
        Path(self.dump_path).unlink(missing_ok=True)


class Ranks(NamedTuple):
    """`world_size` ranks of the pool. Get it with ``ranks(n)``."""

    pool: RankPool
    world_size: int
    backend: str
    group_timeout_s: float

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``function(context, *args, **kwargs)`` on every rank; returns what each rank returned, in rank order.

        It and its arguments are pickled. Raises a `RankFailure` if a rank raised, died, or did not answer in time.
        """
        __tracebackhide__ = True  # the ranks' own tracebacks are what is of interest
        pool, world_size, backend = self.pool, self.world_size, self.backend
        workers = [pool.worker(backend, rank) for rank in range(world_size)]
        pool.runs += 1
        request = _Request(function, args, kwargs, 0, world_size, backend, f"run{pool.runs}", self.group_timeout_s)
        try:
            for rank, worker in enumerate(workers):
                worker.connection.send_bytes(pickle.dumps(request._replace(rank=rank)))
            replies = pool.collect(workers)
        except BaseException:  # as by pytest-timeout: else the next run would get these replies
            pool.drop(backend, world_size)
            raise
        failures = {rank: reply.value for rank, reply in replies.items() if reply.kind == "failure"}
        if failures:
            pool.drop(backend, world_size)
            raise RankFailure(
                "\n".join(f"---- rank {rank} of {world_size} ----\n{story}" for rank, story in sorted(failures.items()))
            )
        for reply in replies.values():
            if reply.kind == "skip":
                pytest.skip(reply.value)
        return [replies[rank].value for rank in range(world_size)]


class RankPool:
    """Worker processes by rank, started on first use. Owns them and the store their groups meet at."""

    def __init__(self, *, run_timeout_s: float = RUN_TIMEOUT_S, group_timeout_s: float = GROUP_TIMEOUT_S) -> None:
        self._run_timeout_s = run_timeout_s
        self._group_timeout_s = group_timeout_s
        self._store: TCPStore | None = None
        self._workers: dict[tuple[str, int], _Worker] = {}
        self.runs = 0

    def __call__(self, world_size: int, *, backend: str = "gloo", group_timeout_s: float | None = None) -> Ranks:
        """The first `world_size` ranks of the pool, with a process group of that timeout and backend (`on_ranks`)."""
        if backend == "of accelerator":
            backend = "nccl" if has_gpu() else "gloo"
        return Ranks(self, world_size, backend, group_timeout_s or self._group_timeout_s)

    def close(self) -> None:
        for worker in self._workers.values():
            worker.kill()
        self._workers.clear()
        self._store = None

    def collect(self, workers: list[_Worker]) -> dict[int, _Reply]:
        """One reply per rank; ranks that do not answer get one that says where they were."""
        replies: dict[int, _Reply] = {}
        deadline = time.monotonic() + self._run_timeout_s
        while len(replies) < len(workers):
            waiting = {worker.connection: rank for rank, worker in enumerate(workers) if rank not in replies}
            ready = wait(list(waiting), timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                for rank in waiting.values():
                    replies[rank] = _Reply("failure", f"no answer; it was at\n{workers[rank].stacks()}")
                break
            for connection in ready:
                rank = waiting[connection]  # type: ignore[index]  # wait() is typed for sockets and handles too
                try:
                    replies[rank] = pickle.loads(workers[rank].connection.recv_bytes())
                except (EOFError, OSError):
                    workers[rank].process.join(5.0)
                    code = workers[rank].process.exitcode
                    replies[rank] = _Reply(
                        "failure", f"died with exit code {code}\n{Path(workers[rank].dump_path).read_text()}"
                    )
                if replies[rank].kind == "failure":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies

    def worker(self, backend: str, rank: int) -> _Worker:
        if self._store is None:
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        if (backend, rank) not in self._workers:
            environment = {}
            if backend == "nccl":
                # Several NCCL ranks share one GPU when each says that it is another host; sockets carry the data.
                environment = {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo"}
                environment |= {"NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1"}
            self._workers[backend, rank] = _Worker(self._store.port, environment)
        return self._workers[backend, rank]

    def drop(self, backend: str, world_size: int) -> None:
        for rank in range(world_size):
            self._workers.pop((backend, rank)).kill()


def _run_body(context: RankContext, module: str, name: str, /, **arguments: Any) -> None:
    getattr(importlib.import_module(module), name).rank_body(context, **arguments)


def everywhere(value: Any) -> list[Any]:
    """What all ranks gave, in rank order. Collective."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def on_ranks(*world_sizes: int, backend: str = "gloo") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a test whose body runs on every rank, once for each of `world_sizes`.

    The body's first argument is its `RankContext`; others come from ``pytest.mark.parametrize`` or fixtures and
    must be picklable. Without `world_sizes` the test's own ``parametrize`` names `world_size` beside others, where not
    all of them go together. The backend is "gloo", whose ranks are on the CPU; "nccl", on the GPU, which they share; or
    "of accelerator": on the GPU where there is one, else on the CPU.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(ranks: RankPool, world_size: int, **arguments: Any) -> None:
            __tracebackhide__ = True
            ranks(world_size, backend=backend).run(_run_body, body.__module__, body.__name__, **arguments)

        functools.update_wrapper(test, body)  # name, docstring, marks, and the place pytest reports
        test.rank_body = body  # type: ignore[attr-defined]  # where _run_body finds it in the worker
        own = list(inspect.signature(body).parameters.values())[1:]
        given = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("ranks", "world_size")]
        test.__signature__ = inspect.Signature(given + own)  # type: ignore[attr-defined]  # what pytest reads
        if not world_sizes:
            return test
        return pytest.mark.parametrize("world_size", world_sizes)(test)

    return decorate


@contextlib.contextmanager
def open_pool(**settings: float) -> Iterator[RankPool]:
    """A pool that ends its workers when left."""
    pool = RankPool(**settings)
    try:
        yield pool
    finally:
        pool.close()
