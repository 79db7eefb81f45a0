"""The session: decides which rank may send which chunk, and when. Pure."""
