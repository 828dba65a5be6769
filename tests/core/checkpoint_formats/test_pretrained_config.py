"""What a config.json says is understood, or refused with the name of its key."""

import json
import shutil

import pytest
from absl.testing import flagsaver

from bigbird.classifier import run_classifier  # noqa: F401  (defines the flags of a command)
from bigbird.core import flags
from bigbird.core.checkpoint_formats.pretrained_config import config_from_pretrained, flag_values
from bigbird.core.checkpoint_formats.safetensors_files import CheckpointError

BASE = {"model_type": "big_bird"}
PEGASUS = {"model_type": "bigbird_pegasus"}


def _config(directory, **settings):
    (directory / "config.json").write_text(json.dumps(settings))
    return config_from_pretrained(str(directory))


def test_a_run_says_how_its_text_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"substitute_newline": " ", "data_dir": "x"}))
    assert flag_values(str(tmp_path)) == {"substitute_newline": " "}


def test_a_config_without_keys_is_the_base_model(tmp_path):
    config = _config(tmp_path, **BASE)
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (768, 12, 50358)
    assert (config.block_size, config.num_rand_blocks) == (64, 3)
    assert (config.norm_type, config.pattern_length) == ("postnorm", "input")
    assert config.max_encoder_length == config.max_position_embeddings == 4096


def test_a_config_without_keys_is_the_large_encoder_decoder(tmp_path):
    config = _config(tmp_path, **PEGASUS)
    assert (config.hidden_size, config.num_hidden_layers, config.decoder_depth) == (1024, 16, 16)
    assert (config.norm_type, config.use_bias, config.rescale_embedding) == ("prenorm", False, True)
    assert (config.bos_token_id, config.eos_token_id, config.scope) == (2, 1, "pegasus")
    assert config.own_decoder_positions and config.layer_norm_epsilon == 1e-5


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("gelu_new", "gelu"),
        ("gelu_fast", "gelu"),
        ("gelu", "gelu_exact"),
        ("relu", "relu"),
        ("silu", "swish"),
    ],
)
def test_activations_have_other_names_there(tmp_path, theirs, ours):
    assert _config(tmp_path, **BASE, hidden_act=theirs).hidden_act == ours
    assert _config(tmp_path, **PEGASUS, activation_function=theirs).hidden_act == ours


@pytest.mark.parametrize(
    ("key", "value", "field"),
    [
        ("rescale_embeddings", True, "rescale_embedding"),
        ("type_vocab_size", 16, "type_vocab_size"),
        ("attention_type", "original_full", "attention_type"),
        ("pad_token_id", 3, "pad_token_id"),
        ("layer_norm_eps", 1e-5, "layer_norm_epsilon"),
        ("num_random_blocks", 2, "num_rand_blocks"),
    ],
)
def test_a_key_becomes_a_field(tmp_path, key, value, field):
    assert getattr(_config(tmp_path, **BASE, **{key: value}), field) == value


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"model_type": "bert"}, "model_type"),
        ({}, "model_type"),
        ({"model_type": ["big_bird"]}, "model_type"),
        ({**BASE, "hidden_act": "quick_gelu"}, "hidden_act"),
        ({**PEGASUS, "activation_function": "mish"}, "activation_function"),
        ({**BASE, "is_decoder": True}, "is_decoder"),
        ({**BASE, "use_bias": False}, "use_bias"),
        ({**BASE, "position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({**BASE, "tie_word_embeddings": False}, "tie_word_embeddings"),
        ({**BASE, "classifier_dropout": 0.5}, "classifier_dropout"),
        ({**BASE, "rope_theta": 10000.0}, "rope_theta"),
        ({**BASE, "attention_type": "linear"}, "attention_type"),
        ({**BASE, "hidden_size": "768"}, "hidden_size"),
        ({**BASE, "hidden_size": True}, "hidden_size"),
        ({**BASE, "hidden_size": 770}, "hidden_size"),
        ({**BASE, "block_size": 0}, "block_size"),
        ({**BASE, "layer_norm_eps": 0}, "layer_norm_eps"),
        ({**PEGASUS, "activation_dropout": 0.1}, "activation_dropout"),
        ({**PEGASUS, "encoder_layerdrop": 0.1}, "encoder_layerdrop"),
        ({**PEGASUS, "decoder_attention_heads": 8}, "decoder_attention_heads"),
        ({**PEGASUS, "decoder_ffn_dim": 2048}, "decoder_ffn_dim"),
        ({**PEGASUS, "num_hidden_layers": 12}, "num_hidden_layers"),
    ],
)
def test_what_our_models_do_not_compute_is_an_error_that_names_the_key(tmp_path, settings, key):
    with pytest.raises(CheckpointError, match=key) as error:
        _config(tmp_path, **settings)
    assert "config.json" in str(error.value)


def test_keys_that_do_not_concern_the_model_are_passed_over(tmp_path):
    _config(
        tmp_path,
        **BASE,
        architectures=["BigBirdForPreTraining"],
        transformers_version="4.4.0.dev0",
        gradient_checkpointing=False,
        use_cache=True,
        some_later_key=None,
        classifier_dropout=None,
    )


@pytest.fixture
def classifier_directory(hf_dir, vocabulary_file, tmp_path):
    """The recorded classifier with a vocabulary beside its weights."""
    directory = tmp_path / "classifier"
    directory.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copyfile(hf_dir / "hf_bigbird_classifier" / name, directory / name)
    shutil.copyfile(vocabulary_file, directory / "spiece.model")
    return directory


def test_a_directory_says_what_the_flags_of_a_command_are(classifier_directory):
    values = flag_values(str(classifier_directory))
    assert values["num_labels"] == 3 and values["classifier_transform"]
    assert values["vocab_model_file"] == str(classifier_directory / "spiece.model")
    special = ("pad", "cls", "sep", "mask")
    assert [values[f"{token}_id"] for token in special] == [0, 65, 66, 67]
    assert "max_encoder_length" not in values


def test_flags_that_were_given_win_over_the_checkpoint(classifier_directory):
    with flagsaver.flagsaver():
        flags.FLAGS(["run", f"--init_checkpoint={classifier_directory}", "--block_size=32"])
        flags.follow_checkpoint()
        config = flags.model_config()
    assert (config.hidden_size, config.vocab_size, config.pattern_length) == (32, 120, "input")
    assert config.block_size == 32
    assert config.max_encoder_length == flags.FLAGS["max_encoder_length"].default


def test_a_vocabulary_that_is_none_is_told(classifier_directory):
    (classifier_directory / "spiece.model").write_bytes(b"no vocabulary")
    with pytest.raises(ValueError, match="is not a SentencePiece model"):
        flag_values(str(classifier_directory))


def test_a_vocabulary_behind_a_link_is_not_followed(classifier_directory, vocabulary_file):
    (classifier_directory / "spiece.model").unlink()
    (classifier_directory / "spiece.model").symlink_to(vocabulary_file)
    with pytest.raises(CheckpointError, match="symbolic link"):
        flag_values(str(classifier_directory))


def test_a_training_run_says_what_its_model_is(tmp_path):
    run = {"hidden_size": 24, "num_labels": 5, "max_encoder_length": 77, "learning_rate": 1.0}
    (tmp_path / "config.json").write_text(json.dumps(run))
    assert flag_values(str(tmp_path)) == {"hidden_size": 24, "num_labels": 5}
    (tmp_path / "config.json").unlink()
    assert flag_values(str(tmp_path)) == {}
