"""When everything happens: passes, sweeps, and what torch tells of them."""
