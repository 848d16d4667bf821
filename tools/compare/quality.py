#!/usr/bin/env python3
"""What llama.cpp says of a text, to be held against ours: mean negative log-likelihood, and the tokens that it takes greedily.

    PYTHON tools/compare/quality.py quantise FROM.gguf TO.gguf Q4_K_M     llama.cpp's own quantiser
    PYTHON tools/compare/quality.py score MODEL.gguf IDS.json             one line of JSON
    PYTHON tools/compare/quality.py logits MODEL.gguf IDS.json dynamicinfer [OPTIONS of eval]    the same
    PYTHON tools/compare/quality.py floats MODEL.gguf IDS.json dynamicinfer [OPTIONS of eval]    the same

PYTHON is one that has llama-cpp-python, such as the environment that `tools/compare` makes. IDS.json is a list of token ids, as
`dynamicinfer eval --token-ids` takes it, scored over windows that do not overlap, without their first token; the first 16 are continued
by 32. `gaps` are the distances of the two largest logits at each of these, by the largest magnitude: where one is below the rounding of int8
inputs, two right programs may take different tokens.

`quantise` takes the names of llama.cpp, ALL_F32, which writes what a quantised file says as floats, and MXFP4: that for the matrices of
the layers, and Q8_0 for embeddings and head.

`logits` holds our logits of all these tokens against llama.cpp's: the length of the difference by that of llama.cpp's (`relative`), over
everything and at the worst token. `greedy` is how many of the 32 tokens are our likeliest, too, after the same tokens as llama.cpp's;
`gaps` are those of the others. `floats` holds them against llama.cpp on the same numbers as floats, with keys and values in f32: run with
the portable kernels (DYNAMICINFER_ISA=portable) and `--kv f32`, nothing but the order of sums is left to differ.
"""
import ctypes
import json
import os
import subprocess
import sys
import tempfile

import llama_cpp as llama
import numpy as np

WINDOW, PROMPT, CONTINUED = 512, 16, 32


MXFP4 = 39  # of ggml_type


def quantise(source, target, name):
    params = llama.llama_model_quantize_default_params()
    params.allow_requantize = name.upper() == "ALL_F32"
    if name.upper() == "MXFP4":
        # By itself llama.cpp takes this type for experts only. The list ends with an empty pattern.
        overrides = (llama.llama_model_tensor_override * 2)()
        overrides[0].pattern, overrides[0].type = b"blk", MXFP4
        params.tt_overrides = overrides
        params.ftype = llama.LLAMA_FTYPE_MOSTLY_Q8_0
    elif name.upper() == "ALL_F32":
        params.ftype = llama.LLAMA_FTYPE_ALL_F32
    else:
        params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{name.upper()}")
    if llama.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise SystemExit(f"{source} could not be quantised")


class Model:
    def __init__(self, path, floats=False):
        llama.llama_backend_init()
        model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        params = llama.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = WINDOW
        if floats:
            params.type_k = params.type_v = llama.GGML_TYPE_F32
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
    greedy, gaps = continuation(model, ids)
    return {"nll": loss / scored, "greedy": greedy, "gaps": gaps}


def continuation(model, ids):
    """The tokens that llama.cpp takes after the first 16, and the gap at each."""
    model.forget()
    greedy, gaps, next_ids, at = [], [], ids[:PROMPT], 0
    for _ in range(CONTINUED):
        last = model.logits(next_ids, at)[-1]
        second, first = np.sort(last)[-2:]
        gaps.append(round(float((first - second) / np.abs(last).max()), 4))
        at, next_ids = at + len(next_ids), [int(last.argmax())]
        greedy += next_ids
    return greedy, gaps


def our_logits(program, path, ids, options, folder):
    """Our logits behind each token, [len(ids), vocab]."""
    tokens, out = os.path.join(folder, "ids.json"), os.path.join(folder, "logits.safetensors")
    with open(tokens, "w") as file:
        json.dump(ids, file)
    command = [program, "eval", path, "--token-ids", tokens, "-c", str(WINDOW), "--json", "--logits", out, *options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    with open(out, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return np.fromfile(file, dtype="<f4").reshape(header["logits"]["shape"]).astype(np.float64)


def compare(path, ids, program, options, floats):
    """Our logits beside llama.cpp's; with `floats`, those of the same numbers as floats."""
    with tempfile.TemporaryDirectory() as folder:
        theirs_of = path
        if floats:
            theirs_of = os.path.join(folder, "floats.gguf")
            quantise(path, theirs_of, "ALL_F32")
        model = Model(theirs_of, floats)
        ours = our_logits(program, path, ids, options, folder)
        difference = length = worst = 0.0
        for start in range(0, len(ids), WINDOW):
            model.forget()
            theirs = model.logits(ids[start:start + WINDOW], 0)
            apart = ((ours[start:start + WINDOW] - theirs) ** 2).sum(1)
            squares = (theirs ** 2).sum(1)
            worst = max(worst, float((apart / squares).max()))
            difference, length = difference + apart.sum(), length + squares.sum()
        greedy, gaps = continuation(model, ids)
        # After llama.cpp's tokens, so that one difference does not make all that follow differ.
        likeliest = our_logits(program, path, ids[:PROMPT] + greedy, options, folder).argmax(1)[PROMPT - 1:-1]
    other = [gap for gap, a, b in zip(gaps, likeliest, greedy) if a != b]
    return {"relative": float(np.sqrt(difference / length)), "worst_token": float(np.sqrt(worst)),
            "greedy": CONTINUED - len(other), "gaps": other}


def main(args):
    if len(args) == 4 and args[0] == "quantise":
        return quantise(*args[1:])
    if not (len(args) == 3 and args[0] == "score" or len(args) > 3 and args[0] in ("logits", "floats")):
        raise SystemExit(__doc__)
    with open(args[2]) as file:
        ids = json.load(file)
    result = score(args[1], ids) if args[0] == "score" else compare(args[1], ids, args[3], args[4:], args[0] == "floats")
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
