"""Claims about writing and reading a teacher cache: nothing is lost, doubled or mixed up."""

import errno
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from bigbird.distillation.cache import (
    CacheError,
    TeacherCache,
    finalize_cache,
    sequence_key,
    verify_cache,
)
from bigbird.distillation.targets import TopKTargets
from tests.distillation import cache_writing as small

ENDINGS = ("tfrecord", "json")
NUMBER_OF = {small.key(number): number for number in range(small.SEQUENCES)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Directory of a cache that nothing interrupted."""
    directory = tmp_path_factory.mktemp("whole") / "cache"
    small.write_cache(directory)
    return directory


@pytest.fixture(scope="module")
def cache(whole):
    return TeacherCache(whole)


# ---------------------------------------------------------------------------- writing


def test_every_sequence_comes_back_by_its_key(cache):
    assert len(cache) == small.SEQUENCES and cache.keys == [*NUMBER_OF]
    for key, number in NUMBER_OF.items():
        assert key in cache
        stored, expected = cache[key], small.targets(number)
        np.testing.assert_array_equal(stored["input_ids"], small.input_ids(number))
        np.testing.assert_array_equal(stored["ids"], expected.ids)
        np.testing.assert_allclose(
            np.diff(tf.cast(stored["logits"], tf.float32)), np.diff(expected.logits), atol=0.1
        )


def test_shards_are_readable_with_plain_tf_data(cache):
    records = tf.data.TFRecordDataset(cache.files).map(cache.format.decode)
    assert [record["key"].numpy().decode() for record in records] == cache.keys


def test_the_manifest_says_what_the_cache_is_of(cache, whole):
    manifest = json.loads((whole / "manifest.json").read_text())
    assert manifest == cache.manifest
    assert manifest["identity"]["teacher"] == {"fingerprint": "aa"}
    assert manifest["complete"] and manifest["sequences"] == small.SEQUENCES
    assert manifest["tokens"] == sum(len(small.input_ids(n)) for n in range(small.SEQUENCES))
    assert [shard["sequences"] for shard in manifest["shards"]] == [4, 4, 4, 4, 4, 2]
    assert (manifest["vocab_size"], manifest["k"], manifest["temperatures"]) == (50, 4, [1.0])
    assert all(len(shard["sha256"]) == 64 for shard in manifest["shards"])


def test_a_loop_that_is_started_again_writes_the_same_bytes(whole, tmp_path):
    directory = tmp_path / "cache"
    for stop in (3, 11, 17):
        with pytest.raises(KeyboardInterrupt), small.open_writer(directory) as writer:
            small.write_all(writer, range(stop))
            raise KeyboardInterrupt
    with small.open_writer(directory) as writer:
        # 17 sequences fill four shards of four.
        assert small.write_all(writer) == small.SEQUENCES - 16
    assert small.files_of(directory) == small.files_of(whole)


def test_a_capture_killed_at_ten_moments_ends_with_the_same_bytes(whole, tmp_path):
    directory = tmp_path / "cache"
    program = pathlib.Path(__file__).with_name("kill_writers.py")
    result = subprocess.run(
        [sys.executable, program, directory], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr[-3000:]
    killed_at = json.loads(result.stdout.splitlines()[-1])
    assert len(killed_at) == 10
    # Early and late ones: the kills met different states.
    assert len(set(killed_at)) >= 3
    with small.open_writer(directory) as writer:
        small.write_all(writer)
    assert small.files_of(directory) == small.files_of(whole)
    assert verify_cache(directory).ok


def test_a_finished_cache_written_again_stays_as_it_is(whole):
    before = small.files_of(whole)
    with small.open_writer(whole) as writer:
        assert small.write_all(writer) == 0
    assert small.files_of(whole) == before


def test_a_sequence_met_twice_is_stored_once(tmp_path):
    with small.open_writer(tmp_path) as writer:
        assert small.write_all(writer, [0, 1, 0, 1, 2]) == 3
    assert TeacherCache(tmp_path).keys == [small.key(n) for n in range(3)]


def test_two_workers_write_what_one_would_and_are_joined(whole, tmp_path):
    numbers = np.arange(small.SEQUENCES)
    for worker in (0, 1):
        with small.open_writer(tmp_path, num_shards=2, shard_index=worker) as writer:
            small.write_all(writer, numbers[numbers // small.SHARD_SEQUENCES % 2 == worker])
        if worker == 0:
            with pytest.raises(CacheError, match=r"shards \[1, 3\] are missing"):
                finalize_cache(tmp_path)
            with pytest.raises(
                CacheError, match=f"run bigbird-cache-teacher --cache_dir={tmp_path} --finalize"
            ):
                TeacherCache(tmp_path)
    finalize_cache(tmp_path)
    assert small.files_of(tmp_path) == small.files_of(whole)


def test_a_missing_last_shard_is_noticed_by_the_expected_number(tmp_path):
    settings = {"num_shards": 2, "expected_sequences": small.SEQUENCES}
    with small.open_writer(tmp_path, **settings) as writer:
        small.write_all(writer, range(small.SHARD_SEQUENCES))
    with pytest.raises(CacheError, match="4 of 22 sequences"):
        finalize_cache(tmp_path)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"k": 3}, "k: 4 there, 3 here"),
        ({"vocab_size": 60}, "vocab_size: 50 there, 60 here"),
        ({"temperatures": (2.0,)}, "temperatures: [1.0] there, [2.0] here"),
        ({"compact": False}, "compact: True there, False here"),
        ({"shard_sequences": 5}, "shard_sequences: 4 there, 5 here"),
        ({"identity": {"teacher": {"fingerprint": "cc"}}}, "fingerprint: aa there, cc here"),
    ],
)
def test_another_capture_into_the_same_directory_is_refused(changes, told, whole):
    before = small.files_of(whole)
    with pytest.raises(CacheError) as error:
        small.open_writer(whole, **changes)
    assert told in str(error.value)
    assert small.files_of(whole) == before


def test_a_complete_cache_takes_no_further_sequence(tmp_path):
    small.write_cache(tmp_path)
    with pytest.raises(CacheError, match="is complete"), small.open_writer(tmp_path) as writer:
        small.write_all(writer, [small.SEQUENCES])
    assert verify_cache(tmp_path).ok


def test_a_faulty_sequence_is_not_stored_and_those_before_it_are_kept(tmp_path):
    faulty = TopKTargets([[1]] * 3, [[np.nan]] * 3, [1.0] * 3, small.VOCAB_SIZE)
    with pytest.raises(ValueError, match="NaN"), small.open_writer(tmp_path) as writer:
        small.write_all(writer, range(5))
        writer.write("faulty", [1, 2, 3], faulty)
    assert (tmp_path / "shard-00000.json").exists()
    assert not list(tmp_path.glob("*.tmp*"))


# ------------------------------------------------------------------- disks and other writers


def test_a_full_disk_loses_no_finished_shard(whole, tmp_path):
    directory = tmp_path / "cache"
    with pytest.raises(OSError, match="could not be written") as error:
        with small.open_writer(directory) as writer:
            small.write_all(writer, range(8))
            # Every write to this device fails for want of space.
            (directory / "shard-00002.tfrecord.tmp").symlink_to("/dev/full")
            small.write_all(writer)
    assert os.strerror(errno.ENOSPC) in str(error.value)
    names = {path.name for path in directory.iterdir()}
    assert names == {"manifest.json"} | {f"shard-0000{n}.{e}" for n in (0, 1) for e in ENDINGS}
    with small.open_writer(directory) as writer:
        assert small.write_all(writer) == small.SEQUENCES - 8
    assert small.files_of(directory) == small.files_of(whole)


def test_two_writers_of_one_directory_are_refused_by_name(tmp_path):
    with small.open_writer(tmp_path) as writer:
        small.write_all(writer, range(3))
        with pytest.raises(CacheError, match=f"is being written by process {os.getpid()} on host"):
            small.open_writer(tmp_path)
        with pytest.raises(CacheError, match="is being written by"):
            small.open_writer(tmp_path, num_shards=2, shard_index=1)
        small.write_all(writer)
    assert verify_cache(tmp_path).ok
    assert not list(tmp_path.glob("*.lock"))


def test_workers_of_one_capture_write_side_by_side(tmp_path):
    with small.open_writer(tmp_path, num_shards=2, shard_index=0):
        with small.open_writer(tmp_path, num_shards=2, shard_index=1):
            pass
        with pytest.raises(CacheError, match="is being written by"):
            small.open_writer(tmp_path, num_shards=2, shard_index=0)


def test_the_lock_of_a_killed_process_is_no_obstacle_but_another_hosts_is(tmp_path):
    lock = tmp_path / "writer-0-of-1.lock"
    with small.open_writer(tmp_path):
        text = lock.read_text()
    lock.write_text(text.replace(str(os.getpid()), "999999999"))
    small.open_writer(tmp_path).close()
    lock.write_text("process 7 on host elsewhere.example")
    with pytest.raises(CacheError, match="process 7 on host elsewhere.example.*delete"):
        small.open_writer(tmp_path)


# ---------------------------------------------------------------------------- reading


def ids_of_batches(batches, steps=None):
    """The numbers of the sequences in each batch."""
    found = []
    for batch in batches.take(-1 if steps is None else steps):
        rows = zip(batch["input_ids"].numpy(), batch["mask"].numpy(), strict=True)
        found.append([NUMBER_OF[sequence_key(ids[: mask.sum()])] for ids, mask in rows])
    return found


def test_an_epoch_has_every_sequence_once_in_an_order_of_seed_and_epoch(cache):
    steps = ids_of_batches(cache.dataset(2, seed=3), 33)
    epochs = [sum(steps[i : i + 11], []) for i in (0, 11, 22)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(small.SEQUENCES))
    assert epochs[0] != epochs[1] != epochs[2] and epochs[0] != sorted(epochs[0])
    assert steps == ids_of_batches(cache.dataset(2, seed=3), 33)
    assert steps[:11] != ids_of_batches(cache.dataset(2, seed=4), 11)


@pytest.mark.parametrize("start", [1, 7, 25])
def test_a_stream_from_a_step_is_the_rest_of_one_from_the_start(start, cache):
    stream = ids_of_batches(cache.dataset(3, seed=1), start + 5)
    assert stream[start:] == ids_of_batches(cache.dataset(3, seed=1, start_step=start), 5)


def test_workers_share_an_epoch_among_them(cache):
    whole = sum(ids_of_batches(cache.dataset(4, seed=1), 11), [])
    workers = [
        sum(ids_of_batches(cache.dataset(2, seed=1, num_workers=2, worker_index=w), 11), [])
        for w in (0, 1)
    ]
    assert [n for pair in zip(*workers, strict=True) for n in pair] == whole
    resumed = cache.dataset(2, seed=1, num_workers=2, worker_index=1, start_step=4)
    assert sum(ids_of_batches(resumed, 7), []) == workers[1][8:]


def test_evaluation_reads_every_sequence_once_and_in_order(cache):
    batches = ids_of_batches(cache.dataset(5, training=False))
    assert sum(batches, []) == list(range(small.SEQUENCES))
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 2]


def test_a_batch_pairs_each_input_with_its_own_targets(cache):
    for batch in cache.dataset(4, seed=2).take(6):
        targets = cache.targets(batch)
        assert batch["input_ids"].shape == [4, 9] and targets.ids.shape == [4, 9, small.KEPT]
        for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["mask"], strict=True)):
            length = int(np.sum(mask))
            expected = small.targets(NUMBER_OF[sequence_key(ids[:length])])
            np.testing.assert_array_equal(targets.ids[row, :length], expected.ids)
            np.testing.assert_allclose(
                targets.log_mass()[row, :length], expected.log_mass(), atol=2e-6
            )
            assert not np.any(mask[length:]) and not np.any(ids[length:])
        assert not any(tf.reduce_any(rows & batch["mask"]) for rows in targets.faults().values())


def test_the_students_own_inputs_are_joined_by_key_in_their_order(cache):
    numbers = [5, 3, 3, 20, 0]

    def inputs():
        for number in numbers:
            ids = small.input_ids(number)
            yield {"input_ids": np.pad(ids, [0, 12 - len(ids)]), "weight": np.float32(number)}

    signature = {
        "input_ids": tf.TensorSpec([None], tf.int32),
        "weight": tf.TensorSpec([], tf.float32),
    }
    dataset = tf.data.Dataset.from_generator(inputs, output_signature=signature)
    batches = list(cache.dataset(2, inputs=dataset, training=False))
    assert sum(ids_of_batches(tf.data.Dataset.from_tensors(batches[0])), []) == numbers[:2]
    np.testing.assert_array_equal([w for b in batches for w in b["weight"]], numbers)
    expected = small.targets(20).ids
    np.testing.assert_array_equal(batches[1]["ids"][1][: len(expected)], expected)


def test_an_input_the_teacher_never_saw_is_refused(cache):
    inputs = tf.data.Dataset.from_tensors({"input_ids": tf.constant([1, 2, 3])})
    with pytest.raises(tf.errors.OpError, match="no sequence of the content .1 2 3."):
        next(iter(cache.dataset(1, inputs=inputs, training=False)))


def test_fewer_entries_are_the_likeliest_of_those_stored(cache):
    (batch,) = cache.dataset(22, training=False, k=2)
    (whole,) = cache.dataset(22, training=False)
    np.testing.assert_array_equal(batch["ids"], whole["ids"][..., :2])
    np.testing.assert_array_equal(batch["log_z"], whole["log_z"])
    assert np.max(batch["count"]) == 2


def test_a_temperature_that_is_not_stored_has_no_normaliser(cache):
    (batch,) = cache.dataset(22, training=False, temperature=2.0)
    assert "log_z" not in batch and cache.targets(batch, 2.0).log_z is None


def test_batches_can_be_padded_to_their_longest_in_whole_blocks(cache):
    lengths = {b["ids"].shape[1] for b in cache.dataset(1, training=False, pad_to_batch=True)}
    assert lengths == set(range(3, 10))
    blocks = cache.dataset(1, training=False, pad_to_batch=True, block_size=4)
    assert {b["input_ids"].shape[1] for b in blocks} == {4, 8, 12}
    assert cache.dataset(2, block_size=16).element_spec["ids"].shape == [2, 16, small.KEPT]


def test_a_directory_that_is_no_cache_is_refused(tmp_path):
    with pytest.raises(CacheError, match=r"no manifest\.json"):
        TeacherCache(tmp_path)
    (tmp_path / "manifest.json").write_text('{"format": ')
    with pytest.raises(CacheError, match="is damaged"):
        TeacherCache(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"batch_size": 0}, "batch_size >= 1"),
        ({"batch_size": 1, "k": 5}, "k=5: expected 1 to 4"),
        ({"batch_size": 1, "num_workers": 2, "worker_index": 2}, "worker_index"),
    ],
)
def test_batches_that_cannot_be_are_refused(arguments, told, cache):
    with pytest.raises(ValueError, match=told):
        cache.dataset(**arguments)
