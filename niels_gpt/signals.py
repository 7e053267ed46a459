"""Signs of an odd source, such as swapped roles or a wrong encoding: one table for texts, chats and rollouts.

A signal is a counter in meta.json (of `noticed`, or the loader's) or is computed from other numbers there. Nothing is
dropped for it. `stats` shows every count. If more than `share` of the items have the sign, the build warns (W314), and
Dagster's checks do. This module also finds the signs in one text or chat; prefix_tree/rollouts finds them in rollouts.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any, Final, NamedTuple

logger = logging.getLogger(__name__)

Meta = Mapping[str, Any]
UNREAD_FIELD, CONTRADICTING_SHAPE, OTHER_TEXT_FIELD = "unread_field", "contradicting_shape", "other_text_field"
"""Loaders' counters of kept rows. An unread field is counted by name: `unread_field:NAME`."""
EMPTY_FILE, GIT_LFS_POINTER = "empty_file", "git_lfs_pointer"
"""Loaders' counters of files and rows without text."""
UNREAD: Final = f"{UNREAD_FIELD}:"
REPAIRED_TEXTS: Final = ("repaired_utf8", "undecodable_utf8")
"""Loaders' counters of repaired texts; earlier builders wrote the second."""
_KEPT_BY_LOADERS = (
    *("byte_order_mark", OTHER_TEXT_FIELD, CONTRADICTING_SHAPE, "special_as_text", UNREAD, "texts_with_"),
)
BYTE_ORDER_MARK, REPLACED, MOJIBAKE = "texts_with_byte_order_mark", "texts_with_u_fffd", "texts_with_mojibake"
_MARK_OF = {REPLACED: "\ufffd", MOJIBAKE: "\u00c3"}  # an example is cut around this character
ODD_TEXTS: Final = frozenset((BYTE_ORDER_MARK, REPLACED, MOJIBAKE))
"""The notes of TextEncoder that do not mean that decoding changes the text."""
EMPTY_REPLIES: Final = "empty_replies"
BLANK, REPEATED_ID, IN_BOTH = "blank_texts", "repeated_ids", "val_texts_in_train"
SHORTER_THAN_ID: Final = "texts_shorter_than_id"
REPEATED_REPLY, REPEATED_GROUP = "repeated_replies", "repeated_groups"
NO_COMMON_END, WITHOUT_PROMPT = "samples_without_common_end", "samples_without_prompt_length"

_FEW = 2  # this many items with a sign are no reason to warn, unless `share` is 0
_FEW_BYTES = 1.2  # of UTF-8 by token: English has about 4, a script without pieces in the tokenizer has 1
_FEW_IDS = 1_000  # a vocabulary of fewer ids has about one id for each byte of any text
_SHOWN, _MOST_PLACE = 60, 200  # characters of an example, and of its place
_INVISIBLE = "\u00ad\u200b\u200c\u200d\u200e\u200f\u2060\ufeff"
_NO_VALUES = frozenset({"nan", "none", "null", "n/a", "na", "undefined", "[]", "{}"})
_MARKS = ("<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|endoftext|>", "</s>", "<end_of_turn>", "[/INST]")
_HEADERS = ("Assistant:", "User:", "Human:")
_ROLLOUT_FIELDS = ("logprobs", "advantage", "advantages", "reward", "rewards")
_SYNONYMS = {"score": "reward", "scores": "rewards", "returns": "advantages", "old_log_probs": "logprobs"}


class Counts(Counter[str]):
    """Counters of a build, and the first example of each: its place and text."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        """state: the last checkpoint's, which includes `state()`; {} for a new build."""
        super().__init__(state.get("noticed", {}))
        self.seen: dict[str, str] = dict(state.get("seen", {}))
        """The examples by counter. Under other names, values of earlier documents that the builder needs."""

    def note(self, names: Iterable[str], place: str, text: str = "") -> None:
        """Count one document, chat or sample under each of `names`. place: its source id. text: its example is cut
        from it."""
        for name in names:
            self[name] += 1
            if name not in self.seen:
                where = _one_line(place[:_MOST_PLACE])
                begin = max(0, text.find(_MARK_OF.get(name, "")) - _SHOWN // 2)
                shown = text[begin : begin + _SHOWN] + ("..." if len(text) > begin + _SHOWN else "")
                self.seen[name] = f"{where}: {shown!a}" if text else where

    def state(self) -> dict[str, Any]:
        """Return the keys `noticed` and `seen` of a checkpoint."""
        return {"noticed": self, "seen": self.seen}

    def keys_of_meta(self) -> dict[str, Any]:
        """Return the key `first_noticed` of meta.json; {} without examples."""
        found = {name: self.seen[name] for name in sorted(self.seen) if self[name]}
        return {"first_noticed": found} if found else {}


def _one_line(text: str) -> str:
    """Return a text on one line, with unprintable characters escaped."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Signal:
    """One sign, and when a build warns of it."""

    counter: str
    """Key in `noticed` or `source.counters`. One that ends in ":" stands for all keys that begin with it."""
    words: str
    """Predicate of the sentence that begins "12 of 40 chats"."""
    remedy: str
    """A sentence that says what to look at or to do."""
    share: float = 0.01
    """A build warns above this share of `unit`."""
    unit: str = ""
    """The counted things; "" for the documents, chats or samples of the cache."""
    count: Callable[[Meta, Mapping[str, int]], int] | None = None
    """Computes the number from meta.json and its counters; None takes it from `counter`."""


class Found(NamedTuple):
    """A signal in a cache."""

    signal: Signal
    number: int
    total: int
    unit: str
    example: str
    """Its place and text; "" if none is recorded."""

    @property
    def is_above(self) -> bool:
        """Whether a build warns of it."""
        share = self.signal.share
        return self.number > (max(_FEW, share * self.total) if share else 0)

    def __str__(self) -> str:
        words, name = self.signal.words, self.signal.counter.rstrip(":")
        if self.unit in _NOT_KEPT:  # their total is unknown
            beside = f", beside {self.total:,} chats" if self.total else ""
            what = f"{words}: {self.number:,}{beside} ({name})"
        else:
            least = "at least " if self.signal.counter.endswith(":") else ""
            what = f"{least}{self.number:,} of {self.total:,} {self.unit} {words} ({name})"
        such = f", such as {_one_line(self.example)}" if self.example else ""
        return f"{what}{such}. {self.signal.remedy}"


def _replaced_upstream(meta: Meta, counts: Mapping[str, int]) -> int:
    """Return the texts with U+FFFD that the loader did not put there."""
    return max(0, counts.get(REPLACED, 0) - counts.get("repaired_utf8", 0))


def _duplicates(meta: Meta, counts: Mapping[str, int]) -> int:
    return sum(meta.get("duplicates", {}).values())


def _byte_tokens(meta: Meta, counts: Mapping[str, int]) -> int:
    """Return all tokens where one has hardly more than a byte, though the vocabulary is not a small one; else 0."""
    num_bytes = sum(meta.get("utf8_bytes", {}).values())
    added = bool(meta.get("document_start")) + bool(meta.get("document_end"))
    tokens = _total(meta, "tokens") - added * _total(meta, "documents")
    is_known = num_bytes and meta["vocab_size"] > _FEW_IDS
    return tokens if is_known and num_bytes < _FEW_BYTES * tokens else 0


def _unknown_roles(meta: Meta, counts: Mapping[str, int]) -> int:
    """Return the chats that a built-in source leaves out for a role. W310 reports them for the user's own files."""
    return 0 if meta["source"].get("kind") == "own" else int(meta["source"]["counters"].get("unknown_role", 0))


def _equal(field: str, *values: float) -> Callable[[Meta, Mapping[str, int]], int]:
    """Return a `count` of all samples if a field has the same value in each: any value, or one of `values` if given."""

    def count(meta: Meta, counts: Mapping[str, int]) -> int:
        found, total = meta.get("ranges", {}).get(field), _total(meta, "samples")
        is_one = found is not None and total > 1 and found["min"] == found["max"]
        return total if is_one and (not values or found["min"] in values) else 0

    return count


def _misspelt(meta: Meta, counts: Mapping[str, int]) -> int:
    """Return the rows with an unread field whose name resembles a field that the cache lacks."""
    return max((number for name, number in counts.items() if _is_like_a_missing_one(meta, name)), default=0)


def _is_like_a_missing_one(meta: Meta, counter: str) -> bool:
    from difflib import get_close_matches

    name = counter.removeprefix(UNREAD)
    like = _SYNONYMS.get(name) or next(iter(get_close_matches(name, _ROLLOUT_FIELDS, n=1, cutoff=0.8)), "")
    known = {field.rstrip("s") for field in meta.get("fields", {})}
    return name != counter and bool(like) and like.rstrip("s") not in known


_CONVERT = "Convert the source, and build again"
_LOOK = "Look at the source, and at the cache with `niels-gpt show`"
_BYTES = Signal(
    "utf8_bytes_per_token",
    "hold hardly more than a byte each",
    "The tokenizer may be of another script or language",
    share=0.0,
    unit="tokens",
    count=_byte_tokens,
)
_EMPTY_FILE = Signal(EMPTY_FILE, "files without a byte", "Fetch or write them again", share=0.0, unit="files")
_POINTER = Signal(
    GIT_LFS_POINTER,
    "files and rows that are pointers of git-lfs",
    "Fetch what they stand for: git lfs pull",
    share=0.0,
    unit="files",
)
_TWICE = Signal(
    "duplicates", "repeat an earlier one of the same split", "Deduplicate the source", share=0.5, count=_duplicates
)
_TEXTS = (
    Signal(BYTE_ORDER_MARK, "begin with U+FEFF, a byte-order mark that became text", _CONVERT),
    Signal(REPLACED, "hold U+FFFD, in place of what was not decoded", _CONVERT, count=_replaced_upstream),
    Signal(MOJIBAKE, "hold UTF-8 that was read as Latin-1, such as U+00C3 U+00A9 for e with an acute accent", _CONVERT),
)
SIGNALS: Final[Mapping[str, tuple[Signal, ...]]] = {
    "pretrain": (
        *_TEXTS,
        Signal(BLANK, "are only white space", _LOOK),
        Signal(
            OTHER_TEXT_FIELD,
            "have another text in a second of the fields text, content and document",
            "Of files of your own name the field that holds the text: `--pretrain 'NAME=GLOB:FIELD'`",
        ),
        Signal(SHORTER_THAN_ID, "are shorter than their id, which has spaces", "Are id and text swapped?", share=0.5),
        Signal(
            REPEATED_ID,
            "have the id of an earlier one",
            "Give each an id of its own: a file of `--exclude` names documents by it",
            0.1,
        ),
        _TWICE,
        Signal(
            IN_BOTH,
            "have a text that is in train too",
            "List the sha256 of their texts in a file for --exclude, which leaves them out of both",
            unit="documents of val",
        ),
        _BYTES,
        _EMPTY_FILE,
        _POINTER,
    ),
    "sft": (
        Signal(
            EMPTY_REPLIES,
            "have an empty reply of the assistant, and are kept: a model learns from them to end its turn at once",
            "Remove them from the source, or list their ids in a file for --exclude",
        ),
        Signal("begins_with_reply", "begin with a reply", "Are the roles swapped, or is the prompt missing?"),
        Signal("ends_with_user", "end with a message of the user, which carries no loss", _LOOK, share=0.5),
        Signal("same_role_twice", "have two messages of the user, or two replies, in a row", _LOOK),
        Signal("system_in_the_middle", "have a system message that is not the first", _LOOK),
        Signal("blank_user_messages", "have a blank message of the user", _LOOK),
        Signal("reply_equals_prompt", "have a reply that equals the message before it", "Are two fields the same?"),
        Signal("no_value_replies", "have a reply such as nan, None or null", "Remove rows without a value"),
        Signal(REPEATED_REPLY, "have the last reply of the chat before", _LOOK, share=0.1),
        Signal(
            "marks_in_replies",
            "have a mark of a chat template, or a line that begins with 'User:', inside a reply",
            "Cut such texts into messages",
        ),
        _TWICE,
        Signal(
            UNREAD,
            "have a field that is not read",
            "Write `history` and `system_message` as messages. A chat template may read the others "
            "(`--chat-template`); else take them out of the rows",
        ),
        Signal(CONTRADICTING_SHAPE, "have a second form of a chat, with other messages", "Take one of them out"),
        *(
            Signal(name, words, _LOOK, unit="messages")
            for name, words in (
                ("orphan", "messages left out, since their parent is missing"),
                ("cycle", "messages left out, since they have no root"),
                ("duplicate_id", "messages left out, since another one has their id"),
            )
        ),
        Signal(
            "not_prefix_stable",
            "chats left out, since the chat template writes their earlier turns otherwise once others follow",
            "Let only the last reply carry loss: `--loss-on last`",
            unit="messages",
            count=lambda meta, counts: meta.get("dropped", {}).get("not_prefix_stable", 0),
        ),
        Signal(
            "unknown_role", "chats left out for a role", "Give it a known one", unit="messages", count=_unknown_roles
        ),
        Signal(
            "not_english",
            "messages left out for their language",
            "Look at the field `lang`: en is kept, EN is not. --no-oasst1-english-only keeps all",
            share=6.0,
            unit="messages",
        ),
        *_TEXTS,
        _EMPTY_FILE,
        _POINTER,
    ),
    "rollouts": (
        Signal("positive_logprobs", "have a log-prob above 0", "Are they probabilities, or of another sign?", share=0),
        Signal("zero_logprobs", "have log-probs that are all 0", "Were they recorded?"),
        *(
            Signal(f"{field}_all_0", f"have no {field} but 0", "No loss has a gradient", 0, count=_equal(field, 0))
            for field in ("advantage", "advantages")
        ),
        Signal("reward_all_equal", "have the same reward", "Was it recorded?", share=0, count=_equal("reward")),
        Signal(
            "prompts_differ",
            "have samples of different prompts",
            "Give each prompt a group of its own, or the right `prompt_length`",
            unit="groups",
        ),
        Signal(
            REPEATED_GROUP,
            "have the id of an earlier group",
            "Write the rows of a group one after another",
            unit="groups",
        ),
        Signal(
            "groups_of_one",
            "have one sample",
            "Sort the rows by their group: rows of one group follow each other",
            0.9,
            "groups",
        ),
        Signal("empty_prompts", "have a prompt without a token", _LOOK),
        Signal(
            WITHOUT_PROMPT,
            "have no `prompt_length`, though others have one: their prompt may carry loss",
            "Give it in every row",
            share=0,
        ),
        Signal(
            NO_COMMON_END,
            "end with another token than the most frequent last one",
            "Are the completions cut, or recorded without the end of the turn?",
            share=0.9,
        ),
        Signal(
            UNREAD,
            "rows with a field that is not read, whose name is like one that the cache lacks",
            "Rename it: docs/rollouts.md has the names",
            share=0,
            unit="rows",
            count=_misspelt,
        ),
        _EMPTY_FILE,
    ),
}
"""Signs by the kind of the cache."""
_NOT_KEPT = ("files", "rows", "messages")
"""Units whose total is unknown. Messages are compared with the number of chats read."""
_UNITS = {"pretrain": "documents", "sft": "chats", "rollouts": "samples"}


def _total(meta: Meta, unit: str) -> int:
    """Return the total of a unit; 0 for files and rows, whose total is unknown."""
    totals = meta["totals"]
    if unit == "documents":
        return sum(meta.get("docs", {}).values())
    if unit == "documents of val":
        return int(meta.get("docs", {}).get("val", 0))
    if unit in _NOT_KEPT:
        return int(meta["examples_read"]) if unit == "messages" else 0
    name = {"chats": "examples"}.get(unit, unit)
    return sum(int(totals.get(f"{split}_{name}", 0)) for split in ("train", "val"))


def found_in(meta: Meta) -> list[Found]:
    """Return the signals that a cache has, in the order of the table; [] for a kind without signals.

    Raises: LookupError, TypeError or ValueError for a meta.json of another form.
    """
    kind, counts = str(meta["kind"]), _counts(meta)
    found = []
    for signal in SIGNALS.get(kind, ()):
        of = {name: number for name, number in counts.items() if name.startswith(signal.counter)}
        if not signal.counter.endswith(":"):
            of = {signal.counter: counts.get(signal.counter, 0)}
        count = max(of.values(), default=0) if signal.count is None else signal.count(meta, counts)
        if count and meta.get("built") is not False:
            unit, example = signal.unit or _UNITS[kind], meta.get("first_noticed", {}).get(signal.counter, "")
            if signal.counter.endswith(":"):
                names = of if signal.count is None else filter(partial(_is_like_a_missing_one, meta), of)
                example = ", ".join(f"{name.removeprefix(signal.counter)} {of[name]:,}" for name in sorted(names))
            found.append(Found(signal, count, _total(meta, unit), unit, str(example)))
    return found


def _counts(meta: Meta) -> Counter[str]:
    source = meta.get("source")
    return Counter(meta.get("noticed") or {}) + Counter((source.get("counters") if source else None) or {})


def is_of_kept(counter: str) -> bool:
    """Return whether a loader's counter counts kept rows. All others count rows left out, except REPAIRED_TEXTS."""
    return counter.startswith(_KEPT_BY_LOADERS)


def above(meta: Meta) -> list[Found]:
    """Return the signals that a build warns of; none for the bundled sample, which has odd texts on purpose."""
    source = meta.get("source") or {}
    return [] if source.get("kind") == "sample" else [found for found in found_in(meta) if found.is_above]


def below(meta: Meta) -> set[str]:
    """Return the counters of the table that a build does not warn of: only `stats` prints them."""
    of_kind = SIGNALS.get(str(meta.get("kind")), ())
    return {signal.counter for signal in of_kind} - {found.signal.counter for found in above(meta)}


def warn_of_signals(where: str | os.PathLike[str], meta: Meta) -> None:
    """Log W314 for each signal above its share in a cache that was just made."""
    for found in above(meta):
        logger.warning("%s: %s", where, found, extra={"code": "W314"})


def markdown(kind: str) -> str:
    """Return the table of a kind's signals, for the documentation."""
    rows = ["| counter | warned of above | they |", "|---|---|---|"]
    for signal in SIGNALS[kind]:
        name = f"{signal.counter}NAME" if signal.counter.endswith(":") else signal.counter
        unit = signal.unit or _UNITS[kind]
        unit = "chats" if unit == "messages" else unit
        limit = f"{signal.share:.0%} of the {unit}" if signal.share else "any"
        rows.append(f"| `{name}` | {limit} | {signal.words} |")
    return "\n".join(rows)


# --- signs in one text or chat ----------------------------------------------------------------------------------------


def odd_in_text(text: bytes) -> tuple[str, ...]:
    """Return the counters of the signs in a text. text: utf-8, not ASCII."""
    # Searching one byte is many times faster than several, and few texts have each byte of one of these.
    found: tuple[str, ...] = ()
    if text.startswith(b"\xef\xbb\xbf"):
        found += (BYTE_ORDER_MARK,)
    if b"\xbd" in text and b"\xef" in text and b"\xbf" in text and b"\xef\xbf\xbd" in text:
        found += (REPLACED,)
    if b"\xc3" in text and (  # U+00E9 in utf-8, as Latin-1; a quotation mark
        (b"\x83" in text and b"\xc3\x83\xc2" in text) or (b"\x82" in text and b"\xc3\xa2\xe2\x82\xac" in text)
    ):
        found += (MOJIBAKE,)
    return found


def odd_in_chat(roles: Sequence[str], texts: Sequence[str]) -> list[str]:
    """Return the counters of the signs in a chat. roles, texts: one for each message."""
    found = dict.fromkeys(_odd_order(tuple(roles)))
    before = None
    for role, text in zip(roles, texts, strict=True):
        shown = text.strip().strip(_INVISIBLE)
        if role == "assistant":
            if not shown:
                found[EMPTY_REPLIES] = None
            elif len(shown) < 10 and shown.lower() in _NO_VALUES:
                found["no_value_replies"] = None
            elif text == before:
                found["reply_equals_prompt"] = None
            if _has_mark(text):
                found["marks_in_replies"] = None
        elif role == "user" and not shown:
            found["blank_user_messages"] = None
        before = text
    return list(found)


@lru_cache(maxsize=4096)
def _odd_order(roles: tuple[str, ...]) -> tuple[str, ...]:
    spoken = [role for role in roles if role != "system"]
    checks = {
        "begins_with_reply": spoken[:1] == ["assistant"],
        "ends_with_user": spoken[-1:] == ["user"],
        "same_role_twice": any(one == two and one in ("user", "assistant") for one, two in pairwise(roles)),
        "system_in_the_middle": "system" in roles[1:],
    }
    return tuple(name for name, is_so in checks.items() if is_so)


def _has_mark(text: str) -> bool:
    if ("<" in text or "[/" in text) and any(mark in text for mark in _MARKS):
        return True
    return ":" in text and any(text.startswith(header) or f"\n{header}" in text for header in _HEADERS)
