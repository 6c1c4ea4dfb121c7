"""Parallelism for any model: one file per kind."""
