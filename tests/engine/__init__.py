"""The engine, and what it knows about."""
