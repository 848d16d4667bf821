#!/usr/bin/env python3
"""Measures how long an answer takes alone and beside clients that ask for much: embeddings, or schemas that are slow to try.

    python3 tools/neighbours.py target/release/dynamicinfer [MODEL] [--rounds 5] [-o neighbours.csv]

For each kind of company and each number of clients, rounds alone and in company alternate, so that both meet the same minute of the machine.
Embeddings: an answer of 120 tokens beside 1 and 8 clients, each of which asks for the embeddings of 16 texts of some 250 tokens again and again.
Schemas: an answer of 2 tokens beside 1, 2, 4 and 8 clients, each of which sends one slow schema after another. Prints medians and the longest
time, in milliseconds, and their ratio to the median alone. Each client has an address of its own, as behind a gateway. Standard library only.
"""

import argparse
import csv
import http.client
import json
import statistics
import sys
import threading
import time

from company import Unix, serving

WORDS = "the king of small houses went under a long river and said that nobody had seen her green boat since winter came to town".split()


def post(path, client, endpoint, body):
    connection = Unix(path)
    connection.request("POST", endpoint, json.dumps(body), {"Content-Type": "application/json", "X-Real-IP": client})
    answer = connection.getresponse()
    said = answer.read()
    connection.close()
    return answer.status, said


def timed(path, tokens, seed):
    body = {"prompt": f"Once upon a time {seed}", "max_tokens": tokens, "temperature": 1, "seed": seed, "ignore_eos": True}
    began = time.monotonic()
    status, said = post(path, "10.0.0.1", "/v1/completions", body)
    took = 1000 * (time.monotonic() - began)
    if status != 200:
        sys.exit(f"the daemon answered {status}: {said.decode()}")
    return took


def embeddings(path, client, number, turn):
    """16 texts of some 250 tokens, none twice."""
    texts = [" ".join(WORDS[(i * 7 + number + turn + text) % len(WORDS)] for i in range(200)) for text in range(16)]
    status, said = post(path, client, "/v1/embeddings", {"input": texts})
    if status not in (200, 429):
        sys.exit(f"an embedding was answered by {status}: {said.decode()}")


def schemas(path, client, number, turn):
    """A schema whose trial takes all the time that it may, and that no trial before has had."""
    schema = {"type": "integer", "multipleOf": (1 << 28) + 1 + 2 * (1000 * number + turn)}
    post(path, client, "/v1/completions", {"prompt": "x", "max_tokens": 2, "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})


def beside(path, ask, clients, tokens, first):
    """The time of one answer while so many clients ask, from when all have begun."""
    ending, begun = threading.Event(), threading.Barrier(clients + 1)

    def client(number):
        begun.wait()
        turn = first
        while not ending.is_set():
            try:
                ask(path, f"10.0.1.{number}", number, turn)
            except (OSError, http.client.HTTPException):
                return
            turn += 1

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(clients)]
    [thread.start() for thread in threads]
    begun.wait()
    time.sleep(0.3)
    took = timed(path, tokens, first)
    ending.set()
    [thread.join() for thread in threads]
    return took


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("program")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arguments", nargs="*", default=[], help="more arguments of serve, without their dashes: ctx-size=2048")
    parser.add_argument("-o", "--out")
    arguments = parser.parse_args()
    options = [f"--{word}" for word in arguments.arguments]
    rows, first = [], 0
    with serving(arguments.program, arguments.model, options) as path:
        for kind, ask, tokens, numbers in [("embeddings", embeddings, 120, (1, 8)), ("schemas", schemas, 2, (1, 2, 4, 8))]:
            timed(path, tokens, 0)
            for clients in numbers:
                alone, company = [], []
                for _ in range(arguments.rounds):
                    first += 50
                    alone.append(timed(path, tokens, first))
                    company.append(beside(path, ask, clients, tokens, first))
                middle = statistics.median(alone)
                row = [kind, clients, tokens, middle, statistics.median(company), max(company), statistics.median(company) / middle, max(company) / middle]
                rows.append(row)
                print(f"{tokens} tokens beside {clients} clients of {kind}: alone {row[3]:.1f} ms, in company {row[4]:.1f} (at most {row[5]:.1f}): "
                      f"{row[6]:.2f} times (at most {row[7]:.2f})", flush=True)
    if arguments.out:
        with open(arguments.out, "w", newline="") as out:
            writer = csv.writer(out)
            writer.writerow(["company", "clients", "tokens", "alone_ms", "company_ms", "company_ms_most", "ratio", "ratio_most"])
            writer.writerows(rows)


main()
