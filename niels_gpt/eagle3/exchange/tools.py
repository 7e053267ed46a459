"""Reads and writes the folders of SpecForge and speculators. No file in them says which blocks were captured.

SpecForge's offline features are a tree of *.ckpt or *.ckpt.gz files, one a sample. They are ordered by the number in
their names, data_9.ckpt before data_10.ckpt in any folder; if a name has no number, or two have the same, by path. Each
is a torch.save dict: `input_ids` [L], `loss_mask` [L], and states by the kind of draft:

    eagle3   `hidden_state` [1, L, H], the input of lm_head, and `aux_hidden_state` [1, L, 3H]
    dspark   `target_last_hidden_states` [1, L, H], the input of lm_head, and `hidden_states` [1, L, K * H]
    dflash   `hidden_states` alone

For EAGLE-3 SpecForge's trainer later shifts ids and target states by one token, but not the mask, and sets the mask's
last value to 0. For dflash and dspark it refuses a sample without two tokens with loss side by side.

speculators' offline data are a folder of `datasets` that contains hidden_states/hs_{i}.safetensors for each row i. Rows
have `input_ids`, `loss_mask` and `seq_len`. A file has `token_ids` [L] and `hidden_states` [L, K + 1, H]; its last
layer is the output of the target's last block, before the final norm. With speculators' fp8 backend the states are
float8_e4m3fn, and `hidden_states_scales` [L, 1, 1] has a scale for each token. speculators' trainer later drops token
0, its target state and mask, and the last auxiliary state.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from niels_gpt.eagle3.exchange.foreign import (
    BadSample,
    ForeignSample,
    GrowingFiles,
    checked_sample,
    integers,
    open_tensors,
    unreadable,
)
from niels_gpt.eagle3.format.layout import WITHOUT_HOLES, open_file, read_file, read_tensors_header, refuse_sparse
from niels_gpt.eagle3.format.shard_writer import write_tensors
from niels_gpt.eagle3.format.torch_files import load_tensors
from niels_gpt.storage import fileio
from niels_gpt.storage.arrow_messages import messages
from niels_gpt.storage.errors import CacheError
from niels_gpt.storage.meta_json import printable, shortened

KINDS = {
    "specforge": ("eagle3", "dflash", "dspark"),
    "speculators": ("eagle3", "peagle", "dflash", "dspark", "mtp"),
    "automodel": ("dspark",),
}
"""Tool -> the kinds of drafts that it trains from files; the first is the usual one."""

# --- SpecForge --------------------------------------------------------------------------------------------------------

NUM_LAYERS = 3
"""Auxiliary layers of SpecForge's EAGLE-3."""
_KEYS = {
    "eagle3": ("hidden_state", "aux_hidden_state"),
    "dspark": ("target_last_hidden_states", "hidden_states"),
    "dflash": (None, "hidden_states"),
}
"""Kind of draft -> keys of the last hidden states and of the auxiliary states."""
_SUFFIXES = (".ckpt", ".ckpt.gz")
_FILES_OF_A_FOLDER = 2000


class SpecForgeFiles(GrowingFiles):
    """A folder of SpecForge's features."""

    usual_last = "post_norm"

    def __init__(
        self,
        folder: Path,
        hidden_size: int,
        vocab_size: int,
        *,
        made_for: str = "eagle3",
        follow_links: bool = False,
        grows: bool = False,
    ) -> None:
        """made_for: the kind of draft that the files are for: eagle3 or dspark.

        grows: files may come; then each has a number of its own in its name, and is the sample of this number.
        Raises: CacheError E711 if there is no such file, or a subfolder is a link; OSError.
        """
        last, self._aux_key = _KEYS[made_for]
        assert last is not None
        self._last_key = last
        self._folder, self._sizes = folder, (hidden_size, vocab_size)
        self._follow_links, self._grows = follow_links, grows
        self._paths: dict[int, Path] = {}
        there = self.look()
        self.count = None if grows else there
        if not there and not grows:
            raise CacheError(folder, "has no *.ckpt and no *.ckpt.gz", "the files of SpecForge", code="E711")

    def look(self) -> int:
        """List the folder again; return the number behind the last file. Raises: CacheError E711; OSError."""
        walked = _walked(self._folder, self._follow_links)
        paths = sorted(os.path.join(root, name) for root, names in walked for name in names if name.endswith(_SUFFIXES))
        numbered: dict[int, str] = {}
        for path in paths:
            number = _number_of(path)
            if number in numbered and self._grows:
                found = f"has the number {number} like {printable(os.path.relpath(numbered[number], self._folder))}"
                raise CacheError(path, found, "a number of its own in each name", code="E711")
            if (number is None or number >= _MAX_ROWS) and self._grows:
                found = f"has no number below {_MAX_ROWS:,} in its name"
                remedy = "Import such a folder once it is complete: eagle3 import"
                raise CacheError(path, found, "names such as data_12.ckpt", remedy, code="E711")
            if number is not None:
                numbered[number] = path
        in_order = [numbered[number] for number in sorted(numbered)] if len(numbered) == len(paths) else paths
        self._paths = {at: Path(path) for at, path in (numbered if self._grows else dict(enumerate(in_order))).items()}
        return max(self._paths, default=-1) + 1

    def path(self, index: int) -> Path | None:
        """Return the path of a file that was there at the last look."""
        return self._paths.get(index)

    def name(self, index: int) -> str:
        """Return a file's path in the folder; its number if it was not there."""
        path = self._paths.get(index)
        return printable(str(path.relative_to(self._folder))) if path else f"number {index}"

    def facts(self) -> dict[str, Any]:
        """Return the folder's path: no file in it says which run wrote the others."""
        return {"folder": os.path.abspath(self._folder)}

    def read(self, index: int) -> ForeignSample:
        """Return a sample. Raises: BadSample."""
        path, name = self._paths.get(index), self.name(index)
        if path is None:
            raise BadSample("missing", name, f"no file of this number, such as data_{index}.ckpt")
        keys = ("input_ids", "loss_mask", self._aux_key, self._last_key)
        try:
            tensors = load_tensors(path, keys, follow_links=self._follow_links)
        except FileNotFoundError as error:
            if os.fspath(error.filename or "") != str(path):  # no folder for the temporary file
                raise
            raise BadSample("missing", name, "no such file") from error
        except CacheError as error:
            raise unreadable(name, error) from error
        except ValueError as error:
            is_other = str(error).startswith(f"{self._aux_key} is None")
            remedy = "Name the kind of draft that the files are for: --for eagle3 or --for dspark" if is_other else ""
            raise BadSample("unreadable", name, str(error), remedy) from error
        for key in keys[2:]:
            tensor = tensors[key]
            tensors[key] = tensor = tensor[0] if tensor.dim() == 3 and len(tensor) == 1 else tensor
            if tensor.dim() != 2:
                raise BadSample("mismatched", name, f"{key} is {list(tensor.shape)}, expected [1, tokens, values]")
        ids, mask, states, last = (tensors[key] for key in keys)
        return checked_sample(name, ids, mask, states, last, *self._sizes)


def _number_of(path: str) -> int | None:
    """Return the last number in a file's name; None for a name without one."""
    numbers = re.findall("[0-9]+", os.path.basename(path).partition(".ckpt")[0])
    return int(numbers[-1]) if numbers else None  # a name has 255 bytes at most


def _walked(folder: Path, follow_links: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder of a tree with the names of its files. Raises: CacheError; OSError."""

    def refuse(error: OSError) -> None:
        raise error

    seen: set[str] = set()
    for root, below, names in os.walk(folder, onerror=refuse, followlinks=follow_links):
        if linked := sorted(name for name in below if not follow_links and os.path.islink(os.path.join(root, name))):
            where, found = os.path.join(root, linked[0]), "a link to a folder, whose samples would be left out"
            raise CacheError(where, found, remedy="Pass --follow-links, or remove it", code="E711")
        if (real := os.path.realpath(root)) in seen:
            raise CacheError(root, "a folder that is reached twice, by a link", "each sample once", code="E711")
        seen.add(real)
        yield root, names


class SpecForgeWriter:
    """Writes a folder of SpecForge's features; file names sort in the order of the samples."""

    def __init__(self, folder: Path, num_samples: int, made_for: str = "eagle3") -> None:
        self._folder, self._digits = folder, max(6, len(str(num_samples)))
        self._last_key, self._aux_key = _KEYS[made_for]
        self.last_hidden = "post_norm" if self._last_key else "none"
        self.notes, self.has_aux = (), True

    def write(self, index: int, sample: ForeignSample) -> int:
        """Write a sample; return its bytes."""
        begin = index - index % _FILES_OF_A_FOLDER
        rows = f"rows_{begin:0{self._digits}d}-{begin + _FILES_OF_A_FOLDER:0{self._digits}d}"
        path = self._folder / rows / f"data_{index:0{self._digits}d}.ckpt"
        path.parent.mkdir(exist_ok=True)
        states = {self._aux_key: sample.aux.flatten(1)[None]}
        if self._last_key:
            states[self._last_key] = sample.last[None]
        torch.save({"input_ids": sample.input_ids, "loss_mask": sample.loss_mask.to(torch.int64), **states}, path)
        return path.stat().st_size

    def finish(self) -> None:
        """Do nothing: every file is complete."""


# --- speculators ------------------------------------------------------------------------------------------------------

STATES = "hidden_states"
_SCALES = "hidden_states_scales"
_HS = re.compile(r"hs_(0|[1-9][0-9]{0,17})\.safetensors")
_COLUMNS = ("input_ids", "loss_mask", "seq_len")
_MAX_ROWS, _MAX_LAYERS, _MAX_TOKENS = 10_000_000, 1000, 1 << 24
_AGAIN = "Write the folder again with the tool that made it"


class SpeculatorsFiles(GrowingFiles):
    """A folder of speculators' rows and states."""

    usual_last = "pre_norm"
    count: int

    def __init__(
        self, folder: Path, hidden_size: int, vocab_size: int, *, follow_links: bool = False, grows: bool = False
    ) -> None:
        """grows: the states may come; the rows are there. Raises: CacheError E711 if `datasets` finds none."""
        self._rows = _open_rows(folder, follow_links)
        self.count = len(self._rows)
        self._states, self._sizes, self._follow_links = folder / STATES, (hidden_size, vocab_size), follow_links

    def look(self) -> int:
        """Return the number behind the last row that has a file. Raises: CacheError E711 for a linked folder."""
        _refuse_linked_states(self._states, self._follow_links)
        if not self._states.is_dir():
            return 0
        found = map(_HS.fullmatch, os.listdir(self._states))
        return max((int(each[1]) + 1 for each in found if each and int(each[1]) < self.count), default=0)

    def path(self, index: int) -> Path:
        """Return where a row's file is, or will be."""
        return self._states / f"hs_{index}.safetensors"

    def name(self, index: int) -> str:
        """Return a row's name for messages."""
        return f"row {index}"

    def facts(self) -> dict[str, Any]:
        """Return the number of rows, and the checksum of the file that names them."""
        raw = read_file(self._states.parent / "state.json", follow_links=self._follow_links)
        return {"rows": self.count, "state_json_sha256": hashlib.sha256(raw).hexdigest()}

    def read(self, index: int) -> ForeignSample:
        """Return a sample. Raises: BadSample."""
        name, row = self.name(index), self._rows[index]
        ids = integers(name, "input_ids", row["input_ids"])
        if len(ids) != row["seq_len"]:
            found = f"{len(ids)} input_ids, seq_len {shortened(row['seq_len'])}"
            raise BadSample("mismatched", name, f"{found}, expected one length")
        tensors = self._file(index)
        states, was_fp8 = tensors[STATES], _SCALES in tensors
        theirs = tensors["token_ids"]
        if theirs.shape != ids.shape or not torch.equal(theirs.to(torch.int64), ids):
            raise BadSample("mismatched", name, f"token_ids of {self._name(index)} are not the row's input_ids")
        if states.dim() != 3 or not 1 <= states.shape[1] <= _MAX_LAYERS:
            found = f"{STATES} is {list(states.shape)}, expected [tokens, 1 to {_MAX_LAYERS} layers, {self._sizes[0]}]"
            raise BadSample("mismatched", name, found)
        if was_fp8:
            states = _without_scales(name, states, tensors[_SCALES])
        sample = checked_sample(name, ids, row["loss_mask"], states[:, :-1], states[:, -1], *self._sizes)
        return ForeignSample(sample.input_ids, sample.loss_mask, sample.aux, sample.last, was_fp8)

    def _name(self, index: int) -> str:
        return f"{STATES}/hs_{index}.safetensors"

    def _file(self, index: int) -> dict[str, Tensor]:
        """Return the mapped tensors of a row's file. Raises: BadSample."""
        name, path = self.name(index), self.path(index)
        if os.path.lexists(f"{path}.lock"):
            raise BadSample("unreadable", name, f"{self._name(index)}.lock is there: the file is still being written")
        try:
            # Refuses links, devices and folders, holes, and a header of more than the few tensors of a sample.
            read_tensors_header(path, sparse=WITHOUT_HOLES, follow_links=self._follow_links)
            with open_tensors(path) as file:
                kept = {"token_ids", STATES, _SCALES}.intersection(file.keys())
                tensors = {key: file.get_tensor(key) for key in sorted(kept)}
        except FileNotFoundError as error:
            raise BadSample("missing", name, f"no such file: {self._name(index)}") from error
        except CacheError as error:
            raise unreadable(name, error, self._name(index)) from error
        except OSError:  # no fault of the file
            raise
        except Exception as error:  # safetensors raises its own error, a direct subclass of Exception
            raise BadSample("unreadable", name, f"{self._name(index)}: safetensors refuses it ({error})") from error
        if missing := sorted({"token_ids", STATES} - {*tensors}):
            raise BadSample("mismatched", name, f"{self._name(index)} has no {' and no '.join(missing)}")
        return tensors


class SpeculatorsWriter:
    """Writes a folder for `datasets.load_from_disk`, and the states of its rows."""

    last_hidden, notes, has_aux = "pre_norm", (), True

    def __init__(self, folder: Path, num_samples: int) -> None:
        from datasets import Features, Sequence, Value
        from datasets.arrow_writer import ArrowWriter

        self._folder = folder
        self._temporary = tempfile.TemporaryDirectory(dir=folder, prefix=".rows-")
        self._arrow = os.path.join(self._temporary.name, "rows.arrow")
        lists = {name: Sequence(Value("int64")) for name in _COLUMNS[:2]}
        self._writer = ArrowWriter(path=self._arrow, features=Features({**lists, "seq_len": Value("int64")}))
        fileio.make_dir(folder / STATES)

    def write(self, index: int, sample: ForeignSample) -> int:
        """Write a sample's file and append its row; return the file's bytes. Samples come in order."""
        states = torch.cat([sample.aux, sample.last[:, None]], dim=1)
        path = self._folder / STATES / f"hs_{index}.safetensors"
        write_tensors(path, {"token_ids": sample.input_ids, STATES: states})
        mask = sample.loss_mask.to(torch.int64)
        row = {"input_ids": sample.input_ids.numpy(), "loss_mask": mask.numpy(), "seq_len": len(mask)}
        self._writer.write(row)
        return path.stat().st_size

    def finish(self) -> None:
        """Write the rows."""
        from datasets import Dataset

        self._writer.finalize()
        self._writer.close()
        with _no_bars():  # speculators reads tensors: the rows' format says so
            Dataset.from_file(self._arrow).with_format("torch").save_to_disk(str(self._folder))
        self._temporary.cleanup()


def _open_rows(folder: Path, follow_links: bool) -> Any:
    """Return the rows. Raises: CacheError E711."""
    from datasets import Value, load_from_disk

    expected = "a folder of datasets.save_to_disk with input_ids, loss_mask and seq_len"
    try:
        _refuse_other_files(folder, follow_links)
        rows = load_from_disk(str(folder)).with_format(None)
        missing = sorted({*_COLUMNS} - {*rows.column_names})
    except CacheError:
        raise
    except Exception as error:  # of datasets, pyarrow or json, depending on the damage
        raise CacheError(folder, f"datasets cannot read it ({error!r:.300})", expected, code="E711") from error
    if missing:
        raise CacheError(folder, f"its rows have no {', '.join(missing)}", expected, code="E711")
    for name in _COLUMNS:
        feature = rows.features[name]
        value = getattr(feature, "feature", feature)
        # An Image opens the file that a row names, and a thousand million nulls take no byte.
        if not isinstance(value, Value) or value.dtype.strip("u0123456789") not in ("int", "bool"):
            found = f"the feature of {name} is {shortened(feature)}"
            raise CacheError(folder, found, "integers, or a list of them", _AGAIN, code="E711")
    rows = rows.select_columns(list(_COLUMNS))
    _refuse_odd_rows(folder, rows.data.columns)
    return rows


def _refuse_odd_rows(folder: Path, columns: list[Any]) -> None:
    """Raise CacheError for lists that reach outside their column, too many rows, or a row with too many numbers.

    pyarrow would read beyond the column; `datasets` makes a list of each row's numbers.
    """
    from pyarrow import ArrowInvalid, compute

    try:
        for column in columns:
            column.validate(full=True)
    except ArrowInvalid as error:
        raise CacheError(folder, f"its rows are damaged ({error})", remedy=_AGAIN, code="E711") from error
    lists = [column for column in columns if hasattr(column.type, "value_type")]
    longest = max((compute.max(compute.list_value_length(each)).as_py() or 0 for each in lists), default=0)
    if len(columns[0]) > _MAX_ROWS or longest > _MAX_TOKENS:
        found = f"{len(columns[0]):,} rows, the longest of {longest:,} values"
        raise CacheError(folder, found, f"{_MAX_ROWS:,} and {_MAX_TOKENS:,} at most", _AGAIN, code="E711")


def _refuse_other_files(folder: Path, follow_links: bool) -> None:
    """Raise CacheError for links, files that grow in memory, and a state.json that names files elsewhere.

    Raises: ValueError for another state.json.
    """
    read_file(folder / "dataset_info.json", follow_links=follow_links)  # of a size that may be parsed
    _refuse_linked_states(folder / STATES, follow_links)
    state = json.loads(read_file(folder / "state.json", follow_links=follow_links))
    for each in state["_data_files"]:
        name = each["filename"]
        if os.path.basename(name) != name:
            raise CacheError(folder / "state.json", f"names the file {name!r}", "one of the same folder", code="E711")
        with open(open_file(folder / name, follow_links=follow_links), "rb") as file:
            refuse_sparse(file.fileno(), str(folder / name), *WITHOUT_HOLES, _AGAIN)
            # It would grow when it is read; datasets writes none such, and maps its files.
            if any(message.is_dictionary or message.is_packed for message in messages(file.fileno())):
                found = "its rows are compressed, or looked up in a dictionary"
                raise CacheError(folder / name, found, "plain ones, as datasets writes them", _AGAIN, code="E711")


def _refuse_linked_states(states: Path, follow_links: bool) -> None:
    if not follow_links and os.path.islink(states):
        found, remedy = "a link to a folder", "Pass --follow-links, or copy the folder here"
        raise CacheError(states, found, "the folder of the states", remedy, code="E711")


def _without_scales(name: str, states: Tensor, scales: Tensor) -> Tensor:
    """Return float8 states times their tokens' scales, rounded to bf16."""
    if scales.shape != (len(states), 1, 1) or states.dtype != torch.float8_e4m3fn:
        found = f"{STATES} is {states.dtype}, {_SCALES} {list(scales.shape)}"
        raise BadSample("mismatched", name, f"{found}, expected float8_e4m3fn and [{len(states)}, 1, 1]")
    return (states.float() * scales.float()).to(torch.bfloat16)


@contextmanager
def _no_bars() -> Iterator[None]:
    import datasets

    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
