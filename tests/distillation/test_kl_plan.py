"""Claims about `plan_kl`: what it chooses, and that it does not promise less than is taken."""

import pytest
import tensorflow as tf

from bigbird.core.memory import planned_memory
from bigbird.distillation.kl_plan import plan_kl
from bigbird.distillation.losses import topk_kl
from bigbird.distillation.targets import TopKTargets

GIB = 2**30
LARGE = {"tokens": 32768, "width": 4096, "vocab_size": 128256}


def test_auto_makes_a_scalar_loss_in_one_pass():
    plan = plan_kl(**LARGE)
    assert (plan.implementation, plan.gradient) == ("fused", "one_pass")
    assert plan.expected_bytes < 3.4 * GIB


@pytest.mark.parametrize("changes", [{"per_token": True}, {"dtype": "float16"}])
def test_auto_recomputes_what_one_pass_cannot_make_well(changes):
    assert plan_kl(**LARGE, **changes).gradient == "recompute"


def test_auto_keeps_the_logits_of_single_tokens_only_within_a_budget():
    plan = plan_kl(**LARGE, per_token=True, memory_budget_bytes=32 * GIB)
    assert plan.implementation == "forward_chunked"
    plan = plan_kl(**LARGE, per_token=True, memory_budget_bytes=8 * GIB)
    assert (plan.implementation, plan.gradient) == ("fused", "recompute")


def test_a_tighter_budget_makes_smaller_chunks():
    roomy, tight = (plan_kl(**LARGE, memory_budget_bytes=int(b * GIB)) for b in (4, 2.7))
    assert tight.chunk_tokens < roomy.chunk_tokens
    assert tight.expected_bytes <= 2.7 * GIB


def test_a_budget_below_one_chunk_is_refused_with_what_it_takes():
    with pytest.raises(ValueError, match=r"memory_budget_bytes=2000 is less than the \d+ bytes"):
        plan_kl(**LARGE, memory_budget_bytes=2000)


def test_chunks_never_exceed_what_was_asked_for_or_what_there_is():
    assert plan_kl(**LARGE, chunk_tokens=100).chunk_tokens == 100
    assert plan_kl(7, 8, 100, chunk_tokens=100).chunk_tokens == 7
    assert plan_kl(None, 8, 100, chunk_tokens=100).chunk_tokens == 100


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "dense", "gradient": "one_pass"}, "belongs to implementation='fused'"),
        ({"gradient": "one_pass", "per_token": True}, "needs a scalar loss"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1; received 0"),
        ({"gradient": "two_pass"}, "gradient must be one of auto, one_pass, recompute"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        plan_kl(7, 8, 100, **options)


@pytest.mark.parametrize(
    ("implementation", "dtype", "tail"),
    [
        ("dense", tf.float32, "bucket"),
        ("forward_chunked", tf.float32, "renormalize"),
        ("fused", tf.float32, "uniform"),
        ("fused", tf.bfloat16, "renormalize"),
    ],
)
def test_expected_bytes_are_no_less_than_xla_plans_and_not_far_above(implementation, dtype, tail):
    tokens, width, vocab_size = 8192, 512, 32000
    options = {"implementation": implementation, "tail": tail}

    def step(hidden, kernel, ids, logits, log_z):
        targets = TopKTargets(ids, logits, log_z, vocab_size)
        with tf.GradientTape() as tape:
            tape.watch([hidden, kernel])
            loss = topk_kl(hidden, kernel, targets, **options)
        return loss, tape.gradient(loss, [hidden, kernel])

    planned = planned_memory(
        step,
        tf.TensorSpec([tokens, width], dtype),
        tf.TensorSpec([width, vocab_size], dtype),
        tf.TensorSpec([tokens, 100], tf.int32),
        tf.TensorSpec([tokens, 100]),
        tf.TensorSpec([tokens]),
    )
    plan = plan_kl(
        tokens, width, vocab_size, dtype=dtype, kernel_dtype=dtype, implementation=implementation
    )
    added = planned.total_bytes - planned.argument_bytes
    assert added <= plan.expected_bytes <= 1.35 * added


def test_a_plan_reads_as_a_sentence():
    told = str(plan_kl(32, 8, 100))
    assert told.startswith("fused, gradient by one_pass, 32 tokens at a time (")
    assert told.endswith(" MiB)") and "gradient" not in str(
        plan_kl(32, 8, 9, implementation="dense")
    )
