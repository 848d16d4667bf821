"""What llama.cpp puts on a card, from a GGUF's tensors: pure functions, tested in test_offload.py.

`-ngl N` puts the last N of layers + 1 there, the last one of all being norm and head. Keeping the FFN tensors of the first N layers on
the CPU (llama.cpp's `--n-cpu-moe N`, for dense models an --override-tensor) puts everything else there. Keys and values of a layer
lie where its attention is. The embedding is always the CPU's.
"""
import re
import struct
from dataclasses import dataclass, field

FFN = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)(_exps)?\.weight")
# GGUF's value types: struct's letter, or None for a string (8) and an array (9).
VALUES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 8: None, 9: None, 10: "Q", 11: "q", 12: "d"}


@dataclass
class Sizes:
    """Bytes of a model's parts."""

    layers: list  # [layers] of all weights of one layer
    ffn: list  # [layers] of them those of gate, up and down
    head: int  # norm and output matrix; of a model with tied embeddings the copy of the embedding that is made for the card
    kv: int = 0  # keys and values of one layer, for the context that is measured
    shape: dict = field(default_factory=dict)

    def with_context(self, tokens):
        s = self.shape
        heads = s["head_count_kv"] or s["head_count"]
        head_size = s["key_length"] or s["embedding_length"] // s["head_count"]
        # f16; llama.cpp rounds the context up to 256.
        self.kv = 2 * 2 * -(-tokens // 256) * 256 * heads * head_size
        return self


def sizes(tensors, shape):
    """tensors: {name: bytes}; shape: block_count, head_count, head_count_kv, embedding_length, key_length."""
    count = shape["block_count"]
    layers, ffn = [0] * count, [0] * count
    for name, size in tensors.items():
        block = re.match(r"blk\.(\d+)\.", name)
        if block:
            layers[int(block[1])] += size
        if m := FFN.fullmatch(name):
            ffn[int(m[1])] += size
    head = tensors.get("output.weight", tensors.get("token_embd.weight", 0)) + tensors.get("output_norm.weight", 0)
    return Sizes(layers, ffn, head, shape=shape)


def bytes_of_ngl(s, n):
    """What `-ngl n` asks the card for, buffers of the computation aside."""
    if n <= 0:
        return 0
    on_card = s.layers[max(0, len(s.layers) + 1 - n):]
    return sum(on_card) + len(on_card) * s.kv + s.head


def bytes_of_cpu_ffn(s, n):
    """The same with the FFNs of the first n layers on the CPU and everything else on the card."""
    return sum(s.layers) + len(s.layers) * s.kv + s.head - sum(s.ffn[:n])


def choose_ngl(s, budget, buffers=0):
    """The largest -ngl that fits; 0 if none does."""
    fits = [n for n in range(1, len(s.layers) + 2) if bytes_of_ngl(s, n) + buffers <= budget]
    return max(fits, default=0)


def choose_cpu_ffn(s, budget, buffers=0):
    """The fewest layers whose FFN stays on the CPU, so that the rest fits; None if it never does."""
    fits = [n for n in range(len(s.layers) + 1) if bytes_of_cpu_ffn(s, n) + buffers <= budget]
    return min(fits, default=None)


def settle(choose, predicted, measured, budget, tries=5):
    """The choice whose measured bytes fit, and those bytes. Buffers of the computation are known only once llama.cpp has made them, and
    depend a little on what lies on the card: so choose, look, correct. None if nothing that was tried fits."""
    buffers, best = 0, None
    for _ in range(tries):
        n = choose(buffers)
        if not n and n != 0 or best and n == best[0]:
            break
        used = measured(n)
        if used <= budget:
            best = (n, used)
        if used - predicted(n) == buffers:
            break
        buffers = max(buffers, used - predicted(n)) if used > budget else used - predicted(n)
    return best


def override(n):
    """Tensors of the first n layers' FFNs, as llama.cpp's --override-tensor takes them."""
    return rf"blk\.({'|'.join(map(str, range(n)))})\.ffn_(gate|up|down)(_exps)?\.weight"


def card_bytes(log):
    """Bytes that llama.cpp asked a card for, from what it says when it loads a model and makes a context."""
    sizes = re.findall(r"(?:CUDA|ROCm|Vulkan|SYCL)\d* +(?:model|KV|RS|compute|output) buffer size = *([\d.]+) MiB", log)
    return int(sum(float(s) for s in sizes) * 2**20)


def read_gguf(path):
    """Tensor bytes by name, and what of the metadata is needed here."""
    with open(path, "rb") as f:
        def take(form):
            return struct.unpack("<" + form, f.read(struct.calcsize("<" + form)))[0]

        def text():
            return f.read(take("Q")).decode(errors="replace")

        def value(kind):
            if kind == 8:
                return text()
            if kind == 9:
                of, count = take("I"), take("Q")
                if VALUES[of]:
                    f.seek(count * struct.calcsize(VALUES[of]), 1)
                else:
                    [value(of) for _ in range(count)]
                return None
            return take(VALUES[kind])

        if f.read(4) != b"GGUF":
            raise SystemExit(f"{path} is no GGUF")
        version = take("I")
        if version not in (2, 3):
            raise SystemExit(f"{path} is GGUF version {version}; 2 and 3 are read")
        count, pairs = take("Q"), take("Q")
        meta = {}
        for _ in range(pairs):
            key = text()
            meta[key] = value(take("I"))
        offsets = []
        for _ in range(count):
            name = text()
            for _ in range(take("I")):
                take("Q")
            take("I")
            offsets.append((take("Q"), name))
        alignment = meta.get("general.alignment", 32)
        begin = -(-f.tell() // alignment) * alignment
        end = f.seek(0, 2) - begin
    offsets.sort()
    # To the next one's beginning: at most alignment - 1 bytes too many.
    ends = [o for o, _ in offsets[1:]] + [end]
    arch = meta["general.architecture"]
    key = lambda name: meta.get(f"{arch}.{name}") or 0
    shape = {"block_count": key("block_count"), "embedding_length": key("embedding_length"), "head_count": key("attention.head_count"),
             "head_count_kv": key("attention.head_count_kv"), "key_length": key("attention.key_length")}
    return {name: end - at for (at, name), end in zip(offsets, ends)}, shape
