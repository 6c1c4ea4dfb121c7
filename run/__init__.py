"""The life of a run."""
