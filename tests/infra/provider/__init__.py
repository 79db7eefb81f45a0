"""A stand-in for the AWS provider that knows its schema and nothing else; see schema.py and serve.py."""
