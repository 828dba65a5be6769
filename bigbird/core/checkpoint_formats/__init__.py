"""Checkpoints as they lie on disk, ours and those of others: tensors, names and settings."""
