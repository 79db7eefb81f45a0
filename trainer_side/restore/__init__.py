"""Restore: from the nearest good checkpoint into live tensors."""
