"""Readers side by side in the same rounds, for loaders.py: what is drawn of each, how often, and what is aimed at."""

import argparse
import contextlib
import functools
import math
import time
from collections.abc import Iterator

import torch
from loader_caches import SHARDS
from loader_peers import PEERS, Draw
from measuring import Seconds, Ways, measured

SHAPES = ((8, 256), (32, 1024), (64, 2048))  # B rows of T tokens


def time_of(draw: Draw, seconds: float, count: float = math.inf) -> float:
    """Return the seconds a batch, over so many seconds or batches, whichever ends first."""
    drawn, begin = 0, time.perf_counter()
    while drawn < count and (time.perf_counter() - begin < seconds or not drawn):
        draw()
        drawn += 1
    return (time.perf_counter() - begin) / drawn


@contextlib.contextmanager
def surviving(name: str, failures: dict[str, str]) -> Iterator[None]:
    """Print and note what fails in a peer, which is then left out; an error of a way of our own is raised."""
    try:
        yield
    except Exception as error:
        if name not in PEERS:
            raise
        failures[name] = f"{type(error).__name__}: {error}"
        print(f"  {name}: left out from here on: {failures[name]}", flush=True)


def repeated(name: str, draw: Draw, count: int, failures: dict[str, str]) -> None:
    """Draw so many batches."""
    if name not in failures:
        with surviving(name, failures):
            for _ in range(count):
                draw()


def compare(ways: dict[str, list[Draw]], B: int, arguments: argparse.Namespace, failures: dict[str, str]) -> Seconds:
    """Return the seconds a batch, in each round, of the fastest draw of each way; a round is of arguments.seconds."""
    # So many random rows that all shards, and all of the 64 KiB that are mapped at once, have been read: p > 0.99.
    places = max(SHARDS[-1], 2 * arguments.tokens >> 16)
    warm_batches = places * (math.log(places) + 5) / B
    repeats: Ways = {}
    counts = {}
    for name, draws in ways.items():
        with surviving(name, failures):
            for draw in draws:
                time_of(draw, arguments.warm_seconds, warm_batches)
            times = [min(time_of(draw, arguments.seconds / 2) for _ in range(3)) for draw in draws]
            counts[name] = max(1, round(arguments.seconds / min(times)))
            draw = draws[times.index(min(times))]
            repeats[name] = functools.partial(repeated, name, draw, counts[name], failures)
    found = measured(repeats, arguments.rounds)
    return {name: [second / counts[name] for second in found[name]] for name in found if name not in failures}


def checked(name: str, draws: list[Draw], B: int, T: int) -> list[Draw]:
    """Return the draws after one batch of each, which must be what all of them are to give."""
    for draw in draws:
        x, y = draw()
        assert x.dtype == y.dtype == torch.int64 and x.is_contiguous() and y.is_contiguous(), f"{name}: not int64"
        assert x.shape == y.shape == (B, T) and torch.equal(x[:, 1:], y[:, :-1]), f"{name}: not {B} rows of {T}"
    return draws


def target(what: str, found: float, least: float, arguments: argparse.Namespace) -> None:
    """Print what is aimed at and what was found; nothing of a quick run, whose figures say little."""
    if not arguments.quick:
        print(f"  {'met   ' if found >= least else 'MISSED'} {what}: {found:.2f}, aim {least}")
