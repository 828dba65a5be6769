"""Claims about checking a teacher cache: whatever was done to it is found, and named."""

import json

import pytest

from bigbird.distillation.cache import CacheError, TeacherCache, verify_cache
from bigbird.distillation.cache_files import ShardWriter, read_index, shard_path
from tests.distillation import cache_writing as small


@pytest.fixture
def directory(tmp_path):
    small.write_cache(tmp_path)
    return tmp_path


def flip(path, place):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_sound_cache_has_no_problems(directory):
    report = verify_cache(directory)
    assert report.ok and report.bad_shards == ()
    assert report.sequences == small.SEQUENCES
    assert str(report) == f"{small.SEQUENCES} sequences, {report.tokens} tokens are sound."


@pytest.mark.parametrize("place", [3, 200, -1])
def test_a_flipped_byte_is_found_by_the_check_and_by_reading(place, directory):
    flip(shard_path(directory, 2), place)
    report = verify_cache(directory)
    assert report.bad_shards == (2,)
    assert "shard-00002.tfrecord: its bytes have changed" in report.problems[0]
    assert report.sequences == small.SEQUENCES - 4
    if place == 200:
        with pytest.raises(CacheError, match="shard-00002.tfrecord is damaged"):
            for key in TeacherCache(directory).keys:
                TeacherCache(directory)[key]


def test_a_deleted_shard_is_found_by_the_check_and_by_opening(directory):
    shard_path(directory, 1).unlink()
    assert verify_cache(directory).problems == ("shard-00001.tfrecord: it is missing.",)
    with pytest.raises(CacheError, match="shard-00001.tfrecord: expected .* bytes, found no file"):
        TeacherCache(directory)


def test_a_cut_shard_is_found_by_the_check_and_by_opening(directory):
    path = shard_path(directory, 5)
    path.write_bytes(path.read_bytes()[:-7])
    assert verify_cache(directory).bad_shards == (5,)
    with pytest.raises(CacheError, match="shard-00005"):
        TeacherCache(directory)


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_text("{")])
def test_a_lost_or_damaged_index_is_found(damage, directory):
    damage(directory / "shard-00003.json")
    assert verify_cache(directory).bad_shards == (3,)
    with pytest.raises(CacheError, match="shard-00003"):
        TeacherCache(directory)


def test_a_shard_of_another_capture_is_found(directory, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    with small.open_writer(other) as writer:
        small.write_all(writer, range(30, 40))
    for ending in (".tfrecord", ".json"):
        path = shard_path(other, 0).with_suffix(ending)
        path.replace(directory / path.name)
    assert verify_cache(directory).bad_shards == (0,)


def test_a_sequence_that_is_there_twice_is_found(directory):
    manifest = json.loads((directory / "manifest.json").read_text())
    copy = read_index(directory, 0)
    (directory / "shard-00006.tfrecord").write_bytes(shard_path(directory, 0).read_bytes())
    (directory / "shard-00006.json").write_text((directory / "shard-00000.json").read_text())
    manifest["shards"].append({"name": "shard-00006.tfrecord", **copy.summary})
    (directory / "manifest.json").write_text(json.dumps(manifest))
    report = verify_cache(directory)
    assert report.bad_shards == (6,) and "is also in shard 0" in report.problems[0]


def test_a_record_whose_values_cannot_be_is_found(directory):
    layout = TeacherCache(directory).format
    shard = ShardWriter(directory, 0)
    record = layout.encode(small.record(0)).replace(b"log_z", b"log_y")
    shard.write(small.key(0), record, 3, 3, 3)
    shard.finish()
    manifest = json.loads((directory / "manifest.json").read_text())
    manifest["shards"][0].update(read_index(directory, 0).summary)
    (directory / "manifest.json").write_text(json.dumps(manifest))
    report = verify_cache(directory)
    assert report.bad_shards == (0,)
    assert f"sequence {small.key(0)} cannot be read" in report.problems[0]


def test_a_capture_that_is_not_complete_is_a_problem(tmp_path):
    with pytest.raises(KeyboardInterrupt), small.open_writer(tmp_path) as writer:
        small.write_all(writer, range(9))
        raise KeyboardInterrupt
    report = verify_cache(tmp_path)
    assert report.problems == ("The capture is not complete.",)
    assert report.sequences == 8


def test_a_directory_without_a_cache_is_refused(tmp_path):
    with pytest.raises(CacheError, match=r"no manifest\.json"):
        verify_cache(tmp_path)
