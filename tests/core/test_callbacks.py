"""Logs and checkpoints: what they hold after a crash, a return to an earlier step, a new column."""

from pathlib import Path

import pytest
import tensorflow as tf
import tf_keras as keras

from bigbird.core.callbacks import Checkpoints, ScalarLog, atomic_directory, write_atomically


def test_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    write_atomically(str(path), "old")

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    monkeypatch.setattr(tf.io.gfile, "rename", fail)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(str(path), "new")
    assert path.read_text() == "old"


def write_directory(path, name):
    with atomic_directory(str(path)) as directory:
        Path(directory).mkdir()
        Path(directory, name).write_text("")


def names(directory):
    return sorted(entry.name for entry in directory.iterdir())


def test_directory_is_replaced_whole_or_not_at_all(tmp_path):
    path = tmp_path / "export"
    for name in ("first", "second"):
        write_directory(path, name)
        assert names(path) == [name]
    # What a process leaves that is killed while it writes, or between the two renames.
    (tmp_path / "export.tmp" / "torn").mkdir(parents=True)
    path.rename(tmp_path / "export.replaced")
    with pytest.raises(OSError, match="No space left"), atomic_directory(str(path)):
        raise OSError("No space left on device")
    assert names(path) == ["second"]
    write_directory(path, "third")
    assert names(path) == ["third"]
    assert names(tmp_path) == ["export"]


class TestScalarLog:
    def test_rows_come_back_exactly(self, tmp_path):
        log = ScalarLog(str(tmp_path), "train")
        assert log.rows() == []
        rows = [{"step": step, "loss": 0.1 / step, "rate": 1e-30 * step} for step in (1, 2, 10)]
        for row in rows:
            log.write(row["step"], {"loss": row["loss"], "rate": row["rate"]})
        assert log.rows() == ScalarLog(str(tmp_path), "train").rows() == rows

    def test_nothing_is_created_before_the_first_row(self, tmp_path):
        log = ScalarLog(str(tmp_path), "train")
        log.drop_after(0)
        assert not list(tmp_path.iterdir())

    def test_rows_after_a_step_are_dropped_and_written_again(self, tmp_path):
        first = ScalarLog(str(tmp_path), "train")
        for step in (1, 2, 3):
            first.write(step, {"loss": step})
        whole = first.rows()
        second = ScalarLog(str(tmp_path), "train")
        second.drop_after(1)
        assert second.rows() == whole[:1]
        for step in (2, 3):
            second.write(step, {"loss": step})
        assert second.rows() == whole

    def test_torn_last_line_is_left_out(self, tmp_path):
        log = ScalarLog(str(tmp_path), "train")
        log.write(1, {"loss": 0.5})
        table = Path(tmp_path, "train.csv")
        table.write_text(table.read_text() + "2,0.12")
        assert log.rows() == [{"step": 1, "loss": 0.5}]
        resumed = ScalarLog(str(tmp_path), "train")
        resumed.drop_after(2)
        resumed.write(2, {"loss": 0.125})
        assert table.read_text() == "step,loss\n1,0.5\n2,0.125\n"

    def test_new_column_is_added_to_the_table(self, tmp_path):
        log = ScalarLog(str(tmp_path), "train")
        log.write(1, {"loss": 0.5})
        log.write(2, {"accuracy": 1.0, "loss": 0.25})
        assert Path(tmp_path, "train.csv").read_text() == "step,loss,accuracy\n1,0.5,\n2,0.25,1.0\n"
        assert log.rows() == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.25, "accuracy": 1.0}]


def dense_model(units=2):
    return keras.Sequential([keras.layers.Dense(units, input_shape=[3])])


class TestCheckpoints:
    def test_newest_are_kept(self, tmp_path):
        checkpoints = Checkpoints(dense_model(), str(tmp_path / "run"), keep=2)
        assert checkpoints.steps() == []
        for step in (0, 9, 10, 100):
            checkpoints.save(step)
        assert checkpoints.steps() == [10, 100]

    def test_checkpoint_of_an_abandoned_later_step_is_deleted(self, tmp_path):
        checkpoints = Checkpoints(dense_model(), str(tmp_path))
        checkpoints.save(50)
        checkpoints.save(45)
        assert checkpoints.steps() == [45]

    def test_half_written_checkpoint_does_not_count(self, tmp_path):
        checkpoints = Checkpoints(dense_model(), str(tmp_path))
        checkpoints.save(1)
        (tmp_path / "step_1").rename(tmp_path / "step_1.tmp")
        assert checkpoints.restore() is None
        checkpoints.save(1)
        assert checkpoints.restore() == 1

    @pytest.mark.parametrize("damage", ["no data", "short data", "flipped data", "short index"])
    def test_every_damage_is_noticed(self, tmp_path, damage, caplog):
        model = dense_model()
        checkpoints = Checkpoints(model, str(tmp_path), keep=2)
        checkpoints.save(1)
        model.layers[0].bias.assign([5.0, 5.0])
        checkpoints.save(2)
        (data,) = (tmp_path / "step_2").glob("*.data*")
        index = tmp_path / "step_2" / "ckpt.index"
        if damage == "no data":
            data.unlink()
        elif damage == "short data":
            data.write_bytes(data.read_bytes()[:-1])
        elif damage == "flipped data":
            content = data.read_bytes()
            data.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        else:
            index.write_bytes(index.read_bytes()[:-1])
        assert checkpoints.restore() == 1
        assert model.layers[0].bias.numpy().tolist() == [0.0, 0.0]
        assert "step_2 cannot be read" in caplog.text

    def test_checkpoint_of_another_model_is_refused(self, tmp_path):
        Checkpoints(dense_model(), str(tmp_path)).save(1)
        deeper = dense_model()
        deeper.add(keras.layers.Dense(1))
        with pytest.raises(ValueError, match="does not hold every variable of this model"):
            Checkpoints(deeper, str(tmp_path)).restore()
        with pytest.raises(ValueError, match="incompatible tensor with shape"):
            Checkpoints(dense_model(units=4), str(tmp_path)).restore()
