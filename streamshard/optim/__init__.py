"""Optimizers: `WholeParameterOptimizer`, elementwise ones on pieces, wrappers around others."""

from streamshard.core.optimizer_kinds import elementwise
from streamshard.optim.whole import WholeParameterOptimizer

__all__ = ["WholeParameterOptimizer", "elementwise"]
