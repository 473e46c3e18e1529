"""Fences and streams as they are on the CPU: declared, and seen by an observer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from streamshard.comm.streams import Collective, Fence, Moment, Observer, Rule, StreamName, Streams, Work
from streamshard.errors import StateError

COMPUTE, COMM, REPLICA = StreamName


class _Log(Observer):
    """Writes down what it is told, together with what works do."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_record(self, fence: Fence) -> None:
        self.lines.append(f"record {fence.what}")

    def on_wait(self, fence: Fence) -> None:
        self.lines.append(f"wait {fence.what}")

    def on_collective(
        self,
        stream: StreamName,
        collective: Collective,
        tag: int | None,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        numels = [[tensor.numel() for tensor in tensors] for tensors in (reads, writes)]
        self.lines.append(f"{stream.value}: {collective.value} of {tag} reads {numels[0]}, writes {numels[1]}")


class _FakeWork:
    """A collective that says when it is completed."""

    def __init__(self, log: _Log, name: str) -> None:
        self.log = log
        self.name = name

    def wait(self) -> None:
        self.log.lines.append(f"complete {self.name}")


def _observed() -> tuple[Streams, _Log]:
    streams, log = Streams(torch.device("cpu")), _Log()
    streams.observers = (log,)
    return streams, log


def test_a_wait_completes_the_recorded_work_once() -> None:
    """And is declared each time: whoever comes later is ordered as well."""
    streams, log = _observed()
    fence = Fence(streams, Rule.WEIGHTS_ARRIVED, COMM, "slot")
    fence.record(_FakeWork(log, "gather"))
    fence.wait()
    fence.wait()
    assert log.lines == ["record slot", "complete gather", "wait slot", "wait slot"]


def test_a_fence_that_was_never_recorded_waits_for_nothing() -> None:
    """A slot's first unit has no predecessor."""
    streams, log = _observed()
    Fence(streams, Rule.SLOT_RELEASED, COMPUTE, "slot").wait()
    assert log.lines == []


def test_recording_anew_completes_earlier_work_without_declaring_a_wait() -> None:
    """Nothing stays under way unseen, but only a wait orders the streams."""
    streams, log = _observed()
    fence = Fence(streams, Rule.GRADS_DRAINED, COMM, "slot")
    fence.record(_FakeWork(log, "first"))
    fence.record(_FakeWork(log, "second"))
    assert log.lines == ["record slot", "complete first", "record slot"]
    fence.wait()
    assert log.lines[3:] == ["complete second", "wait slot"]


def test_settling_is_not_a_wait() -> None:
    """The work is completed, once, and nobody is told."""
    streams, log = _observed()
    fence = Fence(streams, Rule.WEIGHTS_ARRIVED, COMM, "slot")
    fence.record(_FakeWork(log, "gather"))
    fence.complete()
    fence.complete()
    assert log.lines == ["record slot", "complete gather"]


@pytest.mark.parametrize("rule", list(Rule))
def test_a_dropped_rule_drops_its_waits_only(rule: Rule) -> None:
    """The work is not completed and the wait is not declared; records are, and other rules' waits."""
    streams, log = _observed()
    streams.dropped_rules = frozenset({rule})
    fences = [Fence(streams, each, COMM, each.name) for each in Rule]
    for fence in fences:
        fence.record(_FakeWork(log, fence.what))
    for fence in fences:
        fence.wait()
    records = [f"record {each.name}" for each in Rule]
    waits = [line for each in Rule if each is not rule for line in (f"complete {each.name}", f"wait {each.name}")]
    assert log.lines == records + waits


def test_waits_can_be_dropped_by_what_they_guard() -> None:
    """For showing that each of a rule's waits is needed by itself."""
    streams, log = _observed()
    streams.dropped_rules = frozenset({"slot 1"})
    for what in ("slot 0", "slot 1"):
        fence = Fence(streams, Rule.SLOT_RELEASED, COMPUTE, what)
        fence.record()
        fence.wait()
    assert log.lines == ["record slot 0", "wait slot 0", "record slot 1"]


def test_a_fence_ties_its_source_to_another_stream() -> None:
    """Compute to comm, the others to compute, or to whom it says."""
    streams = Streams(torch.device("cpu"))
    assert Fence(streams, Rule.WEIGHTS_ARRIVED, COMM, "slot").target is COMPUTE
    assert Fence(streams, Rule.SLOT_RELEASED, COMPUTE, "slot").target is COMM
    assert Fence(streams, Rule.RESULTS_ARRIVED, REPLICA, "main grads").target is COMPUTE
    assert Fence(streams, Rule.RESULTS_ARRIVED, COMM, "main grads", REPLICA).target is REPLICA


def test_the_body_of_on_is_on_that_stream() -> None:
    """Nested or left by an error, the stream before is the stream after."""
    streams = Streams(torch.device("cpu"))
    assert streams.current is COMPUTE
    with streams.on(COMM):
        with streams.on(REPLICA):
            assert streams.current is REPLICA
        assert streams.current is COMM
    with pytest.raises(ZeroDivisionError), streams.on(COMM):
        raise ZeroDivisionError
    assert streams.current is COMPUTE


def test_collectives_are_declared_to_whoever_observes() -> None:
    """Without anyone it does nothing."""
    streams, log = _observed()
    streams.declare(COMM, Collective.ALL_GATHER, 2, reads=(torch.zeros(1),), writes=(torch.zeros(3),))
    streams.declare(REPLICA, Collective.ALL_REDUCE, None, writes=(torch.zeros(4), torch.zeros(5)))
    streams.observers = ()
    streams.declare(COMM, Collective.REDUCE_SCATTER, 1, reads=(torch.zeros(6),))
    assert log.lines == [
        "comm: all_gather of 2 reads [1], writes [3]",
        "replica: all_reduce of None reads [], writes [4, 5]",
    ]


def test_observers_come_and_go_in_any_order() -> None:
    """Each hears what happens while it is there, in the order in which they came; an error takes nobody else away."""
    streams, lines = Streams(torch.device("cpu")), list[str]()

    class _Named(Observer):
        def __init__(self, name: str) -> None:
            self.name = name

        def on_record(self, fence: Fence) -> None:
            lines.append(f"{self.name} hears {fence.what}")

    def record(what: str) -> None:
        Fence(streams, Rule.SLOT_RELEASED, COMPUTE, what).record()

    first, second = (streams.observed_by(_Named(name)) for name in ("first", "second"))
    record("nothing")
    first.__enter__()
    record("one")
    second.__enter__()
    record("two")
    with streams.unobserved():
        record("three")
    first.__exit__(None, None, None)
    record("four")
    with pytest.raises(ZeroDivisionError), streams.observed_by(_Named("third")):
        raise ZeroDivisionError
    second.__exit__(None, None, None)
    record("five")
    assert lines == ["first hears one", "first hears two", "second hears two", "second hears four"]
    assert streams.observers == ()


def test_the_host_says_when_it_waits_and_for_what() -> None:
    """Around the work itself, once, whether the wait is declared or not; without work there is nothing to wait for."""
    streams, log = _observed()

    class _Waits(Observer):
        def on_block(self, fence: Fence, work: Work) -> None:
            log.lines.append(f"block {fence.what} {getattr(work, 'name', None)}")

        def on_done(self, fence: Fence, work: Work) -> None:
            log.lines.append(f"done {fence.what} {getattr(work, 'name', None)}")

    fence = Fence(streams, Rule.WEIGHTS_ARRIVED, COMM, "slot")
    with streams.observed_by(_Waits()):
        for name in ("first", "second"):
            fence.record(_FakeWork(log, name))
        fence.wait()
        fence.record()
        fence.wait()
    waits = [[f"block slot {name}", f"complete {name}", f"done slot {name}"] for name in ("first", "second")]
    assert log.lines == ["record slot", *waits[0], "record slot", *waits[1], "wait slot", "record slot", "wait slot"]


def test_an_observer_that_overrides_nothing_hears_nothing() -> None:
    """Each overrides what it needs."""
    streams = Streams(torch.device("cpu"))
    with streams.observed_by(Observer()):
        fence = Fence(streams, Rule.SLOT_RELEASED, COMPUTE, "slot")
        fence.record(_FakeWork(_Log(), "work"))
        fence.wait()
        streams.declare(COMM, Collective.ALL_REDUCE, None)
        for observer in streams.observers:
            observer.on_moment(Moment.CAST_BEGINS, None)


@pytest.mark.parametrize("name", list(StreamName))
def test_there_is_no_device_stream_behind_declared_streams(name: StreamName) -> None:
    """Asking for one is a bug of the engine, and says so."""
    with pytest.raises(StateError, match="on cpu, wanted a device that has streams"):
        Streams(torch.device("cpu")).device_stream(name)


def test_rules_have_the_numbers_of_the_design() -> None:
    """Messages name them by number."""
    assert [(rule.value, rule.name) for rule in Rule] == [
        (1, "WEIGHTS_ARRIVED"),
        (2, "SLOT_RELEASED"),
        (3, "GRADS_DRAINED"),
        (4, "GRADS_WRITTEN"),
        (5, "SHARDS_WRITTEN"),
        (6, "SHARDS_READ"),
        (7, "RESULTS_ARRIVED"),
    ]
