"""2021 checkpoints load through the name map, and what does not fit is told."""

import numpy as np
import pytest
import tensorflow as tf

from bigbird.core import checkpoint
from bigbird.core.modeling import BertModel


def _write(path, tensors):
    """Writes a TF1-format checkpoint of named arrays."""
    prefix = str(path / "model.ckpt-0")
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        variables = [
            tf.compat.v1.get_variable(name, initializer=value) for name, value in tensors.items()
        ]
        session.run(tf.compat.v1.global_variables_initializer())
        tf.compat.v1.train.Saver(variables).save(session, prefix)
    return prefix


def _values(model):
    return {name: np.ones_like(v) for name, v in checkpoint.bert_variables(model).items()}


@pytest.mark.parametrize("norm_type", ["prenorm", "postnorm"])
@pytest.mark.parametrize("use_bias", [True, False])
def test_the_map_names_every_variable_once_and_as_it_is_called(tiny_params, norm_type, use_bias):
    model = BertModel({**tiny_params, "norm_type": norm_type, "use_bias": use_bias})
    mapped = checkpoint.bert_variables(model)
    assert {id(v) for v in mapped.values()} == {id(v) for v in model.variables}
    assert all(variable.name == f"{name}:0" for name, variable in mapped.items())


def test_slots_are_passed_over_and_missing_and_unused_are_listed(tiny_params, tmp_path):
    model = BertModel(tiny_params)
    tensors = _values(model)
    del tensors["bert/pooler/dense/bias"]
    tensors["bert/pooler/dense/kernel/adam_m"] = np.zeros(3, np.float32)
    tensors["bert/pooler/dense/kernel/Adafactor_1"] = np.zeros(3, np.float32)
    tensors["bert/pooler/dense/kernel/vr"] = np.zeros(3, np.float32)
    tensors["global_step"] = np.int64(7)
    tensors["cls/predictions/output_bias"] = np.zeros(3, np.float32)
    report = checkpoint.load_tf1_checkpoint(model, _write(tmp_path, tensors))
    assert report.missing == ("bert/pooler/dense/bias",)
    assert report.unused == ("cls/predictions/output_bias",)
    assert len(report.loaded) == len(model.variables) - 1
    assert "missing 1" in str(report) and "bert/pooler/dense/bias" in str(report)
    np.testing.assert_array_equal(model.pooler.kernel, np.ones([16, 16]))


def test_a_directory_means_its_latest_checkpoint(tiny_params, tmp_path):
    model = BertModel(tiny_params)
    _write(tmp_path, _values(model))
    report = checkpoint.load_tf1_checkpoint(model, str(tmp_path))
    assert len(report.loaded) == len(model.variables)


def test_another_shape_is_refused_and_leaves_the_model_as_it_was(tiny_params, tmp_path):
    model = BertModel(tiny_params)
    tensors = _values(model)
    tensors["bert/embeddings/position_embeddings"] = np.ones([512, 16], np.float32)
    before = model.get_weights()
    with pytest.raises(checkpoint.CheckpointError, match=r"\[512, 16\], model \[1024, 16\]"):
        checkpoint.load_tf1_checkpoint(model, _write(tmp_path, tensors))
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_checkpoint_of_another_scope_is_refused(tiny_params, tmp_path):
    prefix = _write(tmp_path, {"pegasus/embeddings/word_embeddings": np.ones([2, 2], np.float32)})
    with pytest.raises(checkpoint.CheckpointError, match="--scope"):
        checkpoint.load_tf1_checkpoint(BertModel(tiny_params), prefix)


def test_a_path_without_a_checkpoint_and_a_torn_file_are_refused(tiny_params, tmp_path):
    model = BertModel(tiny_params)
    with pytest.raises(checkpoint.CheckpointError, match="no TF1 checkpoint"):
        checkpoint.load_tf1_checkpoint(model, str(tmp_path / "model.ckpt-9"))
    prefix = _write(tmp_path, _values(model))
    index = tmp_path / "model.ckpt-0.index"
    index.write_bytes(index.read_bytes()[:20])
    with pytest.raises(checkpoint.CheckpointError, match="cannot be read"):
        checkpoint.load_tf1_checkpoint(model, prefix)
