"""What the commands of every task share: settings, data, model and weights, as their flags say.

A command is a task's own flags and model; everything between them and `training.py` is here.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tf_keras as keras

from bigbird.core import flags, training
from bigbird.core.checkpoint import load_initial_weights
from bigbird.core.config import DECODER_FIELDS, MEMORY_FIELDS, BigBirdConfig
from bigbird.core.data import ExampleSource, open_source
from bigbird.core.devices import create_strategy, precision_scope
from bigbird.core.optimization import create_optimizer

FLAGS = flags.FLAGS

# Flags that say what every trained model computes, from text on.
MODEL_FLAGS = (
    *(
        field.name
        for field in dataclasses.fields(BigBirdConfig)
        if field.name not in (*MEMORY_FIELDS, *DECODER_FIELDS, "pad_token_id")
    ),
    "pad_id",
    "vocab_model_file",
    "substitute_newline",
)
# Flags that decide how every model is trained, besides the training settings.
TRAINING_FLAGS = (
    "data_dir",
    "pad_to_batch",
    "init_checkpoint",
    "extend_positions",
    "ignore_mismatched",
    "optimizer",
    "learning_rate",
    "num_warmup_steps",
    "weight_decay_rate",
    "optimizer_beta1",
    "optimizer_beta2",
    "optimizer_epsilon",
)


def define_command_flags(predicts: bool = True):
    """Defines the flags of a command that reads documents, beyond the 2021 ones.

    Args:
      predicts: whether the command has `--do_predict`.
    """
    flags.DEFINE_bool(
        "pad_to_batch", False, "Whether to pad a batch to its longest text instead of the model's."
    )
    flags.DEFINE_string(
        "validation_split",
        None,
        "Split that is scored at every checkpoint and chooses the best one.",
    )
    if not predicts:
        return
    flags.DEFINE_bool("do_predict", False, "Whether to read the documents of --input_file.")
    flags.DEFINE_string(
        "input_file", None, "Documents to predict: .jsonl, .csv, .tfrecord, or .txt, one a line."
    )
    flags.DEFINE_string(
        "output_file", None, "Predictions; OUTPUT_DIR/predictions.jsonl where unset."
    )


def check_command_flags():
    """Checks that there is something to do, and the data to do it with; reads `--init_checkpoint`.

    Flags that were left open take the values that the checkpoint's description gives them.

    Raises:
      ValueError: naming the flag.
    """
    tasks = [f"do_{t}" for t in ("train", "eval", "export", "predict") if f"do_{t}" in FLAGS]
    if not any(FLAGS[task].value for task in tasks):
        listed = ", ".join(f"--{task}" for task in tasks[:-1])
        raise ValueError(f"Nothing to do: give {listed} or --{tasks[-1]}.")
    if FLAGS.validation_split == "train":
        raise ValueError("--validation_split=train: expected another split than the training one.")
    if _predicts() and not FLAGS.input_file:
        raise ValueError("--do_predict needs --input_file: a .jsonl, .csv or .txt of documents.")
    # Before anything reads the flags of the model.
    flags.follow_checkpoint()


def _predicts() -> bool:
    return "do_predict" in FLAGS and FLAGS.do_predict


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


def adopt_run(model_flags: Sequence[str]) -> dict[str, Any]:
    """Returns the configuration of the run in `output_dir`, or {} where there is none.

    Where nothing is trained, the run says what the model is: flags that the command line left open
    take its values.

    Args:
      model_flags: the flags that say what the task's model computes.

    Raises:
      ValueError: where the command line gives another model than the run's.
    """
    run = training.read_configuration(FLAGS.output_dir) or {}
    if not FLAGS.do_train:
        flags.adopt(run, model_flags)
        values = {name: FLAGS[name].value for name in model_flags}
        values["vocab_size"] = flags.model_config().vocab_size
        training.check_configuration(FLAGS.output_dir, values, model_flags)
    return run


def identity(config: BigBirdConfig, names: Sequence[str]) -> dict[str, Any]:
    """Returns what decides the result of a run: the named flags, as the config resolved them."""
    values = {name: FLAGS[name].value for name in names}
    resolved = {name: getattr(config, name) for name in ("vocab_size", *MEMORY_FIELDS)}
    return {**values, **resolved}


def open_sources(
    open_split: Callable[[str], ExampleSource], eval_split: str, document_field: str
) -> dict[str, ExampleSource]:
    """Opens and checks all that the flags ask to read, before anything else is done.

    Args:
      open_split: opens a split of the task's data.
      eval_split: what `--do_eval` reads.
      document_field: name of the text in `--input_file`.

    Returns:
      The sources by split, and that of the `input_file` under this name.
    """
    splits = ["train", FLAGS.validation_split] if FLAGS.do_train else []
    splits += [eval_split] if FLAGS.do_eval else []
    sources = {split: open_split(split) for split in splits if split}
    if _predicts():
        sources["input_file"] = open_source(
            FLAGS.input_file, None, fields=(document_field,), flag="input_file"
        )
    return sources


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


def load_init_checkpoint(
    model: keras.Model, heads: Mapping[str, keras.layers.Layer] | None = None
) -> None:
    """Gives a model the weights of `--init_checkpoint`, if it is set, and says what it was.

    Args:
      model: a `BertModel` or `TransformerModel`.
      heads: as in `checkpoint.load_initial_weights`.

    Raises:
      ValueError: for a checkpoint that cannot be read or does not fit.
    """
    if FLAGS.init_checkpoint:
        report = load_initial_weights(
            model,
            FLAGS.init_checkpoint,
            heads,
            extend_positions=FLAGS.extend_positions,
            ignore_mismatched=FLAGS.ignore_mismatched,
        )
        print(report)


def weights_of_the_run(model: keras.Model) -> int:
    """Loads the newest weights of `output_dir`, or keeps those of `init_checkpoint`; their step.

    Raises:
      ValueError: if there are neither.
    """
    if FLAGS.init_checkpoint and not training.has_weights(FLAGS.output_dir):
        return 0
    return training.restore_weights(model, FLAGS.output_dir)
