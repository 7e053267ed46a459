"""Real tokenizers of transformers, trained here on a few sentences, chat templates of the usual kinds, and chats.

`write_tokenizer(folder, template=CHATML)` writes a folder that AutoTokenizer opens.
"""

from collections import Counter
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from niels_gpt.chat import Chat, Row, chat_rows, rendering, rows, template_tokenizer, tokenizers

Messages = list[dict[str, Any]]

SENTENCES = (
    "Hello there. How are you today?",
    "I am well, thank you. What can I do for you?",
    "Name a river. The river is long, and its water is cold.",
    "Assistant: the answer is yes. User: and why is that?",
    "Sum it up in one line.\nIt rained, and the otter swam.\n",
)
SPECIAL = ("<|pad|>", "<|begin|>", "<|im_start|>", "<|im_end|>", "<|start_header|>", "<|end_header|>", "<|eot|>")
"""Ids 0 to 6 of each tokenizer."""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The same text as CHATML."""
LLAMA_3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header|>' + message.role + '<|end_header|>\n\n' }}"
    "{{ message.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header|>assistant<|end_header|>\n\n' }}{% endif %}"
)
INST = (
    "{% if messages[0].role != 'user' %}{{ raise_exception('a chat begins with the user') }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + message.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)
"""Without a header in front of a reply, and so without a generation prompt."""
PLAIN = (
    "{% for message in messages %}{{ 'User: ' if message.role == 'user' else 'Assistant: ' }}"
    "{{ message.content + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant: ' }}{% endif %}"
)
"""No special token: the space behind "Assistant:" merges with the first word of a reply."""
EARLIER_REPLIES_CUT = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{{ message.content if loop.last or message.role != 'assistant' else message.content.split('</think>')[-1] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As the reasoning models' templates: not prefix-stable where a reply but the last one has reasoning."""
ALWAYS_PROMPTS = LLAMA_3.replace("{% if add_generation_prompt %}", "{% if true %}")
"""As the first one that Llama 3 was published with."""
LAST_REPLY_THINKS = CHATML.replace(
    "message.content +", "('<think></think>' if loop.last and message.role == 'assistant' else '') + message.content +"
)
"""As Qwen 3's: prefix-stable for chats of one turn only."""
TEMPLATES = {"chatml": CHATML, "chatml_marked": CHATML_MARKED, "llama_3": LLAMA_3, "inst": INST, "plain": PLAIN}


def write_tokenizer(
    folder,
    *,
    template=CHATML,
    vocab_size=400,
    trim_offsets=False,
    more=(),
    replaced=None,
    special=(),
):
    """Write a byte-level BPE tokenizer, lossless, with pad, bos and eos but no unk; returns the folder.

    trim_offsets: leave spaces out of the offsets, as RoBERTa's does.
    more: sentences that it is trained on besides.
    replaced: a regular expression and what the tokenizer puts in its place.
    special: more special tokens, behind those of SPECIAL.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[*SPECIAL, *special],
        show_progress=False,
    )
    backend.train_from_iterator((*SENTENCES, *more) * 4, trainer)
    if replaced is not None:
        backend.normalizer = normalizers.Replace(Regex(replaced[0]), replaced[1])
    return save(backend, folder, template=template, pad_token="<|pad|>", bos_token="<|begin|>", eos_token="<|im_end|>")


def write_word_tokenizer(folder, *, template=CHATML):
    """Write a tokenizer of whole words that drops all white space, as BERT's does."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    backend = Tokenizer(models.WordLevel(unk_token="<|unk|>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(special_tokens=[*SPECIAL, "<|unk|>"], show_progress=False)
    backend.train_from_iterator(SENTENCES, trainer)
    return save(backend, folder, template=template, unk_token="<|unk|>")


def save(backend, folder, *, template, **special):
    """Write a tokenizer of the library tokenizers as a folder of transformers."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def turns(*contents, first="user"):
    """Return a chat of user and assistant in turn."""
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[number % 2], "content": text} for number, text in enumerate(contents)]


CHAT = turns("Hello there.", "I am well.", "And why?", "It rained. 🦊")


def rows_of(tokenizer, *chats, seq_length=512, **more):
    """Return the rows of chats, whose ids are chat 0, chat 1 and so on."""
    counters = more.pop("counters", Counter())
    named = (chat if isinstance(chat, Chat) else Chat(f"chat {number}", chat) for number, chat in enumerate(chats))
    return list(chat_rows(named, tokenizer, seq_length=seq_length, counters=counters, **more))


def supervised(tokenizer, row):
    """Return the text of each run of supervised tokens. row: or its ids and mask."""
    ids, mask = (row.input_ids, row.loss_mask) if isinstance(row, Row) else row
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]]).astype(int)))
    return [tokenizer.decode(np.asarray(ids)[start:end].tolist()) for start, end in edges.reshape(-1, 2)]


def dropped(counters):
    """Return how many chats were dropped, for any reason."""
    return sum(number for reason, number in counters.items() if reason not in (rows.ROWS, *rows.NOT_DROPPED))


def rendered(template, *chats):
    """Render the first message of each chat in the process of the templates: "text" or "raised", and which."""
    return list(rendering.PROCESS.render(template, {}, chats, [(each, 1, {}) for each in range(len(chats))]))


def stop_rendering():
    """End the process of the templates; the next template starts another one."""
    rendering.PROCESS.stop()


def backends_of(ours, theirs):
    """Return what gives the ids to a tokenizer of chats, and what would with a tokenizer of transformers."""
    return ours._backend, tokenizers.TransformersBackend(theirs, "")


@contextmanager
def checked_beginnings(*, first, every):
    """Check the beginnings of the `first` chats and then of every so many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template_tokenizer, "_ALL_CHECKED", first)
        patch.setattr(template_tokenizer, "_CHECKED_EVERY", every)
        yield


@contextmanager
def seconds_of_a_template(seconds):
    """Let a template take so much CPU time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "_SECONDS", seconds)
        yield
