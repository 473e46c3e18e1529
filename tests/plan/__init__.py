"""What is planned."""
