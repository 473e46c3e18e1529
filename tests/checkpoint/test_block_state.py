"""State of 8-bit, 4-bit and fp8 optimizers is put together, and cut again, on any number of ranks."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from streamshard import full_optimizer_state_dict, load_checkpoint, load_optimizer_state_dict, save_checkpoint
from streamshard.checkpoint.block_state import take_apart
from streamshard.checkpoint.dcp import to_dcp
from streamshard.errors import CheckpointError, ShardingError
from streamshard.optim import WholeParameterOptimizer, elementwise
from tests.compare import EXACT, assert_same, full_weights
from tests.models import Stack, vector_batch
from tests.ranks import RankContext, RankPool, on_ranks
from tests.reference import built, sharded_model

torchao: Any = pytest.importorskip("torchao.optim", reason="needs torchao: pip install streamshard[test]")

KINDS = ("AdamW8bit", "AdamW4bit", "AdamWFp8")
# A layer's pieces end inside its matrix; biases, the last layer and the head are too small for blocks.
WIDTHS = (64, 256, 128, 16)


def _stack() -> nn.Module:
    return Stack(WIDTHS)


def _optimizer(name: str, model: nn.Module, is_whole: bool = False) -> Any:
    kind = _LikeBitsandbytes if name == "like bitsandbytes" else getattr(torchao, name)
    return WholeParameterOptimizer(model.parameters(), kind, lr=0.01) if is_whole else kind(model.parameters(), lr=0.01)


def _start(name: str, is_whole: bool = False, **settings: Any) -> Any:
    model = sharded_model(_stack, **{"align_pieces_to": 4096, **settings})
    return model, _optimizer(name, model, is_whole)


def _train(model: Any, optimizer: Any, first: int, last: int) -> None:
    """The same batch on all ranks, whose number is a power of two: the mean of gradients is no rounding away."""
    with torch.compiler.set_stance("force_eager"):  # torchao compiles its steps
        for number in range(first, last):
            model(vector_batch(number, 0, rows=8, dim=WIDTHS[0])).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def _saved(context: RankContext, directory: Path, is_whole: bool) -> None:
    for name in KINDS:
        run = _start(name, is_whole)
        _train(*run, 0, 3)
        save_checkpoint(directory / name, *run)


def _resumed(context: RankContext, directory: Path, is_whole: bool) -> dict[str, Any]:
    weights = {}
    for name in KINDS:
        run = _start(name, is_whole)
        load_checkpoint(directory / name, *run)
        _train(*run, 3, 6)
        weights[name] = full_weights(run[0])
    return weights


def test_a_run_goes_on_like_torchao_in_plain_pytorch(ranks: RankPool, tmp_path: Path) -> None:
    """On any number of ranks, to the bit: each code, scale and table is saved once, and is of the same elements."""
    for saves_on, loads_on, is_whole in ((2, 1, False), (1, 2, True)):
        ranks(saves_on).run(_saved, tmp_path / str(saves_on), is_whole)
        found = ranks(loads_on).run(_resumed, tmp_path / str(saves_on), is_whole)
        for name in KINDS:
            plain = built(_stack)
            _train(plain, _optimizer(name, plain), 0, 6)
            for each in found:
                assert_same(each[name], dict(plain.state_dict()), name, EXACT)


def _parts(state: Any) -> dict[str, Any]:
    """By parameter and key, all tensors of torch's own class, and what else there is."""
    found: dict[str, Any] = {}
    for number, values in state["state"].items():
        for key, value in take_apart(values).items():
            if isinstance(value, dict):
                (kind, parts), (_, attributes) = value.items()
                found |= {f"{number}.{key}.{kind}.{part}": each.float() for part, each in parts.items()}
                found[f"{number}.{key}"] = torch.tensor(attributes.count(True))  # signed or not
            else:
                found[f"{number}.{key}"] = torch.as_tensor(value)
    return found


@elementwise
class _LikeBitsandbytes(torch.optim.Optimizer):
    """Keeps gradients as bitsandbytes keeps moments: codes, the largest of each 256, and a table."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                state, numel = self.state[param], param.numel()
                blocks = nn.functional.pad(param.grad.reshape(-1), (0, -numel % 256)).view(-1, 256)
                codes = (blocks / blocks.abs().amax(1, keepdim=True) * 127).round().to(torch.int8)
                before = state.get("state1", torch.zeros_like(param))
                state["absmax1"], state["qmap1"] = blocks.abs().amax(1), torch.arange(256.0)
                state["state1"] = codes.view(-1)[:numel].view(param.shape)
                param.sub_(0.1 * self.defaults["lr"] * (before.float() + state["state1"].float()))


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "widths", "align"),
    [*((name, WIDTHS, 4096) for name in KINDS[:2]), ("like bitsandbytes", (64, 99, 99), 256)],
)
def test_the_full_state_is_that_of_plain_pytorch(
    context: RankContext, name: str, widths: tuple[int, ...], align: int
) -> None:
    """And is loaded again, from either. The last block may be incomplete in those that bitsandbytes has."""

    def start() -> Any:
        model = sharded_model(lambda: Stack(widths), align_pieces_to=align)
        return model, _optimizer(name, model)

    plain, (model, optimizer) = built(lambda: Stack(widths)), start()
    theirs = _optimizer(name, plain)
    _train(plain, theirs, 0, 3)
    _train(model, optimizer, 0, 3)
    full = full_optimizer_state_dict(model, optimizer, rank0_only=False)
    assert_same(_parts(full), _parts(theirs.state_dict()), name, EXACT)
    weights, file = full_weights(model), io.BytesIO()
    torch.save(theirs.state_dict(), file)  # torchao's tensors cannot be copied
    _train(plain, theirs, 3, 5)
    for state in (full, torch.load(io.BytesIO(file.getvalue()))):
        other, its_optimizer = start()
        other.load_state_dict(weights)
        load_optimizer_state_dict(other, its_optimizer, state if context.rank == 0 else None)
        _train(other, its_optimizer, 3, 5)
        assert_same(full_weights(other), dict(plain.state_dict()), name, EXACT)


@on_ranks(3)
def test_state_in_blocks_is_not_loaded_into_pieces_that_cut_a_block(context: RankContext, tmp_path: Path) -> None:
    """All ranks raise, also those without a cut. Nor does DCP get any."""
    run = _start("AdamW8bit")
    _train(*run, 0, 1)
    save_checkpoint(tmp_path / "run", *run)
    full, cut = full_optimizer_state_dict(*run), _start("AdamW8bit", align_pieces_to=1)
    message = r"blocks of 256 elements, and 'layers.*align_pieces_to=4096"
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path / "run", *cut)
    with pytest.raises(ShardingError, match=message):
        load_optimizer_state_dict(*cut, full)
    if context.rank == 0:
        with pytest.raises(CheckpointError, match=r"exp_avg\S+ is 8-bit, 4-bit or fp8 .* without the optimizer"):
            to_dcp(tmp_path / "run", tmp_path / "dcp")


@on_ranks(2)
def test_state_that_would_be_in_blocks_on_some_ranks_alone_is_refused_at_the_first_step(context: RankContext) -> None:
    """torchao decides by the size of the tensor that it steps."""
    for width, options, message in (
        (100, {}, r"AdamW8bit keeps fp32 state .*'layers.0.linear.weight' \(6400 elements\).*\[4096, 2304\]"),
        (128, {"block_size": 192}, "AdamW8bit with block_size=192: wanted a power of two"),
    ):
        model = sharded_model(lambda width=width: Stack((64, width, width)), align_pieces_to=4096)
        optimizer = torchao.AdamW8bit(model.parameters(), **options)
        model(vector_batch(0, 0, dim=64)).sum().backward()
        with pytest.raises(ShardingError, match=message):
            optimizer.step()
