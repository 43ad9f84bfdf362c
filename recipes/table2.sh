#!/usr/bin/env bash
# Repeats the paper's Table 2 on real weights on this machine: padded, TRL's packing, ours. A side takes minutes on a CPU.
#   bash recipes/table2.sh [MODEL [DATASET [more arguments of trl-packfa bench]]]      names on the Hub, or paths
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
trl-packfa bench --config "$here/bench/table2.yaml" ${1:+--model "$1"} ${2:+--dataset "$2"} "${@:3}"
