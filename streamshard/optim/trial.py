"""The trial of the optimizers that a `WholeParameterOptimizer` is given.

Each rank steps its own parameters, with an optimizer of its own. Checkpoints move parameters between ranks. So
optimizers are first tried on small parameters. The trial refuses those that would silently train differently from plain
PyTorch:

- a norm over all parameters, or one learning rate estimated from all of them (Prodigy, D-Adaptation);
- options of another group: each optimizer has the parameters of one group;
- random numbers: parameters are stepped in another order, and would get other numbers;
- a constructor that reads weights: there are none yet;
- a gradient kept in memory without a copy: the next gradient is written there;
- something kept outside of the state dict, or state of several parameters together: a checkpoint would lose it;
- calls of torch.distributed: only one rank steps a parameter.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.core.optimizer_kinds import full_name, is_elementwise_class, params_in
from streamshard.errors import ConfigError, describe
from streamshard.nested import tensors_in
from streamshard.optim.inner import PLAIN, GroupClass, InnerOptimizer, options_of
from streamshard.optim.rounds import stand_in
from streamshard.torch_private import OpOverload, TorchDispatchMode

_STEPS = 8
_DIM = 16
_EACH = 3  # parameters of each shape: one owner has one of them, the other has two
_LR = 1e-3  # replaces a learning rate of 0, with which a schedule may begin
# Relative to the norm of a parameter's change. Rounding errors of bf16 are 0.001. Published optimizers that do not step
# each parameter by itself differ by 0.08 and more.
_TOLERANCE = 0.01
_READ_NOTHING = ("aten::new_", "aten::zeros_like", "aten::ones_like", "aten::full_like", "aten::empty_like")


def constructor_options(kind: type[Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    """The options in `group` that are arguments of the constructor of `kind`."""
    names = inspect.signature(kind).parameters
    return {key: value for key, value in options_of(group).items() if key in names}


def try_group(
    kind: type[Optimizer], options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], GroupClass]:
    """Try `kind` on the last of `groups`: its constructor, and unless it works element by element, its steps.

    Returns, Raises: see `_try_constructor` and `_try_steps`.
    """
    filled, made = _try_constructor(kind, options, groups)
    group = {**filled, **groups[-1]}
    if group["params"] and not is_elementwise_class(kind):
        made = made._replace(stacked=_try_steps(made, group, is_alone=len(groups) == 1))
    return filled, made


def _try_constructor(
    kind: type[Optimizer], options: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], GroupClass]:
    """Construct a `kind` for `groups`, with parameters that have no memory.

    Returns:
        The options of the last group, with the constructor's defaults, and how to make the group's optimizer.

    Raises:
        ConfigError: the constructor raises, or splits a group.
    """
    given = [{**options_of(group), "params": [nn.Parameter(stand_in(p)) for p in group["params"]]} for group in groups]
    empty = params_in(given) if not is_elementwise_class(kind) else ()
    try:
        with _Watches(kind, empty):
            made: Any = kind(given, **options)
    except ConfigError:
        raise
    except Exception as error:
        given_options = [*options_of(groups[-1]), *options]
        raise ConfigError(f"{full_name(kind)} with the options {given_options} raised {describe(error)}") from error
    wanted, found = ([len(each["params"]) for each in owner] for owner in (groups, made.param_groups))
    if found != wanted:
        raise ConfigError(f"{kind.__name__} makes groups of {found} parameters of groups of {wanted}: pass its groups")
    last = made.param_groups[-1]
    initial = {
        param: {key: value for key, value in made.state.get(target, {}).items() if isinstance(value, PLAIN)}
        for param, target in zip(groups[-1]["params"], last["params"], strict=True)
    }
    return options_of(last), GroupClass(kind, options, options_of(groups[-1]), initial, frozenset())


def _try_steps(made: GroupClass, group: Mapping[str, Any], *, is_alone: bool) -> frozenset[str]:
    """Step small parameters as plain PyTorch does, and as owners do, and compare. Takes hundredths of a second.

    Args:
        made: how to make the group's optimizer.
        group: the user's group. For each number of dimensions in it, the trial makes small parameters: on the same
            device, or on the CPU if the group is on the meta device.
        is_alone: the class has no other groups, whose options it may read.

    Returns:
        Keys of state that plain PyTorch stacks over a group, in the state of its first parameter.

    Raises:
        ConfigError: the results differ, a step raises, or it calls torch.distributed.
    """
    name, params = full_name(made.kind), group["params"]
    # The first parameter of each number of dimensions counts: a dict keeps the last one.
    first = {param.ndim: tuple(min(size, _DIM) for size in param.shape) for param in reversed(params)}
    shapes = [first[ndim] for ndim in sorted(first) for _ in range(_EACH)]
    device = torch.device("cpu") if params[0].is_meta else params[0].device
    forked: Any = {"devices": [] if device.type == "cpu" else [device], "device_type": device.type}
    options = options_of(group)
    if options.get("lr") == 0:
        options["lr"] = options["lr"] + _LR
    trials = []
    try:
        # Both ways get the same random numbers. Compiled functions run uncompiled.
        for has_owners in (False, True):
            with torch.random.fork_rng(**forked), torch.compiler.set_stance("force_eager"):
                trials.append(_try(made, options, shapes, device, has_owners, is_alone=is_alone))
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name}, tried on small parameters {shapes}, raised {describe(error)}. WholeParameterOptimizer runs "
            "optimizers that step without a closure, and step parameters of any shape"
        ) from error
    together, owned = trials
    for what, wanted in together.results.items():
        if not _is_near(wanted, owned.results.get(what, wanted + torch.nan)):
            raise ConfigError(
                f"{name} with these options does not step each parameter by itself: if small parameters are stepped "
                f"one by one, {what} differs. It depends on other parameters or groups (a norm or learning rate of all)"
                ", on random numbers, on memory of gradients kept without clone(), or on something that a checkpoint "
                "loses. WholeParameterOptimizer runs optimizers that keep state[param] of each parameter, and numbers "
                "in their groups. For a norm over all gradients use model.clip_grad_norm_"
            )
    # A stack has an entry for each parameter of the group, and lies in the state of the first one.
    group_state, other_state, *_ = together.states
    tensors = {key: value for key, value in group_state.items() if isinstance(value, torch.Tensor)}
    return frozenset(key for key in tensors.keys() - other_state if tensors[key].shape[:1] == (len(shapes),))


def _is_near(wanted: torch.Tensor, found: torch.Tensor) -> bool:
    # The difference of two infinities is NaN.
    is_same = (wanted == found) | (wanted.isnan() & found.isnan())
    # A NaN of one side alone makes the norm NaN.
    return bool(torch.where(is_same, 0.0, wanted - found).norm() <= _TOLERANCE * wanted.nan_to_num().norm())


class _Trial(NamedTuple):
    """The results of a few steps.

    Attributes:
        results: by name, for messages, the numbers in each parameter's group, and the change of its weights.
        states: by parameter, its state.
    """

    results: dict[str, torch.Tensor]
    states: list[dict[str, Any]]


def _try(
    made: GroupClass,
    options: dict[str, Any],
    shapes: Sequence[tuple[int, ...]],
    device: torch.device,
    has_owners: bool,
    *,
    is_alone: bool,
) -> _Trial:
    """Step parameters of these shapes with large and small gradients, which keep a common direction.

    Without owners, one optimizer steps all parameters, as plain PyTorch does. With `has_owners`, two owners have an
    optimizer each, made before parameters have values. The last owner steps first, so that random numbers differ. After
    each step the memory of gradients and parameters is overwritten, so that optimizers that keep it get other results.
    Half-way one parameter and its state move to the first owner, as after a checkpoint.
    """
    generator = torch.Generator().manual_seed(0)  # of the CPU: each device gets the same numbers

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)

    starts, directions = (list(map(random, shapes)) for _ in range(2))
    params = [nn.Parameter(start.clone()) for start in starts]
    wholes = {param: nn.Parameter(stand_in(param)) for param in params} if has_owners else {}
    group = {**options, "params": params}
    _, made = _try_constructor(made.kind, made.options, [{**made.given, "params": params}])  # for its initial state

    other = {**options_of(made.given), "params": [nn.Parameter(starts[-1].clone())]}
    if isinstance(lr := options.get("lr"), float):
        other["lr"] = 3 * lr
    others = [] if has_owners or is_alone else [other]

    def make(*parts: list[nn.Parameter]) -> list[InnerOptimizer]:
        targets = [{param: wholes.get(param, param) for param in part} for part in parts]
        return [InnerOptimizer(made, 0, group, own, not has_owners, others) for own in targets]

    inners = make(params[:1], params[1:]) if has_owners else make(params)
    for number in range(_STEPS):
        if has_owners and number == _STEPS // 2:
            state: dict[Any, Any] = defaultdict(dict)
            for inner in inners:
                inner.link(state)
            wholes = {param: nn.Parameter(stand_in(param)) for param in params}  # without attributes of the class's own
            inners = make(params[:2], params[2:])
            for inner in inners:
                inner.load(state, is_loaded=False)
        for index, (param, direction) in enumerate(zip(params, directions, strict=True)):
            scale = 10.0 ** ((3 * index + 2 * number) % 7 - 4)  # so each step has another norm over all parameters
            param.grad = scale * (direction + random(tuple(param.shape)))
        for group_beside in others:
            group_beside["params"][0].grad = directions[-1].clone()
        for param, whole in wholes.items():
            whole.data, whole.grad = param.data.clone(), param.grad
        with _Watches(made.kind):
            for inner in inners:
                inner.take_options()
            for inner in reversed(inners):
                inner.step()
        inners[0].give_options()
        for param, whole in wholes.items():
            param.data.copy_(whole.data)
            for memory in (whole.data, param.grad):  # the optimizer may have set the owner's gradient to None
                memory.fill_(torch.nan)  # type: ignore[union-attr]  # made above
            whole.data, whole.grad = stand_in(param), None
    groups = [each for inner in inners for each in inner.groups]
    found = {param: values for inner in inners for param, values in inner.optimizer.state.items()}
    states = [found.get(param, {}) for each in groups for param in each["params"]]
    results: dict[str, torch.Tensor] = {}
    for index, own in enumerate(each for each in groups for _ in each["params"]):
        results.update((f"{key!r} in the group of weight {index}", x) for key, x in _numbers_in(own).items())
    for index, (param, start) in enumerate(zip(params, starts, strict=True)):
        results[f"weight {index}"] = param.detach() - start
    return _Trial(results, states)


def _numbers_in(group: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    tensors = {key: torch.as_tensor(x) for key, x in group.items() if isinstance(x, int | float | torch.Tensor)}
    return {key: tensor.cpu().double() for key, tensor in tensors.items() if tensor.numel() == 1}


class _Watches(TorchDispatchMode):
    """Refuses calls in a constructor or a step that give an owner other results than plain PyTorch.

    Args:
        kind: the optimizer's class.
        empty: the parameters, in a constructor: they have no values yet.
    """

    def __init__(self, kind: type[Optimizer], empty: Collection[torch.Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has not annotated it
        self._kind = kind
        self._empty = {each.untyped_storage()._cdata for each in empty}

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = full_name(self._kind), kwargs or {}
        if func.namespace in ("c10d", "_c10d_functional"):
            raise ConfigError(
                f"{name} calls torch.distributed in its step ({func.name()}), but one rank steps alone: use the class "
                "for one process (MuonAdamW, not DistMuonAdamW; SingleDeviceMuon, not Muon). If one class is for both, "
                "set dist = types.SimpleNamespace(is_available=lambda: False) in its module"
            )
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            raise ConfigError(
                f"{name} draws random numbers ({func.name()}), and owners step parameters in another order: draw them "
                "from a torch.Generator whose seed is in state[param], as APOLLO does"
            )
        reads_values = not func.is_view and not func.name().startswith(_READ_NOTHING)
        given = tensors_in(args) if self._empty and reads_values else ()
        if any(each.untyped_storage()._cdata in self._empty for each in given):
            raise ConfigError(
                f"{name} reads values of parameters in its constructor ({func.name()}), where owners have none: read "
                "them in the first step()"
            )
        return func(*args, **kwargs)
