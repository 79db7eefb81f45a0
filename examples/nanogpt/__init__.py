"""A training loop in the shape of nanoGPT's, without holdfast and with it."""
