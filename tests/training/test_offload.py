"""State in host memory (``offload="state"``): the same bits as without it, on a simulated device; its late step."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.join import Join

from streamshard import StreamShard, load_checkpoint, save_checkpoint
from streamshard.comm.streams import Collective, Fence, Observer, StepPart, StreamName
from streamshard.core import late_step
from streamshard.errors import CheckpointError, ShardingError
from streamshard.nested import map_tensors
from streamshard.optim import WholeParameterOptimizer, elementwise
from tests.compare import EXACT, assert_same, full_weights, piece_of
from tests.counts import engine_inside
from tests.models import TinyConfig, TinyLM, next_token_loss, token_batch, vector_batch
from tests.races import detect_races
from tests.ranks import Call, RankContext, on_ranks
from tests.reference import adamw, built, sharded_model, stack_step, train_stack
from tests.scenarios import BF16, OFFLOAD, PRECISIONS, RESIDENT, sharded, train, without_waits
from tests.simulated import checking_streams, late, simulated_device
from tests.training.test_offload_events import Run

NAMES = list(PRECISIONS)
LANGUAGE_MODELS = ("plain", "large embedding and head", "tied", "a head that a loss reads")


def _small_chunks(scenario: str) -> Any:
    """Each unit of a rank is stepped in several chunks, those of larger models not in dozens."""
    return mock.patch.object(late_step, "CHUNK_NUMEL", 400 if scenario in LANGUAGE_MODELS else 100)


# What copies and late steps do otherwise in; all else is the engine's own, or a program of test_random_models.
_SCENARIOS = (
    *("plain", "tied", "no_sync", "layers unused on some ranks", "layers used twice", "two backwards", "freezing"),
    *("adapters in micro-batches", "summoning", "clipping", "norms in fp32", "a backward that fails"),
    *("weights read elsewhere", "a head that a loss reads"),
)


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "scenario", "precision"),
    [(1 + (number + number // 4) % 2, each, NAMES[number % 4]) for number, each in enumerate(_SCENARIOS)],
)
def test_offload_changes_no_bit(context: RankContext, scenario: str, precision: str) -> None:
    """Copies and collectives are late; fences order all uses of each buffer, in chunks, and of host memory."""
    with simulated_device(), _small_chunks(scenario):
        resident = sharded(scenario, PRECISIONS[precision], **RESIDENT)
        train(resident, scenario, context)
        model = sharded(scenario, PRECISIONS[precision], **OFFLOAD)
        with late(model), detect_races(model) as races:
            train(model, scenario, context)
        assert races.accesses > 100
        assert_same(full_weights(model), full_weights(resident), "weights", EXACT)


def _fused(model: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), fused=True, **options)  # reads all numbers on the device


def _skip_layers(model: Any, context: RankContext) -> None:
    """Compute never waits for the all-gather of the last layers, nor for their steps."""
    optimizer = adamw(model)
    for step, route in enumerate(([0, 1, 2, 3, 4], [0], [0, 1], [0, 1, 2, 3, 4])):
        model.route = route
        stack_step(model, context.call(step))
        model.clip_grad_norm_(0.01)
        optimizer.step()


def _scale_losses(model: Any, context: RankContext) -> None:
    optimizer, scaler = _fused(model), torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(3):
        scaler.scale(model(vector_batch(step, context.rank)).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def _change_options(model: Any, context: RankContext) -> None:
    optimizer = _fused(model, lr=torch.tensor(0.1))
    for step in range(3):
        train_stack(model, optimizer, context, first=step, steps=1)
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1) * 0.5**step


def _load_counters(model: Any, context: RankContext) -> None:
    optimizer = _fused(model)
    train_stack(model, optimizer, context, steps=1)
    optimizer.load_state_dict(map_tensors(optimizer.state_dict(), lambda each: each if each.ndim else each.clone()))
    train_stack(model, optimizer, context, first=1, steps=2)


def _clip(model: Any, context: RankContext) -> None:
    """A late step with a factor, which a reader carries out. The first one waits for everything."""
    optimizer = adamw(model)
    for step in range(4):
        stack_step(model, context.call(step))
        model.clip_grad_norm_(0.1)
        optimizer.step()
        if step % 2:
            optimizer.state_dict()


def _change_weights(model: Any, context: RankContext) -> None:
    """The cast on the host writes the input that a forward has fetched."""
    with torch.no_grad():
        for step in range(2):
            model(vector_batch(step, context.rank))
            next(model.parameters()).zero_()
            model(vector_batch(step, context.rank))


def _train_checking_streams(
    context: RankContext, work: Any, without: Callable[[Any], Any] = contextlib.nullcontext
) -> None:
    """Train in the way of a scenario, or as a function does."""
    scenario = work if isinstance(work, str) else "clipping"
    with simulated_device() as device, _small_chunks(scenario), checking_streams(device) as checker:
        model = sharded(scenario, BF16, **OFFLOAD)
        with checker.of(model), without(model):
            train(model, work, context) if isinstance(work, str) else work(model, context)


_ON_TWO = ("clipping", "micro-batches", _skip_layers, _change_weights)
_ALONE = (_scale_losses, _change_options, _load_counters)


@on_ranks()
@pytest.mark.parametrize(("world_size", "work"), [*((2, work) for work in _ON_TWO), *((1, work) for work in _ALONE)])
def test_events_order_streams_and_the_memory_of_chunks(context: RankContext, work: Any) -> None:
    """FETCH allocates chunks, which STORE reads. Compute allocates factors, options and counters, which FETCH reads."""
    _train_checking_streams(context, work)


# What waits guard that the race detector does not see (test_waits), and what needs the wait.
_WAITS = [("chunk 0", "micro-batches"), ("stepped chunks", "micro-batches"), ("what compute has written", _clip)]


@on_ranks(2)
@pytest.mark.parametrize(("what", "work"), _WAITS)
def test_each_wait_is_needed(context: RankContext, what: str, work: Any) -> None:
    """Without it two streams, or a stream and the host, use the same bytes in any order."""
    with pytest.raises(AssertionError, match="on another stream|was freed"):
        _train_checking_streams(context, work, lambda model: without_waits(model, what))


@on_ranks(1)
@pytest.mark.parametrize("trains", ["embedding", "blocks.0"])
def test_events_order_the_copies_of_a_single_unit(context: RankContext, trains: str) -> None:
    """Waits of other units lie neither between its reductions nor behind its step. Backward fetches no embedding."""
    model: Any = built(lambda: TinyLM(TinyConfig(vocabulary=160)))
    for name, param in model.named_parameters():
        param.requires_grad_(trains in name)
    with simulated_device() as device, checking_streams(device) as checker:
        model = StreamShard(model, precision=BF16, **OFFLOAD)
        optimizer = adamw(model)
        with checker.of(model):
            for step in range(3):
                for part in range(2):
                    tokens = token_batch(2 * step + part, 0)
                    loss = next_token_loss(model(tokens), tokens)
                    loss.backward(retain_graph=True)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()


class _Waits(Observer):
    """Notes waits for copies, casts on the host, and what the host launches on which stream."""

    def __init__(self) -> None:
        self.of_host = self.casts = 0
        self.fences: set[str] = set()
        self.launched: Counter[tuple[StreamName, Collective]] = Counter()

    def on_wait(self, fence: Fence, target: StreamName) -> None:
        self.of_host += target is StreamName.HOST
        self.fences.add(fence.what)

    def on_event(self, part: StepPart, unit: int | None, *, begins: bool) -> None:
        self.casts += begins and part is StepPart.CAST

    def on_collective(self, stream: StreamName, collective: Collective, *_: object) -> None:
        self.launched[stream, collective] += 1


@on_ranks()
@pytest.mark.parametrize(
    ("world_size", "around"), [(1, contextlib.nullcontext), (2, functools.partial(Join, repeat=print))]
)
def test_the_host_never_waits_in_a_steady_step(context: RankContext, around: Callable[..., Any]) -> None:
    """Micro-batches, clipping, the step and clearing of gradients included."""
    with simulated_device():
        model: Any = sharded("micro-batches", BF16, **OFFLOAD)
        optimizer, waits, streams = adamw(model), _Waits(), engine_inside(model).streams
        host: Any = engine_inside(model).host

        def step(number: int) -> None:
            for part in range(2):
                stack_step(model, context.call(2 * number + part))
            model.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()

        step(0)
        with streams.observed_by(waits), around([model]):
            step(1)
            step(2)
            held = sum(len(tensors) for _, tensors in host._chunks)
            step(3)
            assert waits.of_host == waits.casts == 0
            assert sum(len(tensors) for _, tensors in host._chunks) == held  # the memory of two chunks, not of all
            assert {"staging 0", "staging 1", "chunk 0", "chunk 1"} < waits.fences  # they take turns
            of_steps, of_norms = (StreamName.FETCH, Collective.STEP), (StreamName.COMM, Collective.NORMS)
            launched = waits.launched
            assert launched[StreamName.STORE, Collective.COPY] == launched[of_steps] + launched[of_norms]
            for _ in range(2):  # the second one finds nothing under way
                next(model.parameters()).sum()
            assert waits.of_host == 2


# -- the late step: the settings that it runs in; what is refused -----------------------------------------------------


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


@elementwise
class _Watched(torch.optim.AdamW):
    """Calls `before` when it steps parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if any(group["params"] for group in self.param_groups):
            self.before()
        return super().step(closure)

    def before(self) -> None:
        """Tests replace it."""


@on_ranks(1)
def test_a_late_step_runs_outside_of_inference_mode_and_autocast(context: RankContext) -> None:
    """Whatever the next forward or a reader is inside of."""
    seen: list[bool] = []
    with simulated_device():
        model = sharded_model(**OFFLOAD)
        optimizer: Any = _Watched(model.parameters(), lr=0.01)
        optimizer.before = lambda: seen.append(torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled())
        for inside in (contextlib.nullcontext, lambda: torch.autocast("cpu", torch.float16), torch.inference_mode):
            for read in (lambda: model(vector_batch(0, 0)), lambda: next(model.parameters()).norm()):
                optimizer.zero_grad()
                stack_step(model, Call(0, 0, 1, 1.0))
                seen.clear()
                optimizer.step()
                with inside():
                    read()
                assert seen and not any(seen)
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
                stack_step(model, context.call(step))
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


def _watched(model: Any) -> Any:
    return _Watched(model.parameters(), lr=0.1)


_failing = mock.Mock(side_effect=ValueError("out of luck"))


@on_ranks(1, 2)
def test_after_a_late_step_has_failed_everything_raises_until_all_is_loaded(
    context: RankContext, tmp_path: Path
) -> None:
    """The next forward raises the error, on all ranks. A checkpoint brings back training, to the bit."""
    with simulated_device():
        run, other = (Run(context, OFFLOAD, make=_watched) for _ in range(2))
        for each in (run, other):
            each.step(2)
        saved = save_checkpoint(tmp_path, run.model, run.optimizer)
        run.optimizer.before = _failing
        run.step()
        del run.optimizer.before
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
        run = Run(context, OFFLOAD, make=_watched)
        run.step(2)
        if context.rank == 1:
            run.optimizer.before = _failing
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
