"""Random training programs run like plain PyTorch, and to the same bits with state in host memory."""

from __future__ import annotations

import contextlib
import functools
from typing import Any, NamedTuple
from unittest import mock

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from streamshard.core import late_step
from tests.compare import EXACT, Tolerance, assert_same, full_weights
from tests.counts import engine_inside
from tests.models import vector_batch
from tests.ranks import Call, RankContext, RankPool
from tests.reference import adamw, assert_trains_like_plain, no_sync, sgd, sharded_model
from tests.scenarios import RoutedStack, over_sockets
from tests.simulated import late, simulated_device


class Part(NamedTuple):
    route: tuple[int, ...] | None  # layers that run, counted round; None: all in turn
    left_out: tuple[int, int, int]  # by rank, a layer that this rank does not run; -1: none. Only where all run in turn
    reentrant: bool | None  # checkpointing of each layer, and of which kind; None: none
    is_twice: bool  # two backwards go through its graph
    is_quiet: bool  # in `no_sync`

    def places(self, depth: int, rank: int) -> list[int]:
        if self.route is None:
            return [place for place in range(depth) if place != self.left_out[rank]]
        return [place % depth for place in self.route]


class Step(NamedTuple):
    """An optimizer step: micro-batches, a layer that is frozen, a factor by which weights change before, clipping."""

    parts: list[Part]
    frozen: int | None
    factor: float
    clips: bool


class Program(NamedTuple):
    """What is trained, and how. The first step has all layers run in turn."""

    steps: list[Step]
    ranks: int
    depth: int
    is_tied: bool  # the first and the last layer share their weight
    make: Any
    sockets: bool
    device_budget: str | int  # of state, where the rest of it lies in host memory
    settings: dict[str, Any]


PLACES = st.integers(0, 3)
ROUTES = st.lists(PLACES, max_size=5).map(tuple)
SELDOM = st.sampled_from([False, False, False, True])
OUT = st.sampled_from([-1, -1, 0, 1, 2])
PARTS = st.builds(
    Part,
    st.none() | ROUTES,
    st.tuples(OUT, OUT, OUT),
    st.sampled_from([None, None, False, True]),
    SELDOM,
    st.booleans(),
)
STEPS = st.builds(
    Step,
    st.lists(PARTS, min_size=1, max_size=3),
    st.sampled_from([None, None, 0, 1, 3]),
    st.sampled_from([1.0, 1.0, 0.9]),
    st.booleans(),
)
IN_TURN = Step([Part(None, (-1, -1, -1), None, False, False)], None, 1.0, False)
PROGRAMS = st.builds(
    Program,
    st.lists(STEPS, min_size=1, max_size=5).map(lambda steps: [IN_TURN, *steps]),
    st.sampled_from([2, 2, 3]),
    st.integers(2, 4),
    SELDOM,
    st.sampled_from([sgd, adamw]),
    st.booleans(),
    st.sampled_from([0, "9KB"]),
    st.fixed_dictionaries(
        {
            "weight_slots": st.sampled_from([2, 3, "all"]),
            "grad_slots": st.sampled_from([None, "all"]),
            "min_unit_size": st.sampled_from([0, 0, 1500]),
            "align_pieces_to": st.sampled_from([1, 1, 4]),
        }
    ),
)


def _build(program: Program) -> nn.Module:
    model: Any = RoutedStack(program.depth)
    if program.is_tied:
        model.layers[-1].linear.weight = model.layers[0].linear.weight
    return model  # type: ignore[no-any-return]


def _prepare(program: Program, model: nn.Module, number: int) -> None:
    step = program.steps[number]
    for name, param in model.named_parameters():
        param.requires_grad_(f"layers.{step.frozen}." not in name)
    if step.factor != 1.0:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(step.factor)


def _train_step(program: Program, model: Any, call: Call) -> Tensor:
    """Forwards and backwards of a step. The last micro-batch is never quiet."""
    step, loss = program.steps[call.step], torch.zeros(())
    for number, part in enumerate(step.parts):
        model.route, model.reentrant = part.places(program.depth, call.rank), part.reentrant
        with no_sync(model, part.is_quiet and number < len(step.parts) - 1):
            x = vector_batch(10 * call.step + number, call.rank).requires_grad_(part.reentrant is True)
            loss = model(x).square().mean()
            for is_last in (False, True) if part.is_twice and not part.reentrant else (True,):
                call.backward(loss, retain_graph=not is_last)
    return loss.detach()


def _run_beside_plain(context: RankContext, program: Program) -> None:
    steps = functools.partial(_train_step, program)
    with over_sockets() if program.sockets else contextlib.nullcontext():
        options: Any = {"steps": len(program.steps), "checked": range(1, len(program.steps), 2)}
        options |= {"optimizer": program.make, "prepare": functools.partial(_prepare, program)}
        tolerance = Tolerance(relative=1e-4, absolute=2e-6)
        build = functools.partial(_build, program)
        assert_trains_like_plain(context, build, steps, tolerance=tolerance, **options, **program.settings)


def _run_in_host_memory(context: RankContext, program: Program) -> None:
    found = []
    options = program.settings | {"weight_slots": 2, "grad_slots": None}  # their number changes the order of sums
    with simulated_device(), mock.patch.object(late_step, "CHUNK_NUMEL", 100):
        for place in ({}, {"offload": "state", "device_budget": program.device_budget}):
            model = sharded_model(functools.partial(_build, program), **options, **place)
            optimizer = program.make(model)
            with late(model):
                for number, step in enumerate(program.steps):
                    _prepare(program, model, number)
                    _train_step(program, model, context.call(number))
                    if step.clips:
                        model.clip_grad_norm_(0.1)
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=number % 2 == 0)
            on_host = [unit.is_on_host for unit in engine_inside(model).units]
            assert on_host == sorted(on_host)  # the first units' state stays on the device
            found.append(full_weights(model))
    assert_same(found[1], found[0], "weights", EXACT)


_seldom = settings(suppress_health_check=[HealthCheck.too_slow], print_blob=True)


@settings(_seldom, max_examples=16)
@given(program=PROGRAMS)
def test_random_programs_run_like_plain_pytorch(ranks: RankPool, program: Program) -> None:
    """Losses, gradients (None where there are none), weights."""
    ranks(program.ranks).run(_run_beside_plain, program)


@settings(_seldom, max_examples=10)
@given(program=PROGRAMS)
def test_random_programs_give_the_same_bits_with_state_in_host_memory(ranks: RankPool, program: Program) -> None:
    """All of the state, or the part that the device has no room for."""
    ranks(program.ranks).run(_run_in_host_memory, program)
