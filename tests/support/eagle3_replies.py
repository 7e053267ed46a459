"""The target's own replies without the command: a model that speaks, chats that are answered, the file of replies."""

from contextlib import contextmanager

import pytest

from niels_gpt.eagle3.replies import Finished, Prompt, Reply, ReplyFile, Sampling, opened, reply_to_all, started
from niels_gpt.eagle3.speaker import Speaker
from niels_gpt.recipes.eagle3 import respond

END = 3
"""Id of <|im_end|>."""


def speaker_of(model, *, vocab_size, max_positions):
    """A model that replies: END ends a reply, 0 pads."""
    return Speaker(model, (END,), pad_id=0, vocab_size=vocab_size, max_positions=max_positions)


def replies_of(speaker, prompts, **how):
    """What it replies to prompts, each a name and ids. how: max_new_tokens, temperature, top_p and seed.

    A reply has ids, the id that ended it or None, and why it ends: stop, length or context.
    """
    return speaker.replies([Prompt(*prompt) for prompt in prompts], Sampling(**how))


def unanswered(chat, turns):
    """A chat before its first reply."""
    return started(chat, turns)


def answered(tokenizer, chat, *texts, turns="all", form="messages"):
    """Reply to a chat with these texts in turn, each ended unless it ends with "..."; returns it and the prompts."""
    prompts, left = list[str](), list(texts)

    def generate(asked):
        prompts.extend(tokenizer.decode(prompt.ids) for prompt in asked)
        said = [left.pop(0) for _ in asked]
        ids = [tokenizer._backend.encoded([text])[0][0] for text in said]
        cut = [text.endswith("...") for text in said]
        return [
            Reply(*(each, None, "length") if at else (each, END, "stop")) for each, at in zip(ids, cut, strict=True)
        ]

    found = started(chat, turns)
    reply_to_all([found], tokenizer, generate, form)
    assert not left
    return found, prompts


@contextmanager
def reply_file(path):
    """A file of replies that this process makes."""
    with opened(path, {}) as file:
        assert isinstance(file, ReplyFile)
        yield file


def finished(number):
    """A chat that has ended, with a row."""
    return Finished(number, [{}], {})


@contextmanager
def appending(call):
    """Let a run call `call(append, file, chats)` in place of adding chats to its file."""
    append = ReplyFile.append
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplyFile, "append", lambda file, chats: call(append, file, chats))
        yield


@contextmanager
def without_target():
    """Fail where a run loads the target."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(respond, "_load", lambda _: pytest.fail("the target was loaded"))
        yield
