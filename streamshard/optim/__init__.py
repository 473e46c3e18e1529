"""Optimizers: `WholeParameterOptimizer`, elementwise ones on pieces, wrappers around others, averages."""

from streamshard.optim.averages import update_parameters
from streamshard.optim.whole import WholeParameterOptimizer
from streamshard.unit.optimizer_hooks import elementwise

__all__ = ["WholeParameterOptimizer", "elementwise", "update_parameters"]
