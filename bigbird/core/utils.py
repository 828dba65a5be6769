"""The 2021 toolkit's helper names, for code written against them."""

from __future__ import annotations

from bigbird.core.config import BigBirdConfig
from bigbird.core.layers import create_initializer, gelu, get_activation

__all__ = ["create_initializer", "gelu", "get_activation", "get_default_config"]


def get_default_config() -> dict:
    """Returns a new dict of the default model parameters."""
    return BigBirdConfig().to_dict()
