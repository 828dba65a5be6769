"""Where a model computes and how precisely: distribution strategies and precision policies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import tensorflow as tf
import tf_keras as keras

PRECISIONS = ("float32", "mixed_float16", "mixed_bfloat16")


@contextlib.contextmanager
def precision_scope(mixed_precision: str) -> Iterator[None]:
    """Gives the layers made inside a precision, and puts the former policy back at the end.

    A model made under `mixed_float16` has its optimizer wrapped for loss scaling by `compile`.

    Args:
      mixed_precision: one of `PRECISIONS`.

    Source: Micikevicius et al. 2018, arXiv:1710.03740.
    """
    former = keras.mixed_precision.global_policy()
    keras.mixed_precision.set_global_policy(mixed_precision)
    try:
        yield
    finally:
        keras.mixed_precision.set_global_policy(former)


def create_strategy(
    *,
    use_tpu: bool = False,
    tpu_name: str | None = None,
    master: str | None = None,
    tpu_zone: str | None = None,
    tpu_job_name: str | None = None,
    gcp_project: str | None = None,
) -> tf.distribute.Strategy:
    """Returns the strategy for the devices there are: a TPU if asked for, all GPUs, or the one.

    Args:
      use_tpu: whether to connect to a TPU.
      tpu_name: name or address of the TPU; `local` on the TPU's own machine.
      master: address instead of the name.
      tpu_zone: zone of the TPU.
      tpu_job_name: job name of its worker.
      gcp_project: project of the TPU.

    Raises:
      ValueError: if a TPU is asked for and not named.
    """
    if use_tpu:
        if not (tpu_name or master):
            raise ValueError("use_tpu=True needs --tpu_name or --master to say which TPU.")
        job = {"job_name": tpu_job_name} if tpu_job_name else {}
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(
            tpu=tpu_name or master, zone=tpu_zone, project=gcp_project, **job
        )
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    if len(tf.config.list_logical_devices("GPU")) > 1:
        return tf.distribute.MirroredStrategy()
    return tf.distribute.get_strategy()
