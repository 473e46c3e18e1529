"""A run that was saved goes on as if nothing had happened; what does not fit is refused before anything changes."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import random
import re
import signal
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from streamshard import (
    CheckpointError,
    ConfigError,
    RankMismatchError,
    ShardingError,
    StreamShard,
    StreamShardError,
    export_safetensors,
    full_optimizer_state_dict,
    latest,
    load_checkpoint,
    load_safetensors,
    save_checkpoint,
)
from streamshard.checkpoint import save
from streamshard.checkpoint.dcp import from_dcp, to_dcp
from streamshard.comm import flight_recorder
from tests.checkpoint.exporting import filled, sharded
from tests.checkpoint.runs import Counted, start, steps, weights_of
from tests.compare import EXACT, assert_same, assert_same_state, full_weights, piece_of
from tests.families import llama
from tests.faults import case
from tests.launched import Launched
from tests.models import DIM, Layer, Stack
from tests.ranks import RankContext, RankPool, on_ranks
from tests.reference import FP32, adamw, sharded_model, stack_step


@on_ranks(2)
def test_a_run_goes_on_to_the_bit(context: RankContext, tmp_path: Path) -> None:
    """Weights, moments, schedule, scale, counters and random numbers: another model, started otherwise, takes over."""
    run = start(0)
    random.seed(context.rank)
    steps(run, 0, 3)
    where = save_checkpoint(tmp_path, *run[:2], {**run.extra, "position": 3, "mean": torch.tensor([0.5])}).path
    wanted = steps(run, 3, 6)
    other = start(1)
    steps(other, 0, 1)
    loaded = load_checkpoint(tmp_path, *other)
    assert where == loaded.path == tmp_path / "checkpoint-1"
    assert loaded["position"] == 3
    assert torch.equal(loaded["mean"], torch.tensor([0.5]))
    assert other.model.calls == {"seen": 3}
    assert steps(other, 3, 6) == wanted
    assert_same(weights_of(other), weights_of(run), "weights", EXACT)


@on_ranks(2)
def test_a_value_that_cannot_be_saved_is_named_on_all_ranks(context: RankContext, tmp_path: Path) -> None:
    """Whatever holds the pieces, and whichever rank has some."""
    run = start(0)
    steps(run, 0, 1)
    average = [param.detach().clone() for param in run.model.parameters()]
    mine = SimpleNamespace(state_dict=(lambda: int("boom")) if context.rank == 1 else dict, load_state_dict=print)
    extra, group = dict[str, Any](), run.optimizer.param_groups[0]
    state = run.optimizer.state[next(param for param in run.model.parameters() if piece_of(param).numel())]
    cases: list[tuple[dict[Any, Any], str, Any, str]] = [
        (extra, "mine", mine, "rank 1: ValueError: .*boom"),
        (group, "ema", average, r"param_groups\[0\]\.ema\[0\] is one rank's piece"),
        (state, "history", average[:1], r"optimizer/model/.*\.history\[0\] is one rank's piece"),
        (state, "history", deque(average), r"model/.*\.history is a collections\.deque: a checkpoint holds numbers"),
    ]
    for holder, name, held, words in cases:
        holder[name] = held
        for wait in (True, False):
            with pytest.raises(CheckpointError, match=words):
                save_checkpoint(tmp_path, run.model, run.optimizer, extra, wait=wait)
        if holder is state:
            with pytest.raises(ShardingError, match="history"):
                full_optimizer_state_dict(run.model, run.optimizer)
        del holder[name]
    assert not any(tmp_path.iterdir())
    load_checkpoint(save_checkpoint(tmp_path, *run).path, *run)


def _two_more(
    context: RankContext, path: Path, shape: tuple[int, ...], settings: dict[str, Any], *, saves: bool
) -> list[float]:
    """The losses of two steps after two that were saved in `path`, by this run or another, on a mesh of this shape."""
    run = start(0 if saves else 1, mesh=init_device_mesh("cpu", shape), **settings)
    if saves:
        steps(run, 0, 2, spread=6)
    (save_checkpoint if saves else load_checkpoint)(path, *run)
    return steps(run, 2, 4, spread=6)


@pytest.mark.ranks
def test_any_number_of_ranks_loads_what_any_has_saved(ranks: RankPool, tmp_path: Path) -> None:
    """With other units, layouts and replicas too: losses to rounding."""
    wanted = ranks(2).run(_two_more, tmp_path, (2,), {}, saves=True)[0]
    ranks(2).run(_two_more, tmp_path / "of replicas", (2, 1), {}, saves=True)
    for path, shape, settings in (
        (tmp_path, (3,), {"align_pieces_to": 24}),
        (tmp_path, (1,), {"min_unit_size": "1GB"}),
        (tmp_path, (2, 1), {}),
        (tmp_path / "of replicas", (1, 2), {}),
    ):
        found = ranks(math.prod(shape)).run(_two_more, path, shape, settings, saves=False)[0]
        assert found == pytest.approx(wanted, rel=1e-5)


@on_ranks(2)
def test_saving_in_the_background_saves_what_was_there(context: RankContext, tmp_path: Path) -> None:
    """Training goes on at once; what is written is what was there at the call.

    Signals are left alone: handlers of Python's would not be called in a process that waits outside of Python.
    """
    run = start(0)
    steps(run, 0, 2)
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    write, has_trained = save.write_file, threading.Event()
    with patch.object(save, "write_file", lambda *args: has_trained.wait(60) and write(*args)):
        saving = save_checkpoint(tmp_path, *run, wait=False, step=2)
        (thread,) = (each for each in threading.enumerate() if each.name.startswith("save "))
        assert not thread.daemon  # the interpreter waits for it
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == handlers
        wanted = steps(run, 2, 4)
        has_trained.set()
        assert saving.wait() == tmp_path / "checkpoint-2"
    assert saving.done
    save_checkpoint(tmp_path, *run, wait=False, step=3)
    again = save_checkpoint(tmp_path, *run, wait=False, step=4)  # over the same copies, once the one before is written
    assert (tmp_path / "checkpoint-3" / "checkpoint.json").exists()
    later = steps(run, 4, 6)
    load_checkpoint(again.path, *run)  # waits
    assert steps(run, 4, 6) == later
    other = start(1)
    load_checkpoint(tmp_path / "checkpoint-2", *other)
    assert steps(other, 2, 4) == wanted


@on_ranks(2)
def test_a_rank_that_is_interrupted_before_it_writes_ends_the_save_on_all(context: RankContext, tmp_path: Path) -> None:
    """The others hear of it; the next save works."""
    run = start(0)
    if context.rank == 1:
        with patch.object(save, "start_saving", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, *run, wait=False)
    else:
        saving = save_checkpoint(tmp_path, *run, wait=False)
        with pytest.raises(CheckpointError, match="background .* rank 1 has failed: interrupted"):
            saving.wait()
    assert save_checkpoint(tmp_path, *run, wait=False).wait().name == "checkpoint-1"
    assert len(list(tmp_path.iterdir())) == 1


def _die_while_saving(directory: Path) -> None:
    flight_recorder._LOGS_WITHIN_S = 0.2
    model = StreamShard(Stack())
    if dist.get_rank() == 1:
        save.write_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, return-value]
    saving = save_checkpoint(directory, model, wait=False)
    for action in (saving.wait, lambda: save_checkpoint(directory, model)):
        try:
            action()
        except StreamShardError as error:
            print(type(error).__name__, error)


@pytest.mark.ranks
def test_a_rank_that_dies_while_a_save_runs_is_named(tmp_path: Path) -> None:
    """As soon as its connections close, and by the next call too."""
    (code, output), _ = Launched(2, tmp_path, _die_while_saving, tmp_path / "run").end()
    assert code == 0, output
    told = r"CheckpointError .* may not be complete \(latest\(\) .*\): saving in the background .*rank 1 has not come"
    assert re.search(told, output), output
    assert re.search("CommunicationError .*rank 1 has not come", output), output
    assert latest(tmp_path / "run") is None


@on_ranks(2)
def test_an_export_waits_for_the_save_in_the_background(context: RankContext, tmp_path: Path) -> None:
    """It would be another run for the save, and the save for the export."""
    run = start(0)
    write, may_write = save.write_file, threading.Event()
    with patch.object(save, "write_file", lambda *args: may_write.wait() and write(*args)):
        saving = save_checkpoint(tmp_path, *run, wait=False)
        threading.Timer(0.2, may_write.set).start()
        export_safetensors(run.model, tmp_path)
    assert saving.wait() == latest(tmp_path) == tmp_path / "checkpoint-1"


def _break_writing(context: RankContext, rank: int, error: BaseException) -> Any:
    """Inside, this rank cannot write."""
    return patch.object(save, "write_file", side_effect=error) if context.rank == rank else contextlib.nullcontext()


@on_ranks(2)
def test_an_error_that_one_rank_has_seen_is_raised_on_all_later(context: RankContext, tmp_path: Path) -> None:
    """So that they go on together, also if none has; once all have heard of it, it is over. Nothing is left of it."""
    run = start(0)
    before, told = save_checkpoint(tmp_path, *run).path, "rank 0: the disk is full"
    with _break_writing(context, 0, CheckpointError("the disk is full")):
        for waiting in ([], [0], [0, 1]):
            saving = save_checkpoint(tmp_path, *run, wait=False)
            for _ in range(2 if context.rank in waiting else 0):
                with pytest.raises(CheckpointError, match=told):
                    saving.wait()
            if len(waiting) < 2:
                with pytest.raises(CheckpointError, match=told):
                    save_checkpoint(tmp_path, *run, wait=False)
    assert list(tmp_path.iterdir()) == [before] and latest(tmp_path) == before
    assert save_checkpoint(tmp_path, *run).path.name == "checkpoint-2"


@on_ranks(2)
def test_arguments_that_differ_between_ranks(context: RankContext, tmp_path: Path) -> None:
    """By name and rank, on all ranks, before anything is written; they would wait for each other in vain."""
    run, rank = start(0), context.rank
    own, model, optimizer = tmp_path / str(rank), sharded(filled(llama)), run.optimizer if rank else None
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("'wait'", lambda: save_checkpoint(tmp_path, *run, wait=bool(rank))),
        ("'step'", lambda: save_checkpoint(tmp_path, *run, step=rank)),
        ("'step'", lambda: save_checkpoint(tmp_path, *run, step=1 if rank else None)),
        ("'keep'", lambda: save_checkpoint(tmp_path, *run, keep=1 + rank)),
        ("'directory'", lambda: save_checkpoint(own, *run)),
        ("'directory'", lambda: export_safetensors(model, own)),
        ("'directory'", lambda: model.save_pretrained(own)),
        ("", lambda: save_checkpoint(tmp_path, run.model, optimizer)),
        ("", lambda: save_checkpoint(tmp_path, {str(rank): run.model})),
    ]
    for name, call in calls:
        with case(name), pytest.raises(RankMismatchError, match=f"the same on all ranks.*{name}"):
            call()
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_gradients_that_wait_for_a_step_are_lost_with_a_word(context: RankContext, tmp_path: Path) -> None:
    """Those that a step has used are not spoken of."""
    model: Any = StreamShard(Stack(), precision=FP32, grad_slots="all")
    optimizer = adamw(model)
    with model.no_sync():
        stack_step(model, context.call(0))
        lost = "model: a checkpoint has no gradients, and some have been accumulated"
        with contextlib.nullcontext() if context.rank else pytest.warns(UserWarning, match=lost):
            save_checkpoint(tmp_path, model, optimizer)
    stack_step(model, context.call(1))
    optimizer.step()
    save_checkpoint(tmp_path, model, optimizer)


@on_ranks(2)
def test_an_error_of_one_rank_is_raised_on_all_and_leaves_nothing(context: RankContext, tmp_path: Path) -> None:
    """With its name, if it was interrupted too; the next save works."""
    run = start(0)
    for error, told in ((CheckpointError("the disk is full"), "the disk"), (KeyboardInterrupt(), "KeyboardInterrupt")):
        kind = type(error) if context.rank == 1 else CheckpointError
        words = None if kind is KeyboardInterrupt else f"checkpoint-1: rank 1: {told}"
        with _break_writing(context, 1, error), pytest.raises(kind, match=words):
            save_checkpoint(tmp_path, *run)
    assert list(tmp_path.iterdir()) == [] and latest(tmp_path) is None
    blocked = save_checkpoint(tmp_path, *run).path / "checkpoint.json"
    with pytest.raises(CheckpointError, match=r"could not save .*json"):
        save_checkpoint(blocked, *run)


class Position:
    """A data loader's."""

    def __init__(self, position: int) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "generator": torch.arange(self.position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["generator"], torch.arange(state["position"]))
        self.position = state["position"]


@on_ranks(2)
def test_several_models_optimizers_and_objects(context: RankContext, tmp_path: Path) -> None:
    """Sharded and plain ones, objects that differ between ranks, values; each comes back to its own."""

    def make(seed: int, at: int) -> Any:
        torch.manual_seed(seed)
        actor, critic = (StreamShard(Stack((DIM,) * depth), precision=FP32) for depth in (5, 3))
        plain = Layer()
        both = torch.optim.SGD([*actor.parameters(), *critic.parameters(), *plain.parameters()], lr=0.1, momentum=0.9)
        own = torch.optim.Adam(actor.parameters())
        for model in (actor, critic):
            stack_step(model, context.call(0))
        plain(torch.ones(1, DIM)).sum().backward()
        both.step()
        own.step()
        return {"actor": actor, "critic": critic}, {"both": both, "own": own}, {"loader": Position(at), "plain": plain}

    models, optimizers, objects = make(0, 3 + context.rank)
    save_checkpoint(tmp_path, models, optimizers, extra={**objects, "best": 0.25, "names": ("a", "b")})
    others, their_optimizers, their_objects = make(1, 0)
    loaded = load_checkpoint(tmp_path, others, their_optimizers, extra=their_objects)
    assert their_objects["loader"].position == 3 + context.rank
    assert loaded == {**their_objects, "best": 0.25, "names": ("a", "b")}
    for name in ("actor", "critic"):
        assert_same(full_weights(others[name]), full_weights(models[name]), name, EXACT)
    assert_same(their_objects["plain"].state_dict(), objects["plain"].state_dict(), "plain", EXACT)
    for name, optimizer in optimizers.items():
        for param, its in zip(*(each.state.values() for each in (optimizer, their_optimizers[name])), strict=True):
            assert_same(its, param, name, EXACT)


@on_ranks(2)
def test_names_that_files_cannot_hold_are_refused(context: RankContext, tmp_path: Path) -> None:
    """An export has the parameters' own names; in a checkpoint more stands before them."""
    for name in ("__metadata__", "w\udcff"):
        plain = Stack()
        plain.register_parameter(name, nn.Parameter(torch.ones(3)))
        model = StreamShard(plain, precision=FP32)
        with pytest.raises(CheckpointError, match=re.escape(f"a tensor is named {name!r}: safetensors files take")):
            export_safetensors(model, tmp_path / "export")
    with pytest.raises(CheckpointError, match=re.escape(f"a tensor is named {'model/' + name!r}: ")):
        save_checkpoint(tmp_path, model)
    assert not any(tmp_path.glob("check*"))


def _save_what_differs(context: RankContext, path: Path) -> Any:
    run = start(0)
    steps(run, 0, 1)
    run.model.calls["seen"] += context.rank
    save_checkpoint(path, *run[:2], {"loader": Position(3 + context.rank), "best": [context.rank], "step": 1})
    return weights_of(run), full_optimizer_state_dict(run.model, run.optimizer)


def _load_what_differs(context: RankContext, path: Path, wanted: Any) -> None:
    run, loader = start(1), Position(0)
    told = "'extra.loader' differs between the 2 ranks that saved it: leave it out of extra="
    with pytest.raises(CheckpointError, match=told):
        load_checkpoint(path, *run[:2], {"loader": loader})
    saved = load_checkpoint(path, *run[:2])
    assert_same(weights_of(run), wanted[0], "weights", EXACT)
    assert_same_state(full_optimizer_state_dict(run.model, run.optimizer), wanted[1])
    assert saved == {"step": 1} and saved.by_rank["best"] == [[0], [1]]
    loader.load_state_dict(saved.by_rank["loader"][1])
    assert loader.position == 4 and run.model.calls == {"seen": 1}
    with pytest.raises(KeyError, match="'best' differs between the ranks that saved it: see by_rank"):
        saved["best"]


@pytest.mark.ranks
def test_values_that_differ_between_ranks_come_back_by_rank(ranks: RankPool, tmp_path: Path) -> None:
    """On another number of ranks: nobody can say where its loaders are. All else loads; extra state is rank 0's."""
    wanted = ranks(2).run(_save_what_differs, tmp_path)[0]
    ranks(1).run(_load_what_differs, tmp_path, wanted)


@on_ranks(2)
def test_a_mismatch_is_named_and_nothing_changes(context: RankContext, tmp_path: Path) -> None:
    """All differences at once; of models, optimizers and what was asked for."""
    run = start(0)
    steps(run, 0, 1)
    save_checkpoint(tmp_path, *run)
    other = StreamShard(Stack(), precision=FP32)
    before = full_weights(other)
    told = r"Counted and does not fit Stack: missing 'head.bias', .*unexpected"
    with pytest.raises(CheckpointError, match=told) as why:
        load_checkpoint(tmp_path, other)
    assert all(repr(name) in str(why.value) for name, _ in run.model.named_parameters() if "blocks" in name)
    assert_same(full_weights(other), before, "weights", EXACT)

    changed = start(1)
    before = weights_of(changed)
    sgd = torch.optim.SGD(changed.model.parameters(), lr=0.1)
    for optimizer, words in (
        (sgd, r"optimizer is torch.optim.adamw.AdamW, wanted torch.optim.sgd.SGD"),
        (torch.optim.AdamW(changed.model.parameters()), r"optimizer has 2 param groups, wanted 1"),
        ({"a": sgd}, r"it has no 'optimizer.a', but 'optimizer'"),
    ):
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(tmp_path, changed.model, optimizer)
    with pytest.raises(CheckpointError, match=r"it has no 'extra.loader'"):
        load_checkpoint(tmp_path, *changed[:2], {**changed.extra, "loader": Position(0)})
    with pytest.raises(CheckpointError, match="could not load .*: AssertionError|KeyError"):
        load_checkpoint(tmp_path, changed.model, changed.optimizer, {"scheduler": Position(0)})
    assert_same(weights_of(changed), before, "weights", EXACT)
    assert not changed.optimizer.state
    load_checkpoint(tmp_path, changed.model)
    assert_same(weights_of(changed), weights_of(run), "weights", EXACT)


@on_ranks(2)
def test_a_weight_that_was_tied_is_loaded_wherever_it_is_now(context: RankContext, tmp_path: Path) -> None:
    """Into both of those that it has become. A buffer that is not contiguous comes back in its own memory."""
    tied, apart = Counted(), Counted()
    for each in (tied, apart):
        each.register_buffer("table", torch.arange(6.0).view(2, 3).t())
    apart.head.weight = nn.Parameter(torch.zeros(apart.embedding.weight.shape))
    saved: Any = StreamShard(tied, precision=FP32)
    save_checkpoint(tmp_path, saved)
    model: Any = StreamShard(apart, precision=FP32)
    table = model.table
    table.zero_()
    load_checkpoint(tmp_path, model)
    wanted, found = saved.full_state_dict(rank0_only=False), model.full_state_dict(rank0_only=False)
    for name in ("embedding.weight", "head.weight", "table"):
        assert torch.equal(found[name], wanted[name]), name
    assert model.table is table


@on_ranks(2)
def test_arguments_that_cannot_work(context: RankContext, tmp_path: Path) -> None:
    run, other, linear, array = start(0), sharded_model(), nn.Linear(2, 2), np.ones(2, np.longdouble)
    mixed, stray = (torch.optim.AdamW([*run.model.parameters(), *each.parameters()]) for each in (other, linear))
    several = {"a": {"b": torch.ones(2)}, "a.b": torch.ones(2)}

    def save_it(model: Any = run.model, optimizer: Any = None, extra: Any = None, **settings: Any) -> Callable[[], Any]:
        return lambda: save_checkpoint(tmp_path, model, optimizer, extra, **settings)

    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ConfigError, "keep=0: wanted an integer of at least 1", save_it(keep=0)),
        (ConfigError, "keep=True", save_it(keep=True)),
        (ConfigError, "step=-1: wanted an integer of at least 0", save_it(step=-1)),
        (ConfigError, r"extra=\[1\]: wanted a dict", save_it(extra=[1])),
        (ConfigError, "optimizer is a OneCycleLR", save_it(optimizer=run.extra["scheduler"])),
        (ConfigError, "model is a AdamW", save_it(run.optimizer)),
        (ConfigError, "out=None: wanted a path", lambda: to_dcp(tmp_path, None)),  # type: ignore[arg-type]
        (CheckpointError, "AdamW steps 'layers.0.linear.weight' of no given model", save_it(optimizer=mixed)),
        (CheckpointError, r"AdamW steps a parameter of shape \(2, 2\) of no given", save_it(optimizer=stray)),
        (ShardingError, "Linear is not sharded", save_it({"model": run.model, "head": linear}, stray)),
        (ShardingError, "no model made by StreamShard", save_it({})),
        (CheckpointError, r"extra\.x is a numpy\.ndarray", save_it(extra={"x": array})),
        (CheckpointError, r"extra\.x\[0\] is a .*Position: .* by itself", save_it(extra={"x": [Position(1)]})),
        (CheckpointError, r"are named 'extra\.a\.b': give other keys in extra=", save_it(extra=several)),
        (CheckpointError, "no whole checkpoint: wanted a directory", lambda: load_checkpoint(tmp_path, *run)),
    ]
    calls: list[Callable[[Any], Any]] = [
        latest,
        lambda directory: save_checkpoint(directory, run.model),
        lambda directory: load_checkpoint(directory, run.model),
        lambda directory: export_safetensors(run.model, directory),
        lambda directory: load_safetensors(run.model, directory),
        lambda directory: to_dcp(directory, tmp_path / "out"),
        lambda directory: from_dcp(directory, tmp_path),
    ]
    for call, directory in itertools.product(calls, (b"runs", 1, None, "run\udcff")):
        words = re.escape(f"directory={directory!r}: wanted a path")
        refused.append((ConfigError, words, functools.partial(call, directory)))
    for error, words, refusing in refused:
        with case(words), pytest.raises(error, match=words):
            refusing()
    with run.model.summon_full_params(), pytest.raises(ShardingError, match="inside summon_full_params"):
        save_checkpoint(tmp_path, *run)
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_a_model_from_the_meta_device_takes_over(context: RankContext, tmp_path: Path) -> None:
    """Without ever having had values of its own."""
    run = start(0)
    steps(run, 0, 2, spread=4)
    save_checkpoint(tmp_path, *run)
    wanted = steps(run, 2, 4, spread=4)
    with torch.device("meta"):
        model = Counted()
    model.scale = torch.ones(1)
    other = start(1, model)
    with pytest.raises(ShardingError, match="save_checkpoint, but parameter .* is empty"):
        save_checkpoint(tmp_path, *other)
    load_checkpoint(tmp_path, *other)
    assert steps(other, 2, 4, spread=4) == wanted
