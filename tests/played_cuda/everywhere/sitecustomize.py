"""With this directory in PYTHONPATH, every Python process has PLAYED_CUDA_DEVICES devices from its start."""

import os

devices = int(os.environ.get("PLAYED_CUDA_DEVICES", "0"))
if devices and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    from tests.played_cuda import play

    play(devices)
