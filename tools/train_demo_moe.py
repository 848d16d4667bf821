#!/usr/bin/env python3
"""Make the demo mixture `demo-moe` from the dense demo (assets/demo), export it and measure it.

The dense demo's FFN neurons are divided into experts (neurons that fire for the same tokens come together), a
linear router learns to foretell which experts matter, and the matrices onto the residual are fitted again, by
least squares on the same books, so that the router's two best experts do what all neurons did. That takes two minutes
of one CPU core; `train` then trains all of it on, which the published model did without. The export is a plain
Mixtral with ReLU experts (`model_type` mixtral, `hidden_act` relu).

    python tools/train_demo.py prepare --work ../demo-work
    python tools/train_demo_moe.py split --work ../demo-work --run moe
    python tools/train_demo_moe.py refit --work ../demo-work --run moe
    python tools/train_demo_moe.py train --work ../demo-work --run moe --steps 300      # as far as there is time
    python tools/train_demo_moe.py export --work ../demo-work --run moe --to assets/demo-moe
    python tools/train_demo_moe.py eval assets/demo-moe
    python tools/train_demo_moe.py usage assets/demo-moe

`train` is interrupted and resumed safely: it writes `last.pt` every few minutes. Its learning rate follows the steps, or the time
spent (`--minutes`), so that a run ends when it has to, or whichever of the two is further.
Needs what train_demo.py needs.
"""
import argparse
import json
import math
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent))
import train_demo as dense

ROOT = Path(__file__).resolve().parent.parent


# --------------------------------------------------------------------------
# Model: the dense demo's parameters, experts one after the other in the same matrices, and a router a layer
# --------------------------------------------------------------------------


def expert_weights(y, router, used):
    """Mixtral's rule: softmax over all experts, the best `used`, weights made to sum to one. Returns the weights
    (zero for experts not taken), the softmax and the choice, all [tokens, experts]."""
    probs = F.linear(y, router).float().softmax(-1)
    taken = torch.zeros_like(probs).scatter(-1, probs.topk(used, -1).indices, 1.0)
    w = probs * taken
    return w / w.sum(-1, keepdim=True), probs, taken


def heads(p, c, i, x, cos, sin, dt):
    """What layer i's attention hands to its output matrix."""
    b, t = x.shape[:2]
    h, hk, d = c["heads"], c["kv_heads"], c["hidden"] // c["heads"]
    w = lambda name: p[f"model.layers.{i}.self_attn.{name}.weight"].to(dt)
    y = dense.rms_norm(x, p[f"model.layers.{i}.input_layernorm.weight"], c["eps"]).to(dt)
    q = F.linear(y, w("q_proj")).view(b, t, h, d).transpose(1, 2)
    k = F.linear(y, w("k_proj")).view(b, t, hk, d).transpose(1, 2)
    v = F.linear(y, w("v_proj")).view(b, t, hk, d).transpose(1, 2)
    q, k = dense.rope(q, cos, sin), dense.rope(k, cos, sin)
    if hk != h:
        k, v = (z.repeat_interleave(h // hk, dim=1) for z in (k, v))
    return dense.attention(q, k, v).transpose(1, 2).reshape(b, t, h * d)


def attend(p, c, i, x, cos, sin, dt):
    """What layer i's attention adds to x."""
    return F.linear(heads(p, c, i, x, cos, sin, dt), p[f"model.layers.{i}.self_attn.o_proj.weight"].to(dt))


def neurons(p, c, i, x, dt):
    """Gates of layer i's neurons, what the neurons hand to the down matrix (weighed by the router if the layer has
    one), the router's softmax and its choice. All experts are computed and those not taken weigh nothing: on one
    core plain products are the fastest."""
    w = lambda name: p[f"model.layers.{i}.mlp.{name}.weight"].to(dt)
    y = dense.rms_norm(x, p[f"model.layers.{i}.post_attention_layernorm.weight"], c["eps"])
    router, probs, taken = p.get(f"model.layers.{i}.router.weight"), None, None
    g = F.relu(F.linear(y.to(dt), w("gate_proj")))
    m = g * F.linear(y.to(dt), w("up_proj"))
    if router is not None:
        weight, probs, taken = expert_weights(y, router, c["used"])
        m = m * weight.to(dt).repeat_interleave(c["ffn"] // c["experts"], -1)
    return g, m, probs, taken


def forward(p, c, tokens, cos, sin, dt):
    """Hidden states after the last norm; per layer the share of all neurons that are active, the mean L1 of the
    gates of chosen experts, and the balance term; and the choice [layers, batch, time, experts]."""
    cos, sin = (z[: tokens.shape[1]].to(dt) for z in (cos, sin))
    x = F.embedding(tokens, p["model.embed_tokens.weight"])
    active, l1, balance, chosen = [], [], [], []
    for i in range(c["layers"]):
        x = x + attend(p, c, i, x, cos, sin, dt)
        g, m, probs, taken = neurons(p, c, i, x, dt)
        x = x + F.linear(m, p[f"model.layers.{i}.mlp.down_proj.weight"].to(dt))
        active.append((m.detach() != 0).float().mean())
        every = taken.repeat_interleave(c["ffn"] // c["experts"], -1)
        l1.append((g.float() * every).mean() * (c["experts"] / c["used"]))
        load = taken.mean((0, 1)) / c["used"]
        balance.append(c["experts"] * (load * probs.mean((0, 1))).sum())
        chosen.append(taken.detach())
    x = dense.rms_norm(x, p["model.norm.weight"], c["eps"])
    return x, torch.stack(active), torch.stack(l1), torch.stack(balance), torch.stack(chosen)


def losses(p, c, x, y, cos, sin, dt):
    h, active, l1, balance, chosen = forward(p, c, x, cos, sin, dt)
    logits = F.linear(h.to(dt), p["model.embed_tokens.weight"].to(dt)).float()
    ce = F.cross_entropy(logits.view(-1, logits.shape[-1]), y.reshape(-1))
    return ce, active, l1.mean(), balance.mean(), chosen.mean((1, 2))


@torch.no_grad()
def evaluate(p, c, ids, nbytes, dt=torch.float32, windows=None, batch=8):
    """As train_demo.evaluate (same windows, same tokens scored), and the expert choices of all scored windows."""
    n, context = len(ids) // c["context"], c["context"]
    pick = np.arange(n) if windows is None else np.asarray(windows)
    cos, sin = dense.rope_tables(c, context)
    nll, toks, byts, act, choices = 0.0, 0, 0, torch.zeros(c["layers"]), []
    for s in range(0, len(pick), batch):
        j = pick[s : s + batch]
        x = torch.from_numpy(np.stack([ids[i * context : (i + 1) * context] for i in j]).astype(np.int64))
        h, a, _, _, taken = forward(p, c, x, cos, sin, dt)
        lg = F.linear(h.to(dt), p["model.embed_tokens.weight"].to(dt)).float()[:, :-1]
        nll += F.cross_entropy(lg.reshape(-1, lg.shape[-1]), x[:, 1:].reshape(-1), reduction="sum").item()
        toks += x[:, 1:].numel()
        byts += sum(int(nbytes[i * context + 1 : (i + 1) * context].sum()) for i in j)
        act += a * len(j)
        choices.append(taken.bool())
    return {
        "windows": len(pick), "scored_tokens": toks, "scored_bytes": byts, "nll_per_token": nll / toks,
        "bits_per_byte": nll / math.log(2) / byts, "active_per_layer": (act / len(pick)).tolist(),
        "active_mean": (act / len(pick)).mean().item(),
    }, torch.cat(choices, 1)


# --------------------------------------------------------------------------
# From dense to experts
# --------------------------------------------------------------------------


def some_windows(c, tokens, count):
    starts = np.linspace(0, len(tokens) - c["context"] - 1, count).astype(int)
    return torch.from_numpy(np.stack([tokens[j : j + c["context"]] for j in starts]).astype(np.int64))


@torch.no_grad()
def observe(p, c, tokens, windows):
    """Per layer: the FFN's input [tokens, hidden], and how much each neuron adds to the residual [tokens, ffn]."""
    cos, sin = dense.rope_tables(c, c["context"])
    seen = [([], []) for _ in range(c["layers"])]
    for tokens_ in some_windows(c, tokens, windows).split(4):
        x = F.embedding(tokens_, p["model.embed_tokens.weight"])
        for i in range(c["layers"]):
            down = p[f"model.layers.{i}.mlp.down_proj.weight"]
            x = x + attend(p, c, i, x, cos, sin, torch.float32)
            _, m, _, _ = neurons(p, c, i, x, torch.float32)
            y = dense.rms_norm(x, p[f"model.layers.{i}.post_attention_layernorm.weight"], c["eps"])
            seen[i][0].append(y.flatten(0, 1))
            seen[i][1].append((m.abs() * down.norm(dim=0)).flatten(0, 1).half())
            x = x + F.linear(m, down)
    return [(torch.cat(y), torch.cat(a).float()) for y, a in seen]


@torch.no_grad()
def refit(old, new, c, tokens, windows, keep):
    """Layer by layer, the matrices onto the residual (attention's output, the experts' down) with which the mixture's
    residual is nearest to the dense model's, by least squares, held to what they were by `keep`: so chosen neurons
    make up for those that are not, and later layers for earlier ones."""
    cos, sin = dense.rope_tables(c, c["context"])
    ids, f32 = some_windows(c, tokens, windows), torch.float32
    want = F.embedding(ids, old["model.embed_tokens.weight"])
    have = want.clone()
    for i in range(c["layers"]):
        attention = lambda p, x: heads(p, c, i, x, cos, sin, f32)
        ffn = lambda p, x: neurons(p, c, i, x, f32)[1]
        for at, inner in (("self_attn.o_proj", attention), ("mlp.down_proj", ffn)):
            left = refit_one(old, new, f"model.layers.{i}.{at}.weight", inner, want, have, keep)
            print(f"layer {i}, {at}: {left:.4f} of the residual's variance is wrong", flush=True)


def refit_one(old, new, name, inner, want, have, keep):
    """One matrix; moves both residuals past it and returns how far they are apart, as a share of the variance."""
    chunks = [slice(s, s + 8) for s in range(0, len(want), 8)]
    for j in chunks:
        want[j] += F.linear(inner(old, want[j]), old[name])
    w, kept = new[name], []
    gram, cross = torch.zeros(w.shape[1], w.shape[1]), torch.zeros(w.shape[1], w.shape[0])
    for j in chunks:
        x = inner(new, have[j]).flatten(0, 1)
        gram += x.T @ x
        cross += x.T @ ((want[j] - have[j]).flatten(0, 1) - x @ w.T)
        kept.append(x.half())
    ridge = keep * gram.diagonal().mean() * torch.eye(w.shape[1])
    new[name] = w + torch.linalg.solve(gram + ridge, cross).T
    for j, x in zip(chunks, kept):
        have[j] += F.linear(x.float(), new[name]).view_as(have[j])
    return float((want - have).square().mean() / want.var())


def balanced(score, each):
    """Give every neuron (row) to an expert (column), `each` to an expert, those first that lose most by another."""
    best = score.sort(-1, descending=True)
    order = (best.values[:, 0] - best.values[:, 1]).argsort(descending=True)
    room, out = [each] * score.shape[1], torch.empty(len(score), dtype=torch.long)
    for j in order.tolist():
        e = next(e for e in best.indices[j].tolist() if room[e])
        room[e] -= 1
        out[j] = e
    return out


def cluster(a, experts, used, seed):
    """Divide neurons into experts such that a token's best `used` experts hold as much as possible of what all
    neurons add: k-means of co-activation, then exchange by what is held, with a bias that keeps loads even."""
    g = torch.Generator().manual_seed(seed)
    each = a.shape[1] // experts
    unit = a / a.norm(dim=0).clamp_min(1e-9)
    _, vectors = torch.linalg.eigh(unit.T @ unit)
    z = F.normalize(vectors[:, -24:] + 1e-9, dim=1)
    centres = z[torch.randperm(len(z), generator=g)[:experts]]
    for _ in range(15):
        group = balanced(z @ centres.T, each)
        centres = F.normalize(torch.stack([z[group == e].mean(0) for e in range(experts)]), dim=1)
    total, bias = a.sum(1, keepdim=True).clamp_min(1e-9), torch.zeros(experts)
    for _ in range(25):
        share = (a @ F.one_hot(group, experts).float()) / total
        taken = torch.zeros_like(share).scatter(1, (share + bias).topk(used, 1).indices, 1.0)
        bias -= 0.2 * (taken.mean(0) - used / experts)
        group = balanced((a / total).T @ taken, each)
    return group, (a @ F.one_hot(group, experts).float()) / total


def fit_router(y, share, steps=300):
    """Logistic regression of what each expert adds on the FFN's input."""
    w = torch.zeros(share.shape[1], y.shape[1], requires_grad=True)
    opt = torch.optim.Adam([w], lr=0.02)
    for _ in range(steps):
        loss = -(share * F.linear(y, w).log_softmax(-1)).sum(-1).mean() + 1e-4 * w.square().sum()
        opt.zero_grad()
        loss.backward()
        opt.step()
    return w.detach()


def cmd_split(a):
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    run = Path(a.work) / a.run
    run.mkdir(parents=True, exist_ok=True)
    p, c = dense.load_export(a.dense)
    old = dict(p)
    for i, (y, added) in enumerate(observe(p, c, np.load(Path(a.work) / "train.npy"), a.windows)):
        at = f"model.layers.{i}."
        # Squares: what is left out is a squared distance, so a neuron that adds much counts for more.
        group, share = cluster(added.square(), a.experts, a.used, a.seed)
        # Flat, so that the two weights are near a half each, where a dense neuron's is one; a little more makes up for
        # what the experts that are not taken would have added.
        router = 0.3 * fit_router(y, share)
        taken = expert_weights(y, router, a.used)[2]
        order = group.argsort(stable=True)
        for name in ("mlp.gate_proj.weight", "mlp.up_proj.weight"):
            p[at + name] = p[at + name][order].contiguous()
        p[at + "mlp.down_proj.weight"] = (p[at + "mlp.down_proj.weight"][:, order] * (1.15 * a.used)).contiguous()
        p[at + "router.weight"] = router
        held = (share * taken).sum(1).mean()
        print(f"layer {i}: the router's {a.used} of {a.experts} hold {held:.3f} of what the neurons add; load "
              + " ".join(f"{v:.2f}" for v in taken.mean(0).tolist()), flush=True)
    c |= {"experts": a.experts, "used": a.used}
    refit(old, p, c, np.load(Path(a.work) / "train.npy"), a.refit_windows, a.keep)
    save(run / "last.pt", {"params": p, "config": c, "step": 0, "spent": 0.0, "history": [], "opt": None})


def cmd_refit(a):
    """A second time, on more text, with flatter routers: measured, the better for it."""
    torch.set_num_threads(a.threads)
    last = Path(a.work) / a.run / "last.pt"
    state = torch.load(last, weights_only=True)
    if state["step"]:
        sys.exit(f"error: {last} has been trained on; refit comes before")
    old, _ = dense.load_export(a.dense)
    for i in range(state["config"]["layers"]):
        state["params"][f"model.layers.{i}.router.weight"] *= a.router_scale
    refit(old, state["params"], state["config"], np.load(Path(a.work) / "train.npy"), a.refit_windows, a.keep)
    save(last, state)


# --------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------


class Optimiser(dense.Optimiser):
    """train_demo's, with the routers among those that Adam moves."""

    def __init__(self, p, lr_matrix, lr_other, decay):
        super().__init__(p, lr_matrix, lr_other, decay)
        self.matrix = [k for k in self.matrix if "router" not in k]
        self.other = [k for k in p if k not in set(self.matrix)]
        for k in self.other:
            self.state[k] = [torch.zeros_like(p[k]), torch.zeros_like(p[k])]


def lr_scale(progress, step, a):
    """Warm-up by steps, constant, then linear to zero over the last part of the run."""
    return min(1.0, (step + 1) / a.warmup, max(0.0, 1 - progress) / a.decay_part)


def save(path, state):
    torch.save(state, str(path) + ".tmp")
    os.replace(str(path) + ".tmp", path)


def cmd_train(a):
    torch.set_num_threads(a.threads)
    torch.manual_seed(a.seed)
    work, last = Path(a.work), Path(a.work) / a.run / "last.pt"
    tokens, held, nb = (np.load(work / f) for f in ("train.npy", "held.npy", "held_bytes.npy"))
    state = torch.load(last, weights_only=True)
    p, c, step, spent, history = (state[k] for k in ("params", "config", "step", "spent", "history"))
    for v in p.values():
        v.requires_grad_(True)
    opt = Optimiser(p, a.lr, a.lr_other, a.weight_decay)
    if state["opt"]:
        opt.state, opt.t = state["opt"], step
    print(f"{sum(v.numel() for v in p.values())} parameters; {c}; from step {step}", flush=True)
    if not (a.steps or a.minutes):
        sys.exit("error: --steps or --minutes says how long the run is")
    batches = dense.Batches(tokens, c["context"], a.batch, a.seed)
    dt = torch.float32 if a.f32 else torch.bfloat16
    cos, sin = dense.rope_tables(c, c["context"])
    fn = losses if a.no_compile else torch.compile(losses)
    some = np.linspace(0, len(held) // c["context"] - 1, 24).astype(int)
    t_save = t_step = time.time()
    ema = None
    while True:
        progress = max(step / a.steps if a.steps else 0.0, spent / (a.minutes * 60) if a.minutes else 0.0)
        if progress >= 1:
            break
        x, y = batches(step)
        ce, active, l1, balance, load = fn(p, c, x, y, cos, sin, dt)
        (ce + a.sparsity * l1 + a.balance * balance).backward()
        opt.step(p, lr_scale(progress, step, a))
        for v in p.values():
            v.grad = None
        ce, step = ce.item(), step + 1
        if not math.isfinite(ce):
            sys.exit(f"error: loss is {ce} at step {step}")
        ema = ce if ema is None else 0.97 * ema + 0.03 * ce
        spent, t_step, rate = spent + time.time() - t_step, time.time(), a.batch * c["context"] / (time.time() - t_step)
        if step % a.log_every == 0:
            print(f"step {step} ({spent / 60:.1f} min, {rate:.0f} tok/s) loss {ce:.4f} avg {ema:.4f} "
                  f"lr x{lr_scale(progress, step, a):.3f} balance {balance:.3f} active "
                  + " ".join(f"{v:.3f}" for v in active.tolist())
                  + " busiest " + " ".join(f"{v:.2f}" for v in load.amax(1).tolist()), flush=True)
        if step % a.eval_every == 0:
            e, _ = evaluate(p, c, held, nb, dt, some)
            history.append([step, e["nll_per_token"], e["bits_per_byte"], e["active_mean"]])
            print(f"EVAL step {step}: bits per byte {e['bits_per_byte']:.4f} on {len(some)} windows", flush=True)
            spent, t_step = spent + time.time() - t_step, time.time()
        if time.time() - t_save > a.save_minutes * 60:
            save(last, pack(p, opt, c, step, spent, history))
            t_save = time.time()
    save(last, pack(p, opt, c, step, spent, history))
    print(f"ended at step {step}, {spent / 60:.1f} minutes", flush=True)


def pack(p, opt, c, step, spent, history):
    return {"params": {k: v.detach() for k, v in p.items()}, "opt": opt.state, "config": c, "step": step,
            "spent": spent, "history": history}


# --------------------------------------------------------------------------
# Export and measurement
# --------------------------------------------------------------------------


def hf_config(c):
    return {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": c["vocab"],
        "hidden_size": c["hidden"], "intermediate_size": c["ffn"] // c["experts"],
        "num_hidden_layers": c["layers"], "num_attention_heads": c["heads"],
        "num_key_value_heads": c["kv_heads"], "head_dim": c["hidden"] // c["heads"],
        "num_local_experts": c["experts"], "num_experts_per_tok": c["used"], "hidden_act": "relu",
        "max_position_embeddings": c["context"], "rms_norm_eps": c["eps"], "rope_theta": c["rope_theta"],
        "sliding_window": None, "attention_dropout": 0.0, "tie_word_embeddings": True, "initializer_range": 0.02,
        "output_router_logits": False, "router_aux_loss_coef": 0.01, "use_cache": True,
        "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "float16",
    }


def published(p, c):
    """Mixtral's names: a tensor per expert and matrix (w1 gate, w3 up, w2 down)."""
    out, each = {}, c["ffn"] // c["experts"]
    for k, v in p.items():
        if ".mlp." not in k and ".router." not in k:
            out[k] = v
    for i in range(c["layers"]):
        at, to = f"model.layers.{i}.", f"model.layers.{i}.block_sparse_moe."
        out[to + "gate.weight"] = p[at + "router.weight"]
        for e in range(c["experts"]):
            rows = slice(e * each, (e + 1) * each)
            out[f"{to}experts.{e}.w1.weight"] = p[at + "mlp.gate_proj.weight"][rows]
            out[f"{to}experts.{e}.w3.weight"] = p[at + "mlp.up_proj.weight"][rows]
            out[f"{to}experts.{e}.w2.weight"] = p[at + "mlp.down_proj.weight"][:, rows]
    return out


def load_export(d):
    from safetensors.torch import load_file

    j = json.loads((Path(d) / "config.json").read_text())
    experts = j["num_local_experts"]
    c = dict(vocab=j["vocab_size"], hidden=j["hidden_size"], layers=j["num_hidden_layers"],
             heads=j["num_attention_heads"], kv_heads=j["num_key_value_heads"], ffn=j["intermediate_size"] * experts,
             context=j["max_position_embeddings"], act=j["hidden_act"], eps=j["rms_norm_eps"],
             rope_theta=j["rope_theta"], experts=experts, used=j["num_experts_per_tok"])
    w = {k: v.float() for k, v in load_file(str(Path(d) / "model.safetensors")).items()}
    p = {k: v for k, v in w.items() if "block_sparse_moe" not in k}
    for i in range(c["layers"]):
        at, moe = f"model.layers.{i}.", f"model.layers.{i}.block_sparse_moe."
        p[at + "router.weight"] = w[moe + "gate.weight"]
        all_of = lambda name: [w[f"{moe}experts.{e}.{name}.weight"] for e in range(experts)]
        p[at + "mlp.gate_proj.weight"] = torch.cat(all_of("w1"))
        p[at + "mlp.up_proj.weight"] = torch.cat(all_of("w3"))
        p[at + "mlp.down_proj.weight"] = torch.cat(all_of("w2"), 1)
    return p, c


def cmd_export(a):
    from safetensors.torch import save_file

    to = Path(a.to)
    to.mkdir(parents=True, exist_ok=True)
    st = torch.load(Path(a.work) / a.run / "last.pt", weights_only=True)
    w = {k: v.detach().half().contiguous() for k, v in published(st["params"], st["config"]).items()}
    assert all(torch.isfinite(v).all() for v in w.values()), "a weight overflows float16"
    save_file(w, str(to / "model.safetensors"), metadata={"format": "pt"})
    os.chmod(to / "model.safetensors", 0o644)
    (to / "config.json").write_text(json.dumps(hf_config(st["config"]), indent=2) + "\n")
    for same in ("generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        (to / same).write_bytes((Path(a.dense) / same).read_bytes())
    print(f"exported step {st['step']} to {to}: {(to / 'model.safetensors').stat().st_size} bytes of weights")


def held_out(a):
    from tokenizers import Tokenizer

    tk = Tokenizer.from_file(str(Path(a.dir) / "tokenizer.json"))
    text = Path(a.text).read_text(encoding="utf-8") if a.text else dense.read_books(a.data)[1]
    ids = np.array(tk.encode(text).ids, np.int64)
    return tk, text, ids, dense.token_bytes(tk, ids)


def cmd_eval(a):
    torch.set_num_threads(a.threads)
    p, c = load_export(a.dir)
    tk, text, ids, nb = held_out(a)
    pick = dense.clean_windows(tk, ids, c["context"], a.data) if a.clean else None
    e, _ = evaluate(p, c, ids, nb, windows=pick)
    print(f"{a.dir}: {c['used']} of {c['experts']} experts of {c['ffn'] // c['experts']}, "
          f"{sum(v.numel() for v in p.values())} parameters, weights as stored, arithmetic in f32")
    print(f"  text             {a.text or dense.HELD_OUT}, {len(text.encode())} bytes, {len(ids)} tokens")
    print(f"  scored           {e['windows']} {'clean ' if a.clean else ''}windows of {c['context']}: "
          f"{e['scored_tokens']} tokens, {e['scored_bytes']} bytes")
    print(f"  nll per token    {e['nll_per_token']:.4f}")
    print(f"  bits per byte    {e['bits_per_byte']:.4f}")
    print(f"  active share     {e['active_mean']:.4f} of all neurons, "
          f"{e['active_mean'] * c['experts'] / c['used']:.4f} of those of chosen experts")
    print("  by layer         " + " ".join(f"{v:.4f}" for v in e["active_per_layer"]) + " of all")


def reuse(chosen):
    """Tokens since an expert was last taken, of all takings but the first in each window; [layer, window, time, expert]."""
    out = []
    for layer in chosen.numpy():
        gaps = [np.diff(np.flatnonzero(w[:, e])) for w in layer for e in range(layer.shape[-1])]
        out.append(np.concatenate(gaps))
    return out


def cmd_usage(a):
    """How often each expert is taken, and after how many tokens it is taken again."""
    torch.set_num_threads(a.threads)
    p, c = load_export(a.dir)
    _, _, ids, nb = held_out(a)
    _, chosen = evaluate(p, c, ids, nb)
    for i, gaps in enumerate(reuse(chosen)):
        share = sorted(chosen[i].float().mean((0, 1)).tolist(), reverse=True)
        kept = (chosen[i][:, 1:] & chosen[i][:, :-1]).float().sum(-1).mean() / c["used"]
        print(f"layer {i}: taken by share of tokens " + " ".join(f"{v:.3f}" for v in share)
              + f"; reuse distance median {np.median(gaps):.0f}, mean {gaps.mean():.2f}, 90 % within "
              f"{np.percentile(gaps, 90):.0f}; {kept:.3f} of a token's experts were the previous token's")
    print(f"all layers: reuse distance median {np.median(np.concatenate(reuse(chosen))):.0f} tokens")


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sub = ap.add_subparsers(dest="cmd", required=True, metavar="SUBCOMMAND")
    fmt = dict(formatter_class=argparse.ArgumentDefaultsHelpFormatter)

    def command(name, f, what, work=True):
        s = sub.add_parser(name, help=what, **fmt)
        s.set_defaults(f=f)
        s.add_argument("--threads", type=int, default=1, help="CPU threads")
        if work:
            s.add_argument("--work", required=True, help="folder that `train_demo.py prepare` wrote")
            s.add_argument("--run", default="moe", help="name of the run; checkpoints go to WORK/RUN")
        else:
            s.add_argument("dir")
            s.add_argument("--data", default=os.path.relpath(ROOT.parent / "shared" / "data" / "fairy-tales"),
                           help=f"folder of books, one of them {dense.HELD_OUT}.txt")
            s.add_argument("--text", metavar="FILE", help="measure on this text instead of the held-out book")
        return s

    def fitted(s, windows):
        s.add_argument("--refit-windows", type=int, default=windows, help="windows of training text for the fit")
        s.add_argument("--keep", type=float, default=0.02, help="how strongly the matrices are held to what they were")

    s = command("split", cmd_split, "divide the dense demo's neurons into experts and fit the routers")
    s.add_argument("--dense", default=str(ROOT / "assets" / "demo"), help="exported dense model")
    s.add_argument("--experts", type=int, default=8)
    s.add_argument("--used", type=int, default=2, help="experts a token")
    s.add_argument("--windows", type=int, default=40, help="windows of training text to watch the neurons on")
    fitted(s, 48)
    s.add_argument("--seed", type=int, default=1)

    s = command("refit", cmd_refit, "fit the matrices onto the residual again, on more text")
    s.add_argument("--dense", default=str(ROOT / "assets" / "demo"), help="exported dense model")
    s.add_argument("--router-scale", type=float, default=0.5, help="multiply the routers by this before")
    fitted(s, 112)

    s = command("train", cmd_train, "train on, or resume")
    s.add_argument("--minutes", type=float, help="length of the schedule, evaluations included")
    s.add_argument("--steps", type=int, help="its length in steps")
    s.add_argument("--batch", type=int, default=8, help="windows a step")
    s.add_argument("--warmup", type=int, default=30, help="steps of linear warm-up")
    s.add_argument("--decay-part", type=float, default=0.6, help="last part over which the rate falls linearly to 0")
    s.add_argument("--lr", type=float, default=0.01, help="peak rate of the hidden matrices (Muon)")
    s.add_argument("--lr-other", type=float, default=0.001, help="peak rate of embeddings, norms and routers (Adam)")
    s.add_argument("--weight-decay", type=float, default=0.1, help="decoupled, hidden matrices only")
    s.add_argument("--balance", type=float, default=0.01, help="weight of the load-balancing term")
    s.add_argument("--sparsity", type=float, default=0.1, help="weight of the L1 term on chosen experts' gates")
    s.add_argument("--seed", type=int, default=7, help="of the data order")
    s.add_argument("--log-every", type=int, default=10, help="steps")
    s.add_argument("--eval-every", type=int, default=100, help="steps (on 24 held-out windows)")
    s.add_argument("--save-minutes", type=float, default=3, help="between checkpoints")
    s.add_argument("--f32", action="store_true", help="matrix products in float32 instead of bfloat16")
    s.add_argument("--no-compile", action="store_true", help="run without torch.compile")

    s = command("export", cmd_export, "write a Hugging Face directory (float16)")
    s.add_argument("--dense", default=str(ROOT / "assets" / "demo"), help="whose tokenizer it has")
    s.add_argument("--to", required=True, metavar="DIR")

    s = command("eval", cmd_eval, "held-out loss and active share of an exported directory", work=False)
    s.add_argument("--clean", action="store_true", help="only windows that share no run of ten words with a training book")
    command("usage", cmd_usage, "how experts are used on the held-out book", work=False)

    a = ap.parse_args()
    a.f(a)


if __name__ == "__main__":
    main()
