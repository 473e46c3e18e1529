"""Weights that are absent or written, torch's operations on pieces, changes of modules, and training loops."""
