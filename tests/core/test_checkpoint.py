"""Checkpoints of every kind are recognised and load; what does not fit is told."""

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from bigbird.classifier.run_classifier import ClassifierLossLayer
from bigbird.core import checkpoint
from bigbird.core.callbacks import Checkpoints
from bigbird.core.checkpoint_formats.name_maps import named_variables
from bigbird.core.layers import FirstTokenTransform
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
    named = named_variables(model, "tf1")
    return {name: np.ones(row.stored_shape, np.float32) for name, row in named.items()}


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
    with pytest.raises(checkpoint.CheckpointError, match="no checkpoint there"):
        checkpoint.load_tf1_checkpoint(model, str(tmp_path / "model.ckpt-9"))
    prefix = _write(tmp_path, _values(model))
    index = tmp_path / "model.ckpt-0.index"
    index.write_bytes(index.read_bytes()[:20])
    with pytest.raises(checkpoint.CheckpointError, match="cannot be read"):
        checkpoint.load_tf1_checkpoint(model, prefix)


class _Run(keras.Model):
    """What a training run saves: a model with heads and, beside them, an optimizer's state."""

    def __init__(self, params):
        super().__init__()
        self.bert = BertModel(params)
        self.transform = FirstTokenTransform(16, name="bert/classifier/transform")
        self.classifier = ClassifierLossLayer(16, 3, name="bert/classifier")
        self.heads = {"classifier_transform": self.transform, "classifier": self.classifier}
        self.compile(keras.optimizers.Adam())
        self.optimizer.build(self.bert.trainable_variables)

    def call(self, ids):
        return self.classifier(self.transform(self.bert(ids)[0]))[1]


class _Export(tf.Module):
    def __init__(self, variables):
        super().__init__()
        self.exported_variables = variables


@pytest.fixture(params=["2021", "directory", "run", "checkpoint", "SavedModel", "Hugging Face"])
def saved_model(request, tiny_params, tmp_path):
    """A run and the path of a checkpoint of it, of every kind, with what it is recognised as."""
    run = _Run({**tiny_params, "pattern_length": "input"})
    if request.param in ("2021", "directory"):
        checkpoint.save_tf1_checkpoint(run.bert, str(tmp_path / "model.ckpt-0"), run.heads)
        path = tmp_path / "model.ckpt-0" if request.param == "2021" else tmp_path
        return run, path, "TensorFlow checkpoint"
    if request.param in ("run", "checkpoint"):
        checkpoints = Checkpoints(run, str(tmp_path / "checkpoints"), keep=2)
        checkpoints.save(1)
        checkpoints.save(20)
        if request.param == "run":
            return run, tmp_path, "Training run, step 20"
        return run, tmp_path / "checkpoints" / "step_20", "Checkpoint of a training run"
    if request.param == "SavedModel":
        tf.saved_model.save(_Export(run.variables), str(tmp_path))
        return run, tmp_path, "SavedModel"
    checkpoint.save_safetensors(run.bert, str(tmp_path), run.heads)
    return run, tmp_path, "Hugging Face safetensors"


def test_initial_weights_come_from_every_kind_of_checkpoint(saved_model):
    run, path, kind = saved_model
    other = _Run(run.bert.config)
    report = checkpoint.load_initial_weights(other.bert, str(path), other.heads)
    assert report.source.startswith(f"{kind}: {path}") and kind in str(report)
    assert not report.missing and not report.mismatched and not report.unused
    for old, new in zip(run.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_another_path_is_told_what_could_be_there(tiny_params, tmp_path):
    model = BertModel(tiny_params)
    for path in (tmp_path / "nowhere", tmp_path / "model.ckpt-1"):
        with pytest.raises(checkpoint.CheckpointError, match="expected a 2021 checkpoint"):
            checkpoint.load_initial_weights(model, str(path))


def test_pickles_are_refused_and_never_read(tiny_params, tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    with pytest.raises(checkpoint.CheckpointError, match="a pickle"):
        checkpoint.load_initial_weights(BertModel(tiny_params), str(tmp_path))


def test_a_longer_position_table_repeats_the_checkpoints_rows(tiny_params, tmp_path):
    short = BertModel({**tiny_params, "max_position_embeddings": 300, "max_encoder_length": 300})
    prefix = str(tmp_path / "model.ckpt-0")
    checkpoint.save_tf1_checkpoint(short, prefix)
    model = BertModel(tiny_params)
    with pytest.raises(checkpoint.CheckpointError, match="--extend_positions"):
        checkpoint.load_initial_weights(model, prefix)
    report = checkpoint.load_initial_weights(model, prefix, extend_positions=True)
    assert report.extended == ("bert/embeddings/position_embeddings",)
    assert "extended 1" in str(report)
    table = short.embeddings.position_embeddings.numpy()
    np.testing.assert_array_equal(
        model.embeddings.position_embeddings, np.concatenate([table] * 4)[:1024]
    )


def test_names_that_may_differ_keep_their_initial_values(tiny_params, tmp_path):
    run = _Run(tiny_params)
    prefix = str(tmp_path / "model.ckpt-0")
    checkpoint.save_tf1_checkpoint(run.bert, prefix, run.heads)
    model = BertModel(tiny_params)
    head = ClassifierLossLayer(16, 5, name="bert/classifier")
    before = head.get_weights()
    heads = {**run.heads, "classifier": head}
    with pytest.raises(checkpoint.CheckpointError, match="--ignore_mismatched"):
        checkpoint.load_initial_weights(model, prefix, heads)
    report = checkpoint.load_initial_weights(
        model, prefix, heads, ignore_mismatched=["bert/classifier/[bk]*"]
    )
    assert report.mismatched == (
        "bert/classifier/bias: checkpoint [3], model [5]",
        "bert/classifier/kernel: checkpoint [16, 3], model [16, 5]",
    )
    for old, new in zip(before, head.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    np.testing.assert_array_equal(model.pooler.kernel, run.bert.pooler.kernel)


def test_tensors_that_are_no_floating_point_are_refused_and_leave_the_model(tiny_params, tmp_path):
    model = BertModel(tiny_params)
    tensors = _values(model)
    tensors["bert/pooler/dense/bias"] = np.ones([16], np.int32)
    before = model.get_weights()
    with pytest.raises(checkpoint.CheckpointError, match="bert/pooler/dense/bias has the type"):
        checkpoint.load_initial_weights(model, _write(tmp_path, tensors))
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_truncated_data_file_is_told(tiny_params, tmp_path):
    model = BertModel(tiny_params)
    prefix = _write(tmp_path, _values(model))
    data = tmp_path / "model.ckpt-0.data-00000-of-00001"
    data.write_bytes(data.read_bytes()[:5000])
    with pytest.raises(checkpoint.CheckpointError, match="cannot be read"):
        checkpoint.load_initial_weights(model, prefix)


def test_an_unknown_head_is_told(tiny_params, tmp_path):
    model = BertModel(tiny_params)
    prefix = _write(tmp_path, _values(model))
    with pytest.raises(ValueError, match="expected keys from classifier"):
        checkpoint.load_initial_weights(model, prefix, {"pooler": model.pooler})
