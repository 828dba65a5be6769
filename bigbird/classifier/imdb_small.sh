#!/usr/bin/env bash
# A recipe for two CPU cores: IMDB sentiment from random weights, by base_size.sh with small sizes.
#
#   VOCAB_MODEL_FILE=gpt2.model imdb_small.sh --tfds_data_dir=DIRECTORY
#   TF_XLA_FLAGS= MAX_ENCODER_LENGTH=2048 imdb_small.sh … --pad_to_batch --nojit_compile
#                                                the same with longer reviews uncut
#
# What it reached is in docs/recipes.md.
set -euo pipefail

export MAX_ENCODER_LENGTH="${MAX_ENCODER_LENGTH:-512}"
export OUTPUT_DIR="${OUTPUT_DIR:-/tmp/bigb/imdb_$MAX_ENCODER_LENGTH}"
export NUM_HIDDEN_LAYERS="${NUM_HIDDEN_LAYERS:-2}"
export NUM_ATTENTION_HEADS="${NUM_ATTENTION_HEADS:-2}"
export HIDDEN_SIZE="${HIDDEN_SIZE:-128}"
export INTERMEDIATE_SIZE="${INTERMEDIATE_SIZE:-512}"
export TRAIN_BATCH_SIZE="${TRAIN_BATCH_SIZE:-16}"
export EVAL_BATCH_SIZE="${EVAL_BATCH_SIZE:-50}"
export LEARNING_RATE="${LEARNING_RATE:-1e-3}"
export NUM_TRAIN_STEPS="${NUM_TRAIN_STEPS:-560}"
export NUM_WARMUP_STEPS="${NUM_WARMUP_STEPS:-50}"
export SAVE_CHECKPOINTS_STEPS="${SAVE_CHECKPOINTS_STEPS:-187}"

exec "$(dirname "${BASH_SOURCE[0]}")/base_size.sh" \
  --optimizer=Adam --attention_probs_dropout_prob=0 --jit_compile "$@"
