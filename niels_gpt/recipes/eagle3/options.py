"""The options of an EAGLE-3 cache and of a file of replies, in one table.

An option states its flag's help and limits, the setting that supplies it in a build, and whether it is in the
fingerprint of eagle3/targets. An option without a text takes help, default and limit from its setting. commands/eagle3
makes a flag of each option with a group.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection
from dataclasses import MISSING, InitVar, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from niels_gpt.hub.models import is_local
from niels_gpt.settings import Settings
from niels_gpt.storage.codes import CodedWarning

if TYPE_CHECKING:
    from niels_gpt.eagle3.replies import Sampling

KEYS = ("eagle3/draft_vocab", "eagle3/targets")
"""The caches, in the order in which they are built."""
GROUPS = ("What", "Form of the cache", "Server", "How")
"""The groups of flags in the help of the command."""
_WHAT, _FORM, _SERVER, _HOW = GROUPS
_SETTINGS = {each.name: each for each in fields(Settings)}
_NATIVE, _DENSE = ("native",), ("1", "2")
"""Forms of a cache."""
_SCHEMES = ("torchao:int8wo", "torchao:float8wo", "bitsandbytes:8bit", "bitsandbytes:4bit")
"""The keys of placement.SCHEMES."""
DRAFTERS = ("eagle3", "peagle", "dflash", "dspark", "mtp")
"""The keys of format.drafters.DRAFTERS."""
TARGETS = ("loss", "reply", "all")
"""format.drafters.TARGETS."""


def _option(
    group: str,
    text: str = "",
    default: Any = None,
    *,
    setting: str = "",
    least: int | None = None,
    forms: tuple[str, ...] = (),
    decides: bool = False,
    is_newer: bool = False,
    **flag: Any,
) -> Any:
    """Return a dataclass field.

    text: help of the flag; "": help, default and limit of the setting. setting: field of Settings that supplies the
        value in a build. forms: forms of the cache that the option applies to; () for all. decides: the value is in the
        fingerprint of eagle3/targets as it is. is_newer: an unset one is left out of it, as older caches were made
        without the option. flag: more keywords of the flag; `choices` also limits the option's value.
    """
    if not text:
        known = _SETTINGS[setting]
        text, default, least = known.metadata["help"], known.default, known.metadata["least"]
    about = {"group": group, "help": text, "least": least, "setting": setting, "forms": forms}
    return field(default=default, metadata={**about, "decides": decides, "is_newer": is_newer, "flag": flag})


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Which target reads which chats, and how it runs. An option of None follows the rule in its help text."""

    target_model: str = _option(
        _WHAT,
        "folder or hub id of the large model whose outputs are stored",
        MISSING,
        setting="eagle3_target",
        required=True,
        metavar="MODEL",
    )
    revision: str | None = _option(_WHAT, "commit, tag or branch of a target on the hub (default: main)", metavar="REV")
    input_data: str = _option(
        _WHAT,
        "chats: name of a source, or files of chats or token rows",
        MISSING,
        setting="eagle3_source",
        decides=True,
        required=True,
        metavar="SOURCE",
    )
    chat_template: str | None = _option(
        _WHAT,
        "chat template, a jinja file (default: tokenizer, its own)",
        decides=True,
        type=Path,
        metavar="FILE",
    )
    """The template's text."""
    document_start: str | None = _option(_WHAT, setting="eagle3_document_start", metavar="TOKEN")
    limit: int | None = _option(
        _WHAT,
        "use only the first N samples, for a trial (default: all)",
        least=1,
        setting="eagle3_max_samples",
        decides=True,
    )
    batch_size: int = _option(_HOW, setting="eagle3_batch_size", decides=True)
    threads: int | None = _option(_HOW, "torch threads of a process (default: all cores, or as resumed)", least=1)
    device: str | None = _option(
        _HOW,
        "where the target runs (default: cuda if available, or as resumed)",
        setting="eagle3_device",
        choices=("cpu", "cuda"),
    )
    compute_dtype: str | None = _option(
        _HOW,
        "dtype of the target's arithmetic (default: bf16 on cuda, fp32 on cpu, or as resumed)",
        choices=("bf16", "fp32"),
    )
    device_map: str | None = _option(_HOW, setting="eagle3_device_map", metavar="MAP")
    max_memory: str | None = _option(_HOW, setting="eagle3_max_memory", metavar="LIMITS")
    quantization: str | None = _option(
        _HOW, setting="eagle3_quantization", decides=True, is_newer=True, choices=_SCHEMES, metavar="SCHEME"
    )
    load_dtype: str | None = _option(
        _HOW, setting="eagle3_load_dtype", decides=True, is_newer=True, choices=("bf16", "fp16", "fp32")
    )
    attention: str = _option(
        _HOW,
        "attention of the target; eager is slower, for a target that cannot run sdpa",
        "sdpa",
        decides=True,
        choices=("sdpa", "eager"),
    )

    def __post_init__(self) -> None:
        """Check all options. Raises: ValueError naming the flag."""
        self.check()

    def check(self) -> None:
        """Check limits and choices. Raises: ValueError naming the flag."""
        for each in fields(self):
            value, least = getattr(self, each.name), each.metadata["least"]
            choices = each.metadata["flag"].get("choices", ())
            if value is not None and least is not None and value < least:
                raise ValueError(f"{flag_name(each.name)} is {value}, expected {least} or more")
            if value is not None and choices and value not in choices:
                raise ValueError(f"{flag_name(each.name)} is {value!r}, expected one of {', '.join(map(str, choices))}")
        if self.revision is not None and is_local(self.target_model):
            raise ValueError(
                f"--revision {self.revision}: {self.target_model} is a folder, which has no revisions. Leave it out, "
                "or name a model of the hub by its id"
            )
        if self.max_memory is not None:
            from niels_gpt.eagle3.placement import MAPS, parse_max_memory

            parse_max_memory(self.max_memory)
            if self.device_map not in MAPS:
                raise ValueError(
                    f"--max-memory {self.max_memory}: it limits a device map that is computed. Pass --device-map auto"
                )


@dataclass(frozen=True, kw_only=True)
class Options(TargetOptions):
    """The inputs of a cache, and how it is made. An option of None follows the rule in its help text."""

    target_name: str | None = _option("", "what manifest.json and the plan call the target", decides=True)
    """None: target_model."""
    output_dir: Path | None = _option(  # noqa: RUF009  it returns a field
        _WHAT, "folder of the cache", required=True, type=Path, metavar="DIR"
    )
    """None: `resolve` looks at no folder."""

    seq_length: int = _option(
        _FORM,
        "most tokens of a sample; a longer one is truncated",
        2048,
        least=2,
        setting="eagle3_seq_length",
        decides=True,
    )
    draft_vocab_size: int | None = _option(
        _FORM,
        "tokens that the draft can propose (default: all of the target's)",
        least=1,
        setting="eagle3_draft_vocab_size",
        decides=True,
    )
    draft_vocab_from: str | None = _option(
        _FORM, "take these tokens from a file or a cache (default: the most frequent)", metavar="PATH"
    )
    format: str | None = _option(_FORM, setting="eagle3_format", choices=("1", "2", "native"))
    target_probs_topk: int = _option(_FORM, setting="eagle3_topk", forms=_DENSE, decides=True)
    shard_size: int = _option(_FORM, setting="eagle3_shard_size", forms=_DENSE, decides=True)
    shard_bytes: int | None = _option(
        _FORM, "most bytes of a native shard (default: 1073741824)", least=1, forms=_NATIVE
    )
    dtype: str = _option(_FORM, setting="eagle3_dtype", decides=True, choices=("bf16", "fp16", "fp32"))
    aux_dtype: str | None = _option(_FORM, setting="eagle3_aux_dtype", choices=("bf16", "fp8"), forms=_NATIVE)
    made_for: str | None = _option(_FORM, setting="eagle3_made_for", choices=DRAFTERS, forms=_NATIVE, metavar="DRAFT")
    aux_layers: str | None = _option(_FORM, setting="eagle3_aux_layers", metavar="LAYERS")
    targets: str | None = _option(_FORM, setting="eagle3_target_rows", choices=TARGETS, forms=_NATIVE, metavar="ROWS")

    max_batch_tokens: int = _option(
        _HOW, "most tokens in one forward pass, padding included", 16_384, least=1, decides=True
    )
    workers: int = _option(_HOW, "processes, each with the target; never changes the bytes", 1, least=1)
    tensor_parallel: int | None = _option(
        _HOW,
        "split the target over N processes, each with a GPU of its own; decides rounding (default: 1, or as resumed)",
        least=1,
        setting="eagle3_tensor_parallel",
    )
    show: int = _option(_HOW, "first print N samples, with the learned tokens marked", 0, least=0)
    partitions: int | None = _option(
        _HOW,
        "split the shards into N partitions, for several machines with the same DIR; `niels-gpt seal DIR` finishes "
        "it. Never changes the bytes (default: not split)",
        least=1,
    )
    partition: int | None = _option(
        _HOW,
        "build only partition I of --partitions, from 0: every Nth shard. Continues what is there (default: all)",
        least=0,
        metavar="I",
    )
    part: InitVar[str | None] = None
    """For one release, the earlier way: "i/N", i from 1, is partition i - 1 of N."""
    lock: str = _option(
        _HOW,
        "how machines lock DIR for partitions: flock, lease (if flock does not reach other machines), or auto, as the "
        "first machine did, flock if it said nothing",
        "auto",
        choices=("auto", "flock", "lease"),
    )
    resume: bool = _option(_HOW, "continue the cache in DIR if settings are equal (default: refuse)", False)

    def __post_init__(self, part: str | None) -> None:
        """Check all options. Raises: ValueError naming the flag."""
        if part is not None:
            self._take_part(part)
        self.check()

    def check(self) -> None:
        """Check limits, choices and combinations. Raises: ValueError naming the flag."""
        super().check()
        self.check_form([each.name for each in fields(self) if getattr(self, each.name) != each.default])
        self._check_partition()

    @property
    def form(self) -> str:
        """Form of the cache, "1" if none is named; `manifest_of` may turn that "1" into "2"."""
        return self.format or "1"

    @property
    def may_continue(self) -> bool:
        """Whether the run may continue the folder; a partition always may."""
        return self.resume or self.partition is not None

    @property
    def part_numbers(self) -> tuple[int, int] | None:
        """(partition + 1, partitions), as eagle3/build.py takes them; None: all shards."""
        if self.partition is None or self.partitions is None:
            return None
        return self.partition + 1, self.partitions

    def _take_part(self, part: str) -> None:
        """Take "i/N" for --partitions and --partition, and warn. Raises: ValueError for another text."""
        if self.partitions is not None or self.partition is not None:
            raise ValueError(f"--part {part} is the earlier name of --partitions and --partition: leave it out")
        found = re.fullmatch(r"([1-9][0-9]{0,8})/([1-9][0-9]{0,8})", part)
        if found is None or int(found[1]) > int(found[2]):
            raise ValueError(f"--part is {part!r}, expected i/N with 1 <= i <= N, such as 1/4")
        partition, partitions = int(found[1]) - 1, int(found[2])
        now = f"--part {part} is --partitions {partitions} --partition {partition} now: partitions are numbered from 0"
        warnings.warn(CodedWarning("W104", now), stacklevel=4)  # the caller of Options
        object.__setattr__(self, "partitions", partitions)
        object.__setattr__(self, "partition", partition)

    def _check_partition(self) -> None:
        """Raise ValueError if --partition and --partitions are not both given, or contradict each other."""
        if self.partition is None and self.partitions is not None:
            raise ValueError(
                f"--partitions {self.partitions}: no partition is named. Pass --partition I, 0 to "
                f"{self.partitions - 1}, or neither flag to build the whole cache"
            )
        if self.partition is not None and self.partitions is None:
            raise ValueError(f"--partition {self.partition}: the number of partitions is missing. Pass --partitions N")
        if self.partition is not None and self.partitions is not None and self.partition >= self.partitions:
            raise ValueError(f"--partition {self.partition}: expected 0 to {self.partitions - 1}, below --partitions")

    def check_form(self, stated: Collection[str]) -> None:
        """Raise ValueError, naming the flag, for an option that does not apply to the form.

        stated: names of the options that the user set.
        """
        for each in fields(self):
            forms = each.metadata["forms"]
            if forms and self.form not in forms and each.name in stated:
                raise ValueError(
                    f"{flag_name(each.name)} is {getattr(self, each.name)}, and it applies to --format "
                    f"{' and '.join(forms)} only, not to {self.form}: leave it out, or pass --format {forms[0]}"
                )
        if self.dtype == "fp16" and self.aux_dtype not in (None, "fp16"):
            raise ValueError(
                f"--dtype fp16 with --aux-dtype {self.aux_dtype}: versions 1 and 2 have one dtype, and fp16 cannot "
                "hold what the other can. Name --dtype bf16"
            )
        if self.format == "1" and self.target_probs_topk:
            raise ValueError(
                f"--format 1 stores every probability, and --target-probs-topk is {self.target_probs_topk}: "
                "leave one of them out"
            )

    @classmethod
    def from_settings(cls, settings: Settings, **given: Any) -> Self:
        """Return the options that the settings eagle3_* state; `given` fills those left at None or 0.

        A setting at its default never conflicts with a form.

        Raises: ValueError naming the flag.
        """
        names = {each.name: each.metadata["setting"] for each in fields(cls) if each.metadata["setting"]}
        stated = {name: getattr(settings, setting) for name, setting in names.items()}
        return cls(**{**given, **{name: value for name, value in stated.items() if value not in (None, 0)}})

    @property
    def in_fingerprint(self) -> dict[str, Any]:
        """Options whose values decide bytes of eagle3/targets."""
        found = {each: getattr(self, each.name) for each in fields(self) if each.metadata["decides"]}
        return {each.name: value for each, value in found.items() if value is not None or not each.metadata["is_newer"]}


@dataclass(frozen=True, kw_only=True)
class RespondOptions(TargetOptions):
    """Which replies a target generates, and how. An option of None follows the rule in its help text."""

    output: Path = _option(  # noqa: RUF009  it returns a field
        _WHAT, "file for the replies, as JSON lines", MISSING, required=True, type=Path, metavar="FILE"
    )
    form: str = _option(
        _HOW,
        "messages: a row for each chat; ids: a row for each reply, with the token ids that the target chose and a loss "
        "mask. With messages a chat ends early if the template would rewrite its earlier replies",
        "messages",
        choices=("messages", "ids"),
    )
    turns: str = _option(
        _HOW,
        "turns of the assistant to replace: all, one after another, or only the last. The kept ones are learned from "
        "too, unless the form is ids",
        "all",
        choices=("all", "last"),
    )
    max_new_tokens: int = _option(_HOW, "most tokens of a reply", 1024, least=1)
    temperature: float = _option(_HOW, "temperature of sampling; 0: no sampling", 0.0, type=float, metavar="X")
    top_p: float = _option(_HOW, "sample from the top tokens with this total probability", 1.0, type=float, metavar="X")
    seed: int = _option(_HOW, "seed of sampling", 0, type=int, metavar="N")
    drop_degenerate: bool = _option(
        _HOW, "end a chat before a reply that is cut, or that ends in a few tokens over and over", False
    )
    batch_size: int = _option(_HOW, "chats that the target replies to at once", 8, least=1)

    server: str | None = _option(
        _SERVER,
        "let a server reply, by the chat-completions API; --target-model then names its tokenizer, template and config "
        "(default: load the target)",
        metavar="URL",
    )
    model: str | None = _option(_SERVER, "the server's name of the target", metavar="NAME")
    concurrency: int = _option(_SERVER, "chats that the server replies to at once", 32, least=1)
    timeout: int = _option(_SERVER, "most seconds to connect, and again until a whole answer", 600, least=1)
    api_key_env: str = _option(
        _SERVER, "environment variable with the server's key, if it needs one", "OPENAI_API_KEY", metavar="VARIABLE"
    )
    server_ids: str = _option(
        _SERVER,
        "ask for the token ids that the target chose: auto, without them if the server refuses; require; never",
        "auto",
        choices=("auto", "require", "never"),
    )

    @property
    def sampling(self) -> Sampling:
        """How tokens are chosen. Raises: ValueError."""
        from niels_gpt.eagle3.replies import Sampling

        return Sampling(self.max_new_tokens, self.temperature, self.top_p, self.seed)

    def check(self) -> None:
        """Check limits, choices, sampling and server. Raises: ValueError naming the flag."""
        super().check()
        _ = self.sampling
        if self.server is not None:
            from niels_gpt.eagle3.server import chat_url

            chat_url(self.server)
            if self.model is None:
                raise ValueError("--server: the server's name of the target is missing. Pass --model NAME")
        local = {each.name for each in fields(TargetOptions) if each.metadata["group"] == _HOW} | {"batch_size"}
        for each in fields(self):
            applies = each.name not in local if self.server else each.metadata["group"] != _SERVER
            if not applies and getattr(self, each.name) != each.default:
                with_or_without = "where this machine runs the target" if self.server else "with --server URL"
                raise ValueError(f"{flag_name(each.name)} applies only {with_or_without}: leave it out")


def flag_name(name: str) -> str:
    """Return the flag of an option."""
    return "--for" if name == "made_for" else "--" + name.replace("_", "-")
