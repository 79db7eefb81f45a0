"""Data order that goes on exactly."""
