"""The user's state as the bytes of one portable file."""
