"""The texts: four topics of 23 printable characters each. `run` stays with a topic for 75 characters, `profile` for 10."""
import random
import sys

chars = [chr(c) for c in range(33, 127)]
random.Random(7).shuffle(chars)
topics = [chars[i * 23:(i + 1) * 23] for i in range(4)]
seed, length, stay = {"run": (1, 400, 75), "profile": (2, 4000, 10)}[sys.argv[1]]
prng = random.Random(seed)
print("".join(prng.choice(topics[i // stay % 4]) for i in range(length)), end="")
