"""What a training run leaves on disk as it goes: logs, checkpoints and the best weights.

Everything is made so that a process killed at any moment, and started again, ends with the same
tables and weights as one that was never killed: a log row is written before the checkpoint of its
step, so that a run which goes back to a checkpoint can drop every later row and write it again.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tensorflow as tf
import tf_keras as keras
from absl import logging

CHECKPOINT_DIRECTORY = "checkpoints"
BEST_DIRECTORY = "best"

_CHECKPOINT_NAME = re.compile(r"step_(\d+)$")


def write_atomically(path: str, text: str) -> None:
    """Writes a file under a temporary name and renames it: readers see the old or the new text."""
    temporary = f"{path}.tmp"
    with tf.io.gfile.GFile(temporary, "w") as file:
        file.write(text)
    tf.io.gfile.rename(temporary, path, overwrite=True)


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Says in which entries, nested ones too, two configurations differ; "" where they are equal.

    Args:
      there: as read from JSON.
      here: values that can be written as JSON.
    """
    # As it reads back from JSON, where a tuple is a list.
    return "; ".join(_list_differences(there, json.loads(json.dumps(here))))


def _list_differences(there, here, prefix=""):
    for name in sorted(there.keys() | here.keys()):
        theirs, ours = there.get(name, "nothing"), here.get(name, "nothing")
        if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
            yield from _list_differences(theirs, ours, f"{prefix}{name}.")
        elif theirs != ours:
            yield f"{prefix}{name}: {theirs} there, {ours} here"


@contextlib.contextmanager
def atomic_directory(path: str) -> Iterator[str]:
    """Gives the name of a directory to write, which becomes `path` at the end of the block.

    What was at `path` stays until then, and after an error.
    """
    temporary, replaced = f"{path}.tmp", f"{path}.replaced"
    if tf.io.gfile.exists(replaced) and not tf.io.gfile.exists(path):
        # A process was killed between the two renames below.
        tf.io.gfile.rename(replaced, path)
    _remove_directory(replaced)
    _remove_directory(temporary)
    yield temporary
    if tf.io.gfile.exists(path):
        tf.io.gfile.rename(path, replaced)
    tf.io.gfile.rename(temporary, path)
    _remove_directory(replaced)


def _remove_directory(path):
    if tf.io.gfile.exists(path):
        tf.io.gfile.rmtree(path)


class ScalarLog:
    """Numbers by step, as the table `<directory>/<name>.csv` and as a run of TensorBoard.

    Keras's own loggers count batches from the start of the process; this one counts steps of the
    run, and can go back to an earlier one. Nothing is created before the first row.
    """

    def __init__(self, directory: str, name: str):
        self._path = os.path.join(directory, f"{name}.csv")
        self._events = os.path.join(directory, name)
        self._writer = None
        self._columns = []

    def rows(self) -> list[dict[str, float]]:
        """Returns the rows in order; columns that a row left empty are absent from it."""
        if not tf.io.gfile.exists(self._path):
            return []
        with tf.io.gfile.GFile(self._path) as file:
            # A last line without its end was torn by a crash.
            lines = [line for line in file.read().splitlines(keepends=True) if line.endswith("\n")]
        return [
            {"step": int(row.pop("step")), **{k: float(v) for k, v in row.items() if v}}
            for row in csv.DictReader(lines)
        ]

    def drop_after(self, step: int) -> None:
        """Forgets what was written after `step`, by a run that was cut off there."""
        rows = self.rows()
        if rows:
            self._replace([row for row in rows if row["step"] <= step])

    def write(self, step: int, scalars: dict[str, float]) -> None:
        """Adds a row; a column that is new is added to the table."""
        row = {"step": step, **{name: float(value) for name, value in scalars.items()}}
        if list(row) == self._columns:
            with tf.io.gfile.GFile(self._path, "a") as file:
                file.write(_csv_text([list(row.values())]))
        else:
            self._replace([*self.rows(), row])
        self._write_events(step, row)

    def _replace(self, rows):
        self._columns = list(dict.fromkeys(name for row in rows for name in row))
        table = [[row.get(name, "") for name in self._columns] for row in rows]
        write_atomically(self._path, _csv_text([self._columns, *table]))

    def _write_events(self, step, row):
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self._events)
        with self._writer.as_default():
            for name, value in row.items():
                if name != "step":
                    tf.summary.scalar(name, value, step=step)
        self._writer.flush()


def _csv_text(rows):
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def checkpoint_steps(directory: str) -> list[int]:
    """Returns the steps whose checkpoints `Checkpoints` left in a directory, in ascending order."""
    if not tf.io.gfile.isdir(directory):
        return []
    names = (name.rstrip("/") for name in tf.io.gfile.listdir(directory))
    return sorted(int(match[1]) for match in map(_CHECKPOINT_NAME.match, names) if match)


class Checkpoints:
    """The newest few checkpoints of a model in a directory, each a directory of its own.

    A checkpoint holds the weights and, as a compiled model tracks its optimizer, the moments, the
    loss scale and the step. It is written under a temporary name and renamed, so that one under its
    own name is whole unless the disk damaged it.

    Args:
      model: built; compiled where the optimizer's state matters.
      directory: created by the first `save`.
      keep: number of checkpoints that `save` leaves.
    """

    def __init__(self, model: keras.Model, directory: str, keep: int = 1):
        self._checkpoint = tf.train.Checkpoint(model=model)
        self._directory = directory
        self._keep = keep

    def steps(self) -> list[int]:
        """Returns the steps that have a checkpoint, in ascending order."""
        return checkpoint_steps(self._directory)

    def save(self, step: int) -> None:
        """Writes the checkpoint of `step` and deletes all but the newest up to it.

        One of a later step is left over from a run that went further, went back and is now here.
        """
        with atomic_directory(self._path(step)) as directory:
            self._checkpoint.write(os.path.join(directory, "ckpt"))
        kept = [other for other in self.steps() if other <= step][-self._keep :]
        for other in set(self.steps()) - set(kept):
            tf.io.gfile.rmtree(self._path(other))

    def restore(self) -> int | None:
        """Reads the newest checkpoint that can be read and returns its step; None if there is none.

        Raises:
          ValueError: if none of the checkpoints can be read, or one is of another model.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                self._read(self._path(step))
            except (
                tf.errors.OpError,
                IndexError,
            ) as error:  # What TensorFlow raises for torn files.
                logging.warning(
                    "The checkpoint %s cannot be read, trying the one before it: %s",
                    self._path(step),
                    error,
                )
            else:
                return step
        if steps:
            raise ValueError(
                f"None of the checkpoints of the steps {steps} in {self._directory} can be read: "
                "put back a copy of one, or start again in another output directory."
            )
        return None

    def _read(self, path):
        status = self._checkpoint.read(os.path.join(path, "ckpt")).expect_partial()
        try:
            status.assert_existing_objects_matched()
        except AssertionError as error:
            # Keras describes a variable by its name, shape and all its values.
            absent = re.findall(r"<tf.Variable '([^']+)' shape=(\(.*?\))", str(error))
            names = "".join(f"\n  {name} {shape}" for name, shape in absent)
            raise ValueError(
                f"{path} does not hold every variable of this model. Build the model and compile "
                f"it with the optimizer of the run in that directory.{names}"
            ) from error

    def _path(self, step):
        return os.path.join(self._directory, f"step_{step}")


def _listed(scores):
    return ", ".join(f"{name} {value:.4f}" for name, value in scores.items())


class TrainingRecorder(keras.callbacks.Callback):
    """Logs, saves and validates a run while `fit` goes through its steps.

    The step is the optimizer's counter: it says how many batches were consumed, since an update
    that loss scaling skips is counted too.

    Args:
      model: compiled model, its optimizer built.
      settings: `TrainingSettings` of the run.
      validation_dataset: finite `tf.data.Dataset`, or None.
      print_rows: whether to print the rows of the log too.
    """

    def __init__(self, model, settings, validation_dataset=None, print_rows=False):
        super().__init__()
        self.set_model(model)
        self._settings = settings
        self._validation_dataset = validation_dataset
        self._print_rows = print_rows
        self._train_log = ScalarLog(settings.output_dir, "train")
        self._validation_log = ScalarLog(settings.output_dir, "validation")
        self._checkpoints = Checkpoints(
            model,
            os.path.join(settings.output_dir, CHECKPOINT_DIRECTORY),
            settings.keep_checkpoints,
        )
        self._best = Checkpoints(model, os.path.join(settings.output_dir, BEST_DIRECTORY))
        self.stop_requested = False

    @property
    def step(self) -> int:
        """Updates so far, over all processes of the run."""
        return int(self.model.optimizer.iterations.numpy())

    def restore(self) -> bool:
        """Takes up the newest readable checkpoint; False where there is none."""
        return self._checkpoints.restore() is not None

    def start(self) -> None:
        """Saves the initial weights: a run killed early starts again from the same ones.

        A validation set or a metric that cannot work is found here and not after hours.
        """
        self._save()
        if self._validation_dataset is not None:
            self._score(self._validation_dataset.take(1))

    def resume(self) -> None:
        """Drops what the logs hold from after the restored step; validates if that was cut off."""
        directory, steps = self._settings.output_dir, self._settings.num_train_steps
        if self.step < steps:
            logging.info("Resumed at step %d of %d from %s.", self.step, steps, directory)
        else:
            logging.info("The training in %s is finished, after %d steps.", directory, self.step)
        self._train_log.drop_after(self.step)
        self._validation_log.drop_after(self.step)
        if self.step > 0 and self._is_checkpoint(self.step):
            self.validate()

    def request_stop(self, signal_number, frame) -> None:
        """Signal handler: saves and stops after the step that is running."""
        del signal_number, frame
        self.stop_requested = True

    def validate(self) -> None:
        """Scores the weights on the validation set, unless that was done, and keeps the best."""
        rows = self._validation_log.rows()
        if self._validation_dataset is None or (rows and rows[-1]["step"] == self.step):
            return
        metric = self._settings.best_metric
        scores = self._score(self._validation_dataset)
        if self._beats(scores[metric], [row[metric] for row in rows if metric in row]):
            self._best.save(self.step)
        self._validation_log.write(self.step, scores)
        told = f"validation at step {self.step}: {_listed(scores)}"
        if self._print_rows:
            print(told, flush=True)
        else:  # a progress bar may be on this line
            logging.info(told)

    def _beats(self, score, earlier_scores):
        """Whether a score is better than all before it; NaN is worse than everything."""
        sign = 1 if self._settings.best_mode == "max" else -1
        return not math.isnan(score) and not any(
            sign * earlier >= sign * score for earlier in earlier_scores
        )

    def on_train_batch_begin(self, batch, logs=None):
        # A log row is the mean since the row before; Keras would average over the whole run.
        if self._ends_row(self.step):
            self.model.reset_metrics()

    def on_train_batch_end(self, batch, logs=None):
        step, stop = self.step, self.stop_requested
        last = step == self._settings.num_train_steps
        self._check_finite("The loss", logs["loss"])
        if last or stop or self._ends_row(step):
            learning_rate = self.model.optimizer.learning_rate.numpy()
            self._train_log.write(step, {**logs, "learning_rate": learning_rate})
            if self._print_rows:
                steps = self._settings.num_train_steps
                print(f"step {step} of {steps}: {_listed(logs)}", flush=True)
        if last or stop or self._is_checkpoint(step):
            self._save()
        if stop:
            self.model.stop_training = True
        elif self._is_checkpoint(step) and not last:
            self.validate()

    def _is_checkpoint(self, step):
        return step % self._settings.save_checkpoints_steps == 0

    def _ends_row(self, step):
        # A checkpoint too: metrics are not in it, and a resumed run must write the same rows.
        return step % self._settings.log_steps == 0 or self._is_checkpoint(step)

    def _save(self):
        for variable in self.model.trainable_variables:
            self._check_finite(variable.name, variable)
        self._checkpoints.save(self.step)

    def _check_finite(self, name, value):
        if not tf.reduce_all(tf.math.is_finite(value)):
            raise FloatingPointError(
                f"{name} is not finite at step {self.step}; the checkpoints of the steps "
                f"{self._checkpoints.steps()} are from before. Lower --learning_rate or raise "
                "--num_warmup_steps."
            )

    def _score(self, dataset):
        scores = self.model.evaluate(dataset, verbose=0, return_dict=True)
        if self._settings.best_metric not in scores:
            raise ValueError(
                f"best_metric={self._settings.best_metric!r}: validation gives "
                f"{', '.join(scores)}. Choose one of these."
            )
        return {name: float(value) for name, value in scores.items()}
