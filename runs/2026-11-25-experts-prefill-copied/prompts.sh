#!/bin/sh
# Every prompt of the README. Usage: prompts.sh PROGRAM DIRECTORY-OF-TRACES > raw.jsonl
set -e
program=$1 dir=$2 machines=$(dirname "$0")/../2026-11-23-experts-simulated
sim() {
    "$program" simulate --shape "$1" --trace "$dir/$2.trace" --vram "$3" --machine "$4" --prefill 512 --json |
        python3 -c "
import json, sys
(report,) = json.load(sys.stdin)
for p in report['prompts']:
    of, times = p['prompt'], lambda ms: ms and round(ms, 2)
    print(json.dumps({'model': '$1', 'trace': '$2', 'vram': '$3', 'policy': p['policy'], 'layers': p['layers_on_device'],
                      'copies': p['copies'], 'ms': times(of['ms']), 'each_ms': [times(ms) for ms in of['each_ms']],
                      'gpu_share': round(of['gpu_share'], 4), 'copied_share': round(of['copied_share'], 4),
                      'device_ms': times(of['device_ms']), 'cpu_ms': times(of['cpu_ms']), 'on_cpu_ms': times(of['on_cpu_ms'])}))"
}
for trace in a-text a-model b c d; do
    sim qwen3-30b-a3b qwen-$trace 7.5GiB "$machines/rtx-4060-8gb.toml"
    sim qwen3-30b-a3b qwen-$trace 11.5GiB rtx-3060-12gb
    sim qwen3-30b-a3b qwen-$trace 15.5GiB "$machines/rtx-5060ti-16gb.toml"
    sim gpt-oss-20b gpt-$trace 7.5GiB "$machines/rtx-4060-8gb.toml"
done
