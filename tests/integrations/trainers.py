"""Trainer and its kin on ranks: started as by a launcher, compared with DistributedDataParallel's."""

from __future__ import annotations

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from tests.compare import full_weights
from tests.integrations import accelerating
from tests.ranks import RankContext


@contextlib.contextmanager
def launched(context: RankContext, **environment: str) -> Iterator[None]:
    """As by a launcher, and without the warnings of libraries that use what transformers has renamed."""
    with accelerating.launched(context, **environment), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* is deprecated and will be removed in v6", category=FutureWarning)
        yield


def and_sharded(theirs: Any) -> tuple[Any, Any]:
    """A trainer's class, and the same with our mixin."""
    from streamshard.integrations.transformers import StreamShardTrainerMixin

    return theirs, type(f"Sharded{theirs.__name__}", (StreamShardTrainerMixin, theirs), {})


class Run(NamedTuple):
    """What came of a training.

    Attributes:
        history: what was logged, without times.
        weights: whole, by name.
        trainer: whose it is.
    """

    history: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    trainer: Any


def arguments_of(out: Path, arguments_class: Any = None, **given: Any) -> Any:
    """Training arguments (transformers' own class unless told) of a short run, and those that are `given`."""
    from transformers import TrainingArguments

    own = {
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 3,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
        "weight_decay": 0.1,
        "adam_epsilon": 1e-4,  # gradients that are rounding of zero change nothing
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": os.environ["ACCELERATE_USE_CPU"] == "True",  # `launched` says where ranks are
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return (arguments_class or TrainingArguments)(**{"output_dir": str(out), **own, **given})


def train(
    trainer_class: Callable[..., Any],
    model: nn.Module,
    out: Path,
    data: Sequence[Any],
    *,
    resume: Path | None = None,
    given: dict[str, Any] | None = None,
    before: Callable[[Any], None] | None = None,
    arguments_class: type | None = None,
    **arguments: Any,
) -> Run:
    """Train for a few steps, each rank with random numbers of its own.

    Args:
        trainer_class: of a trainer.
        model: the same on every rank.
        out: where to.
        data: examples.
        resume: a checkpoint to go on from.
        given: arguments of the trainer.
        before: is called with the trainer before it trains.
        arguments_class, **arguments: see `arguments_of`.
    """
    from transformers import PrinterCallback

    settings = arguments_of(out, arguments_class, **arguments)
    trainer = trainer_class(model=model, args=settings, train_dataset=data, **(given or {}))
    trainer.remove_callback(PrinterCallback)
    if before is not None:
        before(trainer)
    torch.rand(1 + 16 * dist.get_rank())  # the seed stays: it orders the examples
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    history = [
        {name: value for name, value in entry.items() if not name.endswith(_TIMES)}
        for entry in trainer.state.log_history
    ]
    return Run(history, full_weights(trainer.model), trainer)


_TIMES = (
    "runtime",
    "per_second",
    "step_time",
    "preparation_time",
    "step_s",
    "tokens_per_s",
    "per_rank",
    "memory_bytes",
)


def assert_equal(
    ours: Run, theirs: Run, *, digits: int = 4, weights: bool = True, resumed: bool = False, atol: float = 2e-6
) -> None:
    """The same to the digits that are logged, and in all weights.

    Args:
        ours: one run.
        theirs: another.
        digits: of what was logged.
        weights: False: compare only that.
        resumed: `ours` has gone on in the middle, and knows the mean loss of what came after.
        atol: by which weights may differ; a step of Adam moves them by 1e-2.
    """
    assert len(ours.history) == len(theirs.history) > 0
    for mine, other in zip(ours.history, theirs.history, strict=True):
        assert mine.keys() == other.keys()
        for name, value in other.items():
            if resumed and name == "train_loss":
                continue
            assert abs(mine[name] - value) <= 10.0**-digits * max(1.0, abs(value)), (name, mine, other)
    if not weights:
        return
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-4, atol=atol)


def run_example(name: str, trainer_class: type | None = None, **arguments: Any) -> list[float]:
    """What an example's ``main`` returns, with its own trainer or another."""
    example = accelerating.load_example(f"transformers/{name}.py")
    example.Trainer = trainer_class or example.Trainer
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        losses: list[float] = example.main(**arguments)
    return losses
