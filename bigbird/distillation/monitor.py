"""What a distillation run takes: planned bytes of its step, speed and peak memory as it goes."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Mapping

import tensorflow as tf
import tf_keras as keras

from bigbird.core.callbacks import ScalarLog
from bigbird.core.memory import MemoryPlan, planned_memory
from bigbird.core.recompute_grad import RecomputeContext
from bigbird.distillation.trainer import Distiller

LOG_NAME = "speed"


def plan_step(model: Distiller, batch_spec: Mapping[str, tf.TensorSpec]) -> MemoryPlan:
    """Plans forward and backward pass of a distillation step by XLA, without running it.

    Parameters are arguments, gradients outputs; the optimizer's state is not counted. Online, the
    teacher is part of the step.

    Args:
      model: built.
      batch_spec: of a batch, every size known; such as the `element_spec` of
        `TeacherCache.dataset` in training.
    """
    names = list(batch_spec)

    def step(*tensors):
        batch = dict(zip(names, tensors, strict=True))
        with tf.GradientTape() as tape, RecomputeContext(seed=0):
            loss = model.batch_loss(batch)
        return loss, tape.gradient(loss, model.trainable_variables)

    return planned_memory(step, *batch_spec.values())


def peak_memory_bytes() -> int:
    """Returns the most memory that this process has held: of its first GPU, or resident."""
    gpus = tf.config.list_logical_devices("GPU")
    if gpus:
        return tf.config.experimental.get_memory_info(gpus[0].name)["peak"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


class SpeedLog(keras.callbacks.Callback):
    """Writes `speed.csv`: steps and tokens a second since the row before, and peak memory.

    Time between steps, when the run is validated and saved, does not count, nor does the first
    step of a process, which is traced.

    Args:
      output_dir: of the run.
      log_steps: steps of a row.
      tokens_per_step: how many take part in a step, on average.
    """

    def __init__(self, output_dir: str, log_steps: int, tokens_per_step: float):
        super().__init__()
        self._log = ScalarLog(output_dir, LOG_NAME)
        self._log_steps, self._tokens_per_step = log_steps, tokens_per_step
        self._is_first = True
        self._steps, self._seconds = 0, 0.0

    def on_train_begin(self, logs=None):
        self._log.drop_after(int(self.model.optimizer.iterations))

    def on_train_batch_begin(self, batch, logs=None):
        self._start = time.perf_counter()

    def on_train_batch_end(self, batch, logs=None):
        if self._is_first:
            self._is_first = False
            return
        self._steps += 1
        self._seconds += time.perf_counter() - self._start
        step = int(self.model.optimizer.iterations)
        if step % self._log_steps == 0:
            steps_per_second = self._steps / self._seconds
            row = {
                "steps_per_second": steps_per_second,
                "tokens_per_second": steps_per_second * self._tokens_per_step,
                "peak_bytes": peak_memory_bytes(),
            }
            self._log.write(step, row)
            self._steps, self._seconds = 0, 0.0
