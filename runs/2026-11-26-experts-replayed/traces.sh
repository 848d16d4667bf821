#!/bin/sh
# The recipes of the traces, of every layer of the two models. Usage: traces.sh PROGRAM DIRECTORY
set -e
program=$1 dir=$2
make() { name=$1; shift; "$program" record --synth --ahead 2 --recall 0.8 --texts 8 --max-tokens 150 "$@" -o "$dir/$name.trace"; }
qwen="--experts 128 --experts-used 8 --layers 48 --expert-bytes 2860000"
gpt="--experts 32 --experts-used 4 --layers 24 --expert-bytes 13219200"
for model in qwen gpt; do
    case $model in qwen) of=$qwen long=14 ;; gpt) of=$gpt long=7 ;; esac
    # a: half of the uses come back within two tokens; skewed, by text (a-text) or by model (a-model).
    make $model-a-text $of --reuse 2 --skew 0.8 --topics 1
    make $model-a-model $of --reuse 2 --skew 0.8
    # b: skewed, without locality.
    make $model-b $of --skew 1
    # c: nearly flat and seldom used again: punishes LRU.
    make $model-c $of --reuse $long --skew 0.15
    # d: what is frequent changes with every text: punishes frequency.
    make $model-d $of --skew 1 --topics 1
done
