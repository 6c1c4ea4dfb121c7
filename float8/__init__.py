"""Float8 training by torchao."""
