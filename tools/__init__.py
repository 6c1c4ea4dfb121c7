"""Commands that no training step needs. They may import anything; only tests and benchmarks import them."""
