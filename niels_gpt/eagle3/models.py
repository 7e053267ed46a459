"""Target models by folder or hub id: what is known before the weights are loaded, and the loading.

Nothing else here touches the network, and only for an id. Code of a model's repository is never run.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from niels_gpt.fileio import sha256_file

CONFIG = "config.json"


@dataclass(frozen=True)
class TargetFacts:
    """What is known of a target before its weights are loaded."""

    name: str
    """As it was given: a folder or a hub id."""
    revision: str | None
    """The hub's commit; None for a folder."""
    weights_sha256: str | None
    """Over the names and sha256 of a folder's weight files; None on the hub, where the commit says it."""
    config_sha256: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    """Tokens that a sample may have; None where the config does not say."""


def target_facts(name: str, *, revision: str | None = None) -> TargetFacts:
    """Read what a target's config says, and hash the weight files of a local folder; nothing is loaded.

    name: a folder, or else an id of the hub. revision: the hub's branch, tag or commit; of no meaning for a folder.
    Raises: FileNotFoundError for a folder without config or weights; ConnectionError where the hub does not answer;
    ValueError for what the hub does not have and for a config of no causal language model; ImportError without the
    extra.
    """
    transformers = _transformers()
    local = _is_local(name)
    path = Path(name).expanduser() / CONFIG if local else _hub_config(name, revision)
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{path}: there is no such file, expected the folder of a transformers model") from None
    try:
        with _quiet():
            config = transformers.AutoConfig.from_pretrained(path.parent, local_files_only=True)
            text = config.get_text_config()
    except Exception as error:  # whatever the class of that config finds wrong
        raise ValueError(f"{path}: transformers {transformers.__version__} cannot read it: {error}") from error
    sizes: list[Any] = [getattr(text, size, None) for size in ("num_hidden_layers", "hidden_size", "vocab_size")]
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or None in sizes:
        raise ValueError(
            f"{path}: model_type {config.model_type!r} is no causal language model of transformers "
            f"{transformers.__version__}. Name one that predicts the next token"
        )
    return TargetFacts(
        name=name,
        revision=None if local else path.parent.name,
        weights_sha256=_weights_sha256(path.parent) if local else None,
        config_sha256=hashlib.sha256(raw).hexdigest(),
        model_type=config.model_type,
        num_layers=sizes[0],
        hidden_size=sizes[1],
        vocab_size=sizes[2],
        max_positions=getattr(text, "max_position_embeddings", None),
    )


def load_target(
    name: str, *, revision: str | None, dtype: torch.dtype, attention: str, device: str | torch.device
) -> nn.Module:
    """Open a causal language model: in eval mode, without gradients, all of `dtype`, on `device`.

    name, revision: as in `target_facts`. attention: transformers' attn_implementation, such as "sdpa" or "eager".
    Raises: as `target_facts`; ValueError where weights are missing or have other shapes, for transformers would make
    them up, and where they cannot be read.
    """
    transformers = _transformers()
    facts = target_facts(name, revision=revision)
    local = facts.revision is None
    try:
        with _quiet():
            model, found = transformers.AutoModelForCausalLM.from_pretrained(
                Path(name).expanduser() if local else name,
                revision=facts.revision or "main",
                local_files_only=local,
                dtype=dtype,
                attn_implementation=attention,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                output_loading_info=True,
            )
    except ImportError as error:
        raise ImportError(f"{name}: {error}") from error
    except Exception as error:  # of the hub, safetensors, pickle or the model's own code
        if not local and _is_network(error):
            raise ConnectionError(f"{name}: the hub did not give its weights: {error}. Run it again later") from error
        raise ValueError(f"{name}: its weights could not be loaded: {type(error).__name__}: {error}") from error
    wrong = {"missing": found["missing_keys"], "of another shape": {key for key, *_ in found["mismatched_keys"]}}
    for what, keys in wrong.items():
        if keys:
            first = ", ".join(sorted(keys)[:3])
            raise ValueError(
                f"{name}: {len(keys)} of its weights are {what} (such as {first}): expected a complete model, whose "
                f"{CONFIG} is that of its weights. Download it again"
            )
    opened: nn.Module = model.requires_grad_(False).eval().to(device)
    return opened


def _transformers() -> ModuleType:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"running a target needs transformers ({error}). Install it: pip install 'niels-gpt[eagle3]'"
        ) from error
    return transformers


def _is_local(name: str) -> bool:
    return name.startswith((".", "~", "/")) or name.count("/") > 1 or os.path.isdir(name)


def _hub_config(name: str, revision: str | None) -> Path:
    """Return the config of a hub model, .../snapshots/COMMIT/config.json, asking the hub for what is not here yet."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        with _quiet():
            return Path(huggingface_hub.hf_hub_download(name, CONFIG, revision=revision))
    except (errors.HFValidationError, errors.RemoteEntryNotFoundError, errors.RepositoryNotFoundError) as error:
        raise ValueError(f"{name}: no folder of that name, and the hub has no such model for you: {error}") from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{name}: the hub has no revision {revision!r} of it: {error}") from error
    except Exception as error:
        if not _is_network(error):
            raise
        raise ConnectionError(
            f"{name}: no folder of that name, and the hub does not answer ({error}). Name the folder of a model, or "
            "run it again where there is a network"
        ) from error


def _is_network(error: BaseException | None) -> bool:
    """Tell whether an error, or what it came from, is one of the network."""
    from huggingface_hub import errors

    kinds = (ConnectionError, TimeoutError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)
    while error is not None:
        # Which library asks for the hub's client depends on its version.
        if isinstance(error, kinds) or type(error).__module__.partition(".")[0] in ("httpx", "httpcore", "requests"):
            return True
        error = error.__cause__ or error.__context__
    return False


def _weights_sha256(folder: Path) -> str:
    paths = sorted((path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin")), key=lambda p: p.name)
    if not paths:
        raise FileNotFoundError(f"{folder}: has no *.safetensors and no *.bin, expected the weights of a model")
    lines = (f"{path.name} {sha256_file(path)}\n" for path in paths)
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers from printing: its bars, and a report on keys that is checked here instead."""
    from transformers.utils import logging as of_transformers

    logging: Any = of_transformers
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    if bars:
        logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
