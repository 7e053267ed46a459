"""The token that ends each document of a pretrain cache: the setting `document_end` with a tokenizer."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from niels_gpt.tokenizers.protocol import FullTokenizer

CHOICES = ("auto", "eot", "eos", "none")
"""What is not the literal of a token."""

_KNOWN_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|end|>")  # for the text of an error


@dataclass(frozen=True)
class DocumentEnd:
    """One token."""

    token: str
    """As the vocabulary has it."""
    id: int


def document_end(tokenizer: FullTokenizer, choice: str = "auto") -> DocumentEnd | None:
    """Return the token that ends a document; None for no token.

    choice: "eot", the sentinel; "eos", the end of a text that the tokenizer names; "none"; a token's literal; or
        "auto": eot where the tokenizer has the sentinels, else eos.
    Raises: ValueError for a token that the tokenizer does not have; for "auto" the message names others.
    """
    if choice == "none":
        return None
    eot, eos = tokenizer.special_token_ids().get("eot"), tokenizer.eos_id
    if choice in CHOICES:
        chosen = {"eot": eot, "eos": eos, "auto": eos if eot is None else eot}[choice]
    else:
        chosen = tokenizer.token_id(choice)
    if chosen is not None:
        return DocumentEnd(tokenizer.token(chosen), chosen)
    named: str | None = getattr(tokenizer, "eos_token", None)
    no_eos = (
        "its files name no eos_token" if named is None else f"its files name eos_token {named!a}, which is no token"
    )
    names = {"eot": "it has no sentinels", "eos": no_eos, "auto": no_eos}
    why = names.get(choice, f"it has no token {choice!a}")
    text = f"{tokenizer.model_path}: no token to end a document with: {why}. {_remedy(tokenizer)}"
    raise ValueError(text)


def _remedy(tokenizer: FullTokenizer) -> str:
    known = [token for token in _KNOWN_ENDS if tokenizer.token_id(token) is not None]
    control = [tokenizer.token(each) for each in sorted(tokenizer.control_ids)]
    token = next((each for each in (*known, *control) if each.isprintable()), None)
    named = "" if token is None else f"--document-end {shlex.quote(token)} for this token, or "
    return f"Pass {named}--document-end none for no token"
