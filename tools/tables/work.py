"""What is trained: a model of ids, and batches of Zipf-distributed ids whose number of different ones is given.

With NumPy alone, for the Pythons of peers.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]

UNITS = 64  # of the hidden layer
LEARNING_RATE, EPSILON, ACCUMULATOR = 0.05, 1e-7, 0.1  # of Adagrad
_SPREAD = 2654435761  # a prime: multiples of it visit all rows in an order in which neighbours are far apart
_WORD, _GOLDEN = 2**64, 0x9E3779B97F4A7C15  # odd: multiplied modulo 2**64, all 64-bit ids differ
_DRAWN = 2**16  # at a time


@dataclass(frozen=True)
class Work:
    """Batches of ids of a table, and how it is trained.

    Args:
        rows: how many the table has, or is filled with.
        bounded: ids are below `rows`; else any of 64 bits.
        dim: floats of a row.
        batch: examples of a batch, of one worker.
        features: ids of an example.
        unique: different ids of a batch; 0: as many as come.
        exponent: of Zipf's law: id number k comes in proportion to k ** -exponent.
        sleep_s: what a step sleeps behind its lookup, as if an accelerator computed.
    """

    rows: int = 1_000_000
    bounded: bool = True
    dim: int = 16
    batch: int = 4096
    features: int = 26
    unique: int = 30_000
    exponent: float = 1.05
    sleep_s: float = 0.0

    @property
    def of_batch(self) -> int:
        """Ids of a batch, each as often as it comes."""
        return self.batch * self.features

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Work:
        return cls(**json.loads(text))

    def ids(self, numbers: Ids) -> Ids:
        """The ids of the rows with these numbers, from 0, the most frequent one, to below `rows`: all differ."""
        if self.bounded:
            return numbers * _SPREAD % self.rows
        return (numbers.astype(np.uint64) * np.uint64(_GOLDEN)).view(np.int64)

    def drawn(self, random: np.random.Generator, count: int) -> Ids:
        """Numbers of rows by Zipf's law, as the continuous distribution with this density has them."""
        uniform = random.random(count)
        power = 1.0 - self.exponent
        if abs(power) < 1e-9:
            found = self.rows**uniform
        else:
            found = ((self.rows**power - 1.0) * uniform + 1.0) ** (1.0 / power)
        return np.minimum(found.astype(np.int64) - 1, self.rows - 1)

    def different(self, random: np.random.Generator, count: int) -> Ids:
        """As many different numbers of rows, ascending, as have been drawn once these are `count`."""
        found = np.empty(0, np.int64)
        while True:
            some = _ascending(self.drawn(random, _DRAWN))
            new = some[~_among(found, some)]
            if len(found) + len(new) >= count:
                return np.sort(np.concatenate([found, random.permutation(new)[: count - len(found)]]))
            found = np.sort(np.concatenate([found, new]))

    def example_ids(self, random: np.random.Generator) -> Ids:
        """Those of one batch, [batch, features]."""
        if not self.unique:
            numbers = self.drawn(random, self.of_batch)
        else:
            once = self.different(random, self.unique)
            every, left = [once], self.of_batch - self.unique
            while left > 0:
                some = self.drawn(random, _DRAWN)
                every.append(some[_among(once, some)][:left])
                left -= len(every[-1])
            numbers = random.permutation(np.concatenate(every))
        return self.ids(numbers).reshape(self.batch, self.features)

    def examples(self, seed: int, batches: int, workers: int = 1) -> tuple[Ids, NDArray[np.float32]]:
        """Ids and labels of so many steps of `workers`, whose batches follow each other in each step's."""
        random = np.random.default_rng(seed)
        x = np.concatenate([self.example_ids(random) for _ in range(batches * workers)])
        return x, (x.sum(1) % 2).astype(np.float32)[:, None]


def _ascending(numbers: Ids) -> Ids:
    """Each once."""
    ascending = np.sort(numbers)  # np.unique is much slower
    found: Ids = ascending[np.concatenate([[True], ascending[1:] != ascending[:-1]])]
    return found


def _among(known: Ids, numbers: Ids) -> NDArray[np.bool_]:
    """Which numbers are among `known`, which are ascending."""
    if not len(known):
        return np.zeros(len(numbers), np.bool_)
    found: NDArray[np.bool_] = known.take(known.searchsorted(numbers), mode="clip") == numbers
    return found


def parser(description: str) -> argparse.ArgumentParser:
    """Of a program that trains: `--work JSON --warmup STEPS --steps STEPS`."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--work", type=Work.from_json, required=True)
    found.add_argument("--warmup", type=int, default=4, help="steps of each round that are not timed")
    found.add_argument("--steps", type=int, default=20, help="of each round that are")
    return found


def say(content: Mapping[str, object], to: TextIO | None = None) -> None:
    """One line for whoever has started this program, to its stdout or `to`."""
    print(json.dumps(content), flush=True, file=to)


def own_stdout() -> TextIO:
    """The stdout of this program, to which from now on nothing else writes: the rest goes to stderr."""
    found = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return found
