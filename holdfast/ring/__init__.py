"""The stager node's shared memory."""
