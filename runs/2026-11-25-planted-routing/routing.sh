#!/bin/sh
# What is planted in mixtures, and what `record` measures of them. Usage: routing.sh PROGRAM DIRECTORY, from the checkout's root
set -e
program=$1 dir=$2
python3 -c "
import random
draw = random.Random(1)
for name in 'ab':
    open('$dir/' + name + '.txt', 'w').write(''.join(chr(draw.randrange(33, 127)) for _ in range(800)))"
for experts in "32 4" "128 8"; do
    set -- $experts
    for asked in "" "--skew 0.8" "--reuse 2" "--skew 0.8 --reuse 2" "--skew 1 --reuse 1.5"; do
        echo "== $2 of $1 experts, asked: ${asked:-nothing}"
        "$program" synth --hidden 512 --layers 6 --ffn 128 --heads 8 --kv-heads 4 --vocab 1000 --quant q8_0 --activation silu \
            --experts $1 --experts-used $2 $asked -f -o "$dir/m.gguf" 2>&1 | grep planted || true
        for texts in "$dir/a.txt $dir/b.txt" "docs/plan.md docs/ssd.md"; do
            echo "of $(echo "$texts" | sed "s,$dir/,,g"):"
            "$program" record "$dir/m.gguf" --text $texts --max-tokens 800 -o "$dir/m.trace" 2>&1 | grep -E "half|chose"
        done
    done
done
