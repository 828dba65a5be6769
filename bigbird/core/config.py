"""BigBirdConfig: what a model is made of, checked once, before anything is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bigbird.core.block_layout import PatternOptions

ATTENTION_TYPES = ("original_full", "simulated_sparse", "block_sparse")
NORM_TYPES = ("prenorm", "postnorm")
PATTERN_LENGTHS = ("model", "input")
CHECKPOINTING_POLICIES = ("none", "full", "every_n", "attention", "auto")
# Fields that change what a step needs, and not what it computes.
MEMORY_FIELDS = (
    "use_gradient_checkpointing",
    "gradient_checkpointing_policy",
    "gradient_checkpointing_every_n",
    "memory_budget_gb",
)
# Fields of a decoder and its search, which an encoder alone does without.
DECODER_FIELDS = (
    "eos_token_id",
    "bos_token_id",
    "max_decoder_length",
    "num_decoder_layers",
    "couple_encoder_decoder",
    "own_decoder_positions",
    "beam_size",
    "alpha",
)


@dataclasses.dataclass(frozen=True)
class BigBirdConfig:
    """Sizes, attention pattern and memory policy of an encoder or encoder-decoder.

    Field names are the flags' names. Every layer takes `params`, either such a config or a
    dict with the same keys (`BigBirdConfig.from_params`). `bos_token_id` is what a decoder starts
    from; where `num_decoder_layers` is None, the decoder is as deep as the encoder; a vocabulary
    without an end-of-text token has `eos_token_id=None`. `own_decoder_positions` gives the decoder
    a position table of its own, as Hugging Face's models have; in 2021 it used the encoder's.

    Raises:
      ValueError: for a value outside its range, naming the field, the value and the remedy.
    """

    attention_probs_dropout_prob: float = 0.1
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    hidden_size: int = 768
    initializer_range: float = 0.02
    intermediate_size: int = 3072
    max_position_embeddings: int = 4096
    num_attention_heads: int = 12
    num_hidden_layers: int = 12
    type_vocab_size: int = 2
    use_bias: bool = True
    rescale_embedding: bool = False
    layer_norm_epsilon: float = 1e-12
    scope: str = "bert"
    vocab_size: int = 50358
    pad_token_id: int = 0
    eos_token_id: int | None = 1
    bos_token_id: int = 2

    attention_type: str = "block_sparse"
    norm_type: str = "postnorm"
    block_size: int = 16
    num_rand_blocks: int = 3
    max_encoder_length: int = 1024
    pattern_length: str = "model"
    num_window_blocks: int = 3
    num_global_blocks: int = 1
    global_token_positions: tuple[int, ...] = ()
    random_from_whole_sequence: bool = False
    unseen_random_blocks: bool = False
    pattern_seed: int = 0
    sparse_attention_dropout: bool = False

    max_decoder_length: int = 128
    num_decoder_layers: int | None = None
    couple_encoder_decoder: bool = False
    own_decoder_positions: bool = False
    beam_size: int = 5
    alpha: float = 0.8

    use_gradient_checkpointing: bool = False
    gradient_checkpointing_policy: str | None = None
    gradient_checkpointing_every_n: int = 2
    memory_budget_gb: float | None = None

    def __post_init__(self):
        positions = tuple(int(position) for position in self.global_token_positions)
        object.__setattr__(self, "global_token_positions", positions)
        self._check_positive()
        self._check_choices()
        for field in ("attention_probs_dropout_prob", "hidden_dropout_prob"):
            rate = getattr(self, field)
            if not 0.0 <= rate < 1.0:
                raise ValueError(f"{field}={rate}: expected a dropout rate in [0, 1).")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not divisible by "
                f"num_attention_heads={self.num_attention_heads}: change --hidden_size or "
                "--num_attention_heads so that every head gets the same width."
            )
        if self.max_encoder_length > self.max_position_embeddings:
            raise ValueError(
                f"max_encoder_length={self.max_encoder_length} is beyond the position table "
                f"(max_position_embeddings={self.max_position_embeddings}): shorten "
                "--max_encoder_length or enlarge --max_position_embeddings."
            )
        self.pattern.check(self.max_encoder_length)
        if self.couple_encoder_decoder and self.decoder_depth != self.num_hidden_layers:
            raise ValueError(
                f"couple_encoder_decoder shares the weights of {self.num_hidden_layers} encoder "
                f"layers with {self.decoder_depth} decoder layers: leave --num_decoder_layers "
                "unset, or do not couple."
            )

    def _check_positive(self):
        for field in (
            "hidden_size",
            "intermediate_size",
            "max_position_embeddings",
            "num_attention_heads",
            "num_hidden_layers",
            "type_vocab_size",
            "vocab_size",
            "block_size",
            "max_encoder_length",
            "max_decoder_length",
            "beam_size",
            "gradient_checkpointing_every_n",
        ):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)}: expected at least 1.")
        if self.num_decoder_layers is not None and self.num_decoder_layers < 1:
            raise ValueError(
                f"num_decoder_layers={self.num_decoder_layers}: expected at least 1, or None for "
                "as many as the encoder has."
            )
        if self.alpha < 0:
            raise ValueError(f"alpha={self.alpha}: expected at least 0.")
        if self.num_rand_blocks < 0:
            raise ValueError(f"num_rand_blocks={self.num_rand_blocks}: expected at least 0.")
        if not self.layer_norm_epsilon > 0:
            raise ValueError(f"layer_norm_epsilon={self.layer_norm_epsilon}: expected more than 0.")
        if self.memory_budget_gb is not None and self.memory_budget_gb <= 0:
            raise ValueError(f"memory_budget_gb={self.memory_budget_gb}: expected more than 0.")

    def _check_choices(self):
        for field, choices in (
            ("attention_type", ATTENTION_TYPES),
            ("norm_type", NORM_TYPES),
            ("pattern_length", PATTERN_LENGTHS),
            ("gradient_checkpointing_policy", (None, *CHECKPOINTING_POLICIES)),
        ):
            if getattr(self, field) not in choices:
                names = ", ".join(choice for choice in choices if choice is not None)
                raise ValueError(f"{field}={getattr(self, field)!r}: expected one of {names}.")

    @property
    def head_size(self) -> int:
        """Width E of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def pattern(self) -> PatternOptions:
        """What the sparse pattern has beyond that of 2021."""
        return PatternOptions(
            self.num_window_blocks,
            self.num_global_blocks,
            self.global_token_positions,
            self.random_from_whole_sequence,
            self.unseen_random_blocks,
            self.pattern_seed,
        )

    @property
    def decoder_depth(self) -> int:
        """Number of decoder layers."""
        if self.num_decoder_layers is not None:
            return self.num_decoder_layers
        return self.num_hidden_layers

    @property
    def checkpointing_policy(self) -> str:
        """The policy in force: an explicit one wins; the plain switch alone means `full`."""
        if self.gradient_checkpointing_policy is not None:
            return self.gradient_checkpointing_policy
        return "full" if self.use_gradient_checkpointing else "none"

    @classmethod
    def from_params(cls, params: BigBirdConfig | Mapping[str, Any]) -> BigBirdConfig:
        """Returns `params`, or the config of a dict; keys that are no field are left out."""
        if isinstance(params, cls):
            return params
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in params.items() if key in known})

    def replace(self, **changes) -> BigBirdConfig:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as a new dict, ready for JSON."""
        return dataclasses.asdict(self)
