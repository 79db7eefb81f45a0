"""`python -m flusher`: the same as `holdfast flusher`, for a stager that starts it with its own Python."""

from flusher.command import flusher

if __name__ == "__main__":
    flusher()
