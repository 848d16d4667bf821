#!/bin/sh
# Prompts of two layers of 7B's widths in f16, half of their neurons on the device, by "TOKENS CHUNK".
# Usage: dense.sh PROGRAM DIRECTORY LINK "512 256" "512 512" ... >> raw-dense.csv
set -e
program=$1 dir=$2 link=$3 here=$(dirname "$0")
model=$dir/two-layers.neurons
[ -f "$model" ] || "$program" synth -o "$model" --hidden 4096 --layers 2 --ffn 11008 --heads 32 --kv-heads 32 --vocab 1000 --activation silu >&2
shift 3
for of; do
    tokens=${of% *} chunk=${of#* }
    rm -f "$dir/trace.json"
    "$program" bench "$model" --device virtual --machine "$here/link-$link.toml" --ffn-share 0.5 --prompt-chunk "$chunk" --predictor dense -p "$tokens" \
        -n 0 -r 1 --trace "$dir/trace.json" 2>"$dir/err" >"$dir/out"
    # Every run of the prompt, warming up included, takes the same on the device's clock.
    python3 - "$dir/err" "$link" "$tokens" "$chunk" <<'P'
import math, re, sys
found = re.search(r"(\d+) long passes of prompts, ([\d.]+) ms each", open(sys.argv[1]).read())
print(",".join([*sys.argv[2:], f"{math.ceil(int(sys.argv[3]) / int(sys.argv[4])) * float(found[2]):.2f}"]))
P
done
