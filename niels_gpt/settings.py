"""Every overridable default, in one frozen dataclass; the CLI makes one flag of each field.

A field's `metadata["help"]` gives its unit, its meaning and its source; it is the flag's help text.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any


def usable_cores() -> int:
    """Return how many cores this process may use; where the system cannot tell, how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


RENAMED = {"tokenizer_model": "tokenizer", "append_eot": "document_end"}
"""Settings of earlier versions, and those that replace them."""


OF_TOKENIZER = "tokenizer"
"""The value of chat_template for the template in the tokenizer's folder."""


class UsageError(ValueError):
    """A setting or argument that asks for something that is not there: exit status 2 of a command."""

    code = "E101"

    def __init__(self, *args: object, code: str = "") -> None:
        super().__init__(*args)
        self.code = code or self.code


def _setting(
    default: Any, text: str, least: float | None = None, most: float | None = None, *, below: float | None = None
) -> Any:
    return field(default=default, metadata={"help": text, "least": least, "most": most, "below": below})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of all recipes. A recipe's fingerprint has those that decide bytes, not places and threads."""

    seed: int = _setting(42, "seed of every split and shuffle (PR-03)", least=-(2**63), most=2**64 - 1)
    source_root: str = _setting("hub", "where text comes from: hub, sample, or the folder of a mirror")
    cache_dir: str = _setting(
        "cache", "folder that receives the caches; source_root=sample builds in its folder sample/"
    )
    max_document_bytes: int = _setting(
        2**26, "bytes of a document or row, at most: 64 MiB; a larger one is left out and counted", least=1
    )
    follow_links: bool = _setting(False, "follow symbolic links in mirrors, notes and files of your own")
    exclude: str | None = _setting(None, "file of ids or sha256 of texts, one a line, whose documents are left out")
    revision: str | None = _setting(
        None,
        "hub revisions to build from, SOURCE=COMMIT_TAG_OR_BRANCH,...; others: as recorded, at first main. A source "
        "may be `tokenizer`",
    )
    partitions: int = _setting(
        1,
        "parts that a cache is built in, each alone and on any machine; they decide the order of its tokens. 1: not "
        "partitioned",
        least=1,
        most=100_000,
    )
    lock: str = _setting(
        "auto",
        "how builders lock the folder of caches: flock, lease (where flock does not reach other machines), or auto, as "
        "the folder says, flock at first. Never changes the output",
    )
    accept_code: bool = _setting(
        False,
        "continue partitions that were started with other versions of this program's format or of its libraries; "
        "meta.json names them",
    )
    threads: int = _setting(0, "tokenizer threads; 0: one per usable core. Never changes the output", least=0)

    tokenizer: str | None = _setting(
        None, "tokenizer to use instead of training one: a folder, a tokenizer.json, a SentencePiece model, a hub id"
    )
    engine: str = _setting(
        "auto", "what encodes: auto, gigatoken, or reference, the tokenizer's own library. Never changes the output"
    )
    tokenizer_kind: str = _setting(
        "sentencepiece", "kind of a tokenizer trained here: sentencepiece, or bpe, a byte-level tokenizer.json"
    )
    vocab_size: int = _setting(
        16_000, "pieces of a tokenizer trained here, the four sentinels included (PR-03: ~16k)", least=1
    )
    model_type: str = _setting("unigram", "SentencePiece model type of a tokenizer trained here (PR-01)")
    normalization: str = _setting("identity", "SentencePiece normalization rule; identity keeps every text as it is")
    character_coverage: float = _setting(
        0.9999, "share of characters that get a piece; the others are encoded as bytes", least=0, most=1
    )
    tokenizer_max_bytes: int = _setting(
        100_000_000, "utf-8 bytes of text that a tokenizer is trained on, at most", least=1
    )

    retrain_tokenizer: bool = _setting(
        False, "train a tokenizer on the sources of this build in place of the one that the folder of caches has"
    )

    shard_bytes: int = _setting(2**27, "bytes of a pretrain shard: 128 MiB (PR-03)", least=2)
    shuffle_buffer: int = _setting(10_000, "documents in the shuffle buffer of fineweb_edu; 0: none (PR-03)", least=0)
    document_start: str | None = _setting(
        None,
        "token before each document but wikitext's lines: none, auto (what the post-processor of a tokenizer.json "
        "writes before a text), or a token such as <bos>; not given: none, with a warning where auto has one",
    )
    document_end: str = _setting(
        "auto",
        "token after each document but wikitext's lines: auto (the end-of-text sentinel, without it the tokenizer's "
        "eos), eot, eos, none, or a token such as <|endoftext|>",
    )
    chat_template: str | None = _setting(
        None,
        "template of sft caches: tokenizer (the one in its folder), or a file of jinja; none: the project's own",
    )
    loss_on: str = _setting(
        "assistant",
        "turns of the assistant that carry loss with a chat_template: assistant (those without tool calls), tool_calls "
        "(those with), assistant,tool_calls (all), or last (the last one)",
    )
    on_special: str = _setting(
        "drop", "text that holds a special token: drop (counted), raise, or text (encoded as plain text, counted)"
    )

    fineweb_edu_dataset: str = _setting("HuggingFaceFW/fineweb-edu", "dataset id (PR-03)")
    fineweb_edu_config: str = _setting("CC-MAIN-2024-10", "dataset config (PR-03)")
    fineweb_edu_train_tokens: int = _setting(200_000_000, "token budget of train (PR-03)", least=0)
    fineweb_edu_val_tokens: int = _setting(5_000_000, "token budget of val (PR-03)", least=0)

    wikitext_dataset: str = _setting("Salesforce/wikitext", "dataset id")
    wikitext_config: str = _setting("wikitext-103-raw-v1", "dataset config (PR-02)")

    roam_dir: str = _setting(
        "data/roam", "folder of markdown notes where source_root is hub; a mirror has its own roam/"
    )
    roam_val_frac: float = _setting(0.10, "share of the notes that goes to val, by file (PR-02)", least=0, most=1)

    gutenberg_dataset: str = _setting("nikolina-p/gutenberg_clean_en_splits", "dataset id (PR-02)")
    gutenberg_from_hub: bool = _setting(False, "stream gutenberg from the hub; off: there, the cache is a stub (PR-03)")
    gutenberg_shuffle_buffer: int = _setting(
        0, "books in the shuffle buffer; 0: none, for a book takes about 0.5 MB", least=0
    )
    gutenberg_train_tokens: int = _setting(200_000_000, "token budget of train", least=0)
    gutenberg_val_tokens: int = _setting(5_000_000, "token budget of val", least=0)

    sft_val_frac: float = _setting(0.10, "share of the examples that goes to val (PR-03)", least=0, most=1)
    dolly_dataset: str = _setting("databricks/databricks-dolly-15k", "dataset id (PR-02)")
    dolly_include_system: bool = _setting(False, "start each dolly chat with a system message (PR-02)")
    oasst1_dataset: str = _setting("OpenAssistant/oasst1", "dataset id (PR-02)")
    oasst1_english_only: bool = _setting(True, "keep only messages whose language is en (PR-02)")
    oasst1_max_messages: int = _setting(32, "messages of a thread, at most (PR-02)", least=1)

    pretrain: str | None = _setting(
        None, "text of your own, NAME=GLOB[:FIELD]: makes the cache pretrain/NAME; several are separated by ';'"
    )
    sft: str | None = _setting(None, "chats of your own, NAME=GLOB: makes the cache sft/NAME; several: as pretrain")
    rollouts: str | None = _setting(
        None, "recorded rollouts of your own, NAME=GLOB: makes the cache rollouts/NAME; several: as pretrain"
    )
    as_text: str | None = _setting(
        None, "suffixes of more files to read as plain text of your own, separated by ',': .py,.tex"
    )
    sources_file: str = _setting(
        "sources.toml", "file that names more of your own text, chats and rollouts, if it is there"
    )
    licence: str | None = _setting(
        None, "licence of a source's text in place of what its dataset card or sources.toml says, SOURCE=TEXT;..."
    )
    attribution: str | None = _setting(None, "whom to name for a source's text, SOURCE=TEXT;...")
    own_val_frac: float = _setting(0.10, "share of the documents of your own text that goes to val", least=0, most=1)
    rollouts_val_frac: float = _setting(
        0.0, "share of the groups of your own rollouts that goes to val, by id", least=0, below=1
    )
    rollouts_vocab_size: int = _setting(
        0,
        "ids of the model that your own rollouts are of; samples with larger ones are dropped. 0: not known",
        least=0,
        most=2**31,
    )

    eagle3_target: str | None = _setting(
        None, "folder or hub id of the target of eagle3/targets; none: a small random Llama, for the sample only"
    )
    eagle3_source: str = _setting(
        "dolly15k", "chats of eagle3/targets: dolly15k, oasst1, a source of your own, or files of chats or rows"
    )
    eagle3_document_start: str | None = _setting(
        None,
        "token before each chat whose template does not write it, without loss: none, auto (as the target's "
        "tokenizer puts one before a text), or a token such as <bos> (default: none; a warning if auto has one)",
    )
    eagle3_max_samples: int = _setting(0, "most samples of eagle3/targets; 0: all of the source", least=0)
    eagle3_seq_length: int = _setting(
        0, "most tokens of a sample; a longer one is cut. 0: 2048, for the small random Llama 256", least=0
    )
    eagle3_draft_vocab_size: int = _setting(
        0,
        "tokens that the draft can propose, at most all of the target's. 0: 32,000, for the small random Llama 512",
        least=0,
    )
    eagle3_format: str | None = _setting(
        None,
        "native (recommended: a third of the bytes, probabilities computed when read), or 1 or 2 (with probabilities, "
        "as NeMo Automodel reads them) (default: 1; 2 if only the largest ones are kept)",
    )
    eagle3_aux_dtype: str | None = _setting(
        None,
        "dtype of the hidden states of --aux-layers in a native cache: bf16, or fp8, which takes half (default: as the "
        "other states)",
    )
    eagle3_aux_layers: str = _setting(
        "eagle3",
        "layers of the target that a draft sees: eagle3 (1, n/2-1 and n-4 of n), dflash:N (N evenly spaced), or "
        "numbers from 0 such as 1,15,28; formats 1 and 2 have three",
    )
    eagle3_topk: int = _setting(0, "largest probabilities kept for a token, rescaled to sum to 1; 0: all", least=0)
    eagle3_shard_size: int = _setting(256, "samples in a shard, a file of the cache", least=1)
    eagle3_dtype: str = _setting("bf16", "dtype of the stored hidden states and probabilities: bf16, fp16 or fp32")
    eagle3_batch_size: int = _setting(4, "most samples in one forward pass of the target", least=1)
    eagle3_device: str | None = _setting(
        None, "where the target runs: cpu or cuda; none: cuda if available. It never causes a rebuild"
    )
    eagle3_check_samples: int = _setting(
        2, "samples that the check of eagle3/targets runs through the target once more; 0: none", least=0
    )

    disk_check: bool = _setting(True, "refuse a build that does not fit on the disk, before it starts")
    deep_checks: bool = _setting(False, "also check the sha256 of every file of a finished cache")
    max_dropped_share: float = _setting(
        0.05, "warn where a larger share of the documents or examples was dropped", least=0, most=1
    )

    def __post_init__(self) -> None:
        """Refuse what nothing can be built with, before anything is. Raises: ValueError naming the flag."""
        if self.chat_template is None and self.loss_on != Settings.loss_on:
            raise ValueError(
                f"loss_on (--loss-on) is {self.loss_on!r}, and no chat_template is named: in the project's own "
                "template every reply carries loss. Name one (--chat-template tokenizer, or a file), or leave loss_on "
                "out"
            )
        for each in fields(self):
            least, most, below = (each.metadata[limit] for limit in ("least", "most", "below"))
            value = getattr(self, each.name)
            is_small = (most is None or value <= most) and (below is None or value < below)
            if least is None or (value >= least and is_small):
                continue
            expected = f"{least} or more" if most is None else f"{least} to {most}"
            expected = expected if below is None else f"{least} or more, below {below}"
            raise ValueError(f"{each.name} (--{each.name.replace('_', '-')}) is {value}, expected {expected}")
