"""What the commands of every task share: settings, model and weights, as their flags say.

A command is a task's own flags and model; everything between them and `training.py` is here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
import tf_keras as keras

from bigbird.core import flags, training
from bigbird.core.config import BigBirdConfig
from bigbird.core.devices import create_strategy, precision_scope
from bigbird.core.optimization import create_optimizer

FLAGS = flags.FLAGS

# Flags of every task that decide the result of a run, besides the model's and the settings.
_RESULT_FLAGS = (
    "data_dir",
    "vocab_model_file",
    "substitute_newline",
    "pad_to_batch",
    "init_checkpoint",
    "optimizer",
    "learning_rate",
    "num_warmup_steps",
    "weight_decay_rate",
    "optimizer_beta1",
    "optimizer_beta2",
    "optimizer_epsilon",
)


def define_command_flags():
    """Defines the flags of a command that reads documents, beyond the 2021 ones."""
    flags.DEFINE_bool(
        "pad_to_batch", False, "Whether to pad a batch to its longest text instead of the model's."
    )
    flags.DEFINE_string(
        "validation_split",
        None,
        "Split that is scored at every checkpoint and chooses the best one.",
    )
    flags.DEFINE_bool("do_predict", False, "Whether to read the documents of --input_file.")
    flags.DEFINE_string(
        "input_file", None, "Documents to predict: .jsonl, .csv, .tfrecord, or .txt, one a line."
    )
    flags.DEFINE_string(
        "output_file", None, "Predictions; OUTPUT_DIR/predictions.jsonl where unset."
    )


def check_command_flags():
    """Checks that there is something to do, and the data to do it with.

    Raises:
      ValueError: naming the flag.
    """
    if not (FLAGS.do_train or FLAGS.do_eval or FLAGS.do_export or FLAGS.do_predict):
        raise ValueError("Nothing to do: give --do_train, --do_eval, --do_export or --do_predict.")
    if FLAGS.validation_split == "train":
        raise ValueError("--validation_split=train: expected another split than the training one.")
    if FLAGS.do_predict and not FLAGS.input_file:
        raise ValueError("--do_predict needs --input_file: a .jsonl, .csv or .txt of documents.")


def training_settings(best_metric: str, best_mode: str) -> training.TrainingSettings:
    """Returns the settings that the flags describe.

    Raises:
      ValueError: for flags outside their ranges.
    """
    return training.TrainingSettings(
        output_dir=FLAGS.output_dir,
        num_train_steps=FLAGS.num_train_steps,
        train_batch_size=FLAGS.train_batch_size,
        eval_batch_size=FLAGS.eval_batch_size,
        save_checkpoints_steps=FLAGS.save_checkpoints_steps,
        log_steps=FLAGS.log_steps,
        keep_checkpoints=FLAGS.keep_checkpoints,
        best_metric=best_metric,
        best_mode=best_mode,
        seed=FLAGS.seed,
        gradient_accumulation_steps=FLAGS.gradient_accumulation_steps,
        jit_compile=FLAGS.jit_compile,
        mixed_precision=FLAGS.mixed_precision,
    )


def run_configuration(config: BigBirdConfig, *task_flags: str) -> dict[str, Any]:
    """Returns what decides the result of a run: the model, and the flags of every and this task."""
    names = (*_RESULT_FLAGS, *task_flags)
    return {**config.to_dict(), **{name: FLAGS[name].value for name in names}}


@contextlib.contextmanager
def model_scope() -> Iterator[None]:
    """Gives the place to make and compile a model: devices, precision and seed are the flags'."""
    # The command owns its process: one seed decides the initial weights.
    keras.utils.set_random_seed(FLAGS.seed)
    strategy = create_strategy(
        use_tpu=FLAGS.use_tpu,
        tpu_name=FLAGS.tpu_name,
        master=FLAGS.master,
        tpu_zone=FLAGS.tpu_zone,
        tpu_job_name=FLAGS.tpu_job_name,
        gcp_project=FLAGS.gcp_project,
    )
    with precision_scope(FLAGS.mixed_precision), strategy.scope():
        yield


def optimizer(schedule) -> keras.optimizers.Optimizer:
    """Returns the optimizer of the flags, with a learning-rate schedule."""
    return create_optimizer(
        FLAGS.optimizer,
        schedule,
        weight_decay_rate=FLAGS.weight_decay_rate,
        beta_1=FLAGS.optimizer_beta1,
        beta_2=FLAGS.optimizer_beta2,
        epsilon=FLAGS.optimizer_epsilon,
    )


def weights_of_the_run(model: keras.Model) -> int:
    """Loads the newest weights of `output_dir`, or keeps those of `init_checkpoint`; their step.

    Raises:
      ValueError: if there are neither.
    """
    if FLAGS.init_checkpoint and not tf.io.gfile.exists(FLAGS.output_dir):
        return 0
    return training.restore_weights(model, FLAGS.output_dir)
