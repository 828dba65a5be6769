"""Claims about models as distillation sees them: hidden states times head are their logits."""

import importlib

import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from bigbird.core.config import BigBirdConfig
from bigbird.distillation.students import Head, functional_model
from bigbird.distillation.toolkit_models import load_keras_file, new_model

VOCAB_SIZE, WIDTH = 20, 8
IDS = tf.constant([[1, 2, 3, 4], [5, 6, 0, 0]])
LIBRARIES = {"tf_keras": tf_keras, "keras 3": importlib.import_module("keras")}


def small_model(library, tied=False):
    ids = library.Input([None], dtype="int32")
    hidden = library.layers.Embedding(VOCAB_SIZE, WIDTH, name="table")(ids)
    hidden = library.layers.Dense(WIDTH, "tanh", name="body")(hidden)
    return library.Model(ids, hidden if tied else library.layers.Dense(VOCAB_SIZE)(hidden))


def logits_of(model, features):
    return model.head().logits(model.hidden_states(features, False))


def gradients_of(model):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(logits_of(model, {"input_ids": IDS})))
    return tape.gradient(loss, model.trainable_variables)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_functional_model_is_cut_before_its_head(library):
    whole = small_model(LIBRARIES[library])
    model = functional_model(whole)
    np.testing.assert_allclose(logits_of(model, {"input_ids": IDS}), whole(IDS), atol=1e-6)
    assert (model.vocab_size, model.width) == (VOCAB_SIZE, WIDTH)
    assert len(model.trainable_variables) == 5
    assert all(isinstance(v, tf.Variable) for v in model.weights)
    assert all(gradient is not None for gradient in gradients_of(model))


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_tied_table_gets_the_gradients_of_both_its_uses(library):
    body = small_model(LIBRARIES[library], tied=True)
    model = functional_model(body, "table", hidden_layer="body")
    assert len(model.trainable_variables) == 3
    gradients = gradients_of(model)
    table = tf.convert_to_tensor(gradients[0]).numpy()
    # Words that are not read still are words of the head.
    assert np.abs(table[10:]).min() > 0
    assert not np.allclose(table[1], table[10])


def test_the_head_scales_before_it_caps():
    head = Head(tf.constant([[4.0, -8.0]]), tf.constant([1.0, 0.0]), 0.5, 3.0)
    expected = 3 * np.tanh(0.5 * np.array([[4.0 + 1.0, -8.0]]) / 3)
    np.testing.assert_allclose(head.logits(tf.constant([[1.0]])), expected, rtol=1e-6)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_saved_keras_file_is_loaded_by_the_library_that_saved_it(library, tmp_path):
    whole = small_model(LIBRARIES[library])
    whole.save(tmp_path / "teacher.keras")
    model = load_keras_file(str(tmp_path / "teacher.keras"), None, None)
    np.testing.assert_allclose(logits_of(model, {"input_ids": IDS}), whole(IDS), atol=1e-6)
    assert model.fingerprint() == functional_model(whole).fingerprint()


def test_the_fingerprint_follows_the_weights():
    whole = small_model(tf_keras)
    before = functional_model(whole).fingerprint()
    assert before == functional_model(whole).fingerprint()
    whole.weights[-1].assign_add(tf.one_hot(3, VOCAB_SIZE) * 1e-6)
    assert functional_model(whole).fingerprint() != before


def test_the_masked_language_model_gives_the_logits_of_its_head(tiny_params):
    config = BigBirdConfig.from_params(tiny_params)
    model = new_model("masked_lm", config)
    bert, predictions = model.modules
    _, log_probs = predictions(bert(IDS, training=False)[0])
    logits = logits_of(model, {"input_ids": IDS})
    np.testing.assert_allclose(tf.nn.log_softmax(logits), log_probs, atol=1e-5)


def test_the_encoder_decoder_gives_its_logits_of_every_target(tiny_params):
    config = BigBirdConfig.from_params(tiny_params)
    model = new_model("seq2seq", config)
    (transformer,) = model.modules
    targets = tf.constant([[7, 8, 1], [9, 1, 0]])
    (_, logits, _), _ = transformer(IDS, targets, training=True)
    features = {"input_ids": IDS, "target_ids": targets}
    np.testing.assert_allclose(logits_of(model, features), logits, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"head_layer": "nowhere"}, "has no layer 'nowhere'; it has"),
        ({"head_layer": "body"}, "it has the activation tanh"),
        ({"head_layer": "table"}, "name the layer that gives the hidden states"),
    ],
)
def test_what_is_no_head_is_refused(arguments, told):
    with pytest.raises(ValueError, match=told):
        functional_model(small_model(tf_keras), **arguments)


def test_a_task_without_a_model_of_the_toolkit_is_refused(tiny_params, tmp_path):
    with pytest.raises(ValueError, match="give a .keras file"):
        new_model("next_token", BigBirdConfig.from_params(tiny_params))
    (tmp_path / "no.keras").write_text("text")
    with pytest.raises(ValueError, match="is no .keras file"):
        load_keras_file(str(tmp_path / "no.keras"), None, None)
