"""The class `StreamShard`. Methods import what only they need; ``StreamShard(model)`` imports `build`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import JoinHook
from torch.distributed.device_mesh import DeviceMesh

from streamshard.config import GradSlots, Offload, Precision, SlotCount
from streamshard.core.edge import Watched
from streamshard.core.module_state import engine_at_rest, engine_of, handle_of
from streamshard.errors import ShardingError
from streamshard.planning.layout import LocalRange
from streamshard.planning.structure import leave_inference_mode, leave_meta_device

if TYPE_CHECKING:
    from streamshard.planning.discovery import ResidentArgument, UnitsArgument
    from streamshard.tools.memory import MemoryReport

_T = TypeVar("_T")


class StreamShard(Watched):
    """Shard a model in place and stream its layers through two buffers. Returns the same object.

    The model keeps its class name, attributes, ``forward`` signature and state-dict names, and becomes an instance of
    `StreamShard`. If it already has a method or child with the name of a method below, it keeps its own, and
    StreamShard's is ``StreamShard.name(model, ...)``. Parameters stay the same Parameter objects: outside of forward
    and backward ``p.shape`` is the full shape, and the memory holds this rank's piece of the fp32 main weights.

    Parameters that are frozen when the model is sharded have no main grads, keep their dtype (unless layers compute in
    fp32), and cannot train later. All ranks must freeze the same parameters, and call forward and backward the same
    number of times.

    Args:
        module: the model, the same on every rank, on the CPU or one accelerator. Rank 0 sends its weights and buffers
            to the other ranks, whose models may be on the meta device. A model on the CPU moves to this rank's
            accelerator if the process group has a backend for it, unless `mesh` is a CPU mesh. Parameters and buffers
            on the meta device get memory without values: `load_safetensors` or `init_weights` fills them.
        units: the modules to all-gather and reduce as one unit each: classes, modules, or names of either
            (``"LlamaDecoderLayer"``, ``"lm_head"``), one or several. None: repeated layers, and large modules beside
            them whose parameters are not tied (see `streamshard.planning.discovery`). Layers of a small tower, such as
            an image encoder with at most a quarter of the weights, are resident. All other parameters form the root
            unit. Warns if there are no layers.
        resident: modules whose weights are read outside of their own layer's forward, or that some ranks run more often
            than others: names, modules or classes, one or several. Each gets its own slots, is all-gathered once in a
            pass, and stays unsharded until its gradients are reduced. If a module has layers inside, all these layers
            are resident. The parameters of a module inside a layer move to the root unit.
        mesh: a 1-D DeviceMesh or a process group to shard over, or a 2-D DeviceMesh, replicate x shard: shards over the
            second axis, averages gradients over the first (hybrid sharding). None: the default group; if there is none,
            it is made from the launcher's environment.
        precision: dtypes of weights, gradients and reductions. A dtype or its name, such as ``"bf16"``,
            ``"float16"`` or ``torch.float32``: layers compute in it, and reductions are in fp32. None: "bf16".
        weight_slots: number of buffers for the weights of streamed units, at least 2; more than there are such units
            count as that many. The last layers of forward stay in their slots for backward. With "all" each unit is
            all-gathered once in a step (ZeRO-2).
        grad_slots: None: the gradients of a unit take the slot of its weights, which backward has left; with "all"
            weight slots, and over sockets, they have two slots of their own. "all": each unit has a gradient slot of
            its own, where gradients are accumulated locally inside `no_sync`, and are reduced once (ZeRO-1).
        min_unit_size: combine consecutive units until each has at least this many bytes in `param_dtype`, e.g.
            ``"1MiB"``, so that tiny layers share collectives. 0 leaves units as they are.
        align_pieces_to: cut parameters between ranks only at multiples of this many of their elements, so that an
            optimizer with state in blocks (8-bit moments: 4096) sees complete blocks. Costs padding.
        offload: ``"state"``: main weights, main grads, optimizer state and all-gather inputs lie in pinned host memory.
            Layers stream from there, and each forward carries out the last optimizer step beside its layers. The
            results are the same. None: the device holds them.
        device_budget: with ``offload``, so many bytes of state, such as ``"20GiB"``, stay on the device: those of the
            first units, which have no earlier forward to hide behind.
        keep_main_grads: main grads keep their memory after ``zero_grad()``, so that no step allocates it: 4/N bytes per
            parameter more while activations are largest. Worth it if an allocator without a cache takes the time.
        shard_over_replicas: on a 2-D mesh of R x N ranks, cut main weights, main grads and optimizer state over all of
            them: 16/(R N) bytes per parameter, and a shard of 1/N in the wire dtype. Layers are gathered inside a
            replica; weights cross between replicas once per optimizer step, beside the next forward.

    Raises:
        ShardingError, UnitError, ConfigError, RankMismatchError: before anything is allocated or changed.
    """

    if TYPE_CHECKING:  # any attribute is allowed: the model's class, StreamShard's subclass, is made at run time

        def __getattr__(self, name: str) -> Any: ...

    def __new__(cls, *args: Any, **kwargs: Any) -> StreamShard:
        if cls is not StreamShard:  # `type(model)(...)`, see `ShardedModule.__new__`
            return cast(StreamShard, super().__new__(cls, *args, **kwargs))
        from streamshard.build import shard_model
        from streamshard.tools.memory import log_summary

        with leave_inference_mode(), leave_meta_device():
            module, engine = shard_model(StreamShard, *args, **kwargs)
        if engine.ranks.is_first:
            log_summary(engine, module)
        return cast(StreamShard, module)

    def __init__(
        self,
        module: nn.Module,
        units: UnitsArgument = None,
        *,
        resident: ResidentArgument = (),
        mesh: DeviceMesh | dist.ProcessGroup | None = None,
        precision: Precision | torch.dtype | str | None = None,
        weight_slots: SlotCount | None = None,
        grad_slots: GradSlots = None,
        min_unit_size: int | str = 0,
        align_pieces_to: int = 1,
        offload: Offload = None,
        device_budget: int | str = 0,
        keep_main_grads: bool = False,
        shard_over_replicas: bool = False,
    ) -> None:
        pass  # Python calls this after __new__, which has returned a complete, sharded model

    # -- training ---------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients over the backwards inside. Weights still in their slots are not all-gathered again.

        One context around several micro-batches is faster than one context around each.

        With ``grad_slots="all"`` gradients wait in their slots, and the next backward outside reduces them. With fewer
        slots every backward reduces over the shard group, and the next backward outside averages over replicas; with
        ``sums_in_rank_order`` every backward reduces over replicas too. While gradients wait to be reduced or averaged,
        stepping, clipping and reading them raise. The sum is the same in all cases.
        """
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(True)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """False: start to accumulate, like entering `no_sync`. True: stop, like leaving it."""
        engine_of(self).set_synced(requires_gradient_sync)

    def accumulate(
        self, micro_batches: Iterable[_T], loss_of: Callable[[StreamShard, _T], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Run forward and backward of a step: all micro-batches run through a layer before the next layer.

        So a layer is all-gathered once in forward and once in backward, and reduced once.
        Replaces ``for micro_batch in micro_batches: loss_of(model, micro_batch).backward()``. It computes the same
        gradients, also added to those that parameters have. Layers' inputs of all micro-batches exist at a time, logits
        of one. The first steps, which learn the order of layers, run one micro-batch after the other.

        Args:
            micro_batches: arguments for `loss_of`, as many on all ranks.
            loss_of: computes the loss of one, a tensor with one element, by calling the model; does not call
                ``backward``.

        Returns:
            The losses, detached, in order.

        Raises:
            ConfigError: the package greenlet is not installed, the model has DTensors or runs inside ``Join``, or
                `loss_of` has returned something else.
            ShardingError: the model does something that needs a loop, see the guide's page on accumulation.
            RankMismatchError: ranks have different numbers of micro-batches.
        """
        from streamshard.layer_major import accumulate

        return accumulate(engine_at_rest(self, "accumulate"), self, micro_batches, loss_of)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of all ranks' gradients by `factor`. 1.0 sums; the number of ranks averages, as by default.

        Use 1.0 for losses that are already divided by the number of tokens of all ranks. On a 2-D mesh the factor
        divides the sum over the ranks of all replicas. Call it on all ranks, with the same factor, while no parameter
        has a gradient.

        Raises:
            ConfigError: on all ranks: `factor` is no positive, finite number, or a parameter has a gradient.
            RankMismatchError: ranks have given different factors.
        """
        engine_at_rest(self, "set_gradient_divide_factor", accepts_empty=True).divisor.choose(factor)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Scale gradients so that their norm over all ranks is at most `max_norm`. One collective.

        Args:
            max_norm: the largest norm allowed; ``inf`` scales nothing.
            norm_type: order of the norm, above 0; ``inf`` for the maximum.

        Returns:
            The norm before scaling, [] fp32, equal on all ranks.
        """
        from streamshard.core.clipping import clip_grads

        engine = engine_at_rest(self, "clip_grad_norm_")
        return clip_grads(engine, [param.sharded for param in engine.params], max_norm, norm_type)

    def join_hook(
        self, *, repeat: Callable[[], object] | None = None, divide_by_initial_world_size: bool = True, **others: Any
    ) -> JoinHook:
        """Called by ``torch.distributed.algorithms.Join([model], repeat=function)`` with its keyword arguments.

        Args:
            repeat: a function that finishes a step, such as ``optimizer.step``. A rank without inputs calls it after
                each synchronised backward of the other ranks. Only training needs it.
            divide_by_initial_world_size: as for DistributedDataParallel: gradients are means over all ranks (True, the
                default), or over the ranks with inputs (False).
            **others: ignored: ``Join`` passes all its keyword arguments to every joinable.
        """
        from streamshard.integrations.join import UnevenHook

        return UnevenHook(self, repeat, divide_by_initial_world_size)

    @property
    def join_device(self) -> torch.device:
        """The device on which ``Join`` counts ranks."""
        return engine_of(self).streams.device

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """All ranks that train this model."""
        return engine_of(self).ranks.users_group

    # -- full tensors -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def summon_full_params(self) -> Iterator[None]:
        """Inside, parameters are full tensors on every rank: original names and shapes, dtypes as outside. Collective.

        Every change inside is kept: in place, through ``.data``, or by ``p.data = tensor``. All ranks make the same
        change. After an exception on any rank all ranks raise, and no parameter has changed. Parameters have no
        gradients inside.

        Raises:
            ShardingError: called inside a forward or backward. Or, at the end: a change would be lost; no parameter has
                changed.
            RankMismatchError: at the end: ranks have made different changes; no parameter has changed.
        """
        from streamshard.full import summon

        engine = engine_at_rest(self, "summon_full_params")
        with leave_inference_mode(), summon(engine):
            yield

    def full_state_dict(self, rank0_only: bool = True) -> dict[str, Any]:
        """The state dict of the unsharded model: original names and shapes, in CPU memory. Collective.

        Weights are fp32; frozen parameters have their storage dtype. One unit is all-gathered at a time. The modules'
        own hooks and ``state_dict()`` methods see full tensors. Tied names share one tensor.

        Args:
            rank0_only: other ranks get an empty dict.
        """
        from streamshard.full import gather_state_dict

        engine = engine_at_rest(self, "full_state_dict")
        return gather_state_dict(engine, self, rank0_only=rank0_only)

    def local_ranges(self) -> dict[str, LocalRange]:
        """By parameter name, the range of elements that this rank owns, as in Megatron's distributed optimizer.

        The rank owns elements ``start`` up to ``stop`` of the flattened parameter. ``shard_offset`` counts from the
        start of the rank's shard of the flat parameter. A tied parameter has one entry, under its first name.
        """
        return {shard.name: shard.local for shard in engine_of(self).params}

    def memory_report(self) -> MemoryReport:
        """Bytes that the engine holds on this rank, by category. Printable."""
        from streamshard.tools.memory import report_memory

        return report_memory(engine_of(self))

    def __repr__(self) -> str:
        from streamshard.tools.memory import summarise

        # In the place of extra_repr(), which is the user's own.
        lines = super().__repr__().split("\n")
        if (handle := handle_of(self)) is not None:
            lines[1:1] = [f"  {line}" for line in summarise(handle.engine, self)]
        return "\n".join(lines)

    # -- refused ------------------------------------------------------------------------------------------------------

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Iterator[str]:
        # Raises when DistributedDataParallel iterates over it, before it reads parameters. Reading the attribute itself
        # does not raise, because other libraries read all attributes.
        yield ""
        what = "DistributedDataParallel of a StreamShard model, which reduces gradients itself"
        raise ShardingError(f"{what}. Leave the wrapper out; with accelerate, use StreamShardAccelerator")

    def _fqn_modifiers(self) -> dict[str, str]:
        # torch.distributed.checkpoint asks for this before it gets or sets a state dict.
        what = "torch.distributed.checkpoint (and accelerate's load_checkpoint_in_model) takes pieces for full tensors"
        raise ShardingError(f"{what}: use full_state_dict() and load_state_dict(), or export_ and load_safetensors")
