"""What is copied late is what was there at the call, whoever is in a hurry; else nothing is saved, and all know it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from streamshard import load_checkpoint, save_checkpoint, training_state
from streamshard.checkpoint import save
from streamshard.checkpoint.safetensors_file import write_file
from streamshard.checkpoint.save import HostCopies
from streamshard.errors import CheckpointError
from streamshard.unit.optimizer_hooks import sees_steps
from tests.checkpoint.runs import Counted, Run, start, steps, weights_of
from tests.ranks import RankContext, on_ranks
from tests.reference import EXACT, assert_same, piece_of
from tests.simulated import simulated_device

WAIT_S = 60.0  # for another thread; only where a test fails


class Held(HostCopies):
    """Copies that are as late as may be: the thread makes them once a step asks for it, or the test.

    Attributes:
        may_copy: they may be made now.
        stepped: for each step that asked, whether everything was copied when it was let go.
    """

    def __init__(self, *args: Any) -> None:
        self.may_copy = threading.Event()
        self.stepped: list[bool] = []
        super().__init__(*args)

    def finish(self) -> Any:
        """See there."""
        assert self.may_copy.wait(WAIT_S)
        return super().finish()

    def let_step(self) -> None:
        """See there."""
        self.may_copy.set()
        super().let_step()
        self.stepped.append(self._is_copied.is_set())


def _save(directory: Path, run: Run) -> tuple[Any, Held]:
    """A save in the background, and its copies, which are held back."""
    with mock.patch.object(training_state, "HostCopies", Held):
        saving: Any = save_checkpoint(directory, *run, wait=False)
    copies = saving._copies
    assert isinstance(copies, Held)
    return saving, copies


def _short() -> nn.Module:
    """Two blocks: compiling a step takes a while for each parameter."""
    model = Counted()
    del model.blocks[2:]
    return model


def _trained(count: int = 2, model: nn.Module | None = None) -> Run:
    run = start(0, model)
    steps(run, 0, count)
    return run


def _state_of(run: Run) -> dict[str, torch.Tensor]:
    """Weights, and a copy of each moment of this rank."""
    moments = {
        f"{number}/{key}": value.detach().as_subclass(torch.Tensor).clone()
        for number, param in enumerate(run.model.parameters())
        for key, value in run.optimizer.state[param].items()
        if piece_of(param).numel()
    }
    return {**weights_of(run), **moments}


def _assert_holds(path: Path, wanted: dict[str, torch.Tensor], model: nn.Module | None = None) -> None:
    other = start(1, model)
    load_checkpoint(path, *other)
    assert_same(_state_of(other), wanted, "what was saved", EXACT)


@on_ranks(2)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_step_right_after_the_call_waits(context: RankContext, tmp_path: Path, is_compiled: bool) -> None:
    """Whenever the copies are made, they are of what was there; forward and backward go on without them."""
    run = _trained(model=_short() if is_compiled else None)
    wanted = _state_of(run)
    if is_compiled:
        run.optimizer.step = torch.compile(run.optimizer.step, backend="eager")  # type: ignore[method-assign]
    saving, copies = _save(tmp_path, run)
    assert len(copies._late) == 2 * sum(piece_of(param).numel() > 0 for param in run.model.parameters())
    steps(run, 2, 4)
    copies.may_copy.set()  # for a step that has not asked
    _assert_holds(saving.wait(), wanted, _short() if is_compiled else None)
    assert copies.stepped[0]


@on_ranks(2)
def test_weights_are_the_callers_again_at_once(context: RankContext, tmp_path: Path) -> None:
    """Averages of weights are swapped in past autograd's eyes."""
    run = _trained()
    wanted = _state_of(run)
    saving, copies = _save(tmp_path, run)
    for param in run.model.parameters():
        param.data.zero_()
    copies.may_copy.set()
    _assert_holds(saving.wait(), wanted)


@contextlib.contextmanager
def _writing_once(may_write: threading.Event) -> Iterator[None]:
    def write_later(*args: Any) -> Any:
        assert may_write.wait(WAIT_S)
        return write_file(*args)

    with mock.patch.object(save, "write_file", write_later):
        yield


def _zero_one(run: Run) -> None:
    param = next(param for param in run.model.parameters() if piece_of(param).numel())
    run.optimizer.state[param]["exp_avg"].zero_()


@on_ranks(2)
@pytest.mark.parametrize("is_copied", [False, True])
def test_an_edit_of_moments_meanwhile_is_refused_on_all_ranks(
    context: RankContext, tmp_path: Path, is_copied: bool
) -> None:
    """By name, with nothing published, also where it outlasts the copying; the run goes on, and so do later saves."""
    run = _trained()
    words = r"rank 1: 'optimizer/.*/exp_avg' was written to in place .* by something that is no step"
    may_write = threading.Event()
    for is_stepped in (False, True):
        with _writing_once(may_write):
            saving, copies = _save(tmp_path, run)
            if is_copied:
                copies.may_copy.set()
                assert copies._is_copied.wait(WAIT_S)
            if context.rank == 1:
                _zero_one(run)
            if is_stepped:
                steps(run, 2, 3)
            copies.may_copy.set()
            may_write.set()
            with pytest.raises(CheckpointError, match=words):
                saving.wait()
        may_write.clear()
        assert not any(tmp_path.iterdir())
    wanted = _state_of(run)
    _assert_holds(save_checkpoint(tmp_path, *run), wanted)


@on_ranks(2)
@pytest.mark.parametrize("is_stepped", [False, True])
def test_an_edit_that_comes_later_does_not_matter(context: RankContext, tmp_path: Path, is_stepped: bool) -> None:
    """After a step, or the end."""
    run = _trained()
    wanted = _state_of(run)
    may_write = threading.Event()
    with _writing_once(may_write):
        saving, copies = _save(tmp_path, run)
        copies.may_copy.set()
        if is_stepped:
            steps(run, 2, 3)
            _zero_one(run)
        may_write.set()
        saving.wait()
    _zero_one(run)
    _assert_holds(saving.path, wanted)


def _put_new_tensors(run: Run) -> None:
    for state in filter(None, run.optimizer.state.values()):
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


REPLACEMENTS: dict[str, Callable[[Run, Any], None]] = {
    "another state dict": lambda run, other: run.optimizer.load_state_dict(other),
    "tensors": lambda run, other: _put_new_tensors(run),
    "nothing": lambda run, other: run.optimizer.state.clear(),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", REPLACEMENTS)
def test_state_that_is_replaced_meanwhile_is_saved_as_it_was(context: RankContext, tmp_path: Path, kind: str) -> None:
    """The copy is made of the tensors that were there; those are let go once it is."""
    other = _trained(1).optimizer.state_dict()
    run = _trained()
    wanted = _state_of(run)
    saving, copies = _save(tmp_path, run)
    REPLACEMENTS[kind](run, other)
    steps(run, 2, 3)
    copies.may_copy.set()
    _assert_holds(saving.wait(), wanted)
    assert not copies._late


@on_ranks(2)
def test_loading_a_checkpoint_waits(context: RankContext, tmp_path: Path) -> None:
    """It reads into the moments that are there, which no step does."""
    run = _trained()
    path = save_checkpoint(tmp_path / "first", *run)
    steps(run, 2, 3)
    wanted = _state_of(run)
    saving, copies = _save(tmp_path / "second", run)
    threading.Timer(0.05, copies.may_copy.set).start()
    load_checkpoint(path, *run)
    assert saving.done
    _assert_holds(saving.path, wanted)


@on_ranks(2)
def test_a_second_save_waits(context: RankContext, tmp_path: Path) -> None:
    """For the memory of the copies, which is the same each time."""
    run = _trained()
    wanted = _state_of(run)
    first, copies = _save(tmp_path, run)
    threading.Timer(0.05, copies.may_copy.set).start()
    second: Any = save_checkpoint(tmp_path, *run, wait=False)
    assert first.done
    for path in (first.path, second.wait()):
        _assert_holds(path, wanted)
    kept = [each.data.data_ptr() for each in copies._copies]
    again, copies = _save(tmp_path, run)
    copies.may_copy.set()
    again.wait()
    assert [each.data.data_ptr() for each in copies._copies] == kept


class WithoutRoom(HostCopies):
    """What is copied late does not fit."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._late = [(torch.empty(0), piece, version) for _, piece, version in self._late]


@on_ranks(2)
@pytest.mark.parametrize("fails_at", ["the call", "the thread"])
def test_a_step_goes_on_where_copying_fails(context: RankContext, tmp_path: Path, fails_at: str) -> None:
    """And on the other ranks, which hear of it before they write."""
    run = _trained()

    def refuse(*args: Any) -> Any:
        raise MemoryError("no room for copies")

    with pytest.MonkeyPatch.context() as patch:
        if context.rank == 1 and fails_at == "the call":
            patch.setattr(save, "_memory_for", refuse)
        elif context.rank == 1:
            patch.setattr(training_state, "HostCopies", WithoutRoom)
        saving = save_checkpoint(tmp_path, *run, wait=False)
        steps(run, 2, 3)
        with pytest.raises(CheckpointError, match="rank 1: (MemoryError: no room|RuntimeError: The size of tensor)"):
            saving.wait()
    assert not any(tmp_path.iterdir())
    save_checkpoint(tmp_path, *run)


@on_ranks(2)
def test_a_forked_process_steps_without_the_thread_that_copies(context: RankContext, tmp_path: Path) -> None:
    """Which only its parent has."""
    run = _trained()
    saving, copies = _save(tmp_path, run)
    weight = torch.zeros(1, requires_grad=True)
    weight.grad = torch.ones(1)
    child = os.fork()
    if not child:
        signal.alarm(20)
        torch.optim.SGD([weight]).step()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    copies.may_copy.set()
    saving.wait()


class Around(torch.optim.Optimizer):
    """Wraps another one, has its state, and changes it in steps of its own, which torch's hooks do not see."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def state_dict(self) -> dict[str, Any]:
        """The other's."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The other's."""
        self.inner.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Not the other's."""
        for state in filter(None, self.inner.state.values()):
            state["exp_avg"].mul_(2.0)


@on_ranks(2)
def test_moments_that_change_in_unseen_steps_are_copied_at_once(context: RankContext, tmp_path: Path) -> None:
    """Of nobody's optimizer, or inside a device graph that is replayed."""
    run = _trained()
    wanted = _state_of(run)
    run = run._replace(optimizer=Around(run.optimizer))
    saving, copies = _save(tmp_path, run)
    assert not copies._late
    run.optimizer.step()
    copies.may_copy.set()
    load_checkpoint(saving.wait(), *run)
    assert_same(_state_of(run), wanted, "what was saved", EXACT)


class AroundIts(Around):
    """Calls the other's step, under the name that wrappers give it."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The other."""
        return self.inner


class AroundOwn(AroundIts):
    """Has state of its own."""

    @property
    def state(self) -> Any:  # type: ignore[override]
        """Not the other's."""
        return {}


def test_which_steps_are_seen() -> None:
    """Those of wrappers by what is inside, if that is whose state it is."""
    weight = torch.zeros(1, requires_grad=True)
    inner = torch.optim.AdamW([weight])
    assert sees_steps(inner)
    assert sees_steps(AroundIts(AroundIts(inner)))
    for unseen in (Around(inner), AroundOwn(inner), AroundIts(Around(inner))):
        assert not sees_steps(unseen)
    assert not sees_steps(torch.optim.AdamW([{"params": [weight], "capturable": True}]))


@on_ranks(2)
def test_what_is_first_copied_in_inference_mode_is_copied_again_outside(context: RankContext, tmp_path: Path) -> None:
    """Into the same memory."""
    run = _trained()
    with torch.inference_mode():
        saving = save_checkpoint(tmp_path, *run, wait=False)
    saving.wait()
    wanted = _state_of(run)
    _assert_holds(save_checkpoint(tmp_path, *run, wait=False).wait(), wanted)


class HeldOnDevice(Held):
    """What a device has copied is looked at after the steps."""

    def let_step(self) -> None:
        """See there."""
        HostCopies.let_step(self)


@on_ranks(2)
def test_on_a_device_only_the_steps_stream_waits(context: RankContext, tmp_path: Path) -> None:
    """Copies are as late as waits of streams allow, and no host waits for the device."""
    copy = torch.Tensor.copy_

    with simulated_device() as device:

        def copy_late(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            stream = device.current_stream()
            if stream is device._compute or not non_blocking:
                return copy(target, source, non_blocking)
            assert stream.waited_for.get(device._compute) == device._compute.ticks  # compute is never late here
            stream.put(lambda: copy(target, source))
            return target

        run = _trained()
        wanted = _state_of(run)
        before = device.synchronizations
        with (
            mock.patch.object(torch.Tensor, "copy_", copy_late),
            mock.patch.object(training_state, "HostCopies", HeldOnDevice),
        ):
            saving: Any = save_checkpoint(tmp_path, *run, wait=False)
            copies = saving._copies
            steps(run, 2, 4)
            assert device.synchronizations == before
            copies.may_copy.set()
            saving.wait()
        _assert_holds(saving.path, wanted)

        wanted = _state_of(run)
        with mock.patch.object(torch.Tensor, "copy_", copy_late):
            saving = save_checkpoint(tmp_path, *run, wait=False)  # nobody steps
            saving.wait()
        _assert_holds(saving.path, wanted)

        with mock.patch.object(training_state, "HostCopies", HeldOnDevice):
            saving = save_checkpoint(tmp_path, *run, wait=False)
            copies = saving._copies
            _zero_one(run)
            steps(run, 4, 5)
            copies.may_copy.set()
            with pytest.raises(CheckpointError, match="was written to in place"):
                saving.wait()
        save_checkpoint(tmp_path, *run)
