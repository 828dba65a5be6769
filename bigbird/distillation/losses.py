r"""One distillation loss: `topk_kl` from a teacher's top-K logits, `online_kl` from all of them.

Axis letters: N tokens (all leading axes, flattened), D model, V vocabulary, K kept.

This file says what a call means and refuses what has no meaning. `divergence.py` has the
mathematics of the tail rules, `kl_plan.py` chooses among the four ways to compute them,
`kl_loops.py` has those ways.
"""

import math
from typing import NamedTuple

import tensorflow as tf

from bigbird.distillation.divergence import TAILS, TAILS_WITH_OUTSIDE
from bigbird.distillation.kl_loops import Formula, Problem, evaluate, shares, total
from bigbird.distillation.kl_plan import plan_kl
from bigbird.distillation.targets import (
    TeacherLogits,
    TopKTargets,
    require_choice,
    require_positive,
    require_shape,
)

REDUCTIONS = ("mean", "sum", "none")
# A student with a smaller vocabulary may lack this much of the teacher's mass at a token.
MAX_DROPPED_MASS = 0.01


def topk_kl(
    hidden,
    kernel,
    targets,
    *,
    bias=None,
    sample_weight=None,
    temperature=1.0,
    tail="renormalize",
    implementation="auto",
    gradient="auto",
    chunk_tokens=None,
    memory_budget_bytes=None,
    logit_scale=None,
    logit_softcap=None,
    labels=None,
    label_weight=0.0,
    reduction="mean",
    return_diagnostics=False,
):
    r"""Divergence of a student's head from a teacher's top-K logits.

    loss_n = T² KL(p_n || q_n) + label_weight · (-log softmax(z_n)[label_n])

    with KL by the tail rule (see `divergence.py`). A token without kept entries has KL 0. The same
    call works eagerly (where it runs as a graph), in `tf.function`, under `jit_compile`, and with
    tensors or variables of tf_keras and Keras 3. It has first derivatives only.

    Faulty values (ids outside the vocabulary, NaN or unsorted logits, ...) at a token with weight
    raise ValueError eagerly and InvalidArgumentError in a graph. XLA has no assertions: there the
    loss is NaN.

    Args:
      hidden: float `[..., D]`, the student's last hidden states.
      kernel: float `[D, V]`, its head. For a tied head pass the transposed embedding table.
      targets: `TopKTargets` with the leading axes of `hidden`. Where the student's vocabulary is
        larger than the teacher's, its further columns are padding and take no part; where it is
        smaller, the ids it lacks are dropped if they hold at most `MAX_DROPPED_MASS`.
      bias: float `[V]`, or None.
      sample_weight: float or bool `[...]`, 0 for a token that takes no part, whatever it holds.
      temperature: T. It must be the one at which the targets know their mass, unless the tail rule
        is `renormalize`, which needs no mass.
      tail: `renormalize`, `zero`, `bucket` or `uniform`.
      implementation: `dense`, `forward_chunked`, `fused` or `auto`; see `plan_kl`.
      gradient: of `fused`: `one_pass`, `recompute` or `auto`. `one_pass` makes the gradients with
        the loss, if gradients are asked for at all, and needs a scalar loss.
      chunk_tokens: C, most tokens projected at a time; None chooses.
      memory_budget_bytes: most bytes that loss and gradients may add to the inputs.
      logit_scale: factor on the logits, before the cap.
      logit_softcap: cap on the logits.
      labels: int `[...]`, hard labels at temperature 1; a negative one is left out.
      label_weight: weight of the hard labels' cross entropy.
      reduction: `mean` = Σ weight · loss / Σ weight (0 where all weights are 0), `sum`, or `none`
        for weight · loss of each token.
      return_diagnostics: whether to return `(loss, diagnostics)`, a dict of means over tokens by
        weight: `student_kept_mass`, q's mass on the kept ids; `argmax_agreement`, how often both
        rank the same id first; `dropped_mass`, the teacher's mass on kept ids the student lacks;
        and, where the targets know their mass at T, `kept_mass`, M, and `tail_kl`, the part of the
        missing ids in the bucket's divergence.

    Returns:
      float32 nats, a scalar or `[...]`.

    Raises:
      ValueError: shapes that do not fit, an unknown name, faulty values, a temperature the targets
        do not carry, or a budget below one chunk.

    Example:
      >>> targets = TopKTargets.from_logits(teacher_logits, k=100)
      >>> with tf.GradientTape() as tape:
      ...     loss = topk_kl(student(ids), head.kernel, targets, sample_weight=mask)

    Source: "Efficient Knowledge Distillation for LLMs", arXiv:2608.03796; temperature and its
    square from Hinton et al., arXiv:1503.02531, section 2.
    """
    if not isinstance(targets, TopKTargets | TeacherLogits):
        raise ValueError(f"targets must be TopKTargets; received {type(targets).__name__}.")
    require_choice("reduction", reduction, REDUCTIONS)
    hidden = tf.convert_to_tensor(hidden)
    inputs = _flatten(hidden, kernel, bias, sample_weight, labels)
    require_shape(
        "targets.logits", targets.logits, [*hidden.shape[:-1], None], "hidden's but for D"
    )
    targets = targets.flatten()
    vocab_size = min(inputs.kernel.shape[1], targets.vocab_size)
    formula = Formula(temperature, tail, vocab_size, logit_scale, logit_softcap, label_weight)
    _check_formula(formula, targets, labels)
    plan = plan_kl(
        inputs.hidden.shape[0],
        *inputs.kernel.shape,
        dtype=inputs.hidden.dtype,
        kernel_dtype=inputs.kernel.dtype,
        per_token=reduction == "none",
        implementation=implementation,
        gradient=gradient,
        chunk_tokens=chunk_tokens,
        memory_budget_bytes=memory_budget_bytes,
    )
    dropped_mass = targets.dropped_mass(vocab_size)
    faults = targets.faults(unique_ids=tail in TAILS_WITH_OUTSIDE)
    faults |= _vocabulary_faults(vocab_size, dropped_mass, inputs.labels)
    weight = tf.where(_refuse(faults, inputs.weight), math.nan, inputs.weight)
    problem = Problem(
        *inputs._replace(weight=weight),
        targets=targets.restrict(vocab_size),
        formula=formula,
        plan=plan,
        diagnostics=return_diagnostics,
    )
    loss, diagnostics = evaluate(problem, reduction)
    if reduction == "none":
        loss = tf.reshape(loss, tf.shape(hidden)[:-1])
    if not return_diagnostics:
        return loss
    diagnostics["dropped_mass"] = dropped_mass
    return loss, {name: total(value, shares(weight)) for name, value in diagnostics.items()}


def online_kl(hidden, kernel, teacher_logits, *, tail="renormalize", **options):
    r"""Divergence of a student's head from a teacher at hand, over its whole distribution.

    loss_n = T² Σ_v p_nv (log p_nv - log q_nv) + label_weight · (-log softmax(z_n)[label_n])

    No gradient flows to the teacher. Only the student's side is chunked; the teacher's logits are
    as large as they are.

    Args:
      hidden: float `[..., D]`, the student's last hidden states.
      kernel: float `[D, V]`, its head.
      teacher_logits: float `[..., V]`, raw. Columns that only one side has are padding and take no
        part; the teacher's may hold at most `MAX_DROPPED_MASS`.
      tail: as in `topk_kl`. Nothing is missing from a whole distribution, so all rules agree.
      **options: the other keyword arguments of `topk_kl`.

    Returns:
      float32 nats, a scalar or `[...]`.

    Raises:
      ValueError: as `topk_kl`.

    Source: Hinton et al., arXiv:1503.02531, section 2.
    """
    require_choice("tail", tail, TAILS)
    return topk_kl(hidden, kernel, TeacherLogits(teacher_logits), **options)


def _check_formula(formula, targets, labels):
    require_choice("tail", formula.tail, TAILS)
    require_positive("temperature", formula.temperature)
    if formula.logit_softcap is not None:
        require_positive("logit_softcap", formula.logit_softcap)
    if labels is None and formula.label_weight:
        raise ValueError(f"label_weight={formula.label_weight} needs labels; received labels=None.")
    if formula.tail != "renormalize" and not targets.carries_mass_at(formula.temperature):
        carried = "none" if targets.log_z is None else f"it at {targets.temperature:g}"
        raise ValueError(
            f"tail={formula.tail!r} needs the teacher's log_z at temperature "
            f"{formula.temperature:g}; the targets carry {carried}. Capture the teacher at this "
            'temperature, or use tail="renormalize", which needs none.'
        )


class _Inputs(NamedTuple):
    """The student's tensors: hidden `[N, D]`, kernel `[D, V]`, bias `[V]`, weight, labels `[N]`."""

    hidden: tf.Tensor
    kernel: tf.Tensor
    bias: tf.Tensor | None
    weight: tf.Tensor
    labels: tf.Tensor | None


def _flatten(hidden, kernel, bias, sample_weight, labels):
    """Checks what shapes alone can tell, and makes one axis of all token axes."""
    kernel = tf.convert_to_tensor(kernel)
    if kernel.shape.rank != 2 or not kernel.shape.is_fully_defined():
        raise ValueError(f"kernel must be [D, V] of known sizes; received {kernel.shape}.")
    width, vocab_size = kernel.shape
    token_shape = hidden.shape[:-1]
    require_shape("hidden", hidden, [*token_shape, width], f"with the D of kernel {kernel.shape}")
    if bias is not None:
        bias = tf.convert_to_tensor(bias)
        require_shape("bias", bias, [vocab_size], f"with the V of kernel {kernel.shape}")
    if sample_weight is None:
        weight = tf.ones(tf.shape(hidden)[:-1])
    else:
        weight = tf.cast(tf.convert_to_tensor(sample_weight), tf.float32)
        require_shape("sample_weight", weight, token_shape, "hidden's without D")
    if labels is not None:
        labels = tf.cast(tf.convert_to_tensor(labels), tf.int32)
        require_shape("labels", labels, token_shape, "hidden's without D")
        labels = tf.reshape(labels, [-1])
    return _Inputs(tf.reshape(hidden, [-1, width]), kernel, bias, tf.reshape(weight, [-1]), labels)


def _vocabulary_faults(vocab_size, dropped_mass, labels):
    """Faults as of `TopKTargets.faults`, of targets and labels that do not fit the student."""
    faults = {
        f"over {MAX_DROPPED_MASS:g} of the teacher's mass on ids of {vocab_size} and above, which "
        "the student lacks: do both have the same tokenizer?": dropped_mass > MAX_DROPPED_MASS
    }
    if labels is not None:
        explanation = f"labels outside the vocabulary: expected ids below {vocab_size}."
        faults[explanation] = labels >= vocab_size
    return faults


def _refuse(faults, weight):
    """Raises for the first fault at a token with weight; returns which tokens have any."""
    faulty = tf.zeros_like(weight, tf.bool)
    for explanation, rows in faults.items():
        rows &= tf.not_equal(weight, 0.0)
        if not tf.executing_eagerly():
            tf.debugging.Assert(~tf.reduce_any(rows), [f"Received {explanation}"])
        elif tf.reduce_any(rows):
            tokens = tf.where(rows)[:, 0].numpy()
            raise ValueError(
                f"Received {explanation} Of {len(weight)} tokens, {len(tokens)} have this fault, "
                f"the first of them token {tokens[0]}."
            )
        faulty |= rows
    return faulty
