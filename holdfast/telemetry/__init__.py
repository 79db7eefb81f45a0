"""Events, metrics, spans and the status of a running process."""
