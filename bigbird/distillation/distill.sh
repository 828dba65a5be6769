#!/usr/bin/env bash
# Distils a masked language model: a teacher, its caches, a student in every mode, and a comparison.
#
# Settings are environment variables, and flags behind the script's name go to every student:
#   TEACHER=bigbird-roberta-base DATA_DIR=tfds://wiki40b/en distill.sh --use_gradient_checkpointing
# Without TEACHER one is pretrained first. What is finished is not done again; everything is in RUNS.
set -euo pipefail

PYTHON="${PYTHON:-python3}"
RUNS="${RUNS:-runs/distillation}"
DATA_DIR="${DATA_DIR:-builtin://documents}"
LENGTH="${MAX_ENCODER_LENGTH:-128}"
HIDDEN="${MAX_PREDICTIONS_PER_SEQ:-20}"
COMMON=(
  --vocab_model_file="${VOCAB_MODEL_FILE:-builtin}"
  --max_encoder_length="$LENGTH"
  --substitute_newline=" "
)
run() { # module of the package, then flags
  echo "\$ python -m bigbird.$*"
  "$PYTHON" -m "bigbird.$1" "${@:2}"
}
MODEL=(
  --attention_type="${ATTENTION_TYPE:-original_full}"
  --hidden_dropout_prob=0
  --attention_probs_dropout_prob=0
)

if [[ -z "${TEACHER:-}" ]]; then
  TEACHER="$RUNS/teacher"
  run pretrain.run_pretraining "${COMMON[@]}" "${MODEL[@]}" \
    --data_dir="$DATA_DIR" \
    --output_dir="$TEACHER" \
    --max_predictions_per_seq="$HIDDEN" \
    --max_position_embeddings="$LENGTH" \
    --num_hidden_layers="${TEACHER_LAYERS:-4}" \
    --hidden_size="${TEACHER_SIZE:-256}" \
    --intermediate_size="${TEACHER_INTERMEDIATE_SIZE:-1024}" \
    --num_attention_heads="${TEACHER_HEADS:-4}" \
    --optimizer=Adam \
    --learning_rate="${TEACHER_LEARNING_RATE:-1e-3}" \
    --num_train_steps="${TEACHER_STEPS:-2000}" \
    --num_warmup_steps="${TEACHER_WARMUP_STEPS:-200}" \
    --train_batch_size="${TRAIN_BATCH_SIZE:-16}" \
    --jit_compile
fi

capture() { # split, then flags
  run distillation.cache_teacher "${COMMON[@]}" \
    --init_checkpoint="$TEACHER" \
    --data_dir="$DATA_DIR" \
    --split="$1" \
    --max_predictions_per_seq="$HIDDEN" \
    --cache_dir="$RUNS/cache-$1" \
    "${@:2}"
}
capture train --k="${K:-100}" --compact --copies="${COPIES:-8}"
# All logits: the divergence from the full teacher.
capture validation --k=0

distil() { # name, then flags
  run distillation.run_distillation "${COMMON[@]}" "${MODEL[@]}" \
    --cache_dir="$RUNS/cache-train" \
    --held_out_cache_dir="$RUNS/cache-validation" \
    --output_dir="$RUNS/$1" \
    --max_position_embeddings="$LENGTH" \
    --num_hidden_layers="${STUDENT_LAYERS:-2}" \
    --hidden_size="${STUDENT_SIZE:-128}" \
    --intermediate_size="${STUDENT_INTERMEDIATE_SIZE:-512}" \
    --num_attention_heads="${STUDENT_HEADS:-2}" \
    --optimizer=Adam \
    --learning_rate="${LEARNING_RATE:-1e-3}" \
    --num_train_steps="${NUM_TRAIN_STEPS:-1000}" \
    --num_warmup_steps="${NUM_WARMUP_STEPS:-100}" \
    --save_checkpoints_steps="${SAVE_CHECKPOINTS_STEPS:-200}" \
    --log_steps="${LOG_STEPS:-20}" \
    --train_batch_size="${TRAIN_BATCH_SIZE:-16}" \
    "${@:2}"
}
runs=()
for mode in ${MODES:-online offline_dense offline_forward_chunked offline_fused}; do
  distil "$mode" --mode="$mode" --teacher="$TEACHER" "$@"
  runs+=("$RUNS/$mode")
done
distil labels --label_share=1 "$@"
run distillation.run_distillation --compare --report_file="$RUNS/comparison.html" \
  "${runs[@]}" "$RUNS/labels"
