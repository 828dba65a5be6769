"""TransformerModel: the numbers of 2021, decoding that equals scoring, all modes, bad input."""

import json

import numpy as np
import pytest
import tensorflow as tf
import tf_keras as keras

from bigbird.core import beam_search, checkpoint
from bigbird.core.beam_search import DecodingOptions
from bigbird.core.modeling import TransformerModel
from bigbird.core.recompute_grad import RecomputeContext

RECORDED = ("seq2seq_prenorm_pegasus", "seq2seq_postnorm_coupled")


@pytest.fixture
def params(tiny_params):
    """Parameters of a tiny encoder-decoder whose logits lie well apart."""
    return {
        **tiny_params,
        "max_encoder_length": 32,
        "max_position_embeddings": 64,
        "max_decoder_length": 8,
        "initializer_range": 0.5,
        "num_hidden_layers": 1,
        "num_decoder_layers": 2,
        "norm_type": "prenorm",
        "attention_type": "original_full",
    }


@pytest.fixture(autouse=True)
def _small_capacity(monkeypatch):
    """The cache grows once in a text of eight tokens."""
    monkeypatch.setattr(beam_search, "FIRST_CAPACITY", 4)


def _documents(batch=3, length=20, vocab_size=50):
    ids = np.random.default_rng(0).integers(3, vocab_size, [batch, length], np.int32)
    ids[1:, length - 6 :] = 0
    return tf.constant(ids)


def _close(actual, expected, tolerance):
    expected = np.asarray(expected)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


# ------------------------------------------------------------------------------ parity with 2021


def _load(folder, **changes):
    params = json.loads((folder / "config.json").read_text())
    model = TransformerModel({**params, **changes})
    report = checkpoint.load_tf1_checkpoint(model, str(folder / "ckpt" / "model.ckpt-0"))
    assert not report.missing and not report.unused
    assert len(report.loaded) == len(model.variables)
    return model, np.load(folder / "io.npz")


@pytest.mark.parametrize(
    ("name", "recompute"), [(RECORDED[0], False), (RECORDED[0], True), (RECORDED[1], True)]
)
def test_outputs_and_gradients_equal_the_recorded_ones(reference_dir, name, recompute):
    model, recorded = _load(reference_dir / name, use_gradient_checkpointing=recompute)
    input_ids, target_ids = (tf.constant(recorded[k]) for k in ("input_ids", "target_ids"))
    is_text = tf.cast(target_ids > 0, tf.float32)

    @tf.function
    def forward_backward():
        with tf.GradientTape() as tape:
            (log_probs, logits, pred_ids), encoded = model(input_ids, target_ids, training=True)
            loss = -tf.reduce_sum(log_probs) / tf.reduce_sum(is_text)
        gradients = tape.gradient(loss, model.trainable_variables)
        return log_probs, logits, pred_ids, encoded, loss, gradients

    log_probs, logits, pred_ids, encoded, loss, gradients = forward_backward()
    # Sums of float32 in another order.
    np.testing.assert_allclose(log_probs, recorded["log_probs"], atol=5e-5)
    np.testing.assert_allclose(logits, recorded["logits"], atol=5e-5)
    np.testing.assert_allclose(loss, recorded["loss"], atol=5e-5)
    real = recorded["input_ids"] > 0
    np.testing.assert_allclose(encoded.numpy()[real], recorded["encoder_output"][real], atol=5e-5)
    np.testing.assert_array_equal(pred_ids, recorded["logits"].argmax(-1))
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


def _until_eos(ids):
    ids = list(ids)
    return ids[: ids.index(1) + 1] if 1 in ids else ids


@pytest.mark.parametrize("name", RECORDED)
def test_decoded_ids_equal_the_recorded_ones(reference_dir, name):
    model, recorded = _load(reference_dir / name)
    for beam_size in (1, 4):
        options = model.decoding_options(beam_size=beam_size)
        ids = model.generate(recorded["input_ids"], options).ids.numpy()
        for actual, expected in zip(ids, recorded[f"pred_ids_beam{beam_size}"], strict=True):
            assert _until_eos(actual) == _until_eos(expected)


# ------------------------------------------------------------------------------ decoding


def _teacher_forced(model, documents, ids):
    encoded, mask = model.encode(documents)
    return model.vocabulary_logits(model.decode(ids, encoded, mask)).numpy()


@pytest.mark.parametrize("norm_type", ["prenorm", "postnorm"])
@pytest.mark.parametrize("couple", [False, True], ids=["apart", "coupled"])
def test_greedy_is_the_chain_of_likeliest_tokens_at_every_length(params, norm_type, couple):
    depth = None if couple else 2
    model = TransformerModel(
        {
            **params,
            "norm_type": norm_type,
            "couple_encoder_decoder": couple,
            "num_decoder_layers": depth,
        }
    )
    documents = _documents()
    ids = model.generate(documents, DecodingOptions(max_length=8, min_length=8)).ids
    for length in range(1, 9):
        logits = _teacher_forced(model, documents, ids[:, :length])[:, -1]
        logits[:, 1] = -np.inf
        np.testing.assert_array_equal(logits.argmax(-1), ids[:, length - 1])


@pytest.mark.parametrize("beam_size", [1, 4])
def test_the_score_of_a_text_is_its_log_probability_by_teacher_forcing(params, beam_size):
    model = TransformerModel(params)
    documents = _documents()
    decoded = model.generate(documents, DecodingOptions(beam_size, max_length=8, alpha=0.8))
    log_probs = tf.nn.log_softmax(_teacher_forced(model, documents, decoded.ids))
    picked = tf.gather(log_probs, decoded.ids, batch_dims=2).numpy()
    for row in range(3):
        length = len(_until_eos(decoded.ids[row].numpy()))
        score = picked[row, :length].sum() / ((5 + length) / 6) ** 0.8
        np.testing.assert_allclose(decoded.scores[row], score, rtol=1e-4)


def test_a_call_without_targets_scores_what_it_decodes(params):
    model = TransformerModel({**params, "beam_size": 2})
    documents = _documents()
    (log_probs, logits, pred_ids), encoded = model(documents)
    np.testing.assert_array_equal(pred_ids, model.generate(documents).ids)
    assert logits.shape == [3, 8, 50] and encoded.shape == [3, 20, 16]
    expected = tf.gather(tf.nn.log_softmax(logits), pred_ids, batch_dims=2)
    expected = tf.where(pred_ids > 0, expected, 0.0)
    np.testing.assert_allclose(log_probs, expected, atol=1e-5)


def test_a_call_with_targets_scores_them_and_decodes(params):
    model = TransformerModel({**params, "beam_size": 2})
    documents, targets = _documents(), _documents()[:, :6]
    (log_probs, logits, pred_ids), _ = model(documents, targets)
    (trained_log_probs, trained_logits, likeliest), _ = model(documents, targets, training=True)
    np.testing.assert_array_equal(log_probs, trained_log_probs)
    np.testing.assert_array_equal(logits, trained_logits)
    np.testing.assert_array_equal(likeliest, logits.numpy().argmax(-1))
    np.testing.assert_array_equal(pred_ids, model.generate(documents).ids)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_compiled_by_xla_it_finds_the_same_texts(params, beam_size):
    model = TransformerModel(params)
    options = DecodingOptions(
        beam_size, max_length=8, no_repeat_ngram_size=2, repetition_penalty=1.5, min_length=2
    )
    compiled = tf.function(lambda ids: model.generate(ids, options), jit_compile=True)
    documents = _documents()
    decoded, expected = compiled(documents), model.generate(documents, options)
    np.testing.assert_array_equal(decoded.ids, expected.ids)
    np.testing.assert_allclose(decoded.scores, expected.scores, rtol=1e-5)


def test_samples_are_the_same_with_and_without_xla_and_differ_between_seeds(params):
    model = TransformerModel({**params, "initializer_range": 0.1})
    documents = _documents()

    def draw(seed):
        options = DecodingOptions(sample=True, top_k=20, top_p=0.9, seed=seed, max_length=8)
        return model.generate(documents, options).ids.numpy()

    np.testing.assert_array_equal(draw(1), draw(1))
    assert (draw(1) != draw(2)).any()
    options = DecodingOptions(sample=True, top_k=20, top_p=0.9, seed=1, max_length=8)
    compiled = tf.function(lambda ids: model.generate(ids, options).ids, jit_compile=True)
    np.testing.assert_array_equal(compiled(documents), draw(1))


def test_batch_and_length_may_be_unknown_in_a_graph(params):
    model = TransformerModel(params)
    options = DecodingOptions(3, max_length=8)
    graph = tf.function(
        lambda ids: model.generate(ids, options).ids,
        input_signature=[tf.TensorSpec([None, None], tf.int32)],
    )
    for batch, length in [(1, 32), (3, 9), (2, 17)]:
        documents = _documents(batch, length)
        np.testing.assert_array_equal(graph(documents), model.generate(documents, options).ids)


class _Summarizer(tf.Module):
    """What a task exports."""

    def __init__(self, model, options):
        super().__init__()
        self.model, self.options = model, options

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.int32)])
    def serve(self, input_ids):
        decoded = self.model.generate(input_ids, self.options)
        return {"ids": decoded.ids, "scores": decoded.scores}


def test_an_export_decodes(params, tmp_path):
    model = TransformerModel(params)
    options = DecodingOptions(3, max_length=8, no_repeat_ngram_size=2)
    model(_documents(), _documents()[:, :8])  # Keras saves models that have been called
    tf.saved_model.save(_Summarizer(model, options), str(tmp_path))
    loaded = tf.saved_model.load(str(tmp_path))
    for batch in (1, 3):
        documents = _documents(batch)
        expected = model.generate(documents, options)
        served = loaded.signatures["serving_default"](documents)
        np.testing.assert_array_equal(served["ids"], expected.ids)
        np.testing.assert_allclose(served["scores"], expected.scores, rtol=1e-5)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_decodes_what_it_scores(params, policy):
    expected = TransformerModel(params)
    keras.mixed_precision.set_global_policy(policy)
    try:
        model = TransformerModel(params)
    finally:
        keras.mixed_precision.set_global_policy("float32")
    model.set_weights(expected.get_weights())
    documents = _documents()
    hidden, _ = model.hidden_states(documents, documents[:, :8])
    assert hidden.dtype == model.compute_dtype
    close, _ = expected.hidden_states(documents, documents[:, :8])
    # Eight bits of mantissa through three layers, of values around 1.
    np.testing.assert_allclose(tf.cast(hidden, tf.float32), close, atol=0.2)
    for beam_size in (1, 3):
        decoded = model.generate(documents, DecodingOptions(beam_size, max_length=8, alpha=0.0))
        assert decoded.scores.dtype == tf.float32
        log_probs = tf.nn.log_softmax(_teacher_forced(model, documents, decoded.ids).astype("f4"))
        picked = tf.gather(log_probs, decoded.ids, batch_dims=2).numpy()
        for row in range(3):
            length = len(_until_eos(decoded.ids[row].numpy()))
            np.testing.assert_allclose(decoded.scores[row], picked[row, :length].sum(), atol=0.5)


def test_an_empty_document_gets_a_finite_text(params):
    model = TransformerModel(params)
    documents = tf.concat([_documents(1), tf.zeros([1, 20], tf.int32)], axis=0)
    decoded = model.generate(documents, DecodingOptions(2, max_length=8))
    assert np.isfinite(decoded.scores).all()
    alone = model.generate(documents[:1], DecodingOptions(2, max_length=8))
    np.testing.assert_array_equal(decoded.ids[:1], alone.ids)


# ------------------------------------------------------------------------------ training


@pytest.mark.parametrize("policy", ["full", "every_n", "attention"])
def test_recomputation_changes_neither_loss_nor_gradients(params, policy):
    params = {**params, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
    model = TransformerModel(params)
    recomputed = TransformerModel({**params, "gradient_checkpointing_policy": policy})
    recomputed.set_weights(model.get_weights())
    documents, targets = _documents(), _documents()[:, :8]

    def forward_backward(network):
        @tf.function
        def run():
            with RecomputeContext(seed=tf.constant([1, 2])), tf.GradientTape() as tape:
                (log_probs, _, _), _ = network(documents, targets, training=True)
                loss = -tf.reduce_mean(log_probs)
            return loss, tape.gradient(loss, network.trainable_variables)

        return run()

    loss, gradients = forward_backward(model)
    other_loss, other_gradients = forward_backward(recomputed)
    np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
    gradients, other_gradients = (
        [tf.convert_to_tensor(gradient).numpy() for gradient in of_all]
        for of_all in (gradients, other_gradients)
    )
    # Those of the keys' biases are zero but for rounding, so the largest one is the measure.
    largest = max(np.abs(gradient).max() for gradient in gradients)
    for actual, expected in zip(other_gradients, gradients, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-6, atol=2e-6 * largest)


def test_attention_dropout_reaches_the_decoder(params):
    model = TransformerModel({**params, "attention_probs_dropout_prob": 0.5})
    encoded, mask = model.encode(_documents())
    targets = _documents()[:, :8]
    once, again = (model.decode(targets, encoded, mask, training=True) for _ in range(2))
    assert np.abs(once - again).max() > 0
    still, same = (model.decode(targets, encoded, mask, training=False) for _ in range(2))
    np.testing.assert_array_equal(still, same)


def test_hidden_states_times_the_output_kernel_are_the_logits(params):
    model = TransformerModel({**params, "rescale_embedding": True})
    documents, targets = _documents(), _documents()[:, :8]
    hidden, encoded = model.hidden_states(documents, targets, training=True)
    (_, logits, _), expected = model(documents, targets, training=True)
    np.testing.assert_array_equal(encoded, expected)
    np.testing.assert_allclose(tf.matmul(hidden, model.output_kernel), logits, atol=1e-5)


def test_what_follows_a_text_changes_neither_its_scores_nor_its_gradients(params):
    model = TransformerModel(params)
    documents, targets = _documents(1), _documents(1)[:, :5]
    padded = tf.pad(targets, [[0, 0], [0, 3]])
    (log_probs, _, _), _ = model(documents, targets, training=True)
    (padded_log_probs, _, _), _ = model(documents, padded, training=True)
    np.testing.assert_allclose(padded_log_probs[:, :5], log_probs, atol=1e-5)
    np.testing.assert_array_equal(padded_log_probs[:, 5:], 0.0)


def test_the_model_is_made_again_from_its_config(params):
    before = dict(params)
    model = TransformerModel(params)
    assert params == before
    again = TransformerModel.from_config(model.get_config())
    again.set_weights(model.get_weights())
    documents, targets = _documents(), _documents()[:, :8]
    np.testing.assert_array_equal(
        again(documents, targets, training=True)[0][1],
        model(documents, targets, training=True)[0][1],
    )


# ------------------------------------------------------------------------------ bad input


def test_what_does_not_fit_the_model_is_refused(params):
    model = TransformerModel(params)
    documents = _documents()
    with pytest.raises(ValueError, match="max_encoder_length=32"):
        model(np.ones([1, 33], np.int32))
    with pytest.raises(ValueError, match="max_decoder_length=8"):
        model(documents, np.ones([3, 9], np.int32), training=True)
    with pytest.raises(ValueError, match="needs target_ids"):
        model(documents, training=True)
    with pytest.raises(ValueError, match="max_length=65 is beyond the position table"):
        model.generate(documents, DecodingOptions(max_length=65))
    with pytest.raises(ValueError, match="beam_size=51 is above the 50 tokens"):
        model.generate(documents, DecodingOptions(beam_size=51, max_length=8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_decoder_length": 65}, "max_decoder_length=65 is beyond the position table"),
        ({"couple_encoder_decoder": True}, "leave --num_decoder_layers"),
        ({"num_decoder_layers": 0}, "num_decoder_layers=0"),
        ({"gradient_checkpointing_policy": "auto"}, "must be resolved"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused(params, changes, message):
    with pytest.raises(ValueError, match=message):
        TransformerModel({**params, **changes})


def test_a_vocabulary_that_lacks_the_end_of_text_token_is_refused(params):
    model = TransformerModel({**params, "eos_token_id": 50})
    with pytest.raises(ValueError, match="eos_id=50 is not in the vocabulary"):
        model.generate(_documents())
    endless = TransformerModel({**params, "eos_token_id": None})
    assert endless.generate(_documents()).ids.shape == [3, 8]
