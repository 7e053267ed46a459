"""The family sft: build chats to sft/NAME, by the project's own template or the one in the settings."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from niels_gpt.cache.build_sft import build_sft
from niels_gpt.cache.build_templated import build_templated_sft
from niels_gpt.cache.joining import warn_of_empty_val
from niels_gpt.chat.chats import check_loss_on
from niels_gpt.chat.protocol import ChatTokenizer
from niels_gpt.chat.template import problem_of
from niels_gpt.chat.tokenizers import CacheBackend, template_tokenizer
from niels_gpt.data.local import LocalFiles
from niels_gpt.data.spec import LoadRequest, Part, SourceSpec
from niels_gpt.recipes import sources
from niels_gpt.recipes.family import Family, Job
from niels_gpt.recipes.request import Request
from niels_gpt.recipes.tokenizer import tokenizer_state
from niels_gpt.settings import OF_TOKENIZER, Settings
from niels_gpt.storage.errors import CacheError, NotFound, errors_as
from niels_gpt.tokenizers.files import TOKENIZER_JSON, read_file
from niels_gpt.tokenizers.huggingface import HuggingFaceTokenizer
from niels_gpt.tokenizers.protocol import FullTokenizer

logger = logging.getLogger(__name__)

MAX_BYTES = 1 << 22
"""Most bytes of a template file: four bytes for each character that it may have."""
# <|im_end|>, also with full-width bars; <end_of_turn>; <s>; [INST]
_MARK = re.compile(r"<[|｜][\w.▁-]{1,40}[|｜]>|<(?:start|end)_of_\w{1,40}>|</?s>|\[/?[A-Z][A-Z_]{1,40}\]")
_SHOWN = 5  # marks in a warning
_OF_TEMPLATE = ("chat_template", "loss_on")
"""Settings that decide the template of a cache of chats. They count only if one is named."""


def template_text(settings: Settings) -> str | None:
    """Return the text of the template file in the settings; None for the tokenizer's own.

    Raises: FileNotFoundError; CacheError E205 for anything but a file, E407 for a file that is not text or too large.
    """
    if settings.chat_template in (None, OF_TOKENIZER):
        return None
    path = Path(str(settings.chat_template)).expanduser()
    try:
        return read_file(path, MAX_BYTES, "a chat template", follow_links=True).decode("utf-8-sig")
    except FileNotFoundError:
        problem = f"--chat-template {settings.chat_template}: no such file, expected {OF_TOKENIZER} or a file of jinja"
        raise NotFound(problem) from None
    except CacheError as error:
        if error.code != "E205":
            raise
        named = f"--chat-template {settings.chat_template or repr('')}"
        raise CacheError(named, "is not a regular file", f"{OF_TOKENIZER} or a file of jinja", code="E205") from None
    except UnicodeDecodeError as error:
        raise CacheError(path, f"not UTF-8 at byte {error.start}", "a chat template in jinja", code="E407") from None


def _is_sentencepiece(named: str) -> CacheError:
    return CacheError(
        named,
        "a SentencePiece model, which does not say which characters a token has",
        f"a tokenizer of Hugging Face: --chat-template needs a {TOKENIZER_JSON}",
        "Name the folder of one with --tokenizer, train one with --tokenizer-kind bpe, or leave --chat-template out: "
        "the chats are then written in the project's own template",
        code="E408",
    )


def opened_template(settings: Settings, tokenizer: FullTokenizer, where: Path) -> ChatTokenizer:
    """Return the tokenizer of chats by the template in the settings.

    where: folder or file of the tokenizer, for messages.
    Raises: CacheError E408 for a tokenizer without tokenizer.json, E407 for one without a template; the errors of
        `template_text` and `template_tokenizer`.
    """
    named = settings.tokenizer or str(where)
    if tokenizer.kind != "huggingface":
        raise _is_sentencepiece(named)
    opened = template_tokenizer(
        cast(HuggingFaceTokenizer, tokenizer),
        template_text(settings),
        loss_on=settings.loss_on,
        file=settings.chat_template if settings.chat_template != OF_TOKENIZER else None,
        copied_from=settings.tokenizer or "",
    )
    if opened.template_sha256 is None:
        raise CacheError(
            named,
            "the tokenizer has no chat template",
            "one in its folder, chat_template.jinja or in tokenizer_config.json",
            "Name the file of a template: --chat-template FILE",
            code="E407",
        )
    return opened


class Chats(Family):
    """Family of caches of chats."""

    name = kind = "sft"
    title, holds = "Token cache", "chats"
    takes_tokenizer = has_text = True
    id_copies = 1

    def load(self, found: LocalFiles, field: str | None, request: LoadRequest, how: dict[str, Any]) -> list[Part]:
        """Return the chats of all rows; for a template, unchanged."""
        return [(None, found.chats(raw=request.raw, **how))]

    def check_early(self, settings: Settings) -> None:
        """Check the template in the settings. Raises: CacheError E407 if it renders no chat, E408 for a SentencePiece
        model."""
        if settings.chat_template is None:
            return
        with errors_as("E407", (ValueError,)):
            check_loss_on(settings.loss_on)
        text = template_text(settings)
        if text is not None and (problem := problem_of(text)) is not None:
            found, expected = problem
            raise CacheError(str(settings.chat_template), found, expected, code="E407")
        if settings.tokenizer_kind == "sentencepiece" and tokenizer_state(settings) == "train":
            raise _is_sentencepiece("--tokenizer-kind sentencepiece")

    def recipe(self, settings: Settings, reads: Sequence[str], tokenizer: FullTokenizer | None) -> dict[str, Any]:
        """Return the settings that decide bytes. Include the sha256 of a named template, and nothing without one, so
        that caches of the project's own template stay current. tokenizer: None if its own template is unknown too."""
        chosen = {name: getattr(settings, name) for name in reads if name not in _OF_TEMPLATE}
        if settings.chat_template is None:
            return chosen
        facts: dict[str, Any] = {"loss_on": settings.loss_on}
        if tokenizer is None:
            text = template_text(settings)
            facts["sha256"] = OF_TOKENIZER if text is None else hashlib.sha256(text.encode()).hexdigest()
        else:
            opened = opened_template(settings, tokenizer, Path(tokenizer.model_path))
            # A template may write bos and its like, which files beside tokenizer.json name.
            facts |= {"sha256": opened.template_sha256, "tokens": opened.names_sha256}
        return {**chosen, _OF_TEMPLATE[0]: facts}

    def needs_sentinels(self, settings: Settings) -> bool:
        """Return whether the project's own template is used, whose roles are sentinels."""
        return settings.chat_template is None

    def check_tokenizer(self, settings: Settings, spec: SourceSpec, tokenizer: FullTokenizer, where: Path) -> None:
        """Raise CacheError E407 or E408 if the template in the settings cannot be used with the tokenizer."""
        if settings.chat_template is not None:
            opened_template(settings, tokenizer, where)

    def asks(self, settings: Settings) -> str:
        """Return the template in the settings, and which turns carry loss; "" for the project's own template."""
        if settings.chat_template is None:
            return ""
        of_file = "of the tokenizer" if settings.chat_template == OF_TOKENIZER else settings.chat_template
        return f"chat template {of_file}, loss on {settings.loss_on}"

    def build(self, request: Request, job: Job) -> dict[str, Any]:
        """Build the cache, or one partition, by the project's own template or the one in the settings."""
        settings, tokenizer = request.settings, request.tokenizer
        assert tokenizer is not None
        common: dict[str, Any] = {
            "tokenizer": tokenizer,
            "val_frac": settings.sft_val_frac,
            "seed": settings.seed,
            "num_threads": request.num_threads,
            "source": job.source,
            "partition": job.partition,
            "plan": job.plan,
            "committed": job.committed,
            "progress": job.progress,
        }
        if settings.chat_template is None:
            chats = sources.chats(*request.reading(job.source), job.partition)
            return build_sft(chats, job.path, on_special=settings.on_special, engine=settings.engine, **common)
        if settings.on_special == "text":
            said = "%s: chats that hold a special token are dropped: a template has no plain form of its tokens"
            logger.info(said, job.path)
        return build_templated_sft(
            sources.template_chats(*request.reading(job.source), job.partition),
            job.path,
            chat_tokenizer=opened_template(settings, tokenizer, job.path),
            on_special="raise" if settings.on_special == "raise" else "drop",
            **common,
        )

    def warn(self, request: Request, meta: Mapping[str, Any]) -> None:
        """Log an empty val (W308), and literals of a template such as <|im_end|> that are no tokens of the tokenizer
        (W412): they become several ids, and a message may hold them too."""
        settings, tokenizer = request.settings, request.tokenizer
        if "partitions" not in meta:
            warn_of_empty_val(request.path, meta, meta["totals"]["train_examples"] - meta["duplicates"]["train"])
        if settings.chat_template is None or tokenizer is None:
            return
        text = template_text(settings)
        if text is None and tokenizer.kind == "huggingface":
            text = CacheBackend(cast(HuggingFaceTokenizer, tokenizer)).template
        marks = dict.fromkeys(_MARK.findall(text or ""))
        unknown = [mark for mark in marks if tokenizer.token_id(mark) is None]
        if unknown:
            message = "%s: the chat template writes %s, which %s no token of the tokenizer: each becomes several ids"
            verb = "is" if len(unknown) == 1 else "are"
            shown = ", ".join(unknown[:_SHOWN])
            logger.warning(message, request.path, shown, verb, extra={"code": "W412"})


SFT = Chats()
