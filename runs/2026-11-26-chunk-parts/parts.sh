#!/bin/sh
# Prompts of a model with a virtual device, by parts of a chunk, on its clock: ms of all chunks of a prompt, and shares of that in which the
# device and the host computed.
# Usage: parts.sh PROGRAM MODEL MACHINE FFN_SHARE|VRAM KV "TOKENS PARTS" ... >> raw.csv
# With a share of the neurons the processor attends; with so much VRAM the device does.
set -e
program=$1 model=$2 machine=$3 share=$4 kv=$5
dir=$(mktemp -d)
shift 5
case $share in *iB) budget=--vram ;; *) budget=--ffn-share ;; esac
for of; do
    tokens=${of% *} parts=${of#* }
    rm -f "$dir/trace.json"
    set -- --prompt-parts "$parts"
    [ "$parts" = chosen ] && set --
    "$program" bench "$model" --device virtual --machine "$machine" $budget "$share" --kv "$kv" --prompt-chunk 1024 "$@" --predictor dense \
        -p "$tokens" -n 0 -r 1 --trace "$dir/trace.json" 2>"$dir/err" >"$dir/out" || { cat "$dir/err" >&2; exit 1; }
    python3 - "$dir/err" "$(basename "$model" .neurons)" "$(basename "$machine" .toml)" "$share" "$kv" "$tokens" "$parts" <<'P'
import re, sys
text = open(sys.argv[1]).read()
long = re.search(r"\d+ long passes of prompts, ([\d.]+) ms each(.*)", text, re.S)
busy = re.search(r"took ([\d.]+) % of the time, products and attention of the host ([\d.]+) %", long[2])
print(",".join([*sys.argv[2:], long[1], busy[1], busy[2]]), flush=True)
P
done
rm -r "$dir"
