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
from bigbird.core.modeling import TransformerModel

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


# `{attention_norm}`, `{output_norm}`, `{cross_norm}`: where 2021 put a layer's LayerNorms.
_TF1_NORMS = {
    "prenorm": {
        "attention_norm": "attention/self",
        "output_norm": "intermediate",
        "cross_norm": "attention/encdec",
    },
    "postnorm": {
        "attention_norm": "attention/output",
        "output_norm": "output",
        "cross_norm": "attention/encdec_output",
    },
}

_embeddings = _below("embeddings", "{scope}/embeddings", "bert.embeddings")
_layer = _below(
    "encoder.encoder_layers.{layer}", "{scope}/encoder/layer_{layer}", "bert.encoder.layer.{layer}"
)

BERT = (
    *_embeddings(_table, "word_embeddings", "word_embeddings", "word_embeddings"),
    *_embeddings(_table, "token_type_embeddings", "token_type_embeddings", "token_type_embeddings"),
    *_embeddings(_table, "position_embeddings", "position_embeddings", "position_embeddings"),
    *_norm("encoder.layer_norm", "{scope}/encoder/LayerNorm", "bert.embeddings.LayerNorm"),
    *_layer(_dense, "attention.query", "attention/self/query", "attention.self.query"),
    *_layer(_dense, "attention.key", "attention/self/key", "attention.self.key"),
    *_layer(_dense, "attention.value", "attention/self/value", "attention.self.value"),
    *_layer(_dense, "attention_output", "attention/output/dense", "attention.output.dense"),
    *_layer(_norm, "attention_norm", "{attention_norm}/LayerNorm", "attention.output.LayerNorm"),
    *_layer(_dense, "intermediate", "intermediate/dense", "intermediate.dense"),
    *_layer(_dense, "output_dense", "output/dense", "output.dense"),
    *_layer(_norm, "output_norm", "{output_norm}/LayerNorm", "output.LayerNorm"),
    *_dense("pooler", "{scope}/pooler/dense", "bert.pooler"),
)

_encoder = _below(
    "encoder.encoder_layers.{layer}",
    "{scope}/encoder/layer_{layer}",
    "model.encoder.layers.{layer}",
)
# `{decoder}` is "encoder" in a coupled model, which has one name for what both share.
_decoder = _below(
    "decoder.decoder_layers.{layer}",
    "{scope}/{decoder}/layer_{layer}",
    "model.decoder.layers.{layer}",
)

TRANSFORMER = (
    *_table("embeddings.word_embeddings", "{scope}/embeddings/word_embeddings", "model.shared"),
    *_table(
        "embeddings.position_embeddings",
        "{scope}/embeddings/position_embeddings",
        "model.encoder.embed_positions",
    ),
    *_table(
        "decoder_position_embeddings",
        "{scope}/decoder/embeddings/position_embeddings",
        "model.decoder.embed_positions",
    ),
    *_norm("encoder.layer_norm", "{scope}/encoder/LayerNorm", "model.encoder.layernorm_embedding"),
    *_encoder(_dense, "attention.query", "attention/self/query", "self_attn.self.query"),
    *_encoder(_dense, "attention.key", "attention/self/key", "self_attn.self.key"),
    *_encoder(_dense, "attention.value", "attention/self/value", "self_attn.self.value"),
    *_encoder(_dense, "attention_output", "attention/output/dense", "self_attn.output"),
    *_encoder(_norm, "attention_norm", "{attention_norm}/LayerNorm", "self_attn_layer_norm"),
    *_encoder(_dense, "intermediate", "intermediate/dense", "fc1"),
    *_encoder(_dense, "output_dense", "output/dense", "fc2"),
    *_encoder(_norm, "output_norm", "{output_norm}/LayerNorm", "final_layer_norm"),
    *_norm(
        "decoder.layer_norm", "{scope}/{decoder}/LayerNorm", "model.decoder.layernorm_embedding"
    ),
    *_decoder(_dense, "attention.query", "attention/self/query", "self_attn.q_proj"),
    *_decoder(_dense, "attention.key", "attention/self/key", "self_attn.k_proj"),
    *_decoder(_dense, "attention.value", "attention/self/value", "self_attn.v_proj"),
    *_decoder(_dense, "attention_output", "attention/output/dense", "self_attn.out_proj"),
    *_decoder(_norm, "attention_norm", "{attention_norm}/LayerNorm", "self_attn_layer_norm"),
    *_decoder(_dense, "cross_attention.query", "attention/encdec/query", "encoder_attn.q_proj"),
    *_decoder(_dense, "cross_attention.key", "attention/encdec/key", "encoder_attn.k_proj"),
    *_decoder(_dense, "cross_attention.value", "attention/encdec/value", "encoder_attn.v_proj"),
    *_decoder(_dense, "cross_output", "attention/encdec_output/dense", "encoder_attn.out_proj"),
    *_decoder(_norm, "cross_norm", "{cross_norm}/LayerNorm", "encoder_attn_layer_norm"),
    *_decoder(_dense, "intermediate", "intermediate/dense", "fc1"),
    *_decoder(_dense, "output_dense", "output/dense", "fc2"),
    *_decoder(_norm, "output_norm", "{output_norm}/LayerNorm", "final_layer_norm"),
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

# A classifier over the pooler is none of Hugging Face's, whose weights would mean something else
# in it: in their naming it has a name that no file has.
POOLED_CLASSIFIER = _dense("", "{scope}/classifier", "pooled_classifier")

# How names begin in the files of a model without heads, and what they lack.
HF_BARE = (("embeddings.", "bert."), ("shared.", "model."))
# In Hugging Face's files: second names of one tensor, where a model of ours has no variable for it;
HF_REPEATED = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
    "lm_head.weight": "model.shared.weight",
    "model.encoder.embed_tokens.weight": "model.shared.weight",
    "model.decoder.embed_tokens.weight": "model.shared.weight",
    "model.decoder.embed_positions.weight": "model.encoder.embed_positions.weight",
}
# tensors that must be zero, since no variable of ours is added in their place;
HF_ZEROS = ("final_logits_bias",)
# and constants that are no weights.
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
    words = {
        "scope": config.scope,
        "decoder": "encoder" if config.couple_encoder_decoder else "decoder",
        **_TF1_NORMS[config.norm_type],
    }
    return [
        dataclasses.replace(
            row,
            path=row.path.format(layer=layer).strip("."),
            tf1=row.tf1.format(layer=layer, **words),
            hf=row.hf.format(layer=layer),
        )
        for row in rows
        for layer in range(_count_layers(config, row.path))
    ]


def _count_layers(config, path):
    if "{layer}" not in path:
        return 1
    return config.decoder_depth if path.startswith("decoder.") else config.num_hidden_layers


def named_variables(
    model: keras.Model, naming: str, heads: Mapping[str, keras.layers.Layer] | None = None
) -> dict[str, Named]:
    """Maps the names that a checkpoint uses to the variables of a model and of its heads.

    Args:
      model: a `BertModel` or `TransformerModel`.
      naming: one of `NAMINGS`.
      heads: built layers by their key in `HEADS`.

    Raises:
      ValueError: for a head that is not in `HEADS`.
    """
    config = model.config
    rows = TRANSFORMER if isinstance(model, TransformerModel) else BERT
    named = _resolve(model, rows, naming, config)
    heads = heads or {}
    for key, head in heads.items():
        if key not in HEADS:
            raise ValueError(f"heads: expected keys from {', '.join(HEADS)}; received {key!r}.")
        rows = HEADS[key]
        if key == "classifier" and "classifier_transform" not in heads:
            rows = POOLED_CLASSIFIER
        named.update(_resolve(head, rows, naming, config))
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
