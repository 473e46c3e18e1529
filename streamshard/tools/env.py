"""What a report of a bug needs: versions, devices and the backend."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterator

import torch
import torch.distributed as dist

from streamshard import __version__
from streamshard.device import accelerator, module_of

_PACKAGES = [
    "accelerate",
    "transformers",
    "trl",
    "peft",
    "lightning",
    "bitsandbytes",
    "torchao",
    "safetensors",
    "numpy",
]
_VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "STREAMSHARD_", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


def describe_environment() -> Iterator[str]:
    """Lines of a name and a value. Packages that are not installed are left out."""
    found = {"streamshard": __version__, "python": platform.python_version(), "os": platform.platform()}
    found["torch"] = f"{torch.__version__} (CUDA {torch.version.cuda}, ROCm {torch.version.hip})"
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    kind = accelerator() or "cpu"
    if kind != "cpu":
        module = module_of(torch.device(kind))
        names = [module.get_device_name(index) for index in range(module.device_count())]
        found["devices"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    if kind == "cuda":
        found["NCCL"] = ".".join(map(str, module.nccl.version()))
    found["cores"] = str(os.cpu_count())
    found["backend"] = f"{dist.get_default_backend_for_device(kind)} for {kind}"
    found |= {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}
    return (f"{name:<20}{value}" for name, value in found.items())
