#!/usr/bin/env bash
# A recipe for two CPU cores: PubMed from random weights, by pegasus_large.sh with small sizes.
#
#   VOCAB_MODEL_FILE=gpt2.model pubmed_small.sh --tfds_data_dir=DIRECTORY
#
# What it reached is in docs/recipes.md.
set -euo pipefail

export OUTPUT_DIR="${OUTPUT_DIR:-runs/pubmed}"
export VOCAB_MODEL_FILE="${VOCAB_MODEL_FILE:-gpt2}"
export NUM_HIDDEN_LAYERS="${NUM_HIDDEN_LAYERS:-1}"
export NUM_ATTENTION_HEADS="${NUM_ATTENTION_HEADS:-2}"
export HIDDEN_SIZE="${HIDDEN_SIZE:-128}"
export INTERMEDIATE_SIZE="${INTERMEDIATE_SIZE:-512}"
export TRAIN_BATCH_SIZE="${TRAIN_BATCH_SIZE:-4}"
export EVAL_BATCH_SIZE="${EVAL_BATCH_SIZE:-10}"
export OPTIMIZER="${OPTIMIZER:-Adam}"
export LEARNING_RATE="${LEARNING_RATE:-0.32}"
export NUM_TRAIN_STEPS="${NUM_TRAIN_STEPS:-300}"
export NUM_WARMUP_STEPS="${NUM_WARMUP_STEPS:-100}"
export SAVE_CHECKPOINTS_STEPS="${SAVE_CHECKPOINTS_STEPS:-100}"

exec "$(dirname "${BASH_SOURCE[0]}")/pegasus_large.sh" \
  --hidden_dropout_prob=0 --attention_probs_dropout_prob=0 --jit_compile \
  --log_steps=25 --validation_split=validation \
  --no_repeat_ngram_size=3 --lead_sentences=10 "$@"
