"""Checkpoints <-> models: 2021 TF1 checkpoints, Hugging Face safetensors, and what our runs write.

    bigbird-convert --init_checkpoint=bigbird-roberta-base --to=tf1 --output_dir=converted

The way of a tensor: `tensor_sources.py` of `checkpoint_formats` gives it by name, `name_maps.py`
says which variable that is, and this file checks every shape before it assigns any. The command
renames tensors without a model (`conversion.py`).
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping, Sequence

import tensorflow as tf
import tf_keras as keras

from bigbird.core.checkpoint_formats.huggingface_files import HuggingFaceTensors, write_pretrained
from bigbird.core.checkpoint_formats.name_maps import Named, named_variables
from bigbird.core.checkpoint_formats.pretrained_config import (
    BERT_FAMILY,
    PEGASUS_FAMILY,
    check_same_model,
    config_from_pretrained,
    settings_of,
)
from bigbird.core.checkpoint_formats.safetensors_files import CheckpointError
from bigbird.core.checkpoint_formats.tensor_sources import TensorSource, open_tensors
from bigbird.core.checkpoint_formats.tf_checkpoint_files import TfCheckpoint, write_tf1_checkpoint
from bigbird.core.modeling import TransformerModel

__all__ = [
    "CheckpointError",
    "LoadReport",
    "config_from_pretrained",
    "load_initial_weights",
    "load_safetensors",
    "load_tf1_checkpoint",
    "save_safetensors",
    "save_tf1_checkpoint",
]

Heads = Mapping[str, keras.layers.Layer]


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What a checkpoint gave to a model, by checkpoint name.

    Attributes:
      loaded: names whose values the model now has.
      missing: names that the model wants and the checkpoint lacks; those variables keep their
        initial values.
      unused: names that the checkpoint has and the model does not want.
      mismatched: "name: checkpoint shape, model shape" of each pair that differs and was allowed
        to; those variables keep their initial values.
      extended: names of position tables whose rows were repeated to fill a longer one.
      source: what the checkpoint was recognised as, and where it is.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    mismatched: tuple[str, ...]
    extended: tuple[str, ...] = ()
    source: str = ""

    def __str__(self):
        lines = [self.source] if self.source else []
        lines.append(f"loaded {len(self.loaded)} tensors")
        for kind in ("missing", "unused", "mismatched", "extended"):
            names = getattr(self, kind)
            if names or kind != "extended":
                lines.append(f"{kind} {len(names)}" + "".join(f"\n  {name}" for name in names))
        return "\n".join(lines)


def load_initial_weights(
    model: keras.Model,
    path: str,
    heads: Heads | None = None,
    *,
    extend_positions: bool = False,
    ignore_mismatched: Sequence[str] = (),
) -> LoadReport:
    """Loads whatever checkpoint is at a path into a built model: `--init_checkpoint` of a command.

    Args:
      model: a `BertModel` or `TransformerModel`.
      path: a 2021 checkpoint (`…/model.ckpt-0`, or a directory with a `checkpoint` file), a
        directory in Hugging Face's layout, the output directory of a training run (its newest
        checkpoint), one of its checkpoints, or a SavedModel of ours.
      heads: built layers by their key in `name_maps.HEADS`; loaded too where the checkpoint has
        them.
      extend_positions: whether a longer position table is filled by repeating the checkpoint's.
      ignore_mismatched: names, or patterns such as `classifier*`, whose shapes may differ; those
        variables keep their initial values.

    Returns:
      A `LoadReport`, which says what the checkpoint was recognised as.

    Raises:
      CheckpointError: for a path that is none of these, or a checkpoint that does not fit.
    """
    with open_tensors(path) as tensors:
        return _load(model, tensors, heads, extend_positions, ignore_mismatched)


def load_tf1_checkpoint(model: keras.Model, path: str, heads: Heads | None = None) -> LoadReport:
    """Loads a TF1-format checkpoint of the 2021 toolkit into a built model.

    Args:
      model: a `BertModel` or `TransformerModel`.
      path: the checkpoint's prefix (`…/model.ckpt-0`), or a directory with a `checkpoint` file.
      heads: as those of `load_initial_weights`.

    Returns:
      A `LoadReport`; optimizer slots are passed over without a word.

    Raises:
      CheckpointError: for a file that is no checkpoint, one without any of the model's tensors,
        or a tensor of another shape; the model is then unchanged.
    """
    prefix = tf.train.latest_checkpoint(path) if tf.io.gfile.isdir(path) else path
    with TfCheckpoint(prefix or path) as tensors:
        return _load(model, tensors, heads)


def load_safetensors(
    model: keras.Model,
    directory: str,
    heads: Heads | None = None,
    *,
    extend_positions: bool = False,
    ignore_mismatched: Sequence[str] = (),
) -> LoadReport:
    """Loads a directory in Hugging Face's layout (`config.json` and safetensors) into a model.

    Args: as those of `load_initial_weights`.

    Raises:
      CheckpointError: for files that are damaged or unsafe, a configuration that our models do not
        compute or that is not the model's, or a tensor of another shape; the model is unchanged.
    """
    with HuggingFaceTensors(directory) as tensors:
        return _load(model, tensors, heads, extend_positions, ignore_mismatched)


def save_safetensors(
    model: keras.Model,
    directory: str,
    heads: Heads | None = None,
    *,
    type_code: str = "F32",
    vocabulary: str | None = None,
) -> None:
    """Writes `config.json` and `model.safetensors` as Hugging Face's library reads them.

    Files of these names are replaced, each at once; others in the directory stay.

    Args:
      model: a `BertModel` or `TransformerModel`.
      directory: made where it does not exist.
      heads: layers to write too, by their key in `name_maps.HEADS`.
      type_code: how the weights are stored: F32, BF16 or F16.
      vocabulary: SentencePiece model file to put beside the weights.

    Raises:
      CheckpointError: for a model or heads that Hugging Face's library does not have.
    """
    heads = heads or {}
    num_labels = heads["classifier"].num_labels if "classifier" in heads else None
    family = PEGASUS_FAMILY if isinstance(model, TransformerModel) else BERT_FAMILY
    settings = settings_of(model.config, family, heads, num_labels, type_code)
    named = named_variables(model, "hf", heads)

    def read(name):
        values = named[name].variable.read_value()
        return (tf.transpose(values) if named[name].transposed else values).numpy()

    shapes = {name: row.stored_shape for name, row in named.items()}
    write_pretrained(directory, shapes, read, settings, type_code, vocabulary)


def save_tf1_checkpoint(model: keras.Model, prefix: str, heads: Heads | None = None) -> None:
    """Writes a TF1-format checkpoint under the 2021 names: `prefix`.index and `prefix`.data-….

    Args:
      model: a `BertModel` or `TransformerModel`.
      prefix: such as `DIRECTORY/model.ckpt-0`.
      heads: layers to write too, by their key in `name_maps.HEADS`.
    """
    named = named_variables(model, "tf1", heads)
    write_tf1_checkpoint(prefix, {name: row.variable.read_value() for name, row in named.items()})


def _load(
    model: keras.Model,
    tensors: TensorSource,
    heads: Heads | None,
    extend_positions: bool = False,
    ignore_mismatched: Sequence[str] = (),
) -> LoadReport:
    """Assigns tensors to variables, after all of them were checked."""
    if tensors.naming == "hf":
        check_same_model(model.config, tensors.directory)
    named = named_variables(model, tensors.naming, heads)
    tensors.drop_implied(named)
    wanted = {name: row for name, row in named.items() if name in tensors.shapes}
    differ = {n: row for n, row in wanted.items() if tensors.shapes[n] != row.stored_shape}
    extended = {
        name
        for name, row in differ.items()
        if extend_positions and _can_extend(tensors.shapes[name], row)
    }
    ignored = {
        name
        for name in set(differ) - extended
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in ignore_mismatched)
    }
    report = LoadReport(
        loaded=tuple(sorted(set(wanted) - ignored)),
        missing=tuple(sorted(set(named) - set(wanted))),
        unused=tuple(sorted(set(tensors.shapes) - set(named))),
        mismatched=tuple(
            f"{name}: checkpoint {list(tensors.shapes[name])}, model {list(row.stored_shape)}"
            for name, row in sorted(differ.items())
            if name not in extended
        ),
        extended=tuple(sorted(extended)),
        source=tensors.description,
    )
    if set(differ) - extended - ignored:
        raise CheckpointError(
            "The checkpoint does not fit the model: build the model with the sizes the checkpoint "
            "was trained with. A longer position table is filled with --extend_positions, and "
            f"names that may differ are told by --ignore_mismatched.\n{report}"
        )
    if not report.loaded:
        raise CheckpointError(
            "The checkpoint has none of the model's tensors: check --scope and --norm_type.\n"
            f"{report}"
        )
    tensors.check_types(report.loaded)
    for name in report.loaded:
        _assign(named[name], tensors.read(name))
    return report


def _can_extend(shape: tuple[int, ...], row: Named) -> bool:
    return (
        row.path.endswith("position_embeddings")
        and shape[1:] == row.stored_shape[1:]
        and 0 < shape[0] < row.stored_shape[0]
    )


def _assign(row: Named, values) -> None:
    # The raw operation copies an array once; tf.cast would do so twice.
    values = tf.raw_ops.Cast(x=values, DstT=row.variable.dtype)
    if row.transposed:
        values = tf.transpose(values)
    length = row.variable.shape[0]
    if values.shape[0] < length:
        # Repeated as Beltagy et al. did, arXiv:2004.05150, section 5.
        values = tf.tile(values, [-(-length // values.shape[0]), 1])[:length]
    row.variable.assign(values)


def run():
    """Entry of the installed command."""
    # Imported here because it defines flags, which users of this module have no need of.
    from bigbird.core.checkpoint_formats import conversion

    conversion.run()


if __name__ == "__main__":
    run()
