"""`WholeParameterOptimizer`: runs any optimizer unmodified. One rank, the owner, steps each full parameter."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from streamshard.comm.communicator import Communicator
from streamshard.config import parse_bytes
from streamshard.core.optimizer_hooks import PiecesOfState
from streamshard.core.optimizer_kinds import full_name, is_elementwise_class, params_in
from streamshard.errors import ConfigError, ShardingError
from streamshard.guards.sharded_parameter import refuse_unreduced
from streamshard.guards.sharded_tensor import piece_of
from streamshard.optim.inner import GroupClass, InnerOptimizer, options_of
from streamshard.optim.rounds import Round, WholeParam, assign_owners, plan_rounds, run_rounds, stand_in
from streamshard.optim.trial import constructor_options, try_group
from streamshard.torch_private import untraced

_CLASS = "optimizer_class"  # key of a group


class WholeParameterOptimizer(Optimizer):
    """Runs optimizers that need the full parameter to update any of its elements: Muon, SOAP, Shampoo, Adafactor.

    During a step each sharded parameter is full on one rank, its *owner*. Ranks send their pieces of gradients and
    weights to the owner by all-to-all. There `optimizer_class` steps an ordinary ``nn.Parameter``. The owner sends the
    pieces of the new weights back. So the optimizer runs unmodified, with plain PyTorch's numbers. The owner keeps the
    state: each rank has about 1/N. Elementwise classes, such as AdamW, step on pieces, in place.

    With replicas each shard group has its own owners, which compute the same: nothing is sent between replicas.

    Args:
        params: parameters or param groups, as for any optimizer, made before or after ``StreamShard(model)``. A group
            may have an ``optimizer_class`` of its own; the group's other entries are options of this class.
        optimizer_class: steps all other groups. It has to step each parameter by itself. The constructor tests this on
            small parameters, and refuses an optimizer with a norm or a learning rate over all parameters.
        cost: returns the cost of stepping a parameter (of full shape), in any unit. Owners are chosen so that all ranks
            have about the same sum. None: the number of elements. For Muon ``lambda p: p.numel() * min(p.shape)``.
        round_size: bytes of fp32 weights that a rank steps in one round; a larger parameter is alone in its round.
            Rounds overlap, so during a step a rank needs about eight times as much memory.
        **defaults: options of `optimizer_class`.

    Raises:
        ConfigError: an option is wrong, or an optimizer does not step each parameter by itself.
    """

    # GradScaler unscales gradients itself, and skips step() if a gradient has overflowed.
    _step_supports_amp_scaling = False

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Optimizer],
        *,
        cost: Callable[[nn.Parameter], float] | None = None,
        round_size: int | str = "16MiB",
        **defaults: Any,
    ) -> None:
        self._main_class, self._main_options = _checked(optimizer_class), defaults
        self._cost = cost or torch.numel
        self._round_numel = max(parse_bytes("round_size", round_size) // torch.float32.itemsize, 1)
        self._classes: list[GroupClass] = []  # by group
        self._owners: dict[nn.Parameter, int] = {}
        self._loads: list[float] = []  # by rank, the cost of the parameters that it owns
        # The parameters for which the attributes below were made: their ids, and whether each is sharded.
        self._bound: list[tuple[int, bool]] | None = None
        self._wholes: list[WholeParam] = []
        self._rounds: list[Round] = []
        self._parts: list[list[InnerOptimizer]] = [[]]  # the optimizers that step in place; those of each round
        self._error: Exception | None = None  # in the step under way
        super().__init__(params, {})  # last: torch calls `add_param_group`, which needs all of these

    # -- the optimizers inside --------------------------------------------------------------------------------------

    @property
    def _inners(self) -> list[InnerOptimizer]:
        """All optimizers inside: one for each group, for pieces and plain parameters; one for each group and round."""
        return [inner for part in self._parts for inner in part]

    def _found(self) -> list[tuple[int, bool]]:
        return [(id(param), piece_of(param) is not None) for param in params_in(self.param_groups)]

    def _bind_if_changed(self) -> None:
        """Make the optimizers inside, if there are other parameters, or some were sharded."""
        if self._bound != self._found():
            self._bind(is_loaded=False)

    def _bind(self, *, is_loaded: bool) -> None:
        self._wholes = self._choose_owners()
        for each in self._wholes:
            if each.whole is None:
                self.state.pop(each.param, None)  # its owner has it
        elsewhere = {each.param for each in self._wholes}
        in_place = {param: param for param in params_in(self.param_groups) if param not in elsewhere}
        self._rounds, self._parts = [], [self._make_inners(in_place)]
        # Gradients decide which of them are stepped, as in torch: one that is frozen by now may have a gradient.
        for own in plan_rounds([each for each in self._wholes if each.piece.trains], self._round_numel):
            self._rounds.append(Round(own, own[0].piece.ranks))
            owned = {each.param: each.whole for each in own if each.whole is not None}
            self._parts.append(self._make_inners(owned))  # for each round: optimizers count steps in their groups
        for inner in self._inners:
            inner.load(self.state, is_loaded=is_loaded)
        self._bound = self._found()  # last: the next call repeats an error
        self._link()

    def _make_inners(self, targets: Mapping[nn.Parameter, nn.Parameter]) -> list[InnerOptimizer]:
        """An optimizer for each group that has some of the parameters in `targets`. See `InnerOptimizer`."""
        found = []
        for number, (group, made) in enumerate(zip(self.param_groups, self._classes, strict=True)):
            if own := {param: targets[param] for param in group["params"] if param in targets}:
                found.append(InnerOptimizer(made, number, group, own))
        return found

    def _link(self) -> None:
        """Put the inner optimizers' state into `state`: the same objects, keyed by the user's parameters."""
        for inner in self._inners:
            inner.link(self.state)

    # -- groups -----------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as with any optimizer. Earlier parameters keep their owners.

        Args:
            param_group: ``params``, options, and optionally an ``optimizer_class``.
        """
        group = dict(param_group)
        kind = _checked(group.pop(_CLASS, self._main_class))
        own = _CLASS in param_group
        self.defaults = {}  # torch would fill in the first group's, which may be of another class
        super().add_param_group(group)
        try:
            options = constructor_options(kind, group) if own else self._main_options
            known = zip(self._classes, self.param_groups, strict=False)
            filled, made = try_group(kind, options, [*(each for made, each in known if made.kind is kind), group])
            for key, value in filled.items():
                group.setdefault(key, value)
        except BaseException:
            self.param_groups.pop()
            raise
        finally:
            self.defaults = options_of(next(iter(self.param_groups), {}))  # schedulers look here for known options
        self._classes.append(made)

    # -- a step -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all groups. Collective if parameters are sharded.

        Args:
            closure: computes the loss and new gradients. Called once, before anything is stepped.

        Returns:
            The result of `closure`.

        Raises:
            Exception: an optimizer inside has raised. Only its rank raises, after the exchanges; parameters that were
                stepped before keep their new weights. Inside a `DistributedOptimizer` all ranks raise.
            RankMismatchError: on CPU ranks: they disagree about which parameters have a gradient; nothing was stepped.
                On a device these parameters become NaN.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        untraced(self._step)
        return loss

    def _step(self) -> None:
        refuse_unreduced(params_in(self.param_groups), "an optimizer's step")
        self._bind_if_changed()
        inners = self._inners
        for inner in inners:
            inner.take_options()
        steps = [functools.partial(self._step_inners, part) for part in self._parts]
        if self._rounds:
            run_rounds(self._rounds, steps, self._wholes[0].piece.ranks)
        else:
            steps[0]()
        for inner in sorted(inners, key=lambda inner: inner.had_grads):  # of each group, one with gradients comes last
            inner.give_options()
        self._link()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _step_inners(self, inners: list[InnerOptimizer]) -> None:
        try:
            for inner in inners if self._error is None else ():  # after an error only exchanges go on
                inner.step()
        except Exception as error:  # raised after the exchanges, because other ranks wait for them
            self._error = error

    # -- state ------------------------------------------------------------------------------------------------------

    def owner_of(self, param: torch.Tensor) -> int | None:
        """The rank of the shard group that steps the full `param`; None if its pieces are stepped in place.

        A single rank owns all parameters whose class is not elementwise.
        """
        return self.owners().get(id(param))

    def owners(self) -> Mapping[int, int]:
        """By the id of a parameter, the rank that steps the full parameter."""
        self._bind_if_changed()
        if any(is_sharded for _, is_sharded in self._bound or ()):
            return {id(each.param): each.owner for each in self._wholes}
        return {id(param): 0 for param in self._stepped_whole()}  # one rank, or the model is not sharded yet

    def in_place(self) -> list[Optimizer]:
        """The inner optimizers that step pieces, or plain parameters, in place."""
        self._bind_if_changed()
        return [inner.optimizer for inner in self._parts[0]]

    @property
    def described_class(self) -> str:
        """The names of its class and of its groups' classes. A checkpoint loads only into the same classes."""
        return f"{full_name(type(self))}({', '.join(full_name(made.kind) for made in self._classes)})"

    def settle(self, ranks: Communicator) -> None:
        """Copy options that a step has changed from owners to all ranks, before state is collected. Collective."""
        self._bind_if_changed()
        self._link()
        numbers = {inner.number for part in self._parts[1:] for inner in part}  # groups with parameters of this rank
        options = {number: options_of(self.param_groups[number]) for number in sorted(numbers)}
        shared = {key: value for key, value in self.state.items() if not isinstance(key, torch.Tensor)}
        for their_options, theirs in reversed(  # the first rank that has some comes last, and counts
            ranks.gather_objects("share options of parameter groups", (options, shared))
        ):
            for number, values in their_options.items():
                if number not in options:
                    self.param_groups[number].update(values)
            self.state.update({key: value for key, value in theirs.items() if key not in shared})

    def state_dict(self) -> dict[str, Any]:
        """State of this rank's pieces, and of the parameters that it owns.

        For full state call `streamshard.full_optimizer_state_dict`.

        Raises:
            ConfigError: the state dict of an optimizer inside has other entries than state and groups.
        """
        self._bind_if_changed()
        for inner in self._inners:
            inner.refuse_extras()
        self._link()
        state = super().state_dict()
        return PiecesOfState(state) if self._owners else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part, or full state: each rank takes its part.

        If only rank 0 has the full state, call `streamshard.load_optimizer_state_dict`.
        """
        state: dict[Any, Any] = self.split_stacks(state_dict)["state"]
        super().load_state_dict({**state_dict, "state": {}})  # the classes inside convert the state
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        # Keys that are no numbers belong to no parameter, and stay.
        by_number = dict(zip(numbers, params_in(self.param_groups), strict=True))
        self.state = defaultdict(dict, {by_number.get(number, number): values for number, values in state.items()})
        self._bind(is_loaded=True)

    def split_stacks(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """Split state that an optimizer stacks over a group, as nanochat's MuonAdamW does, into its parameters' parts.

        Args:
            state_dict: full state, or state that is split already.
        """
        state = dict(state_dict["state"])
        for numbers, key in self._stacks(state_dict):
            stack = state.get(numbers[0], {}).get(key, ())
            # Shorter: it is split already.
            for place, number in enumerate(numbers if len(stack) >= len(numbers) else ()):
                state[number] = {**state.get(number, {}), key: stack[place : place + 1]}
        return {**state_dict, "state": state}

    def join_stacks(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The reverse of `split_stacks`, for groups in which each parameter has state."""
        state = dict(state_dict["state"])
        for numbers, key in self._stacks(state_dict):
            if all(key in state.get(number, {}) for number in numbers):
                stack: Any = torch.cat([state[number][key] for number in numbers])
                for number in numbers:
                    state[number] = {name: value for name, value in state[number].items() if name != key}
                state[numbers[0]][key] = stack
        return {**state_dict, "state": {key: values for key, values in state.items() if values}}

    def _stacks(self, state_dict: Mapping[str, Any]) -> list[tuple[list[int], str]]:
        """Groups of parameters whose state is stacked, by number, and the key of the state."""
        groups = zip(self._classes, state_dict["param_groups"], strict=False)  # torch compares the groups
        return [(group["params"], key) for made, group in groups for key in made.stacked]

    def _stepped_whole(self) -> list[nn.Parameter]:
        """The parameters of groups whose class needs full tensors."""
        groups = zip(self.param_groups, self._classes, strict=True)
        return params_in(group for group, made in groups if not is_elementwise_class(made.kind))

    def _choose_owners(self) -> list[WholeParam]:
        """The sharded parameters that are stepped as full tensors, with their owners."""
        found = [(param, piece) for param in self._stepped_whole() if (piece := piece_of(param)) is not None]
        if not found:
            return []
        ranks = found[0][1].ranks
        for _, piece in found:
            if piece.ranks is not ranks:
                two = f"parameter {piece.name!r} is of another model than {found[0][1].name!r}"
                raise ConfigError(f"{two}: make one WholeParameterOptimizer for each model")
            if piece.box:
                raise ShardingError(
                    f"parameter {piece.name!r} is a DTensor, of which each rank's shard group has a part, and "
                    "WholeParameterOptimizer steps full tensors: take an elementwise optimizer such as "
                    "torch.optim.AdamW, or shard the model without tensor parallelism"
                )
        costs = {param: self._cost(param) for param, _ in found}
        self._loads = self._loads or [0.0] * ranks.world_size
        new = [param for param in costs if param not in self._owners]  # others have state where they are
        self._owners.update(zip(new, assign_owners([costs[param] for param in new], self._loads), strict=True))
        wholes = []
        for param, piece in found:
            owner = self._owners[param]
            whole = nn.Parameter(stand_in(param)) if owner == ranks.rank else None
            wholes.append(WholeParam(param, piece, owner, whole, costs[param]))
        return wholes


def _checked(kind: object) -> type[Optimizer]:
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise ConfigError(f"optimizer_class={kind!r}: wanted a subclass of torch.optim.Optimizer")
    return kind
