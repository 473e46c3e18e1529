"""What is decided before anything is allocated. No communication: its tests need no ranks."""
