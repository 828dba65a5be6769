#!/usr/bin/env bash
# Fine-tunes and evaluates a large-size BigBird classifier: base_size.sh with larger sizes.
set -euo pipefail

export NUM_HIDDEN_LAYERS="${NUM_HIDDEN_LAYERS:-24}"
export NUM_ATTENTION_HEADS="${NUM_ATTENTION_HEADS:-16}"
export HIDDEN_SIZE="${HIDDEN_SIZE:-1024}"
export INTERMEDIATE_SIZE="${INTERMEDIATE_SIZE:-4096}"

exec "$(dirname "${BASH_SOURCE[0]}")/base_size.sh" "$@"
