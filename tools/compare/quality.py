#!/usr/bin/env python3
"""What llama.cpp says of a text, to be held against ours: mean negative log-likelihood, and the tokens that it takes greedily.

    PYTHON tools/compare/quality.py quantise FROM.gguf TO.gguf Q4_K_M     llama.cpp's own quantiser
    PYTHON tools/compare/quality.py score MODEL.gguf IDS.json             one line of JSON

PYTHON is one that has llama-cpp-python, such as the environment that `tools/compare` makes. IDS.json is a list of token ids, as
`dynamicinfer eval --token-ids` takes it, scored over windows that do not overlap, without their first token; the first 16 are continued
by 32. `gaps` are the distances of the two largest logits at each of these, by the largest magnitude: where one is below the rounding of int8
inputs, two right programs may take different tokens.
"""
import ctypes
import json
import sys

import llama_cpp as llama
import numpy as np

WINDOW, PROMPT, CONTINUED = 512, 16, 32


def quantise(source, target, name):
    params = llama.llama_model_quantize_default_params()
    params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{name.upper()}")
    if llama.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise SystemExit(f"{source} could not be quantised")


class Model:
    def __init__(self, path):
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = WINDOW
        self.context = llama.llama_init_from_model(model, params)
        self.vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))

    def forget(self):
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)

    def logits(self, ids, first):
        """Logits behind each token, [len(ids), vocab]; the first token stands at position `first`."""
        batch = llama.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, first + i, 1, 1
            batch.seq_id[i][0] = 0
        if llama.llama_decode(self.context, batch):
            raise SystemExit("llama.cpp could not decode")
        out = np.ctypeslib.as_array(llama.llama_get_logits(self.context), shape=(len(ids), self.vocab)).astype(np.float64)
        llama.llama_batch_free(batch)
        return out


def score(path, ids):
    model, loss, scored = Model(path), 0.0, 0
    for start in range(0, len(ids), WINDOW):
        window = ids[start:start + WINDOW]
        model.forget()
        logits = model.logits(window, 0)
        logits -= logits.max(1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(1, keepdims=True))
        loss -= sum(logits[i, after] for i, after in enumerate(window[1:]))
        scored += len(window) - 1
    model.forget()
    greedy, gaps, next_ids, at = [], [], ids[:PROMPT], 0
    for _ in range(CONTINUED):
        last = model.logits(next_ids, at)[-1]
        second, first = np.sort(last)[-2:]
        gaps.append(round(float((first - second) / np.abs(last).max()), 4))
        at, next_ids = at + len(next_ids), [int(last.argmax())]
        greedy += next_ids
    return {"nll": loss / scored, "greedy": greedy, "gaps": gaps}


if __name__ == "__main__":
    if len(sys.argv) == 5 and sys.argv[1] == "quantise":
        quantise(*sys.argv[2:])
    elif len(sys.argv) == 4 and sys.argv[1] == "score":
        with open(sys.argv[3]) as file:
            print(json.dumps(score(sys.argv[2], json.load(file))))
    else:
        raise SystemExit(__doc__)
