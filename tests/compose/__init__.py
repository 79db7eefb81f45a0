"""docker-compose.yml as containers of a real Docker engine: `make compose`."""
