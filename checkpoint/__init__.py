"""Checkpoints that can be trusted: checked when written, checked when read, committed by one small object."""

from config import TitaniteError


class CheckpointError(TitaniteError):
    """A checkpoint cannot be made, was not found, or does not fit what it is loaded into."""
