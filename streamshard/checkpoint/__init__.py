"""Checkpoints of runs, and weights in the Hugging Face layout: each rank writes and reads its own part."""
