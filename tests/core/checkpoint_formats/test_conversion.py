"""The command bigbird-convert renames tensors; nothing about them changes."""

import json
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from bigbird.core import checkpoint
from bigbird.core.checkpoint_formats.conversion import convert
from bigbird.core.config import BigBirdConfig
from bigbird.core.modeling import BertModel, TransformerModel

FOLDERS = ("hf_bigbird", "hf_bigbird_classifier", "hf_bigbird_pegasus")


@pytest.mark.parametrize("name", FOLDERS)
def test_there_and_back_gives_the_same_bytes(hf_dir, tmp_path, name):
    source = hf_dir / name
    config = checkpoint.config_from_pretrained(str(source))
    report = convert(str(source), str(tmp_path / "tf1"), config, "tf1")
    assert "left out 0" in report
    convert(str(tmp_path / "tf1"), str(tmp_path / "back"), config, "safetensors")
    before = safetensors.numpy.load_file(source / "model.safetensors")
    after = safetensors.numpy.load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(value.tobytes() == after[key].tobytes() for key, value in before.items())
    assert checkpoint.config_from_pretrained(str(tmp_path / "back")) == config


@pytest.mark.parametrize("name", ["bert_postnorm_block_sparse", "seq2seq_prenorm_pegasus"])
def test_a_2021_checkpoint_becomes_a_directory_that_loads(reference_dir, tmp_path, name):
    params = json.loads((reference_dir / name / "config.json").read_text())
    config = BigBirdConfig.from_params(params)
    prefix = str(reference_dir / name / "ckpt" / "model.ckpt-0")
    convert(prefix, str(tmp_path), config, "safetensors")
    model_class = BertModel if name.startswith("bert") else TransformerModel
    old, new = model_class(config), model_class(checkpoint.config_from_pretrained(str(tmp_path)))
    checkpoint.load_tf1_checkpoint(old, prefix)
    checkpoint.load_safetensors(new, str(tmp_path))
    values = {v.name: v.numpy() for v in new.variables}
    for variable in old.variables:
        np.testing.assert_array_equal(variable, values[variable.name])


def test_a_prenorm_encoder_is_refused(reference_dir, tmp_path):
    folder = reference_dir / "bert_prenorm_block_sparse"
    config = BigBirdConfig.from_params(json.loads((folder / "config.json").read_text()))
    with pytest.raises(checkpoint.CheckpointError, match="norm_type='prenorm'"):
        convert(str(folder / "ckpt" / "model.ckpt-0"), str(tmp_path), config, "safetensors")


def test_flags_of_another_model_are_told(hf_dir, tmp_path):
    config = checkpoint.config_from_pretrained(str(hf_dir / "hf_bigbird"))
    with pytest.raises(checkpoint.CheckpointError, match=r"\[48, 32\], received \[64, 32\]"):
        convert(
            str(hf_dir / "hf_bigbird"),
            str(tmp_path),
            config.replace(intermediate_size=48),
            "tf1",
        )


def test_heads_can_be_left_out_and_are_listed(hf_dir, tmp_path):
    config = checkpoint.config_from_pretrained(str(hf_dir / "hf_bigbird"))
    report = convert(
        str(hf_dir / "hf_bigbird"), str(tmp_path), config, "safetensors", encoder_only=True
    )
    assert "left out 7" in report and "cls.predictions.bias" in report
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["architectures"] == ["BigBirdModel"]


def test_the_command_converts_and_copies_the_vocabulary(hf_dir, vocabulary_file, tmp_path):
    command = [sys.executable, "-m", "bigbird.core.checkpoint", f"--output_dir={tmp_path}/half"]
    source = hf_dir / "hf_bigbird"
    result = subprocess.run(
        [
            *command,
            f"--init_checkpoint={source}",
            "--store_as=BF16",
            f"--vocab_model_file={vocabulary_file}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert f"Hugging Face safetensors: {source}" in result.stdout
    assert "wrote 46 tensors" in result.stdout
    assert (tmp_path / "half" / "spiece.model").exists()
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_the_command_tells_a_users_error_without_a_traceback(tmp_path):
    result = subprocess.run(
        [sys.executable, "-m", "bigbird.core.checkpoint", "--init_checkpoint=nowhere"]
        + [f"--output_dir={tmp_path}/x", "--vocab_size=9"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr and "no checkpoint there" in result.stderr
