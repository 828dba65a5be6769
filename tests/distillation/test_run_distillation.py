"""The distillation command from two caches to a report, its script and its notebook."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import nbclient
import nbformat
import numpy as np
import pytest
import tensorflow as tf

from bigbird.distillation import cache_teacher, run_distillation
from bigbird.distillation.report import Run, write_report
from bigbird.distillation.trainer import MODES
from tests.distillation import commands_in_process as in_process

FOLDER = pathlib.Path(run_distillation.__file__).parent
STUDENT = {**in_process.MODEL, "hidden_size": 4, "max_encoder_length": 16}


@pytest.fixture(scope="module")
def caches(tmp_path_factory, vocabulary_file):
    """A teacher, a cache to train on, and a held-out one with all logits."""
    directory = tmp_path_factory.mktemp("distillation")
    in_process.write_teacher(directory / "teacher", vocabulary_file)
    in_process.write_documents(directory)
    for split in ("train", "validation"):
        in_process.run(
            cache_teacher.main,
            {
                "cache_dir": directory / f"cache-{split}",
                "init_checkpoint": directory / "teacher",
                "data_dir": directory,
                "split": split,
                "vocab_model_file": vocabulary_file,
                "max_encoder_length": 16,
                "masked_lm_prob": 0.4,
                "k": 5 if split == "train" else 0,
            },
        )
    return directory


@pytest.fixture
def settings(caches, vocabulary_file, tmp_path):
    return {
        **STUDENT,
        "cache_dir": caches / "cache-train",
        "held_out_cache_dir": caches / "cache-validation",
        "vocab_model_file": vocabulary_file,
        "output_dir": tmp_path / "student",
        "train_batch_size": 4,
        "eval_batch_size": 4,
        "num_train_steps": 4,
        "num_warmup_steps": 1,
        "save_checkpoints_steps": 2,
        "log_steps": 1,
        "learning_rate": 1e-2,
        "optimizer": "Adam",
        "plan_memory": False,
    }


def run(settings, *arguments, **changes):
    in_process.run(run_distillation.main, settings, *arguments, **changes)


def test_a_student_is_trained_validated_and_reported(settings, capsys):
    run(settings, do_eval=True, plan_memory=True)
    directory = settings["output_dir"]
    found = Run.read(str(directory))
    assert [step for step, _ in found.curve("train", "loss")] == [1, 2, 3, 4]
    assert [step for step, _ in found.curve("validation", "kl")] == [2, 4]
    assert [step for step, _ in found.curve("speed", "tokens_per_second")] == [2, 3, 4]
    assert found.summary["planned_bytes"] > 4 * found.summary["parameters"]
    assert 0 < found.curve("train", "kept_mass")[-1][1] < 1
    # Divergence from all the teacher's logits.
    assert found.curve("validation", "kept_mass")[-1][1] == pytest.approx(1.0, abs=1e-4)
    report = (directory / "report.html").read_text()
    for text in ("<svg", "Held-out divergence", "offline_fused", "peak MiB"):
        assert text in report
    # Nothing is fetched: the addresses in the drawings are names of XML vocabularies.
    assert not re.search(r"""(?:src|href)=["'](?!#)""", report)
    results = json.loads((directory / "eval_results_4.json").read_text())
    assert results["kl"] == pytest.approx(found.curve("validation", "kl")[-1][1], rel=1e-5)
    printed = capsys.readouterr().out
    assert "kl = " in printed and "validation at step 2: kl " in printed


def test_all_modes_learn_the_same_and_are_compared(settings, caches, tmp_path):
    for mode in MODES:
        teacher = {"teacher": caches / "teacher"} if mode == "online" else {}
        run(settings, mode=mode, output_dir=tmp_path / mode, **teacher)
    losses = {m: [v for _, v in Run.read(str(tmp_path / m)).curve("train", "loss")] for m in MODES}
    for mode in ("offline_dense", "offline_forward_chunked"):
        np.testing.assert_allclose(losses[mode], losses["offline_fused"], rtol=1e-3)
    report = tmp_path / "comparison.html"
    paths = [str(tmp_path / mode) for mode in MODES]
    run({}, *paths, compare=True, report_file=report)
    text = report.read_text()
    assert all(mode in text for mode in MODES)
    differing = text[text.index("Where the runs differ") : text.index("<details>")]
    row = "".join(f'<td class="number">&quot;{mode}&quot;</td>' for mode in MODES)
    assert f"<tr><td>mode</td>{row}</tr>" in differing and "learning_rate" not in differing


def test_runs_of_one_name_are_told_apart_by_their_paths(settings, tmp_path):
    directories = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    run(settings, num_train_steps=2, output_dir=directories[0])
    shutil.copytree(*directories)
    write_report(str(tmp_path / "r.html"), list(map(str, directories)))
    text = (tmp_path / "r.html").read_text()
    assert all(f"<td>{directory}</td>" in text for directory in directories)
    assert "<p>Nowhere.</p>" in text


def test_the_students_run_is_an_init_checkpoint(settings, tmp_path, capsys):
    run(settings, num_train_steps=2)
    again = {**settings, "init_checkpoint": settings["output_dir"], "output_dir": tmp_path / "b"}
    run(again, num_train_steps=2)
    assert "missing 0" in capsys.readouterr().out


def test_a_finished_run_is_not_trained_again_and_another_setting_is_refused(settings):
    run(settings, num_train_steps=2)
    table = (settings["output_dir"] / "train.csv").read_text()
    run(settings, num_train_steps=2)
    assert (settings["output_dir"] / "train.csv").read_text() == table
    with pytest.raises(ValueError, match="tail: bucket there, zero here"):
        run(settings, num_train_steps=2, tail="zero")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"cache_dir": ""}, "Give --cache_dir"),
        ({"cache_dir": "nowhere"}, "holds no teacher cache"),
        ({"data_dir": "documents"}, "no --data_dir"),
        ({"do_eval": True, "held_out_cache_dir": ""}, "--do_eval needs --held_out_cache_dir"),
        ({"mode": "online"}, "--mode=online needs --teacher"),
        ({"task": "seq2seq", "max_decoder_length": 8}, "task: the cache is of masked_lm"),
        ({"k": 6}, "5 entries are kept there, 6 are wanted"),
        ({"tail": "bucket", "temperature": 2.0}, "normalisers are stored at 1;"),
        ({"max_encoder_length": 8}, "the student takes 8"),
        ({"state_weight": 1.0}, "state_width"),
        ({"compare": True}, "needs the output directories"),
    ],
)
def test_bad_input_is_told_before_anything_is_written(changes, told, settings):
    with pytest.raises(ValueError) as error:
        run(settings, **changes)
    assert told in str(error.value)
    assert not settings["output_dir"].exists()


def test_held_out_sequences_that_are_trained_on_are_refused(settings):
    with pytest.raises(ValueError, match="are also in"):
        run(settings, held_out_cache_dir=settings["cache_dir"])


def test_a_directory_without_a_run_cannot_be_compared(tmp_path):
    with pytest.raises(ValueError, match="holds no run"):
        write_report(str(tmp_path / "r.html"), [str(tmp_path)])


def test_the_script_makes_teacher_caches_students_and_a_comparison():
    printed = subprocess.run(
        [FOLDER / "distill.sh"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": "echo"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    # Each command is shown, and here echoed instead of run.
    assert [line[len("$ python ") :] for line in printed[::2]] == printed[1::2]
    commands = printed[1::2]
    modules = [command.split()[1].split(".")[-1] for command in commands]
    students = ["run_distillation"] * (len(MODES) + 2)
    assert modules == ["run_pretraining", "cache_teacher", "cache_teacher", *students]
    for mode in MODES:
        assert sum(f"--mode={mode}" in command.split() for command in commands) >= 1
    assert "--label_share=1" in commands[-2] and "--compare" in commands[-1]


def test_the_notebook_runs(tmp_path, monkeypatch, vocabulary_file):
    (tmp_path / "data").mkdir()
    in_process.write_documents(tmp_path / "data")
    monkeypatch.setenv("FAST", "1")
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("VOCAB_MODEL_FILE", vocabulary_file)
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    notebook = nbformat.read(FOLDER / "distillation.ipynb", as_version=4)
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    printed = "".join(
        output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])
    )
    assert "bytes a token" in printed and "offline_forward_chunked" in printed
    assert tf.io.gfile.exists(str(tmp_path / "runs" / "comparison.html"))
