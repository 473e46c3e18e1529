"""Optimizers: `WholeParameterOptimizer`, elementwise ones on pieces, and local SGD."""

from streamshard.optim.whole import WholeParameterOptimizer
from streamshard.unit.optimizer_hooks import elementwise

__all__ = ["WholeParameterOptimizer", "elementwise"]
