#!/usr/bin/env bash
# Pretrains a base-size BigBird encoder on masked words of documents of 4,096 tokens.
#
# The sizes are the published base model's, the rest the 2021 defaults; of 4,096 tokens 600 are
# predicted at most. Override each by its environment variable, or any flag by writing it behind the
# script's name (the last one wins):
#   DATA_DIR=books/ VOCAB_MODEL_FILE=gpt2.model base_size.sh --use_gradient_checkpointing
set -euo pipefail

# Auto-clustering by XLA; the second flag is what makes it work on a CPU too.
# `TF_XLA_FLAGS=` in front of the script's name turns it off.
export TF_XLA_FLAGS="${TF_XLA_FLAGS---tf_xla_auto_jit=2 --tf_xla_cpu_global_jit}"

exec "${PYTHON:-python3}" -m bigbird.pretrain.run_pretraining \
  --data_dir="${DATA_DIR:-tfds://wiki40b/en}" \
  --output_dir="${OUTPUT_DIR:-/tmp/bigb/pretrain}" \
  --vocab_model_file="${VOCAB_MODEL_FILE:-gpt2}" \
  ${INIT_CHECKPOINT:+--init_checkpoint="$INIT_CHECKPOINT"} \
  --attention_type="${ATTENTION_TYPE:-block_sparse}" \
  --norm_type="${NORM_TYPE:-postnorm}" \
  --max_encoder_length="${MAX_ENCODER_LENGTH:-4096}" \
  --max_predictions_per_seq="${MAX_PREDICTIONS_PER_SEQ:-600}" \
  --masked_lm_prob="${MASKED_LM_PROB:-0.15}" \
  --block_size="${BLOCK_SIZE:-64}" \
  --num_hidden_layers="${NUM_HIDDEN_LAYERS:-12}" \
  --num_attention_heads="${NUM_ATTENTION_HEADS:-12}" \
  --hidden_size="${HIDDEN_SIZE:-768}" \
  --intermediate_size="${INTERMEDIATE_SIZE:-3072}" \
  --do_train="${DO_TRAIN:-True}" \
  --do_eval="${DO_EVAL:-True}" \
  --train_batch_size="${TRAIN_BATCH_SIZE:-4}" \
  --eval_batch_size="${EVAL_BATCH_SIZE:-4}" \
  --learning_rate="${LEARNING_RATE:-1e-4}" \
  --num_train_steps="${NUM_TRAIN_STEPS:-100000}" \
  --num_warmup_steps="${NUM_WARMUP_STEPS:-10000}" \
  --save_checkpoints_steps="${SAVE_CHECKPOINTS_STEPS:-1000}" \
  "$@"
