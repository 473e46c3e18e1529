"""What parameters are computed with outside of all passes knows that they are pieces."""

from __future__ import annotations

import copy
import io
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save
from torch import nn

from streamshard import Precision, ShardingError, StreamShard
from streamshard.optim import elementwise
from tests.models import Stack, vector_batch
from tests.ranks import RankContext, on_ranks
from tests.reference import SETTINGS, Call, assert_trains_like_plain, each_setting, piece_of

FP32 = Precision(param_dtype=torch.float32)
DIM = 8

# Of a model's parameters, one number each; what a loss may add, or a log line may show.
PENALTIES: dict[str, Callable[[Any], torch.Tensor]] = {
    "norm of each": lambda model: sum(p.norm() for p in model.parameters()),
    "stacked norms": lambda model: torch.stack([p.norm() for p in model.parameters()]).sum(),
    "logged": lambda model: sum(_logged(p.norm()) for p in model.parameters()),
    "compiled": lambda model: torch.compile(_some, backend="aot_eager")(model),
    "norm of norms": lambda model: torch.stack([p.norm() for p in model.parameters()]).norm(),
    "listed norms": lambda model: sum(torch._foreach_norm(list(model.parameters()))),
    "total norm": lambda model: nn.utils.get_total_norm(list(model.parameters())),
    "one vector": lambda model: nn.utils.parameters_to_vector(model.parameters()).norm(),
    "part of a vector": lambda model: _first_of_vector(model).norm(),
    "L1": lambda model: sum(p.abs().sum() for p in model.parameters()),
    "L2": lambda model: sum(torch.sum(p**2) for p in model.parameters()),
    "means": lambda model: sum(torch.mean(p.float() ** 2) for p in model.parameters()),
    "order 3": lambda model: sum(torch.norm(p, 3) for p in model.parameters()),
    "order 1": lambda model: sum(torch.linalg.vector_norm(p, ord=1) for p in model.parameters()),
    "greatest norms": lambda model: sum(p.norm(math.inf) for p in model.parameters()),
    "smallest and counted": lambda model: sum(p.norm(-math.inf) + p.norm(0) for p in model.parameters()),
    "normalised": lambda model: sum((p / p.norm()).abs().sum() for p in model.parameters()),
    "weighed by a number of them": lambda model: sum(
        (p * model.layers[1].linear.bias.sum()).square().sum() for p in model.parameters()
    ),
    "largest": lambda model: sum(p.abs().max() for p in model.parameters()),
    "largest of equal ones": lambda model: sum((p - p.detach()).max() for p in model.parameters()),
    "smallest": lambda model: sum(torch.amin(p) for p in model.parameters()),
    "norm of zeros": lambda model: sum((p - p.detach()).norm() for p in model.parameters()),
    "distance": lambda model: sum((p - _copies(model)[n]).norm() for n, p in model.named_parameters()),
    "distance from what was before": lambda model: sum(
        ((p - _before(n)).square() * (_before(n) > 0)).sum() for n, p in model.named_parameters()
    ),
    "weighed squares": lambda model: sum(
        (_copies(model)[n].square() * (p - 1.0).square()).sum() for n, p in model.named_parameters()
    ),
    "dot": lambda model: sum(torch.dot(p.flatten(), p.detach().flatten()) for p in model.parameters()),
    "by size": lambda model: sum(p.square().sum() / p.numel() + p.norm() / p.shape[0] for p in model.parameters()),
    "of rows": lambda model: sum(p[len(p) // 2 :].norm() + p[-1].square().mean() for p in model.parameters()),
    "of an element": lambda model: sum(p.flatten()[-1].abs().sum() for p in model.parameters()),
    "of scaled rows": lambda model: sum((p * _rows(p)).square().sum() for p in model.parameters()),
    "of views": lambda model: sum((p.view(-1) * p.data.reshape(p.numel())).abs().sum() for p in model.parameters()),
    "of a transposed weight": lambda model: sum((p.T + 1.0).norm() for p in model.parameters() if p.ndim == 2),
    "through a function of one's own": lambda model: _Twice.apply(model.layers[1].linear.weight.norm()),
    "of one weight": lambda model: model.layers[1].linear.weight.norm().log(),
    "of two weights": lambda model: model.layers[0].linear.weight.sum() * model.layers[2].linear.bias.norm(),
    "of alike weights": lambda model: (model.layers[0].linear.weight - model.layers[1].linear.weight).norm(),
    "through data": lambda model: (
        model.layers[0].linear.weight.data.norm() * model.layers[0].linear.bias.square().sum()
    ),
}


def _copies(model: Any) -> dict[str, torch.Tensor]:
    """Made when it is first asked: what elastic penalties, EWC, averages and logs of updates keep."""
    if "copies" not in model.__dict__:
        model.__dict__["copies"] = {name: param.detach().clone() for name, param in model.named_parameters()}
    return model.__dict__["copies"]  # type: ignore[no-any-return]


def _some(model: Any) -> torch.Tensor:
    return sum((p.square().sum() + 0.5 * p.norm() for p in model.parameters()), torch.zeros(()))


def _before(name: str) -> torch.Tensor:
    """Of an unsharded model: starting points of fine-tuning, Fisher information, masks of pruning."""
    shape = dict(Stack().named_parameters())[name].shape
    return torch.arange(math.prod(shape)).view(shape).cos()


def _logged(norm: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        assert norm.item() >= 0.0
    return norm


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2.0 * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return 2.0 * grad


def _rows(param: Any) -> torch.Tensor:
    return torch.arange(param.shape[0]).view(-1, *[1] * (param.ndim - 1)).cos()


def _first_of_vector(model: Any) -> torch.Tensor:
    vector = nn.utils.parameters_to_vector(model.parameters())
    return vector[: next(model.parameters()).numel()]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.table = nn.Embedding(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) + self.table.weight.sum()


def sharded() -> Any:
    torch.manual_seed(0)
    return StreamShard(nn.Sequential(Layer(), Layer()), precision=FP32)


@on_ranks(2)
def test_computing_with_a_piece_as_if_it_were_the_weight_names_the_parameter(context: RankContext) -> None:
    """Whatever the function, also where the shapes of pieces fit: the first rank has the whole of the weight."""
    model = sharded()
    linear, norm, table, x = model[0].linear, model[0].norm, model[0].table, torch.randn(4, DIM)
    with pytest.raises(ShardingError, match=r"linear\(\) takes '0\.linear\.weight' for a whole.*StreamShard.*summon"):
        F.linear(x, linear.weight)
    uses: dict[str, Callable[[], object]] = {
        "linear.weight": lambda: x @ linear.weight.T,
        "0.linear.weight": lambda: x @ linear.weight.data.t(),
        "'0.linear.weight": lambda: F.linear(x.bfloat16(), linear.weight.detach().to(torch.bfloat16)),
        "0.linear.weight'": lambda: torch.einsum("bi,oi->bo", x, linear.weight),
        "'0.linear.weight'": lambda: F.conv1d(x[None], linear.weight[..., None]),
        "linear.bias": lambda: x + linear.bias,
        "table.weight": lambda: F.embedding(torch.tensor([1]), table.weight),
        "norm.weight": lambda: F.layer_norm(x, (DIM,), norm.weight),
        "0.norm.weight": lambda: x * norm.weight,
        "norm.bias": lambda: torch.where(x > 0, x, norm.bias),
        "0.table.weight": lambda: torch.linalg.svd(table.weight),
        "'0.table.weight'": lambda: table.weight.data.copy_(torch.zeros(DIM, 3)),
        "'0.table.weight' ": lambda: torch.zeros(DIM, DIM).copy_(table.weight),
        "'0.norm.weight'": lambda: nn.Parameter(norm.weight),
    }
    for name, use in uses.items():
        with pytest.raises(ShardingError, match=rf"{name.strip()}.*StreamShard keeps only this rank's piece"):
            use()


@on_ranks(2)
@pytest.mark.parametrize("of", ["weight", "gradient"])
def test_what_a_piece_cannot_answer_says_what_can(context: RankContext, of: str) -> None:
    """Norms along a dimension need whole rows; the variance has a formula of what ranks can answer together."""
    model = sharded()
    torch.manual_seed(0)
    plain = nn.Sequential(Layer(), Layer())
    x = torch.ones(4, DIM)
    model(x).sum().backward()
    plain(x).sum().backward()
    weight, whole = model[0].linear.weight, plain[0].linear.weight
    p, wanted = (weight, whole.data) if of == "weight" else (weight.grad, whole.grad)
    for along in (
        lambda: p.norm(dim=1),
        lambda: torch.linalg.vector_norm(p, 2, 0),
        lambda: torch.norm(p, p=2, dim=-1, keepdim=True),
        lambda: p.sum(1),
    ):
        with pytest.raises(ShardingError, match=r"needs whole rows.*summon_full_params\(") as error:
            along()
        assert "vector norms" not in str(error.value)
    for spread in (lambda: p.std(), lambda: torch.var(p), lambda: torch.std_mean(p)):
        with pytest.raises(ShardingError, match=re.escape("(p - p.mean()).square().sum() / (p.numel() - 1) is the")):
            spread()
    variance = (p - p.mean()).square().sum() / (p.numel() - 1)
    torch.testing.assert_close(variance.detach(), wanted.var())
    assert torch.allclose(p, wanted) and not torch.allclose(p, wanted + 1.0)


@on_ranks(2)
def test_what_works_with_a_piece_goes_on_to(context: RankContext) -> None:
    """Looking, comparing, writing element by element, freezing, copying, penalties."""
    model = sharded()
    plain = dict(nn.Sequential(Layer(), Layer()).named_parameters())
    for name, listed in model.named_parameters():
        owner, _, key = name.rpartition(".")
        param = getattr(model.get_submodule(owner), key)
        assert param is listed and isinstance(param, nn.Parameter) and isinstance(param, torch.Tensor)
        assert repr(param).startswith("Parameter containing:\ntensor(")
        assert copy.deepcopy(param).shape == param.shape and copy.deepcopy(param).is_leaf
        assert torch.equal(copy.deepcopy(param.data), param)
        before = param.detach().clone()
        with torch.no_grad():
            param.mul_(2.0).add_(before)
            torch._foreach_div_([param], 3.0)
        torch.testing.assert_close(param.data, before, rtol=1e-6, atol=0.0)
        param.data.lerp_(before, 0.5)
        param.data = before.clone()
        assert torch.equal(param, before) and not (param != before).any()
        assert param.ndim == plain[name].ndim
        assert param.sum().ndim == 0 and param.norm().item() >= 0.0
        param.requires_grad_(False).requires_grad_(True)
        (0.5 * param.pow(2).sum()).backward()
        assert torch.equal(param.grad, param) and not param.grad.is_sparse
        param.grad = None
        file = io.BytesIO()
        torch.save(param.data.to(torch.bfloat16).as_subclass(torch.Tensor), file)  # who says so has his piece
        file.seek(0)
        assert type(torch.load(file)) is torch.Tensor


@on_ranks(2)
def test_the_node_that_accumulates_is_found_as_ever(context: RankContext) -> None:
    """torch.autograd.graph, DDP, Megatron-LM look for it in this way."""
    weight = sharded()[0].linear.weight
    for view in (weight.expand_as(weight), weight.view_as(weight), weight.view(-1)):
        assert view.grad_fn.next_functions[0][0].variable is weight


def penalised_step(penalty: Callable[[Any], torch.Tensor]) -> Callable[[nn.Module, Call], torch.Tensor]:
    """Each rank has another factor: what comes of it is the mean, as of the loss."""

    def step(model: nn.Module, call: Call) -> torch.Tensor:
        loss = model(vector_batch(call.step, call.rank)).square().mean()
        return call.backward(loss + 0.01 * (1 + call.rank) * penalty(model))

    return step


@on_ranks(1, 3)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_penalties_are_those_of_whole_parameters(context: RankContext, penalty: str) -> None:
    """Values, gradients and what training with them gives, through lists made before as well."""
    assert_trains_like_plain(context, Stack, penalised_step(PENALTIES[penalty]))


@on_ranks()
@each_setting
def test_penalties_in_each_setting(context: RankContext, settings: str) -> None:
    """Before, between and behind passes, and while gradients accumulate."""

    def step(model: Any, call: Call) -> torch.Tensor:
        params = model.__dict__.setdefault("listed", list(model.parameters()))
        before = sum(p.norm() for p in params)
        losses = []
        for part in range(2):
            loss = model(vector_batch(2 * call.step + part, call.rank)).square().mean()
            losses.append(call.backward(loss + 0.01 * (before if part else sum(p.abs().sum() for p in params))))
        return losses[0] + losses[1]

    assert_trains_like_plain(context, Stack, step, **SETTINGS[settings])


@on_ranks(2)
def test_what_is_asked_of_parameters_is_asked_of_the_whole(context: RankContext) -> None:
    """Without a graph: logs, checks, averages."""
    model = sharded()
    plain = nn.Sequential(Layer(), Layer())
    plain.load_state_dict(model.full_state_dict(rank0_only=False))
    average = [p.detach().clone() for p in model.parameters()]
    plain_average = [p.detach().clone() for p in plain.parameters()]
    with torch.no_grad():
        for mine, theirs in ((model, average), (plain, plain_average)):
            for param, kept in zip(mine.parameters(), theirs, strict=True):
                param.mul_(1.5)
                kept.lerp_(param, 0.1)
                kept.add_(torch.ones_like(param), alpha=0.5)
    questions: list[Callable[[Any, Any], Any]] = [
        lambda param, kept: param.norm(),
        lambda param, kept: param.norm(math.inf),
        lambda param, kept: param.mean(),
        lambda param, kept: param.max() - param.data.min(),
        lambda param, kept: kept.norm() / param.norm(),
        lambda param, kept: kept.sum(),
        lambda param, kept: (param > 0.1).sum(),
        lambda param, kept: param.count_nonzero(),
        lambda param, kept: float(torch.isfinite(param).all()),
        lambda param, kept: float(torch.equal(param, param.clone())),
        lambda param, kept: float(torch.equal(param, kept)),
    ]
    both = zip(model.parameters(), average, plain.parameters(), plain_average, strict=True)
    for param, kept, plain_param, plain_kept in both:
        for number, question in enumerate(questions):
            mine, wanted = (
                each.item() if isinstance(each := question(*of), torch.Tensor) else each
                for of in ((param, kept), (plain_param, plain_kept))
            )
            assert mine == pytest.approx(wanted, rel=1e-5), number


@on_ranks(2, 3)
def test_what_is_whole_is_cut_for_pieces(context: RankContext) -> None:
    """Weights copied by hand, masks, projections: of tensors that every rank has whole."""
    model, plain = sharded(), nn.Sequential(Layer(), Layer())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for each, optimizer in zip((model, plain), optimizers, strict=True):
        torch.manual_seed(3)
        for param, shape in zip(each.parameters(), [param.shape for param in plain.parameters()], strict=True):
            param.data.copy_(torch.randn(shape))
        each(torch.randn(4, DIM)).square().mean().backward()
        with torch.no_grad():
            for param, shape in zip(each.parameters(), [param.shape for param in plain.parameters()], strict=True):
                param.grad.mul_(torch.rand(shape) > 0.5)
                param.grad -= torch.dot(param.grad.flatten(), param.flatten()) * torch.full(shape, 0.01)
                param.lerp_(torch.ones(shape), 0.1)
                torch._foreach_mul_([param], [torch.rand(shape)])
                param.copy_(torch._foreach_add([param, param], [torch.rand(shape), param])[0])
                param.clamp_(max=torch.rand(shape))
                assert not torch.allclose(param, torch.zeros(shape))
        optimizer.step()
    wanted = {name: param.detach() for name, param in plain.named_parameters()}
    for name, value in model.full_state_dict(rank0_only=False).items():
        torch.testing.assert_close(value, wanted[name], msg=name)


@on_ranks(2, 3)
def test_what_is_whole_gets_all_of_its_gradient(context: RankContext) -> None:
    """Another model's parameters, which every rank has: proximal terms, averages that learn."""
    model, other, plain, plain_other = sharded(), *(nn.Sequential(Layer(), Layer()) for _ in range(3))
    plain.load_state_dict(model.full_state_dict(rank0_only=False))
    plain_other.load_state_dict(other.state_dict())
    for mine, theirs in ((model, other), (plain, plain_other)):
        pairs = list(zip(mine.parameters(), theirs.parameters(), strict=True))
        sum(((p - 2.0 * q) * (q.detach() > 0)).square().sum() for p, q in pairs).backward()
        sum((q * p).sum() * q.norm() for p, q in pairs).backward()
    for name, param in other.named_parameters():
        torch.testing.assert_close(param.grad, plain_other.get_parameter(name).grad)
    with model.summon_full_params(with_grads=True):
        for name, param in model.named_parameters():
            torch.testing.assert_close(param.grad, plain.get_parameter(name).grad)


@on_ranks(2)
def test_random_numbers_are_those_of_the_whole(context: RankContext) -> None:
    """Noise and initialisations, of weights and gradients: no rank's piece gets what another's gets."""
    model = sharded()
    plain = nn.Sequential(Layer(), Layer())
    plain.load_state_dict(model.full_state_dict(rank0_only=False))
    for each in (model, plain):
        each(torch.randn(4, DIM, generator=torch.Generator().manual_seed(3))).square().sum().backward()
        torch.manual_seed(5)
        with torch.no_grad():
            for param in each.parameters():
                param.add_(torch.randn_like(param), alpha=0.1)
                param.grad.add_(torch.rand_like(param.grad))
            each[0].linear.weight.normal_(std=0.5)
            nn.init.trunc_normal_(each[0].linear.bias)
        nn.init.uniform_(each[1].norm.weight)
        nn.init.kaiming_uniform_(each[1].linear.weight)
        nn.init.xavier_normal_(each[1].table.weight)
        nn.init.orthogonal_(each[0].table.weight)
        for param in each.parameters():
            param.grad.add_(param.detach())
    wanted = {name: param.detach() for name, param in plain.named_parameters()}
    for name, value in model.full_state_dict(rank0_only=False).items():
        assert torch.equal(value, wanted[name]), name
    with model.summon_full_params(with_grads=True):
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)


@on_ranks(2)
def test_what_would_be_of_one_piece_raises(context: RankContext) -> None:
    """By the parameter's name, and nothing has changed; through lists, with a graph and without."""
    model = sharded()
    named = dict(model.named_parameters())
    weight, bias, other = named["0.linear.weight"], named["0.linear.bias"], named["0.table.weight"]
    before = model.full_state_dict(rank0_only=False)
    refused: dict[str, Callable[[], object]] = {
        "softmax": lambda: weight.softmax(-1),
        "var": lambda: weight.var(),
        "std": lambda: torch.std(weight.detach()),
        "norm of rows": lambda: weight.norm(dim=1),
        "sum of columns": lambda: weight.sum(0),
        "median": lambda: weight.median(),
        "histogram": lambda: torch.histc(weight.detach()),
        "columns": lambda: weight[:, :3],
        "every other row": lambda: weight[::2],
        "rows by numbers": lambda: weight[torch.tensor([2, 1])],
        "what a mask selects": lambda: weight[weight == weight] * weight.flatten(),
        "rows by a mask": lambda: weight[torch.arange(DIM) > 3],
        "written by a mask, of what another selects": lambda: weight.data.__setitem__(weight > 0, weight[weight > 1]),
        "two selections": lambda: weight[weight > 0] * weight[weight < 0],
        "rows of another weight": lambda: weight.data.__setitem__(torch.tensor([1]), other[:1]),
        "data of the whole's shape": lambda: setattr(weight, "data", torch.zeros(DIM, DIM)),
        "writing to what is whole": lambda: torch.zeros(DIM, DIM).add_(weight.detach()),
        "rows of others' elements": lambda: weight[2] * other[2],
        "numpy": lambda: weight.detach().numpy(),
        "a list": lambda: weight.tolist(),
        "a number": lambda: weight.item(),
        "backward of a piece": lambda: weight.square().backward(),
        "others' elements": lambda: weight * other,
        "written over with others'": lambda: weight.data.copy_(other),
        "in a stack": lambda: torch.stack([weight, weight]),
        "rows of a norm": lambda: torch.renorm(weight.detach(), 2, 0, 0.5),
        "eye": lambda: nn.init.eye_(weight),
        "noise of its values": lambda: torch.bernoulli(weight.detach().abs()),
        "dropout": lambda: F.dropout(weight),
        "noise that torch draws for each element": lambda: F.rrelu(weight, training=True),
        "size of what a mask selects": lambda: weight[weight > 0].numel(),
        "saved": lambda: torch.save(weight.detach().clone(), io.BytesIO()),
        "saved whole": lambda: torch.save(weight, io.BytesIO()),
        "saved by safetensors": lambda: save(named),
        "saved, through data": lambda: save({name: param.data for name, param in named.items()}),
        "saved, copies": lambda: save({"bias": bias.detach().clone()}),
    }
    for name, use in refused.items():
        with pytest.raises(ShardingError) as raised:
            use()
            pytest.fail(name)
        assert "linear" in str(raised.value) or "saved" in name, (name, raised.value)
    after = model.full_state_dict(rank0_only=False)
    assert all(torch.equal(after[name], before[name]) for name in before)


class Narrow(nn.Module):
    """Among four ranks two have pieces that are as long as a row, and parts of two."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(2 * DIM))
        self.rows = nn.Parameter(torch.randn(3, 4 * DIM))
        self.last = nn.Parameter(torch.randn(2 * DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rows.sum() + self.bias.sum() + self.last.sum()


@on_ranks(2, 4)
def test_a_row_as_long_as_a_piece_is_not_taken_for_one(context: RankContext) -> None:
    """Both are put together with pieces: moments of pieces' shapes, and rows that every rank has."""
    model, plain = StreamShard(nn.Sequential(Narrow(), Narrow()), precision=FP32), nn.Sequential(Narrow(), Narrow())
    plain.load_state_dict(model.full_state_dict(rank0_only=False))
    row, mine = torch.arange(4.0 * DIM)[None], model.local_ranges()["0.rows"]
    ours, wanted = model[0].rows, (plain[0].rows * row).flatten()[mine.start : mine.stop]
    if (context.world_size, context.rank) in ((4, 1), (4, 2)):
        assert mine.start % (4 * DIM) and piece_of(ours).shape == row.shape
        with pytest.raises(ShardingError, match=r"0\.rows"):
            ours * row
    else:
        assert torch.equal(piece_of(ours * row).flatten(), wanted)
        assert torch.equal(piece_of(ours + piece_of(ours).clone()), 2.0 * piece_of(ours))


@on_ranks(2)
def test_gradients_in_hooks_of_what_is_computed_are_pieces(context: RankContext) -> None:
    """Normalised there, masked by what is whole; and asked for through torch's own function."""
    model, plain = sharded(), nn.Sequential(Layer(), Layer())
    plain.load_state_dict(model.full_state_dict(rank0_only=False))
    norms = []
    for each in (model, plain):
        weight, shapes = each[0].linear.weight, []
        scaled = weight * 2.0
        scaled.register_hook(lambda grad, shapes=shapes: shapes.append(grad.shape))
        scaled.register_hook(lambda grad: grad / grad.norm() * torch.arange(DIM))
        torch.autograd.backward([scaled.square().sum() + weight.norm()])
        norms.append((float(weight.grad.norm()), shapes))
    assert norms[0] == (pytest.approx(norms[1][0]), norms[1][1])


@on_ranks(2)
def test_weights_that_are_whole_for_a_while_can_be_computed_with(context: RankContext) -> None:
    """Looked up before or inside."""
    model, plain = sharded(), nn.Sequential(Layer(), Layer())
    plain.load_state_dict(model.full_state_dict(rank0_only=False))
    before, x = model[1].linear.weight, torch.randn(4, DIM)
    with model.summon_full_params():
        for weight in (before, model[1].linear.weight):
            torch.testing.assert_close(F.linear(x, weight), F.linear(x, plain[1].linear.weight))
    with pytest.raises(ShardingError, match="whole weight"):
        F.linear(x, before)


@on_ranks(2)
def test_optimizers_step_on_plain_parameters(context: RankContext) -> None:
    """torch's fast kernels are for these alone; behind the step they are pieces again, in older lists too."""
    seen: list[type] = []

    @elementwise
    class Seen(torch.optim.AdamW):
        def _init_group(self, group: Any, *args: Any, **kwargs: Any) -> Any:
            seen.extend(map(type, group["params"]))
            return super()._init_group(group, *args, **kwargs)

    model = sharded()
    optimizer = Seen([model[0].linear.weight, model[1].norm.weight], lr=0.1)
    before = model.full_state_dict(rank0_only=False)
    model(torch.randn(4, DIM)).sum().backward()
    listed = list(model.parameters())
    assert nn.Parameter not in map(type, listed)
    optimizer.step()
    assert seen == [nn.Parameter, nn.Parameter]
    assert nn.Parameter not in map(type, listed)
    after = model.full_state_dict(rank0_only=False)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"0.linear.weight", "1.norm.weight"}
    with pytest.raises(ShardingError, match="whole weight"):
        F.linear(torch.randn(4, DIM), model[0].linear.weight)


@on_ranks(2)
def test_parameters_are_pieces_behind_a_step_that_failed(context: RankContext) -> None:
    """Nobody tells when it has, so they are as soon as somebody asks for them."""

    @elementwise
    class Failing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            """Seen by torch's hooks, as steps are."""
            raise ValueError("out of luck")

    model, x = sharded(), torch.randn(4, DIM)
    listed = list(model.parameters())
    looks: list[Callable[[], Any]] = [lambda: model[0].linear.weight, lambda: next(model.parameters())]
    for look in looks:
        model(x).sum().backward()
        with pytest.raises(ValueError, match="out of luck"):
            Failing(listed, lr=0.1).step()
        with pytest.raises(ShardingError, match=r"linear\(\) takes '0\.linear\.weight' for a whole"):
            F.linear(x, look())
    with pytest.raises(ValueError, match="out of luck"):
        Failing(listed, lr=0.1).step()
    assert nn.Parameter in map(type, listed)
    with pytest.raises(ShardingError, match="holds one rank.s pieces"):
        torch.save(model.state_dict()["0.linear.weight"].clone(), io.BytesIO())
    with pytest.raises(ValueError, match="out of luck"):
        Failing(listed, lr=0.1).step()
    model(x).sum().backward()
    assert nn.Parameter not in map(type, listed)


def _sizes(param: Any) -> tuple[Any, ...]:
    flat = param.flatten()
    questions = (param.shape, param.size(), param.size(0), param.numel(), param.nelement(), len(param), param.dim())
    rest = (param.ndim, param.stride(), param.nbytes, param.data.shape, param.detach()[0].shape, flat[2:].numel())
    return (*questions, *rest, *nn.init._calculate_fan_in_and_fan_out(param)) if param.ndim > 1 else (*questions, *rest)


@on_ranks(2, 3)
def test_sizes_are_those_of_the_whole(context: RankContext) -> None:
    """Of weights, gradients, those that wait, and what has been computed from them, on every rank."""
    model, plain = sharded(), nn.Sequential(Layer(), Layer())
    wanted = [_sizes(param) for param in plain.parameters()]
    x = torch.randn(4, DIM)
    model(x).sum().backward()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        params = list(model.parameters())
        assert [_sizes(param) for param in params] == wanted
        assert [_sizes(param.grad) for param in params] == wanted
        assert [_sizes(2.0 * param.detach()) for param in params] == wanted
        assert [_sizes(copy.deepcopy(param.grad)) for param in params] == wanted
        optimizer.step()
    assert nn.utils.parameters_to_vector(model.parameters()).numel() == sum(p.numel() for p in plain.parameters())
    decayed = {name for name, param in model.named_parameters() if param.dim() > 1 and param.shape[0] == DIM}
    assert decayed == {name for name, param in plain.named_parameters() if param.dim() > 1}


@on_ranks(2)
def test_whole_gradients_are_cut_where_they_are_put(context: RankContext) -> None:
    """The very tensor, unless it is a part of a buffer, which would be one no longer."""
    model = sharded()
    weight = model[0].linear.weight
    whole = torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(4))
    kept = whole.clone()
    weight.grad = kept
    kept.mul_(2.0)
    assert weight.grad is kept and kept.shape == (DIM, DIM)
    assert float(weight.grad.norm()) == pytest.approx(float(2.0 * whole.norm()))
    for part in (torch.zeros(2, DIM, DIM)[0], torch.zeros(DIM * DIM).view(DIM, DIM)):
        with pytest.raises(ShardingError, match=r"gradient of '0\.linear\.weight' was set to a part of a buffer"):
            weight.grad = part
    assert weight.grad is kept


@on_ranks(2)
def test_what_is_written_by_place_is_written_where_it_is(context: RankContext) -> None:
    """Rows, slices, elements, masks; of weights, and of vectors put together of several."""
    model, plain = sharded(), nn.Sequential(Layer(), Layer())
    plain.load_state_dict(model.full_state_dict(rank0_only=False))
    for each in (model, plain):
        weight, bias, table = each[0].linear.weight, each[0].linear.bias, each[1].table.weight
        with torch.no_grad():
            weight[3] = 0.5
            weight[5:7] *= 2.0
            weight.data[0, 2] = -1.0
            bias[1:3].fill_(0.25)
            bias.data[-1] += 3.0
            table[:4] = torch.arange(4.0 * DIM).view(4, DIM)
            table[table < 0] = 0.125
            weight.data[torch.tensor([7, 1])] = 0.75
            weight[:, 3] = torch.arange(8.0)
            table[torch.arange(DIM) > 5] = -0.5
            weight.data[[4, 0]] = torch.eye(DIM)[:2]
            nn.init.constant_(each[1].norm.weight, 0.5)
            bias.add_(bias, alpha=each[1].linear.bias.norm())
            table[torch.eye(DIM) > 0] = 7.0
            for row in each[1].linear.weight.split(2):
                row.clamp_(-0.1, 0.1)
            vector = nn.utils.parameters_to_vector(each.parameters())
            nn.utils.vector_to_parameters(0.5 * vector, each.parameters())
    wanted = {name: param.detach() for name, param in plain.named_parameters()}
    for name, value in model.full_state_dict(rank0_only=False).items():
        assert torch.equal(value, wanted[name]), name


@on_ranks(1)
def test_one_rank_has_whole_weights(context: RankContext) -> None:
    """Nothing is refused, and parameters are what they were."""
    model, x = sharded(), torch.randn(4, DIM)
    assert type(model[0].linear.weight) is nn.Parameter
    assert F.linear(x, model[0].linear.weight).shape == x.shape
