"""Parts of `python -m benchmarks growth`: each drives one real part of the product as a large job would."""
