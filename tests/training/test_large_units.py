"""Embedding, head and whatever else is large beside the layers: units of their own, in slots of their own size."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from streamshard import Precision, StreamShard
from streamshard.comm.streams import Collective
from streamshard.errors import CommunicationError, ShardingError
from streamshard.inspect import engine_inside
from tests.models import (
    DIM,
    Adapter,
    Block,
    Layer,
    Stack,
    TinyConfig,
    TinyLM,
    next_token_loss,
    token_batch,
    vector_batch,
)
from tests.ranks import RankContext, on_ranks
from tests.reference import (
    FP32,
    Call,
    assert_same,
    assert_trains_like_plain,
    full_grads,
    full_weights,
    heard_collectives,
    let_dynamo_look,
    lm_step,
    only_sharded,
    stack_step,
)
from tests.scenarios import assert_does_not_depend_on_time

VOCABULARY = 160  # rows of the embedding: 2560 elements, of which a block has 2224
LARGE = TinyConfig(vocabulary=VOCABULARY)

SETTINGS: dict[str, dict[str, Any]] = {
    "two slots": {},
    "weights kept": {"weight_slots": "all"},
    "a slot each": {"weight_slots": "all", "grad_slots": "all"},
}


class LargeLM(TinyLM):
    """Embedding and head are larger than a block; `logits` is how the head is used."""

    def __init__(self) -> None:
        super().__init__(LARGE)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """[rows, length] tokens -> [rows, length, vocabulary] logits"""
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        return self.logits(self.norm(self.run_blocks(x, mask)))

    def logits(self, x: Tensor) -> Tensor:
        """[rows, length, dim] -> [rows, length, vocabulary]"""
        out: Tensor = self.head(x)
        return out


def _units(model: nn.Module) -> list[str]:
    return [unit.name for unit in engine_inside(model).units[1:]]


BLOCKS = [f"blocks.{k}" for k in range(LARGE.depth)]


# ---------------------------------------------------------------------------------------------- which modules


class _Own(nn.Module):
    """A large parameter of its own, beside a module, and a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, DIM) * 0.1)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        """[.., DIM] -> [.., VOCABULARY]"""
        return F.linear(self.norm(x), self.table)


def _with(name: str, module: nn.Module) -> nn.Module:
    model = LargeLM()
    model.add_module(name, module)
    return model


def _tied() -> nn.Module:
    return TinyLM(TinyConfig(vocabulary=VOCABULARY, tied=True))


FOUND: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "large": (LargeLM, ["embedding", *BLOCKS, "head"]),
    "small": (TinyLM, BLOCKS),
    "tied": (_tied, BLOCKS),
    "a module with its own": (lambda: _with("head", _Own()), ["embedding", *BLOCKS, "head"]),
    "inside a module": (
        lambda: _with("head", nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, VOCABULARY))),
        ["embedding", *BLOCKS, "head.1"],
    ),
    "never called": (
        lambda: _with("head", nn.ParameterDict({"w": torch.randn(VOCABULARY, DIM)})),
        ["embedding", *BLOCKS],
    ),
    "none": (lambda: nn.Sequential(*(Layer() for _ in range(3))), ["0", "1", "2"]),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", FOUND)
def test_what_is_large_beside_the_layers_is_a_unit(context: RankContext, kind: str) -> None:
    """If its parameters are not tied, and it has a forward. In registration order."""
    build, wanted = FOUND[kind]
    model = StreamShard(build(), precision=FP32)
    assert _units(model) == wanted
    shared = [name in BLOCKS or name.isdigit() for name in wanted]
    assert list(engine_inside(model).plan.shared) == [False, *shared]


@on_ranks(1)
def test_units_that_are_given_are_all_there_are(context: RankContext) -> None:
    """Nothing is added to what the user has said."""
    assert _units(StreamShard(LargeLM(), units=Block, precision=FP32)) == BLOCKS
    assert _units(StreamShard(LargeLM(), units=["head", *BLOCKS], precision=FP32)) == [*BLOCKS, "head"]


@on_ranks(1)
def test_large_is_what_has_half_a_layer(context: RankContext) -> None:
    """Of the largest, and at least `min_unit_size`; small layers that are put together leave it alone."""
    layer = sum(p.numel() for p in Block().parameters())
    for rows, is_large in ((layer // 2 // DIM, False), (layer // 2 // DIM + 1, True)):
        model = StreamShard(TinyLM(TinyConfig(vocabulary=rows)), precision=FP32)
        assert ("embedding" in _units(model)) is is_large
    together = ["blocks.0 .. blocks.1", "blocks.2 .. blocks.3"]
    size = 4 * layer + 1
    assert _units(StreamShard(LargeLM(), min_unit_size=4 * VOCABULARY * DIM, precision=FP32)) == [
        "embedding",
        *together,
        "head",
    ]
    assert _units(StreamShard(TinyLM(TinyConfig(vocabulary=139)), min_unit_size=size, precision=FP32)) == together


@on_ranks(2)
def test_modules_of_one_class_have_a_slot_each(context: RankContext) -> None:
    """They are not layers, which take turns; nor do they size the layers' slots."""
    model = _with("more", nn.Linear(DIM, 2 * VOCABULARY))
    plan = engine_inside(StreamShard(model, precision=FP32)).plan
    assert plan.shared == (False, False, True, True, True, True, False, False)
    assert len(set(plan.weights)) == len(set(plan.grads)) == 2 + 4


# ---------------------------------------------------------------------------------------------- memory


@on_ranks(2, 3)
@pytest.mark.parametrize("settings", SETTINGS)
def test_it_takes_no_more_memory_than_in_the_edge_unit(context: RankContext, settings: str) -> None:
    """But for the padding of two more units; and the report says what is held."""
    reports = [
        StreamShard(LargeLM(), units=units, precision=Precision(), **SETTINGS[settings]).memory_report()
        for units in (None, Block)
    ]
    for report in reports:
        assert report.held_bytes == report.formula_bytes
    more = {name: held - reports[1].held_bytes[name] for name, held in reports[0].held_bytes.items()}
    padding = 2 * context.world_size * 8 * 4  # two units, N shards, aligned to 16 bytes of bf16, at most in fp32
    assert all(bytes_ <= padding for bytes_ in more.values()), more


@on_ranks(2)
def test_a_frozen_embedding_takes_no_gradient_memory(context: RankContext) -> None:
    """As a unit, and in the root unit, where a norm beside it trains."""
    for units in (None, Block):
        held = []
        for trains in (True, False):
            model = LargeLM()
            n_bytes = 4 * model.embedding.weight.numel()
            model.embedding.requires_grad_(trains)
            held.append(StreamShard(model, units=units, precision=FP32).memory_report().held_bytes)
        saved = {name: size - held[1][name] for name, size in held[0].items()}
        assert saved["grad slots"] == 2 * saved["main grads"] == -2 * saved["frozen weights"] >= n_bytes


# ---------------------------------------------------------------------------------------------- order


def _issued(model: nn.Module, step: Callable[[], object]) -> tuple[list[str], list[str]]:
    """Names of the units that are gathered in `step`, and reduced."""
    engine = engine_inside(model)
    names = ["edge", *_units(model)]
    with heard_collectives(engine) as heard:
        step()
    lists = []
    for kind in (Collective.ALL_GATHER, Collective.REDUCE_SCATTER):
        lists.append([names[unit] for unit in heard[kind] if unit is not None and unit < len(names)])
    return lists[0], lists[1]


@on_ranks(2)
def test_the_first_layer_does_not_wait_for_the_head_and_the_last_reduction_is_small(context: RankContext) -> None:
    """Before the order is known, what is large is gathered first; then the head is, behind the last layer."""
    model = StreamShard(LargeLM(), precision=FP32)
    for number in range(3):
        call = Call(number, context.rank, context.world_size, 1.0)
        gathered, reduced = _issued(model, lambda call=call: lm_step(model, call))  # type: ignore[misc]
        model.zero_grad()
        again = ["blocks.1", "blocks.0"]  # two are still in their slots when backward begins
        if number == 0:
            assert gathered == ["edge", "embedding", "head", *BLOCKS, *again]
            assert reduced == [*BLOCKS[::-1], "head", "embedding", "edge"]
        else:
            assert gathered == ["edge", "embedding", *BLOCKS, "head", *again]
            assert reduced == ["head", *BLOCKS[::-1], "embedding", "edge"]


class _When:
    """What was issued by the time a layer computes."""

    def __init__(self, model: Any) -> None:
        self.issued: list[tuple[str, int | None]] = []
        self.before: dict[str, list[tuple[str, int | None]]] = {}
        for name in ("embedding", *BLOCKS, "head"):
            module = model.get_submodule(name)
            module.register_forward_pre_hook(lambda *_, name=name: self.look(name))
            module.register_forward_hook(lambda module, args, out, name=name: self.watch(out, name))

    def look(self, name: str) -> None:
        self.before[name] = [*self.issued]

    def watch(self, out: Tensor, name: str) -> None:
        out.register_hook(lambda _: self.look(f"backward of {name}"))

    def note(self, collective: Collective, unit: int | None) -> None:
        self.issued.append((collective.name, unit))


@on_ranks(2)
def test_the_heads_gather_and_reduction_have_layers_to_hide_behind(context: RankContext) -> None:
    """It is under way while the last layer computes; its gradients leave while that one's backward runs."""
    model: Any = StreamShard(LargeLM(), precision=FP32)
    when = _When(model)
    head = len(engine_inside(model).units) - 1
    for number in range(2):
        when.issued.clear()
        with heard_collectives(engine_inside(model), when.note):
            lm_step(model, Call(number, context.rank, context.world_size, 1.0))
    gather, reduce = ("ALL_GATHER", head), ("REDUCE_SCATTER", head)
    assert gather not in when.before["embedding"]
    assert gather not in when.before["blocks.0"]
    assert gather in when.before["blocks.3"]
    assert reduce not in when.before["backward of blocks.3"]  # of whose output this is the gradient
    assert reduce in when.before["backward of blocks.2"]
    assert ("REDUCE_SCATTER", 3) in when.before["backward of embedding"]  # that of blocks.1


# ---------------------------------------------------------------------------------------------- uses


class Chunked(LargeLM):
    """The head's weight is read, some positions at a time, as losses do that save memory."""

    def logits(self, x: Tensor) -> Tensor:
        """See `LargeLM`."""
        return torch.cat([self.some(part) for part in x.split(2, dim=1)], dim=1)

    def some(self, x: Tensor) -> Tensor:
        """Logits of some positions."""
        return F.linear(x, self.head.weight)


class Recomputed(Chunked):
    """Each part is computed again in backward."""

    def some(self, x: Tensor) -> Tensor:
        """See `Chunked`."""
        out: Any = checkpoint(super().some, x, use_reentrant=False)
        return out  # type: ignore[no-any-return]


class RecomputedOld(Chunked):
    """The old kind of checkpoint."""

    def some(self, x: Tensor) -> Tensor:
        """See `Chunked`."""
        out: Any = checkpoint(super().some, x, use_reentrant=True)
        return out  # type: ignore[no-any-return]


class HeadRecomputed(LargeLM):
    """The head is called inside a checkpoint."""

    def logits(self, x: Tensor) -> Tensor:
        """See `LargeLM`."""
        out: Any = checkpoint(lambda y: self.head(y).tanh(), x, use_reentrant=False)
        return out  # type: ignore[no-any-return]


class _FusedLinear(torch.autograd.Function):
    """Gradients are made by hand, as fused losses do: the weight itself has to be in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """x weight^T"""
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Of both."""
        (grad,) = grads
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class Fused(LargeLM):
    """The head's weight goes into a function with a backward of its own."""

    def logits(self, x: Tensor) -> Tensor:
        """See `LargeLM`."""
        out: Tensor = _FusedLinear.apply(x, self.head.weight)
        return out


class TiedByReading(LargeLM):
    """The embedding is called, and its weight read at the end; the head is not used."""

    def logits(self, x: Tensor) -> Tensor:
        """See `LargeLM`."""
        return F.linear(x, self.embedding.weight)


class ReadFirst(LargeLM):
    """The head's weight is read before the layers run, and the head is called behind them."""

    def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """See `TinyLM`."""
        return super().run_blocks(x + self.head.weight.mean(), mask)


class Summed(LargeLM):
    """Weights from lists, before anything has run, and behind."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `LargeLM`."""
        params = [*self.embedding.parameters(), *self.head.parameters()]
        before = sum((p.square().mean() for p in params), torch.zeros(()))
        out = super().forward(tokens, mask)
        return out + before + torch.stack([p.mean() for p in params]).sum()


class Supervised(LargeLM):
    """The head is called between layers, too."""

    def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """See `TinyLM`."""
        for block in self.blocks:
            x = block(x)
            x = x + self.head(x).square().mean()
        return x


class _Asking(Block):
    """A layer that uses the root's head, by calling it or by reading its weight."""

    head: tuple[nn.Linear, ...] = ()
    calls = True

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `Block`."""
        x = super().forward(x, mask)
        x = x + (self.head[0](x) if self.calls else F.linear(x, self.head[0].weight)).tanh().mean()
        return x + self.up(x).mean()


class AskingLayers(LargeLM):
    """Every other layer does."""

    def __init__(self, *, calls: bool = True) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Asking() for _ in range(4))
        for block in list(self.blocks)[::2]:
            block.head, block.calls = (self.head,), calls  # a tuple: no child
        for block in list(self.blocks)[1::2]:
            block.head, block.calls = (self.embedding_like,), calls

    @property
    def embedding_like(self) -> nn.Linear:
        """The same head."""
        return self.head


class HeadFirst(LargeLM):
    """Registered before the layers."""

    def __init__(self) -> None:
        super().__init__()
        modules = dict(self._modules)
        self._modules.clear()
        self._modules.update({"head": modules.pop("head"), **modules})


class Sparse(LargeLM):
    """Gradients of the embedding are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM, sparse=True)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `LargeLM`; plain PyTorch's momentum wants them dense."""
        return super().forward(tokens, mask)


class Unused(LargeLM):
    """One vector for all tokens: the embedding is not used at all."""

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        """See `LargeLM`."""
        x = self.positions[: tokens.shape[1]].expand(len(tokens), -1, -1)
        return self.logits(self.norm(self.run_blocks(x, mask)))


class FrozenHead(LargeLM):
    """Trains without its head, whose weight is thawed by the forward of another step: `freezes` says how."""

    def logits(self, x: Tensor) -> Tensor:
        """See `LargeLM`."""
        self.head.weight.requires_grad_(False)
        return super().logits(x)


class PenaltyGradient(LargeLM):
    """A gradient with respect to activations, taken inside the forward, is in the graph."""

    def logits(self, x: Tensor) -> Tensor:
        """See `LargeLM`."""
        out = super().logits(x)
        if not torch.is_grad_enabled():
            return out
        (grad,) = torch.autograd.grad(out.square().mean(), x, create_graph=True)
        return out + grad.square().sum()


USES: dict[str, Callable[[], nn.Module]] = {
    "called": LargeLM,
    "read": Chunked,
    "recomputed": Recomputed,
    "recomputed, reentrant": RecomputedOld,
    "head recomputed": HeadRecomputed,
    "fused": Fused,
    "tied by reading": TiedByReading,
    "read first": ReadFirst,
    "from a list": Summed,
    "between layers": Supervised,
    "by layers": AskingLayers,
    "read by layers": lambda: AskingLayers(calls=False),
    "registered first": HeadFirst,
    "unused": Unused,
    "frozen by its forward": FrozenHead,
    "differentiated": PenaltyGradient,
    "a module with its own": lambda: _with("head", _Own()),
}


def large_step(model: nn.Module, call: Call) -> Tensor:
    """Next-token training of a `LargeLM`."""
    tokens = token_batch(call.step, call.rank, vocabulary=VOCABULARY)
    return call.backward(next_token_loss(model(tokens), tokens))


@on_ranks(1, 2)
@pytest.mark.parametrize("use", USES)
def test_however_it_is_used_it_trains_like_plain_pytorch(context: RankContext, use: str) -> None:
    """Before the order is known, and after."""
    assert_trains_like_plain(context, USES[use], large_step, checked=(0, 2))


@on_ranks()
@pytest.mark.parametrize(("world_size", "use"), [(3 if use in ("called", "read") else 2, use) for use in USES])
def test_with_more_slots_too(context: RankContext, use: str) -> None:
    """Where layers stay in their slots as well."""
    settings = SETTINGS["a slot each"]
    assert_trains_like_plain(context, USES[use], large_step, steps=3, checked=(0, 2), **settings)


@on_ranks(2)
def test_sparse_gradients_of_the_embedding_are_reduced(context: RankContext) -> None:
    """As dense ones."""

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    plain, sharded = Sparse(), StreamShard(_seeded(Sparse), precision=FP32)
    plain.load_state_dict(full_weights(sharded))
    for rank in range(2):
        large_step(plain, Call(0, rank, 2, 0.5))
    large_step(sharded, Call(0, context.rank, 2, 1.0))
    wanted = {name: None if g is None else g.to_dense() for name, g in full_grads(plain).items()}
    assert_same(full_grads(sharded), wanted, "gradients")
    optimizer(sharded).step()


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return build()


@on_ranks(2)
@pytest.mark.parametrize("use", [use for use in USES if use != "recomputed, reentrant"])
def test_its_uses_are_free_of_races_and_do_not_depend_on_time(context: RankContext, use: str) -> None:
    """In half precision, with ranks that are late at random."""
    assert_does_not_depend_on_time(context, USES[use], large_step)


@on_ranks(2)
@pytest.mark.parametrize("use", [use for use in USES if use != "recomputed, reentrant"])
def test_each_is_gathered_and_reduced_once_in_a_step(context: RankContext, use: str) -> None:
    """However often it is called or read. Layers twice, but for the two that stay in their slots at the turn."""
    model = StreamShard(USES[use](), precision=FP32)
    names = _units(model)
    lone = [name for name, shared in zip(names, engine_inside(model).plan.shared[1:], strict=True) if not shared]
    for number in range(3):
        call = Call(number, context.rank, context.world_size, 1.0)
        gathered, reduced = _issued(model, lambda call=call: large_step(model, call))  # type: ignore[misc]
        model.zero_grad()
        if number == 0:
            continue
        assert Counter(gathered) == Counter(["edge", *lone, *BLOCKS, *BLOCKS[:2]]), gathered
        trained = [name for name in lone if not (name == "head" and use == "frozen by its forward")]
        assert Counter(reduced) == Counter(["edge", *trained, *BLOCKS]), reduced
        if use in ("called", "read", "recomputed", "head recomputed", "fused", "differentiated", "registered first"):
            assert reduced[0] == "head"


@on_ranks(2)
@pytest.mark.parametrize(
    ("use", "backend"),
    [("called", "aot_eager"), ("read", "aot_eager"), ("tied by reading", "eager")],
)
def test_compiled_models_find_what_they_read(context: RankContext, use: str, backend: str) -> None:
    """The graph breaks there."""
    let_dynamo_look()
    compiled = only_sharded(lambda model: model.compile(backend=backend))
    assert_trains_like_plain(context, USES[use], large_step, steps=3, checked=(0, 2), prepare=compiled)


@on_ranks(2)
def test_what_is_asked_of_a_list_needs_no_weights(context: RankContext) -> None:
    """Libraries ask for the dtype of the first parameter, on whichever rank."""

    class Asks(LargeLM):
        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            if self.is_asking:
                assert {p.dtype for p in self.parameters()} == {torch.float32}
                assert {p.device.type for p in self.parameters()} == {"cpu"}
            return super().forward(tokens, mask)

        is_asking = False

    model: Any = StreamShard(Asks(), precision=FP32)
    model.is_asking = context.rank == 0
    for number in range(3):
        large_step(model, Call(number, context.rank, 2, 1.0))


# ---------------------------------------------------------------------------------------------- what raises


@on_ranks(1, 2)
@pytest.mark.parametrize("build", [LargeLM, Chunked])
def test_weights_changed_between_a_forward_and_its_backward_raise(
    context: RankContext, build: Callable[[], nn.Module]
) -> None:
    """Called or read."""
    model: Any = StreamShard(build(), precision=FP32)
    tokens = token_batch(0, context.rank, vocabulary=VOCABULARY)
    loss = next_token_loss(model(tokens), tokens)
    with torch.no_grad():
        model.head.weight.mul_(0.5)
    model(tokens)
    with pytest.raises(ShardingError, match=r"'head\.weight' was modified by an inplace operation"):
        loss.backward()


@on_ranks(2)
def test_a_read_before_its_turn_that_ranks_do_not_share_raises(context: RankContext) -> None:
    """It is asking for a gather, which others take no part in."""

    class Sometimes(LargeLM):
        reads = False

        def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
            return super().run_blocks(x + self.head.weight.mean() if self.reads else x, mask)

    model: Any = StreamShard(Sometimes(), precision=FP32)
    large_step(model, Call(0, context.rank, 2, 1.0))
    model.reads = context.rank == 1
    with pytest.raises(CommunicationError):
        for number in range(2):
            large_step(model, Call(number, context.rank, 2, 1.0))


# ---------------------------------------------------------------------------------------------- ranks that differ


class Seeing(nn.Module):
    """Images and text: what takes images is registered first, and asked after the embedding, if there are any."""

    def __init__(self, *, text_first: bool = True) -> None:
        super().__init__()
        self.text_first = text_first
        self.patches = nn.Linear(40, 4 * DIM)
        self.seers = nn.ModuleList(Layer(4 * DIM) for _ in range(3))
        self.projector = nn.Linear(4 * DIM, 4 * DIM)
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor, image: Tensor | None) -> Tensor:
        """[rows, length] tokens, [rows, 40] image or none -> [rows, length, vocabulary] logits"""
        x = self.embedding(tokens) if self.text_first else None
        seen = self.see(image) if image is not None else None
        x = self.embedding(tokens) if x is None else x
        if seen is not None:
            x = x + seen.view(len(tokens), -1, DIM).mean(1, keepdim=True)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out

    def see(self, image: Tensor) -> Tensor:
        """[rows, 40] -> [rows, 4 DIM]"""
        x: Tensor = self.patches(image)
        for layer in self.seers:
            x = layer(x)
        out: Tensor = self.projector(x)
        return out


IMAGES: dict[str, Sequence[Sequence[int]]] = {  # ranks that have images, by step
    "all": ((0, 1), (0, 1), (0, 1), (0, 1)),
    "one": ((0,), (0,), (1,), (0, 1)),
    "none, then one": ((), (), (1,), (0,)),
    "all, then one": ((0, 1), (0,), (1,), ()),
}


@on_ranks(2)
@pytest.mark.parametrize("text_first", [True, False])
@pytest.mark.parametrize("images", IMAGES)
def test_ranks_may_have_images_or_not(context: RankContext, images: str, text_first: bool) -> None:
    """Whether they do in the pass that the order is learnt from, or not: what is large is in place in time."""

    def step(model: nn.Module, call: Call) -> Tensor:
        tokens = token_batch(call.step, call.rank, vocabulary=VOCABULARY)
        has_image = call.rank in IMAGES[images][call.step]
        image = vector_batch(call.step, call.rank, rows=len(tokens), dim=40) if has_image else None
        return call.backward(next_token_loss(model(tokens, image), tokens))

    model = assert_trains_like_plain(context, lambda: Seeing(text_first=text_first), step, steps=4)
    seers = [f"seers.{k}" for k in range(3)]
    assert _units(model) == ["patches", *seers, "projector", "embedding", *BLOCKS[:3], "head"]


@on_ranks(2)
def test_ranks_may_leave_early_at_different_layers(context: RankContext) -> None:
    """From the first pass on: then what is large stays where everybody has it in time."""

    class Leaving(LargeLM):
        exit = 0

        def run_blocks(self, x: Tensor, mask: Tensor | None) -> Tensor:
            for place, block in enumerate(self.blocks):
                x = block(x)
                if place == self.exit:
                    x = x + self.head(x).tanh().mean()
            return x

    def step(model: Any, call: Call) -> Tensor:
        model.exit = (call.rank + call.step) % 3
        return large_step(model, call)

    assert_trains_like_plain(context, Leaving, step, checked=(0, 2))


@on_ranks(2)
def test_a_rank_may_leave_its_last_layers_out(context: RankContext) -> None:
    """And its embedding, and its head, once the order is known."""

    class Skipping(LargeLM):
        route: Sequence[int] = range(4)
        is_whole = True

        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.positions[: tokens.shape[1]].expand(len(tokens), -1, -1)
            x = x + self.embedding(tokens) if self.is_whole else x
            for place in self.route:
                x = self.blocks[place](x)
            return self.head(x) if self.is_whole else x

    def step(model: Any, call: Call) -> Tensor:
        model.route = (range(4), range(4), range(2), range(2, 3))[(call.step + call.rank) % 4 if call.step else 0]
        model.is_whole = call.step < 2 or call.rank == 0
        return call.backward(model(token_batch(call.step, call.rank, vocabulary=VOCABULARY)).square().mean())

    assert_trains_like_plain(context, Skipping, step, steps=4, checked=(0, 1, 3))


# ---------------------------------------------------------------------------------------------- around steps


@on_ranks(2)
@pytest.mark.parametrize("settings", SETTINGS)
def test_gradients_are_accumulated(context: RankContext, settings: str) -> None:
    """Two micro-batches, in `no_sync` and without; and two forwards before their backwards."""

    def step(model: Any, call: Call) -> Tensor:
        tokens = [token_batch(call.step + 10 * k, call.rank, vocabulary=VOCABULARY) for k in range(2)]
        with model.no_sync() if isinstance(model, StreamShard) and call.step % 2 else contextlib.nullcontext():
            call.backward(next_token_loss(model(tokens[0]), tokens[0]))
        losses = [next_token_loss(model(each), each) for each in tokens]
        return call.backward(sum(losses))  # type: ignore[arg-type]  # not 0

    assert_trains_like_plain(context, Chunked, step, **SETTINGS[settings])


@on_ranks(2)
def test_the_head_can_be_called_by_itself(context: RankContext) -> None:
    """In a pass of its own, as losses do that want the layers' output first."""

    class Headless(LargeLM):
        def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.norm(self.run_blocks(self.embedding(tokens), mask))

    def step(model: Any, call: Call) -> Tensor:
        tokens = token_batch(call.step, call.rank, vocabulary=VOCABULARY)
        return call.backward(next_token_loss(model.head(model(tokens)), tokens))

    assert_trains_like_plain(context, Headless, step)


@on_ranks(2)
def test_evaluation_finds_what_it_reads(context: RankContext) -> None:
    """Without gradients too, before training and after."""
    model: Any = StreamShard(_seeded(Chunked), precision=FP32)
    plain = _seeded(Chunked)
    tokens = token_batch(0, context.rank, vocabulary=VOCABULARY)
    for number in range(2):
        with torch.no_grad():
            assert_same({"": model(tokens)}, {"": plain(tokens)}, "logits")
        plain.load_state_dict(full_weights(model)) if number else large_step(model, Call(0, context.rank, 2, 1.0))


# ---------------------------------------------------------------------------------------------- transformers


def _llama(**config: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=48, num_hidden_layers=3, **sizes, **{"tie_word_embeddings": False, **config})
    )


def _gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=48, n_positions=16, n_embd=16, n_layer=3, n_head=2))


LLAMA = [f"model.layers.{k}" for k in range(3)]


@on_ranks(1, 2)
def test_embeddings_of_transformers_models_are_units_unless_they_are_tied(context: RankContext) -> None:
    """However small."""
    wanted = ["model.embed_tokens", *LLAMA, "lm_head"]
    assert _units(StreamShard(_llama(), precision=FP32)) == wanted
    assert _units(StreamShard(_llama(tie_word_embeddings=True), precision=FP32)) == LLAMA
    assert _units(StreamShard(_gpt2(), precision=FP32)) == [f"transformer.h.{k}" for k in range(3)]


@on_ranks(2)
def test_a_llamas_embedding_comes_first_and_its_head_last(context: RankContext) -> None:
    """And the other way round in backward."""
    model: Any = StreamShard(_llama(), precision=FP32)
    tokens = token_batch(0, context.rank)
    for _ in range(2):
        gathered, reduced = _issued(model, lambda: model(input_ids=tokens, labels=tokens).loss.backward())
    assert gathered == ["edge", "model.embed_tokens", *LLAMA, "lm_head", LLAMA[0]]
    assert reduced == ["lm_head", *LLAMA[::-1], "model.embed_tokens", "edge"]


class _Saved(nn.Module):
    """A frozen module and a copy of it that trains in its place, as adapters have them."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(original)})
        self.original_module = original.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """What the copy makes of x."""
        out: Tensor = self.modules_to_save["default"](x)
        return out


def _frozen_llama() -> Any:
    return _llama().requires_grad_(False)


def _adapted() -> Any:
    model = _frozen_llama()
    model.lm_head = Adapter(model.lm_head)
    return model


def _saved() -> Any:
    model = _frozen_llama()
    for parent, name in ((model.model, "embed_tokens"), (model, "lm_head")):
        copied = _Saved(getattr(parent, name))
        copied.modules_to_save.requires_grad_(True)
        setattr(parent, name, copied)
    return model


def _partly_frozen() -> Any:
    model = _llama()
    model.model.embed_tokens.requires_grad_(False)
    return model


FROZEN: dict[str, tuple[Callable[[], Any], dict[str, bool]]] = {  # the large units, and whether they train
    "adapter": (_adapted, {"model.embed_tokens": False, "lm_head.base": False}),
    "saved": (
        _saved,
        {
            f"{name}.{part}": part != "original_module"
            for name in ("model.embed_tokens", "lm_head")
            for part in ("modules_to_save.default", "original_module")
        },
    ),
    "embedding": (_partly_frozen, {"model.embed_tokens": False, "lm_head": True}),
}


@on_ranks(2)
@pytest.mark.parametrize("kind", FROZEN)
def test_what_is_frozen_beside_what_trains_has_no_gradients(context: RankContext, kind: str) -> None:
    """The weights beside an adapter, and those of which there is a copy, are units of their own."""
    build, wanted = FROZEN[kind]

    def step(model: Any, call: Call) -> Tensor:
        tokens = token_batch(call.step, call.rank)
        return call.backward(model(input_ids=tokens, labels=tokens).loss)

    engine = engine_inside(assert_trains_like_plain(context, build, step, steps=3, checked=(0, 2)))
    lone = [unit for unit in engine.units[1:] if not unit.is_streamed]
    assert {unit.name: unit.segments[0].kind.trains for unit in lone} == wanted


class _Rewarding(Stack):
    """Not a transformers model, although it says so."""

    def get_input_embeddings(self) -> nn.Module:
        """As transformers models do that have none."""
        raise NotImplementedError

    def get_output_embeddings(self) -> None:
        """The same."""
        return None


@on_ranks(2)
def test_models_without_embeddings_have_none(context: RankContext) -> None:
    """Whether they say so or raise."""
    model = assert_trains_like_plain(context, _Rewarding, stack_step)
    assert _units(model) == [f"layers.{k}" for k in range(4)]
