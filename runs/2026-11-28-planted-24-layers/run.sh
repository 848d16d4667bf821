#!/bin/sh
# run.sh PROGRAM LAB WORK: two planted models (seeds), tokens on the virtual clock by policy. CSV to stdout.
set -e
program=$(realpath "$1"); lab=$(realpath "$2"); work=$3; repository=$(realpath "$(dirname "$0")/../..")
machine="$repository/runs/2026-11-27-whole-layers/h200-small.toml"
echo "seed,share,placement,policy,token_ms,ffn_ms,on_device"
cd "$work"
# Without a fixed part of the host, time is what impact is.
sed 's/^split_us.*/split_us = 0.0/' "$machine" > impact.toml
cp "$machine" time.toml
for seed in 1 2; do
  [ -e m$seed.neurons ] || "$lab" synth --hidden 512 --ffn 1536 --layers 24 --heads 8 --kv-heads 8 --vocab 4096 --active 0.1 -c 1024 --quant f16 --seed $seed -o m$seed.neurons >&2
  [ -e m$seed.profile ] || "$program" profile m$seed.neurons --text "$repository/README.md" -o m$seed.profile >&2
  for share in 30 40 50; do for how in impact time; do
    "$program" plan m$seed.neurons --whole-layers --profile m$seed.profile --ffn-share 0.$share -c 512 --machine $how.toml --kv-place host -o $how-$share.json -f >&2
    for policy in static micro macro full; do
      [ $how = time ] && [ $policy != static ] && continue
      "$lab" run m$seed.neurons "The king" -n 200 --ignore-eos --raw --temp 0 -c 512 --device virtual --machine time.toml --no-learn \
        --ffn-share 0.$share --placement $how-$share.json --policy $policy --json 2>/dev/null | python3 -c "
import json, sys
o = json.load(sys.stdin)
print(f\"$seed,$share,$how,$policy,{o['device_clock_ms']:.3f},{o['device_clock_ffn_ms']:.3f},{o['gpu_share']:.4f}\", flush=True)"
    done
  done; done
done
