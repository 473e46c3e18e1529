"""Units: slots, shards of weights and gradients, sharded parameters, and steps of optimizers on them."""
