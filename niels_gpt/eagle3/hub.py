"""Files of a model on the Hugging Face hub, by its id: each of them, or a clear error.

transformers takes a file that the hub fails to give, after the attempts of its client, for one that is not there: it
would open a tokenizer without its special tokens, or other weights of the same commit. So what matters is asked for
here first, file by file. What was downloaded, or found missing, of a commit is not asked for again.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in the order in which transformers looks for them
_INDEX = ".index.json"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_TEMPLATE = "chat_template.jinja"
_TOKENIZER_PARTS = ("vocab.json", "merges.txt", "tokenizer.model")  # where there is no tokenizer.json
_MOST_BYTES = {
    CONFIG: 1 << 24,
    "generation_config.json": 1 << 24,
    **dict.fromkeys(_TOKENIZER, 1 << 28),
    **dict.fromkeys(_TOKENIZER_PARTS, 1 << 28),
    _TEMPLATE: 1 << 22,
}
_AT_ONCE = 8  # downloads
_COMMIT = re.compile("[0-9a-f]{40}")
_PASSING = (408, 425, 429)  # and every 5xx


class OfflineError(ConnectionError):
    """HF_HUB_OFFLINE is set, and a file was not downloaded before."""


def is_local(name: str) -> bool:
    """Tell whether a model's name is that of a folder, which need not be there, and not an id of the hub."""
    return name.startswith((".", "~", "/")) or name.count("/") > 1 or os.path.isdir(name)


def refuse_large(folder: Path) -> None:
    """Raise ValueError where a small file of a model's folder is no file, or larger than any model has it.

    Such files are parsed as a whole: config, tokenizer and template. They may be links, as in a snapshot of the hub.
    """
    for name, most in _MOST_BYTES.items():
        with suppress(FileNotFoundError, NotADirectoryError):
            about = os.stat(folder / name)
            if not stat.S_ISREG(about.st_mode):
                raise ValueError(f"{folder / name}: not a regular file, expected one of a transformers model")
            if about.st_size > most:
                raise ValueError(f"{folder / name}: {about.st_size:,} bytes, expected {most:,} at most")


def hub_file(name: str, filename: str, revision: str | None) -> Path | None:
    """Return where a file of a model lies, .../snapshots/COMMIT/filename; it is downloaded where it is not there yet.

    revision: branch, tag or commit; None: main. None is returned where there is no such file in that commit.
    Raises: ValueError for an id or a revision that the hub does not have, or not for the user; ConnectionError where
        the hub does not answer, OfflineError where it may not be asked.
    """
    import huggingface_hub
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{name}"
    try:
        if revision is not None and _COMMIT.fullmatch(revision):  # the client would ask again for what is missing
            known = huggingface_hub.try_to_load_from_cache(name, filename, revision=revision)
            if known is not None:
                return Path(known) if isinstance(known, str) else None
        return Path(huggingface_hub.hf_hub_download(name, filename, revision=revision))
    except errors.RemoteEntryNotFoundError:
        return None
    except errors.HFValidationError as error:
        raise ValueError(f"{name}: no folder of that name, and no id of the hub can be like that: {error}") from error
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{name}: the hub gives it only to those who have accepted its terms. Ask for access on {page}, and log in "
            "here: hf auth login"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"{name}: no folder of that name, and the hub has no such model, or not for you. Look whether {page} is "
            "there; for a private one log in here: hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(
            f"{name}: the hub has no revision {revision!r} of it, expected a branch, tag or commit of {page}"
        ) from error
    except Exception as error:
        raise _explained(error, name, filename) from error


def hub_weights(name: str, commit: str) -> Path:
    """Download the config and the weights of a model, several files at once, and return the folder with them.

    Raises: as `hub_file`; ValueError where there are no weights, or not all that their index names.
    """
    config = hub_file(name, CONFIG, commit)
    named = json.loads(config.read_bytes()).get("transformers_weights") if config else None
    choices = (named,) if named else [one + end for one in _WEIGHTS for end in ("", _INDEX)]
    for filename in choices:
        found = _optional(name, filename, commit)
        if found is not None:
            if filename.endswith(_INDEX):
                _fetch_all(name, commit, _shards_of(found, name))
            return found.parent
    raise ValueError(f"{name}: commit {commit} has no weights, expected one of {', '.join(choices)}")


def hub_tokenizer(name: str, revision: str | None) -> tuple[str | None, bool]:
    """Download what decides a model's tokenizer and its chat template.

    Returned are their commit, None where there is no such file, and whether that is all: without a tokenizer.json,
    transformers has to look what else is there. Of these files it finds each, or knows that there is none.
    revision: branch, tag or commit; None: main.
    Raises: as `hub_file`.
    """
    commit: str | None = None
    for filename in (CONFIG, *_TOKENIZER, _TEMPLATE):
        found = _optional(name, filename, commit or revision)
        if found is not None:
            commit = found.parent.name
    if commit is None:
        hub_file(name, CONFIG, revision)  # an error where the hub may not be asked
        return None, False
    if _optional(name, _TOKENIZER[0], commit) is not None:
        return commit, True
    for filename in _TOKENIZER_PARTS:
        _optional(name, filename, commit)
    return commit, False


def is_network(error: BaseException | None) -> bool:
    """Tell whether an error, or what it came from, is one of the network or of the hub, and may pass."""
    from huggingface_hub import errors

    # The hub's client has moved from requests to httpx to httpx2; whichever it is, its errors share this base.
    client_error = cast(type[Exception], errors.HfHubHTTPError.__bases__[0])
    network = False
    while error is not None:
        status = _status(error)
        if status is not None:
            return status in _PASSING or status >= 500
        kinds = (client_error, ConnectionError, TimeoutError, errors.LocalEntryNotFoundError)
        network = network or isinstance(error, kinds)
        error = error.__cause__ or error.__context__
    return network


def _status(error: BaseException) -> int | None:
    status: int | None = getattr(getattr(error, "response", None), "status_code", None)
    return status


def _explained(error: Exception, name: str, filename: str) -> Exception:
    """Return the error to raise for one of the hub's client that has no name of its own."""
    from huggingface_hub import errors

    # LocalEntryNotFoundError says nothing of what has happened; its cause does.
    cause = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ else error
    reason = " ".join(f"{type(cause).__name__}: {cause}".split())
    if is_network(error):
        said = f"{name}: no folder of that name, and the hub does not answer for its {filename} ({reason}). "
        if isinstance(cause, errors.OfflineModeIsEnabled):
            return OfflineError(said + "Name the folder of a model, or download it first: hf download")
        return ConnectionError(
            said
            + "Run it again later, name the folder of a model, or take what was downloaded before: HF_HUB_OFFLINE=1"
        )
    if _status(cause) is not None:
        return ValueError(
            f"{name}: the hub refuses its {filename} ({reason}). Log in here with a token that may read it: "
            "hf auth login"
        )
    return error


def _optional(name: str, filename: str, revision: str | None) -> Path | None:
    """As `hub_file`, but what is not here counts as missing where the hub may not be asked."""
    try:
        return hub_file(name, filename, revision)
    except OfflineError:
        return None


def _shards_of(index: Path, name: str) -> list[str]:
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
        if not names or not all(isinstance(one, str) for one in names):
            raise ValueError("its weight_map does not name files")
        return sorted(names)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{name}: {index} is no index of weights ({type(error).__name__}: {error})") from error


def _fetch_all(name: str, commit: str, filenames: Sequence[str]) -> None:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = list(pool.map(partial(hub_file, name, revision=commit), filenames))
    missing = [filename for filename, path in zip(filenames, found, strict=True) if path is None]
    if missing:
        raise ValueError(f"{name}: commit {commit} has no {missing[0]}, which its index of weights names")
