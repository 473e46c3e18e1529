"""The late step of ``offload="state"``: the settings that it runs in; what is refused; late steps that fail."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from streamshard import StreamShard, load_checkpoint, save_checkpoint
from streamshard.core.ranges import Range, joined
from streamshard.errors import CheckpointError, ShardingError
from streamshard.nested import map_tensors
from streamshard.optim import WholeParameterOptimizer, elementwise
from tests.models import vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    EXACT,
    FP32,
    Call,
    adamw,
    assert_same,
    built,
    engine_inside,
    full_weights,
    stack_step,
)
from tests.scenarios import BF16, OFFLOAD, RESIDENT, sharded
from tests.simulated import simulated_device
from tests.training.test_offload_events import Run


@on_ranks(1)
def test_loaded_moments_lie_in_pinned_memory_from_the_next_step_on(context: RankContext) -> None:
    """Copies from other memory would block the host in each step."""
    with simulated_device() as device:
        model: Any = sharded("clipping", BF16, **OFFLOAD)
        optimizer = adamw(model)
        for step in range(2):
            stack_step(model, Call(step, 0, 1, 1.0))
            optimizer.step()
            state = optimizer.state_dict()
            moments = [own[key] for own in state["state"].values() for key in ("exp_avg", "exp_avg_sq")]
            assert moments and all(map(device.is_pinned, moments))
            optimizer.load_state_dict(map_tensors(state, torch.clone))


def _torch_settings() -> tuple[Any, ...]:
    is_autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return is_autocast, torch.is_inference_mode_enabled(), torch.get_default_dtype(), torch.get_default_device()


class _Noting(torch.optim.AdamW):
    """Notes in which settings it steps parameters."""

    seen: ClassVar[list[tuple[Any, ...]]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.seen += [_torch_settings() for group in self.param_groups if group["params"]]
        return super().step(closure)


@contextlib.contextmanager
def _in_double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


_CONTEXTS: tuple[Callable[[], Any], ...] = (
    *(lambda: torch.autocast("cpu", torch.float16), torch.inference_mode),
    *(_in_double_precision, lambda: torch.device("cpu", 0)),
)


@on_ranks(1)
def test_a_late_step_runs_in_the_settings_of_its_call(context: RankContext) -> None:
    """Neither in those of the next forward nor in those of a reader."""
    elementwise(_Noting)
    nothing = contextlib.nullcontext
    pairs = [pair for each in _CONTEXTS for pair in ((nothing, each), (each, nothing))]
    with simulated_device():
        model: Any = StreamShard(built(), precision=FP32, **OFFLOAD)
        optimizer = _Noting(model.parameters(), lr=0.01)
        for at_call, afterwards in ((nothing, nothing), *pairs):
            for read in (lambda: model(vector_batch(0, 0)), lambda: next(model.parameters()).norm()):
                optimizer.zero_grad()
                stack_step(model, Call(0, 0, 1, 1.0))
                _Noting.seen.clear()
                with at_call():
                    wanted = _torch_settings()
                    optimizer.step()
                with afterwards():
                    read()
                assert _Noting.seen and {*_Noting.seen} == {wanted}
        for state in optimizer.state.values():
            state["step"].add_(1)  # no inference tensor


# -- late steps that fail ---------------------------------------------------------------------------------------------


class Breaking(torch.optim.SGD):
    """Raises where it steps parameters, in its third step if `is_breaking`."""

    is_breaking = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if self.is_breaking and any(group["params"] for group in self.param_groups):
            raise ValueError("out of luck")
        super().step(closure)


def _breaking(model: Any) -> Breaking:
    elementwise(Breaking)
    return Breaking(model.parameters(), lr=0.1, momentum=0.9)


@on_ranks(1, 2)
def test_after_a_late_step_has_failed_everything_raises_until_all_is_loaded(
    context: RankContext, tmp_path: Path
) -> None:
    """The next forward raises the error, on all ranks. A checkpoint brings back training, to the bit."""
    with simulated_device():
        run, other = (Run(context, OFFLOAD, make=_breaking) for _ in range(2))
        for each in (run, other):
            each.step(2)
        saved = save_checkpoint(tmp_path, run.model, run.optimizer)
        run.optimizer.is_breaking = True
        run.step()
        run.optimizer.is_breaking = False
        with pytest.raises(ValueError, match="out of luck"):
            run.loss()
        reads: list[Callable[[], Any]] = [
            run.loss,
            lambda: next(run.model.parameters()).sum(),
            run.model.full_state_dict,
            run.optimizer.state_dict,
            lambda: save_checkpoint(tmp_path, run.model, run.optimizer),
        ]
        for read in reads:
            with pytest.raises(
                (ShardingError, CheckpointError), match=r"step has failed \(ValueError: out of luck\).*load_checkpoint"
            ):
                read()
        load_checkpoint(saved.wait(), run.model, run.optimizer)
        run.number = other.number
        for each in (run, other):
            each.step(2)
        assert_same(full_weights(run.model), full_weights(other.model), "weights", EXACT)


@on_ranks(2)
def test_a_late_step_that_fails_on_one_rank_leaves_ranks_in_step(context: RankContext) -> None:
    """Both issue the collectives of the whole forward."""
    with simulated_device():
        run = Run(context, OFFLOAD, make=_breaking)
        run.step(2)
        run.optimizer.is_breaking = context.rank == 1
        run.step()
        with pytest.raises(ValueError, match="out of luck") if context.rank == 1 else contextlib.nullcontext():
            run.loss()
        ranks = engine_inside(run.model).ranks
        assert len(set(ranks.gather_objects("compare logs", ranks.recorder.log.count))) == 1


@on_ranks(2)
def test_weights_of_a_model_that_is_gone_raise_if_their_step_was_late(context: RankContext) -> None:
    with simulated_device():
        run = Run(context, OFFLOAD)
        run.step(2)
        kept, optimizer = next(run.model.parameters()), run.optimizer
        del run
        gc.collect()
        for use in (kept.norm, optimizer.step):
            with pytest.raises(ShardingError, match="'layers.0.linear.weight' was kept when its model was freed"):
                use()


# -- optimizers -------------------------------------------------------------------------------------------------------


_IN_BLOCKS: Any = type("AdamW8bit", (torch.optim.SGD,), {"__module__": "torchao.optim.adam"})  # by this name


@on_ranks(2)
def test_optimizers_without_a_state_for_each_element_are_refused(context: RankContext) -> None:
    whole = functools.partial(WholeParameterOptimizer, optimizer_class=torch.optim.SGD)
    for make, said in ((whole, "steps whole parameters"), (_IN_BLOCKS, "AdamW8bit keeps state in blocks of elements")):
        with simulated_device():
            run = Run(context, OFFLOAD, make=lambda model, make=make: make(model.parameters()))
            run.loss().backward()
            with pytest.raises(ShardingError, match=f"{said}.*'layers.0.*take an elementwise optimizer such as"):
                run.optimizer.step()


# -- gradients --------------------------------------------------------------------------------------------------------


@on_ranks(1, 2)
def test_a_backward_through_weights_in_host_memory_raises(context: RankContext) -> None:
    """Autograd would run it in a thread of its own. The values are there, and training goes on."""
    with simulated_device():
        run, other = Run(context, OFFLOAD), Run(context, RESIDENT)
        run.step(2)
        other.step(2)
        for penalise in (
            lambda params: sum(param.square().sum() + param.norm() for param in params),
            lambda params: sum(norm.sum() for norm in torch._foreach_mul(params, 2.0)),
        ):
            penalties = [penalise(list(each.model.parameters())) for each in (run, other)]
            assert torch.equal(*(each.detach() for each in penalties))
            said = r"a loss contains parameter '.*'.*host memory.*param.grad.add_\("
            with pytest.raises(ShardingError, match=said):
                (run.loss() + penalties[0]).backward()
        other.number = run.number
        run.step()
        other.step()
        assert_same(full_weights(run.model), full_weights(other.model), "weights", EXACT)


# -- copies of several parameters -------------------------------------------------------------------------------------


def test_copies_from_two_tensors_are_not_joined_although_their_ranges_follow_each_other() -> None:
    buffer, first, second = (torch.zeros(8) for _ in range(3))
    copies = [(Range(buffer, 0, 4), Range(first, 0, 4)), (Range(buffer, 4, 4), Range(second, 4, 4))]
    assert len(joined(copies)) == 2
