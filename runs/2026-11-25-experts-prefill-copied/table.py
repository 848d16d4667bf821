"""The README's table from the rows of two seeds, and its summary. Usage: table.py raw-1.jsonl raw-20261125.jsonl"""
import json
import sys

CARDS = {"7.5GiB": "8 GB", "11.5GiB": "12 GB", "15.5GiB": "16 GB"}
seeds = []
for path in sys.argv[1:]:
    of = {}
    for line in open(path):
        row = json.loads(line)
        key = (row["model"], row["trace"].split("-", 1)[1], row["vram"])
        of.setdefault(key, {})[row["policy"], row["copies"]] = row
    seeds.append(of)


def over(ways, *way):
    """How many times as fast as the static split."""
    return ways["static", False]["ms"] / ways[way]["ms"]


def least(ways):
    pairs = zip(ways["static", False]["each_ms"], ways["full", False]["each_ms"])
    return min(a / b for a, b in pairs)


print("| model | trace | card | static, ms | tokens/s | in slots, % | copied, % | none copied, ms | whole layers | copied | lru | lfu | full "
      "| least prompt | full, other seed | least prompt |")
print("|" + "---|" * 16)
for key, ways in seeds[0].items():
    static, other = ways["static", False], seeds[1][key]
    print(f"| {key[0]} | {key[1]} | {CARDS[key[2]]} | {static['ms']:.0f} | {512e3 / static['ms']:.0f} | {100 * static['gpu_share']:.0f} | "
          f"{100 * static['copied_share']:.0f} | {static['on_cpu_ms']:.0f} | {over(ways, None, False):.3f} | {over(ways, None, True):.3f} | "
          f"{over(ways, 'lru', False):.3f} | {over(ways, 'lfu', False):.3f} | **{over(ways, 'full', False):.3f}** | {least(ways):.3f} | "
          f"{over(other, 'full', False):.3f} | {least(other):.3f} |")
rows = [ways for of in seeds for ways in of.values()]
of_full = [over(ways, "full", False) for ways in rows]
print(f"\nfull, all {len(rows)} rows: {min(of_full):.4f} to {max(of_full):.4f} times static; single prompts from {min(map(least, rows)):.4f}")
copies = [over(ways, None, True) for ways in rows]
print(f"whole layers, copied: {min(copies):.3f} to {max(copies):.3f} times static")
for way in ["static", "full"]:
    gains = [ways[way, False]["on_cpu_ms"] / ways[way, False]["ms"] for ways in rows]
    print(f"{way}: {min(gains):.2f} to {max(gains):.2f} times as fast as with nothing copied")
