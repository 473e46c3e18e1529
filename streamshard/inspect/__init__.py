"""Looking at what StreamShard does: memory, races, traces."""
