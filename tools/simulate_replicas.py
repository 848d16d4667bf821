#!/usr/bin/env python3
"""Simulated, not measured: what clients wait for when many machines each run a replica.

    python3 tools/simulate_replicas.py [--replicas 1 10 100 1000] [--clients 2 4 8 16] [--answers 20]

A queue model on a clock of events. Each client asks, waits for the whole answer, thinks, and asks again. The front gives a request to the replica with
the fewest answers (of two taken at random, as Ray does, with --choices 2). A replica runs up to 8 answers in one pass and makes so many tokens a second in
all as one machine was measured to (runs/2026-11-22-scale, 24 x 1024 x 2816, 5 % active, `mlp`, two threads of a Zen 3); more wait, first come, first served. Lengths and
pauses are exponential, from a seed. Left out: prompts, the network, replicas that die, sessions.
"""

import argparse
import heapq
import random

# Answers in one pass: tokens a second of all together (runs/2026-11-21-scale).
MEASURED = {1: 65.0, 2: 97.0, 4: 127.0, 8: 122.0}
PARALLEL = 8


def rate(n):
    """Tokens a second of n answers together, between the measured ones on a straight line."""
    below = max(k for k in MEASURED if k <= n)
    above = min(k for k in MEASURED if k >= n)
    if above == below:
        return MEASURED[n]
    return MEASURED[below] + (MEASURED[above] - MEASURED[below]) * (n - below) / (above - below)


class Replica:
    """Answers under way, each with the work at which it ends, on a scale of tokens per answer."""

    def __init__(self):
        self.running, self.waiting, self.done, self.at, self.version = [], [], 0.0, 0.0, 0

    def load(self):
        """Answers that are here."""
        return len(self.running) + len(self.waiting)

    def advance(self, now):
        """Each answer under way gets its share of the time since."""
        if self.running:
            self.done += (now - self.at) * rate(len(self.running)) / len(self.running)
        self.at = now

    def take(self, tokens, who):
        """An answer that comes."""
        if len(self.running) < PARALLEL:
            heapq.heappush(self.running, (self.done + tokens, who))
        else:
            self.waiting.append((tokens, who))

    def next_end(self):
        """When the first of the answers will be done."""
        return self.at + (self.running[0][0] - self.done) * len(self.running) / rate(len(self.running))


def simulate(replicas, clients, answers, tokens, pause, choices, seed):
    """Seconds of each answer, and tokens a second of all."""
    draw = random.Random(seed)
    machines = [Replica() for _ in range(replicas)]
    events = [(draw.expovariate(1 / pause), "ask", client, 0) for client in range(clients)]
    heapq.heapify(events)
    asked, left, took, made = {}, [answers] * clients, [], 0.0

    def plan(i):
        machine = machines[i]
        machine.version += 1
        if machine.running:
            heapq.heappush(events, (machine.next_end(), "end", i, machine.version))

    now = 0.0
    while events:
        now, what, i, version = heapq.heappop(events)
        if what == "ask":
            some = range(replicas) if not choices else [draw.randrange(replicas) for _ in range(choices)]
            to = min(some, key=lambda k: machines[k].load())
            length = draw.expovariate(1 / tokens)
            asked[i] = (now, length)
            machines[to].advance(now)
            machines[to].take(length, i)
            plan(to)
        elif machines[i].version == version:
            machine = machines[i]
            machine.advance(now)
            _, who = heapq.heappop(machine.running)
            if machine.waiting:
                heapq.heappush(machine.running, (machine.done + machine.waiting[0][0], machine.waiting.pop(0)[1]))
            begun, length = asked[who]
            took.append(now - begun)
            made += length
            left[who] -= 1
            if left[who]:
                heapq.heappush(events, (now + draw.expovariate(1 / pause), "ask", who, 0))
            plan(i)
    return sorted(took), made / now


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 4, 8, 16], help="for each replica")
    parser.add_argument("--answers", type=int, default=20, help="of each client")
    parser.add_argument("--tokens", type=float, default=128, help="of an answer, in the mean")
    parser.add_argument("--pause", type=float, default=10, help="seconds between answer and next question, in the mean")
    parser.add_argument("--choices", type=int, default=2, help="replicas that are compared; 0 is all of them")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print("Simulated.\n\n| replicas | clients | median, s | 99th percentile, s | tokens/s |\n|---|---|---|---|---|")
    for replicas in args.replicas:
        for each in args.clients:
            # Few machines see few answers: more from each client make up for it.
            answers = args.answers * max(1, 100 // (replicas * each))
            took, speed = simulate(replicas, replicas * each, answers, args.tokens, args.pause, args.choices, args.seed)
            print(f"| {replicas:,} | {replicas * each:,} | {took[len(took) // 2]:.1f} | {took[int(0.99 * len(took))]:.1f} | {speed:,.0f} |", flush=True)


if __name__ == "__main__":
    main()
