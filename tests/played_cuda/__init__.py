"""A CUDA device that the CPU plays, on a build of torch that has none: tensors are on "cuda:0", and everybody's code
for GPUs runs.

    from tests.played_cuda import play
    play(devices=2)        # before anything asks for a device; there is no way back

    PLAYED_CUDA_DEVICES=2 PYTHONPATH=.:tests/played_cuda/everywhere torchrun --nproc-per-node 2 script.py

It finds what is wrong with devices, not with time: tensors of two devices that meet, generators, indices of devices,
calls that ``torch.cuda`` does not have, a host that reads a device's memory (which ends the process), or pinned memory
before a copy is known to be done. Kernels are the CPU's and run at once; the CUDA sanitizer hears of them. "nccl" is
gloo: ranks may share a device. Not there: graphs, Triton, profiles of kernels, kernels that the CPU does not have
(``addmm(out_dtype=..)``, fused cells of LSTMs), memory that a caching allocator would keep.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

import torch

TOTAL_BYTES = 16 << 30
SOURCE = Path(__file__).with_name("device.cpp")
FLAGS = ("-O1", "-w", "-DUSE_C10D")


def library(source: Path = SOURCE) -> Path:
    """The compiled device, which may not be there yet. Each source and each torch has a file of its own."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    facts = (torch.__version__, sys.implementation.cache_tag, *FLAGS)
    digest = hashlib.sha256(source.read_bytes() + repr(facts).encode()).hexdigest()
    return root / f"played_cuda_{digest[:16]}.so"


@functools.cache
def build(source: Path = SOURCE) -> Any:
    """Compile the device, if there is none of this source, and import it.

    A process compiles in a directory of its own, and moves the whole library to its place. So there is no lock that a
    killed process could leave behind, and no half-written library.
    """
    path = library(source)
    if path.exists():
        spec: Any = importlib.util.spec_from_file_location(path.stem, path)
        device = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(device)
        return device
    from torch.utils.cpp_extension import load

    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as own:
        device = load(path.stem, [str(source)], extra_cflags=list(FLAGS), build_directory=own)
        (Path(own) / path.name).replace(path)
    return device


@functools.cache
def play(devices: int = 1, total_bytes: int = TOTAL_BYTES) -> None:
    """From now on this process has as many CUDA devices, each of that much memory. Builds the device first, once."""
    device = build()
    device.begin(devices, total_bytes)
    _give_streams(device)
    _give_device(device, devices, total_bytes)
    _give_nccl(device)


def _give_device(device: Any, devices: int, total_bytes: int) -> None:
    """What a build for CUDA has in ``torch._C``."""
    is_forked = False

    def after_fork() -> None:
        nonlocal is_forked
        is_forked = is_forked or device.was_asked()

    def get_properties(index: int) -> types.SimpleNamespace:
        return types.SimpleNamespace(
            name="NVIDIA Played",
            major=9,
            minor=0,
            total_memory=total_bytes,
            multi_processor_count=4,
            max_threads_per_multi_processor=2048,
            warp_size=32,
            L2_cache_size=1 << 20,
            uuid=f"played-{index}",
            is_integrated=0,
        )

    def init() -> None:
        device.init()
        torch.cuda.default_generators = tuple(device.default_generator(index) for index in range(devices))
        torch.cuda._get_device_properties = get_properties  # type: ignore[attr-defined]

    os.register_at_fork(after_in_child=after_fork)
    own: Any = torch._C
    for name, value in {
        "_has_cuda": True,
        "_cuda_getDeviceCount": lambda: 0 if is_forked else device.device_count(),
        "_cuda_init": init,
        "_cuda_isInBadFork": lambda: is_forked,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_cuda_getCompiledVersion": lambda: 12080,
        "_cuda_getDevice": own._accelerator_getDeviceIndex,
        "_cuda_setDevice": own._accelerator_setDeviceIndex,
        "_cuda_exchangeDevice": own._accelerator_exchangeDevice,
        "_cuda_maybeExchangeDevice": own._accelerator_maybeExchangeDevice,
        "_cuda_synchronize": device.synchronize,
        "_cuda_emptyCache": lambda *pool: None,
        "_cuda_memoryStats": own._accelerator_getDeviceStats,
        "_cuda_resetAccumulatedMemoryStats": own._accelerator_resetAccumulatedStats,
        "_cuda_resetPeakMemoryStats": own._accelerator_resetPeakStats,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_clearCublasWorkspaces": lambda: None,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_canDeviceAccessPeer": lambda device, peer: True,
        "_nccl_version": lambda: 2 << 32 | 27 << 16 | 5,
        "_nccl_version_suffix": lambda: b"",
        "_cuda_sleep": lambda cycles: None,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_set_sync_debug_mode": lambda mode: None,
        "_cuda_CUDAAllocator_AllocatorState": types.SimpleNamespace,
        "_set_cached_tensors_enabled": lambda enabled: None,
        "_CudaDeviceProperties": types.SimpleNamespace,
    }.items():
        setattr(own, name, value)
    torch.cuda._cudart = types.SimpleNamespace(  # type: ignore[attr-defined]
        cudaMemGetInfo=lambda index: own._accelerator_getMemoryInfo(index),
        cudaDeviceSynchronize=device.synchronize,
        cudaHostRegister=lambda address, n_bytes, flags: device.host_register(address, n_bytes),
        cudaHostUnregister=lambda address: device.host_unregister(address) or 0,
        cudaError=enum.IntEnum("cudaError", {"success": 0, "already registered": 712}),
        cudaGetErrorString=lambda error: error.name,
    )
    # Taken from torch._C when torch.cuda was imported.
    torch.cuda._is_in_bad_fork = own._cuda_isInBadFork
    torch.cuda._exchange_device = own._cuda_exchangeDevice
    torch.cuda._maybe_exchange_device = own._cuda_maybeExchangeDevice
    torch.cuda.graphs._cuda_isCurrentStreamCapturing = own._cuda_isCurrentStreamCapturing
    torch.version.cuda = "12.8"
    # Else profiles ask for events of CUDA at every operator, and complain of each.
    both = {torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA}
    torch.autograd.profiler._supported_activities = lambda: both  # type: ignore[attr-defined,assignment]
    resize_host = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> None:
        if storage.device.type == "cuda":
            device.resize(as_bytes(storage), nbytes)
        else:
            resize_host(storage, nbytes)

    def to(storage: Any, where: torch.device, non_blocking: bool = False) -> Any:
        return as_bytes(storage).to(where).untyped_storage()

    def as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]

    torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment,method-assign]
    torch.storage._to = to  # type: ignore[attr-defined]


def _give_streams(device: Any) -> None:
    """``torch.cuda.Stream`` and ``torch.cuda.Event``, which are torch's own of any device."""
    own: Any = torch._C

    class _CudaStreamBase(torch.Stream):
        def __new__(
            cls, priority: int = 0, stream_id: int = 0, device_index: int | None = None, device_type: int = 1
        ) -> Any:
            if device_index is not None:
                return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
            return super().__new__(cls, torch.device("cuda", torch.cuda.current_device()), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -5

    class _CudaEventBase(torch.Event):
        def __new__(cls, enable_timing: bool = False, *others: Any, **named: Any) -> Any:
            return super().__new__(cls, "cuda", enable_timing=enable_timing)

        def record(self, stream: Any = None) -> None:
            self.recorded_s = time.perf_counter()
            super().record(stream)

        def elapsed_time(self, end_event: Any) -> float:  # which torch's own takes from no other class
            return float(end_event.recorded_s - self.recorded_s) * 1e3

    def get_stream(index: int) -> tuple[int, int, int]:
        index = torch.cuda.current_device() if index < 0 else index
        return device.stream_id(index), index, 1

    def set_stream(stream_id: int, device_index: int, device_type: int) -> None:
        torch.cuda.set_device(device_index)
        device.set_stream(device_index, stream_id)

    own._CudaStreamBase, own._CudaEventBase = _CudaStreamBase, _CudaEventBase
    own._cuda_getCurrentStream, own._cuda_setStream = get_stream, set_stream
    own._cuda_getCurrentRawStream = lambda index: get_stream(index)[0]
    own._cuda_getDefaultStream = lambda index: (0, get_stream(index)[1], 1)
    streams = importlib.reload(torch.cuda.streams)
    torch.cuda.Stream, torch.cuda.Event = streams.Stream, streams.Event  # type: ignore[misc]
    torch.cuda.ExternalStream = streams.ExternalStream  # type: ignore[misc]


def _give_nccl(device: Any) -> None:
    """The backend of that name."""
    import datetime

    import torch.distributed as dist
    from torch.distributed import constants, distributed_c10d

    class Options(types.SimpleNamespace):
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            super().__init__(is_high_priority_stream=is_high_priority_stream, config=types.SimpleNamespace())

    nccl: Any = device.ProcessGroupNCCL
    nccl.Options = Options
    for module in (dist, distributed_c10d, torch._C._distributed_c10d):
        module.ProcessGroupNCCL = nccl
    timeout = datetime.timedelta(minutes=10)
    constants.default_pg_nccl_timeout = distributed_c10d.default_pg_nccl_timeout = timeout
    distributed_c10d._NCCL_AVAILABLE = True
