"""The distillation losses in float64 numpy, token by token, over the whole vocabulary.

Written from the definitions, with explicit probability vectors, and slow. Gradients are central
differences of these losses, or, where logits are extreme, `logit_gradient`, which is itself checked
against central differences.
"""

import numpy as np


def softmax(logits):
    """Probabilities of logits `[V]`; -inf gets 0."""
    shifted = np.exp(logits - np.max(logits))
    return shifted / shifted.sum()


def log_softmax(logits):
    """Their logarithms, exact where a probability underflows."""
    shifted = logits - np.max(logits)
    return shifted - np.log(np.exp(shifted).sum())


def logsumexp(logits):
    """log Σ exp over the last axis."""
    top = np.max(logits, axis=-1, keepdims=True)
    return (top + np.log(np.exp(logits - top).sum(-1, keepdims=True)))[..., 0]


def atoms(ids, logits, log_z, vocab_size, temperature, tail):
    """A teacher row as `(probabilities [V], kept bool [V], missing mass)` under a tail rule."""
    probabilities, kept = np.zeros(vocab_size), np.zeros(vocab_size, bool)
    scaled = np.asarray(logits, np.float64) / temperature
    if len(ids) == 0:
        return probabilities, kept, 0.0
    log_total = logsumexp(scaled) if tail == "renormalize" else log_z
    np.add.at(probabilities, ids, np.exp(scaled - log_total))
    kept[ids] = True
    missing = 0.0
    if tail in ("bucket", "uniform") and not kept.all():
        missing = max(0.0, 1.0 - probabilities.sum())
    return probabilities, kept, missing


def divergence(student_logits, ids, logits, log_z, temperature, tail):
    """T² times the divergence of one row; `student_logits` `[V]`, float64."""
    log_q = log_softmax(student_logits / temperature)
    p, kept, missing = atoms(ids, logits, log_z, len(log_q), temperature, tail)
    total = sum(p[v] * (np.log(p[v]) - log_q[v]) for v in np.flatnonzero(p))
    if missing and tail == "bucket":
        total += missing * (np.log(missing) - logsumexp(log_q[~kept]))
    if missing and tail == "uniform":
        share = missing / (~kept).sum()
        total += (share * (np.log(share) - log_q[~kept])).sum()
    return temperature**2 * total


def logit_gradient(student_logits, ids, logits, log_z, temperature, tail):
    """The gradient of `divergence` in the student's logits: `[V]`."""
    log_q = log_softmax(student_logits / temperature)
    p, kept, missing = atoms(ids, logits, log_z, len(log_q), temperature, tail)
    target = p.copy()
    if missing and tail == "bucket":
        target[~kept] = missing * np.exp(log_q[~kept] - logsumexp(log_q[~kept]))
    if missing and tail == "uniform":
        target[~kept] = missing / (~kept).sum()
    return temperature * (target.sum() * np.exp(log_q) - target)


def student_logits(hidden, kernel, bias=None, scale=None, cap=None):
    """z = cap · tanh(scale · (h W + b) / cap): `[N, V]`."""
    logits = hidden @ kernel + (0.0 if bias is None else bias)
    logits = logits * (1.0 if scale is None else scale)
    return logits if cap is None else cap * np.tanh(logits / cap)


def token_losses(logits, rows, *, temperature, tail, labels=None, label_weight=0.0):
    """Losses `[N]` of student logits `[N, V]` and teacher rows `(ids, logits, log_z)`."""
    losses = np.array(
        [divergence(z, *row, temperature, tail) for z, row in zip(logits, rows, strict=True)]
    )
    if labels is not None:
        for token, label in enumerate(labels):
            if label >= 0:
                losses[token] -= label_weight * log_softmax(logits[token])[label]
    return losses


def central_differences(function, point, step=1e-5):
    """Gradient of a scalar function at an array, entry by entry."""
    gradient = np.zeros_like(point)
    for index in np.ndindex(point.shape):
        up, down = point.copy(), point.copy()
        up[index] += step
        down[index] -= step
        gradient[index] = (function(up) - function(down)) / (2 * step)
    return gradient
