"""What passes between ranks."""
