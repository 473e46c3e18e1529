"""When everything happens: passes, their schedules, and what torch tells of them."""
