"""BigBird for TensorFlow: long documents and offline distillation in the memory people have."""

__version__ = "0.1.0"
