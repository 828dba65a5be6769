"""The drawn pattern is a picture of the flags' pattern."""

import pytest
from absl.testing import flagsaver

from bigbird.core import draw_pattern, flags


@pytest.fixture(scope="module", autouse=True)
def defined_flags():
    draw_pattern.define_flags()


def _draw(*arguments):
    with flagsaver.flagsaver():
        flags.FLAGS(["draw_pattern", "--vocab_size=8", *arguments])
        draw_pattern.main([])


def test_the_pattern_becomes_a_png(tmp_path):
    path = tmp_path / "pattern.png"
    _draw("--max_encoder_length=1024", "--block_size=64", f"--pattern_file={path}")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--max_encoder_length=256", "is attended in full"),
        ("--head=12", "--head=12: expected 0 to 11"),
        ("--global_token_positions=4096", "global_token_positions holds 4096"),
    ],
)
def test_what_cannot_be_drawn_is_told(flag, told, tmp_path):
    path = tmp_path / "pattern.png"
    with pytest.raises(ValueError, match=told):
        _draw(f"--pattern_file={path}", flag)
    assert not path.exists()
