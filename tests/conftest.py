"""Shared fixtures: recorded numbers, tiny model parameters, a tiny vocabulary, data files."""

import csv
import json
import pathlib

import hypothesis
import pytest
import tensorflow as tf

from bigbird.core.corpora import builtin_documents

# The same examples in every run: a test that fails once fails again.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")

WORDS = "attention block sparse dense matrix memory gradient layer token window".split()
REFERENCE = pathlib.Path(__file__).parent / "reference"


@pytest.fixture(scope="session")
def reference_dir():
    """Folder of the numbers recorded from the 2021 toolkit."""
    return REFERENCE / "original"


@pytest.fixture(scope="session")
def hf_dir():
    """Folders of small models, weights and outputs, recorded from Hugging Face's library.

    Outputs are those of its training mode with dropout 0; of a sequence, those at `positions`.
    """
    return REFERENCE / "hf"


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


@pytest.fixture(scope="session")
def vocabulary_file(tmp_path_factory):
    """A SentencePiece model of about 120 pieces with the 2021 special ids."""
    texts = [" ".join(WORDS[i:] + WORDS[:i]) for i in range(len(WORDS))]
    path = tmp_path_factory.mktemp("vocabulary") / "tiny.model"
    path.write_bytes(builtin_documents.train_vocabulary(texts, vocab_size=120))
    return str(path)


@pytest.fixture
def write_tfrecord():
    """Writes dicts of strings, bytes and integers as a TFRecord file of `tf.train.Example`."""

    def write(path, records):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in records:
                features = {name: _feature(value) for name, value in record.items()}
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())

    return write


@pytest.fixture
def write_jsonl():
    """Writes dicts as a JSONL file."""

    def write(path, records):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    return write


@pytest.fixture
def write_csv():
    """Writes dicts of equal keys as a CSV file."""

    def write(path, records):
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, records[0].keys())
            writer.writeheader()
            writer.writerows(records)

    return write


def _feature(value):
    if isinstance(value, int):
        return tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
    value = value if isinstance(value, bytes) else value.encode()
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
