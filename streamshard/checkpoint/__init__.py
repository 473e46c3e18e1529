"""Checkpoints of runs, and weights in the Hugging Face layout: all ranks write and read at once, without a gather."""
