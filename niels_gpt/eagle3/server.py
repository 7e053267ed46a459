"""Replies from a server with the chat-completions API of OpenAI, such as vLLM, SGLang or `transformers serve`.

    client = Client(chat_url("http://localhost:8000"), "MODEL", key=None)
    for number, answered in replied(chats, client, tokenizer, ...):

**A question** is one POST to URL/chat/completions, with the messages before the reply, the chat's tools, the sampling,
and a seed of the reply's own. Nothing else of the API is needed, not even /v1/models. No redirect is followed, and an
answer has at most 16 MiB. A connection that fails, a timeout, and the statuses 408, 425, 429 and 5xx are tried again up
to five times, after 1, 2, 4, 8 and 16 s, or after as long as Retry-After says.

**Refusals.** A server may refuse one chat (400, 413 or 422), for example as too long, or always fail on it (500). Such
chats are counted once it has replied to another one. A server that refuses all questions on their way before its first
reply, or fails on nine chats without a reply between them, ends the run.

**Ids.** vLLM gives the ids of prompt and reply to `return_token_ids`, SGLang to this and `return_prompt_token_ids`.
Most others leave out what they do not know; a server that refuses such a question (400 or 422) is asked without. Given
ids are taken as they are. A reply without is tokenized: the template writes the chat with it, and the reply's ids are
what follows the prompt's. It is dropped if the chat does not begin with the ids of the prompt, or if the reply's do not
give its text back, but for white space at its edges.

**The prompt** must be the server's too: its ids, or if the server gives none their number in `usage`, are compared. A
first answer to another prompt is an error; later ones are counted, and dropped. Without either the prompt is taken on
trust, and counted.
"""

from __future__ import annotations

import io
import json
import logging
import queue
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any, Final, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlsplit, urlunsplit

from niels_gpt.chat.protocol import NOT_STABLE, Chat, ChatTokenizer, Messages, RefusedChat
from niels_gpt.eagle3.replies import (
    CALLS_TOOLS,
    MESSAGES,
    OVER_CONTEXT,
    STOP,
    Answered,
    Reply,
    Sampling,
    add_reply,
    chance_of,
    next_prompts,
    prompt_name,
    up_to_stop,
)
from niels_gpt.storage.errors import ServerError, ServerRefusal
from niels_gpt.storage.waits import Waits, asked_seconds, is_passing

logger = logging.getLogger(__name__)

IDS: Final = ("auto", "require", "never")
"""Whether a server is asked for token ids: yes, and without them if it refuses; yes; no."""
REFUSED, OTHER_PROMPT, REPLACED = "refused_by_server", "other_prompt", "replaced_characters"
SPLIT_OFF, OTHER_TEXT, NO_END, TOO_LONG = "reasoning_split_off", "other_text", "finished_otherwise", "longer_than_asked"
"""Why a chat, or its rest, has no reply: the server refuses the question; its prompt is another one; the reply has
U+FFFD, in whose place other ids were; a parser of the server took the reasoning out; the ids of the reply's text give
another text; the server ended the reply for another reason than its end or its length; it has too many tokens."""
GIVEN_IDS, TOKENIZED, OTHER_LENGTH = "ids_of_server", "ids_of_text", "other_token_count"
"""Counters of kept or dropped replies: with the server's ids; tokenized here; the latter with another number of tokens
than the server counted, so that the target wrote the text by other ids."""
NOT_COMPARED: Final = "prompt_not_compared"
"""Counter of replies to prompts that the server says nothing about."""
SERVED: Final = "served: "
"""Begins the counters of the names, model and system fingerprint, that the answers state."""

ATTEMPTS: Final = 6
WAITS: Final = Waits(1.0, 60.0, jitter=0.1)
LONGEST_RETRY_AFTER_S: Final = 600.0
"""Longest wait that the server may ask for; more is an error."""
MOST_BYTES: Final = 1 << 24
"""Of an answer."""
_WORDS, _NAME, _NAMES = 300, 100, 16  # characters of an error and of a name; different names that are counted
_REFUSALS = 3  # refused chats that are shown
_OF_ONE_CHAT = (400, 413, 422, 500)
_FAILED = 500
_FAILURES = 8  # chats on which the server may fail without a reply between them
_MOST_ID = 1 << 31
_PIECE, _FEW = 1 << 16, 8  # bytes; ids of prompts that differ, to print


def chat_url(url: str) -> str:
    """Return the URL of the API, /v1 for a URL without a path. Raises: ValueError for a URL that cannot be one."""
    if "@" in url or "?" in url:  # not shown: it may hold a secret
        raise ValueError(
            "--server: the URL has a user, a password or a query. Pass the key by a variable: --api-key-env NAME"
        )
    try:
        parts = urlsplit(url)
        is_one = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.fragment
    except ValueError:
        is_one = False
    if not is_one or not url.isascii() or any(each <= " " or each == "\x7f" for each in url):
        raise ValueError(f"--server is {url[:_WORDS]!a}, expected a URL such as http://localhost:8000/v1")
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") or "/v1"))


class Answer(NamedTuple):
    """A server's answer, its fields checked."""

    text: str
    """The content; "" without."""
    finish: str
    """finish_reason: stop, length, tool_calls or another."""
    ids: list[int] | None
    """Of the reply, perhaps with the token that ends it; None if the server gives none."""
    prompt_ids: list[int] | None
    prompt_tokens: int | None
    tokens: int | None
    """Of the reply, as the server counts them."""
    has_reasoning: bool
    calls_tools: bool
    served: tuple[str, ...]
    """Model and system fingerprint."""


class Client:
    """Asks a server, from any number of threads."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        ids: str = "auto",
        key: str | None = None,
        timeout_s: float = 600.0,
        waits: Waits = WAITS,
    ) -> None:
        """Take a server; nothing is sent.

        url: of `chat_url`. model: the server's name of it. ids: one of IDS. key: sent as a bearer token, and never
            shown. timeout_s: longest time of one attempt, to connect and again to read the whole answer.
        Raises: ValueError for a key that no header can hold.
        """
        key = (key or "").strip()
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise ValueError("the key of the server has a character that no header can hold")
        self.url, self._model, self._ids, self._key = url, model, ids, key
        self._timeout_s, self._waits = timeout_s, waits
        self._opener = urllib.request.build_opener(_NoRedirect, _Timed)
        self._asks_ids = ids != "never"
        self._has_ids = ids == "require"
        self.stopped = threading.Event()
        """Set: no further attempt is made."""

    def ask(self, question: Mapping[str, Any]) -> Answer:
        """Return the server's answer to a question, the fields of the API without the model.

        Raises: ServerError E613 after the last attempt; ServerRefusal E614 for a refusal or a broken answer.
        """
        question = {"model": self._model, "stream": False, **question}
        if not self._asks_ids:
            return self._read(self._posted(question))
        try:
            body = self._posted({**question, "return_token_ids": True, "return_prompt_token_ids": True})
        except ServerRefusal as error:
            if self._has_ids or error.status not in (400, 422):
                raise
            answer = self._read(self._posted(question))
            self._asks_ids = False  # only now: the question itself may have been at fault
            return answer
        answer = self._read(body)
        self._has_ids |= answer.ids is not None
        if self._ids == "require" and answer.ids is None:
            raise ServerRefusal(f"{self.url}: the answer has no token_ids, and --server-ids is require")
        return answer

    def _read(self, body: bytes) -> Answer:
        try:
            answer = parsed(body)
        except (ValueError, RecursionError) as error:
            found = self._shown(error)  # not its cause, which holds the body
            raise ServerRefusal(f"{self.url}: not an answer of the chat-completions API: {found}") from None
        return answer._replace(served=tuple(ascii(self._shown(each)[:_NAME])[1:-1] for each in answer.served))

    def _posted(self, question: Mapping[str, Any]) -> bytes:
        """Return the body of the answer, after as many attempts as it needs."""
        data = json.dumps(question).encode()
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return self._post(data)
            except ServerRefusal:
                raise
            except (_Passing, OSError, HTTPException) as error:
                found, asked = self._shown(error), getattr(error, "asked_s", None)
                status = getattr(error, "status", None)
            seconds = self._waits.after(attempt, asked)
            if attempt == ATTEMPTS or seconds > LONGEST_RETRY_AFTER_S or self.stopped.is_set():
                failed = ServerError(f"{self.url}: {attempt} attempts without an answer, the last one: {found}")
                failed.status = status
                raise failed
            text = "%s: attempt %d of %d failed (%s); again in %.1f s"
            logger.warning(text, self.url, attempt, ATTEMPTS, found, seconds, extra={"code": "W613"})
            self.stopped.wait(seconds)
        raise AssertionError

    def _post(self, data: bytes) -> bytes:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        headers |= {"Authorization": f"Bearer {self._key}"} if self._key else {}
        request = urllib.request.Request(f"{self.url}/chat/completions", data, headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._timeout_s) as answer:
                return self._body(answer)
        except HTTPError as error:
            with error:
                if 300 <= error.code < 400:
                    place = self._shown(error.headers.get("Location"))
                    found = f"it answers {error.code}, a redirect to {place}, which is not followed"
                    raise ServerRefusal(f"{self.url}: {found}", status=error.code) from None
                found = f"{error.code} {self._shown(_words(self._body(error)))}"
                if is_passing(error.code):
                    raise _Passing(found, error.code, asked_seconds(dict(error.headers))) from None
                raise ServerRefusal(f"{self.url}: refuses the question: {found}", status=error.code) from None

    def _body(self, answer: HTTPResponse | HTTPError) -> bytes:
        found = bytearray()
        while piece := answer.read1(_PIECE):
            found += piece
            if len(found) > MOST_BYTES:
                raise ServerRefusal(f"{self.url}: the answer has more than {MOST_BYTES:,} bytes")
        if missing := getattr(answer, "length", None):  # read1 says nothing of it
            raise HTTPException(f"the answer ends {missing:,} bytes early")
        return bytes(found)

    def _shown(self, words: object) -> str:
        """Return words of the server, or of an error, on one line, shortened and without the key."""
        text = str(words).replace(self._key, "***") if self._key else str(words)
        return "".join(each if each.isprintable() else " " for each in text[:_WORDS]) or type(words).__name__


class _Passing(Exception):
    """A status that a later attempt may not get."""

    def __init__(self, found: str, status: int, asked_s: float | None) -> None:
        super().__init__(found)
        self.status, self.asked_s = status, asked_s


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class _Reads(io.RawIOBase):
    """Reads a socket for its timeout in all: the socket's own begins again with each byte, of a header too."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._raw, self._seconds = sock, sock.makefile("rb", buffering=0), sock.gettimeout() or 0.0
        self._end = time.monotonic() + self._seconds

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int | None:
        left = self._end - time.monotonic()
        try:
            if left > 0:
                self._socket.settimeout(left)
                return self._raw.readinto(into)
        except TimeoutError:
            pass
        raise TimeoutError(f"no whole answer in {self._seconds:g} s")

    def close(self) -> None:
        self._raw.close()
        super().close()


class _TimedAnswer(HTTPResponse):
    def __init__(self, sock: socket.socket, *more: Any, **named: Any) -> None:
        super().__init__(sock, *more, **named)
        self.fp.close()
        self.fp = io.BufferedReader(_Reads(sock))


class _Plain(HTTPConnection):
    response_class = _TimedAnswer


class _Secure(HTTPSConnection):
    response_class = _TimedAnswer


class _Timed(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_Plain, req)

    def https_open(self, req: urllib.request.Request) -> HTTPResponse:
        return self.do_open(_Secure, req)


def _words(body: bytes) -> str:
    """Return the words of an error: of the fields that servers have for it, else the whole body."""
    text = body.decode("utf-8", "replace")
    try:
        value = json.loads(text)
        while isinstance(value, dict):
            value = next(value[name] for name in ("error", "message", "detail") if name in value)
    except (ValueError, RecursionError, StopIteration):
        return text
    return value if isinstance(value, str) else json.dumps(value)


# --- an answer, by field ----------------------------------------------------------------------------------------------


def parsed(body: bytes) -> Answer:
    """Read an answer. Raises: ValueError naming the field."""
    answer = _of_kind(json.loads(body), dict, "the answer")
    choices = _of_kind(answer.get("choices"), list, "choices")
    choice = _of_kind(choices[0] if choices else None, dict, "choices[0]")
    message = _of_kind(choice.get("message"), dict, "choices[0].message")
    usage = _of_kind(answer.get("usage") or {}, dict, "usage")
    prompt_ids = answer.get("prompt_token_ids")  # vLLM; SGLang has it in the choice
    named = [answer.get(name) for name in ("model", "system_fingerprint")]
    return Answer(
        text=_of_kind(message.get("content") or "", str, "choices[0].message.content"),
        finish=_of_kind(choice.get("finish_reason") or "", str, "choices[0].finish_reason"),
        ids=_ids(choice.get("token_ids"), "choices[0].token_ids"),
        prompt_ids=_ids(choice.get("prompt_token_ids") if prompt_ids is None else prompt_ids, "prompt_token_ids"),
        prompt_tokens=_count(usage.get("prompt_tokens"), "usage.prompt_tokens"),
        tokens=_count(usage.get("completion_tokens"), "usage.completion_tokens"),
        has_reasoning=any(message.get(name) for name in ("reasoning_content", "reasoning")),
        calls_tools=bool(message.get("tool_calls")),
        served=tuple(name for name in named if isinstance(name, str) and name),
    )


def _of_kind(value: Any, kind: type, name: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{name} is a value of type {type(value).__name__}, expected {kind.__name__}")
    return value


def _ids(value: Any, name: str) -> list[int] | None:
    if value is None:
        return None
    ids: list[int] = _of_kind(value, list, name)
    if not all(type(each) is int and 0 <= each < _MOST_ID for each in ids):
        raise ValueError(f"{name} has a value that is no id")
    return ids


def _count(value: Any, name: str) -> int | None:
    if value is not None and (type(value) is not int or value < 0):
        raise ValueError(f"{name} is {value!r:.40}, expected a count")
    return value


# --- chats by a server ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Talk:
    """What all questions to a server have in common."""

    client: Client
    tokenizer: ChatTokenizer
    stop_ids: tuple[int, ...]
    """Tokens that end a turn."""
    sampling: Sampling
    form: str
    """One of FORMS."""
    max_positions: int | None
    """Most tokens of prompt and reply; None: no limit."""


class _Asked(NamedTuple):
    """A question that is on its way."""

    number: int
    answered: Answered
    prompt: Chat
    ids: list[int]
    room: int
    question: dict[str, Any]


def replied(
    chats: Iterator[tuple[int, Answered]], talk: Talk, *, at_once: int, has_replies: bool
) -> Generator[tuple[int, Answered]]:
    """Yield each chat, with its number, once it has ended, in any order. Only the caller's thread tokenizes.

    at_once: questions on their way together. has_replies: an earlier run got replies, so that one chat which the
    server refuses, or to which it has another prompt, does not end this run.
    Raises: ServerError and ServerRefusal; ValueError for a template that cannot be used.
    """
    questions, answers = queue.SimpleQueue[_Asked | None](), queue.SimpleQueue[tuple[_Asked, Answer | Exception]]()
    for _ in range(at_once):  # daemons: a run that ends early does not wait for their answers
        threading.Thread(target=_work, args=(talk.client, questions, answers), daemon=True).start()
    seen, held, on_way = Counter[str](), list[tuple[_Asked, Exception]](), 0
    try:
        while True:
            item = next(chats, None) if on_way < at_once and (has_replies or not held) else None
            if item is None:
                if not on_way:
                    break
                asked, answer = answers.get()
                on_way -= 1
                if isinstance(answer, Exception):
                    status = getattr(answer, "status", None)
                    if status not in _OF_ONE_CHAT or (has_replies and len(held) == _FAILURES):
                        raise answer
                    held.append((asked, answer))
                    if status == _FAILED or not has_replies:
                        continue  # does the server reply to others?
                else:
                    has_replies |= _take(asked, answer, talk, seen, is_first=not has_replies)
                    item = asked.number, asked.answered
                yield from _refused(held, seen)
            if item is None:
                continue
            if (question := _next_question(*item, talk)) is None:
                item[1].close()
                yield item
            else:
                questions.put(question)
                on_way += 1
        if held and not has_replies:
            raise held[0][1]
        yield from _refused(held, seen)
    finally:
        talk.client.stopped.set()
        for _ in range(at_once):
            questions.put(None)


def _refused(held: list[tuple[_Asked, Exception]], seen: Counter[str]) -> Iterator[tuple[int, Answered]]:
    """End the chats that the server refused, and forget them. seen: counts the ones that are shown."""
    for asked, error in held:
        asked.answered.end(REFUSED)
        asked.answered.close()
        seen[REFUSED] += 1
        if seen[REFUSED] <= _REFUSALS:
            logger.warning("chat %a: %s", asked.prompt.name[:_NAME], error, extra={"code": "W613"})
        yield asked.number, asked.answered
    held.clear()


def _work(client: Client, questions: Any, answers: Any) -> None:
    while (asked := questions.get()) is not None:
        try:
            answers.put((asked, client.ask(asked.question)))
        except Exception as error:  # raised, or counted, by the thread that asked
            answers.put((asked, error))


def _next_question(number: int, answered: Answered, talk: Talk) -> _Asked | None:
    """Return the question for a chat's next reply; None if the chat has ended."""
    for _, prompt, ids in next_prompts([answered], talk.tokenizer, talk.form):
        sampling = talk.sampling
        room = sampling.room(len(ids), talk.max_positions)
        if not room:
            answered.end(OVER_CONTEXT)
            return None
        question = {
            "messages": api_messages(prompt.messages),
            "max_tokens": room,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": chance_of(sampling.seed, prompt_name(answered, prompt)) % _MOST_ID,
        }
        if prompt.tools is not None:
            question["tools"] = prompt.tools
        return _Asked(number, answered, prompt, ids, room, question)
    return None


def api_messages(messages: Messages) -> list[dict[str, Any]]:
    """Return messages as the API has them: no weight, and calls with id, type, and arguments as JSON in a string."""
    made = [{name: value for name, value in message.items() if name != "weight"} for message in messages]
    for message in made:
        if message.get("tool_calls"):
            message["tool_calls"] = [_api_call(call, number) for number, call in enumerate(message["tool_calls"])]
    return made


def _api_call(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    function = dict(call.get("function", call))
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    made = {"name": function.get("name"), "arguments": text}
    return {"id": call.get("id") or f"call_{number}", "type": "function", "function": made}


def _take(asked: _Asked, answer: Answer, talk: Talk, seen: Counter[str], *, is_first: bool) -> bool:
    """Add an answer to its chat, or end the chat; return whether the server replied to the prompt.

    seen: how often each name was stated. is_first: no answer fitted so far, so that another prompt is an error.
    """
    answered = asked.answered
    for name in answer.served:
        is_counted = name in seen or len(seen) < _NAMES
        seen[name] += is_counted
        answered.counts[SERVED + (name if is_counted else "other names")] += 1
    if (other := _other_prompt(asked, answer, talk)) is not None:
        if is_first:
            raise ServerRefusal(
                f"{talk.client.url}: it reads another prompt than the template of {talk.tokenizer.name} writes: "
                f"{other}. Name the template that the server has, --chat-template FILE, or start the server with ours"
            )
        answered.end(OTHER_PROMPT)
        return False
    if answer.prompt_ids is None and answer.prompt_tokens is None:
        answered.counts[NOT_COMPARED] += 1
    reply = reply_of(answer, asked.prompt, asked.ids, asked.room, talk, answered)
    if isinstance(reply, str):
        answered.end(reply)
    else:
        add_reply(answered, asked.prompt, asked.ids, reply, talk.tokenizer)
    return True


def _other_prompt(asked: _Asked, answer: Answer, talk: Talk) -> str | None:
    """Return how the server's prompt differs; None if it does not, or if the server says nothing of it."""
    ours, theirs = asked.ids, answer.prompt_ids
    chat = f"chat {asked.prompt.name[:_NAME]!a}"
    if theirs is None:
        number = answer.prompt_tokens
        return None if number in (None, len(ours)) else f"{chat} has {number:,} tokens there, and {len(ours):,} here"
    if ours == theirs:
        return None
    at = next((at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
    tokenizer = talk.tokenizer
    few = [[each for each in ids[at:][:_FEW] if each < tokenizer.vocab_size] for ids in (theirs, ours)]
    return f"{chat}, token {at}: {tokenizer.decode(few[0])!a} there, and {tokenizer.decode(few[1])!a} here"


def reply_of(answer: Answer, prompt: Chat, ids: list[int], room: int, talk: Talk, answered: Answered) -> Reply | str:
    """Return the reply in an answer, or why it is dropped. ids: of the prompt. room: most tokens of the reply."""
    is_cut, cut = answer.finish == "length", talk.sampling.cut_at(room)
    if answer.finish not in ("stop", "length", "tool_calls", "function_call"):
        return NO_END
    if (len(answer.ids) if answer.ids is not None else answer.tokens or 0) > room:
        return TOO_LONG
    if answer.ids is not None:
        answered.counts[GIVEN_IDS] += 1
        if any(each >= talk.tokenizer.vocab_size for each in answer.ids):
            return OTHER_TEXT  # a row of the model beyond the tokenizer, which has no text
        own, stop = up_to_stop(answer.ids, talk.stop_ids)
        if talk.form == MESSAGES and "\ufffd" in talk.tokenizer.decode(own):
            return REPLACED
        if is_cut and stop is None:
            return Reply(own, None, cut)
        return Reply(own, talk.stop_ids[0] if stop is None else stop, STOP)
    answered.counts[TOKENIZED] += 1
    if answer.calls_tools or answer.finish not in ("stop", "length"):
        return CALLS_TOOLS
    if answer.has_reasoning:
        return SPLIT_OFF
    if "\ufffd" in answer.text:
        return REPLACED
    found = _tokenized(answer.text, prompt, ids, talk)
    if isinstance(found, str):
        return found
    own, end = found
    if answer.tokens is None and len(own) > room:
        return TOO_LONG
    if answer.tokens is not None and answer.tokens - len(own) not in (0, 1):
        answered.counts[OTHER_LENGTH] += 1
    return Reply(own, None, cut) if is_cut else Reply(own, end, STOP)


def _tokenized(text: str, prompt: Chat, ids: list[int], talk: Talk) -> tuple[list[int], int] | str:
    """Return the ids of a reply's text and of its end, as the template writes them; or why there are none.

    A template may add white space that the target wrote itself: then the stripped text may have the reply's ids.
    """
    if not text.strip():
        return [], talk.stop_ids[0]
    reason = NOT_STABLE
    for content in dict.fromkeys((text, text.strip())):
        messages: Sequence[Mapping[str, Any]] = [*prompt.messages, {"role": "assistant", "content": content}]
        (whole,) = talk.tokenizer.plain_ids([prompt._replace(messages=messages)], prompt=False)
        if isinstance(whole, RefusedChat):
            reason = whole.reason
        elif whole[: len(ids)] == ids:
            own, stop = up_to_stop(whole[len(ids) :], talk.stop_ids)
            if talk.tokenizer.decode(own).strip() == text.strip():
                return own, talk.stop_ids[0] if stop is None else stop
            reason = OTHER_TEXT
    return reason
