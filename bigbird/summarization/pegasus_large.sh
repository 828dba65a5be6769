#!/usr/bin/env bash
# Fine-tunes and evaluates a large BigBird-Pegasus summarizer on PubMed: 3,072 to 256 tokens.
#
# The defaults are the 2021 settings. Override each by its environment variable, or any flag by
# writing it behind the script's name (the last one wins):
#   DATA_DIR=articles/ VOCAB_MODEL_FILE=pegasus.model pegasus_large.sh --use_gradient_checkpointing
set -euo pipefail

# Auto-clustering by XLA; the second flag is what makes it work on a CPU too.
# `TF_XLA_FLAGS=` in front of the script's name turns it off.
export TF_XLA_FLAGS="${TF_XLA_FLAGS---tf_xla_auto_jit=2 --tf_xla_cpu_global_jit}"

exec "${PYTHON:-python3}" -m bigbird.summarization.run_summarization \
  --data_dir="${DATA_DIR:-tfds://scientific_papers/pubmed}" \
  --output_dir="${OUTPUT_DIR:-/tmp/bigb/summarization}" \
  --vocab_model_file="${VOCAB_MODEL_FILE:-pegasus}" \
  --substitute_newline="${SUBSTITUTE_NEWLINE-<n>}" \
  ${INIT_CHECKPOINT:+--init_checkpoint="$INIT_CHECKPOINT"} \
  --scope="${SCOPE:-pegasus}" \
  --attention_type="${ATTENTION_TYPE:-block_sparse}" \
  --norm_type="${NORM_TYPE:-prenorm}" \
  --couple_encoder_decoder="${COUPLE_ENCODER_DECODER:-False}" \
  --hidden_act="${HIDDEN_ACT:-relu}" \
  --use_bias="${USE_BIAS:-False}" \
  --rescale_embedding="${RESCALE_EMBEDDING:-True}" \
  --max_encoder_length="${MAX_ENCODER_LENGTH:-3072}" \
  --max_decoder_length="${MAX_DECODER_LENGTH:-256}" \
  --block_size="${BLOCK_SIZE:-64}" \
  --num_hidden_layers="${NUM_HIDDEN_LAYERS:-16}" \
  --num_attention_heads="${NUM_ATTENTION_HEADS:-16}" \
  --hidden_size="${HIDDEN_SIZE:-1024}" \
  --intermediate_size="${INTERMEDIATE_SIZE:-4096}" \
  --beam_size="${BEAM_SIZE:-5}" \
  --alpha="${ALPHA:-0.8}" \
  --label_smoothing="${LABEL_SMOOTHING:-0.1}" \
  --do_train="${DO_TRAIN:-True}" \
  --do_eval="${DO_EVAL:-True}" \
  --train_batch_size="${TRAIN_BATCH_SIZE:-2}" \
  --eval_batch_size="${EVAL_BATCH_SIZE:-2}" \
  --optimizer="${OPTIMIZER:-Adafactor}" \
  --learning_rate="${LEARNING_RATE:-0.32}" \
  --num_train_steps="${NUM_TRAIN_STEPS:-1000}" \
  --num_warmup_steps="${NUM_WARMUP_STEPS:-100}" \
  --save_checkpoints_steps="${SAVE_CHECKPOINTS_STEPS:-2000}" \
  "$@"
