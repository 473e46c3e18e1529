"""The memory that activations take at most, from a forward and a backward with tensors that have no memory.

The model trains on fake tensors, with dropout and a loss, while `LiveBytes` follows the storages of all tensors: what
autograd keeps, gradients of activations, gradients of one unit's parameters at a time, and what an operation or layer
makes and frees. On CPUs, real tensors take the same bytes. Memory that a kernel takes for itself is not seen.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from streamshard.conventions import conventions
from streamshard.errors import ConfigError, describe
from streamshard.layer_major.step import LARGE
from streamshard.nested import cast, tensors_in
from streamshard.planning.discovery import FoundUnit
from streamshard.planning.structure import list_of, modules_inside, modules_of, params_of, replacing
from streamshard.torch_private import FakeTensorMode, TorchDispatchMode, is_traceable_wrapper_subclass, wait_tensor

_fakes_log = logging.getLogger(FakeTensorMode.__module__)

Build = Callable[[], nn.Module]
"""A function that makes a model."""


class Activations(NamedTuple):
    """Bytes beside the engine's in a forward and backward, at most.

    Attributes:
        without: of layers that are not checkpointed.
        checkpointed: each layer keeps its inputs only, and runs again in backward.
    """

    without: int
    checkpointed: int


class _OnPlainTensors(TorchDispatchMode):
    """While active, sees the operations on plain tensors, also on those that DTensors and the like consist of."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the class calls operations on its parts
        return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class LiveBytes(_OnPlainTensors):
    """While active, follows the storages that operations make. Storages that exist before do not count.

    Attributes:
        now: bytes of the storages that are alive.
        peak: at most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        # Views, and results in place, have the storage of an argument.
        given = {tensor.untyped_storage()._cdata for tensor in tensors_in((args, kwargs))}
        for tensor in tensors_in(result):
            if is_traceable_wrapper_subclass(tensor):
                continue  # its storage has no memory
            storage = tensor.untyped_storage()
            if storage._cdata not in given and storage._cdata not in self._alive:
                self._alive[storage._cdata] = weakref.ref(
                    storage, partial(self._freed, storage._cdata, storage.nbytes())
                )
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
        return result

    def _freed(self, key: int, n_bytes: int, _: object) -> None:
        del self._alive[key]
        self.now -= n_bytes


def estimate_activations(
    model: nn.Module,
    found: Sequence[FoundUnit],
    dtype: torch.dtype | None,
    batch: int,
    seq: int,
    *,
    micro_batches: int = 1,
    on_gpus: bool,
    build: Build | None = None,
) -> Activations:
    """Run a forward and a backward on copies of `model` without memory. For inputs, see `_run_without_memory`.

    A model that returns no ``loss`` gets the cross entropy of its outputs, in fp32.

    Args:
        model: on any device.
        found: its units; layers among them are checkpointed.
        dtype: the dtype in which layers compute; None: the parameters' own.
        batch, seq: shape of the tokens.
        micro_batches: of ``model.accumulate``, each of this shape; 1: a forward and backward of its own.
        on_gpus: attention with dropout does not keep its weights.
        build: makes `model`. Called for each copy if there are DTensors, whose hooks and forwards stay with a model.

    Raises:
        ConfigError: the model cannot run without memory.
    """
    names = {module: name for name, module in modules_of(model)}
    # Layers of a list are checkpointed, resident ones too; embedding and head are not.
    units = [unit for unit in found if not unit.is_resident or list_of(unit.name) != unit.name]
    layers = [names[module] for unit in units for module in unit.modules]
    own = [
        ([names[module] for module in unit.modules], unit.may_join or not unit.is_resident)
        for unit in found
        if unit.name
    ]

    attention = _FusedAttention if on_gpus else contextlib.nullcontext
    make, runs = partial(_copy_without_memory, model, dtype), 1
    if any(isinstance(param, DTensor) for param in params_of(model).values()):
        if build is None:
            raise ConfigError("a model with DTensors cannot be copied: give a function that builds it")
        # The first time, torch makes whole tensors to find out how DTensors are cut.
        make, runs = partial(_build_without_memory, build, dtype), 2

    def peak(inputs: Arguments, checkpointed: Sequence[str]) -> int:
        with attention():
            return [_peak(make(), own, dtype, inputs, checkpointed, attention, micro_batches) for _ in range(runs)][-1]

    return _run_without_memory(model, batch, seq, lambda inputs: Activations(peak(inputs, []), peak(inputs, layers)))


def _peak(
    model: nn.Module,
    units: Sequence[tuple[Sequence[str], bool]],
    dtype: torch.dtype | None,
    inputs: Arguments,
    checkpointed: Sequence[str],
    attention: Callable[[], contextlib.AbstractContextManager[object]],
    micro_batches: int,
) -> int:
    """Bytes of the inputs and of one forward and backward of `model`, at most. Changes the model.

    Between two places where `model.accumulate` pauses, one micro-batch runs and each other one waits at either of them.

    Args:
        model, dtype, inputs: without memory.
        units: by unit but the root unit, names of its modules, and whether forwards of micro-batches pause there.
        checkpointed: names of layers.
        attention: the context in which they run again; backward leaves a TorchFunctionMode of its caller.
        micro_batches: see `estimate_activations`.
    """
    # Fake tensors draw no random numbers and have no values, so there is nothing to keep or to compare.
    again: Any = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
    again["context_fn"] = lambda: (contextlib.nullcontext(), attention())
    for layer in map(model.get_submodule, checkpointed):
        layer.forward = partial(checkpoint, layer.forward, **again)
    most = waiting = 0  # bytes so far, and of a micro-batch that waits in the last place

    def pause(*_: object) -> None:
        nonlocal most, waiting
        most = max(most, live.peak + (micro_batches - 1) * max(waiting, live.now))
        waiting = live.peak = live.now

    def leave(params: Sequence[nn.Parameter]) -> None:
        """The engine takes gradients of a unit that backward has left and, of several micro-batches, large others."""
        _drop_grads((*params, *(param for param in root if micro_batches > 1 and param.numel() >= LARGE)))
        pause()

    if micro_batches > 1:
        _untie(model)
    root = set(model.parameters())
    for names, pauses in units:
        modules = list(map(model.get_submodule, names))
        params = [param for module in modules for param in module.parameters()]
        root.difference_update(params)
        if pauses or micro_batches == 1:
            _when_left(modules, partial(leave, params))
            for module in modules:
                module.register_forward_pre_hook(pause)
    with LiveBytes() as live:
        given = inputs if dtype is None else cast(inputs, dtype)
        output = model.train()(*given.args, **given.kwargs)  # lives until backward is over, as in most loops
        if (loss := getattr(output, "loss", None)) is None:
            output = cast(output, torch.float32)  # as the engine does
            loss = sum(_cross_entropy(each) for each in tensors_in(output) if each.requires_grad)
        if micro_batches > 1:
            del output  # `loss_of` has returned
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            loss.backward()
        _drop_grads(root)
        pause()
    return most + micro_batches * sum(tensor.nbytes for tensor in set(tensors_in(inputs)))


def _untie(model: nn.Module) -> None:
    """Give each module a large parameter of its own, whose gradient does not wait for that of another module."""
    seen = set[nn.Parameter]()
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and param in seen and param.numel() >= LARGE:
                module._parameters[name] = nn.Parameter(torch.empty_like(param), param.requires_grad)
            seen.update(() if param is None else (param,))


def _drop_grads(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        param.grad = None


def _when_left(modules: Sequence[nn.Module], call: Callable[[], None]) -> None:
    """Call `call` when backward has left `modules`."""

    def on_inputs(module: nn.Module, args: Any, kwargs: Any) -> None:
        for tensor in tensors_in((args, kwargs)):
            if tensor.requires_grad:
                tensor.register_hook(lambda grad: call())

    for module in modules:
        module.register_forward_pre_hook(on_inputs, with_kwargs=True)


def _cross_entropy(output: torch.Tensor) -> torch.Tensor:
    return output.sum() if output.ndim < 2 else -output.log_softmax(-1)[..., 0].mean()


# -- models without memory --------------------------------------------------------------------------------------------


class Arguments(NamedTuple):
    """Arguments of a model's forward."""

    args: tuple[torch.Tensor, ...]
    kwargs: dict[str, Any]


def _run_without_memory(model: nn.Module, batch: int, seq: int, run: Callable[[Arguments], Activations]) -> Activations:
    """Call ``run(inputs)`` where tensors have no memory, with the first inputs for which it succeeds.

    Inputs are tokens [batch, seq], as ``input_ids`` and ``labels`` or as the only argument, and images of the config's
    size as ``pixel_values``, if `model` takes these.

    Raises:
        ConfigError: no call succeeds, and what the first one raised.
    """
    errors = list[Exception]()
    silence = replacing((_fakes_log.__dict__, "disabled", True))  # operations may fail: other inputs may succeed
    with warnings.catch_warnings(), silence, FakeTensorMode(), _Kernels(), conventions().taking_fakes_for_real():
        warnings.simplefilter("ignore")
        for inputs in _inputs_of(model, batch, seq):
            try:
                return run(inputs)
            except Exception as error:  # the model may raise anything, and fake tensors have no values to branch on
                errors.append(error)
    what = describe(errors[0]).partition("\n")[0]
    raise ConfigError(f"the model does not run on {batch} x {seq} tokens without memory: {what}") from errors[0]


def _inputs_of(model: nn.Module, batch: int, seq: int) -> Iterator[Arguments]:
    """The likeliest first. Heads that classify take other labels."""
    names, config = inspect.signature(model.forward).parameters, getattr(model, "config", None)
    tokens = torch.zeros(batch, seq, dtype=torch.long)
    of_images = getattr(config, "vision_config", config)
    if not names.keys() & {"input_ids", "pixel_values"}:
        yield Arguments((tokens,), {})
        return
    given = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    if (size := getattr(of_images, "image_size", None)) is not None:
        height, width = (size, size) if isinstance(size, int) else size
        channels = getattr(of_images, "num_channels", 3)
        given["pixel_values"] = torch.zeros(batch, channels, height, width)
    for left_out in (("pixel_values",), ("pixel_values", "labels"), (), ("labels",)):
        if "input_ids" in names or "pixel_values" not in left_out:
            chosen = {name: given[name] for name in given if name in names and name not in left_out}
            yield Arguments((), chosen)


def _copy_without_memory(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy of `model` on fake tensors, with parameters of `dtype`. Call it in `_run_without_memory`.

    Args:
        model: on any device. Its tensors are not read.
        dtype: None: the parameters' own.
    """
    fakes: dict[int, Any] = {}
    for tensor in (tensor for module in modules_inside(model) for tensor in tensors_in(vars(module))):
        is_param = isinstance(tensor, nn.Parameter)
        kind = dtype if is_param and dtype is not None and tensor.is_floating_point() else tensor.dtype
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind)
        fakes[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_param else fake
    return copy.deepcopy(model, fakes)  # as its memo: deepcopy takes the fakes in the place of the model's tensors


def _build_without_memory(build: Build, dtype: torch.dtype | None) -> nn.Module:
    """A new model on fake tensors, with parameters of `dtype`. Call it in `_run_without_memory`."""
    model = build()
    cast_params: dict[nn.Parameter, nn.Parameter] = {}
    for module in modules_inside(model):
        for name, param in module._parameters.items():
            if param is not None and param.is_floating_point() and dtype is not None:
                if param not in cast_params:
                    cast_params[param] = nn.Parameter(param.detach().to(dtype), param.requires_grad)
                module._parameters[name] = cast_params[param]
    return model


class _Kernels(_OnPlainTensors):
    """Lets fake tensors through operations that refuse them, or copy them, although real tensors pass."""

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        aten = torch.ops.aten
        if func is aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return True  # models ask: are all values of a mask true? does a sequence fill its row?
        # Its rule for fake tensors takes no other dtype, its kernel does.
        if func is aten._grouped_mm.default and args[0].dtype is not torch.bfloat16:
            return func(*cast(args, torch.bfloat16), **kwargs).to(args[0].dtype)
        if func is wait_tensor:  # it copies fake tensors only
            return args[0]
        return func(*args, **kwargs)


class _FusedAttention(TorchFunctionMode):
    """Attention with dropout takes the memory of a fused kernel: CPUs have none, GPUs have several."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.scaled_dot_product_attention:
            kwargs = {**(kwargs or {}), "dropout_p": 0.0}
        return func(*args, **(kwargs or {}))
