"""Measures what speculation does to the speed of answers: of code that is to be changed a little, and of ordinary texts.

    python3 tools/speculation.py target/release/dynamicinfer MODEL --what edits|texts [--temperature 0] [--threads 2] [--tokens 400]
        [--rounds 3] [--first serve.speculation=off] [--second serve.speculation=auto] [-o raw.csv]

Two daemons that differ in one setting answer the same prompts in turns, one answer at a time. Prints for each prompt the ratio of the medians of
tokens a second, from the first token on, and whether all texts were the same. The standard library is enough.
"""

import argparse
import contextlib
import csv
import json
import pathlib
import statistics
import sys
import time

from company import Unix, serving

ROOT = pathlib.Path(__file__).resolve().parent.parent

# File, first and last line, and what is to be changed.
EDITS = [
    ("tools/company.py", 36, 58, "Rename the variable `daemon` to `process`."),
    ("tools/measure_daemon.py", 47, 86, "Rename the function `ask` to `request`."),
    ("src/prng.rs", 1, 52, "Rename the method `below` to `less_than`."),
    ("src/generation/turns.rs", 1, 44, "Rename the field `last` to `previous`."),
    ("src/generation/queue.rs", 1, 60, "Add a method `clear` that drops all entries."),
    ("src/clock.rs", 1, 50, "Rename the function `date` to `calendar_date`."),
]

TEXTS = [
    "Tell me a story about a lighthouse keeper and a storm.",
    "Why is the sky blue in the daytime and red in the evening?",
    "Describe how bread is made, from grain to loaf.",
    "Write a letter to a friend about a week in the mountains.",
    "What should I look at when I buy a used bicycle?",
    "Explain how a binary search works and when it cannot be used.",
    "Tell me a fairy tale about a fox who wanted to be a king.",
    "What are the differences between a virus and a bacterium?",
    "Give me advice for my first job interview.",
    "Describe a busy market in a harbour town.",
    "How do vaccines work?",
    "Write a short dialogue between a teacher and a curious pupil.",
]


def prompts(what):
    if what == "texts":
        return TEXTS
    said = []
    for path, first, last, wish in EDITS:
        code = "\n".join((ROOT / path).read_text().splitlines()[first - 1 : last])
        said.append(f"{wish} Answer with the whole code and nothing else.\n\n```\n{code}\n```")
    return said


def counts(path):
    """Guessed and accepted tokens so far."""
    connection = Unix(path)
    connection.request("GET", "/metrics")
    lines = [line.split() for line in connection.getresponse().read().decode().splitlines()]
    return [sum(float(line[-1]) for line in lines if line[0] == f"dynamicinfer_{name}_tokens_total") for name in ("guessed", "accepted")]


def answer(path, prompt, temperature, tokens):
    """The text of an answer, its tokens, and the seconds from its first token to its last."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "temperature": temperature, "seed": 7, "stream": True}
    connection = Unix(path)
    connection.request("POST", "/v1/chat/completions", json.dumps(body | {"stream_options": {"include_usage": True}}))
    reply = connection.getresponse()
    if reply.status != 200:
        sys.exit(f"the daemon answered {reply.status}: {reply.read().decode()}")
    text, first, last, made = "", None, None, 0
    for line in reply:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        made = (event.get("usage") or {}).get("completion_tokens", made)
        piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
        if piece:
            last = time.monotonic()
            first = first or last
            text += piece
    return text, made, last - first


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--what", choices=["edits", "texts"], required=True)
    parser.add_argument("--temperature", type=float, default=0)
    parser.add_argument("--threads", default="2")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--first", default="serve.speculation=off")
    parser.add_argument("--second", default="serve.speculation=auto")
    parser.add_argument("-o", "--output")
    args = parser.parse_args()
    settings, rows, ratios, same = [args.first, args.second], [], [], 0
    with contextlib.ExitStack() as stack:
        options = ["--threads", args.threads]
        daemons = [stack.enter_context(serving(args.program, args.model, options, [setting])) for setting in settings]
        for number, prompt in enumerate(prompts(args.what)):
            speeds, texts = [[], []], set()
            # A prompt's first answer reads it; the others have its keys.
            for turn in range(args.rounds):
                for which in (0, 1) if turn % 2 == 0 else (1, 0):
                    before = counts(daemons[which])
                    text, tokens, seconds = answer(daemons[which], prompt, args.temperature, args.tokens)
                    guessed, accepted = [now - then for now, then in zip(counts(daemons[which]), before)]
                    speeds[which].append((tokens - 1) / seconds)
                    texts.add(text)
                    row = [args.what, number, args.temperature, settings[which], turn, tokens, round(seconds, 4), int(guessed), int(accepted)]
                    rows.append(row)
            medians = [statistics.median(speed) for speed in speeds]
            ratios.append(medians[1] / medians[0])
            same += len(texts) == 1
            print(f"{args.what} {number}: {medians[0]:.1f} and {medians[1]:.1f} tokens/s, {ratios[-1]:.2f} times", flush=True)
    print(f"{args.what} at {args.temperature}: median {statistics.median(ratios):.2f} times, {min(ratios):.2f} to {max(ratios):.2f}")
    print(f"the same text every time: {same} of {len(ratios)}")
    if args.output:
        with open(args.output, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["what", "prompt", "temperature", "setting", "round", "tokens", "seconds", "guessed_tokens", "accepted_tokens"])
            writer.writerows(rows)


if __name__ == "__main__":
    main()
