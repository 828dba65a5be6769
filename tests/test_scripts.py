"""What the shell scripts of all tasks have in common."""

import os
import pathlib
import subprocess

import pytest

PACKAGE = pathlib.Path(__file__).parent.parent / "bigbird"
AUTO_JIT = "--tf_xla_auto_jit=2 --tf_xla_cpu_global_jit"


@pytest.mark.parametrize(
    "script",
    ["classifier/base_size.sh", "pretrain/base_size.sh", "summarization/pegasus_large.sh"],
)
@pytest.mark.parametrize(("given", "expected"), [(None, AUTO_JIT), ("", ""), ("--x", "--x")])
def test_auto_jit_is_on_unless_its_variable_says_otherwise(script, given, expected, tmp_path):
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "$TF_XLA_FLAGS"\n')
    program.chmod(0o755)
    environment = {k: v for k, v in os.environ.items() if k != "TF_XLA_FLAGS"}
    environment["PYTHON"] = str(program)
    if given is not None:
        environment["TF_XLA_FLAGS"] = given
    result = subprocess.run([PACKAGE / script], capture_output=True, text=True, env=environment)
    assert result.stdout == f"{expected}\n"
