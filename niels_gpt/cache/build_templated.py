"""Build an sft cache by any chat template: chats to ids, and a bit per token that says whether it carries loss.

Decides which chats are dropped, and counts them; niels_gpt/chat/ decides ids and targets.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from hashlib import sha256
from itertools import chain
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from niels_gpt.cache.build_sft import IN_PARTITIONS, LOSS, SPLIT_RULE, Examples, files_of
from niels_gpt.chat.chats import words_of
from niels_gpt.chat.protocol import (
    NOT_AS_TEXT,
    NOT_STABLE,
    REFUSED_BY_TEMPLATE,
    SPECIAL_TEXT,
    TOO_LARGE,
    UNKNOWN_TURNS,
    UNUSED_CALLS,
    Chat,
    ChatTokenizer,
    EncodedChat,
    RefusedChat,
)
from niels_gpt.chat.rows import EMPTY, MERGED, NO_SUPERVISED, WITHOUT_LOSS
from niels_gpt.chat.template import REMEDY
from niels_gpt.documents import Partition
from niels_gpt.encoding import DIGEST_BYTES, DIGEST_DTYPE
from niels_gpt.engine.build import How, NoTextError, claim_of, run_build
from niels_gpt.engine.checkpoints import CHECKPOINT_SECONDS, Build
from niels_gpt.engine.losses import UNKNOWN_IDS, warn_of_unknown
from niels_gpt.engine.meta import Source
from niels_gpt.engine.split import TextSplit, Waiting, chat_text
from niels_gpt.engine.stream import Batch, ItemKind
from niels_gpt.signals import odd_in_text, warn_of_signals
from niels_gpt.storage.errors import SourceError, TokenizerError
from niels_gpt.tokenizers.protocol import Tokenizer, token_dtype
from niels_gpt.work import Progress

logger = logging.getLogger(__name__)

MALFORMED = "malformed"
_PART_TOKENS = 1 << 20  # of encoded chats that are in memory together
_MANY = 100  # chats that are left out because the template is not prefix-stable, and none is kept: it is useless
REMEDIES = {
    NOT_STABLE: REMEDY,
    NO_SUPERVISED: "Expected a chat with a turn that carries loss: name other turns with --loss-on, or with "
    "--chat-template a file that marks the replies by {% generation %} and {% endgeneration %}",
    **dict.fromkeys(
        (REFUSED_BY_TEMPLATE, UNUSED_CALLS, NOT_AS_TEXT, TOO_LARGE),
        "Name a file with a template that takes these chats: --chat-template FILE",
    ),
    UNKNOWN_TURNS: "Let all turns of the assistant carry loss: --loss-on assistant,tool_calls",
}
"""Remedy if no chat is left, by reason."""


class _Item(NamedTuple):
    """A chat in the builder's form."""

    name: str
    """Id in the source."""
    text: str
    """The chat as JSON, in the order of its keys, which a template may write out; "" for a malformed one."""


_CHATS = ItemKind[_Item](
    texts=lambda item: [item.text], label=lambda item: f"{item.name}\0", name=lambda item: item.name
)


def build_templated_sft(
    chats: Iterable[Chat],
    out_dir: str | os.PathLike[str],
    *,
    tokenizer: Tokenizer,
    chat_tokenizer: ChatTokenizer,
    val_frac: float,
    seed: int,
    on_special: str = "drop",
    num_threads: int = 1,
    source: Source | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    partition: Partition | None = None,
    plan: str | None = None,
    committed: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Build an sft cache by a chat template and commit it at `out_dir`. Returns its meta. A killed build resumes.

    chats: messages with roles and any further JSON values, which the template gets unchanged. docs/formats.md, "Loss
        bits", lists the reasons to drop a chat, counted in meta `dropped`, and the oddities of kept chats, counted in
        `noticed`.
    tokenizer: produces the ids. chat_tokenizer: the same one, with its template and the turns that carry loss.
    on_special: for a chat with the literal of a special token: "drop" it, or "raise" ValueError.
    num_threads: 0: render and encode in the caller's thread; else beside the reading. Never changes the bytes.
    Takes the other arguments of `build_pretrain`; progress gets no expected tokens.
    Raises: ValueError for bad arguments or an unusable template; NoTextError E303 if no chat with a target is left;
        CacheError E503 while another process builds here, E504 if `out_dir` is no cache, E505 for a damaged unfinished
        build, E306 if chats changed since a killed run; ForkedBuild E508.
    """
    if not 0 <= val_frac < 1:
        raise ValueError(f"val_frac={val_frac}: expected 0 <= val_frac < 1")
    if on_special not in ("drop", "raise"):
        raise ValueError(f"on_special={on_special!r}: expected 'drop' or 'raise'")
    chat_tokenizer.encode_chats([])  # fail early if the template cannot be used
    source = source or Source()
    template = {
        "sha256": chat_tokenizer.template_sha256,
        "mask_by": chat_tokenizer.mask_by,
        "loss_on": chat_tokenizer.loss_on,
    }
    settings: dict[str, Any] = {"kind": "sft", "built": True, "val_frac": val_frac, "on_special": on_special}
    settings |= {"split_rule": SPLIT_RULE, "chat_template": template, "pad_id": chat_tokenizer.pad_id}
    settings |= claim_of(partition, plan, SPLIT_RULE, IN_PARTITIONS)
    named = chat_tokenizer.names_sha256  # of the template's tokens, by files beside tokenizer.json
    rule = TextSplit(Fraction(val_frac), seed, moves=partition is None)
    encoder = _ChatEncoder(chat_tokenizer, int(tokenizer.vocab_size))
    unk_id = getattr(tokenizer, "unk_id", None)
    return run_build(
        out_dir,
        lambda _: map(_item, chats),
        lambda build: _Chats(build, os.fspath(out_dir), source, rule, encoder, on_special, unk_id),
        How(min(num_threads, 1), None, checkpoint_seconds, committed, progress),
        tokenizer=tokenizer,
        files=files_of(partition) | LOSS,
        source=source,
        rule=rule,
        settings=settings,
        identity={"template_tokens": named},
    )


def _item(chat: Chat) -> _Item:
    messages = chat.messages
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not is_list or not all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in messages):
        return _Item(chat.name, "")
    try:
        value = {"messages": list(messages), "tools": chat.tools, "name": chat.name}
        return _Item(chat.name, json.dumps(value, separators=(",", ":"), allow_nan=False, default=_plain))
    except (TypeError, ValueError, RecursionError):  # what JSON has no form for
        return _Item(chat.name, "")


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError


def _split_text(messages: Sequence[Mapping[str, Any]]) -> bytes:
    return chat_text([(message["role"], message.get("content")) for message in messages])


@dataclass(frozen=True)
class _EncodedChats:
    """A part of a batch: kept chats, and the reasons why others are dropped."""

    ids: list[NDArray[Any]] = field(default_factory=list)
    """Ids of each kept chat, in the cache's dtype."""
    targets: list[NDArray[np.bool_]] = field(default_factory=list)
    """Targets of each kept chat, as long as its ids."""
    numbers: list[tuple[int, ...]] = field(default_factory=list)
    """Tokens, supervised tokens, utf-8 bytes and digest of each kept chat."""
    texts: list[bytes] = field(default_factory=list)
    """Text of each kept chat that decides its split."""
    problems: dict[int, RefusedChat] = field(default_factory=dict)
    """Number of the chat in the batch -> why it is dropped."""
    names: list[str] = field(default_factory=list)
    """Source id of each kept chat."""
    chats: list[tuple[list[str], list[str]]] = field(default_factory=list)
    """Roles, and words of the messages, of each kept chat."""
    noticed: Counter[str] = field(default_factory=Counter)
    """Counts of what the template does with kept chats."""

    def add(self, chat: Chat, ids: NDArray[Any], encoded: EncodedChat) -> None:
        """Take a kept chat."""
        targets = np.array(encoded.mask, dtype=np.bool_)
        targets[0] = False  # nothing predicts the first token
        self.names.append(chat.name)
        self.ids.append(ids)
        self.targets.append(targets)
        self.numbers.append((len(ids), int(targets.sum()), _utf8_bytes(chat.messages), _digest(chat)))
        self.texts.append(_split_text(chat.messages))
        self.chats.append(([message["role"] for message in chat.messages], list(map(words_of, chat.messages))))
        self.noticed.update([MERGED] * encoded.merged + list(encoded.unsupervised))
        self.noticed[WITHOUT_LOSS] += encoded.turns_without_loss


class _ChatEncoder:
    """Encode batches of chats and check every id. Threads may share it."""

    def __init__(self, chat_tokenizer: ChatTokenizer, vocab_size: int) -> None:
        self._chat_tokenizer, self._lock = chat_tokenizer, Lock()
        self.loss_on = chat_tokenizer.loss_on
        self.vocab_size, self.dtype = vocab_size, token_dtype(vocab_size)

    def hashes(self, texts: Sequence[bytes | str]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
        """Return no split keys, and the digests of texts."""
        digests = [sha256(text.encode() if isinstance(text, str) else text).digest()[:DIGEST_BYTES] for text in texts]
        return np.empty(0, dtype=np.uint64), np.frombuffer(b"".join(digests), dtype=DIGEST_DTYPE)

    def encode(self, texts: Sequence[bytes | str], first: int = 0) -> Iterator[_EncodedChats]:
        """Encode chats, given as `_Item.text`. Raises: ValueError from the chat tokenizer, and for a wrong id.

        Encodes the first part now: the whole batch, unless the template makes it much longer. Encodes each further part
        on request, so that memory holds one part however long the template makes them.
        """
        chats = [Chat(**json.loads(text)) if text else None for text in texts]
        with self._lock:
            found = iter(self._chat_tokenizer.encode_chats([chat for chat in chats if chat and chat.messages]))
        parts = self._parts(chats, found)
        return chain([next(parts)], parts)

    def _parts(self, chats: list[Chat | None], found: Iterator[EncodedChat | RefusedChat]) -> Iterator[_EncodedChats]:
        """found: chats that have a message."""
        encoded, tokens = _EncodedChats(), 0
        for number, chat in enumerate(chats):
            if chat is None or not chat.messages:
                encoded.problems[number] = RefusedChat(EMPTY if chat else MALFORMED, "")
                continue
            with self._lock:
                result = next(found)
            if isinstance(result, RefusedChat):
                encoded.problems[number] = result
            elif any(result.mask[1:]):
                encoded.add(chat, self._checked(result.ids, chat.name), result)
                tokens += len(result.ids)
            else:
                encoded.problems[number] = RefusedChat(NO_SUPERVISED, "")
            if tokens >= _PART_TOKENS:
                yield encoded
                encoded, tokens = _EncodedChats(), 0
        yield encoded

    def _checked(self, ids: list[int], name: str) -> NDArray[Any]:
        array = np.array(ids, dtype=np.int64)
        if not 0 <= array.min() <= array.max() < self.vocab_size:
            wrong = array[(array < 0) | (array >= self.vocab_size)][0]
            problem = f"chat {name!r}: the tokenizer gave id {wrong}, expected ids below vocab_size={self.vocab_size}"
            raise TokenizerError(problem, code="E409")
        return array.astype(self.dtype)


def _utf8_bytes(value: Any) -> int:
    """Return the utf-8 length of all texts in messages except the roles. Half a surrogate pair counts three bytes."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode(errors="surrogatepass"))
    if isinstance(value, dict):
        return sum(_utf8_bytes(each) for key, each in value.items() if key != "role")
    return sum(map(_utf8_bytes, value)) if isinstance(value, list) else 0


def _digest(chat: Chat) -> int:
    """Return 8 bytes of the sha256 of messages and tools, with their keys sorted, as an int64."""
    text = json.dumps([chat.messages, chat.tools], sort_keys=True, separators=(",", ":"))
    return int.from_bytes(sha256(text.encode()).digest()[:DIGEST_BYTES], "little", signed=True)


class _Chats(Examples):
    """Append kept chats with their targets: the Writer of all other templates."""

    kind = _CHATS

    def __init__(
        self,
        build: Build,
        path: str,
        source: Source,
        rule: TextSplit,
        encoder: _ChatEncoder,
        on_special: str,
        unk_id: int | None,
    ) -> None:
        super().__init__(build, source, rule, encoder.dtype, has_loss=True)
        self.encoder, self._path, self._on_special, self._unk_id = encoder, path, on_special, unk_id
        self._first_problem = ""  # of the first chat that was dropped in this run for a reason that has words

    def waiting(self, item: _Item) -> Waiting:
        """Return the text that decides a chat's split. Only its encoding shows whether the chat is kept."""
        if not item.text:
            return Waiting(None, 0)
        text = _split_text(json.loads(item.text)["messages"])
        return Waiting(text, len(item.text), lambda: any(each.ids for each in self.encoder.encode([item.text])))

    def add(self, batch: Batch[_Item], encoded: Iterator[_EncodedChats]) -> list[bytes]:
        """Append the kept chats of a batch. Returns the digests of all chats."""
        for part in encoded:
            self._add(batch, part)
        self.counts["examples_read"] += len(batch.items)
        if self.counts[NOT_STABLE] >= _MANY and not self.is_part:
            self.check_kept()
        return _CHATS.digests(batch.items, self.encoder)

    def warn(self, out_dir: str | os.PathLike[str], meta: Mapping[str, Any]) -> None:
        """Log oddities of a cache that was just built."""
        warn_of_unknown(out_dir, meta["unknown_ids"])
        warn_of_signals(out_dir, meta)

    def check_kept(self) -> None:
        """Raise NoTextError if no chat is kept."""
        if self.kept:
            return
        counts = self.counts
        first = f" The first: {self._first_problem}." if self._first_problem else ""
        is_last = self.encoder.loss_on == "last"
        last = "" if is_last or not counts[NOT_STABLE] else " If it changes only turns before the last: --loss-on last."
        remedy = next((f" {remedy}" for reason, remedy in REMEDIES.items() if counts[reason]), "")
        found = f"no chat with a target is left: {dict(counts + Counter(self._source.counters))}.{first}{last}{remedy}"
        raise NoTextError(f"{self._path}: {found}", code="E407" if counts[NOT_STABLE] else "E303")

    def _add(self, batch: Batch[_Item], encoded: _EncodedChats) -> None:
        for number, problem in encoded.problems.items():
            self._drop(batch.items[number].name, problem)
        self.warnings.update(encoded.noticed)
        if encoded.ids:
            ids, targets = np.concatenate(encoded.ids), np.concatenate(encoded.targets)
            if self._unk_id is not None:
                self.warnings[UNKNOWN_IDS] += int(np.count_nonzero(ids == self._unk_id))
            for name, (roles, texts) in zip(encoded.names, encoded.chats, strict=True):
                utf8 = ((text, text.encode(errors="surrogatepass")) for text in texts if not text.isascii())
                odd = {each: text for text, data in utf8 for each in odd_in_text(data)}
                self.note(name, roles, texts, odd, has_empty=False)  # counted as EMPTY_REPLY
            self.write(ids, np.array(encoded.numbers, dtype=np.int64), encoded.names, encoded.texts, targets)

    def _drop(self, name: str, problem: RefusedChat) -> None:
        if problem.reason == SPECIAL_TEXT and self._on_special == "raise":
            remedy = "Remove it from the source, or have such chats dropped: --on-special drop"
            raise SourceError(f"{problem.found}. {remedy}", code="E305")
        if problem.found and not self._first_problem:
            self._first_problem = problem.found
        if not self.counts[problem.reason]:
            what = problem.found or f"chat {name!r}"
            message = "%s. Counted as %s; more like it are counted only"
            logger.warning(message, what, problem.reason, extra={"code": "W305"})
        self.counts[problem.reason] += 1
