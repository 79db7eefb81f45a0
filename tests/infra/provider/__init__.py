"""A stand-in for the AWS provider with its schema and no other function; see schema.py and serve.py."""
