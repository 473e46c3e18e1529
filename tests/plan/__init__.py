"""Tests of `streamshard.plan`."""
