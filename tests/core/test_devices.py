"""Strategies and precision policies: what is chosen, and that nothing stays behind."""

import pytest
import tensorflow as tf
import tf_keras as keras

from bigbird.core.devices import PRECISIONS, create_strategy, precision_scope


@pytest.mark.parametrize("precision", PRECISIONS)
def test_layers_made_inside_have_the_precision_and_later_ones_have_not(precision):
    with precision_scope(precision):
        assert keras.layers.Dense(1).dtype_policy.name == precision
    assert keras.layers.Dense(1).dtype_policy.name == "float32"


def test_former_precision_comes_back_after_an_error():
    with pytest.raises(RuntimeError), precision_scope("mixed_bfloat16"):
        raise RuntimeError
    assert keras.mixed_precision.global_policy().name == "float32"


def test_one_device_needs_no_strategy():
    assert create_strategy() is tf.distribute.get_strategy()


def test_several_gpus_are_mirrored(monkeypatch):
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda kind: [kind, kind])
    monkeypatch.setattr(tf.distribute, "MirroredStrategy", lambda: "mirrored")
    assert create_strategy() == "mirrored"


def test_tpu_without_a_name_is_refused():
    with pytest.raises(ValueError, match="use_tpu=True needs --tpu_name or --master"):
        create_strategy(use_tpu=True)


def test_tpu_flags_reach_its_resolver(monkeypatch):
    calls = []
    monkeypatch.setattr(
        tf.distribute.cluster_resolver, "TPUClusterResolver", lambda **flags: calls.append(flags)
    )
    monkeypatch.setattr(tf.config, "experimental_connect_to_cluster", lambda resolver: None)
    monkeypatch.setattr(tf.tpu.experimental, "initialize_tpu_system", lambda resolver: None)
    monkeypatch.setattr(tf.distribute, "TPUStrategy", lambda resolver: "tpu")
    assert create_strategy(use_tpu=True, master="grpc://host", tpu_zone="zone") == "tpu"
    assert calls == [{"tpu": "grpc://host", "zone": "zone", "project": None}]
