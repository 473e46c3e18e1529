"""Optimizers: `WholeParameterOptimizer`, elementwise ones on pieces, wrappers around others, averages."""

from streamshard.core.optimizer_kinds import elementwise
from streamshard.optim.averages import update_parameters
from streamshard.optim.whole import WholeParameterOptimizer

__all__ = ["WholeParameterOptimizer", "elementwise", "update_parameters"]
