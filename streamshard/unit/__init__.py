"""A unit: its buffers, its shard of weights and gradients, and what gradients are."""
