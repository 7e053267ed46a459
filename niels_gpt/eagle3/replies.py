"""Generates the target's own replies to chats, to train a draft on its target's distribution of texts.

Three steps: prompts become replies (speaker.py or, by a server, server.py), chats get the target's replies
(`reply_to_all`), and a file collects them, finished or not (`opened`).

**A chat** gets its replies turn by turn, each conditioned on the replies before it. It ends early at the first reply
that the target did not finish, which is kept, or that no template can hold, which is dropped. The rest of the chat is
left out and counted. Degenerate replies (degenerate.py) are counted, and dropped on request.

**The file**:

    replies.jsonl          the rows in the order of the chats; appears when all are done
    replies.jsonl.record   the settings that decide the rows; when finished, also counts and the file's sha256
    replies.jsonl.part     while unfinished: the settings' sha256, then a line with rows and counts for each finished
                           chat, in any order

The same command resumes: a torn last line is dropped, and only chats without a line run again. Other settings are
refused. Neither suffix is a suffix of chats, so a folder of replies can be input directly.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from niels_gpt.chat.chats import assistant_turns, calls_tools
from niels_gpt.chat.protocol import NOT_STABLE, SPECIAL_TEXT, Chat, ChatTokenizer, Messages, RefusedChat
from niels_gpt.eagle3.degenerate import CUT_OFF, GENERATED, MOST_EXAMPLES, REPEATED, counter_of, example, kind_of
from niels_gpt.storage import fileio
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.fileio import OutputFile, canonical_json, sha256_file
from niels_gpt.storage.locks import check_lease, file_lock
from niels_gpt.storage.meta_json import open_regular, parse_object, read_regular

STOP, LENGTH, CONTEXT = "stop", "length", "context"
"""Why a reply ends: with a token that ends a turn, after max_new_tokens, or at the model's last position."""
TURNS: Final = ("all", "last")
"""Which of the assistant's turns are replaced: each of them, or only the last."""
FORMS: Final = ("messages", "ids")
"""A row for each chat, with its messages; or a row for each reply, with the ids of prompt and reply and a loss mask."""
MESSAGES: Final = FORMS[0]
NO_PROMPT, CALLS_TOOLS, OVER_CONTEXT, EMPTY_REPLY = "no_prompt", "calls_tools", "over_context", "empty_reply"
"""Why a chat, or its rest, has no reply: nobody asks, the turn calls a tool, the prompt leaves no room, the reply has
no words. Beside these: the reasons of the tokenizer's RefusedChat, SPECIAL_TEXT for a special token in it, and, of the
form "messages", NOT_STABLE: after a reply the template writes the earlier turns otherwise."""
CUT: Final = {LENGTH: "cut_at_max_new_tokens", CONTEXT: "cut_at_context"}
"""Counter of cut replies, by reason."""
DROPPED: Final = {REPEATED: "dropped_repeated", CUT_OFF: "dropped_cut"}
"""Why a chat ends before a degenerate reply, by kind, if those are dropped; an empty one is never kept."""
_ANY_REPLY = {"role": "assistant", "content": "Yes."}
_ASKING = frozenset({"user", "tool", "function", "ipython", "observation"})

RECORD_VERSION = 1
_RECORD, _PART, _LOCK = ".record", ".part", ".lock"
_MAX_LINE = 1 << 28


# --- prompts and replies ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sampling:
    """How the tokens of a reply are chosen, and how many."""

    max_new_tokens: int = 1024
    """Most tokens of a reply, including the token that ends the turn."""
    temperature: float = 0.0
    """Divides the logits; 0: the most probable token."""
    top_p: float = 1.0
    """Sample from the most probable tokens, as few as reach this total probability."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the limits. Raises: ValueError naming the field."""
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, expected 1 or more")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}, expected 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, expected more than 0 and at most 1")
        if self.temperature == 0 and self.top_p != 1:
            raise ValueError(f"top_p is {self.top_p} and temperature is 0, which is greedy: leave one of them out")

    def room(self, prompt_tokens: int, max_positions: int | None) -> int:
        """Return the most tokens of the reply to a prompt; 0 if the target has no position left."""
        left = self.max_new_tokens if max_positions is None else max_positions - prompt_tokens
        return max(0, min(self.max_new_tokens, left))

    def cut_at(self, room: int) -> str:
        """Return why a reply of `room` tokens without an end is cut: LENGTH or CONTEXT."""
        return LENGTH if room == self.max_new_tokens else CONTEXT


class Prompt(NamedTuple):
    """Token ids for the target to reply to."""

    name: str
    """Decides, with the seed, the random numbers of the reply."""
    ids: list[int]


class Reply(NamedTuple):
    """The target's reply."""

    ids: list[int]
    """Without the token that ends the turn."""
    end: int | None
    """The token that ends the turn; None: the reply is cut."""
    finish: str
    """STOP, LENGTH or CONTEXT."""


def up_to_stop(ids: Sequence[int], stop_ids: Collection[int]) -> tuple[list[int], int | None]:
    """Return the ids before the first one that ends a turn, and that one; all of them and None without such an id."""
    stop = next((at for at, each in enumerate(ids) if each in stop_ids), None)
    return list(ids[:stop]), None if stop is None else ids[stop]


def chance_of(seed: int, name: str) -> int:
    """Return the 256 bits that seed the random numbers of a reply. name: of its prompt."""
    return int.from_bytes(hashlib.sha256(f"{seed}\n{name}".encode("utf-8", "surrogatepass")).digest(), "big")


# --- chats, turn by turn ----------------------------------------------------------------------------------------------


Generate = Callable[[Sequence[Prompt]], list[Reply]]


@dataclass
class Answered:
    """A chat and the target's replies to it so far."""

    chat: Chat
    spots: list[int]
    """Indices of the messages that the target writes."""
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    """Up to the last reply."""
    replies: list[dict[str, Any]] = field(default_factory=list)
    """One record a reply: message (its number), tokens, finish."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Rows of the form "ids"."""
    ended_by: str | None = None
    """Why the chat ends before its last spot, or with a cut reply."""
    counts: Counter[str] = field(default_factory=Counter)
    before: int = 0
    """Chats of the same name that stand before it in the source."""
    drop_degenerate: bool = False
    examples: list[str] = field(default_factory=list)
    """The degenerate replies, to print."""

    @property
    def next_prompt(self) -> Chat | None:
        """Messages before the next reply; None at the end."""
        if self.ended_by is not None or len(self.replies) == len(self.spots):
            return None
        spot = self.spots[len(self.replies)]
        messages = [*self.messages, *self.chat.messages[len(self.messages) : spot]]
        return Chat(self.chat.name, messages, self.chat.tools)

    def end(self, reason: str) -> None:
        """End the chat before its next reply."""
        self.ended_by = reason
        self.counts[reason] += 1

    def close(self) -> None:
        """Count the replies, once the chat has ended."""
        left = len(self.spots) - len(self.replies)
        self.counts += Counter(replies=len(self.replies), replies_left_out=left if self.replies else 0)

    def row(self) -> dict[str, Any]:
        """Return the chat's row in the form "messages"."""
        tools = {} if self.chat.tools is None else {"tools": self.chat.tools}
        early = {} if self.ended_by is None else {"ended_by": self.ended_by}
        return {"id": self.chat.name, "messages": self.messages, **tools, "replies": self.replies, **early}


def reply_spots(messages: Messages, turns: str) -> list[int]:
    """Return the indices of the messages that the target writes: the assistant's, and one after a last question.

    turns: one of TURNS. An assistant's turn at the very beginning is kept, as it has no prompt.
    """
    spots = [number for number in assistant_turns(messages) if number]
    if messages and messages[-1].get("role") in _ASKING:
        spots.append(len(messages))
    return spots if turns == "all" else spots[-1:]


def started(chat: Chat, turns: str, before: int = 0, *, drop_degenerate: bool = False) -> Answered:
    """Return a chat without replies. It has ended already if nobody asks, or if a turn calls a tool.

    before: number of chats with the same name earlier in the source. drop_degenerate: end before a degenerate reply.
    """
    answered = Answered(chat, reply_spots(chat.messages, turns), before=before, drop_degenerate=drop_degenerate)
    if not answered.spots:
        answered.end(NO_PROMPT)
    elif any(spot < len(chat.messages) and calls_tools(chat.messages[spot]) for spot in answered.spots):
        answered.end(CALLS_TOOLS)  # what the tool answered would not fit another call
    return answered


def next_prompts(
    chats: Sequence[Answered], tokenizer: ChatTokenizer, form: str
) -> list[tuple[Answered, Chat, list[int]]]:
    """Return the chats that continue, each with its next prompt and the prompt's ids; end the others.

    form: one of FORMS.
    Raises: ValueError for a template that cannot be used.
    """
    waiting = [(each, prompt) for each in chats if (prompt := each.next_prompt) is not None]
    encoded = tokenizer.plain_ids([prompt for _, prompt in waiting], prompt=True)
    asked = []
    for (each, prompt), ids in zip(waiting, encoded, strict=True):
        if isinstance(ids, RefusedChat):
            each.end(ids.reason)
        elif form == MESSAGES and not _keeps_its_turns(prompt, tokenizer):
            each.end(NOT_STABLE)
        else:
            asked.append((each, prompt, ids))
    return asked


def _keeps_its_turns(prompt: Chat, tokenizer: ChatTokenizer) -> bool:
    """Return whether the template writes a prompt's earlier replies unchanged when another reply follows.

    If not, the chat gets no further reply (NOT_STABLE): its row would be refused as input.
    """
    if not assistant_turns(prompt.messages):
        return True
    (found,) = tokenizer.encode_chats([prompt._replace(messages=[*prompt.messages, _ANY_REPLY])])
    return not isinstance(found, RefusedChat) or found.reason != NOT_STABLE


def reply_to_all(chats: Sequence[Answered], tokenizer: ChatTokenizer, generate: Generate, form: str = MESSAGES) -> None:
    """Let the target reply to chats until each has ended, one turn of all chats at a time. form: one of FORMS.

    Raises: ValueError for a template that cannot be used.
    """
    while asked := next_prompts(chats, tokenizer, form):
        replies = generate([Prompt(prompt_name(each, prompt), ids) for each, prompt, ids in asked])
        for (each, prompt, ids), reply in zip(asked, replies, strict=True):
            add_reply(each, prompt, ids, reply, tokenizer)
    for each in chats:
        each.close()


def prompt_name(answered: Answered, prompt: Chat) -> str:
    """Return the name that decides a reply's random numbers, together with the seed."""
    again = f" {answered.before}" if answered.before else ""
    return f"{len(prompt.messages)}{again}\n{prompt.name}"


def add_reply(answered: Answered, prompt: Chat, ids: list[int], reply: Reply, tokenizer: ChatTokenizer) -> None:
    """Add a reply to its chat, or end the chat before it. ids: of the prompt."""
    if reply.finish == CONTEXT and not reply.ids:
        answered.end(OVER_CONTEXT)
        return
    number, text = len(prompt.messages), tokenizer.decode(reply.ids)
    kind = kind_of(reply.ids, text, is_cut=reply.finish != STOP)
    answered.counts[GENERATED] += 1
    if kind is not None:
        answered.counts[counter_of(kind)] += 1
        answered.examples.append(f"{kind}, {example(f'{prompt.name}#{number}', text)}")
    if not tokenizer.special_ids.isdisjoint(reply.ids):
        answered.end(SPECIAL_TEXT)
        return
    if answered.drop_degenerate and kind in DROPPED:
        answered.end(DROPPED[kind])
        return
    if not text.strip():
        answered.end(EMPTY_REPLY)
        return
    own = [*reply.ids, *([] if reply.end is None else [reply.end])]
    content = _content(prompt, text, [*ids, *own], tokenizer)
    if isinstance(content, RefusedChat):
        answered.end(content.reason)
        return
    answered.messages = [*prompt.messages, {"role": "assistant", "content": content}]
    answered.replies.append({"message": number, "tokens": len(own), "finish": reply.finish})
    row = {"id": f"{prompt.name}#{number}", "input_ids": [*ids, *own], "loss_mask": [0] * len(ids) + [1] * len(own)}
    answered.rows.append({**row, "finish": reply.finish})
    answered.counts["reply_tokens"] += len(own)
    if reply.finish != STOP:
        answered.end(CUT[reply.finish])


def _content(prompt: Chat, text: str, ids: list[int], tokenizer: ChatTokenizer) -> str | RefusedChat:
    """Return a reply's content, or the template's refusal of the chat with it. ids: of the prompt and the reply.

    A template may add white space that the target wrote itself: then the stripped text has these ids.
    """
    found: str | RefusedChat = text
    for content in dict.fromkeys((text, text.strip())):
        messages = [*prompt.messages, {"role": "assistant", "content": content}]
        (whole,) = tokenizer.plain_ids([prompt._replace(messages=messages)], prompt=False)
        if isinstance(whole, RefusedChat):
            found = whole
        elif whole[: len(ids)] == ids:
            return content
    return found


# --- the file of replies ----------------------------------------------------------------------------------------------


class Finished(NamedTuple):
    """A chat that has ended."""

    number: int
    """From 0, in the order of the source."""
    rows: Sequence[Mapping[str, Any]]
    counts: Mapping[str, int]
    examples: Sequence[str] = ()
    """Its degenerate replies, to print."""


class ReplyFile:
    """A file of replies that this process writes; `opened` creates it."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path, self._settings = path, json.loads(json.dumps(settings))
        sha256 = hashlib.sha256(canonical_json(self._settings)).hexdigest()
        self._head = json.dumps({"settings_sha256": sha256}).encode() + b"\n"
        self.counts: Counter[str] = Counter()
        """Counts over all finished chats."""
        self.done: set[int] = set()
        """Numbers of the finished chats."""
        self._examples: dict[int, list[str]] = {}  # by number of the chat, of the first chats with some
        self._places: dict[int, int] = {}  # number of a chat -> where its line starts
        self._part: OutputFile | None = None

    def append(self, chats: Sequence[Finished]) -> None:
        """Append finished chats; durable on return. Skips chats that are there.

        Raises: CacheError E512 if this process has lost its lease, as another one may append.
        """
        assert self._part is not None
        self._check_lease()
        for number, rows, counts, examples in chats:
            if number not in self.done:
                self._places[number] = self._part.num_bytes
                line: dict[str, Any] = {"chat": number, "counts": dict(counts), "rows": list(rows)}
                if examples:
                    line["examples"] = list(examples[:MOST_EXAMPLES])
                self._part.write(json.dumps(line).encode() + b"\n")
                self._count(number, counts, examples)
        self._part.sync()

    def finish(self, counters: Mapping[str, int], **more: Any) -> dict[str, Any]:
        """Write the final file in the order of the chats; return its record.

        counters: inputs the source dropped. more: fields of the record.
        """
        assert self._part is not None
        self._check_lease()
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        file = OutputFile(temporary)
        with open(open_regular(self._part.path), "rb") as lines:
            for number in sorted(self._places):
                lines.seek(self._places[number])
                for row in json.loads(lines.readline(_MAX_LINE))["rows"]:
                    file.write(json.dumps(row, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
        file.sync()
        file.close()
        fileio.rename(temporary, self.path)
        examples = [each for number in sorted(self._examples) for each in self._examples[number]][:MOST_EXAMPLES]
        more |= {"degenerate": examples} if examples else {}
        sha256 = sha256_file(self.path)
        record = self._record(sha256=sha256, counts=dict(self.counts), dropped=dict(counters), **more)
        fileio.write_bytes(_beside(self.path, _RECORD), canonical_json(record))
        self._part.close()
        fileio.remove(self._part.path)
        return record

    def _check_lease(self) -> None:
        check_lease(_beside(self.path, _LOCK))

    def _record(self, **more: Any) -> dict[str, Any]:
        return {"record_version": RECORD_VERSION, "settings": self._settings, **more}

    def _count(self, number: int, counts: Mapping[str, int], examples: Sequence[str]) -> None:
        self.done.add(number)
        self.counts.update(counts)
        if examples:
            self._examples[number] = list(examples[:MOST_EXAMPLES])
            if len(self._examples) > MOST_EXAMPLES:
                del self._examples[max(self._examples)]

    def _start(self) -> dict[str, Any] | None:
        """Open the part file after its last whole line; return the record if everything is done already."""
        record, part = recorded(self.path), _beside(self.path, _PART)
        if record is None and os.path.lexists(self.path):
            raise CacheError(
                self.path, "exists, but has no record of a run", remedy="Name another --output", code="E704"
            )
        if record is not None:
            refuse_other(self.path, record, self._settings)
            if "sha256" in record:
                _refuse_changed(self.path, record)
                if part.is_file():  # the run was killed before it removed it
                    fileio.remove(part)
                return record
        keep = self._read(part) if part.exists() else 0
        if record is None:
            fileio.write_bytes(_beside(self.path, _RECORD), canonical_json(self._record()))
        self._part = OutputFile(part, keep=keep)
        if not keep:
            self._part.write(self._head)
        return None

    def _read(self, part: Path) -> int:
        """Read the whole lines of a part file; return their length in bytes.

        Raises: CacheError E701 for damage; CacheError E703 for a file of other settings.
        """
        with open(open_regular(part), "rb") as file:
            first = file.readline(_MAX_LINE)
            if not first.endswith(b"\n"):
                return 0
            if first != self._head:
                raise CacheError(
                    part,
                    "was started with other settings",
                    remedy=f"Use its settings, name another --output, or remove it: {shlex.join(['rm', str(part)])}",
                    code="E703",
                )
            keep = len(first)
            while line := file.readline(_MAX_LINE):
                try:
                    if not line.endswith(b"\n"):
                        break
                    value = json.loads(line)
                    number, counts = value["chat"], {str(name): int(count) for name, count in value["counts"].items()}
                    examples = [str(each) for each in value.get("examples", [])]
                    assert isinstance(number, int) and isinstance(value["rows"], list)
                except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError):
                    if file.readline(1):
                        both = shlex.join(["rm", str(part), f"{self.path}{_RECORD}"])
                        remedy = f"Run the same command again, after this one: {both}"
                        raise CacheError(
                            part, f"damaged at byte {keep}", "a line of JSON", remedy, code="E701"
                        ) from None
                    break
                self._places[number] = keep
                self._count(number, counts, examples)
                keep += len(line)
        return keep


@contextmanager
def opened(path: Path, settings: Mapping[str, Any]) -> Iterator[ReplyFile | dict[str, Any]]:
    """Yield the file of replies to write or to resume, or its record if it is finished.

    settings: everything that decides the rows, as JSON values.
    Raises: CacheError E503 if another process writes it; E703 for other settings; E704 for a file that no run wrote;
        E205 for a link or non-file; E701 for damage.
    """
    fileio.make_dir(path.parent)
    for own in (path.with_name(f".{path.name}.tmp"), _beside(path, _PART), _beside(path, _LOCK)):
        if os.path.lexists(own) and (own.is_symlink() or not own.is_file()):
            remedy = f"Remove it: {shlex.join(['rm', '-r', str(own)])}"
            raise CacheError(own, "a link, a folder or a pipe", "a file of this command", remedy, code="E205")
    lock = _beside(path, _LOCK)
    with file_lock(lock, path, "is being made", wait=False):
        file = ReplyFile(path, settings)
        try:
            yield file._start() or file
        finally:
            if file._part is not None:
                file._part.close()
        fileio.remove(lock)


def recorded(path: Path) -> dict[str, Any] | None:
    """Return the record of a file of replies; None without one. Raises: CacheError E701 for a damaged one."""
    record = _beside(path, _RECORD)
    try:
        found = parse_object(read_regular(record))
        if found.get("record_version") != RECORD_VERSION or not isinstance(found.get("settings"), dict):
            raise ValueError(f"record_version is not {RECORD_VERSION}, or it has no settings")
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise CacheError(record, "no record of replies", "the record of a run", _anew(path), code="E701") from error
    return found


def refuse_other(path: Path, record: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise CacheError E703, naming the fields, if a file of replies was started with other settings."""
    before = record["settings"]
    differ = sorted(name for name in {*before, *settings} if before.get(name) != settings.get(name))
    if differ:
        raise CacheError(
            path,
            f"was started with other settings: {', '.join(differ)}",
            remedy=f"Use the settings in {path}{_RECORD}, or name another --output",
            code="E703",
        )


def _refuse_changed(path: Path, record: Mapping[str, Any]) -> None:
    problem = "was changed since it was written" if path.is_file() else "is missing, but its record is there"
    if not path.is_file() or sha256_file(path) != record["sha256"]:
        raise CacheError(path, problem, remedy=_anew(path), code="E701")


def _anew(path: Path) -> str:
    """Return the remedy that starts from scratch: it removes the record, and the replies, refused without a record."""
    files = [name for name in (str(_beside(path, _RECORD)), str(path)) if os.path.lexists(name)]
    return f"Name another --output, or run the same command again after this one: {shlex.join(['rm', *files])}"


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)
