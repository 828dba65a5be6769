"""Planned memory is XLA's own, needs no memory itself, and decides policies and batches."""

import os
import subprocess
import sys
import types

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from bigbird.core import memory
from bigbird.core.config import BigBirdConfig
from bigbird.core.memory import (
    GIB,
    POLICIES_BY_TIME,
    MemoryPlan,
    TrainingPlan,
    fitting_policy,
    largest_batch,
    plan_training,
    planned_memory,
)
from bigbird.core.modeling import BertModel
from bigbird.core.optimization import create_optimizer

# ------------------------------------------------------------------------------ any function


def test_arguments_outputs_and_temporaries_are_told_apart():
    weight = tf.Variable(tf.ones([32, 16]))

    def f(x):
        hidden = tf.matmul(x, weight)
        return tf.matmul(hidden, hidden, transpose_b=True)

    plan = planned_memory(f, tf.TensorSpec([64, 32]))
    assert plan.argument_bytes == 4 * (64 * 32 + 32 * 16)
    assert plan.output_bytes >= 4 * 64 * 64
    assert plan.temporary_bytes >= 4 * 64 * 16
    assert plan.total_bytes >= plan.argument_bytes + plan.output_bytes + plan.temporary_bytes


def test_shapes_far_beyond_the_machine_are_planned():
    plan = planned_memory(lambda x: tf.reduce_sum(x * x), tf.TensorSpec([1 << 20, 1 << 20]))
    assert plan.argument_bytes == 4 << 40


def test_nothing_is_run():
    counter = tf.Variable(0)
    planned_memory(lambda x: x + tf.cast(counter.assign_add(1), tf.float32), tf.TensorSpec([4]))
    assert counter.numpy() == 0


def test_a_tf_function_is_planned_like_the_function_it_wraps():
    spec = tf.TensorSpec([8, 8])
    assert planned_memory(tf.function(tf.linalg.matrix_transpose), spec) == planned_memory(
        tf.linalg.matrix_transpose, spec
    )


@pytest.mark.parametrize("shape", [None, [None, 4]])
def test_unknown_sizes_are_refused(shape):
    with pytest.raises(ValueError, match="Give every dimension a size"):
        planned_memory(tf.identity, tf.TensorSpec(shape))


@pytest.mark.parametrize(
    "f, specs",
    [
        (lambda x: tf.strings.length(tf.strings.as_string(x)), [tf.TensorSpec([4])]),
        (lambda x, y: x + y, [tf.TensorSpec([4])]),
        (lambda x: tf.ones([7]) + x, [tf.TensorSpec([4])]),
    ],
    ids=["strings", "argument-missing", "shapes-do-not-fit"],
)
def test_what_cannot_be_compiled_is_refused_with_the_compilers_words(f, specs):
    with pytest.raises(ValueError, match="cannot be planned.*The compiler says: .+"):
        planned_memory(f, *specs)


# ------------------------------------------------------------------------------ training steps


@pytest.fixture
def tiny_config(tiny_params):
    params = {**tiny_params, "max_encoder_length": 64, "attention_type": "original_full"}
    return BigBirdConfig.from_params(params)


def test_a_training_plan_counts_parameters_and_optimizer_state(tiny_config):
    plan = plan_training(tiny_config, batch_size=2)
    model = BertModel(tiny_config)
    assert plan.parameters == model.count_params()
    assert plan.parameter_bytes == 4 * plan.parameters
    # Two moments of each parameter; the step counter and the learning rate.
    assert 0 <= plan.optimizer_bytes - 2 * plan.parameter_bytes <= 16
    assert plan.step.argument_bytes >= plan.parameter_bytes
    assert plan.total_bytes == plan.step.total_bytes + plan.optimizer_bytes


@pytest.mark.parametrize("name", ["AdamWeightDecay", "Adam", "Adafactor"])
def test_the_planned_optimizer_state_is_that_of_the_optimizer(name):
    weights = [tf.Variable(tf.zeros([6, 4])), tf.Variable(tf.zeros([5]))]
    optimizer = create_optimizer(name, 0.1)
    optimizer.build(weights)
    expected = sum(v.shape.num_elements() * v.dtype.size for v in optimizer.variables)
    assert memory._optimizer_bytes(name, weights) == expected


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_without_documents_is_refused(tiny_config, batch_size):
    with pytest.raises(ValueError, match="expected at least 1"):
        plan_training(tiny_config, batch_size)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="gradient_checkpointing_policy='some'"):
        BigBirdConfig(gradient_checkpointing_policy="some")


# GiB per document in a batch, beside 1 GiB whatever the batch.
GIB_OF_POLICY = {"none": 8, "attention": 6, "every_n": 5, "full": 2}


@pytest.fixture
def known_plans(monkeypatch):
    """Puts plans of known sizes in the place of compiled ones."""

    def plan(config, batch_size, optimizer="AdamWeightDecay"):
        activations = GIB_OF_POLICY[config.checkpointing_policy] * batch_size * GIB
        step = MemoryPlan(0, 0, activations, activations)
        return TrainingPlan(step, parameters=1, parameter_bytes=4, optimizer_bytes=GIB)

    monkeypatch.setattr(memory, "plan_training", plan)


@pytest.mark.parametrize(
    "budget, policy", [(9, "none"), (8.9, "attention"), (6, "every_n"), (5.9, "full"), (3, "full")]
)
def test_auto_takes_the_fastest_policy_that_fits(known_plans, budget, policy):
    config = BigBirdConfig(gradient_checkpointing_policy="auto", memory_budget_gb=budget)
    assert fitting_policy(config, batch_size=1) == config.replace(
        gradient_checkpointing_policy=policy
    )


def test_a_budget_that_nothing_meets_is_refused_with_the_smallest_need(known_plans):
    config = BigBirdConfig(gradient_checkpointing_policy="auto", memory_budget_gb=4)
    with pytest.raises(ValueError, match=r"smallest plan, full, needs 5.00 GiB"):
        fitting_policy(config, batch_size=2)


def test_auto_without_a_budget_is_refused(known_plans):
    with pytest.raises(ValueError, match="memory_budget_gb"):
        fitting_policy({"gradient_checkpointing_policy": "auto"}, batch_size=1)


@pytest.mark.parametrize("policy", POLICIES_BY_TIME)
def test_a_policy_that_is_chosen_stays(policy):
    config = BigBirdConfig(gradient_checkpointing_policy=policy, memory_budget_gb=1)
    assert fitting_policy(config, batch_size=1) is config


@given(
    fixed=st.integers(0, 1000),
    growth=st.lists(st.integers(1, 100), min_size=2, max_size=60),
    budget=st.integers(0, 4000),
)
def test_the_largest_batch_is_the_last_that_fits(fixed, growth, budget):
    def total_bytes(batch):
        beyond = max(0, batch - len(growth))
        return fixed + sum(growth[:batch]) + beyond * growth[-1]

    batch = largest_batch(total_bytes, budget)
    assert total_bytes(batch + 1) > budget
    assert batch == 0 or total_bytes(batch) <= budget


# ------------------------------------------------------------------------------ command


def test_the_table_lists_every_plan_and_the_largest_batches(known_plans, capsys, tmp_path):
    values = types.SimpleNamespace(
        lengths=["1024", "2048"],
        batches=["1", "2"],
        policies=["none", "full"],
        optimizer="Adam",
        plot=str(tmp_path / "plans.png"),
    )
    memory._plan_flags(BigBirdConfig(memory_budget_gb=20), values)
    plans, largest = capsys.readouterr().out.split("Largest batch within 20 GiB:")
    assert memory.EXPLANATION in plans
    rows = [line.split()[:5] for line in plans.splitlines() if line.endswith("GiB")]
    assert ["1024", "1", "none", "9.00", "GiB"] in rows
    assert ["2048", "2", "full", "5.00", "GiB"] in rows
    assert len(rows) == 8
    assert [line.split() for line in largest.strip().splitlines()] == [
        ["1024", "2", "none"],
        ["1024", "9", "full"],
        ["2048", "2", "none"],
        ["2048", "9", "full"],
    ]
    assert (tmp_path / "plans.png").stat().st_size > 0


def test_the_command_takes_the_training_flags():
    flags = (
        "--vocab_size=50 --hidden_size=16 --intermediate_size=32 --num_attention_heads=2 "
        "--num_hidden_layers=1 --max_encoder_length=64 --train_batch_size=2 --policies=full"
    )
    command = [sys.executable, "-m", "bigbird.core.memory", *flags.split()]
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.splitlines()[-1].split()[:3] == ["64", "2", "full"]
