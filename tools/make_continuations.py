#!/usr/bin/env python3
"""make_continuations.py TEXT N > FILE.jsonl: multiple-choice questions from a text, for `dynamicinfer eval --choices`.

Each question is the first half of a long sentence; the choices are its own second half and those of three other sentences. They need
no knowledge, only a model of the text, so a small model does better than chance and less well when neurons are missing."""
import json
import random
import re
import sys

text, wanted = open(sys.argv[1], encoding="utf-8").read(), int(sys.argv[2])
sentences = [" ".join(s.split()) for s in re.split(r"(?<=[.!?])\s+", text)]
sentences = [s for s in sentences if 16 <= len(s.split()) <= 28]
rng = random.Random(1)
rng.shuffle(sentences)
halves = [(" ".join(w[: len(w) // 2]), " ".join(w[len(w) // 2 :])) for w in (s.split() for s in sentences)]
for i, (context, right) in enumerate(halves[:wanted]):
    others = [half for j, (_, half) in enumerate(halves) if j != i]
    choices = rng.sample(others, 3)
    answer = rng.randrange(4)
    choices.insert(answer, right)
    print(json.dumps({"context": context, "choices": choices, "answer": answer}, ensure_ascii=False))
