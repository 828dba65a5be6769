"""Command `bigbird-convert`: a checkpoint of any kind into Hugging Face's layout or the 2021 names.

No model is made: tensors are renamed and transposed by `name_maps.py`, one after the other.
"""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import tensorflow as tf

from bigbird.core import flags
from bigbird.core.checkpoint_formats.huggingface_files import write_pretrained, write_settings
from bigbird.core.checkpoint_formats.name_maps import (
    BERT,
    HEADS,
    TRANSFORMER,
    Row,
    named_rows,
    named_variables,
)
from bigbird.core.checkpoint_formats.pretrained_config import (
    BERT_FAMILY,
    PEGASUS_FAMILY,
    TYPE_NAMES,
    Family,
    check_same_model,
    settings_of,
)
from bigbird.core.checkpoint_formats.safetensors_files import CheckpointError
from bigbird.core.checkpoint_formats.tensor_sources import TensorSource, open_tensors
from bigbird.core.checkpoint_formats.tf_checkpoint_files import write_tf1_checkpoint
from bigbird.core.config import BigBirdConfig
from bigbird.core.modeling import BertModel, TransformerModel
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
      special: ids to write into `config.json`, where a model does not know them.
      encoder_only: whether to leave the heads out.

    Returns:
      A report: what the checkpoint is, what was written and what was left out.

    Raises:
      CheckpointError: where the checkpoint is not that model's, or the target cannot hold it.
    """
    if special is None:
        special = SpecialTokens(config.pad_token_id, config.eos_token_id, config.bos_token_id)
    naming = "hf" if target == "safetensors" else "tf1"
    with open_tensors(path) as tensors:
        if tensors.naming == "hf":
            check_same_model(config, tensors.directory)
        rows, family = _rows_of_model(tensors, config)
        heads = {} if encoder_only else _heads_present(tensors, config)
        rows += [row for head_rows in heads.values() for row in head_rows]
        by_target = {getattr(row, naming): row for row in rows}

        def read(name: str) -> np.ndarray:
            row = by_target[name]
            values = tensors.read(getattr(row, tensors.naming))
            return values.T if row.transposed and naming != tensors.naming else values

        sources = {getattr(row, tensors.naming) for row in rows}
        tensors.check_types(sources)
        if target == "safetensors":
            shapes = {name: _target_shape(row, tensors) for name, row in by_target.items()}
            num_labels = shapes["classifier.out_proj.bias"][0] if "classifier" in heads else None
            settings = settings_of(config, family, heads, num_labels, type_code, special.sep)
            write_pretrained(output_dir, shapes, read, settings, type_code, vocabulary)
        else:
            values = {name: tf.cast(read(name), tf.float32) for name in by_target}
            write_tf1_checkpoint(os.path.join(output_dir, PREFIX), values)
            ids = {f"{token}_id": value for token, value in dataclasses.asdict(special).items()}
            write_settings(output_dir, {**config.to_dict(), **ids}, vocabulary)
        left_out = sorted(set(tensors.shapes) - sources)
        lines = [tensors.description, f"wrote {len(by_target)} tensors to {output_dir}"]
        return "\n".join([*lines, f"left out {len(left_out)}", *(f"  {n}" for n in left_out)])


def _rows_of_model(tensors: TensorSource, config: BigBirdConfig) -> tuple[list[Row], Family]:
    """Returns the rows of the model, after a check that the source has each in the right shape."""
    encoder_decoder = any("encdec" in name or "encoder_attn" in name for name in tensors.shapes)
    model_class, table, family = BertModel, BERT, BERT_FAMILY
    if encoder_decoder:
        model_class, table, family = TransformerModel, TRANSFORMER, PEGASUS_FAMILY
    # In a graph variables have shapes and no values.
    with tf.Graph().as_default():
        named = named_variables(model_class(config), tensors.naming)
    tensors.drop_implied(named)
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
    rows = named_rows(config, table)
    return [row for row in rows if getattr(row, tensors.naming) in named], family


def _heads_present(tensors: TensorSource, config: BigBirdConfig) -> dict[str, list[Row]]:
    rows = {head: named_rows(config, head_rows) for head, head_rows in HEADS.items()}
    return {
        head: found
        for head, found in rows.items()
        if all(getattr(row, tensors.naming) in tensors.shapes for row in found)
    }


def _target_shape(row: Row, tensors: TensorSource) -> tuple[int, ...]:
    """Returns the shape of a tensor in Hugging Face's files."""
    shape = tensors.shapes[getattr(row, tensors.naming)]
    return shape[::-1] if row.transposed and tensors.naming != "hf" else shape


def run():
    """Entry of the installed command."""
    flags.DEFINE_string("init_checkpoint", None, "Checkpoint to convert, of any kind.")
    flags.DEFINE_string("output_dir", None, "Directory of the converted checkpoint.")
    flags.DEFINE_enum("to", "safetensors", list(TARGETS), "Layout to write.")
    flags.DEFINE_enum("store_as", "F32", list(TYPE_NAMES), "Type of the stored safetensors.")
    flags.DEFINE_bool("encoder_only", False, "Whether to leave the heads out.")
    flags.DEFINE_integer("num_decoder_layers", None, "Layers of a decoder; the encoder's if unset.")
    flags.DEFINE_bool("couple_encoder_decoder", False, "Whether a decoder shares its weights.")
    flags.DEFINE_bool("own_decoder_positions", False, "Whether it has a position table of its own.")
    flags.DEFINE_integer(
        "max_encoder_length", None, "Length the model is built for; that of its position table."
    )
    flags.run(_main)


def _main(_):
    values = flags.FLAGS
    if not values.init_checkpoint or not values.output_dir:
        raise ValueError("Give --init_checkpoint, what to convert, and --output_dir, where to.")
    flags.follow_checkpoint()
    if values.vocab_size is None:
        values.vocab_size = _word_table_rows(values.init_checkpoint, values.scope)
    if values.max_encoder_length is None:
        values.max_encoder_length = values.max_position_embeddings
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
