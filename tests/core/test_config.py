"""BigBirdConfig checks values and never changes what it is given."""

import dataclasses

import pytest

from bigbird.core.config import BigBirdConfig


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"hidden_size": 100, "num_attention_heads": 12}, ["hidden_size=100", "12"]),
        ({"max_encoder_length": 8192}, ["max_encoder_length=8192", "4096"]),
        ({"attention_type": "sparse"}, ["attention_type='sparse'", "block_sparse"]),
        ({"norm_type": "mid"}, ["norm_type='mid'", "prenorm"]),
        ({"pattern_length": "document"}, ["pattern_length", "input"]),
        ({"gradient_checkpointing_policy": "some"}, ["policy='some'", "every_n"]),
        ({"hidden_dropout_prob": 1.0}, ["hidden_dropout_prob=1.0", "[0, 1)"]),
        ({"block_size": 0}, ["block_size=0"]),
        ({"num_rand_blocks": -1}, ["num_rand_blocks=-1"]),
        ({"memory_budget_gb": 0.0}, ["memory_budget_gb"]),
    ],
)
def test_a_value_outside_its_range_is_named_with_its_remedy(changes, names):
    with pytest.raises(ValueError) as error:
        BigBirdConfig.from_params(changes)
    for name in names:
        assert name in str(error.value)


def test_a_dict_is_never_mutated_and_unknown_keys_are_left_out():
    params = {"hidden_size": 24, "output_dir": "elsewhere"}
    config = BigBirdConfig.from_params(params)
    assert config.hidden_size == 24
    assert params == {"hidden_size": 24, "output_dir": "elsewhere"}


def test_a_config_round_trips_through_its_dict():
    config = BigBirdConfig(hidden_size=24, pattern_length="input")
    assert BigBirdConfig.from_params(config.to_dict()) == config


def test_a_config_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        BigBirdConfig().hidden_size = 1


@pytest.mark.parametrize(
    ("changes", "policy"),
    [
        ({}, "none"),
        ({"use_gradient_checkpointing": True}, "full"),
        ({"gradient_checkpointing_policy": "attention"}, "attention"),
        (
            {"use_gradient_checkpointing": True, "gradient_checkpointing_policy": "every_n"},
            "every_n",
        ),
    ],
)
def test_the_plain_switch_means_full_and_an_explicit_policy_wins(changes, policy):
    assert BigBirdConfig(**changes).checkpointing_policy == policy
