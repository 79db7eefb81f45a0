"""From the nearest good checkpoint into live tensors."""
