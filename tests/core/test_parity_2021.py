"""Outputs and gradients equal those recorded from the 2021 toolkit, weights read by the map.

Tolerances: both sides are float32 sums in different orders; 2e-5 of the largest value for
outputs and 1e-4 relative for gradients are a few hundred rounding errors.
"""

import json

import numpy as np
import pytest
import tensorflow as tf

from bigbird.core import attention, checkpoint
from bigbird.core.modeling import BertModel

MODELS = ("bert_original_full", "bert_postnorm_block_sparse", "bert_prenorm_block_sparse")


def _close(actual, expected, tolerance):
    expected = np.asarray(expected)
    np.testing.assert_allclose(
        actual, expected, rtol=0, atol=tolerance * max(np.abs(expected).max(), 1e-30)
    )


def _load(folder, **changes):
    params = json.loads((folder / "config.json").read_text())
    model = BertModel({**params, **changes})
    report = checkpoint.load_tf1_checkpoint(model, str(folder / "ckpt" / "model.ckpt-0"))
    assert not report.missing and not report.unused
    return model, np.load(folder / "io.npz")


@pytest.mark.parametrize("recompute", [False, True], ids=["plain", "recomputed"])
@pytest.mark.parametrize("name", MODELS)
def test_model_outputs_and_gradients_equal_the_recorded_ones(reference_dir, name, recompute):
    model, recorded = _load(reference_dir / name, use_gradient_checkpointing=recompute)
    input_ids = tf.constant(recorded["input_ids"])
    real = recorded["input_ids"] > 0

    @tf.function
    def forward_backward():
        with tf.GradientTape() as tape:
            sequence, pooled = model(input_ids, recorded["token_type_ids"], training=True)
            squares = sequence**2 * tf.cast(real, tf.float32)[..., None]
            loss = tf.reduce_sum(squares) / 100 + tf.reduce_sum(pooled)
        return sequence, pooled, loss, tape.gradient(loss, model.trainable_variables)

    sequence, pooled, loss, gradients = forward_backward()
    _close(sequence.numpy()[real], recorded["sequence_output"][real], 2e-5)
    _close(pooled, recorded["pooled_output"], 2e-5)
    _close(loss, recorded["loss"], 2e-5)
    expected = {key: recorded[key] for key in recorded.files if key.startswith("grad/")}
    largest = max(np.abs(value).max() for value in expected.values())
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        value = expected.pop(f"grad/{variable.name[:-2]}")
        if variable.name.endswith("key/bias:0"):
            # It moves all scores of a query alike, so its gradient is zero but for rounding.
            assert np.abs(gradient).max() < 1e-6 * largest
        else:
            _close(tf.convert_to_tensor(gradient), value, 1e-4)
    assert not expected


@pytest.mark.parametrize("name", MODELS)
def test_variables_bear_their_checkpoint_names_as_the_2021_notebooks_expect(reference_dir, name):
    folder = reference_dir / name
    model = BertModel(json.loads((folder / "config.json").read_text()))
    reader = tf.train.load_checkpoint(str(folder / "ckpt" / "model.ckpt-0"))
    model.set_weights([reader.get_tensor(v.name[:-2]) for v in model.trainable_weights])
    recorded = np.load(folder / "io.npz")
    sequence, _ = model(recorded["input_ids"], recorded["token_type_ids"])
    real = recorded["input_ids"] > 0
    _close(sequence.numpy()[real], recorded["sequence_output"][real], 2e-5)


@pytest.mark.parametrize("jit_compile", [False, True], ids=["graph", "xla"])
@pytest.mark.parametrize("case", [0, 1, 2])
def test_block_sparse_attention_equals_the_recorded_case(reference_dir, case, jit_compile):
    recorded = np.load(reference_dir / "block_sparse_attention.npz")

    def read(name):
        return recorded[f"case{case}_{name}"]

    size, mask = int(read("block_size")), read("mask")
    length = mask.shape[1]
    blocked = mask.reshape(-1, length // size, size)

    @tf.function(jit_compile=jit_compile)
    def forward_backward(query, key, value):
        with tf.GradientTape() as tape:
            tape.watch([query, key, value])
            output = attention.bigbird_block_sparse_attention(
                query,
                key,
                value,
                attention.create_band_mask_from_inputs(blocked, blocked),
                mask[:, None, :, None],
                mask[:, None, None, :],
                blocked,
                blocked,
                read("rand_attn"),
                query.shape[1],
                query.shape[3],
                read("rand_attn").shape[2],
                length,
                length,
                size,
                size,
            )
            total = tf.reduce_sum(output * read("upstream"))
        return output, tape.gradient(total, [query, key, value])

    output, gradients = forward_backward(
        tf.constant(read("query")), tf.constant(read("key")), tf.constant(read("value"))
    )
    _close(output, read("output"), 2e-5)
    for name, gradient in zip(("query", "key", "value"), gradients, strict=True):
        _close(gradient, read(f"d{name}"), 1e-4)
