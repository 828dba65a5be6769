"""Shared fixtures: the recorded reference numbers and tiny model parameters."""

import pathlib

import pytest

REFERENCE = pathlib.Path(__file__).parent / "reference"


@pytest.fixture(scope="session")
def reference_dir():
    """Folder of the numbers recorded from the 2021 toolkit."""
    return REFERENCE / "original"


@pytest.fixture
def tiny_params():
    """Parameters of a model small enough for every test."""
    return {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
        "max_position_embeddings": 1024,
        "max_encoder_length": 640,
        "block_size": 16,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
