"""The late step of ``offload="state"``: the settings that it runs in; what is refused; late steps that fail."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from streamshard import load_checkpoint, save_checkpoint
from streamshard.errors import CheckpointError, ShardingError
from streamshard.nested import map_tensors
from streamshard.optim import WholeParameterOptimizer, elementwise
from tests.models import vector_batch
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import EXACT, adamw, assert_same, engine_inside, full_weights, piece_of, sharded_model, stack_step
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


class _Noting(torch.optim.AdamW):
    """Notes whether it steps parameters in inference mode or autocast."""

    seen: ClassVar[list[bool]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if any(group["params"] for group in self.param_groups):
            self.seen.append(torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled())
        return super().step(closure)


@on_ranks(1)
def test_a_late_step_runs_outside_of_inference_mode_and_autocast(context: RankContext) -> None:
    """Whatever the next forward or a reader is inside of."""
    elementwise(_Noting)
    with simulated_device():
        model = sharded_model(**OFFLOAD)
        optimizer = _Noting(model.parameters(), lr=0.01)
        for inside in (contextlib.nullcontext, lambda: torch.autocast("cpu", torch.float16), torch.inference_mode):
            for read in (lambda: model(vector_batch(0, 0)), lambda: next(model.parameters()).norm()):
                optimizer.zero_grad()
                stack_step(model, Call(0, 0, 1, 1.0))
                _Noting.seen.clear()
                optimizer.step()
                with inside():
                    read()
                assert _Noting.seen and not any(_Noting.seen)
        for state in optimizer.state.values():
            state["step"].add_(1)  # no inference tensor


@on_ranks(2)
def test_optimizers_of_single_parameters_have_memory_for_their_own_moments_only(context: RankContext) -> None:
    """A later step that reaches further takes the moments along."""
    results = []
    for settings in (OFFLOAD, RESIDENT):
        with simulated_device():
            model = sharded_model(**settings)
            first, *others = model.layers[0].parameters()
            optimizers = [adamw(nn.ParameterList([param])) for param in (first, *others)]
            host = engine_inside(model).host
            for step in range(4):
                stack_step(model, Call(step, context.rank, 2, 1.0))
                for optimizer in optimizers:
                    optimizer.step()
                model.zero_grad()
                if step == 1:
                    optimizers[0].add_param_group({"params": optimizers.pop().param_groups[0]["params"]})
                    optimizers[0].step()
                if step == 0 and host is not None:
                    made = [each for of in host.moments.values() for each in of.values()]
                    numel = sum(buffer.numel() for each in made for buffer in each.buffers.values())
                    assert numel == 2 * sum(map(torch.numel, map(piece_of, (first, *others))))
            results.append(full_weights(model))
    assert_same(*results, "weights", EXACT)


# -- late steps that fail ---------------------------------------------------------------------------------------------


class Breaking(torch.optim.SGD):
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
        reads: tuple[Callable[[], Any], ...] = (run.loss, run.model.full_state_dict, run.optimizer.state_dict)
        reads += (run.params[0].sum, lambda: save_checkpoint(tmp_path, run.model, run.optimizer))
        told = r"step has failed \(ValueError: out of luck\).*load_checkpoint"
        for read in reads:
            with pytest.raises((ShardingError, CheckpointError), match=told):
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
