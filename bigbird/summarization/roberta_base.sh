#!/usr/bin/env bash
# Fine-tunes and evaluates a base BigBird-RoBERTa summarizer, whose decoder shares the encoder's
# weights: pegasus_large.sh with other settings.
set -euo pipefail

export OUTPUT_DIR="${OUTPUT_DIR:-/tmp/bigb/summarization_roberta}"
export VOCAB_MODEL_FILE="${VOCAB_MODEL_FILE:-gpt2}"
export SCOPE="${SCOPE:-bert}"
export NORM_TYPE="${NORM_TYPE:-postnorm}"
export COUPLE_ENCODER_DECODER="${COUPLE_ENCODER_DECODER:-True}"
export HIDDEN_ACT="${HIDDEN_ACT:-gelu}"
export USE_BIAS="${USE_BIAS:-True}"
export RESCALE_EMBEDDING="${RESCALE_EMBEDDING:-False}"
export NUM_HIDDEN_LAYERS="${NUM_HIDDEN_LAYERS:-12}"
export NUM_ATTENTION_HEADS="${NUM_ATTENTION_HEADS:-12}"
export HIDDEN_SIZE="${HIDDEN_SIZE:-768}"
export INTERMEDIATE_SIZE="${INTERMEDIATE_SIZE:-3072}"
export TRAIN_BATCH_SIZE="${TRAIN_BATCH_SIZE:-4}"
export EVAL_BATCH_SIZE="${EVAL_BATCH_SIZE:-4}"

exec "$(dirname "${BASH_SOURCE[0]}")/pegasus_large.sh" "$@"
