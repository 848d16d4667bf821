#!/bin/sh
# run.sh PROGRAM WORK: rows of simulate (7B by paper.toml's trace, H200's costs), then of the small model on the virtual clock. CSV to stdout.
set -e
program=$(realpath "$1"); work=$2; here=$(realpath "$(dirname "$0")")
echo "what,share,placement,policy,token_ms,ffn_ms,on_device"
[ -e "$work/paper.trace" ] || "$program" record --synth --recipe "$here/../../configs/traces/paper.toml" -o "$work/paper.trace"
for share in 30 40 50; do for how in impact time; do
  vram=$((5900000000 + 86570434 * share))
  option=; [ $how = time ] || option=--by-impact
  "$program" simulate --shape llama-7b --trace "$work/paper.trace" --machine "$here/h200.toml" --vram $vram --policy static full $option --json \
    | python3 -c "
import json, sys
for row in json.load(sys.stdin)[0]['rows']:
    if row['outcome']:
        o = row['outcome']
        print(f\"simulated 7B,$share,$how,{row['policy']},{o['token_ms']:.3f},{o['parts_ms']['ffn']:.3f},{o['gpu_share']:.4f}\")"
done; done

cd "$work"
[ -e m.neurons ] || "$program" synth --hidden 512 --ffn 1536 --layers 24 --heads 8 --kv-heads 8 --vocab 4096 --active 0.1 -c 1024 --quant f16 -o m.neurons >&2
[ -e m.profile ] || "$program" profile m.neurons --text "$here/../../README.md" -o m.profile >&2
# Without a fixed part of the host, time is what impact is.
sed 's/^split_us.*/split_us = 0.0/' "$here/h200-small.toml" > impact.toml
cp "$here/h200-small.toml" time.toml
for share in 30 40 50; do for how in impact time; do
  "$program" plan m.neurons --whole-layers --profile m.profile --ffn-share 0.$share -c 512 --machine $how.toml --kv-place host -o $how-$share.json -f >&2
  for policy in static full; do
    "$program" run m.neurons "The king" -n 200 --ignore-eos --raw --temp 0 -c 512 --device virtual --machine time.toml --no-learn \
      --ffn-share 0.$share --placement $how-$share.json --policy $policy --json 2>/dev/null | python3 -c "
import json, sys
o = json.load(sys.stdin)
print(f\"virtual clock 0.09B,$share,$how,$policy,{o['device_clock_ms']:.3f},{o['device_clock_ffn_ms']:.3f},{o['gpu_share']:.4f}\")"
  done
done; done
