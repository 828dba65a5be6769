"""The layouts in which checkpoints lie on disk, ours and those of others, as named tensors."""
