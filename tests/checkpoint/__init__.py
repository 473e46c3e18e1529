"""Files and states."""
