"""Checkpoints of others: 2021 TF1 checkpoints into our models, by an explicit name map.

A map is a tuple of (checkpoint name, attribute path) rows; `{scope}` and `{layer}` stand for the
model's scope and the index of a layer, `{decoder}` for the place of the decoder.
"""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np
import tensorflow as tf

# Slots and counters that optimizers leave beside the weights.
_OPTIMIZER_STATE = re.compile(
    r"(/(adam|adafactor|momentum|adagrad|lamb)[^/]*$)|(/(m|v|vr|vc)$)|(^(global_step|beta\d_power)$)",
    re.IGNORECASE,
)


def _dense_rows(name, path):
    return ((f"{name}/kernel", f"{path}.kernel"), (f"{name}/bias", f"{path}.bias"))


def _norm_rows(name, path):
    return ((f"{name}/gamma", f"{path}.gamma"), (f"{name}/beta", f"{path}.beta"))


def _layer_rows(name, path):
    return (
        *_dense_rows(f"{name}/attention/self/query", f"{path}.attention.query"),
        *_dense_rows(f"{name}/attention/self/key", f"{path}.attention.key"),
        *_dense_rows(f"{name}/attention/self/value", f"{path}.attention.value"),
        *_dense_rows(f"{name}/attention/output/dense", f"{path}.attention_output"),
        *_dense_rows(f"{name}/intermediate/dense", f"{path}.intermediate"),
        *_dense_rows(f"{name}/output/dense", f"{path}.output_dense"),
    )


def _prenorm_rows(name, path):
    return (
        *_norm_rows(f"{name}/attention/self/LayerNorm", f"{path}.attention_norm"),
        *_norm_rows(f"{name}/intermediate/LayerNorm", f"{path}.output_norm"),
    )


def _postnorm_rows(name, path):
    return (
        *_norm_rows(f"{name}/attention/output/LayerNorm", f"{path}.attention_norm"),
        *_norm_rows(f"{name}/output/LayerNorm", f"{path}.output_norm"),
    )


_LAYER = ("{scope}/encoder/layer_{layer}", "encoder.encoder_layers.{layer}")

BERT_MAP = (
    ("{scope}/embeddings/word_embeddings", "embeddings.word_embeddings"),
    ("{scope}/embeddings/token_type_embeddings", "embeddings.token_type_embeddings"),
    ("{scope}/embeddings/position_embeddings", "embeddings.position_embeddings"),
    *_norm_rows("{scope}/encoder/LayerNorm", "encoder.layer_norm"),
    *_layer_rows(*_LAYER),
    *_dense_rows("{scope}/pooler/dense", "pooler"),
)
# The LayerNorms of a layer are named by where they sit.
PRENORM_ROWS = _prenorm_rows(*_LAYER)
POSTNORM_ROWS = _postnorm_rows(*_LAYER)

# `{decoder}` is "encoder" in a coupled model, which has one name for what both share.
_DECODER_LAYER = ("{scope}/{decoder}/layer_{layer}", "decoder.decoder_layers.{layer}")
_CROSS, _CROSS_PATH = "{scope}/{decoder}/layer_{layer}/attention", _DECODER_LAYER[1]

DECODER_MAP = (
    *_norm_rows("{scope}/{decoder}/LayerNorm", "decoder.layer_norm"),
    *_layer_rows(*_DECODER_LAYER),
    *_dense_rows(f"{_CROSS}/encdec/query", f"{_CROSS_PATH}.cross_attention.query"),
    *_dense_rows(f"{_CROSS}/encdec/key", f"{_CROSS_PATH}.cross_attention.key"),
    *_dense_rows(f"{_CROSS}/encdec/value", f"{_CROSS_PATH}.cross_attention.value"),
    *_dense_rows(f"{_CROSS}/encdec_output/dense", f"{_CROSS_PATH}.cross_output"),
)
DECODER_PRENORM_ROWS = (
    *_prenorm_rows(*_DECODER_LAYER),
    *_norm_rows(f"{_CROSS}/encdec/LayerNorm", f"{_CROSS_PATH}.cross_norm"),
)
DECODER_POSTNORM_ROWS = (
    *_postnorm_rows(*_DECODER_LAYER),
    *_norm_rows(f"{_CROSS}/encdec_output/LayerNorm", f"{_CROSS_PATH}.cross_norm"),
)
CLASSIFIER_ROWS = (
    ("{scope}/classifier/kernel", "kernel"),
    ("{scope}/classifier/bias", "bias"),
)


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What a checkpoint gave to a model, by checkpoint name.

    Attributes:
      loaded: names whose values the model now has.
      missing: names that the model wants and the checkpoint lacks; those variables keep their
        initial values.
      unused: names that the checkpoint has and the model does not want.
      mismatched: "name: checkpoint shape, model shape" of each pair that differs.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    mismatched: tuple[str, ...]

    def __str__(self):
        lines = [f"loaded {len(self.loaded)} tensors"]
        for kind in ("missing", "unused", "mismatched"):
            names = getattr(self, kind)
            lines.append(f"{kind} {len(names)}" + "".join(f"\n  {name}" for name in names))
        return "\n".join(lines)


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or does not fit the model."""


def bert_variables(model) -> dict[str, tf.Variable]:
    """Maps the 2021 checkpoint names of a `BertModel` to its variables."""
    config = model.config
    norm_rows = PRENORM_ROWS if config.norm_type == "prenorm" else POSTNORM_ROWS
    return _resolve(model, BERT_MAP + norm_rows, config.scope, config.num_hidden_layers)


def transformer_variables(model) -> dict[str, tf.Variable]:
    """Maps the 2021 checkpoint names of a `TransformerModel` to its variables."""
    config = model.config
    prenorm = config.norm_type == "prenorm"
    rows = DECODER_MAP + (DECODER_PRENORM_ROWS if prenorm else DECODER_POSTNORM_ROWS)
    decoder = "encoder" if config.couple_encoder_decoder else "decoder"
    rows = [(name.replace("{decoder}", decoder), path) for name, path in rows]
    # It has neither token types nor a pooler, whose rows the encoder's map leaves out.
    return {
        **bert_variables(model),
        **_resolve(model, rows, config.scope, config.decoder_depth),
    }


def classifier_variables(head, scope: str) -> dict[str, tf.Variable]:
    """Maps the 2021 checkpoint names of a `ClassifierLossLayer` to its variables."""
    return _resolve(head, CLASSIFIER_ROWS, scope, 0)


def _resolve(model, rows, scope, num_layers):
    """Follows the rows' attribute paths; a variable the model was built without is left out."""
    variables = {}
    for name, path in rows:
        per_layer = "{layer}" in name
        for layer in range(num_layers) if per_layer else (0,):
            variable = functools.reduce(_child, path.format(layer=layer).split("."), model)
            if variable is not None:
                variables[name.format(scope=scope, layer=layer)] = variable
    return variables


def _child(parent, key):
    return parent[int(key)] if key.isdigit() else getattr(parent, key, None)


def load_tf1_checkpoint(model, path: str, head=None) -> LoadReport:
    """Loads a TF1-format checkpoint of the 2021 toolkit into a built model.

    Args:
      model: a `BertModel` or a `TransformerModel`.
      path: the checkpoint's prefix (`…/model.ckpt-0`), or a directory with a `checkpoint` file.
      head: a built `ClassifierLossLayer`, loaded too where the checkpoint has one.

    Returns:
      A `LoadReport`; optimizer slots are passed over without a word.

    Raises:
      CheckpointError: for a file that is no checkpoint, one without any of the model's tensors,
        or a tensor of another shape; the model is then unchanged.
    """
    prefix = tf.train.latest_checkpoint(path) if tf.io.gfile.isdir(path) else path
    if prefix is None or not tf.io.gfile.exists(f"{prefix}.index"):
        raise CheckpointError(
            f"init_checkpoint={path!r}: no TF1 checkpoint there; expected the prefix of a pair of "
            "files .index and .data-00000-of-00001, such as DIRECTORY/model.ckpt-0."
        )
    reader = _open(prefix)
    has_decoder = hasattr(model, "decoder")
    variables = transformer_variables(model) if has_decoder else bert_variables(model)
    if head is not None:
        variables.update(classifier_variables(head, model.config.scope))
    return _assign(variables, reader, prefix)


def _open(prefix):
    try:
        return tf.train.load_checkpoint(prefix)
    except (tf.errors.OpError, RuntimeError) as error:
        raise CheckpointError(f"init_checkpoint={prefix!r} cannot be read: {error}") from error


def _assign(variables, reader, prefix):
    shapes = reader.get_variable_to_shape_map()
    wanted = {name: variable for name, variable in variables.items() if name in shapes}
    report = LoadReport(
        loaded=tuple(sorted(wanted)),
        missing=tuple(sorted(set(variables) - set(shapes))),
        unused=tuple(
            sorted(
                name for name in set(shapes) - set(variables) if not _OPTIMIZER_STATE.search(name)
            )
        ),
        mismatched=tuple(
            f"{name}: checkpoint {shapes[name]}, model {variable.shape.as_list()}"
            for name, variable in sorted(wanted.items())
            if list(shapes[name]) != variable.shape.as_list()
        ),
    )
    if report.mismatched:
        raise CheckpointError(
            f"init_checkpoint={prefix!r} does not fit the model; build the model with the sizes "
            f"the checkpoint was trained with.\n{report}"
        )
    if not report.loaded:
        raise CheckpointError(
            f"init_checkpoint={prefix!r} has none of the model's tensors; check --scope and "
            f"--norm_type.\n{report}"
        )
    for name, variable in wanted.items():
        variable.assign(np.asarray(reader.get_tensor(name)))
    return report
