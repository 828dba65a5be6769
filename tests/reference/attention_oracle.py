"""Attention and its gradients in plain float64 numpy, with every score and probability at hand.

Axis letters: B batch, H heads, Q query tokens, T key tokens, E width of a head, N blocks,
S tokens in a block.
"""

import numpy as np


def pattern(layout, num_blocks):
    """How often every query token counts every key token: `[H, L, L]`, L = num_blocks · S.

    A layout has `block_size` S, `key_blocks` `[H, N, K]`, -1 where unused, and `global_blocks`,
    whose rows see every block once. An input of fewer than N blocks sees the first rows and
    columns.
    """
    num_heads, pattern_blocks, _ = layout.key_blocks.shape
    counts = np.zeros([num_heads, pattern_blocks, pattern_blocks])
    for head in range(num_heads):
        for row in range(pattern_blocks):
            if row in layout.global_blocks:
                counts[head, row] = 1
                continue
            for block in layout.key_blocks[head, row]:
                if block >= 0:
                    counts[head, row, block] += 1
    counts = counts[:, :num_blocks, :num_blocks]
    return np.kron(counts, np.ones([layout.block_size, layout.block_size]))


def attention(query, key, value, weights, keep=1.0):
    """softmax(Q Kᵀ / sqrt(E) + log weights) V; a row without weight gives zeros.

    Args:
      query: `[B, H, Q, E]`; key, value: `[B, H, T, E]`.
      weights: how often a pair counts, broadcastable to `[B, H, Q, T]`; 0 = not at all.
      keep: factor of each probability after the softmax: 0 or 1 / (1 - rate) for dropout.

    Returns:
      Output `[B, H, Q, E]` and probabilities before dropout `[B, H, Q, T]`.
    """
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    scores = np.einsum("BHQE,BHTE->BHQT", query, key) / np.sqrt(query.shape[-1])
    weights = np.broadcast_to(weights, scores.shape)
    masked = np.where(weights > 0, scores, -np.inf)
    largest = np.max(masked, axis=-1, keepdims=True)
    weighted = weights * np.exp(masked - np.where(np.isfinite(largest), largest, 0.0))
    total = weighted.sum(axis=-1, keepdims=True)
    probabilities = weighted / np.where(total > 0, total, 1.0)
    return np.einsum("BHQT,BHTE->BHQE", probabilities * keep, value), probabilities


def attention_gradients(query, key, value, weights, upstream, keep=1.0):
    """Gradients of sum(upstream · attention(…)) by query, key and value."""
    _, probabilities = attention(query, key, value, weights, keep)
    return _gradients(probabilities, query, key, value, upstream, keep, np.subtract)


def rounding_scales(query, key, value, weights, upstream, keep=1.0):
    """What the roundoff of an element of output and gradients is proportional to.

    The same sums with the absolute values of all their terms, times 1 + the largest score, which
    is what an exponential makes of the relative error of its argument.
    """
    _, probabilities = attention(query, key, value, weights, keep)
    query, key, value, upstream = (np.abs(x, dtype=float) for x in (query, key, value, upstream))
    scores = np.einsum("BHQE,BHTE->BHQT", query, key) / np.sqrt(query.shape[-1])
    output = np.einsum("BHQT,BHTE->BHQE", probabilities * keep, value)
    sums = [output, *_gradients(probabilities, query, key, value, upstream, keep, np.add)]
    return [(1 + scores.max()) * x for x in sums]


def _gradients(probabilities, query, key, value, upstream, keep, minus):
    query, key, value, upstream = (np.asarray(x, np.float64) for x in (query, key, value, upstream))
    d_probabilities = keep * np.einsum("BHQE,BHTE->BHQT", upstream, value)
    row_mean = (probabilities * d_probabilities).sum(axis=-1, keepdims=True)
    d_scores = probabilities * minus(d_probabilities, row_mean) / np.sqrt(query.shape[-1])
    return (
        np.einsum("BHQT,BHTE->BHQE", d_scores, key),
        np.einsum("BHQT,BHQE->BHTE", d_scores, query),
        np.einsum("BHQT,BHQE->BHTE", probabilities * keep, upstream),
    )
