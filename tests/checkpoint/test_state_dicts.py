"""State dicts of sharded models and optimizers: whole where asked for, pieces that cannot be saved as if whole."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from streamshard.checkpoint import optimizer_state
from streamshard.checkpoint.manifest import PieceRecord, TensorRecord
from streamshard.errors import ShardingError
from tests.models import Layer, NormStack, Stack, stack_of
from tests.ranks import RankContext, on_ranks
from tests.reference import EXACT, Call, assert_same, built, case, full_weights, sharded_model, stack_step


def _model(build: Callable[[], nn.Module] = Stack) -> tuple[Any, nn.Module]:
    return sharded_model(build), built(build)


class Renamed(Layer):
    """Stores its weight under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.register_state_dict_post_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[prefix + "kernel"] = state.pop(prefix + "linear.weight").T


class Extra(Layer):
    """Has extra state, computed from whole weights, and hooks before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []
        self.register_state_dict_pre_hook(lambda module, prefix, keep: self.seen.append(self.linear.weight.shape))

    def get_extra_state(self) -> dict[str, Any]:
        return {"shape": tuple(self.linear.weight.shape), "sum": float(self.linear.weight.detach().sum())}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Nothing to do."""


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "plain": Stack,
    "buffers": NormStack,
    "renamed by a hook": stack_of(Renamed),
    "extra state": stack_of(Extra),
}


@on_ranks(2)
@pytest.mark.parametrize("name", list(BUILDS))
def test_full_state_dict_is_what_the_plain_model_gives(context: RankContext, name: str) -> None:
    """Whatever modules do in their part of it; on rank 0 it can be saved. The model is as before."""
    model, plain = _model(BUILDS[name])
    found, wanted = model.full_state_dict(rank0_only=False), plain.state_dict()
    tensors = {key: value for key, value in wanted.items() if isinstance(value, Tensor)}
    assert_same({key: found[key] for key in tensors}, tensors, "state", EXACT)
    assert all(found[key] == wanted[key] for key in wanted.keys() - tensors.keys())
    assert list(found) == list(wanted)
    torch.save(found, io.BytesIO())
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

    model, _ = _model(stack_of(Refusing))
    with pytest.raises(ShardingError, match="rank 0: KeyError: 'nothing here'") as caught:
        model.full_state_dict()
    assert isinstance(caught.value.__cause__, KeyError) is (context.rank == 0)
    stack_step(model, Call(0, 0, 1, 1.0))


@on_ranks(2)
def test_inside_summon_full_params_state_dicts_are_whole(context: RankContext) -> None:
    """They can be saved, and edited."""
    model, plain = _model()
    with model.summon_full_params():
        torch.save(model.state_dict(), io.BytesIO())
        assert_same(dict(model.state_dict()), dict(plain.state_dict()), "state", EXACT)
        with torch.no_grad():
            for param in (*model.parameters(), *plain.parameters()):
                param.mul_(2.0)
    assert_same(full_weights(model), dict(plain.state_dict()), "written back", EXACT)
    with pytest.raises(ShardingError, match="is one rank's piece of"):
        torch.save(model.state_dict(), io.BytesIO())


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
    model, _ = _model(Stack)
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

    model, plain = _model()
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
    """Not by the shape of a piece."""
    model, plain = _model()
    state = {**plain.state_dict(), "layers.0.linear.weight": torch.zeros(3, 3), "head.bias": torch.zeros(2)}
    with pytest.raises(RuntimeError) as caught:
        model.load_state_dict(state)
    for said in (
        r"StreamShard: 'layers.0.linear.weight' has shape (16, 16), in the state dict it has (3, 3)",
        r"StreamShard: 'head.bias' has shape (1,), in the state dict it has (2,)",
        "full_state_dict()",
    ):
        assert said in str(caught.value)
    assert "size mismatch" not in str(caught.value)


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
