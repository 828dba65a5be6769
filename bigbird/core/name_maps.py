"""What others call our variables: one table per family, read in both directions.

A row gives the attribute path of a variable in our model, its name in the 2021 toolkit (which it
also bears here) and its name in Hugging Face's library. `{scope}` stands for the model's scope,
`{layer}` for the index of a layer; such a row means one variable in every layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import tensorflow as tf
import tf_keras as keras

from bigbird.core.config import BigBirdConfig

NAMINGS = ("tf1", "hf")


@dataclasses.dataclass(frozen=True)
class Row:
    """One variable under its three names.

    Attributes:
      path: attribute path from the model, or from the head that the table is about.
      tf1: name in 2021 checkpoints.
      hf: name in Hugging Face's.
      transposed: whether Hugging Face stores the transpose: its matrices are `[out, in]`.
    """

    path: str
    tf1: str
    hf: str
    transposed: bool = False


def _table(path, tf1, hf):
    return (Row(path, tf1, f"{hf}.weight"),)


def _dense(path, tf1, hf):
    return (
        Row(f"{path}.kernel", f"{tf1}/kernel", f"{hf}.weight", transposed=True),
        Row(f"{path}.bias", f"{tf1}/bias", f"{hf}.bias"),
    )


def _norm(path, tf1, hf):
    return (
        Row(f"{path}.gamma", f"{tf1}/gamma", f"{hf}.weight"),
        Row(f"{path}.beta", f"{tf1}/beta", f"{hf}.bias"),
    )


def _below(path, tf1, hf):
    """Returns a function that makes rows below three prefixes."""

    def rows(kind, *names):
        prefixed = zip((f"{path}.", f"{tf1}/", f"{hf}."), names, strict=True)
        return kind(*(prefix + name for prefix, name in prefixed))

    return rows


_encoder_layer = _below(
    "encoder.encoder_layers.{layer}", "{scope}/encoder/layer_{layer}", "bert.encoder.layer.{layer}"
)
_embeddings = _below("embeddings", "{scope}/embeddings", "bert.embeddings")

# `{attention_norm}` and `{output_norm}`: where 2021 put a layer's LayerNorms, by norm type.
_TF1_NORMS = {
    "prenorm": {"attention_norm": "attention/self", "output_norm": "intermediate"},
    "postnorm": {"attention_norm": "attention/output", "output_norm": "output"},
}

BERT = (
    *_embeddings(_table, "word_embeddings", "word_embeddings", "word_embeddings"),
    *_embeddings(_table, "token_type_embeddings", "token_type_embeddings", "token_type_embeddings"),
    *_embeddings(_table, "position_embeddings", "position_embeddings", "position_embeddings"),
    *_norm("encoder.layer_norm", "{scope}/encoder/LayerNorm", "bert.embeddings.LayerNorm"),
    *_encoder_layer(_dense, "attention.query", "attention/self/query", "attention.self.query"),
    *_encoder_layer(_dense, "attention.key", "attention/self/key", "attention.self.key"),
    *_encoder_layer(_dense, "attention.value", "attention/self/value", "attention.self.value"),
    *_encoder_layer(_dense, "attention_output", "attention/output/dense", "attention.output.dense"),
    *_encoder_layer(
        _norm, "attention_norm", "{attention_norm}/LayerNorm", "attention.output.LayerNorm"
    ),
    *_encoder_layer(_dense, "intermediate", "intermediate/dense", "intermediate.dense"),
    *_encoder_layer(_dense, "output_dense", "output/dense", "output.dense"),
    *_encoder_layer(_norm, "output_norm", "{output_norm}/LayerNorm", "output.LayerNorm"),
    *_dense("pooler", "{scope}/pooler/dense", "bert.pooler"),
)

# Paths from a head: `run_classifier.ClassifierLossLayer`, `layers.FirstTokenTransform`,
# `run_pretraining.MaskedLMLayer` and `NSPLayer`.
HEADS = {
    "classifier": _dense("", "{scope}/classifier", "classifier.out_proj"),
    "classifier_transform": _dense("dense", "{scope}/classifier/transform", "classifier.dense"),
    "masked_lm": (
        *_dense("transform", "cls/predictions/transform/dense", "cls.predictions.transform.dense"),
        *_norm(
            "transform_norm",
            "cls/predictions/transform/LayerNorm",
            "cls.predictions.transform.LayerNorm",
        ),
        Row("output_bias", "cls/predictions/output_bias", "cls.predictions.bias"),
    ),
    "next_sentence": (
        Row("output_weights", "cls/seq_relationship/output_weights", "cls.seq_relationship.weight"),
        Row("output_bias", "cls/seq_relationship/output_bias", "cls.seq_relationship.bias"),
    ),
}

# How names begin in the files of a model without heads, and what they lack.
HF_BARE = (("embeddings.", "bert."),)
# Second names of one tensor, and tensors that are no weights, in files of Hugging Face's library.
HF_REPEATED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}
HF_BUFFERS = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")


@dataclasses.dataclass(frozen=True)
class Named:
    """A variable of a model, as a naming has it.

    Attributes:
      variable: the variable.
      path: its attribute path.
      transposed: whether the naming's owner stores the transpose.
    """

    variable: tf.Variable
    path: str
    transposed: bool

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Shape in a file of the naming's owner."""
        shape = tuple(self.variable.shape)
        return shape[::-1] if self.transposed else shape


def named_rows(config: BigBirdConfig, rows: Sequence[Row]) -> list[Row]:
    """Returns rows with the names of one model in them, one for each of its variables."""
    return [
        dataclasses.replace(
            row,
            path=row.path.format(layer=layer).strip("."),
            tf1=row.tf1.format(scope=config.scope, layer=layer, **_TF1_NORMS[config.norm_type]),
            hf=row.hf.format(layer=layer),
        )
        for row in rows
        for layer in range(config.num_hidden_layers if "{layer}" in row.path else 1)
    ]


def named_variables(
    model: keras.Model, naming: str, heads: Mapping[str, keras.layers.Layer] | None = None
) -> dict[str, Named]:
    """Maps the names that a checkpoint uses to the variables of a model and of its heads.

    Args:
      model: a `BertModel`.
      naming: one of `NAMINGS`.
      heads: built layers by their key in `HEADS`.

    Raises:
      ValueError: for a head that is not in `HEADS`.
    """
    config = model.config
    named = _resolve(model, BERT, naming, config)
    for key, head in (heads or {}).items():
        if key not in HEADS:
            raise ValueError(f"heads: expected keys from {', '.join(HEADS)}; received {key!r}.")
        named.update(_resolve(head, HEADS[key], naming, config))
    return named


def _resolve(root, rows, naming, config):
    """Follows the rows' attribute paths; a variable the model was built without is left out."""
    named = {}
    for row in named_rows(config, rows):
        variable = functools.reduce(_child, row.path.split("."), root)
        if variable is not None:
            transposed = row.transposed and naming == "hf"
            named[getattr(row, naming)] = Named(variable, row.path, transposed)
    return named


def _child(parent, key):
    return parent[int(key)] if key.isdigit() else getattr(parent, key, None)
