"""Sharded models on disk: the Hugging Face layout, written and read by all ranks at once, without a gather."""
