"""Tests of `streamshard.optim`."""
