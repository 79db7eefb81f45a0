"""Checkpoints in the store: names, manifests, claims, slices."""
