#!/usr/bin/env bash
# The paper's table for each of its model families, both kinds of data and both accumulations, on one CUDA GPU with
# 40 GB or more. Writes one JSON file and one table per case into the folder named first (default: bench-results).
# A case takes 10 minutes at most. Name models after the folder to run fewer cases: paper.sh out mistral-7b
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:-bench-results}
shift || true
models=("$@")
[ ${#models[@]} -gt 0 ] || models=(llama-3.2-1b llama-3-8b mistral-7b granite-8b phi-3-mini)
mkdir -p "$out"
for model in "${models[@]}"; do
  for lengths in uneven even; do
    for accumulation in 2 16; do
      name="$model-$lengths-x$accumulation"
      echo "== $name"
      # A step of 16 micro-batches takes eight times as long as one of 2. A side that fails is a row with its reason:
      # the other cases go on.
      trl-packfa bench --config "$here/paper.yaml" --model "$model" --lengths "$lengths" \
        --gradient_accumulation_steps "$accumulation" --max_steps $((accumulation > 2 ? 6 : 10)) \
        --output "$out/$name.json" > "$out/$name.txt" || true
    done
  done
done
