"""Command `bigbird-convert`: a checkpoint of any kind into Hugging Face's layout or the 2021 names.

No model is made: tensors are renamed and transposed by `name_maps.py`, one after the other.
"""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf

from bigbird.core import flags
from bigbird.core.config import BigBirdConfig
from bigbird.core.modeling import BertModel
from bigbird.core.name_maps import BERT, HEADS, Row, named_rows, named_variables
from bigbird.core.pretrained_config import TYPE_NAMES, settings_of, write_settings
from bigbird.core.safetensors_files import SINGLE_FILE, CheckpointError, write_safetensors
from bigbird.core.tensor_sources import TensorSource, open_tensors
from bigbird.core.tf_checkpoint_files import write_tf1_checkpoint
from bigbird.core.vocabulary import SpecialTokens, find_vocabulary

TARGETS = ("safetensors", "tf1")
PREFIX = "model.ckpt-0"


def convert(
    path: str,
    output_dir: str,
    config: BigBirdConfig,
    target: str,
    *,
    type_code: str = "F32",
    vocabulary: str | None = None,
    special: SpecialTokens | None = None,
    encoder_only: bool = False,
) -> str:
    """Writes a checkpoint in another layout.

    Args:
      path: as in `tensor_sources.open_tensors`.
      output_dir: receives `config.json`, the weights and `spiece.model`.
      config: of the model whose weights these are.
      target: `safetensors` (Hugging Face's layout) or `tf1` (2021 names, read by TensorFlow 1).
      type_code: how safetensors are stored: F32, BF16 or F16.
      vocabulary: SentencePiece model file to put beside the weights.
      special: special ids to write into `config.json`; those of Hugging Face's default where None.
      encoder_only: whether to leave the heads out.

    Returns:
      A report: what the checkpoint is, what was written and what was left out.

    Raises:
      CheckpointError: where the checkpoint is not that model's, or the target cannot hold it.
    """
    naming = "hf" if target == "safetensors" else "tf1"
    with open_tensors(path) as tensors:
        _check_shapes(tensors, config)
        rows, heads = _rows_present(tensors, config, encoder_only)
        by_target = {getattr(row, naming): row for row in rows}

        def read(name: str) -> np.ndarray:
            row = by_target[name]
            values = tensors.read(getattr(row, tensors.naming))
            return values.T if row.transposed and naming != tensors.naming else values

        tensors.check_types(getattr(row, tensors.naming) for row in rows)
        if target == "safetensors":
            shapes = {n: _target_shape(by_target[n], tensors, naming) for n in sorted(by_target)}
            num_labels = shapes["classifier.out_proj.bias"][0] if "classifier" in heads else None
            settings = settings_of(config, heads, num_labels, type_code, special)
            tf.io.gfile.makedirs(output_dir)
            write_safetensors(os.path.join(output_dir, SINGLE_FILE), shapes, read, type_code)
        else:
            settings = config.to_dict()
            values = {name: tf.cast(read(name), tf.float32) for name in sorted(by_target)}
            write_tf1_checkpoint(os.path.join(output_dir, PREFIX), values)
        write_settings(output_dir, settings, vocabulary)
        left_out = sorted(set(tensors.shapes) - {getattr(row, tensors.naming) for row in rows})
        lines = [tensors.description, f"wrote {len(rows)} tensors to {output_dir}"]
        return "\n".join([*lines, f"left out {len(left_out)}", *(f"  {n}" for n in left_out)])


def _check_shapes(tensors: TensorSource, config: BigBirdConfig) -> None:
    """Checks that the source has every tensor of the encoder, in the shape the config gives it."""
    # In a graph variables have shapes and no values.
    with tf.Graph().as_default():
        named = named_variables(BertModel(config), tensors.naming)
    faults = [
        f"{name}: expected {list(row.stored_shape)}, received "
        f"{list(tensors.shapes[name]) if name in tensors.shapes else 'nothing'}"
        for name, row in named.items()
        if tensors.shapes.get(name) != row.stored_shape
    ]
    if faults:
        listed = "".join(f"\n  {fault}" for fault in faults)
        raise CheckpointError(
            f"{tensors.description} does not fit the model that the flags describe; give the sizes "
            f"it was trained with.{listed}"
        )


def _rows_present(
    tensors: TensorSource, config: BigBirdConfig, encoder_only: bool
) -> tuple[list[Row], list[str]]:
    """Returns the rows that the source has tensors for, and the heads among them."""
    rows, heads = named_rows(config, BERT), []
    for head, head_rows in HEADS.items():
        found = named_rows(config, head_rows)
        if not encoder_only and all(getattr(r, tensors.naming) in tensors.shapes for r in found):
            rows += found
            heads.append(head)
    return [row for row in rows if getattr(row, tensors.naming) in tensors.shapes], heads


def _target_shape(row: Row, tensors: TensorSource, naming: str) -> tuple[int, ...]:
    shape = tensors.shapes[getattr(row, tensors.naming)]
    return shape[::-1] if row.transposed and naming != tensors.naming else shape


def run():
    """Entry of the installed command."""
    flags.DEFINE_string("init_checkpoint", None, "Checkpoint to convert, of any kind.")
    flags.DEFINE_string("output_dir", None, "Directory of the converted checkpoint.")
    flags.DEFINE_enum("to", "safetensors", list(TARGETS), "Layout to write.")
    flags.DEFINE_enum("store_as", "F32", list(TYPE_NAMES), "Type of the stored safetensors.")
    flags.DEFINE_bool("encoder_only", False, "Whether to leave the heads out.")
    flags.DEFINE_integer("max_encoder_length", 4096, "Length that the model is built for.")
    flags.run(_main)


def _main(_):
    values = flags.FLAGS
    if not values.init_checkpoint or not values.output_dir:
        raise ValueError("Give --init_checkpoint, what to convert, and --output_dir, where to.")
    flags.follow_checkpoint()
    if values.vocab_size is None:
        values.vocab_size = _word_table_rows(values.init_checkpoint, values.scope)
    # The default is a name that need not be there; what was asked for must be.
    wanted = values["vocab_model_file"].present or os.path.exists(values.vocab_model_file)
    print(
        convert(
            values.init_checkpoint,
            values.output_dir,
            flags.model_config(),
            values.to,
            type_code=values.store_as,
            vocabulary=find_vocabulary(values.vocab_model_file) if wanted else None,
            special=flags.special_tokens(),
            encoder_only=values.encoder_only,
        )
    )


def _word_table_rows(path: str, scope: str) -> int:
    with open_tensors(path) as tensors:
        name = f"{scope}/embeddings/word_embeddings"
        if name not in tensors.shapes:
            raise CheckpointError(f"{tensors.description} has no {name}: check --scope.")
        return tensors.shapes[name][0]
