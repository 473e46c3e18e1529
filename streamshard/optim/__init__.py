"""Optimizers: `WholeParameterOptimizer`, elementwise ones on pieces, and wrappers around other optimizers."""

from streamshard.optim.whole import WholeParameterOptimizer
from streamshard.unit.optimizer_hooks import elementwise

__all__ = ["WholeParameterOptimizer", "elementwise"]
