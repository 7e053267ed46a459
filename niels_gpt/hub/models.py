"""Files of a model on the Hugging Face hub, by its id: each of them, or a clear error.

If a download fails after the attempts of the hub's client, transformers treats the file as absent: it would open a
tokenizer without its special tokens, or other weights of the same commit. So the files that matter are downloaded here
first, one by one. A file of a commit is asked for once, whether the hub has it or not.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from niels_gpt.hub.retries import COMMIT_SHA, is_network, reason_of, remedy_of
from niels_gpt.storage.errors import HubError, HubRefusal, TokenizerError
from niels_gpt.storage.waits import causes

CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in the order in which transformers looks for them
_INDEX = ".index.json"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_TEMPLATES = ("chat_template.jinja", "additional_chat_templates/tool_use.jinja")
_TOKENIZER_PARTS = ("vocab.json", "merges.txt", "tokenizer.model")  # where there is no tokenizer.json
_MOST_BYTES = {
    CONFIG: 1 << 24,
    "generation_config.json": 1 << 24,
    **dict.fromkeys([one + _INDEX for one in _WEIGHTS], 1 << 26),
    **dict.fromkeys(_TOKENIZER, 1 << 28),
    **dict.fromkeys(_TOKENIZER_PARTS, 1 << 28),
    **dict.fromkeys(_TEMPLATES, 1 << 22),
}
_DOWNLOADS = 8  # downloads at once


class OfflineError(HubError):
    """HF_HUB_OFFLINE is set, and the file has not been downloaded yet."""


def is_local(name: str) -> bool:
    """Return whether a model's name is a path, which need not exist, and not an id of the hub.

    A name whose first part is a folder here counts as a path: it may be a misspelled folder below it.
    """
    first, slash, _ = name.partition("/")
    is_path = name.startswith((".", "~", "/")) or name.count("/") > 1 or name.endswith("/")
    return is_path or os.path.isdir(name) or bool(slash and os.path.isdir(first))


def refuse_large(folder: Path) -> None:
    """Check that a model's config, tokenizer and templates are regular files of a usual size.

    These files are parsed as a whole. They may be links, as in a snapshot of the hub.
    Raises: HubRefusal E603 for the first other one.
    """
    for name, most in _MOST_BYTES.items():
        with suppress(FileNotFoundError, NotADirectoryError):
            about = os.stat(folder / name)
            if not stat.S_ISREG(about.st_mode):
                raise HubRefusal(
                    f"{folder / name}: not a regular file, expected one of a transformers model", code="E603"
                )
            if about.st_size > most:
                raise HubRefusal(f"{folder / name}: {about.st_size:,} bytes, expected {most:,} at most", code="E603")


def hub_file(name: str, filename: str, revision: str | None) -> Path | None:
    """Return the path of a model's file, .../snapshots/COMMIT/filename; download it if needed. None if it is absent.

    revision: branch, tag or commit; None: main.
    Raises: HubRefusal E602 if the hub does not have the id or revision, or this user may not read it; ConnectionError
        if the hub does not answer; OfflineError E601 if HF_HUB_OFFLINE forbids asking.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    try:
        if revision is not None and COMMIT_SHA.fullmatch(revision):  # the client would ask again for an absent file
            known = huggingface_hub.try_to_load_from_cache(name, filename, revision=revision)
            if known is not None:
                return Path(known) if isinstance(known, str) else None
        return Path(huggingface_hub.hf_hub_download(name, filename, revision=revision))
    except errors.RemoteEntryNotFoundError:
        return None
    except errors.HFValidationError as error:
        raise HubRefusal(f"{name}: no folder of that name, and no id that the hub could have ({error})") from error
    except Exception as error:
        chain = [one for one in causes(error) if not isinstance(one, errors.LocalEntryNotFoundError)]  # says nothing
        problem = f"{name}: no folder of that name, and the hub %s its {filename} ({reason_of([*chain, error][0])})"
        if any(isinstance(one, errors.OfflineModeIsEnabled) for one in chain):
            remedy = "Name the folder of a model, or download it first: hf download"
            raise OfflineError(f"{problem % 'does not answer for'}. {remedy}") from error
        if is_network(error):
            remedy = "Run it again later, name the folder of a model, or use downloaded files: HF_HUB_OFFLINE=1"
            raise ConnectionError(f"{problem % 'does not answer for'}. {remedy}") from error
        if refused := remedy_of(error, f"{constants.ENDPOINT}/{name}"):
            raise HubRefusal(f"{problem % 'refuses'}; {refused}") from error
        raise


def hub_weights(name: str, commit: str) -> Path:
    """Download the config and the weights of a model, several files at once, and return their folder.

    Raises: HubRefusal E603 if there are no weights, or their index names absent files; HubRefusal E602, ConnectionError
        and OfflineError E601 if the hub refuses or does not answer.
    """
    config = hub_file(name, CONFIG, commit)
    given = json.loads(config.read_bytes()).get("transformers_weights") if config else None
    choices = (given,) if given else [one + end for one in _WEIGHTS for end in ("", _INDEX)]
    for filename in choices:
        path = optional_file(name, filename, commit)
        if path is not None:
            if filename.endswith(_INDEX):
                _fetch_all(name, commit, shards_of(path, name))
            return path.parent
    raise HubRefusal(f"{name}: commit {commit} has no weights, expected one of {', '.join(choices)}", code="E603")


def hub_tokenizer(name: str, revision: str | None) -> tuple[str | None, bool]:
    """Download the files of a model's tokenizer and its chat templates.

    revision: branch, tag or commit; None: main.
    Returns: their commit, None if there is no such file; and whether transformers needs no other file. Without a
        tokenizer.json it asks the hub for more.
    Raises: HubRefusal E602, ConnectionError and OfflineError E601 if the hub refuses or does not answer.
    """
    commit: str | None = None
    for filename in (CONFIG, *_TOKENIZER, _TEMPLATES[0]):
        path = optional_file(name, filename, commit or revision)
        if path is not None:
            commit = path.parent.name
    if commit is None:
        hub_file(name, CONFIG, revision)  # raises OfflineError if the hub may not be asked
        return None, False
    optional_file(name, _TEMPLATES[1], commit)
    if optional_file(name, _TOKENIZER[0], commit) is not None:
        return commit, True
    for filename in _TOKENIZER_PARTS:
        optional_file(name, filename, commit)
    return commit, False


def hub_tokenizer_file(name: str, revision: str | None, *, one_of: Sequence[str], beside: Sequence[str]) -> Path:
    """Download the files of a tokenizer, and no others; return .../snapshots/COMMIT/FILE, the one that decides its ids.

    one_of: names of the file, the preferred one first. beside: files to download with the preferred one, where the hub
        has them.
    Raises: TokenizerError E403 if the repository has none of these; HubRefusal E602, ConnectionError and OfflineError
        E601 if the hub refuses or does not answer.
    """
    found = next((path for filename in one_of if (path := optional_file(name, filename, revision)) is not None), None)
    if found is None:
        hub_file(name, one_of[0], revision)  # raises OfflineError if the hub may not be asked
        raise TokenizerError(
            f"{name}: the hub has no tokenizer there, expected one of {', '.join(one_of)}", code="E403"
        )
    if found.name == one_of[0]:
        for filename in beside:
            hub_file(name, filename, found.parent.name)
    return found


def optional_file(name: str, filename: str, revision: str | None) -> Path | None:
    """Return the path of a model's file as `hub_file`; None instead of OfflineError."""
    try:
        return hub_file(name, filename, revision)
    except OfflineError:
        return None


def shards_of(index: Path, name: str) -> list[str]:
    """Return the file names in an index of weights, sorted. Raises: HubRefusal E603 if it is damaged."""
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        if not names or not all(isinstance(one, str) and os.path.basename(one) == one for one in names):
            raise HubRefusal("its weight_map does not name files beside it", code="E603")
        return sorted(names)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise HubRefusal(f"{name}: {index} is no index of weights ({reason_of(error)})", code="E603") from error


def _fetch_all(name: str, commit: str, filenames: Sequence[str]) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_DOWNLOADS) as pool:
        paths = list(pool.map(partial(hub_file, name, revision=commit), filenames))
    missing = [filename for filename, path in zip(filenames, paths, strict=True) if path is None]
    if missing:
        raise HubRefusal(f"{name}: commit {commit} has no {missing[0]}, which its index of weights names", code="E603")
