"""What concerns optimizers: their state as a whole."""
