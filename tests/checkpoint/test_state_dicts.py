"""State dicts: whole where they are asked for, pieces that cannot be saved as if whole, and averages of weights."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from streamshard import LocalSGD, StreamShard, load_checkpoint, save_checkpoint
from streamshard.checkpoint import optimizer_state
from streamshard.checkpoint.manifest import PieceRecord, TensorRecord
from streamshard.errors import CheckpointError, RankMismatchError, ShardingError
from tests.compare import EXACT, assert_same, full_weights, piece_of
from tests.faults import case
from tests.models import Layer, NormStack, Stack, TinyLM, stack_of
from tests.ranks import RankContext, RankPool, on_ranks
from tests.reference import FP32, Call, adamw, built, mesh_2d, seed, sgd, sharded_model, stack_step, train_stack


class Renamed(Layer):
    """Stores its weight under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[prefix + "kernel"] = state.pop(prefix + "linear.weight").T


class Extra(Layer):
    """Has extra state, computed from whole weights."""

    def get_extra_state(self) -> dict[str, Any]:
        return {"shape": tuple(self.linear.weight.shape), "sum": float(self.linear.weight.detach().sum())}


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "plain": Stack,
    "buffers": NormStack,
    "renamed by a hook": stack_of(Renamed),
    "extra state": stack_of(Extra),
}


@on_ranks(2)
@pytest.mark.parametrize("name", list(BUILDS))
def test_full_state_dict_is_what_the_plain_model_gives(context: RankContext, name: str) -> None:
    """Whatever modules do in their part of it; it can be saved, and is a copy. So it is inside `summon_full_params`."""
    model, plain = sharded_model(BUILDS[name]), built(BUILDS[name])
    found, wanted = model.full_state_dict(rank0_only=False), plain.state_dict()
    tensors = {key: value for key, value in wanted.items() if isinstance(value, Tensor)}
    assert_same({key: found[key] for key in tensors}, tensors, "state", EXACT)
    assert all(found[key] == wanted[key] for key in wanted.keys() - tensors.keys())
    assert list(found) == list(wanted)
    torch.save(found, io.BytesIO())
    with model.summon_full_params():
        inside = model.state_dict()
        assert_same({key: inside[key] for key in tensors}, tensors, "inside", EXACT)
        torch.save(inside, io.BytesIO())
    for param in model.parameters():
        param.data.zero_()
    assert_same({key: found[key] for key in tensors}, tensors, "the copy", EXACT)
    assert bool(model.full_state_dict()) == (context.rank == 0)
    stack_step(model, Call(0, 0, 1, 1.0))


@on_ranks(2)
def test_what_a_module_raises_on_one_rank_is_an_error_on_all(context: RankContext) -> None:
    """And the parameters are pieces again."""

    class Refusing(Layer):
        def get_extra_state(self) -> Any:
            raise KeyError("nothing here")

    model = sharded_model(stack_of(Refusing))
    with pytest.raises(ShardingError, match="rank 0: KeyError: 'nothing here'") as caught:
        model.full_state_dict()
    assert isinstance(caught.value.__cause__, KeyError) is (context.rank == 0)
    stack_step(model, Call(0, 0, 1, 1.0))


PARTS: dict[str, Callable[[Any], Any]] = {
    "model": lambda model: model.state_dict(),
    "inside a layer": lambda model: model.layers[1].linear.state_dict(prefix="x."),
    "parameters kept": lambda model: model.layers[1].state_dict(keep_vars=True),
    "deep copies of parameters": lambda model: dict(enumerate(copy.deepcopy(list(model.parameters())))),
    "data": lambda model: {"weight": next(model.parameters()).data, "bias": model.head.bias.detach()},
    "copies": lambda model: {key: value.clone().half() for key, value in model.layers[1].state_dict().items()},
}


@on_ranks(2)
def test_pieces_of_parts_are_not_saved_as_if_they_were_whole(context: RankContext) -> None:
    """Of any module inside, by any library. A plain clone is the user's, who says that he knows."""
    model = sharded_model()
    for name, part in PARTS.items():
        for value in part(model).values():
            for save in (torch.save, pickle.dump, lambda value, file: file.write(safetensors.torch.save({"": value}))):
                with case(name), pytest.raises(ShardingError, match="save_checkpoint.*full_state_dict"):
                    save(value, io.BytesIO())
        copy.deepcopy(part(model))
    pickle.dumps(model.head.bias.data.as_subclass(Tensor).clone())


@on_ranks(2)
def test_distributed_checkpoints_functions_raise(context: RankContext) -> None:
    """They would take pieces for whole tensors; with one rank they are."""
    from torch.distributed.checkpoint import state_dict as dcp

    model, plain = sharded_model(), built()
    whole, optimizer = dcp.StateDictOptions(full_state_dict=True), torch.optim.AdamW(model.parameters())
    for call in (
        lambda: dcp.get_model_state_dict(model, options=whole),
        lambda: dcp.get_model_state_dict(model),
        lambda: dcp.set_model_state_dict(model, dict(plain.state_dict()), options=whole),
        lambda: dcp.get_optimizer_state_dict(model, optimizer, options=whole),
    ):
        with pytest.raises(ShardingError, match=r"torch\.distributed\.checkpoint .*takes.*full_state_dict"):
            call()


@on_ranks(2)
def test_shapes_that_do_not_fit_are_named_whole(context: RankContext) -> None:
    model, plain = sharded_model(), built()
    state = {**plain.state_dict(), "layers.0.linear.weight": torch.zeros(3, 3), "head.bias": torch.zeros(2)}
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    for name, given, wanted in (("layers.0.linear.weight", [3, 3], [16, 16]), ("head.bias", [2], [1])):
        assert f"{name}: copying a param with shape torch.Size({given}) from checkpoint" in str(caught.value)
        assert f"the shape in current model is torch.Size({wanted})" in str(caught.value)


class Average:
    """As diffusers' EMAModel and torch_ema: a list of averages, in the order of the parameters."""

    def __init__(self, model: Any) -> None:
        self.shadows = [param.detach().clone() for param in model.parameters()]
        self.steps, self.own = 0, 0

    @torch.no_grad()
    def step(self, model: Any) -> None:
        self.steps += 1
        for shadow, param in zip(self.shadows, model.parameters(), strict=True):
            shadow.sub_(0.5 * (shadow - param))

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(copy.deepcopy(state))

    @torch.no_grad()
    def full(self, model: Any) -> dict[str, Tensor]:
        """The averages as full tensors, by way of the model."""
        for shadow, param in zip(self.shadows, model.parameters(), strict=True):
            param.data.copy_(shadow)
        return full_weights(model)


def _saved(context: RankContext, path: Path) -> dict[str, Tensor]:
    model = sharded_model()
    average, optimizer = Average(model), sgd(model)
    for step in range(3):
        train_stack(model, optimizer, first=step, steps=1)
        average.step(model)
    save_checkpoint(path, model, optimizer, {"average": average})
    return average.full(model)


def _loaded(context: RankContext, path: Path, wanted: dict[str, Tensor]) -> None:
    seed(2)
    model: Any = StreamShard(Stack(), precision=FP32)
    average = Average(model)
    load_checkpoint(path, model, None, {"average": average})
    assert average.steps == 3
    average.step(model)  # pieces of these ranks: elementwise operations work
    load_checkpoint(path, model, None, {"average": average})
    assert_same(average.full(model), wanted, "averages", EXACT)


def test_averages_of_weights_load_on_other_numbers_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """To the bit, from two ranks to one and three, and from one, where they are full tensors, to two."""
    for saved_by, loaded_by in ((2, (1, 3)), (1, (2,))):
        wanted = ranks(saved_by).run(_saved, tmp_path)[0]
        for size in loaded_by:
            ranks(size).run(_loaded, tmp_path, wanted)


@on_ranks(4)
def test_each_replica_of_local_sgd_goes_on_with_its_own_weights_and_averages(
    context: RankContext, tmp_path: Path
) -> None:
    """Between averages over replicas, and with the step of the next one."""
    runs = []
    for _ in range(2):
        model = sharded_model(mesh=mesh_2d(2, 2))
        runs.append((model, LocalSGD(adamw(model), model, period=3, warmup_steps=1), Average(model)))
    (model, optimizer, average), (other, its_optimizer, its_average) = runs
    for step in range(3):
        train_stack(model, optimizer, context, first=step, steps=1)
        average.step(model)
    save_checkpoint(tmp_path, model, optimizer, {"average": average})
    load_checkpoint(tmp_path, other, its_optimizer, {"average": its_average})
    assert its_optimizer.step_count == 3
    for wanted, found in zip(average.shadows, its_average.shadows, strict=True):
        assert torch.equal(piece_of(found), piece_of(wanted))
    for each, its, _ in runs:
        train_stack(each, its, context, first=3, steps=4)
    assert_same(full_weights(other), full_weights(model), "weights", EXACT)


@on_ranks(2)
def test_pieces_that_cannot_be_saved_or_loaded_are_refused(context: RankContext, tmp_path: Path) -> None:
    """Beside values of one rank, or on one rank only; of a parameter that is not there; a norm that is not summed."""
    model = sharded_model()
    average = Average(model)
    average.own = context.rank
    one = {"weight": next(model.parameters()).detach() if context.rank == 0 else None}
    norm = {"norm": next(model.parameters()).detach().norm()}
    for name, each, told in (
        ("average", average, "extra.average has pieces of parameters, and other values that differ"),
        ("one", one, "extra.one has pieces of parameters, and other values that differ"),
        ("norm", norm, r"extra.norm.norm is a norm of this rank's pieces: give float\(value\)"),
    ):
        with pytest.raises(CheckpointError, match=told):
            save_checkpoint(tmp_path / "own", model, extra={name: each})
    average.own = 0
    other: Any = StreamShard(TinyLM(), precision=FP32)
    save_checkpoint(tmp_path / "two", {"a": model, "b": other}, extra={"average": average})
    with pytest.raises(CheckpointError, match=r"extra.average: 'extra.average.shadows\[0\]' is cut as parameter '.*'"):
        load_checkpoint(tmp_path / "two", {"b": other}, extra={"average": Average(other)})


def test_what_ranks_say_differently_of_an_optimizer_is_named() -> None:
    """By the key and the values of two ranks. Ranks without a piece say nothing, and roundings are no difference."""
    known: dict[str, Any] = {"w": {"step": 1.0}}
    assert optimizer_state.join_states("adam", [known, {}, {"w": {"step": 1 + 1e-9}}]) == known
    for other, told in (({"step": 2.0}, "'step' of w is 1.0 on rank 0 and 2.0"), ({}, "'has stepped' of w is True")):
        said = f"adam: {told}.* on rank 2, so ranks step their pieces differently"
        with pytest.raises(RankMismatchError, match=said):
            optimizer_state.join_states("adam", [known, {}, {"w": other}])


def test_ranks_send_many_pieces_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece once; all of one message from one rank and of one dtype, and no more bytes than a message has."""
    monkeypatch.setattr(optimizer_state, "_MESSAGE_BYTES", 64)
    cut = (PieceRecord(0, 0, 5), PieceRecord(1, 5, 6), PieceRecord(2, 6, 8))
    records = {f"moment {number}": TensorRecord((8,), torch.float32, cut) for number in range(10)}
    records["step"] = TensorRecord((), torch.int64, (PieceRecord(0, 0, 1),))
    records["large"] = TensorRecord((40,), torch.float32, (PieceRecord(1, 0, 40),))
    messages = list(optimizer_state._messages(records))
    sent = [(name, piece) for _, _, pieces in messages for name, piece in pieces]
    assert sorted(sent) == sorted((name, piece) for name, record in records.items() for piece in record.pieces)
    for source, dtype, pieces in messages:
        assert {piece.file for _, piece in pieces} == {source}
        assert {records[name].dtype for name, _ in pieces} == {dtype}
        n_bytes = sum((piece.stop - piece.start) * dtype.itemsize for _, piece in pieces)
        assert n_bytes <= 64 or len(pieces) == 1
    # Five elements of rank 0 fit three times, one of rank 1 and two of rank 2 fit in 40 and 80 bytes.
    assert sorted(source for source, *_ in messages) == [0] * 5 + [1] * 2 + [2] * 2
