"""Models read from Hugging Face's files compute what its library does, and write the same bytes.

Tolerance: both sides are float32 sums in different orders; 5e-5 is a hundred rounding errors of
values around 1.
"""

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import tensorflow as tf

from bigbird.classifier.run_classifier import ClassifierLossLayer
from bigbird.core import checkpoint
from bigbird.core.layers import FirstTokenTransform, get_activation
from bigbird.core.modeling import BertModel, TransformerModel
from bigbird.pretrain.heads import MaskedLMLayer, NSPLayer

TOLERANCE = 5e-5
FOLDERS = ("hf_bigbird", "hf_bigbird_classifier", "hf_bigbird_pegasus")


def _load(directory):
    """Builds the model of a directory with all its heads and loads everything."""
    config = checkpoint.config_from_pretrained(str(directory))
    heads = {}
    if directory.name.startswith("hf_bigbird_pegasus"):
        model = TransformerModel(config)
    else:
        model = BertModel(config)
        activation = get_activation(config.hidden_act)
        if directory.name.startswith("hf_bigbird_classifier"):
            heads = {
                "classifier": ClassifierLossLayer(config.hidden_size, 3),
                "classifier_transform": FirstTokenTransform(config.hidden_size, activation),
            }
        else:
            heads = {
                "masked_lm": MaskedLMLayer(
                    config.hidden_size,
                    config.vocab_size,
                    model.embeddings,
                    activation_fn=activation,
                    layer_norm_epsilon=config.layer_norm_epsilon,
                ),
                "next_sentence": NSPLayer(config.hidden_size),
            }
    report = checkpoint.load_safetensors(model, str(directory), heads)
    assert not report.missing and not report.unused and not report.mismatched
    return model, heads


def _close(actual, expected):
    np.testing.assert_allclose(actual, expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_the_pretrained_model_equals_the_recorded_one(hf_dir, training):
    model, heads = _load(hf_dir / "hf_bigbird")
    recorded = np.load(hf_dir / "hf_bigbird" / "io.npz")
    positions = recorded["positions"]
    sequence, pooled = model(recorded["input_ids"], recorded["token_type_ids"], training=training)
    sequence = sequence.numpy()[:, positions]
    real = recorded["input_ids"][:, positions] > 0
    logits = heads["masked_lm"].logits(tf.constant(sequence)).numpy()
    _close(sequence[real], recorded["train/sequence_output"][real])
    _close(pooled, recorded["train/pooled_output"])
    _close(logits[real], recorded["train/prediction_logits"][real])
    _close(heads["next_sentence"].logits(pooled), recorded["train/seq_relationship_logits"])


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_the_classifier_equals_the_recorded_one(hf_dir, training):
    model, heads = _load(hf_dir / "hf_bigbird_classifier")
    recorded = np.load(hf_dir / "hf_bigbird_classifier" / "io.npz")
    sequence, _ = model(recorded["input_ids"], training=training)
    hidden = heads["classifier_transform"](sequence, training=training)
    _, log_probs = heads["classifier"](hidden, training=training)
    _close(log_probs, tf.nn.log_softmax(recorded["logits"]))


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_the_encoder_decoder_equals_the_recorded_one(hf_dir, training):
    model, _ = _load(hf_dir / "hf_bigbird_pegasus")
    recorded = np.load(hf_dir / "hf_bigbird_pegasus" / "io.npz")
    encoded, mask = model.encode(recorded["input_ids"], training=training)
    real = recorded["input_ids"][:, recorded["positions"]] > 0
    _close(encoded.numpy()[:, recorded["positions"]][real], recorded["encoder_output"][real])
    # Its decoder takes the ids before the targets; what follows a text's end is not compared.
    targets = np.pad(recorded["decoder_input_ids"][:, 1:], [[0, 0], [0, 1]], constant_values=1)
    before_end = np.cumsum(targets == 0, axis=1) == 0
    hidden = model.decode(tf.constant(targets), encoded, mask, training=training)
    logits = model.vocabulary_logits(hidden).numpy()
    assert before_end.sum() > 20
    _close(logits[before_end], recorded["logits"][before_end])


@pytest.mark.parametrize("name", FOLDERS)
def test_a_round_trip_gives_the_same_bytes_and_config(hf_dir, tmp_path, name):
    model, heads = _load(hf_dir / name)
    saved = tmp_path / name
    checkpoint.save_safetensors(model, str(saved), heads)
    before = safetensors.numpy.load_file(hf_dir / name / "model.safetensors")
    after = safetensors.numpy.load_file(saved / "model.safetensors")
    assert before.keys() == after.keys()
    for key, value in before.items():
        assert value.dtype == after[key].dtype and value.tobytes() == after[key].tobytes(), key
    assert checkpoint.config_from_pretrained(str(saved)) == model.config
    written = json.loads((saved / "config.json").read_text())
    read = json.loads((hf_dir / name / "config.json").read_text())
    assert all(
        read[key] == value or read[key] is None for key, value in written.items() if key in read
    )


@pytest.mark.parametrize("code", ["BF16", "F16"])
def test_half_precision_files_round_trip(hf_dir, tmp_path, code):
    model, heads = _load(hf_dir / "hf_bigbird")
    first, second = (tmp_path / f"hf_bigbird_{i}" for i in range(2))
    checkpoint.save_safetensors(model, str(first), heads, type_code=code)
    stored = safetensors.numpy.load_file(first / "model.safetensors")
    dtype = {"BF16": ml_dtypes.bfloat16, "F16": np.float16}[code]
    assert {value.dtype for value in stored.values()} == {np.dtype(dtype)}
    model, heads = _load(first)
    np.testing.assert_array_equal(
        model.pooler.kernel, stored["bert.pooler.weight"].astype(np.float32).T
    )
    checkpoint.save_safetensors(model, str(second), heads, type_code=code)
    names = ("model.safetensors", "config.json")
    assert all((first / n).read_bytes() == (second / n).read_bytes() for n in names)


def test_shards_load_like_one_file(hf_dir, tmp_path):
    source = hf_dir / "hf_bigbird"
    target = tmp_path / "hf_bigbird"
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    weight_map = {}
    for index, name in enumerate(sorted(tensors)):
        weight_map[name] = f"model-0000{index % 3 + 1}-of-00003.safetensors"
    for shard in set(weight_map.values()):
        part = {name: value for name, value in tensors.items() if weight_map[name] == shard}
        safetensors.numpy.save_file(part, target / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    whole, sharded = _load(source)[0], _load(target)[0]
    for old, new in zip(whole.get_weights(), sharded.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def _rewrite(source, target, change):
    """Copies a directory, its tensors changed by a function of `{name: array}`."""
    target.mkdir()
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = change(safetensors.numpy.load_file(source / "model.safetensors"))
    safetensors.numpy.save_file(tensors, target / "model.safetensors", {"format": "pt"})


def test_an_encoder_without_heads_has_names_without_their_first_part(hf_dir, tmp_path):
    def bare(tensors):
        return {
            name.removeprefix("bert."): value
            for name, value in tensors.items()
            if name.startswith("bert.")
        }

    _rewrite(hf_dir / "hf_bigbird", tmp_path / "bare", bare)
    config = checkpoint.config_from_pretrained(str(tmp_path / "bare"))
    report = checkpoint.load_safetensors(BertModel(config), str(tmp_path / "bare"))
    assert not report.missing and not report.unused


def test_second_names_and_buffers_of_older_files_are_understood(hf_dir, tmp_path):
    def repeated(tensors):
        return {
            **tensors,
            "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"],
            "cls.predictions.decoder.bias": tensors["cls.predictions.bias"],
            "bert.embeddings.position_ids": np.arange(1024)[None],
        }

    _rewrite(hf_dir / "hf_bigbird", tmp_path / "hf_bigbird", repeated)
    _load(tmp_path / "hf_bigbird")


def test_an_output_table_of_its_own_is_refused(hf_dir, tmp_path):
    def untied(tensors):
        table = tensors["bert.embeddings.word_embeddings.weight"]
        return {**tensors, "cls.predictions.decoder.weight": table + 1}

    _rewrite(hf_dir / "hf_bigbird", tmp_path / "hf_bigbird", untied)
    with pytest.raises(checkpoint.CheckpointError, match="cls.predictions.decoder.weight differs"):
        _load(tmp_path / "hf_bigbird")


def test_a_final_logits_bias_is_refused(hf_dir, tmp_path):
    def biased(tensors):
        return {**tensors, "final_logits_bias": tensors["final_logits_bias"] + 1}

    _rewrite(hf_dir / "hf_bigbird_pegasus", tmp_path / "hf_bigbird_pegasus", biased)
    with pytest.raises(checkpoint.CheckpointError, match="final_logits_bias is not zero"):
        _load(tmp_path / "hf_bigbird_pegasus")


def test_a_model_with_shared_positions_is_written_with_both_tables(tiny_params, tmp_path):
    model = TransformerModel(
        {**tiny_params, "norm_type": "prenorm", "scope": "pegasus", "layer_norm_epsilon": 1e-5}
    )
    checkpoint.save_safetensors(model, str(tmp_path))
    report = checkpoint.load_safetensors(TransformerModel(model.config), str(tmp_path))
    assert not report.missing and not report.unused
    own = TransformerModel(checkpoint.config_from_pretrained(str(tmp_path)))
    checkpoint.load_safetensors(own, str(tmp_path))
    np.testing.assert_array_equal(
        own.decoder_position_embeddings, model.embeddings.position_embeddings
    )


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"norm_type": "prenorm"}, "norm_type"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"num_attention_heads": 2}, "num_attention_heads"),
        ({"layer_norm_epsilon": 1e-5}, "layer_norm_epsilon"),
        ({"num_hidden_layers": 1}, "num_hidden_layers"),
    ],
)
def test_weights_of_a_model_that_computes_something_else_are_refused(hf_dir, changes, told):
    directory = str(hf_dir / "hf_bigbird")
    config = checkpoint.config_from_pretrained(directory).replace(**changes)
    with pytest.raises(checkpoint.CheckpointError, match=f"{told}: .* there, .* here"):
        checkpoint.load_safetensors(BertModel(config), directory)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"norm_type": "prenorm"}, "norm_type='prenorm'"),
        ({"use_bias": False}, "use_bias=False"),
    ],
)
def test_a_model_that_the_library_does_not_have_is_not_written(
    tiny_params, tmp_path, changes, told
):
    model = BertModel({**tiny_params, **changes})
    with pytest.raises(checkpoint.CheckpointError, match=told):
        checkpoint.save_safetensors(model, str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()


def test_a_classifier_over_the_pooler_is_not_written(tiny_params, tmp_path):
    head = ClassifierLossLayer(16, 3, name="bert/classifier")
    with pytest.raises(checkpoint.CheckpointError, match="classifier_transform"):
        checkpoint.save_safetensors(BertModel(tiny_params), str(tmp_path), {"classifier": head})


def test_a_classifier_over_the_pooler_does_not_take_theirs(hf_dir):
    directory = str(hf_dir / "hf_bigbird_classifier")
    config = checkpoint.config_from_pretrained(directory)
    head = ClassifierLossLayer(config.hidden_size, 3)
    before = head.get_weights()
    report = checkpoint.load_safetensors(BertModel(config), directory, {"classifier": head})
    assert report.missing == ("pooled_classifier.bias", "pooled_classifier.weight")
    assert "classifier.out_proj.weight" in report.unused
    np.testing.assert_array_equal(before[0], head.get_weights()[0])
