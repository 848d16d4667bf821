#!/usr/bin/env python3
"""Train, export and measure the demo models (a ReLU-sparse Llama and its SiLU twin).

The demo is a small plain Llama (RMSNorm, rotate-half RoPE, grouped-query
attention, gated FFN, tied embeddings) trained from scratch on public-domain
fairy tales.  With ``--act relu`` and a sparsity target, a progressive L1 term
on the ReLU gate makes most FFN neurons exactly zero for any given token, which
is what the runtime exploits.  Everything runs on one CPU core.

    # 1. tokenizer and token streams (seconds)
    python tools/train_demo.py prepare --work ../demo-work
    # 2. the dense trunk: ReGLU, no sparsity term, stops at the branch point
    python tools/train_demo.py train --work ../demo-work --run trunk --stop-at 391
    # 3a. the demo: the trunk continued WITH the sparsity term
    python tools/train_demo.py train --work ../demo-work --run sparse \\
        --resume ../demo-work/trunk/step-391.pt --sparsity-target 0.11
    # 3b. the control: the trunk continued WITHOUT it (same data, same schedule)
    python tools/train_demo.py train --work ../demo-work --run control \\
        --resume ../demo-work/trunk/step-391.pt
    # 3c. the SiLU twin
    python tools/train_demo.py train --work ../demo-work --run silu --act silu
    # 4. export to a Hugging Face directory, and measure that directory
    python tools/train_demo.py export --work ../demo-work --run sparse --to assets/demo
    python tools/train_demo.py export --work ../demo-work --run silu --to assets/demo-silu
    python tools/train_demo.py excerpt --to assets/demo/heldout.txt
    python tools/train_demo.py eval assets/demo

The length of the schedule (--steps) may be changed on resume as long as the
decay of the learning rate has not begun: that is how a run is fitted to the
time there is.  Needs: torch, tokenizers, safetensors, numpy.  ``SUBCOMMAND --help`` explains
every option.  A run is interrupted and resumed safely: it writes
``last.pt`` every few minutes, and ``train`` with the same ``--run`` picks it up.
"""
import argparse
import glob
import json
import math
import os
import re
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np
import torch
import torch.nn.functional as F

HELD_OUT = "english-jacobs"  # this book is never trained on, nor seen by the tokenizer
ROOT = Path(__file__).resolve().parent.parent
BOS, EOS = "<s>", "</s>"

# --------------------------------------------------------------------------
# Data and tokenizer
# --------------------------------------------------------------------------


def read_books(data):
    """Return ([(name, text)] of the training books in name order, held-out text)."""
    files = sorted(glob.glob(str(Path(data) / "*.txt")))
    if not files:
        sys.exit(f"error: no .txt files in {data}; give the folder with --data")
    books = [(Path(f).stem, Path(f).read_text(encoding="utf-8")) for f in files]
    held = [t for n, t in books if n == HELD_OUT]
    if not held:
        sys.exit(f"error: {HELD_OUT}.txt (the held-out book) is not in {data}")
    return [(n, t) for n, t in books if n != HELD_OUT], held[0]


def cmd_prepare(a):
    """Train the byte-level BPE tokenizer; write token streams to the work folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    work = Path(a.work)
    work.mkdir(parents=True, exist_ok=True)
    train, held = read_books(a.data)
    tk = Tokenizer(models.BPE())
    tk.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tk.decoder = decoders.ByteLevel()
    tk.train_from_iterator(
        (line for _, text in train for line in text.splitlines(keepends=True)),
        trainers.BpeTrainer(
            vocab_size=a.vocab,
            special_tokens=[BOS, EOS],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tk.save(str(work / "tokenizer.json"), pretty=False)
    ids = [np.array(tk.encode(text).ids, np.uint16) for _, text in train]
    np.save(work / "train.npy", np.concatenate(ids))
    h = np.array(tk.encode(held).ids, np.uint16)
    nb = token_bytes(tk, h)
    assert nb.sum() == len(held.encode())
    np.save(work / "held.npy", h)
    np.save(work / "held_bytes.npy", nb)
    n, b = sum(map(len, ids)), sum(len(t.encode()) for _, t in train)
    print(f"training: {len(train)} books, {b} bytes, {n} tokens, {b / n:.3f} bytes per token")
    print(f"held out: {HELD_OUT}, {nb.sum()} bytes, {len(h)} tokens, {nb.mean():.3f} bytes per token")


def token_bytes(tk, ids):
    """Number of text bytes of each token (byte-level BPE: one mapped char per byte)."""
    return np.array([len(tk.id_to_token(int(i))) for i in ids], np.int32)


class Batches:
    """Windows without replacement: each epoch cuts the stream at a random phase
    and shuffles the windows.  Batch `step` depends on the seed and the step only,
    so a resumed run, or a branch, sees exactly the data it would have seen."""

    def __init__(self, tokens, context, batch, seed):
        self.t, self.c, self.b, self.seed = tokens, context, batch, seed
        self.per_epoch = (len(tokens) - context - 1) // context // batch
        self.epoch = None

    def __call__(self, step):
        e, i = divmod(step, self.per_epoch)
        if e != self.epoch:
            rng = np.random.default_rng([self.seed, e])
            phase = int(rng.integers(self.c))
            n = (len(self.t) - 1 - phase) // self.c
            self.starts = phase + self.c * rng.permutation(n)
            self.epoch = e
        s = self.starts[i * self.b : (i + 1) * self.b]
        x = np.stack([self.t[j : j + self.c + 1] for j in s]).astype(np.int64)
        x = torch.from_numpy(x)
        return x[:, :-1], x[:, 1:]


# --------------------------------------------------------------------------
# Model: a plain Llama, parameters in a dict with the Hugging Face names
# --------------------------------------------------------------------------


def init_params(c, seed):
    g = torch.Generator().manual_seed(seed)
    e, f, kv = c["hidden"], c["ffn"], c["kv_heads"] * c["hidden"] // c["heads"]
    n = lambda *s, std: torch.randn(*s, generator=g) * std
    p = {"model.embed_tokens.weight": n(c["vocab"], e, std=0.02)}
    for i in range(c["layers"]):
        q = f"model.layers.{i}."
        p[q + "input_layernorm.weight"] = torch.ones(e)
        p[q + "self_attn.q_proj.weight"] = n(e, e, std=e**-0.5)
        p[q + "self_attn.k_proj.weight"] = n(kv, e, std=e**-0.5)
        p[q + "self_attn.v_proj.weight"] = n(kv, e, std=e**-0.5)
        p[q + "self_attn.o_proj.weight"] = torch.zeros(e, e)
        p[q + "post_attention_layernorm.weight"] = torch.ones(e)
        p[q + "mlp.gate_proj.weight"] = n(f, e, std=e**-0.5)
        p[q + "mlp.up_proj.weight"] = n(f, e, std=e**-0.5)
        p[q + "mlp.down_proj.weight"] = torch.zeros(e, f)
    p["model.norm.weight"] = torch.ones(e)
    return p


def rms_norm(x, w, eps):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * w


def rope_tables(c, t):
    d = c["hidden"] // c["heads"]
    inv = c["rope_theta"] ** (-torch.arange(0, d, 2).float() / d)
    ang = torch.outer(torch.arange(t).float(), inv)
    ang = torch.cat([ang, ang], -1)
    return ang.cos(), ang.sin()


def rope(x, cos, sin):
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def attention(q, k, v, chunk=128):
    """Causal attention by query chunks; on one core 1.6 times as fast as the
    fused CPU kernel, because every product is a plain bf16 matrix product."""
    t, d = q.shape[-2:]
    out = []
    for s in range(0, t, chunk):
        e = min(s + chunk, t)
        a = (q[:, :, s:e] @ k[:, :, :e].transpose(-1, -2)).float() * d**-0.5
        mask = torch.arange(e)[None, :] > torch.arange(s, e)[:, None]
        a = a.masked_fill(mask, float("-inf")).softmax(-1)
        out.append(a.to(q.dtype) @ v[:, :, :e])
    return torch.cat(out, 2)


def forward(p, c, tokens, cos, sin, dt):
    """Hidden states after the last norm, [L] active share and [L] mean gate L1.

    `dt` is the type of the matrix products; the residual stream stays f32."""
    b, t = tokens.shape
    h, hk, d = c["heads"], c["kv_heads"], c["hidden"] // c["heads"]
    cos, sin = cos[:t].to(dt), sin[:t].to(dt)
    x = F.embedding(tokens, p["model.embed_tokens.weight"])
    active, l1 = [], []
    for i in range(c["layers"]):
        q_ = f"model.layers.{i}."
        w = lambda name: p[q_ + name + ".weight"].to(dt)
        y = rms_norm(x, p[q_ + "input_layernorm.weight"], c["eps"]).to(dt)
        q = F.linear(y, w("self_attn.q_proj")).view(b, t, h, d).transpose(1, 2)
        k = F.linear(y, w("self_attn.k_proj")).view(b, t, hk, d).transpose(1, 2)
        v = F.linear(y, w("self_attn.v_proj")).view(b, t, hk, d).transpose(1, 2)
        q, k = rope(q, cos, sin), rope(k, cos, sin)
        if hk != h:
            k, v = (z.repeat_interleave(h // hk, dim=1) for z in (k, v))
        o = attention(q, k, v)
        x = x + F.linear(o.transpose(1, 2).reshape(b, t, h * d), w("self_attn.o_proj"))
        y = rms_norm(x, p[q_ + "post_attention_layernorm.weight"], c["eps"]).to(dt)
        g = F.linear(y, w("mlp.gate_proj"))
        g = F.relu(g) if c["act"] == "relu" else F.silu(g)
        m = g * F.linear(y, w("mlp.up_proj"))
        active.append((m.detach() != 0).float().mean())
        l1.append(g.float().abs().mean())
        x = x + F.linear(m, w("mlp.down_proj"))
    x = rms_norm(x, p["model.norm.weight"], c["eps"])
    return x, torch.stack(active), torch.stack(l1)


def losses(p, c, x, y, cos, sin, dt):
    h, active, l1 = forward(p, c, x, cos, sin, dt)
    logits = F.linear(h.to(dt), p["model.embed_tokens.weight"].to(dt)).float()
    ce = F.cross_entropy(logits.view(-1, logits.shape[-1]), y.reshape(-1))
    return ce, active, l1


@torch.no_grad()
def evaluate(p, c, ids, nbytes, context, dt=torch.float32, windows=None, batch=8):
    """Held-out figures over non-overlapping windows of `context` tokens; the first
    token of each window has no left context and is not scored."""
    n = len(ids) // context
    if isinstance(windows, int):  # an evenly spread subset, for progress reports
        pick = np.linspace(0, n - 1, min(windows, n)).astype(int)
    else:
        pick = np.arange(n) if windows is None else np.asarray(windows)
    cos, sin = rope_tables(c, context)
    nll, toks, byts, act = 0.0, 0, 0, torch.zeros(c["layers"])
    emb = p["model.embed_tokens.weight"].to(dt)
    for s in range(0, len(pick), batch):
        j = pick[s : s + batch]
        x = torch.from_numpy(np.stack([ids[i * context : (i + 1) * context] for i in j]).astype(np.int64))
        h, a, _ = forward(p, c, x, cos, sin, dt)
        lg = F.linear(h.to(dt), emb).float()[:, :-1]
        nll += F.cross_entropy(lg.reshape(-1, lg.shape[-1]), x[:, 1:].reshape(-1), reduction="sum").item()
        toks += x[:, 1:].numel()
        byts += sum(int(nbytes[i * context + 1 : (i + 1) * context].sum()) for i in j)
        act += a * len(j)
    return {
        "windows": len(pick), "scored_tokens": toks, "scored_bytes": byts,
        "nll_per_token": nll / toks, "bits_per_byte": nll / math.log(2) / byts,
        "active_per_layer": (act / len(pick)).tolist(), "active_mean": (act / len(pick)).mean().item(),
    }


# --------------------------------------------------------------------------
# Optimiser: Muon for the hidden matrices, AdamW for embeddings and norms
# --------------------------------------------------------------------------


def orthogonalise(m, steps=5):
    """Newton-Schulz iteration towards the nearest (semi-)orthogonal matrix (Muon)."""
    x = m.bfloat16()
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T.contiguous()
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + torch.addmm(a, a, a, beta=-4.7750, alpha=2.0315) @ x
    return (x.T if tall else x).float()


class Optimiser:
    def __init__(self, p, lr_matrix, lr_other, decay, momentum=0.95, betas=(0.9, 0.95)):
        self.lrm, self.lro, self.decay, self.mom, self.betas = lr_matrix, lr_other, decay, momentum, betas
        self.matrix = [k for k in p if p[k].ndim == 2 and "embed" not in k]
        self.other = [k for k in p if k not in set(self.matrix)]
        self.state = {k: [torch.zeros_like(p[k])] for k in self.matrix}
        self.state.update({k: [torch.zeros_like(p[k]), torch.zeros_like(p[k])] for k in self.other})
        self.t = 0

    @torch.no_grad()
    def step(self, p, scale):
        self.t += 1
        for k in self.matrix:
            w, g, (m,) = p[k], p[k].grad, self.state[k]
            m.lerp_(g, 1 - self.mom)
            u = orthogonalise(g.lerp(m, self.mom))  # Nesterov
            lr = self.lrm * scale
            w.mul_(1 - lr * self.decay).add_(u, alpha=-lr * max(1.0, w.shape[0] / w.shape[1]) ** 0.5)
        b1, b2 = self.betas
        lr = self.lro * scale
        for k in self.other:
            w, g, (m, v) = p[k], p[k].grad, self.state[k]
            m.lerp_(g, 1 - b1)
            v.lerp_(g * g, 1 - b2)
            d = (v / (1 - b2**self.t)).sqrt_().add_(1e-10)
            w.addcdiv_(m, d, value=-lr / (1 - b1**self.t))


# --------------------------------------------------------------------------
# Sparsity term
# --------------------------------------------------------------------------


class Sparsity:
    """Progressive L1 on the gate activation (after ProSparse), with a regulated weight.

    The target share of active neurons falls along a half cosine from the share
    measured at `start` to the final target, over `ramp` steps.  The L1 weight
    follows by integral control in log space: it grows while more neurons are
    active than the target asks for, and shrinks otherwise.  So one states the
    wanted share and no weight has to be searched for."""

    def __init__(self, target, start, ramp, weight, gain):
        self.target, self.start, self.ramp, self.gain = target, start, ramp, gain
        self.weight, self.first, self.share = weight, None, None

    def on(self, step):
        return self.target is not None and step >= self.start

    def goal(self, step):
        f = min(1.0, (step - self.start) / max(1, self.ramp))
        return self.first + (self.target - self.first) * 0.5 * (1 - math.cos(math.pi * f))

    def update(self, step, share):
        self.share = share if self.share is None else 0.9 * self.share + 0.1 * share
        if self.on(step):
            if self.first is None:
                self.first = self.share
            goal = self.goal(step)
            err = max(-1.0, min(1.0, (self.share - goal) / goal))
            self.weight *= math.exp(self.gain * err)


# --------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------


def lr_scale(step, a):
    """Warm-up, constant, then linear decay to zero over the last part of the run."""
    if step < a.warmup:
        return (step + 1) / a.warmup
    d = int(a.steps * (1 - a.decay_part))
    return 1.0 if step < d else max(0.0, (a.steps - step) / (a.steps - d))


def save(path, p, opt, sp, step, c, a, history):
    tmp = str(path) + ".tmp"
    torch.save({
        "params": {k: v.detach() for k, v in p.items()}, "opt": opt.state, "opt_t": opt.t,
        "sparsity": {"weight": sp.weight, "first": sp.first, "share": sp.share, "start": sp.start},
        "step": step, "config": c, "args": {k: v for k, v in vars(a).items() if k != "f"}, "history": history,
    }, tmp)
    os.replace(tmp, path)


def cmd_train(a):
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    work, run = Path(a.work), Path(a.work) / a.run
    run.mkdir(parents=True, exist_ok=True)
    tokens, held, nb = (np.load(work / f) for f in ("train.npy", "held.npy", "held_bytes.npy"))
    vocab = json.loads((work / "tokenizer.json").read_text())["model"]["vocab"]
    c = dict(vocab=len(vocab), hidden=a.hidden, layers=a.layers, heads=a.heads, kv_heads=a.kv_heads,
             ffn=a.ffn, context=a.context, act=a.act, eps=1e-5, rope_theta=10000.0)
    sp = Sparsity(a.sparsity_target, a.sparsity_start, a.sparsity_ramp, a.sparsity_weight, a.sparsity_gain)
    src = run / "last.pt" if (run / "last.pt").exists() else a.resume
    start, history, state = 0, [], None
    if src:
        state = torch.load(src, weights_only=True)
        if state["config"] != c:
            sys.exit(f"error: {src} has another architecture: {state['config']}")
        start, history = state["step"], state["history"]
        p = state["params"]
        for k, v in state["sparsity"].items():
            # a trunk without the term hands nothing but its measured share to the branch
            if k == "share" or state["sparsity"]["first"] is not None:
                setattr(sp, k, v)
        print(f"resumed {src} at step {start}")
    else:
        p = init_params(c, a.seed)
    for v in p.values():
        v.requires_grad_(True)
    if sp.start is None:
        sp.start = start
    opt = Optimiser(p, a.lr, a.lr_other, a.weight_decay)
    if state:
        opt.state, opt.t = state["opt"], state["opt_t"]
    print(f"{sum(v.numel() for v in p.values()) / 1e6:.3f} M parameters; {c}")
    batches = Batches(tokens, a.context, a.batch, a.seed)
    print(f"{len(tokens)} training tokens, {batches.per_epoch} steps per epoch, {a.steps} steps")
    dt = torch.float32 if a.f32 else torch.bfloat16
    cos, sin = rope_tables(c, a.context)
    fn = losses if a.no_compile else torch.compile(losses)
    stop = min(a.steps, a.stop_at or a.steps)
    t0 = t_log = t_save = time.time()
    n_log, ema = 0, None
    for step in range(start, stop):
        x, y = batches(step)
        ce, active, l1 = fn(p, c, x, y, cos, sin, dt)
        loss = ce + sp.weight * l1.mean() if sp.on(step) else ce
        loss.backward()
        opt.step(p, lr_scale(step, a))
        for v in p.values():
            v.grad = None
        sp.update(step, active.mean().item())
        ce = ce.item()
        if not math.isfinite(ce):
            sys.exit(f"error: loss is {ce} at step {step}; resume from an earlier checkpoint with a lower --lr")
        ema = ce if ema is None else 0.98 * ema + 0.02 * ce
        n_log += 1
        done, now = step + 1, time.time()
        if done % a.log_every == 0 or done == stop or done == start + 1:
            rate = n_log * a.batch * a.context / (now - t_log)
            eta = (stop - done) * a.batch * a.context / rate
            extra = ""
            if a.act == "relu":
                extra = " active " + " ".join(f"{v:.3f}" for v in active.tolist())
                if sp.on(step):
                    extra += f" goal {sp.goal(step):.3f} weight {sp.weight:.4f}"
            print(f"step {done}/{stop} loss {ce:.4f} avg {ema:.4f} lr x{lr_scale(step, a):.3f}{extra} "
                  f"| {rate:.0f} tok/s, {(now - t0) / 60:.1f} min, ETA {eta / 60:.1f} min", flush=True)
            t_log, n_log = now, 0
        if done % a.eval_every == 0 or done == stop:
            e = evaluate(p, c, held, nb, a.context, dt, None if done == stop else 40)
            history.append([done, e["nll_per_token"], e["bits_per_byte"], e["active_mean"]])
            print(f"EVAL step {done}: held-out nll {e['nll_per_token']:.4f}, bits per byte {e['bits_per_byte']:.4f}, "
                  f"active {e['active_mean']:.4f} [" + " ".join(f"{v:.3f}" for v in e["active_per_layer"]) +
                  f"] ({e['windows']} windows)", flush=True)
            t_log += time.time() - now
        if now - t_save > a.save_minutes * 60 or done == stop:
            save(run / "last.pt", p, opt, sp, done, c, a, history)
            t_save = now
        if done == stop:
            save(run / f"step-{done}.pt", p, opt, sp, done, c, a, history)


# --------------------------------------------------------------------------
# Export and measurement
# --------------------------------------------------------------------------


def hf_config(c):
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "vocab_size": c["vocab"], "hidden_size": c["hidden"], "intermediate_size": c["ffn"],
        "num_hidden_layers": c["layers"], "num_attention_heads": c["heads"],
        "num_key_value_heads": c["kv_heads"], "head_dim": c["hidden"] // c["heads"],
        "hidden_act": c["act"], "max_position_embeddings": c["context"],
        "rms_norm_eps": c["eps"], "rope_theta": c["rope_theta"], "rope_scaling": None,
        "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
        "tie_word_embeddings": True, "initializer_range": 0.02, "use_cache": True,
        "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float16",
    }


def cmd_export(a):
    from safetensors.torch import save_file

    to = Path(a.to)
    to.mkdir(parents=True, exist_ok=True)
    src = Path(a.checkpoint) if a.checkpoint else Path(a.work) / a.run / "last.pt"
    st = torch.load(src, weights_only=True)
    w = {k: v.detach().half().contiguous() for k, v in st["params"].items()}
    assert all(torch.isfinite(v).all() for v in w.values()), "a weight overflows float16"
    save_file(w, str(to / "model.safetensors"), metadata={"format": "pt"})
    os.chmod(to / "model.safetensors", 0o644)
    dump = lambda name, obj: (to / name).write_text(json.dumps(obj, indent=2) + "\n")
    dump("config.json", hf_config(st["config"]))
    dump("generation_config.json", {"bos_token_id": 0, "eos_token_id": 1, "do_sample": True,
                                    "temperature": 0.8, "top_p": 0.95, "max_length": st["config"]["context"]})
    dump("tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS,
        "add_bos_token": False, "add_eos_token": False, "add_prefix_space": False,
        "clean_up_tokenization_spaces": False, "model_max_length": st["config"]["context"],
    })
    (to / "tokenizer.json").write_bytes((Path(a.work) / "tokenizer.json").read_bytes())
    print(f"exported {src} (step {st['step']}) to {to}: {sum(f.stat().st_size for f in to.iterdir())} bytes in all")


def clean_windows(tk, ids, context, data, run=10):
    """Windows of the held-out text that share no run of `run` words with a training
    book.  Collections overlap: a few tales of the held-out book stand almost word
    for word in two of the training books, and a model remembers them."""
    words = lambda t: re.findall(r"[a-z']+", t.lower())
    grams = lambda t: {" ".join(w[i : i + run]) for w in [words(t)] for i in range(len(w) - run + 1)}
    seen = set()
    for _, text in read_books(data)[0]:
        seen |= grams(text)
    return [i for i in range(len(ids) // context)
            if seen.isdisjoint(grams(tk.decode(ids[i * context : (i + 1) * context].tolist())))]


def load_export(d):
    from safetensors.torch import load_file

    j = json.loads((Path(d) / "config.json").read_text())
    c = dict(vocab=j["vocab_size"], hidden=j["hidden_size"], layers=j["num_hidden_layers"],
             heads=j["num_attention_heads"], kv_heads=j["num_key_value_heads"], ffn=j["intermediate_size"],
             context=j["max_position_embeddings"], act=j["hidden_act"], eps=j["rms_norm_eps"],
             rope_theta=j["rope_theta"])
    return {k: v.float() for k, v in load_file(str(Path(d) / "model.safetensors")).items()}, c


def cmd_eval(a):
    from tokenizers import Tokenizer

    torch.set_num_threads(a.threads)
    p, c = load_export(a.dir)
    tk = Tokenizer.from_file(str(Path(a.dir) / "tokenizer.json"))
    text = Path(a.text).read_text(encoding="utf-8") if a.text else read_books(a.data)[1]
    ids = np.array(tk.encode(text).ids, np.int64)
    t = time.time()
    n = a.context or c["context"]
    pick = clean_windows(tk, ids, n, a.data) if a.clean else None
    e = evaluate(p, c, ids, token_bytes(tk, ids), n, windows=pick)
    if a.json:
        print(json.dumps(e))
        return
    print(f"{a.dir}: {c['act']}, {sum(v.numel() for v in p.values())} parameters, weights as stored, arithmetic in f32")
    print(f"  text             {a.text or HELD_OUT}, {len(text.encode())} bytes, {len(ids)} tokens")
    print(f"  scored           {e['windows']} {'clean ' if a.clean else ''}windows of {n}: {e['scored_tokens']} tokens, {e['scored_bytes']} bytes ({time.time() - t:.0f} s)")
    print(f"  nll per token    {e['nll_per_token']:.4f}")
    print(f"  bits per byte    {e['bits_per_byte']:.4f}")
    print(f"  active share     {e['active_mean']:.4f}  (FFN neurons with act(gate)*up != 0)")
    print("  by layer         " + " ".join(f"{v:.4f}" for v in e["active_per_layer"]))


def cmd_excerpt(a):
    """Cut whole lines from the held-out book for quick checks.  The default place
    holds none of the tales that are also in a training book."""
    text = read_books(a.data)[1].encode()
    s = text.index(b"\n", a.start) + 1
    while text[s : s + 1] == b"\n":
        s += 1
    e = text.rindex(b"\n", s, s + a.bytes) + 1
    Path(a.to).write_bytes(text[s:e])
    print(f"{a.to}: {e - s} bytes, from byte {s} of {len(text)}")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = ap.add_subparsers(dest="cmd", required=True, metavar="SUBCOMMAND")
    data = dict(default=os.path.relpath(ROOT.parent / "shared" / "data" / "fairy-tales"), metavar="DIR",
                help=f"folder of UTF-8 .txt books, one paragraph a line, one of them {HELD_OUT}.txt")

    class Help(argparse.ArgumentDefaultsHelpFormatter):
        def _get_help_string(self, action):  # no "(default: None)", no "(default: False)"
            return action.help if action.default in (None, False) else super()._get_help_string(action)

    fmt = dict(formatter_class=Help)

    s = sub.add_parser("prepare", help="train the tokenizer and encode the books", **fmt)
    s.add_argument("--data", **data)
    s.add_argument("--work", required=True, help="folder for the tokenizer, token streams and checkpoints")
    s.add_argument("--vocab", type=int, default=3072, help="size of the byte-level BPE vocabulary")
    s.set_defaults(f=cmd_prepare)

    s = sub.add_parser("train", help="train, resume or branch one run", **fmt)
    s.add_argument("--work", required=True, help="folder that `prepare` wrote")
    s.add_argument("--run", required=True, help="name of the run; checkpoints go to WORK/RUN, and WORK/RUN/last.pt is resumed if present")
    s.add_argument("--resume", metavar="FILE", help="checkpoint to branch from when the run is new")
    s.add_argument("--act", choices=["relu", "silu"], default="relu", help="gate activation: relu = ReGLU, silu = SwiGLU")
    for name, d, h in [("hidden", 256, "model width"), ("layers", 5, "blocks"), ("heads", 4, "query heads"),
                       ("kv-heads", 2, "key and value heads"), ("ffn", 1024, "FFN neurons a layer"),
                       ("context", 512, "window length in tokens"), ("batch", 8, "windows a step"),
                       ("steps", 2000, "length of the whole schedule, trunk included; may be changed on resume before the decay has begun"),
                       ("warmup", 50, "steps of linear warm-up"), ("seed", 1, "of initial weights and data order"),
                       ("log-every", 20, "steps"), ("eval-every", 200, "steps (on 40 held-out windows; on all at the end)"),
                       ("threads", 1, "CPU threads")]:
        s.add_argument("--" + name, type=int, default=d, help=h)
    s.add_argument("--stop-at", type=int, help="end here (for a trunk) instead of at --steps; the schedule is unchanged")
    s.add_argument("--lr", type=float, default=0.02, help="peak rate of the hidden matrices (Muon)")
    s.add_argument("--lr-other", type=float, default=0.003, help="peak rate of embeddings and norms (Adam)")
    s.add_argument("--weight-decay", type=float, default=0.1, help="decoupled, hidden matrices only")
    s.add_argument("--decay-part", type=float, default=0.32, help="last part of the run over which the rate falls linearly to 0")
    s.add_argument("--sparsity-target", type=float, help="wanted share of active FFN neurons, e.g. 0.11; without it there is no sparsity term")
    s.add_argument("--sparsity-start", type=int, help="first step with the term (default: the step the run, or branch, begins at)")
    s.add_argument("--sparsity-ramp", type=int, default=400, help="steps over which the target falls to its final value")
    s.add_argument("--sparsity-weight", type=float, default=0.1, help="L1 weight at the start")
    s.add_argument("--sparsity-gain", type=float, default=0.04, help="how fast the L1 weight follows the error")
    s.add_argument("--save-minutes", type=float, default=3, help="between checkpoints")
    s.add_argument("--f32", action="store_true", help="matrix products in float32 instead of bfloat16")
    s.add_argument("--no-compile", action="store_true", help="run without torch.compile (slower; needs no C++ compiler)")
    s.set_defaults(f=cmd_train)

    s = sub.add_parser("export", help="write a Hugging Face directory (float16)", **fmt)
    s.add_argument("--work", required=True)
    s.add_argument("--run", default="sparse", help="run whose last.pt is exported")
    s.add_argument("--checkpoint", help="this file instead of the run's last.pt")
    s.add_argument("--to", required=True, metavar="DIR")
    s.set_defaults(f=cmd_export)

    s = sub.add_parser("eval", help="held-out loss and active share of an exported directory", **fmt)
    s.add_argument("dir")
    s.add_argument("--data", **data)
    s.add_argument("--text", metavar="FILE", help="measure on this text instead of the held-out book, e.g. assets/demo/heldout.txt")
    s.add_argument("--context", type=int, help="window length (default: the model's)")
    s.add_argument("--threads", type=int, default=1)
    s.add_argument("--clean", action="store_true", help="score only windows that share no run of ten words with a training book")
    s.add_argument("--json", action="store_true", help="print one line of JSON")
    s.set_defaults(f=cmd_eval)

    s = sub.add_parser("excerpt", help="write an excerpt of the held-out book", **fmt)
    s.add_argument("--data", **data)
    s.add_argument("--to", required=True, metavar="FILE")
    s.add_argument("--start", type=int, default=45000, help="byte offset; the excerpt begins at the next line")
    s.add_argument("--bytes", type=int, default=60000, help="at most this many")
    s.set_defaults(f=cmd_excerpt)

    a = ap.parse_args()
    a.f(a)


if __name__ == "__main__":
    main()
