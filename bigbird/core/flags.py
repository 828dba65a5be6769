"""Command-line flags: the model's, shared by every command, and how they become a config.

Flag names and defaults are the 2021 toolkit's. Importing this module defines the shared flags; a
task module adds its own with the `DEFINE_*` functions re-exported here.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging as standard_logging
import pathlib
import re
import sys

import tensorflow as tf
from absl import app, flags, logging

from bigbird.core.checkpoint_formats.pretrained_config import flag_values
from bigbird.core.config import (
    ATTENTION_TYPES,
    CHECKPOINTING_POLICIES,
    NORM_TYPES,
    PATTERN_LENGTHS,
    BigBirdConfig,
)
from bigbird.core.devices import PRECISIONS
from bigbird.core.optimization import OPTIMIZERS
from bigbird.core.vocabulary import SpecialTokens, find_vocabulary, vocabulary_size

FLAGS = flags.FLAGS


def _shared_between_tasks(define):
    """Lets two task modules define one name: the one imported last gives the default."""
    return functools.partial(define, allow_override=True)


DEFINE_string = _shared_between_tasks(flags.DEFINE_string)
DEFINE_integer = _shared_between_tasks(flags.DEFINE_integer)
DEFINE_float = _shared_between_tasks(flags.DEFINE_float)
DEFINE_bool = DEFINE_boolean = _shared_between_tasks(flags.DEFINE_bool)
DEFINE_enum = _shared_between_tasks(flags.DEFINE_enum)
DEFINE_list = _shared_between_tasks(flags.DEFINE_list)

# Model.
DEFINE_float("attention_probs_dropout_prob", 0.1, "Dropout of the attention probabilities.")
DEFINE_string("hidden_act", "gelu", "Activation of the feed-forward layers.")
DEFINE_float("hidden_dropout_prob", 0.1, "Dropout of embeddings and layer outputs.")
DEFINE_integer("hidden_size", 768, "Width of the model.")
DEFINE_float("initializer_range", 0.02, "Standard deviation of the initial weights.")
DEFINE_integer("intermediate_size", 3072, "Width of the feed-forward layers.")
DEFINE_float("layer_norm_epsilon", 1e-12, "Added to the variance by LayerNorm.")
DEFINE_integer("max_position_embeddings", 4096, "Rows of the position table.")
DEFINE_integer("num_attention_heads", 12, "Attention heads of a layer.")
DEFINE_integer("num_hidden_layers", 12, "Layers of the encoder.")
DEFINE_integer("type_vocab_size", 2, "Rows of the token type table.")
DEFINE_bool("use_bias", True, "Whether the attention projections have biases.")
DEFINE_bool("rescale_embedding", False, "Whether to multiply word embeddings by sqrt(width).")
DEFINE_string("scope", "bert", "First part of the variable names.")
DEFINE_string(
    "vocab_model_file",
    "gpt2",
    "SentencePiece vocabulary: a path, or gpt2, pegasus (looked up in $BIGBIRD_VOCAB_DIR and the "
    "user cache) or builtin (trained on the built-in documents).",
)

# Attention pattern.
DEFINE_enum(
    "attention_type",
    "block_sparse",
    list(ATTENTION_TYPES),
    "Full attention, the sparse pattern by a dense mask, or by blocks.",
)
DEFINE_enum("norm_type", "postnorm", list(NORM_TYPES), "Where LayerNorm sits.")
DEFINE_integer("block_size", 16, "Tokens in a block of the sparse pattern.")
DEFINE_integer("num_rand_blocks", 3, "Random blocks of a row of the sparse pattern.")
DEFINE_enum(
    "pattern_length",
    "model",
    list(PATTERN_LENGTHS),
    "Whose length decides the pattern: the model's (2021) or each input's (Hugging Face).",
)
DEFINE_integer("num_window_blocks", 3, "Blocks of the window around a row's own; odd.")
DEFINE_integer("num_global_blocks", 1, "Blocks at either end that see and are seen by all.")
DEFINE_list("global_token_positions", [], "Tokens whose blocks are global too, by position.")
DEFINE_bool(
    "random_from_whole_sequence",
    False,
    "Whether random blocks come from the whole sequence at 1,024 to 4,096 tokens too, and not from "
    "its first 1,024.",
)
DEFINE_bool(
    "unseen_random_blocks", False, "Whether a row draws only random blocks that it does not see."
)
DEFINE_integer("pattern_seed", 0, "Added to a layer's index to seed its random blocks.")
DEFINE_bool(
    "sparse_attention_dropout",
    False,
    "Whether attention_probs_dropout_prob applies to the sparse types; in 2021 it did not.",
)

# Memory.
DEFINE_bool(
    "use_gradient_checkpointing",
    False,
    "Recompute every layer in the backward pass instead of keeping its activations.",
)
DEFINE_enum(
    "gradient_checkpointing_policy",
    None,
    list(CHECKPOINTING_POLICIES),
    "What to recompute: nothing, every layer, one layer in n, the attention blocks, or whatever "
    "fits --memory_budget_gb. --use_gradient_checkpointing alone means full.",
)
DEFINE_integer(
    "gradient_checkpointing_every_n", 2, "n of the every_n policy: recompute one layer in n."
)
DEFINE_float("memory_budget_gb", None, "Memory that a training step may use, in GiB.")

# Optimizer.
DEFINE_float("weight_decay_rate", 0.01, "Weight decay of AdamWeightDecay.")
DEFINE_float("optimizer_beta1", 0.9, "Decay of the first moment.")
DEFINE_float("optimizer_beta2", 0.999, "Decay of the second moment.")
DEFINE_float("optimizer_epsilon", 1e-6, "Added to the root of the second moment.")

# Accelerators.
DEFINE_bool("use_tpu", False, "Whether to train on a TPU.")
DEFINE_string("tpu_name", None, "Name or address of the TPU.")
DEFINE_string("tpu_zone", None, "Zone of the TPU.")
DEFINE_string("tpu_job_name", None, "Job name of the TPU worker.")
DEFINE_string("gcp_project", None, "Cloud project of the TPU.")
DEFINE_string("master", None, "Address of the TPU's master, instead of its name.")
DEFINE_integer("num_tpu_cores", 8, "Without effect: the TPU tells; kept for scripts.")
DEFINE_string("iterations_per_loop", "1000", "Without effect; kept for scripts.")

# Training beyond the 2021 flags.
DEFINE_integer("seed", 0, "Decides initial weights, order of the data and dropout.")
DEFINE_bool("jit_compile", False, "Whether XLA compiles the training step.")
DEFINE_enum("mixed_precision", "float32", list(PRECISIONS), "Policy of the layers' dtypes.")
DEFINE_integer("gradient_accumulation_steps", 1, "Parts that a batch is cut into.")
DEFINE_integer("log_steps", 100, "Updates between two rows of the training log.")
DEFINE_integer("keep_checkpoints", 3, "Checkpoints that are kept, the newest ones.")

# Data beyond the 2021 flags.
DEFINE_string("tfds_data_dir", None, "Where TFDS finds prepared data sets.")
DEFINE_integer("vocab_size", None, "Rows of the word table; those of the vocabulary where unset.")
for _token, _id in dataclasses.asdict(SpecialTokens()).items():
    DEFINE_integer(f"{_token}_id", _id, f"Id of the {_token.upper()} token in the vocabulary.")


def define_task_flags(**defaults):
    """Defines the flags that every task has, with the defaults of one task.

    Args:
      **defaults: the value of each flag below, all of them.
    """
    DEFINE_string("data_dir", defaults.pop("data_dir"), "tfds://, builtin://, a directory or file.")
    DEFINE_string("output_dir", "/tmp/bigb", "Directory of the run; one run each.")
    DEFINE_string(
        "init_checkpoint",
        None,
        "Initial weights: a 2021 checkpoint, a directory with config.json and model.safetensors, "
        "the output directory of a run, or a SavedModel.",
    )
    DEFINE_bool(
        "extend_positions", False, "Whether to fill a longer position table by repeating theirs."
    )
    DEFINE_list(
        "ignore_mismatched",
        [],
        "Tensors of --init_checkpoint whose shapes may differ, by name or pattern; not loaded.",
    )
    DEFINE_integer(
        "max_encoder_length", defaults.pop("max_encoder_length"), "Tokens of a document, at most."
    )
    DEFINE_string(
        "substitute_newline", defaults.pop("substitute_newline"), "Text that stands for a newline."
    )
    DEFINE_bool("do_train", True, "Whether to train.")
    DEFINE_bool("do_eval", False, "Whether to evaluate the newest weights.")
    DEFINE_bool("do_export", False, "Whether to write a SavedModel that takes strings.")
    DEFINE_integer("train_batch_size", defaults["batch_size"], "Examples in an update.")
    DEFINE_integer("eval_batch_size", defaults.pop("batch_size"), "Examples in other batches.")
    DEFINE_enum("optimizer", defaults.pop("optimizer"), list(OPTIMIZERS), "The optimizer.")
    DEFINE_float("learning_rate", defaults.pop("learning_rate"), "Peak of the learning rate.")
    DEFINE_integer("num_train_steps", defaults.pop("num_train_steps"), "Updates of the whole run.")
    DEFINE_integer("num_warmup_steps", defaults.pop("num_warmup_steps"), "Updates of the warm-up.")
    DEFINE_integer(
        "save_checkpoints_steps", defaults.pop("save_checkpoints_steps"), "Updates per checkpoint."
    )
    if defaults:
        raise TypeError(f"Not flags of every task: {', '.join(defaults)}.")


def follow_checkpoint() -> None:
    """Gives the flags that were left at their defaults what `--init_checkpoint` says about them.

    A directory with a `config.json`, Hugging Face's or a run's of ours, says what the model is; a
    2021 checkpoint says nothing.

    Raises:
      ValueError: for a description of something that our models do not compute.
    """
    if not FLAGS.init_checkpoint:
        return
    values = flag_values(FLAGS.init_checkpoint)
    adopt(values, [name for name in values if name in FLAGS])


def special_tokens() -> SpecialTokens:
    """Returns the special ids that the flags name."""
    fields = dataclasses.fields(SpecialTokens)
    return SpecialTokens(**{field.name: FLAGS[f"{field.name}_id"].value for field in fields})


def model_config() -> BigBirdConfig:
    """Returns the config that the flags describe.

    Raises:
      ValueError: for flags outside their ranges, or a vocabulary that is not found.
    """
    return BigBirdConfig.from_params(as_dictionary())


def as_dictionary() -> dict:
    """Returns every flag of this package and of the running program as a new dict.

    `vocab_size` is that of the vocabulary where the flag leaves it open.

    Raises:
      ValueError: where the vocabulary is needed and not found.
    """
    values = {flag.name: flag.value for flag in _own_flags()}
    if values["vocab_size"] is None:
        values["vocab_size"] = vocabulary_size(find_vocabulary(values["vocab_model_file"]))
    for token in ("pad", "eos", "bos"):
        values[f"{token}_token_id"] = values[f"{token}_id"]
    return values


def given() -> dict:
    """Returns those that the command line set, as a new dict."""
    return {flag.name: flag.value for flag in _own_flags() if not flag.using_default_value}


def _own_flags():
    for module, defined in FLAGS.flags_by_module_dict().items():
        if module.startswith("bigbird.") or module == sys.argv[0]:
            yield from defined


def save(path):
    """Writes the flags as JSON."""
    with tf.io.gfile.GFile(path, "w") as file:
        json.dump(as_dictionary(), file, indent=1, sort_keys=True)


def load(path):
    """Sets the flags from a file that `save` wrote; names unknown here are left out."""
    with tf.io.gfile.GFile(path) as file:
        values = json.load(file)
    for name, value in values.items():
        if name in FLAGS:
            setattr(FLAGS, name, value)


def adopt(values, names):
    """Sets the flags that the command line left open to the values of an earlier run.

    Args:
      values: what the run was made with, by flag name.
      names: the flags to set where `values` has them.
    """
    for name in names:
        if FLAGS[name].using_default_value and name in values:
            FLAGS[name].value = values[name]


# What a user can cause and mend: wrong values, files, disks and memory. Others are our faults.
_USER_ERRORS = (
    ValueError,
    FloatingPointError,
    OSError,
    tf.errors.AlreadyExistsError,
    tf.errors.FailedPreconditionError,
    tf.errors.NotFoundError,
    tf.errors.PermissionDeniedError,
    tf.errors.ResourceExhaustedError,
)


def _concerns_users(record):
    # TensorFlow tells of its own steps in checkpoints and exports, at the level of our messages.
    of_libraries = {"tensorflow", "tf_keras"} & set(pathlib.PurePath(record.pathname).parts)
    return record.levelno > standard_logging.INFO or not of_libraries


def _told_by_pipeline(error: tf.errors.OpError) -> str | None:
    """A user's error that Python raised inside a `tf.data` pipeline, out of TensorFlow's quotation.

    TensorFlow keeps the name of its class, its text and its traceback, as one string.
    """
    told, is_of_python, _ = (error.message or "").partition("\nTraceback (most recent call last)")
    names = "|".join(cls.__name__ for cls in _with_subclasses(_USER_ERRORS))
    found = re.search(rf"\b((?:{names}): .*)", told, re.DOTALL)
    return found[1] if found and is_of_python else None


def _with_subclasses(classes):
    for cls in classes:
        yield cls
        yield from _with_subclasses(cls.__subclasses__())


def run(main):
    """Runs a command: parses its flags and tells a user's error without a traceback.

    `--verbosity=1` shows the traceback too.
    """
    for module, defined in FLAGS.flags_by_module_dict().items():
        if module.startswith("bigbird."):
            for flag in defined:  # --help lists those of the program's own module only
                FLAGS.register_key_flag_for_module(sys.argv[0], flag)

    def guarded(argv):
        for logger in (logging.get_absl_logger(), tf.get_logger()):
            logger.addFilter(_concerns_users)
        try:
            return main(argv)
        except (*_USER_ERRORS, tf.errors.OpError) as error:
            told = _told_by_pipeline(error) if isinstance(error, tf.errors.OpError) else None
            if told is None and not isinstance(error, _USER_ERRORS):
                raise
            logging.debug("The error came from:", exc_info=True)
            sys.exit(told or f"{type(error).__name__}: {error}")

    app.run(guarded)
