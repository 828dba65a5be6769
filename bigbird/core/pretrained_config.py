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

import tensorflow as tf
from absl import logging

from bigbird.core.callbacks import write_atomically
from bigbird.core.config import BigBirdConfig
from bigbird.core.safetensors_files import CheckpointError, read_json, regular_file
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

# Codes of `safetensors_files.FLOAT_TYPES` under their names in `config.json`.
TYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}


@dataclasses.dataclass(frozen=True)
class Family:
    """How one `model_type` is described.

    Attributes:
      model_type: Hugging Face's name of it.
      keys: key -> (our field, value where the key is absent).
      special_ids: key -> (name in `vocabulary.SpecialTokens`, value where the key is absent).
      special_pieces: name in `vocabulary.SpecialTokens` -> piece of the vocabulary, for special ids
        that no key gives.
      architectures: keys of `name_maps.HEADS` -> Hugging Face's class with these heads.
      required: key -> the one value that our models compute; it is also the default.
      implied: our fields that follow from the family.
    """

    model_type: str
    keys: Mapping[str, tuple[str, Any]]
    special_ids: Mapping[str, tuple[str, int]]
    special_pieces: Mapping[str, str]
    architectures: Mapping[frozenset[str], str]
    required: Mapping[str, Any]
    implied: Mapping[str, Any]


BERT = Family(
    model_type="big_bird",
    keys={
        "attention_probs_dropout_prob": ("attention_probs_dropout_prob", 0.1),
        "attention_type": ("attention_type", "block_sparse"),
        "block_size": ("block_size", 64),
        "hidden_act": ("hidden_act", "gelu_new"),
        "hidden_dropout_prob": ("hidden_dropout_prob", 0.1),
        "hidden_size": ("hidden_size", 768),
        "initializer_range": ("initializer_range", 0.02),
        "intermediate_size": ("intermediate_size", 3072),
        "layer_norm_eps": ("layer_norm_epsilon", 1e-12),
        "max_position_embeddings": ("max_position_embeddings", 4096),
        "num_attention_heads": ("num_attention_heads", 12),
        "num_hidden_layers": ("num_hidden_layers", 12),
        "num_random_blocks": ("num_rand_blocks", 3),
        "pad_token_id": ("pad_token_id", 0),
        "rescale_embeddings": ("rescale_embedding", False),
        "type_vocab_size": ("type_vocab_size", 2),
        "vocab_size": ("vocab_size", 50358),
    },
    special_ids={
        "pad_token_id": ("pad", 0),
        "bos_token_id": ("bos", 1),
        "eos_token_id": ("eos", 2),
        "sep_token_id": ("sep", 66),
    },
    special_pieces={"cls": "[CLS]", "mask": "[MASK]"},
    architectures={
        frozenset(): "BigBirdModel",
        frozenset({"masked_lm"}): "BigBirdForMaskedLM",
        frozenset({"masked_lm", "next_sentence"}): "BigBirdForPreTraining",
        frozenset({"classifier", "classifier_transform"}): "BigBirdForSequenceClassification",
    },
    required={
        "add_cross_attention": False,
        "is_decoder": False,
        "is_encoder_decoder": False,
        "position_embedding_type": "absolute",
        "tie_word_embeddings": True,
        # Without it Hugging Face keeps the bias of the output projection, and we do not.
        "use_bias": True,
    },
    implied={"norm_type": "postnorm", "scope": "bert"},
)
FAMILIES = {family.model_type: family for family in (BERT,)}

# Keys that change no number a model computes: descriptions, and settings of generation.
_WITHOUT_EFFECT = frozenset(
    """
    _name_or_path architectures chunk_size_feed_forward dtype early_stopping finetuning_task
    gradient_checkpointing id2label label2id length_penalty max_length min_length model_type
    no_repeat_ngram_size num_beams num_labels output_attentions output_hidden_states
    problem_type return_dict task_specific_params tokenizer_class torch_dtype torchscript
    transformers_version use_cache
    """.split()
)
# Fields of a run rather than of a model.
RUN_FIELDS = frozenset(
    """
    max_encoder_length use_gradient_checkpointing gradient_checkpointing_policy
    gradient_checkpointing_every_n memory_budget_gb
    """.split()
)
# Fields that no tensor's shape tells; another value computes something else from the same weights.
SHAPELESS_FIELDS = (
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
        key = "activation_function" if "activation_function" in family.keys else "hidden_act"
        raise CheckpointError(
            f"{path}: {key}={fields['hidden_act']!r} is not supported; expected one of "
            f"{', '.join(ACTIVATIONS)}."
        )
    fields["hidden_act"] = ACTIVATIONS[fields["hidden_act"]]
    try:
        return BigBirdConfig(
            **fields,
            **family.implied,
            max_encoder_length=fields["max_position_embeddings"],
            pattern_length="input",
        )
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error


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
    values = {name: value for name, value in config.items() if name not in RUN_FIELDS}
    for key, (token, default) in family.special_ids.items():
        values[f"{token}_id"] = _value(path, settings, key, default)
    if any("SequenceClassification" in str(name) for name in settings.get("architectures") or ()):
        values["classifier_transform"] = True
        if isinstance(settings.get("id2label"), dict):
            values["num_labels"] = len(settings["id2label"])
    if os.path.lexists(os.path.join(directory, VOCABULARY_FILE)):
        vocabulary_file = regular_file(directory, VOCABULARY_FILE)
        for token, piece in family.special_pieces.items():
            values[f"{token}_id"] = piece_id(vocabulary_file, piece)
    return values


def _run_values(settings: Mapping[str, Any]) -> dict[str, Any]:
    fields = {field.name for field in dataclasses.fields(BigBirdConfig)} - RUN_FIELDS
    names = fields | {"classifier_transform", "num_labels", "vocab_model_file"}
    return {name: value for name, value in settings.items() if name in names}


def settings_of(
    config: BigBirdConfig,
    heads: Iterable[str],
    num_labels: int | None,
    type_code: str,
    special: SpecialTokens | None = None,
) -> dict[str, Any]:
    """Returns the `config.json` of a model of ours.

    Args:
      heads: keys of `name_maps.HEADS`.
      num_labels: of a classifier.
      type_code: how the weights are stored, a key of `TYPE_NAMES`.
      special: ids to write; the family's own where None.

    Raises:
      CheckpointError: for a model that Hugging Face's library cannot compute, naming the field.
    """
    family = BERT
    values = config.to_dict()
    _check_implied(values, family)
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    if values["hidden_act"] not in names:
        raise CheckpointError(
            f"hidden_act={values['hidden_act']!r}: Hugging Face's library has "
            f"{', '.join(sorted(names))} only."
        )
    values["hidden_act"] = names[values["hidden_act"]]
    if values["attention_type"] == "simulated_sparse":
        values["attention_type"] = "block_sparse"
    settings = {
        "architectures": [_architecture(heads, family)],
        "dtype": TYPE_NAMES[type_code],
        "model_type": family.model_type,
        **{
            key: default if special is None else getattr(special, token)
            for key, (token, default) in family.special_ids.items()
        },
        **family.required,
        **{key: values[field] for key, (field, _) in family.keys.items()},
    }
    if num_labels is not None:
        settings["id2label"] = {str(label): f"LABEL_{label}" for label in range(num_labels)}
        settings["label2id"] = {f"LABEL_{label}": label for label in range(num_labels)}
    return settings


def write_settings(directory: str, settings: Mapping[str, Any], vocabulary: str | None) -> None:
    """Writes `config.json` and, where a vocabulary is given, `spiece.model`, each at once."""
    text = json.dumps(settings, indent=2, sort_keys=True)
    write_atomically(os.path.join(directory, CONFIG_FILE), text)
    if vocabulary is not None:
        target = os.path.join(directory, VOCABULARY_FILE)
        tf.io.gfile.copy(vocabulary, f"{target}.tmp", overwrite=True)
        tf.io.gfile.rename(f"{target}.tmp", target, overwrite=True)


def _check_implied(values: Mapping[str, Any], family: Family) -> None:
    implied = {**family.implied, **{k: v for k, v in family.required.items() if k in values}}
    # A name and not a number.
    implied.pop("scope")
    for field, value in implied.items():
        if values[field] != value:
            raise CheckpointError(
                f"{field}={values[field]!r}: Hugging Face's {family.model_type} has {value!r} only."
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
    known = {*family.keys, *family.special_ids, *family.required, *_WITHOUT_EFFECT}
    # One rate serves the layers and the head.
    rate = settings.get("hidden_dropout_prob", 0.1)
    if settings.get("classifier_dropout") not in (None, rate):
        raise CheckpointError(
            f"{path}: classifier_dropout={settings['classifier_dropout']!r:.80} is not supported; "
            f"expected null or hidden_dropout_prob={rate}."
        )
    known.add("classifier_dropout")
    for key, value in settings.items():
        if key in family.required and value != family.required[key]:
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
