"""Training, evaluation and export of any task's model: exact resume, checkpoints, distribution.

A command goes through this file in one order:

    settings = TrainingSettings(output_dir=..., num_train_steps=..., ...)
    with precision_scope(settings.mixed_precision), create_strategy(...).scope():
        model = ...                                   # a SeededModel, built
        model.compile(optimizer, loss, metrics, **settings.compile_arguments())
    train(model, make_dataset, settings, config=...)
    evaluate(model, dataset, settings, step)
    export_saved_model(module, path)
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
import tf_keras as keras
from absl import logging

from bigbird.core.callbacks import (
    BEST_DIRECTORY,
    CHECKPOINT_DIRECTORY,
    Checkpoints,
    TrainingRecorder,
    atomic_directory,
    checkpoint_steps,
    differences,
    write_atomically,
)
from bigbird.core.devices import PRECISIONS
from bigbird.core.recompute_grad import RecomputeContext
from bigbird.core.run_lock import exclusive_directory

# What decides the weights a run ends with; the other settings may change when it is resumed.
_IDENTITY = (
    "num_train_steps",
    "train_batch_size",
    "seed",
    "gradient_accumulation_steps",
    "jit_compile",
    "mixed_precision",
)


@dataclasses.dataclass(frozen=True)
class TrainingSettings:
    """How a run is trained and what it writes, whatever the task.

    Attributes:
      output_dir: directory of the run; one run each.
      num_train_steps: updates in the whole run.
      train_batch_size: examples in an update, over all replicas and accumulation steps.
      eval_batch_size: examples in an evaluation batch.
      save_checkpoints_steps: updates between two checkpoints, each followed by a validation.
      log_steps: updates between two rows of the training log; a checkpoint ends a row too.
      keep_checkpoints: checkpoints that are kept, the newest ones.
      best_metric: name of the validation result that decides which weights are the best.
      best_mode: `min` or `max`.
      seed: with the step and the layer, what dropout depends on.
      gradient_accumulation_steps: parts that a batch is cut into; the gradient is their mean.
      jit_compile: whether XLA compiles the step.
      mixed_precision: `float32`, `mixed_float16` or `mixed_bfloat16`.

    Raises:
      ValueError: for a value outside its range, naming the field, the value and the remedy.
    """

    output_dir: str
    num_train_steps: int
    train_batch_size: int
    eval_batch_size: int = 8
    save_checkpoints_steps: int = 1000
    log_steps: int = 100
    keep_checkpoints: int = 3
    best_metric: str = "loss"
    best_mode: str = "min"
    seed: int = 0
    gradient_accumulation_steps: int = 1
    jit_compile: bool = False
    mixed_precision: str = "float32"

    def __post_init__(self):
        for field in (
            "num_train_steps",
            "train_batch_size",
            "eval_batch_size",
            "save_checkpoints_steps",
            "log_steps",
            "keep_checkpoints",
            "gradient_accumulation_steps",
        ):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)}: expected at least 1.")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed={self.seed}: expected a number in [0, 2**31).")
        for field, choices in (("mixed_precision", PRECISIONS), ("best_mode", ("min", "max"))):
            if getattr(self, field) not in choices:
                raise ValueError(
                    f"{field}={getattr(self, field)!r}: expected one of {', '.join(choices)}."
                )
        self.check_replicas(1)

    def check_replicas(self, replicas: int) -> None:
        """Checks that a batch can be cut into equal parts.

        Raises:
          ValueError: if it cannot.
        """
        parts = replicas * self.gradient_accumulation_steps
        if self.train_batch_size % parts:
            raise ValueError(
                f"train_batch_size={self.train_batch_size} is not divisible by {parts}: "
                f"{replicas} replica(s) times {self.gradient_accumulation_steps} gradient "
                "accumulation step(s). Change --train_batch_size or --gradient_accumulation_steps."
            )

    def compile_arguments(self) -> dict[str, Any]:
        """Returns the keyword arguments of `SeededModel.compile` that the settings decide."""
        return {
            "run_seed": self.seed,
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "jit_compile": self.jit_compile,
        }

    def identity(self) -> dict[str, Any]:
        """Returns the settings that decide the weights a run ends with."""
        return {name: getattr(self, name) for name in _IDENTITY}


class SeededModel(keras.Model):
    """A Keras model whose dropout is decided by the run's seed, the step and the layer alone.

    Compile it with the optimizer, loss and metrics of the task and
    `**settings.compile_arguments()`. A task whose loss is a mean over something else than examples
    overrides `loss_weight`.
    """

    run_seed = None

    def compile(self, *args, run_seed: int, gradient_accumulation_steps: int = 1, **kwargs):
        """Compiles as Keras does, and sets the run's seed and the parts of a batch."""
        super().compile(*args, **kwargs)
        self.run_seed = run_seed
        self.gradient_accumulation_steps = gradient_accumulation_steps

    def loss_weight(self, data):
        """Returns the weight of a part of a batch: what its mean loss is a mean over.

        One for a mean over examples, since parts have equal sizes; for a mean over target tokens,
        their number. Accumulation then equals the large batch.
        """
        del data
        return 1.0

    def train_step(self, data):
        """Makes one update from a batch."""
        if self.gradient_accumulation_steps > 1:
            return self._accumulated_train_step(data)
        with RecomputeContext(seed=self._step_seed()):
            return super().train_step(data)

    def test_step(self, data):
        """Scores a batch."""
        with inference_context():
            return super().test_step(data)

    def _step_seed(self):
        """Returns the int32 seed [2] of this step, one for each replica."""
        seed = tf.stack([self.run_seed, tf.cast(self.optimizer.iterations, tf.int32)])
        replica = tf.distribute.get_replica_context()
        if replica.num_replicas_in_sync > 1:
            return _fold_in(seed, replica.replica_id_in_sync_group)
        return seed

    def _accumulated_train_step(self, data):
        """Makes one update from the weighted mean gradient of the parts, one part at a time.

        g = sum_i w_i g_i / sum_i w_i
        """
        count, seed = self.gradient_accumulation_steps, self._step_seed()
        parts = tf.nest.map_structure(lambda tensor: _split_batch(tensor, count), data)
        variables = self.trainable_variables
        # As without accumulation, no update at all for a variable that the loss does not reach.
        unreached = set()

        def add_part(index, weight_sum, gradient_sums):
            part = tf.nest.map_structure(lambda tensor: tensor[index], parts)
            with RecomputeContext(seed=_fold_in(seed, index)):
                gradients = self._part_gradients(part, variables)
            unreached.update(i for i, gradient in enumerate(gradients) if gradient is None)
            weight = tf.cast(self.loss_weight(part), tf.float32)
            gradient_sums = [
                total
                if gradient is None
                else total + tf.cast(weight, total.dtype) * tf.convert_to_tensor(gradient)
                for total, gradient in zip(gradient_sums, gradients, strict=True)
            ]
            return index + 1, weight_sum + weight, gradient_sums

        _, weight_sum, gradient_sums = tf.while_loop(
            lambda index, *_: index < count,
            add_part,
            (0, 0.0, [tf.zeros(variable.shape, variable.dtype) for variable in variables]),
            parallel_iterations=1,
        )
        self.optimizer.apply_gradients(
            (total / tf.cast(weight_sum, total.dtype), variable)
            for i, (total, variable) in enumerate(zip(gradient_sums, variables, strict=True))
            if i not in unreached
        )
        return self.get_metrics_result()

    def _part_gradients(self, part, variables):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(part)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
        self.compute_metrics(x, y, y_pred, sample_weight)
        pairs = self.optimizer.compute_gradients(loss, variables, tape=tape)
        return [gradient for gradient, _ in pairs]


def _fold_in(seed, data):
    # Named: the default generator differs between compiled and other code.
    return tf.random.fold_in(seed, data, alg="philox")


def _split_batch(tensor, count):
    """[B, ...] -> [count, B / count, ...]"""
    shape = tf.shape(tensor)
    parts = tf.reshape(tensor, tf.concat([[count, shape[0] // count], shape[1:]], axis=0))
    batch = tensor.shape[0]
    parts.set_shape([count, None if batch is None else batch // count, *tensor.shape[1:]])
    return parts


def inference_context() -> RecomputeContext:
    """Returns the context of a forward pass without dropout, where every seed is as good."""
    return RecomputeContext(seed=0)


def train(
    model: SeededModel,
    make_dataset: Callable[[int], tf.data.Dataset],
    settings: TrainingSettings,
    *,
    config: Mapping[str, Any] | None = None,
    validation_dataset: tf.data.Dataset | None = None,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    verbose: str | int = "auto",
) -> None:
    """Trains to `settings.num_train_steps`, or takes up the run that `output_dir` holds.

    Killed at any moment and started again, a run on a CPU ends with the same weights, bit for bit,
    as one that was never killed. In `output_dir`: `config.json`, `train.csv` and `validation.csv`
    (a row is the mean since the row before), the same for TensorBoard under `train` and
    `validation`, `checkpoints`, and `best`, the checkpoint of the best validation.

    SIGTERM saves a checkpoint after the step that is running and ends the process with status 143.

    Args:
      model: built, and compiled with `**settings.compile_arguments()`; its optimizer's counter
        is the step.
      make_dataset: gives, for a step, the endless stream of batches an uninterrupted run sees
        from there on.
      settings: of the run.
      config: what else decides the result, as JSON values; such as the model's configuration.
      validation_dataset: finite; scored after every checkpoint.
      callbacks: further ones of `fit`, called before the run is logged and saved.
      verbose: 0 shows nothing, 1 a progress bar, 2 a line at every row of the log; "auto" is 1 on
        a terminal and 2 elsewhere.

    Raises:
      ValueError: before anything is written, if the model is not ready or `output_dir` holds
        another configuration or is being written by another process; later, if the data ends or
        `best_metric` does not exist.
      FloatingPointError: if the loss or a weight is no longer finite; names the step.
    """
    _check_model(model, settings)
    identity = _as_json({**(config or {}), **settings.identity()})
    check_configuration(settings.output_dir, identity)
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    verbose = verbosity(verbose)
    recorder = TrainingRecorder(model, settings, validation_dataset, print_rows=verbose == 2)
    resumes = recorder.restore()
    if recorder.step and not resumes:
        raise ValueError(
            f"The optimizer has made {recorder.step} updates already, and {settings.output_dir} "
            "holds no run to resume: compile the model with a new optimizer."
        )
    dataset = make_dataset(recorder.step)

    tf.io.gfile.makedirs(settings.output_dir)
    with exclusive_directory(settings.output_dir):
        write_atomically(_configuration_path(settings.output_dir), json.dumps(identity, indent=1))
        _log_batch_size(model, settings)
        if resumes:
            recorder.resume()
        else:
            recorder.start()
        _fit(model, dataset, settings.num_train_steps, recorder, callbacks, verbose)
        recorder.validate()


def _fit(model, dataset, num_train_steps, recorder, callbacks, verbose):
    if recorder.step < num_train_steps:
        with _on_sigterm(recorder.request_stop):
            model.fit(
                dataset,
                steps_per_epoch=num_train_steps - recorder.step,
                callbacks=[*callbacks, recorder],
                verbose=verbose == 1,
            )
    if recorder.stop_requested:
        raise SystemExit(128 + signal.SIGTERM)
    if recorder.step < num_train_steps:
        raise ValueError(
            f"The training data ended before step {num_train_steps}: make_dataset must return a "
            "stream without end, such as dataset.repeat()."
        )


def evaluate(
    model: keras.Model,
    dataset: tf.data.Dataset,
    settings: TrainingSettings,
    step: int,
    verbose: str | int = "auto",
) -> dict[str, float]:
    """Scores every example of a dataset once and writes the results beside the run.

    Args:
      model: compiled; a result of the last, smaller batch counts by its number of examples, as
        Keras does for a compiled loss and metrics.
      dataset: finite, in batches of any size.
      settings: of the run; `output_dir` receives `eval_results_{step}.txt` ("key = value" lines)
        and `.json`.
      step: step of the weights.
      verbose: as for `train`.

    Returns:
      The results by name, and `global_step`.

    Raises:
      ValueError: if the dataset is empty or has no end.
    """
    cardinality = int(dataset.cardinality())
    if cardinality in (0, tf.data.INFINITE_CARDINALITY):
        kind = "has no end" if cardinality else "is empty"
        raise ValueError(f"The evaluation dataset {kind}: give every example once.")
    scores = model.evaluate(dataset, return_dict=True, verbose=verbosity(verbose))
    results = {"global_step": step, **{name: float(scores[name]) for name in sorted(scores)}}
    write_results(results, settings.output_dir)
    return results


def write_results(results: Mapping[str, float], output_dir: str) -> None:
    """Writes what an evaluation found as `eval_results_{global_step}.txt` and `.json`."""
    tf.io.gfile.makedirs(output_dir)
    path = os.path.join(output_dir, f"eval_results_{results['global_step']}")
    lines = "".join(f"{name} = {value}\n" for name, value in results.items())
    write_atomically(f"{path}.txt", lines)
    write_atomically(f"{path}.json", json.dumps(results, indent=1))


def has_weights(output_dir: str) -> bool:
    """Returns whether `restore_weights` finds a checkpoint in a directory."""
    return bool(checkpoint_steps(os.path.join(output_dir, CHECKPOINT_DIRECTORY)))


def restore_weights(model: keras.Model, output_dir: str, best: bool = False) -> int:
    """Gives a built model the newest weights of a run, or those of its best validation.

    Returns:
      The step of the weights.

    Raises:
      ValueError: if the run has no checkpoint, none can be read, or they are of another model.
    """
    directory = os.path.join(output_dir, BEST_DIRECTORY if best else CHECKPOINT_DIRECTORY)
    step = Checkpoints(model, directory).restore()
    if step is None:
        raise ValueError(
            f"{directory} holds no checkpoint: train there first, or name the output_dir of a run."
        )
    return step


def export_saved_model(module: tf.Module, path: str) -> None:
    """Writes a SavedModel that serves `module.serve`.

    It is written under a temporary name and renamed; an older export is replaced.

    Args:
      module: its attribute `serve` is a `tf.function` with an input signature, for instance of
        `tf.TensorSpec([None], tf.string)`, that returns a dict of tensors; it becomes the signature
        `serving_default`.
      path: directory of the export.

    Raises:
      ValueError: if there is no such function.
    """
    serve = getattr(module, "serve", None)
    if getattr(serve, "input_signature", None) is None:
        raise ValueError(
            f"{type(module).__name__}.serve must be a tf.function with an input_signature; "
            f"received {serve!r}."
        )
    with atomic_directory(path) as directory:
        tf.saved_model.save(module, directory, signatures={"serving_default": serve})


def _check_model(model, settings):
    if getattr(model, "run_seed", None) != settings.seed:
        raise ValueError(
            "The model is not compiled for these settings: call "
            "model.compile(optimizer, loss, metrics, **settings.compile_arguments()) on a "
            "SeededModel before train."
        )
    if not model.built:
        raise ValueError("The model has no variables yet: call it on one batch before train.")
    if model.dtype_policy.name != settings.mixed_precision:
        raise ValueError(
            f"The model computes in {model.dtype_policy.name} and "
            f"mixed_precision={settings.mixed_precision!r}: make it inside "
            "precision_scope(settings.mixed_precision)."
        )
    settings.check_replicas(model.distribute_strategy.num_replicas_in_sync)


def _configuration_path(output_dir):
    return os.path.join(output_dir, "config.json")


def read_configuration(output_dir: str) -> dict[str, Any] | None:
    """Returns the configuration of the run in a directory, None where there is no run."""
    path = _configuration_path(output_dir)
    if not tf.io.gfile.exists(path):
        return None
    with tf.io.gfile.GFile(path) as file:
        return json.load(file)


def check_configuration(
    output_dir: str, values: Mapping[str, Any], names: Iterable[str] | None = None
) -> None:
    """Refuses a directory that holds a run of other settings.

    Args:
      output_dir: directory of a run, or a new one, which always fits.
      values: settings as JSON values.
      names: those that must agree; all where None.

    Raises:
      ValueError: naming every difference.
    """
    claimed = read_configuration(output_dir)
    if claimed is None:
        return
    names = claimed.keys() | values.keys() if names is None else names
    found = differences(
        {name: claimed[name] for name in names if name in claimed},
        {name: values[name] for name in names if name in values},
    )
    if found:
        raise ValueError(
            f"output_dir={output_dir} holds a run of another configuration "
            f"({found}). Choose another --output_dir, or the settings of that run."
        )


def _as_json(values):
    """Returns the values as they read back from JSON, where a tuple is a list."""
    return json.loads(json.dumps(values))


def _log_batch_size(model, settings):
    replicas = model.distribute_strategy.num_replicas_in_sync
    accumulation = settings.gradient_accumulation_steps
    logging.info(
        "Effective batch size %d: %d replica(s) x %d accumulation step(s) x %d example(s).",
        settings.train_batch_size,
        replicas,
        accumulation,
        settings.train_batch_size // (replicas * accumulation),
    )


def verbosity(verbose: str | int = "auto") -> int:
    """Returns 0, 1 or 2 as they are; for "auto" 1 on a terminal and 2 elsewhere.

    A file full of progress bars cannot be read.
    """
    if verbose == "auto":
        return 1 if sys.stdout.isatty() else 2
    return verbose


@contextlib.contextmanager
def _on_sigterm(handler):
    """Handles SIGTERM inside, where that is possible: Python gives signals to the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)
