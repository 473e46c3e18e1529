"""Whole training steps, compared with plain PyTorch and DDP."""
