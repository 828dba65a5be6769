"""Offline distillation: the teacher's top-K logits, the losses, the cache and the trainer."""
