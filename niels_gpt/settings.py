"""All settings of builds in one frozen dataclass; the command line makes a flag of each field.

A field's `metadata["help"]` is the flag's help text: meaning, unit, and the source of the default.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import Any


def usable_cores() -> int:
    """Return how many cores this process may use; all cores if the system cannot tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


RENAMED = {"tokenizer_model": "tokenizer", "append_eot": "document_end"}
"""Settings of earlier versions, and their new names."""


OF_TOKENIZER = "tokenizer"
"""Value of chat_template: the template in the tokenizer's folder."""


def _setting(
    default: Any, text: str, least: float | None = None, most: float | None = None, *, below: float | None = None
) -> Any:
    return field(default=default, metadata={"help": text, "least": least, "most": most, "below": below})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings of all recipes. A recipe's fingerprint contains those that decide bytes, not folders or threads."""

    seed: int = _setting(42, "seed of every split and shuffle (PR-03)", least=-(2**63), most=2**64 - 1)
    source_root: str = _setting("hub", "source of the text: hub, sample (bundled), or the folder of a mirror")
    cache_dir: str = _setting("cache", "folder for the caches; --source-root sample builds in its folder sample/")
    max_document_bytes: int = _setting(
        2**26, "limit of a document's or row's bytes (64 MiB); larger ones are left out and counted", least=1
    )
    follow_links: bool = _setting(False, "follow symbolic links in mirrors, notes and your own files")
    exclude: str | None = _setting(None, "file of documents to leave out, one a line: source id or sha256 of the text")
    revision: str | None = _setting(
        None,
        "hub revisions, SOURCE=COMMIT_TAG_OR_BRANCH,...; SOURCE may be `tokenizer`. Default: the revision of the "
        "cache's last build, at first main",
    )
    partitions: int = _setting(
        1,
        "number of partitions of each cache; each can be built by itself, on any machine. It decides the order of the "
        "tokens. 1: no partitions",
        least=1,
        most=100_000,
    )
    lock: str = _setting(
        "auto",
        "how a build locks the folder of caches: flock; lease, for file systems where flock does not reach other "
        "machines; auto: as before in this folder, at first flock. Never changes the output",
    )
    accept_code: bool = _setting(
        False,
        "continue partitions that another version of this format or of a library began; meta.json names the versions",
    )
    threads: int = _setting(0, "threads of the tokenizer; 0: all usable cores. Never changes the output", least=0)

    tokenizer: str | None = _setting(
        None, "tokenizer to use: a folder, a tokenizer.json, a SentencePiece model, or a hub id. Default: train one"
    )
    engine: str = _setting(
        "auto", "library that encodes: gigatoken, reference (the tokenizer's own), or auto. Never changes the output"
    )
    tokenizer_kind: str = _setting(
        "sentencepiece", "kind of tokenizer to train: sentencepiece, or bpe (a byte-level tokenizer.json)"
    )
    vocab_size: int = _setting(
        16_000, "ids of a tokenizer trained here, the four sentinels included (PR-03: ~16k)", least=1
    )
    model_type: str = _setting("unigram", "SentencePiece model type to train: unigram or bpe (PR-01)")
    normalization: str = _setting("identity", "SentencePiece normalization rule; identity changes no text")
    character_coverage: float = _setting(
        0.9999, "share of characters with an id of their own; others are encoded as bytes", least=0, most=1
    )
    tokenizer_max_bytes: int = _setting(
        100_000_000, "limit of the text that a tokenizer is trained on, in UTF-8 bytes", least=1
    )

    retrain_tokenizer: bool = _setting(
        False, "train a new tokenizer on this build's sources, and replace the one in the folder of caches"
    )

    shard_bytes: int = _setting(2**27, "bytes of a pretrain shard (128 MiB) (PR-03)", least=2)
    shuffle_buffer: int = _setting(10_000, "documents in the shuffle buffer of fineweb_edu; 0: none (PR-03)", least=0)
    document_start: str | None = _setting(
        None,
        "token before each document, except wikitext's lines: none; auto: the one that a tokenizer.json adds before "
        "a text; or a token such as <bos>. Default: none, with a warning if auto would add one",
    )
    document_end: str = _setting(
        "auto",
        "token after each document, except wikitext's lines: eot (the sentinel <|eot|>), eos (the tokenizer's), auto "
        "(eot if there is one, else eos), none, or a token such as <|endoftext|>",
    )
    chat_template: str | None = _setting(
        None,
        "template of sft caches: tokenizer (from its folder), or a Jinja file. Default: niels-gpt's own",
    )
    loss_on: str = _setting(
        "assistant",
        "assistant turns that carry loss, with --chat-template: assistant (turns without tool calls), tool_calls "
        "(turns with them), assistant,tool_calls (all), or last (the last one)",
    )
    on_special: str = _setting(
        "drop", "text that contains a special token: drop it, raise an error, or encode it as plain text; counted"
    )

    fineweb_edu_dataset: str = _setting("HuggingFaceFW/fineweb-edu", "dataset id (PR-03)")
    fineweb_edu_config: str = _setting("CC-MAIN-2024-10", "dataset config (PR-03)")
    fineweb_edu_train_tokens: int = _setting(200_000_000, "token budget of train (PR-03)", least=0)
    fineweb_edu_val_tokens: int = _setting(5_000_000, "token budget of val (PR-03)", least=0)

    wikitext_dataset: str = _setting("Salesforce/wikitext", "dataset id")
    wikitext_config: str = _setting("wikitext-103-raw-v1", "dataset config (PR-02)")

    roam_dir: str = _setting("data/roam", "folder of Markdown notes, for --source-root hub; a mirror has its own roam/")
    roam_val_frac: float = _setting(0.10, "share of the notes in val, by file (PR-02)", least=0, most=1)

    gutenberg_dataset: str = _setting("nikolina-p/gutenberg_clean_en_splits", "dataset id (PR-02)")
    gutenberg_from_hub: bool = _setting(
        False, "stream gutenberg from the hub; without it, its cache is empty there (PR-03)"
    )
    gutenberg_shuffle_buffer: int = _setting(0, "books in the shuffle buffer, about 0.5 MB each; 0: none", least=0)
    gutenberg_train_tokens: int = _setting(200_000_000, "token budget of train", least=0)
    gutenberg_val_tokens: int = _setting(5_000_000, "token budget of val", least=0)

    sft_val_frac: float = _setting(0.10, "share of the examples in val (PR-03)", least=0, most=1)
    dolly_dataset: str = _setting("databricks/databricks-dolly-15k", "dataset id (PR-02)")
    dolly_include_system: bool = _setting(False, "start each dolly chat with a system message (PR-02)")
    oasst1_dataset: str = _setting("OpenAssistant/oasst1", "dataset id (PR-02)")
    oasst1_english_only: bool = _setting(True, "keep only English messages (PR-02)")
    oasst1_max_messages: int = _setting(32, "limit of a thread's messages (PR-02)", least=1)

    pretrain: str | None = _setting(
        None, "your own text: NAME=GLOB[:FIELD] builds pretrain/NAME; several are separated by ';'"
    )
    sft: str | None = _setting(None, "your own chats: NAME=GLOB builds sft/NAME; several are separated by ';'")
    rollouts: str | None = _setting(
        None, "your own recorded rollouts: NAME=GLOB builds rollouts/NAME; several are separated by ';'"
    )
    as_text: str | None = _setting(
        None, "more suffixes of your own files to read as plain text, separated by ',': .py,.tex"
    )
    sources_file: str = _setting("sources.toml", "file that lists more sources of your own, if it exists")
    licence: str | None = _setting(
        None, "licence of a source, instead of its dataset card's or the one in sources.toml: SOURCE=TEXT;..."
    )
    attribution: str | None = _setting(None, "whom to credit for a source: SOURCE=TEXT;...")
    own_val_frac: float = _setting(0.10, "share of your own documents in val", least=0, most=1)
    rollouts_val_frac: float = _setting(0.0, "share of your own rollouts in val, by group id", least=0, below=1)
    rollouts_vocab_size: int = _setting(
        0,
        "vocabulary size of the model that made your own rollouts; samples with larger ids are dropped. 0: unknown",
        least=0,
        most=2**31,
    )

    eagle3_target: str | None = _setting(
        None, "target model of eagle3/targets: folder or hub id. Default: a small random Llama, for the sample only"
    )
    eagle3_source: str = _setting(
        "dolly15k", "chats of eagle3/targets: dolly15k, oasst1, a source of your own, or files of chats or ids"
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
    eagle3_made_for: str | None = _setting(
        None,
        "draft that a native cache is for: eagle3, peagle, dflash, dspark or mtp; decides its layers and target rows, "
        "unless they are named (default: eagle3)",
    )
    eagle3_aux_layers: str | None = _setting(
        None,
        "layers of the target that a draft sees: eagle3 (1, n/2-1 and n-4 of n), dflash:N or dspark:N (N evenly "
        "spaced), none, or numbers from 0 such as 1,15,28; formats 1 and 2 have three (default: as the draft reads "
        "them)",
    )
    eagle3_target_rows: str | None = _setting(
        None,
        "tokens whose last hidden state a native cache stores: loss (as EAGLE-3 reads them), reply (also the token "
        "before each reply) or all (default: as the draft reads them)",
    )
    eagle3_topk: int = _setting(0, "largest probabilities kept for a token, scaled to sum to 1; 0: all", least=0)
    eagle3_shard_size: int = _setting(256, "samples in a shard, a file of the cache", least=1)
    eagle3_dtype: str = _setting("bf16", "dtype of stored states and probabilities: bf16, fp16 or fp32")
    eagle3_batch_size: int = _setting(4, "most samples in one forward pass of the target", least=1)
    eagle3_device: str | None = _setting(
        None, "where the target runs: cpu or cuda; none: cuda if available. It never causes a rebuild"
    )
    eagle3_device_map: str | None = _setting(
        None,
        "spread the target over GPUs, CPU memory and disk: auto, balanced, balanced_low_0, sequential, or a JSON file "
        "of module -> GPU number, cpu or disk (default: all on the device)",
    )
    eagle3_max_memory: str | None = _setting(
        None,
        "most bytes of weights by device, for a map that is not a file: 0=70GiB,cpu=200GiB (default: what is free)",
    )
    eagle3_quantization: str | None = _setting(
        None,
        "quantize weights as they load: torchao:int8wo, torchao:float8wo, bitsandbytes:8bit or bitsandbytes:4bit "
        "(default: no)",
    )
    eagle3_load_dtype: str | None = _setting(
        None, "dtype of the weights in memory; a block is cast as it runs: bf16, fp16 or fp32 (default: as it computes)"
    )
    eagle3_tensor_parallel: int = _setting(
        1,
        "processes, each with a GPU, that hold one copy of the target. It never causes a rebuild; an unfinished build "
        "continues with the same number only",
        least=1,
    )
    eagle3_check_samples: int = _setting(
        2, "samples of eagle3/targets to run through the target again, as a check; 0: none", least=0
    )

    disk_check: bool = _setting(True, "refuse a build that would not fit on the disk, before it starts")
    deep_checks: bool = _setting(False, "also check the sha256 of every file after the build")
    max_dropped_share: float = _setting(
        0.05, "warn if a larger share of the documents or examples is dropped", least=0, most=1
    )

    def __post_init__(self) -> None:
        """Check the values before a build starts. Raises: ValueError that names the flag."""
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


def __getattr__(name: str) -> Any:
    from niels_gpt.storage.codes import earlier_name

    return earlier_name(__name__, name, {"UsageError": "storage.errors"})
