"""What we write, Hugging Face's library reads and computes alike, where it is installed.

The library runs in a process of its own, by this interpreter or by that of $BIGBIRD_TORCH_PYTHON:
PyTorch and TensorFlow in one process can crash each other.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from bigbird.core import checkpoint
from bigbird.core.modeling import BertModel, TransformerModel
from bigbird.pretrain.heads import MaskedLMLayer, NSPLayer

PYTHON = os.environ.get("BIGBIRD_TORCH_PYTHON", sys.executable)
# Float32 sums in different orders; logits are sums of 32 products with a table of deviation 0.3.
TOLERANCE = 5e-5
LENGTHS = [(400, 16), (640, 64), (768, 64), (1024, 64), (2048, 64), (3072, 64), (4096, 64)]

# In training mode, whose attention has the random blocks; all dropout is 0.
PROGRAM = """
import json, sys
import numpy as np, torch, transformers

for directory in sys.argv[1:]:
    name = json.load(open(f"{directory}/config.json"))["architectures"][0]
    model, report = getattr(transformers, name).from_pretrained(directory, output_loading_info=True)
    assert not any(report.values()), report
    inputs = {k: torch.tensor(v).long() for k, v in np.load(f"{directory}/inputs.npz").items()}
    with torch.no_grad():
        outputs = model.train()(**inputs)
    arrays = {k: v.numpy() for k, v in outputs.items() if isinstance(v, torch.Tensor)}
    np.savez(f"{directory}/outputs.npz", **arrays)
"""


def _has_the_library():
    command = [PYTHON, "-c", "import torch, transformers"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.fixture(scope="module")
def run_library():
    """Computes the outputs of directories with `inputs.npz`."""
    if not _has_the_library():
        pytest.skip(reason=f"{PYTHON} cannot import torch and transformers")

    def run(directories):
        command = [PYTHON, "-c", PROGRAM, *map(str, directories)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-3000:]
        return [np.load(directory / "outputs.npz") for directory in directories]

    return run


def _params(**changes):
    return {
        "vocab_size": 90,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
        "max_encoder_length": 4096,
        "pattern_length": "input",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.3,
        **changes,
    }


def _ids(length, padding):
    ids = np.random.default_rng(length).integers(1, 90, [2, length], np.int32)
    ids[1, length - padding :] = 0
    return ids


def test_encoders_give_the_same_numbers_at_every_kind_of_length(run_library, tmp_path):
    expected, directories = [], []
    for length, block_size in LENGTHS:
        model = BertModel(_params(block_size=block_size))
        heads = {
            "masked_lm": MaskedLMLayer(32, 90, model.embeddings, activation_fn="gelu"),
            "next_sentence": NSPLayer(32),
        }
        directory = tmp_path / str(length)
        checkpoint.save_safetensors(model, str(directory), heads)
        ids = _ids(length, padding=100)
        np.savez(directory / "inputs.npz", input_ids=ids, attention_mask=ids > 0)
        sequence, pooled = model(ids)
        logits = heads["masked_lm"].logits(sequence).numpy()
        expected.append((ids > 0, logits, heads["next_sentence"].logits(pooled).numpy()))
        directories.append(directory)
    for ours, theirs in zip(expected, run_library(directories), strict=True):
        real, logits, next_sentence = ours
        np.testing.assert_allclose(
            logits[real], theirs["prediction_logits"][real], rtol=0, atol=10 * TOLERANCE
        )
        np.testing.assert_allclose(
            next_sentence, theirs["seq_relationship_logits"], rtol=0, atol=TOLERANCE
        )


def test_encoder_decoders_give_the_same_numbers(run_library, tmp_path):
    expected, directories = [], []
    for use_bias in (False, True):
        model = TransformerModel(
            _params(
                norm_type="prenorm",
                block_size=16,
                use_bias=use_bias,
                rescale_embedding=True,
                layer_norm_epsilon=1e-5,
                own_decoder_positions=True,
                num_decoder_layers=3,
                scope="pegasus",
            )
        )
        directory = tmp_path / f"bias_{use_bias}"
        checkpoint.save_safetensors(model, str(directory))
        ids, targets = _ids(640, padding=100), _ids(12, padding=0)
        shifted = np.concatenate([[[2], [2]], targets[:, :-1]], axis=1)
        np.savez(
            directory / "inputs.npz",
            input_ids=ids,
            attention_mask=ids > 0,
            decoder_input_ids=shifted,
        )
        hidden, _ = model.hidden_states(tf.constant(ids), tf.constant(targets))
        expected.append(model.vocabulary_logits(hidden).numpy())
        directories.append(directory)
    for ours, theirs in zip(expected, run_library(directories), strict=True):
        np.testing.assert_allclose(ours, theirs["logits"], rtol=0, atol=10 * TOLERANCE)


def test_recorded_models_give_their_recorded_numbers_after_a_round_trip(
    run_library, hf_dir, tmp_path
):
    directories, recorded = [], []
    for name in ("hf_bigbird", "hf_bigbird_pegasus"):
        config = checkpoint.config_from_pretrained(str(hf_dir / name))
        model, heads = TransformerModel(config), {}
        if name == "hf_bigbird":
            model = BertModel(config)
            heads = {
                "masked_lm": MaskedLMLayer(32, 120, model.embeddings),
                "next_sentence": NSPLayer(32),
            }
        checkpoint.load_safetensors(model, str(hf_dir / name), heads)
        checkpoint.save_safetensors(model, str(tmp_path / name), heads)
        record = np.load(hf_dir / name / "io.npz")
        names = ("input_ids", "token_type_ids", "decoder_input_ids")
        inputs = {key: record[key] for key in names if key in record}
        np.savez(tmp_path / name / "inputs.npz", **inputs, attention_mask=record["input_ids"] > 0)
        directories.append(tmp_path / name)
        recorded.append(record)
    encoder, decoder = run_library(directories)
    positions = recorded[0]["positions"]
    np.testing.assert_allclose(
        encoder["prediction_logits"][:, positions],
        recorded[0]["train/prediction_logits"],
        rtol=0,
        atol=TOLERANCE,
    )
    np.testing.assert_allclose(decoder["logits"], recorded[1]["logits"], rtol=0, atol=TOLERANCE)
    assert json.loads((tmp_path / "hf_bigbird" / "config.json").read_text())["architectures"] == [
        "BigBirdForPreTraining"
    ]
