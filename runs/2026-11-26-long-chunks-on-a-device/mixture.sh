#!/bin/sh
# Prompts of Qwen3-30B-A3B, simulated. Usage: mixture.sh PROGRAM DIRECTORY > raw-mixture.csv
set -e
program=$1 dir=$2 here=$(dirname "$0")
trace=$dir/qwen.trace
[ -f "$trace" ] || "$program" record --synth --ahead 2 --recall 0.8 --texts 4 --max-tokens 2100 --seed 1 --experts 128 --experts-used 8 --layers 48 \
    --expert-bytes 2860000 --reuse 2 --skew 0.8 --topics 1 -o "$trace" >&2
echo "link_gb_s,vram,tokens,chunk,ms,in_slots,copied,cpu_ms,llama_cpp_512_ms"
for link in 12 25; do
    for vram in 5.5GiB 7.5GiB 11.5GiB; do
        for tokens in 512 1024 2048; do
            for chunk in 256 512 1024 ""; do
                "$program" simulate --shape qwen3-30b-a3b --trace "$trace" --vram $vram --machine "$here/link-$link.toml" --policy static \
                    --prefill $tokens ${chunk:+--prompt-chunk $chunk} --json |
                    python3 -c "
import json, sys
(report,) = json.load(sys.stdin)
rows = report['prompts']
of = next(row['prompt'] for row in rows if row['policy'] == 'static')
copies = next(row['prompt'] for row in rows if row['copies'])
chosen = '' if '$chunk' else ' (chosen)'
print(f\"$link,$vram,$tokens,{of['chunk']}{chosen},{of['ms']:.1f},{of['gpu_share']:.3f},{of['copied_share']:.3f},{of['cpu_ms']:.1f},{copies['ms']:.1f}\")"
            done
        done
    done
done
