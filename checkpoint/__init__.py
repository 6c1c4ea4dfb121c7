"""Checkpoints that can be trusted: checked when written, checked when read, committed by one small object."""
