"""The README's table from the rows of two seeds. Usage: table.py raw-1.jsonl raw-20261125.jsonl"""
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
print("| model | trace | card | static, ms | tokens/s | hits, % | whole layers | copied | lru | lfu | full | least prompt | if divided: static, ms "
      "| full | full, other seed | least prompt |")
print("|" + "---|" * 16)
for key, ways in seeds[0].items():
    static, full = ways["static", False], ways["full", False]

    def times(*way):
        return f"{static['ms'] / ways[way]['ms']:.3f}"

    def least(ways):
        pairs = zip(ways["static", False]["each_ms"], ways["full", False]["each_ms"])
        return f"{min(a / b for a, b in pairs):.3f}"

    other = seeds[1][key]
    print(f"| {key[0]} | {key[1]} | {CARDS[key[2]]} | {static['ms']:.0f} | {512e3 / static['ms']:.0f} | {100 * static['gpu_share']:.0f} | "
          f"{times(None, False)} | {times(None, True)} | {times('lru', False)} | {times('lfu', False)} | **{times('full', False)}** | "
          f"{least(ways)} | {static['divided_ms']:.0f} | {static['divided_ms'] / full['divided_ms']:.3f} | "
          f"{other['static', False]['ms'] / other['full', False]['ms']:.3f} | {least(other)} |")
