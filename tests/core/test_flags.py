"""The 2021 flags exist with their names and defaults, and become a config."""

import importlib
import json
import os
import subprocess
import sys

import pytest
from absl.testing import flagsaver

from bigbird.core import flags

FLAGS = flags.FLAGS

COMMON = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 4096,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "type_vocab_size": 2,
    "use_bias": True,
    "rescale_embedding": False,
    "use_gradient_checkpointing": False,
    "scope": "bert",
    "vocab_model_file": "gpt2",
    "attention_type": "block_sparse",
    "norm_type": "postnorm",
    "block_size": 16,
    "num_rand_blocks": 3,
    "weight_decay_rate": 0.01,
    "optimizer_beta1": 0.9,
    "optimizer_beta2": 0.999,
    "optimizer_epsilon": 1e-6,
    "use_tpu": False,
    "tpu_name": None,
    "tpu_zone": None,
    "tpu_job_name": None,
    "gcp_project": None,
    "master": None,
    "num_tpu_cores": 8,
    "iterations_per_loop": "1000",
}

TASKS = {
    "bigbird.classifier.run_classifier": {
        "data_dir": "tfds://imdb_reviews/plain_text",
        "output_dir": "/tmp/bigb",
        "init_checkpoint": None,
        "max_encoder_length": 512,
        "substitute_newline": None,
        "do_train": True,
        "do_eval": False,
        "do_export": False,
        "train_batch_size": 8,
        "eval_batch_size": 8,
        "optimizer": "AdamWeightDecay",
        "learning_rate": 1e-5,
        "num_train_steps": 16000,
        "num_warmup_steps": 1000,
        "save_checkpoints_steps": 1000,
        "num_labels": 2,
    },
}


def test_the_common_flags_keep_their_2021_defaults():
    assert {name: FLAGS[name].default for name in COMMON} == COMMON


@pytest.mark.parametrize("module", TASKS)
def test_a_task_keeps_its_2021_defaults(module):
    importlib.reload(importlib.import_module(module))
    assert {name: FLAGS[name].default for name in TASKS[module]} == TASKS[module]


@pytest.fixture
def parsed():
    """Parses no flags, and gives every flag its former value back at the end."""
    with flagsaver.flagsaver():
        FLAGS(["program"])
        yield FLAGS


def test_flags_become_a_config(parsed):
    parsed.hidden_size, parsed.vocab_size, parsed.pad_id = 24, 99, 3
    config = flags.model_config()
    assert (config.hidden_size, config.vocab_size, config.pad_token_id) == (24, 99, 3)


def test_saved_flags_are_loaded_again(parsed, tmp_path):
    parsed.hidden_size, parsed.vocab_size = 48, 99
    path = str(tmp_path / "flags.json")
    flags.save(path)
    parsed.hidden_size = 12
    flags.load(path)
    assert parsed.hidden_size == 48
    assert json.loads((tmp_path / "flags.json").read_text()) == flags.as_dictionary()


def test_special_ids_default_to_those_of_2021(parsed):
    special = flags.special_tokens()
    assert (special.pad, special.eos, special.bos) == (0, 1, 2)
    assert (special.cls, special.sep, special.mask) == (65, 66, 67)


def test_an_earlier_run_gives_the_flags_that_the_command_line_leaves_open(parsed):
    parsed(["program", "--hidden_size=24"])
    flags.adopt({"hidden_size": 48, "num_hidden_layers": 3}, ["hidden_size", "num_hidden_layers"])
    assert (parsed.hidden_size, parsed.num_hidden_layers) == (24, 3)


def _run_program(main, *arguments, before=""):
    program = (
        f"import tensorflow as tf\nfrom bigbird.core import flags\n{before}\nflags.run({main})"
    )
    # What TensorFlow's C++ core logs is its own.
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("main", ["lambda _: int('remedy')", "lambda _: tf.io.read_file('remedy')"])
def test_a_user_error_reaches_the_terminal_without_a_traceback(main):
    result = _run_program(main)
    assert result.returncode == 1
    assert "remedy" in result.stderr
    assert "Traceback" not in result.stderr


def _map(function):
    """A program whose `main` calls a function inside a pipeline."""
    return f"""
from bigbird.core.corpora.record_files import DataError

{function}

def main(_):
    data = tf.data.Dataset.range(1).map(lambda x: tf.numpy_function(fail, [x], tf.int64))
    tf.function(lambda: next(iter(data)))()
"""


@pytest.mark.parametrize("error", ["DataError('row 3: remedy')", "OSError('row 3: remedy')"])
def test_a_user_error_inside_a_pipeline_is_told_as_one_outside(error):
    result = _run_program("main", before=_map(f"def fail(_):\n    raise {error}"))
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == f"{error.split('(')[0]}: row 3: remedy"
    assert "Traceback" not in result.stderr


def test_a_fault_of_ours_inside_a_pipeline_keeps_its_traceback():
    # It comes up while a user's error is handled, which is not the one to tell.
    handling = """
def fail(x):
    try:
        int("not a number")
    except ValueError:
        return x.nothing
"""
    result = _run_program("main", before=_map(handling))
    assert result.returncode == 1
    assert "Traceback" in result.stderr and "AttributeError" in result.stderr


def test_help_lists_every_flag():
    told = _run_program("lambda _: None", "--help").stdout
    assert "--num_hidden_layers" in told and "--[no]use_gradient_checkpointing" in told
