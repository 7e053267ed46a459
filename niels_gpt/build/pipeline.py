"""From a source to encoded batches: read, compared with what an earlier run had read, encoded in parallel, in order."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import lru_cache, partial
from typing import TypeVar

from niels_gpt.build import stream
from niels_gpt.build.encode import EncodedTexts, TextEncoder
from niels_gpt.build.resume import Build
from niels_gpt.build.stream import Batch, Mark
from niels_gpt.build.workers import InOrder

T = TypeVar("T")
D = TypeVar("D")

Progress = Callable[[int, int, int | None], None]
"""Called now and then with the documents read, the tokens written and the tokens expected (None: not known)."""


@contextmanager
def encoded(
    build: Build,
    items: Iterable[T],
    counters: Mapping[str, int],
    encoder: TextEncoder,
    *,
    texts: Callable[[T], list[str]],
    label: Callable[[T], str],
    name: Callable[[T], str],
    exhausted: bool,
    num_threads: int,
    executor: Executor | None,
    report: Callable[[int], None],
    settled: Callable[[Iterator[tuple[T, Mark]]], Iterator[tuple[T, Mark]]] = iter,
) -> Iterator[Iterator[tuple[Batch[T], EncodedTexts]]]:
    """Yield the batches, in order, that come behind the last checkpoint of a build; none if it has ended.

    counters: the loader's, which fill while the items are read.
    texts, label: the texts of an item, and what else of it goes into a cache: both are part of its digest.
    name: the id that an item has in its source, for messages.
    exhausted: a build that has ended had read its source to the end.
    num_threads: threads that encode; 0: the caller's own. executor: encodes instead; it is left open.
    report: is told how far a replay has come.
    settled: passes the items on; what it has to know of those that follow, it reads first.
    """
    documents = settled(_own(build, stream.marked(items, counters, build.position)))
    if build.sought:
        build.take_last_again(documents, lambda item: digest_of(item, texts, label))
    elif build.replays:
        build.replay(documents, lambda item: digest_of(item, texts, label), partial(_named, texts, name), report)
    if build.last.ended:
        if exhausted and build.replays:
            build.refuse_more(documents, partial(_named, texts, name))
        yield iter(())
        return
    with ExitStack() as held:
        if executor is None and num_threads:
            executor = ThreadPoolExecutor(num_threads, thread_name_prefix="encode")
            held.callback(executor.shutdown, cancel_futures=True)
        encode = encoder.encode
        if executor is not None and not isinstance(executor, ThreadPoolExecutor):
            encode = partial(_encode_elsewhere, pickle.dumps(encoder))
        given = stream.batches(documents, texts=texts, first=build.last.documents)
        yield held.enter_context(closing(InOrder[Batch[T], EncodedTexts](encode, executor)(given)))


def _named(texts: Callable[[T], list[str]], name: Callable[[T], str], item: T) -> str:
    begin = next((text[:80] for text in texts(item) if text), "")
    return f"{name(item)!r} (it begins {begin!r})"


def _own(build: Build, documents: Iterable[D]) -> Iterator[D]:
    """Pass documents on, and look behind the source: it may have forked, and this be the child."""
    for document in documents:
        build.own()
        yield document
    build.own()


def _encode_elsewhere(encoder: bytes, texts: list[str]) -> EncodedTexts:
    try:
        return _unpickled(encoder).encode(texts)
    except Exception as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # it would be lost on its way, and take the worker with it
            raise RuntimeError(f"{type(error).__name__}: {error}") from None
        raise


@lru_cache(maxsize=4)
def _unpickled(encoder: bytes) -> TextEncoder:
    """Open a tokenizer once in a process; here, for an error while the work travels would kill the worker."""
    found: TextEncoder = pickle.loads(encoder)
    return found


def digest_of(item: T, texts: Callable[[T], list[str]], label: Callable[[T], str]) -> bytes:
    """Return what tells one item of a source from another."""
    return stream.labelled_digest(label(item), map(stream.text_digest, texts(item)))
