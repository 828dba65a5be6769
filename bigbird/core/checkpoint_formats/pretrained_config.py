"""Hugging Face's `config.json` and `spiece.model` <-> `BigBirdConfig`, special ids, vocabulary.

One table per family says which key means which field. A key that is in no table, or has a value
that our models cannot compute, is an error: a checkpoint is never loaded as something it is not.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from typing import Any

from absl import logging

from bigbird.core.checkpoint_formats.safetensors_files import (
    CheckpointError,
    read_json,
    regular_file,
)
from bigbird.core.config import MEMORY_FIELDS, BigBirdConfig
from bigbird.core.vocabulary import SpecialTokens, piece_id

CONFIG_FILE = "config.json"
VOCABULARY_FILE = "spiece.model"

# Hugging Face's name of an activation -> ours. Its tanh forms differ in rounding only.
ACTIVATIONS = {
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu": "gelu_exact",
    "gelu_python": "gelu_exact",
    "relu": "relu",
    "tanh": "tanh",
    "swish": "swish",
    "silu": "swish",
    "linear": "linear",
}

SEP_ID = 66

# Codes of `safetensors_files.FLOAT_TYPES` under their names in `config.json`.
TYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclasses.dataclass(frozen=True)
class Family:
    """How one `model_type` is described.

    Attributes:
      model_type: Hugging Face's name of it.
      keys: key -> (our field, value where the key is absent).
      activation: the key of the activation function.
      equal: key -> (key that must have the same value, value where the first is absent); a value of
        None, null in the file, goes with everything.
      required: key -> the one value that our models compute; it is also the default.
      fixed: our fields that the family has one value of.
      usual: our fields that the family has another value of than our defaults.
      special_pieces: name in `vocabulary.SpecialTokens` -> piece of the vocabulary, for special ids
        that no key gives.
      architectures: keys of `name_maps.HEADS` -> Hugging Face's class with these heads.
    """

    model_type: str
    keys: Mapping[str, tuple[str, Any]]
    activation: str
    equal: Mapping[str, tuple[str, Any]]
    required: Mapping[str, Any]
    fixed: Mapping[str, Any]
    usual: Mapping[str, Any]
    special_pieces: Mapping[str, str]
    architectures: Mapping[frozenset[str], str]


_BOTH = {
    "attention_type": ("attention_type", "block_sparse"),
    "block_size": ("block_size", 64),
    "max_position_embeddings": ("max_position_embeddings", 4096),
    "num_random_blocks": ("num_rand_blocks", 3),
    "pad_token_id": ("pad_token_id", 0),
}

BERT_FAMILY = Family(
    model_type="big_bird",
    keys={
        **_BOTH,
        "attention_probs_dropout_prob": ("attention_probs_dropout_prob", 0.1),
        "bos_token_id": ("bos_token_id", 1),
        "eos_token_id": ("eos_token_id", 2),
        "hidden_act": ("hidden_act", "gelu_new"),
        "hidden_dropout_prob": ("hidden_dropout_prob", 0.1),
        "hidden_size": ("hidden_size", 768),
        "initializer_range": ("initializer_range", 0.02),
        "intermediate_size": ("intermediate_size", 3072),
        "layer_norm_eps": ("layer_norm_epsilon", 1e-12),
        "num_attention_heads": ("num_attention_heads", 12),
        "num_hidden_layers": ("num_hidden_layers", 12),
        "rescale_embeddings": ("rescale_embedding", False),
        "type_vocab_size": ("type_vocab_size", 2),
        "vocab_size": ("vocab_size", 50358),
    },
    activation="hidden_act",
    equal={"classifier_dropout": ("hidden_dropout_prob", None)},
    required={
        "add_cross_attention": False,
        "is_decoder": False,
        "is_encoder_decoder": False,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        # Without it Hugging Face keeps the bias of the output projection, and we do not.
        "use_bias": True,
    },
    fixed={"norm_type": "postnorm", "use_bias": True},
    usual={"scope": "bert"},
    special_pieces={"cls": "[CLS]", "mask": "[MASK]"},
    architectures={
        frozenset(): "BigBirdModel",
        frozenset({"masked_lm"}): "BigBirdForMaskedLM",
        frozenset({"masked_lm", "next_sentence"}): "BigBirdForPreTraining",
        frozenset({"classifier", "classifier_transform"}): "BigBirdForSequenceClassification",
    },
)

PEGASUS_FAMILY = Family(
    model_type="bigbird_pegasus",
    keys={
        **_BOTH,
        "activation_function": ("hidden_act", "gelu_new"),
        "attention_dropout": ("attention_probs_dropout_prob", 0.0),
        "d_model": ("hidden_size", 1024),
        "decoder_layers": ("num_decoder_layers", 16),
        "decoder_start_token_id": ("bos_token_id", 2),
        "dropout": ("hidden_dropout_prob", 0.1),
        "encoder_attention_heads": ("num_attention_heads", 16),
        "encoder_ffn_dim": ("intermediate_size", 4096),
        "encoder_layers": ("num_hidden_layers", 16),
        "eos_token_id": ("eos_token_id", 1),
        "init_std": ("initializer_range", 0.02),
        "scale_embedding": ("rescale_embedding", True),
        "use_bias": ("use_bias", False),
        "vocab_size": ("vocab_size", 96103),
    },
    activation="activation_function",
    equal={
        "decoder_attention_heads": ("encoder_attention_heads", 16),
        "decoder_ffn_dim": ("encoder_ffn_dim", 4096),
        "num_hidden_layers": ("encoder_layers", None),
    },
    required={
        "activation_dropout": 0.0,
        "add_cross_attention": False,
        "decoder_layerdrop": 0.0,
        "encoder_layerdrop": 0.0,
        "is_decoder": False,
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
    },
    fixed={"norm_type": "prenorm", "couple_encoder_decoder": False},
    # Hugging Face's library has this epsilon whatever the checkpoint was trained with.
    usual={"scope": "pegasus", "own_decoder_positions": True, "layer_norm_epsilon": 1e-5},
    special_pieces={},
    architectures={frozenset(): "BigBirdPegasusForConditionalGeneration"},
)
FAMILIES = {family.model_type: family for family in (BERT_FAMILY, PEGASUS_FAMILY)}

# Keys that change no number a model computes: descriptions, and settings of generation.
_WITHOUT_EFFECT = frozenset(
    """
    _name_or_path architectures bos_token_id chunk_size_feed_forward classifier_dropout do_sample
    dtype early_stopping finetuning_task forced_eos_token_id gradient_checkpointing id2label
    label2id length_penalty max_length min_length model_type no_repeat_ngram_size num_beams
    num_labels output_attentions output_hidden_states prefix problem_type return_dict sep_token_id
    task_specific_params temperature tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version use_cache
    """.split()
)
# Fields of a run rather than of a model.
_RUN_FIELDS = frozenset(
    (*MEMORY_FIELDS, "max_encoder_length", "max_decoder_length", "beam_size", "alpha")
)
# Fields that no tensor's shape tells; another value computes something else from the same weights.
_SHAPELESS_FIELDS = (
    "decoder_depth",
    "hidden_act",
    "layer_norm_epsilon",
    "norm_type",
    "num_attention_heads",
    "num_hidden_layers",
    "rescale_embedding",
)


def config_from_pretrained(directory: str) -> BigBirdConfig:
    """Returns the config of the model in a directory of Hugging Face's layout.

    Its pattern follows the length of each input, as Hugging Face's does
    (`pattern_length="input"`), and it takes inputs as long as its position table.

    Raises:
      CheckpointError: for a file that is no such description, and for every key that says
        something our models do not compute, naming the key.
    """
    path, settings, family = _read_settings(directory)
    _check_keys(path, settings, family)
    fields = {
        field: _value(path, settings, key, default) for key, (field, default) in family.keys.items()
    }
    if fields["hidden_act"] not in ACTIVATIONS:
        raise CheckpointError(
            f"{path}: {family.activation}={fields['hidden_act']!r} is not supported; expected one "
            f"of {', '.join(ACTIVATIONS)}."
        )
    fields["hidden_act"] = ACTIVATIONS[fields["hidden_act"]]
    try:
        return BigBirdConfig(
            **fields,
            **family.fixed,
            **family.usual,
            max_encoder_length=fields["max_position_embeddings"],
            pattern_length="input",
        )
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


def check_same_model(config: BigBirdConfig, directory: str) -> None:
    """Raises a `CheckpointError` where a model would compute something else from the weights."""
    stored = config_from_pretrained(directory)
    differences = [
        f"{field}: {getattr(stored, field)!r} there, {getattr(config, field)!r} here"
        for field in _SHAPELESS_FIELDS
        if getattr(stored, field) != getattr(config, field)
    ]
    if differences:
        raise CheckpointError(
            f"{directory} holds a model of another kind ({'; '.join(differences)}): build the "
            "model from config_from_pretrained, or leave these flags out."
        )


def flag_values(directory: str) -> dict[str, Any]:
    """Returns what the `config.json` of a checkpoint's directory says about a command's flags.

    It is Hugging Face's, or that of a training run of ours. Besides the model's fields: special
    ids, the number of labels and the kind of head of a classifier, and the vocabulary.

    Raises:
      CheckpointError: as `config_from_pretrained`.
    """
    if not os.path.lexists(os.path.join(directory, CONFIG_FILE)):
        return {}
    settings = read_json(directory, CONFIG_FILE)
    values = _pretrained_values(directory) if "model_type" in settings else _run_values(settings)
    if os.path.lexists(os.path.join(directory, VOCABULARY_FILE)):
        values["vocab_model_file"] = regular_file(directory, VOCABULARY_FILE)
    return values


def _pretrained_values(directory: str) -> dict[str, Any]:
    path, settings, family = _read_settings(directory)
    config = config_from_pretrained(directory).to_dict()
    values = {name: value for name, value in config.items() if name not in _RUN_FIELDS}
    for token in ("pad", "bos", "eos"):
        values[f"{token}_id"] = config[f"{token}_token_id"]
    if family is BERT_FAMILY:
        values["sep_id"] = _value(path, settings, "sep_token_id", SEP_ID)
    if "SequenceClassification" in str(settings.get("architectures")):
        values["classifier_transform"] = True
        if isinstance(settings.get("id2label"), dict):
            values["num_labels"] = len(settings["id2label"])
    if os.path.lexists(os.path.join(directory, VOCABULARY_FILE)):
        vocabulary_file = regular_file(directory, VOCABULARY_FILE)
        for token, piece in family.special_pieces.items():
            values[f"{token}_id"] = piece_id(vocabulary_file, piece)
    return values


def _run_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(BigBirdConfig)} - _RUN_FIELDS
    names = fields | {"classifier_transform", "num_labels"}
    names |= {"vocab_model_file", "substitute_newline"}
    names |= {f"{field.name}_id" for field in dataclasses.fields(SpecialTokens)}
    # The flags of a model's special ids have other names than its fields.
    fields_as_flags = {f"{t}_id": settings.get(f"{t}_token_id") for t in ("pad", "bos", "eos")}
    values = {name: value for name, value in fields_as_flags.items() if value is not None}
    return {**values, **{name: value for name, value in settings.items() if name in names}}


def settings_of(
    config: BigBirdConfig,
    family: Family,
    heads: Iterable[str],
    num_labels: int | None,
    type_code: str,
    sep_id: int = SEP_ID,
) -> dict[str, Any]:
    """Returns the `config.json` of a model of ours.

    Args:
      heads: keys of `name_maps.HEADS`.
      num_labels: of a classifier.
      type_code: how the weights are stored, a key of `TYPE_NAMES`.
      sep_id: id of SEP, which a model does not know.

    Raises:
      CheckpointError: for a model that Hugging Face's library cannot compute, naming the field.
    """
    values = {**config.to_dict(), "num_decoder_layers": config.decoder_depth}
    _check_computable(values, family)
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    values["hidden_act"] = names[values["hidden_act"]]
    if values["attention_type"] == "simulated_sparse":
        values["attention_type"] = "block_sparse"
    settings = {
        "architectures": [_architecture(heads, family)],
        "dtype": TYPE_NAMES[type_code],
        "model_type": family.model_type,
        **family.required,
        **{key: values[field] for key, (field, _) in family.keys.items()},
    }
    settings.update({key: settings[other] for key, (other, _) in family.equal.items()})
    if family is BERT_FAMILY:
        settings["sep_token_id"] = sep_id
    if num_labels is not None:
        settings["id2label"] = {str(label): f"LABEL_{label}" for label in range(num_labels)}
        settings["label2id"] = {f"LABEL_{label}": label for label in range(num_labels)}
    return settings


def _check_computable(values: Mapping[str, Any], family: Family) -> None:
    for field, value in family.fixed.items():
        if values[field] != value:
            raise CheckpointError(
                f"{field}={values[field]!r}: Hugging Face's {family.model_type} has {value!r} only."
            )
    if values["hidden_act"] not in ACTIVATIONS.values():
        raise CheckpointError(
            f"hidden_act={values['hidden_act']!r}: Hugging Face's library has the activations "
            f"{', '.join(sorted(set(ACTIVATIONS.values())))} only."
        )
    epsilon = family.usual.get("layer_norm_epsilon", values["layer_norm_epsilon"])
    if values["layer_norm_epsilon"] != epsilon:
        logging.warning(
            "LayerNorm has epsilon %g in this model and %g in Hugging Face's library: numbers "
            "differ slightly there.",
            values["layer_norm_epsilon"],
            epsilon,
        )
    if values["pattern_length"] == "model" and values["attention_type"] != "original_full":
        logging.warning(
            "The attention pattern of this model is that of max_encoder_length=%d for inputs of "
            "any length. Hugging Face's library takes the pattern of each input's own length, and "
            "gives other numbers for other lengths.",
            values["max_encoder_length"],
        )


def _architecture(heads: Iterable[str], family: Family) -> str:
    """Returns the class that has these heads in Hugging Face's library."""
    heads = frozenset(heads)
    if heads not in family.architectures:
        possible = (" and ".join(sorted(names)) or "none" for names in family.architectures)
        raise CheckpointError(
            f"Hugging Face's {family.model_type} has no model with the heads "
            f"{' and '.join(sorted(heads))}; it has: {'; '.join(possible)}. A classifier that "
            "reads the pooler instead of the first token (classifier_transform) is none of its."
        )
    return family.architectures[heads]


def _read_settings(directory: str) -> tuple[str, dict[str, Any], Family]:
    path = os.path.join(directory, CONFIG_FILE)
    settings = read_json(directory, CONFIG_FILE)
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"{path}: model_type={model_type!r:.80} is not supported; expected one of "
            f"{', '.join(FAMILIES)}."
        )
    return path, settings, FAMILIES[model_type]


def _check_keys(path: str, settings: Mapping[str, Any], family: Family) -> None:
    known = {*family.keys, *family.equal, *family.required, *_WITHOUT_EFFECT}
    for key, (other, default) in family.equal.items():
        value = settings.get(key, default)
        expected = settings.get(other, family.keys[other][1])
        if value is not None and value != expected:
            raise CheckpointError(
                f"{path}: {key}={value!r:.80} is not supported beside {other}={expected!r:.80}; "
                "expected equal values."
            )
    for key, value in settings.items():
        if key in family.required and value not in (None, family.required[key]):
            raise CheckpointError(
                f"{path}: {key}={value!r:.80} is not supported; expected "
                f"{json.dumps(family.required[key])}."
            )
        # What a library of another version adds is often null, false or empty: not used.
        if key not in known and value not in (None, False, 0, "", [], {}):
            raise CheckpointError(
                f"{path}: the key {key}={value!r:.80} is not known. Take it out of the file if it "
                "does not change what the model computes."
            )


def _value(path: str, settings: Mapping[str, Any], key: str, default: Any) -> Any:
    """Returns the value of a key, of the type of its default."""
    value = settings.get(key)
    if value is None:
        return default
    accepted = (int, float) if isinstance(default, float) else type(default)
    if not isinstance(value, accepted) or isinstance(value, bool) != isinstance(default, bool):
        raise CheckpointError(
            f"{path}: {key}={value!r:.80}; expected a value such as {json.dumps(default)}."
        )
    return value
