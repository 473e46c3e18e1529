"""Optimizers: any one on whole parameters, those that work element by element, and wrappers around others."""

from streamshard.optim.whole import WholeParameterOptimizer
from streamshard.unit.optimizer_hooks import elementwise

__all__ = ["WholeParameterOptimizer", "elementwise"]
