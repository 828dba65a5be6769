"""The capture command from a checkpoint to a sound cache, and what it refuses."""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tf_keras

from bigbird.core.vocabulary import vocabulary_size
from bigbird.distillation import cache_teacher
from bigbird.distillation.cache import TeacherCache, verify_cache
from bigbird.distillation.cache_files import shard_path
from tests.distillation import commands_in_process as in_process


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    lines = [json.dumps({"text": text}) + "\n" for text in in_process.TEXTS]
    (directory / "train.jsonl").write_text("".join(lines))
    return directory


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory, vocabulary_file):
    directory = tmp_path_factory.mktemp("teacher")
    in_process.write_teacher(directory, vocabulary_file)
    return directory


@pytest.fixture
def settings(data_dir, teacher_dir, vocabulary_file, tmp_path):
    return {
        "cache_dir": tmp_path / "cache",
        "init_checkpoint": teacher_dir,
        "data_dir": data_dir,
        "vocab_model_file": vocabulary_file,
        "max_encoder_length": 16,
        "k": 7,
        "shard_sequences": 2,
        "eval_batch_size": 2,
    }


def run(settings, **changes):
    in_process.run(cache_teacher.main, settings, **changes)


def test_a_teacher_is_captured_verified_and_audited(settings, capsys):
    run(settings, compact=True, temperatures="1.0,2.0")
    printed = capsys.readouterr().out
    assert "4 sequences" in printed and "100%" in printed and "bytes a token" in printed
    cache = TeacherCache(settings["cache_dir"])
    identity = cache.manifest["identity"]
    assert identity["data"]["task"] == "masked_lm"
    assert identity["tokenizer"]["pieces"] == cache.format.vocab_size
    assert cache.format.temperatures == (1.0, 2.0) and cache.format.fields == ("labels",)
    run(settings, verify=True)
    run(settings, compact=True, temperatures="1.0,2.0", audit=2)
    printed = capsys.readouterr().out
    assert "tokens are sound" in printed and "teacher again" in printed


def test_repair_captures_the_bad_shards_again_and_only_those(settings, capsys):
    run(settings)
    directory = settings["cache_dir"]
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    untouched = shard_path(directory, 0).stat().st_mtime_ns
    damaged = bytearray(before["shard-00001.tfrecord"])
    damaged[100] ^= 4
    shard_path(directory, 1).write_bytes(damaged)
    with pytest.raises(SystemExit, match=f"--cache_dir={directory} --repair"):
        run(settings, verify=True)
    assert "shard-00001.tfrecord: its bytes have changed" in capsys.readouterr().out
    # The cache knows the flags of its capture.
    run({"cache_dir": directory}, repair=True)
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert shard_path(directory, 0).stat().st_mtime_ns == untouched


def test_a_capture_goes_on_and_is_audited_without_its_flags(settings, capsys):
    run(settings, compact=True, num_shards=2, shard_index=1)
    alone = {"cache_dir": settings["cache_dir"]}
    run(alone, num_shards=2)
    run(alone, finalize=True)
    assert TeacherCache(settings["cache_dir"]).format.compact
    run(alone, audit=2)
    assert "teacher again" in capsys.readouterr().out
    run(alone, num_shards=2)
    printed = capsys.readouterr().out
    assert "; 0 are to capture." in printed and "0 of 0 tokens" not in printed


def test_the_command_line_wins_over_the_flags_of_the_capture(settings, tmp_path):
    run(settings)
    alone = {"cache_dir": settings["cache_dir"]}
    with pytest.raises(ValueError, match="k: 7 there, 5 here"):
        run(alone, k=5)
    # A teacher may move; all else is as it was.
    shutil.copytree(settings["init_checkpoint"], tmp_path / "moved")
    shard_path(settings["cache_dir"], 1).unlink()
    run(alone, init_checkpoint=tmp_path / "moved", repair=True)
    assert verify_cache(settings["cache_dir"]).ok


def test_damaged_flags_of_a_capture_are_named(settings):
    run(settings)
    (settings["cache_dir"] / "capture.json").write_text("{")
    with pytest.raises(ValueError, match="capture.json is damaged"):
        run({"cache_dir": settings["cache_dir"]})


def test_a_cache_without_flags_says_what_repair_needs(settings):
    run(settings)
    (settings["cache_dir"] / "capture.json").unlink()
    shard_path(settings["cache_dir"], 0).unlink()
    with pytest.raises(SystemExit, match="--repair with the flags of its capture"):
        run({"cache_dir": settings["cache_dir"]}, verify=True)


def test_workers_are_joined_by_finalize(settings):
    for worker in (0, 1):
        run(settings, num_shards=2, shard_index=worker)
    run({"cache_dir": settings["cache_dir"]}, finalize=True)
    assert verify_cache(settings["cache_dir"]).ok


def test_a_keras_file_is_a_teacher_of_the_next_token(settings, vocabulary_file, tmp_path):
    vocab_size = vocabulary_size(vocabulary_file)
    ids = tf_keras.Input([None], dtype="int32")
    hidden = tf_keras.layers.Embedding(vocab_size, 4)(ids)
    tf_keras.Model(ids, tf_keras.layers.Dense(vocab_size)(hidden)).save(tmp_path / "t.keras")
    run(settings, task="next_token", init_checkpoint=tmp_path / "t.keras", k=0, with_states=True)
    cache = TeacherCache(settings["cache_dir"])
    assert cache.manifest["alignment"] == "next" and cache.format.k == vocab_size
    record = cache[cache.keys[0]]
    assert record["states"].shape[1] == 4 and not record["mask"][-1]
    targets = cache.targets(record | {"log_z": record["log_z"][:, 0]})
    # All logits are kept: nothing is missing.
    np.testing.assert_allclose(targets.log_mass()[record["mask"]], 0.0, atol=1e-5)


def test_arrays_from_elsewhere_are_imported(settings, tmp_path):
    ids = np.arange(24).reshape(2, 3, 4)
    np.savez(tmp_path / "a.npz", input_ids=ids[..., 0], ids=ids, logprobs=np.full(ids.shape, -2.0))
    wanted = ("cache_dir", "vocab_model_file")
    settings = {name: settings[name] for name in wanted}
    run(settings, **{"import": tmp_path / "*.npz"}, k=3, row_kind="same")
    cache = TeacherCache(settings["cache_dir"])
    assert len(cache) == 2 and cache.manifest["alignment"] == "same"
    np.testing.assert_array_equal(cache[cache.keys[1]]["ids"], ids[1, :, :3])
    assert list(cache.manifest["identity"]["teacher"]["imported"]) == ["a.npz"]


def test_another_capture_into_the_same_directory_is_refused(settings):
    run(settings)
    for changes, told in (
        ({"k": 5}, "k: 7 there, 5 here"),
        ({"masked_lm_prob": 0.5}, "identity.data.masked_lm_prob: 0.15 there, 0.5 here"),
        ({"compact": True}, "compact: False there, True here"),
    ):
        with pytest.raises(ValueError) as error:
            run(settings, **changes)
        assert told in str(error.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cache_dir": ""}, "Give --cache_dir"),
        ({"init_checkpoint": ""}, "Give --init_checkpoint"),
        ({"init_checkpoint": "nowhere"}, "no checkpoint there"),
        ({"task": "next_token"}, "give a .keras file"),
        ({"data_dir": "nowhere"}, "data_dir=nowhere"),
        ({"verify": True}, "no teacher cache"),
        ({"finalize": True}, "holds no cache"),
        ({"import": "nowhere.npz"}, "there is no such file"),
        ({"import": "nowhere.npz", "repair": True}, "no teacher to --repair"),
        ({"max_encoder_length": 2}, "max_encoder_length"),
    ],
)
def test_bad_input_is_told_before_anything_is_written(changes, told, settings):
    with pytest.raises(ValueError) as error:
        run(settings, **changes)
    assert told in str(error.value)
    assert not settings["cache_dir"].exists()


def test_the_command_tells_a_users_error_without_a_traceback():
    command = [sys.executable, "-m", "bigbird.distillation.cache_teacher", "--cache_dir=nowhere"]
    root = pathlib.Path(cache_teacher.__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == "ValueError: Give --init_checkpoint, the teacher."
    assert "Traceback" not in result.stderr
