"""What training must give: the same model trained by plain PyTorch on the same batches.

A *step function* runs forward and backward of one rank in one step and returns the loss. Plain PyTorch plays all
ranks in turn, each loss weighted 1/N, which is the mean of means that DDP computes. Only the
public API is used, but for counting collectives.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from streamshard import Precision, StreamShard
from streamshard.comm.streams import Collective, Observer, StreamName
from streamshard.core.engine import Engine
from streamshard.core.module_state import engine_of as engine_inside
from streamshard.core.params import Param
from streamshard.full import gather_full
from tests.models import Stack, next_token_loss, token_batch, vector_batch
from tests.ranks import Call as Call
from tests.ranks import RankContext

FP32 = Precision(param_dtype=torch.float32)
SEED = 7
ALL_SLOTS: dict[str, Any] = {"weight_slots": "all", "grad_slots": "all"}
# Slots that units take turns in, and one for each unit. What lies between has the one's weights and the other's grads.
SETTINGS: dict[str, dict[str, Any]] = {"two slots": {}, "a slot each": ALL_SLOTS}
# For tests that are ``@on_ranks()``: one rank has no slots, so there is nothing to set.
each_setting = pytest.mark.parametrize(
    ("world_size", "settings"), [(1, "two slots"), *((2, settings) for settings in SETTINGS)]
)


@contextlib.contextmanager
def case(name: object) -> Iterator[None]:
    """Add the name of a table's entry to an error that is raised inside."""
    try:
        yield
    except Exception as error:
        raise AssertionError(f"case {name!r}: {error}") from error


def seed(number: int) -> None:
    """Seed the CPU's generator. ``torch.manual_seed`` is slower: it records the stack for missing devices."""
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


def no_sync(model: Any, waits: bool = True) -> contextlib.AbstractContextManager[Any]:
    """The model's `no_sync()`, if it is sharded and gradients wait; plain PyTorch has no context for it."""
    return model.no_sync() if waits and isinstance(model, StreamShard) else contextlib.nullcontext()


class Trouble(Exception):
    """What tests raise."""


class Stop(BaseException):
    """Something like KeyboardInterrupt."""


@contextlib.contextmanager
def failing(module: Any, error: type[BaseException] = Trouble, *, backward: bool = True) -> Iterator[None]:
    """Raise `error` when a backward comes to the output of `module`, or else before the forward of `module`."""

    def fail(*_: Any) -> NoReturn:
        raise error

    def watch(module: nn.Module, args: Any, out: Tensor) -> None:
        out.register_hook(fail)

    hook = module.register_forward_hook(watch) if backward else module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


@contextlib.contextmanager
def counted(owner: Any, name: str) -> Iterator[list[bool]]:
    """For each call of `owner`'s function `name`: whether it returns something. No argument is kept."""
    function = getattr(owner, name)
    calls: list[bool] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        calls.append(result is not None)
        return result

    with mock.patch.object(owner, name, call):
        yield calls


def mesh_2d(replicate: int, shard: int) -> DeviceMesh:
    """A mesh of that many replicas with that many shards."""
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))


def let_dynamo_look() -> None:
    """Dynamo looks at `.grad` of every tensor it meets and hides the warning, but only where warnings are no errors."""
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")


def only_sharded(do: Callable[[Any], None]) -> Callable[[nn.Module, int], None]:
    """Compile the sharded model, say, before its first step; plain PyTorch stays as it is."""

    def prepare(model: nn.Module, number: int) -> None:
        if number == 0 and isinstance(model, StreamShard):
            do(model)

    return prepare


Step = Callable[[nn.Module, Call], Tensor]


def _beside(model: nn.Module, batch: Tensor) -> Tensor:
    """On the device of the model's parameters."""
    return batch.to(next(model.parameters()).device)


def lm_step(model: nn.Module, call: Call) -> Tensor:
    """Next-token training of a `TinyLM`."""
    tokens = _beside(model, token_batch(call.step, call.rank))
    return call.backward(next_token_loss(model(tokens), tokens))


def stack_step(model: nn.Module, call: Call) -> Tensor:
    """Regression to zero of a `Stack`."""
    return call.backward(model(_beside(model, vector_batch(call.step, call.rank))).square().mean())


@dataclass(frozen=True)
class Tolerance:
    """How far from the reference a tensor may be: `relative` of its largest element, and `absolute`."""

    relative: float = 2e-5
    absolute: float = 2e-7

    def allows(self, found: Tensor, wanted: Tensor) -> bool:
        """Whether every element is close enough; NaN never is."""
        if wanted.numel() == 0:
            return found.numel() == 0
        limit = self.relative * float(wanted.abs().max()) + self.absolute
        return float((found - wanted).abs().max()) <= limit


ROUNDING = Tolerance()
EXACT = Tolerance(relative=0.0, absolute=0.0)
NEAR = Tolerance(1e-4, 1e-5)  # sums in another order, through an optimizer


def sgd(model: nn.Module) -> Optimizer:
    """Momentum and weight decay: skipping a parameter without gradient makes a difference."""
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.01)


def adamw(model: nn.Module) -> Optimizer:
    """An `eps` large enough that rounding noise in gradients that are really zero is not blown up."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, weight_decay=0.1)


def piece_of(tensor: Tensor) -> Tensor:
    """The piece alone of a sharded parameter or gradient: its elements on this rank, on the same memory."""
    return tensor.detach().as_subclass(Tensor)


def full_grads(model: nn.Module) -> dict[str, Tensor | None]:
    """Gradients by name, full shapes; of a sharded model they are collected from all ranks."""
    if isinstance(model, StreamShard):
        engine, own = engine_inside(model), dict[Param, Tensor]()
        for param in engine.params:
            if (grad := param.sharded.grad) is not None:
                own[param] = grad.clone().as_subclass(Tensor).view(-1)
        with mock.patch.object(Param, "main", property(own.__getitem__)):
            full, failure = gather_full(
                engine, lambda param, whole: whole.to(own[param].dtype, copy=True), {param.sharded for param in own}
            )
        assert failure is None
        names = {name: param for param in engine.params for name in (param.name, *param.aliases)}
        return {name: full.get(names[name]) for name, _ in model.named_parameters(remove_duplicate=False)}
    named = model.named_parameters(remove_duplicate=False)
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in named}


def full_weights(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, full shapes, on every rank, in CPU memory as `full_state_dict`'s."""
    state = model.full_state_dict(rank0_only=False) if isinstance(model, StreamShard) else model.state_dict()
    return {name: value.detach().to("cpu", copy=True) for name, value in parts_of(state).items()}


def difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest difference of two elements with the same place. The names have to be the same."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in wanted)


def assert_same_state(found: Any, wanted: Any) -> None:
    """Compare the full states of two optimizers, to the bit."""
    for number, values in wanted["state"].items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(found["state"][number][key]), torch.as_tensor(value)), (number, key)


def assert_script_trained_like_plain(script: Mapping[str, Any], model: nn.Module, norms: Sequence[float]) -> None:
    """Train the plain model of a documented script in one process, and compare gradient norms and weights.

    Args:
        script: its names: `make_model` and `whole_batch`.
        model: trained by its `main` over all ranks.
        norms: the gradient norm of each step.
    """
    assert norms
    whole = script["make_model"]()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=3e-3)
    for step, norm in enumerate(norms):
        tokens = script["whole_batch"](step)
        cross_entropy(whole(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(whole.parameters(), 1.0)), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    assert difference(full_weights(model), full_weights(whole)) < 1e-4


def parts_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state`; of a tensor that consists of others, as torchao's, those."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        parts = value.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(value) else ()
        found.update({f"{name}.{part}": getattr(value, part) for part in parts} or {name: value})
    return found


def assert_same(
    found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None], what: str, tolerance: Tolerance = ROUNDING
) -> None:
    """Compare by name: the same names, None in the same places, the same shapes, values within tolerance."""
    wrong = []
    if list(found) != list(wanted):
        wrong.append(f"names {sorted(set(found) ^ set(wanted))} are in one only, or the order differs")
    for name in wanted:
        pair = (found.get(name), wanted[name])
        a, b = (None if t is None else t.as_subclass(Tensor).detach().cpu() for t in pair)  # pieces as such
        if a is None or b is None or a.shape != b.shape:
            if a is not b:
                wrong.append("{}: {}, wanted {}".format(name, *(None if t is None else [*t.shape] for t in (a, b))))
        elif not _has_same_bits(a, b) and not tolerance.allows(a.float(), b.float()):
            off, largest = (float(t.abs().max()) for t in (a.float() - b.float(), b.float()))
            wrong.append(f"{name}: off by {off:.3e}, the largest element is {largest:.6g}")
    if wrong:
        raise AssertionError(f"{what}: {len(wrong)} of {len(wanted)} differ\n  " + "\n  ".join(wrong))


def _has_same_bits(one: Tensor, other: Tensor) -> bool:
    """Packed weights may look like NaN."""
    if one.dtype is not other.dtype or one.layout is not torch.strided:
        return False
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (one, other)))


def assert_trains_like_plain(
    context: RankContext,
    build: Callable[[], nn.Module],
    step: Step,
    *,
    steps: int = 3,
    checked: Collection[int] = (1, 2),
    optimizer: Callable[[nn.Module], Optimizer] = sgd,
    prepare: Callable[[nn.Module, int], None] | None = None,
    set_to_none: bool = True,
    tolerance: Tolerance = ROUNDING,
    **settings: Any,
) -> nn.Module:
    """Train `build()` with StreamShard on all ranks and with plain PyTorch on all batches; compare.

    Args:
        context: the rank.
        build: makes the model; called with the same seed each time.
        step: forward and backward.
        steps: how many optimizer steps.
        checked: steps in which full gradients are collected and compared. Not all of them, because collecting could
            itself put right what was wrong. Losses are compared in every step, weights after the last.
        optimizer: makes the optimizer.
        prepare: called with the model and the step's number before each step.
        set_to_none: for ``zero_grad``.
        tolerance: for losses, gradients and weights.
        **settings: for `StreamShard`; fp32 throughout unless `precision` is given.

    Returns:
        The sharded model.
    """
    settings.setdefault("precision", FP32)
    size = context.world_size
    options: Any = {"steps": steps, "checked": checked, "prepare": prepare, "set_to_none": set_to_none}
    plain = built(build).to(context.device)
    wanted = _train(plain, optimizer(plain), step, [Call(0, rank, size, 1.0 / size) for rank in range(size)], **options)
    sharded = built(build).to(context.device)
    sharded = StreamShard(sharded, **settings)
    found = _train(sharded, optimizer(sharded), step, [context.call(0)], **options)
    _compare(found, wanted._replace(losses=[[losses[context.rank]] for losses in wanted.losses]), tolerance)
    return sharded


class _Course(NamedTuple):
    """A training run's results in CPU memory: losses of each step, gradients of checked steps, final weights."""

    losses: list[list[Tensor]]
    grads: dict[int, dict[str, Tensor | None]]
    weights: dict[str, Tensor]


def _train(
    model: nn.Module,
    optimizer: Optimizer,
    step: Step,
    calls: Sequence[Call],
    *,
    steps: int,
    checked: Collection[int],
    prepare: Callable[[nn.Module, int], None] | None,
    set_to_none: bool,
) -> _Course:
    """Train with each of `calls` in each step."""
    course = _Course([], {}, {})
    for number in range(steps):
        if prepare is not None:
            prepare(model, number)
        course.losses.append([])
        for call in calls:
            seed(1000 * number + call.rank)  # dropout falls alike wherever this rank's step is run
            course.losses[-1].append(step(model, call._replace(step=number)).cpu())
        if number in checked:
            grads = full_grads(model)
            course.grads[number] = {name: None if grad is None else grad.cpu() for name, grad in grads.items()}
        optimizer.step()
        if number == steps - 1:
            course.weights.update(full_weights(model))
        optimizer.zero_grad(set_to_none=set_to_none)
    return course


def _compare(found: _Course, wanted: _Course, tolerance: Tolerance) -> None:
    for number, (ours, theirs) in enumerate(zip(found.losses, wanted.losses, strict=True)):
        assert theirs[0].isfinite(), "the reference itself diverges: nothing can be compared with it"
        assert_same({"loss": ours[0]}, {"loss": theirs[0]}, f"loss of step {number}", tolerance)
        if number in wanted.grads:
            assert_same(found.grads[number], wanted.grads[number], f"gradients of step {number}", tolerance)
    assert_same(found.weights, wanted.weights, "weights", tolerance)


def built(build: Callable[[], nn.Module] = Stack) -> Any:
    """The same model at each call."""
    seed(SEED)
    return build()


def sharded_model(build: Callable[[], nn.Module] = Stack, **settings: Any) -> Any:
    """The same model at each call, sharded; fp32 throughout unless `precision` is given."""
    return StreamShard(built(build), **{"precision": FP32, **settings})


def train_stack(
    model: nn.Module,
    optimizer: Any,
    context: RankContext | None = None,
    *,
    first: int = 0,
    steps: int = 3,
    step: Callable[[Any, Call], object] = stack_step,
) -> None:
    """Optimizer steps with `step`: on this rank's batches, or without `context` on the same ones everywhere."""
    rank, size = (0, 1) if context is None else (context.rank, context.world_size)
    for number in range(first, first + steps):
        step(model, Call(number, rank, size, 1.0))
        optimizer.step()
        optimizer.zero_grad()


class _Collectives(Observer):
    """Records collectives and their units; None: flags, or an average of other things than main grads."""

    def __init__(self, engine: Engine) -> None:
        self.units: dict[Collective, list[int | None]] = {collective: [] for collective in Collective}
        self._n_units = len(engine.units)

    def on_collective(self, stream: StreamName, collective: Collective, tag: int | None, *_: object) -> None:
        self.units[collective].append(tag if tag is not None and tag < self._n_units else None)


@contextlib.contextmanager
def heard_collectives(engine: Engine) -> Iterator[dict[Collective, list[int | None]]]:
    """What `engine` issues inside, in order: for which unit, None for flags."""
    collectives = _Collectives(engine)
    with engine.streams.observed_by(collectives):
        yield collectives.units


class Operators(TorchDispatchMode):
    """Counts operators by name, such as ``aten.add.Tensor``: on a device each is a launch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


class _OfTorch(Operators):
    """Counts torch's own collectives, by name without overload (``_allgather_base_``)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func.__name__.split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def counted_collectives(model: nn.Module) -> Iterator[Counter[str]]:
    """Count collectives inside, by name: torch's and those of the sharded `model`'s engine. They are there at the end.

    Those of the engine are operations of torch too where no memory is shared: they count twice.
    """
    counts = Counter[str]()
    with heard_collectives(engine_inside(model)) as heard, _OfTorch() as of_torch:
        yield counts
    counts.update({collective.value: len(units) for collective, units in heard.items() if units})
    counts.update(of_torch.counts)
