"""Learning-rate schedules and optimizers, with the 2021 toolkit's names and numbers."""

from __future__ import annotations

import tensorflow as tf
import tf_keras as keras

OPTIMIZERS = ("AdamWeightDecay", "Adam", "Adafactor")

# Scales and offsets are left alone: pulling them towards zero regularizes nothing.
EXCLUDED_FROM_WEIGHT_DECAY = ("LayerNorm", "layer_norm", "bias")


@keras.utils.register_keras_serializable(package="bigbird")
class LinearWarmupLinearDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly to the peak, then follows the line that reaches 0 at the last step.

        rate(t) = peak * t / W          for t < W
        rate(t) = peak * (1 - t / T)    for W <= t <= T, and 0 after T

    with W = `num_warmup_steps` and T = `num_train_steps`. The second line starts at step 0, not at
    W: the rate falls from `peak` to `peak * (1 - W / T)` where the warm-up ends, as it did in BERT
    and in the 2021 toolkit. The first update, t = 0, has rate 0 if there is a warm-up.

    Args:
      peak_learning_rate: the rate both lines are scaled by.
      num_train_steps: T, updates in the whole run.
      num_warmup_steps: W, updates before the decay takes over; 0 for no warm-up.

    Raises:
      ValueError: if the peak is below 0, T < 1 or W < 0.

    Source: Devlin et al. 2019, appendix A.2 (warm-up, then linear decay).
    """

    def __init__(self, peak_learning_rate: float, num_train_steps: int, num_warmup_steps: int = 0):
        _check_at_least("learning_rate", peak_learning_rate, 0)
        _check_at_least("num_train_steps", num_train_steps, 1)
        _check_at_least("num_warmup_steps", num_warmup_steps, 0)
        self.peak_learning_rate = peak_learning_rate
        self.num_train_steps = num_train_steps
        self.num_warmup_steps = num_warmup_steps

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        decay = tf.maximum(0.0, 1.0 - step / self.num_train_steps)
        # At least 1: both branches are computed, and without a warm-up this one is never taken.
        warmup = step / max(self.num_warmup_steps, 1)
        return self.peak_learning_rate * tf.where(step < self.num_warmup_steps, warmup, decay)

    def get_config(self):
        return {
            "peak_learning_rate": self.peak_learning_rate,
            "num_train_steps": self.num_train_steps,
            "num_warmup_steps": self.num_warmup_steps,
        }


@keras.utils.register_keras_serializable(package="bigbird")
class InverseSqrtWarmup(keras.optimizers.schedules.LearningRateSchedule):
    """Rises linearly for W steps, then falls with the square root of the step.

        rate(t) = scale / sqrt(D) * min(1, t / W) / sqrt(max(t, W))

    with D = `hidden_size` and W = `num_warmup_steps`.

    Args:
      scale: multiplies the whole schedule; the 2021 flag `learning_rate`.
      hidden_size: width D of the model.
      num_warmup_steps: W, at least 1, since the rate has no bound at step 0 without a warm-up.

    Raises:
      ValueError: if the scale is below 0, D < 1 or W < 1.

    Source: Vaswani et al. 2017, section 5.3, with the scale as a parameter.
    """

    def __init__(self, scale: float, hidden_size: int, num_warmup_steps: int):
        _check_at_least("learning_rate", scale, 0)
        _check_at_least("hidden_size", hidden_size, 1)
        _check_at_least("num_warmup_steps", num_warmup_steps, 1)
        self.scale = scale
        self.hidden_size = hidden_size
        self.num_warmup_steps = num_warmup_steps

    def __call__(self, step):
        step = tf.cast(step, tf.float32)
        warmup = tf.minimum(1.0, step / self.num_warmup_steps)
        decay = tf.math.rsqrt(tf.maximum(step, self.num_warmup_steps))
        return self.scale * self.hidden_size**-0.5 * warmup * decay

    def get_config(self):
        return {
            "scale": self.scale,
            "hidden_size": self.hidden_size,
            "num_warmup_steps": self.num_warmup_steps,
        }


@keras.utils.register_keras_serializable(package="bigbird")
class AdamWeightDecay(keras.optimizers.Optimizer):
    """Adam without bias correction, with weight decay that bypasses the moments.

        m <- beta_1 m + (1 - beta_1) g
        v <- beta_2 v + (1 - beta_2) g^2
        w <- w - rate * (m / (sqrt(v) + epsilon) + weight_decay * w)

    A sparse gradient gives what the dense one gives: moments of rows it does not name decay too.

    Args:
      learning_rate: a float or a `LearningRateSchedule`.
      weight_decay: share of a weight taken off per unit of learning rate.
      beta_1: decay of the first moment.
      beta_2: decay of the second moment.
      epsilon: keeps the quotient finite where the second moment is near 0.
      exclude_from_weight_decay: regular expressions; a variable whose name matches one anywhere is
        not decayed.
      name: name of the optimizer.
      **kwargs: clipping and averaging, as for every `keras.optimizers.Optimizer`.

    Source: Loshchilov and Hutter 2019, algorithm 2; without the bias correction, as for BERT
    (Devlin et al. 2019).
    """

    def __init__(
        self,
        learning_rate=1e-5,
        weight_decay=0.01,
        beta_1=0.9,
        beta_2=0.999,
        epsilon=1e-6,
        exclude_from_weight_decay=EXCLUDED_FROM_WEIGHT_DECAY,
        name="AdamWeightDecay",
        **kwargs,
    ):
        super().__init__(name=name, weight_decay=weight_decay, **kwargs)
        self._learning_rate = self._build_learning_rate(learning_rate)
        self.beta_1 = beta_1
        self.beta_2 = beta_2
        self.epsilon = epsilon
        self.excluded_names = tuple(exclude_from_weight_decay)
        self.exclude_from_weight_decay(var_names=list(self.excluded_names))

    def build(self, var_list):
        super().build(var_list)
        if getattr(self, "_built", False):
            return
        self._momentums = [self.add_variable_from_reference(var, "m") for var in var_list]
        self._velocities = [self.add_variable_from_reference(var, "v") for var in var_list]
        self._built = True

    def update_step(self, gradient, variable):
        """Moves one variable; Keras has taken the weight decay off it just before."""
        index = self._index_dict[self._var_key(variable)]
        m, v = self._momentums[index], self._velocities[index]
        values, rows = gradient, None
        if isinstance(gradient, tf.IndexedSlices):
            values, rows = gradient.values, gradient.indices
        _update_moment(m, values, rows, self.beta_1)
        _update_moment(v, tf.square(values), rows, self.beta_2)
        learning_rate = tf.cast(self.learning_rate, variable.dtype)
        variable.assign_sub(learning_rate * m / (tf.sqrt(v) + self.epsilon))

    def get_config(self):
        return {
            **super().get_config(),
            "learning_rate": self._serialize_hyperparameter(self._learning_rate),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "exclude_from_weight_decay": list(self.excluded_names),
        }


def create_optimizer(
    name: str,
    learning_rate,
    *,
    weight_decay_rate: float = 0.01,
    beta_1: float = 0.9,
    beta_2: float = 0.999,
    epsilon: float = 1e-6,
) -> keras.optimizers.Optimizer:
    """Returns the optimizer that the flag `optimizer` names.

    Args:
      name: `AdamWeightDecay`, `Adam` or `Adafactor`.
      learning_rate: a float or a `LearningRateSchedule`.
      weight_decay_rate: used by AdamWeightDecay alone, as in 2021.
      beta_1: decay of the first moment; Adafactor keeps none.
      beta_2: decay of the second moment; Adafactor derives its own from the step.
      epsilon: of both Adams; Adafactor has its own two.

    Raises:
      ValueError: for another name.
    """
    if name == "AdamWeightDecay":
        return AdamWeightDecay(learning_rate, weight_decay_rate, beta_1, beta_2, epsilon)
    if name == "Adam":
        return keras.optimizers.Adam(learning_rate, beta_1, beta_2, epsilon)
    if name == "Adafactor":
        return keras.optimizers.Adafactor(learning_rate)
    raise ValueError(f"optimizer={name!r}: expected one of {', '.join(OPTIMIZERS)}.")


def _update_moment(moment, values, rows, beta):
    """moment <- beta * moment + (1 - beta) * values; `values` are those of `rows`, if given."""
    if rows is None:
        moment.assign(beta * moment + (1 - beta) * values)
    else:
        moment.assign(beta * moment)
        moment.scatter_add(tf.IndexedSlices((1 - beta) * values, rows))


def _check_at_least(name, value, least):
    if value < least:
        raise ValueError(f"{name}={value}: expected at least {least}.")
