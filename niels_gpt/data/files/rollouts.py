"""The forms of a row of recorded rollouts: a group of completions or one sample, with token ids as sampled.

    {"group": "q7", "prompt_ids": [5, 6], "completions": [[7, 8], {"ids": [7, 9], "logprobs": [-0.1, -2.0]}]}
    {"group": "q7", "prompt_ids": [5, 6], "completion_ids": [7, 8], "advantage": 0.5}
    {"group": "q7", "ids": [5, 6, 7, 8], "mask": [0, 0, 1, 1]}

Beside ids, a completion or a sample may have `logprobs`, one for each id of the completion; `advantage` or
`advantages`, one number or one for each of these ids; `mask` or `loss_mask`, 1 for each id with loss; and `reward`.
Beside `completions` these names hold a list with an entry for each completion. A whole sequence has these lists for
all of its ids; with `prompt_length`, logprobs and advantages belong to the ids after the prompt. A field that is null
is absent: rows of parquet have every field. `prompt_tokens` and `response_tokens`, the names of open-instruct, stand
for `prompt_ids` and `completion_ids`. Other fields are not kept, and counted: see `unread_of`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from niels_gpt.data.files.text import MISSING_FIELD, TOO_LARGE, says_nothing
from niels_gpt.documents import Rollout
from niels_gpt.storage.errors import SourceError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MALFORMED = "malformed"
MAX_ID = 2**31 - 1
MAX_GROUP_TOKENS = 2**26
"""Limit of tokens in a group, the prompt once for each completion: 512 MiB as int64. A short row can ask for more."""
MAX_GROUP_SAMPLES = 2**18
"""Limit of samples in a group: Python needs about a kilobyte for each, however short."""
FORMS = '"prompt_ids" with "completions" or "completion_ids", or "ids"'
_ALIASES = {
    "logprobs": ("logprobs",),
    "advantage": ("advantage", "advantages"),
    "mask": ("mask", "loss_mask"),
    "reward": ("reward", "rewards"),
}
_OTHER_NAMES = {"prompt_tokens": "prompt_ids", "response_tokens": "completion_ids"}  # of open-instruct
_SEQUENCES = ("completions", "completion_ids", "ids")
_BESIDE_IDS = frozenset(name for names in _ALIASES.values() for name in names)
FIELDS = frozenset(("group", "prompt_ids", "prompt_length", *_SEQUENCES, *_OTHER_NAMES)) | _BESIDE_IDS
_IN_WORDS = ("prompt", "completion", "text", "messages", "question", "answer", "solution")
_DESCRIBING = frozenset(("id", *_IN_WORDS, "source", "dataset", "data_source"))  # no sequence loses a part with these


class NotRolloutsError(SourceError):
    """A row holds no usable rollouts."""

    def __init__(self, reason: str, found: str = "") -> None:
        super().__init__(f"{reason}: found {found or 'none of the known forms'}")
        self.reason = reason
        """missing_field, malformed or too_large."""
        self.found = found
        """The odd value, for messages; "" if the row has no known form."""


def samples_of(row: Mapping[str, Any]) -> tuple[str | None, list[Rollout]]:
    """Return a row's group name, None if it has none, and its samples.

    Raises: NotRolloutsError "missing_field" for a row of no known form; "too_large" for a group of more than
        MAX_GROUP_TOKENS; "malformed" for a field of another type, length or range.
    """
    given = _given(row)
    forms = [name for name in _SEQUENCES if name in given]
    if not forms or ("prompt_ids" in given) != (forms != ["ids"]):
        raise NotRolloutsError(MISSING_FIELD, f"only {', '.join(sorted(given))}" if given else "")
    if len(forms) > 1:
        raise NotRolloutsError(MALFORMED, f"both {' and '.join(forms)}")
    if forms == ["ids"]:
        samples = [_whole(given)]
    else:
        if "prompt_length" in given:
            raise NotRolloutsError(MALFORMED, "prompt_length beside prompt_ids")
        prompt = _ids(given["prompt_ids"], "prompt_ids", may_be_empty=True)
        if forms == ["completion_ids"]:
            fields = {**_fields(given), "ids": given["completion_ids"]}
            samples = [_sample(prompt, fields, "completion_ids")]
        else:
            samples = _completions(prompt, given)
    return _group(given.get("group")), samples


def _given(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known fields of a row, by the first of their names."""
    given = {name: row[name] for name in FIELDS if row.get(name) is not None}
    for other, name in _OTHER_NAMES.items():
        if other in given and name in given:
            raise NotRolloutsError(MALFORMED, f"both {name} and {other}")
        if other in given:
            given[name] = given.pop(other)
    return given


def unread_of(row: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Return the names of fields of a row or its completions that are not kept, and hold more than a description.

    names: all fields of the row. A field that `row` lacks was not read, and counts; an empty field does not.
    """
    completions = row.get("completions")
    own = completions if isinstance(completions, list) else ()
    unread = {name for each in own if isinstance(each, Mapping) for name in _unknown(each, each, {"ids", *_BESIDE_IDS})}
    return unread.union(_unknown(row, names, FIELDS))


def _unknown(given: Mapping[str, Any], names: Iterable[str], known: Collection[str]) -> list[str]:
    others = (name for name in names if name not in known and name not in _DESCRIBING)
    return [name for name in others if name not in given or not says_nothing(given[name])]


class Behind:
    """A loader's counters and position as of a row before the one that it reads."""

    def __init__(self, counters: Counter[str] | None, position: dict[str, int] | None) -> None:
        """counters, position: shared with the builder; None without one."""
        self._shared, self._shared_position = counters, position
        self.counters: Counter[str] = Counter(counters)
        """Counters that the loader uses."""
        self.position = {} if position is None else dict(position)
        """Position that the loader uses."""
        self._published = Counter(counters)
        self._open: tuple[str | None, str] = (None, "")
        self.mark()

    def continues(self, name: str | None, path: str) -> bool:
        """Return whether a row belongs to the group of the row before: both name it, in one file."""
        before, self._open = self._open, (name, path)
        return name is not None and before == self._open

    def mark(self) -> None:
        """Remember the counts and the position as of now."""
        self._marked = Counter(self.counters), dict(self.position)

    def passes(self, is_own: bool) -> bool:
        """Publish the remembered counts and position to the builder if they are the partition's own. Returns is_own."""
        counts, position = self._marked
        new = counts - self._published
        self._published += new
        if is_own and self._shared is not None:
            self._shared.update(new)
        if is_own and self._shared_position is not None:
            self._shared_position.update(position)
        return is_own


def tokens_of(samples: Sequence[Rollout], before: int = 0, where: str = "") -> int:
    """Return the tokens of a group, for its limit. before: tokens of its earlier rows. where: names the row.

    Raises: SourceError E302 for more than MAX_GROUP_TOKENS or MAX_GROUP_SAMPLES.
    """
    least = MAX_GROUP_TOKENS // MAX_GROUP_SAMPLES  # tokens that a sample counts as: bounds the samples too
    tokens = before + sum(max(len(sample.ids), least) for sample in samples)
    if tokens > MAX_GROUP_TOKENS:
        raise SourceError(f"{where}: found {_too_many()}, expected smaller groups")
    return tokens


def _too_many() -> str:
    return f"a group of more than {MAX_GROUP_TOKENS:,} tokens or {MAX_GROUP_SAMPLES:,} samples"


def _group(value: Any) -> str | None:
    if value is None or (isinstance(value, str | int) and not isinstance(value, bool)):
        return None if value is None else str(value)
    raise NotRolloutsError(MALFORMED, f"{_kind(value)} in the field group")


def _completions(prompt: NDArray[np.int64], given: Mapping[str, Any]) -> list[Rollout]:
    completions = given["completions"]
    if not isinstance(completions, list) or not completions:
        raise NotRolloutsError(MALFORMED, f"{_kind(completions)} in the field completions")
    if len(completions) > MAX_GROUP_SAMPLES:
        raise NotRolloutsError(TOO_LARGE, _too_many())
    beside = _fields(given)
    for name, values in beside.items():
        if not isinstance(values, list) or len(values) != len(completions):
            raise NotRolloutsError(MALFORMED, f"{_kind(values)} in the field {name} for {len(completions)} completions")
    tokens, samples = 0, []
    for index, completion in enumerate(completions):
        own = completion if isinstance(completion, Mapping) else {"ids": completion}
        fields = {**_fields(own), "ids": own.get("ids")}
        for name in beside.keys() & fields.keys():
            raise NotRolloutsError(MALFORMED, f"{name} in completions[{index}] and beside completions")
        fields |= {name: values[index] for name, values in beside.items() if values[index] is not None}
        tokens += len(prompt) + (len(fields["ids"]) if isinstance(fields["ids"], list) else 0)
        if tokens > MAX_GROUP_TOKENS:  # before the prompt is copied once more
            raise NotRolloutsError(TOO_LARGE, _too_many())
        samples.append(_sample(prompt, fields, f"completions[{index}]"))
    return samples


def _fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields beside the ids, by the first of their names."""
    found: dict[str, Any] = {}
    for name, aliases in _ALIASES.items():
        here = [alias for alias in aliases if given.get(alias) is not None]
        if len(here) > 1:
            raise NotRolloutsError(MALFORMED, f"both {' and '.join(here)}")
        if here:
            found[name] = given[here[0]]
    return found


def _whole(given: Mapping[str, Any]) -> Rollout:
    import numpy as np

    ids, fields = _ids(given["ids"], "ids"), _fields(given)
    length = given.get("prompt_length", -1)
    if type(length) is not int or not -1 <= length <= len(ids):
        raise NotRolloutsError(MALFORMED, f"prompt_length {_kind(length)} for {len(ids)} ids")
    mask = _mask(fields["mask"], len(ids), "mask") if "mask" in fields else None
    if mask is None and length >= 0:
        mask = np.arange(len(ids)) >= length
    return _described(ids, length, mask, fields)


def _sample(prompt: NDArray[np.int64], fields: Mapping[str, Any], where: str) -> Rollout:
    import numpy as np

    completion = _ids(fields["ids"], where)
    mask = np.ones(len(completion), dtype=np.bool_)
    if "mask" in fields:
        mask = _mask(fields["mask"], len(completion), f"the mask of {where}")
    mask = np.concatenate([np.zeros(len(prompt), dtype=np.bool_), mask])
    return _described(np.concatenate([prompt, completion]), len(prompt), mask, fields)


def _described(
    ids: NDArray[np.int64], prompt_length: int, mask: NDArray[np.bool_] | None, fields: Mapping[str, Any]
) -> Rollout:
    length = len(ids) - max(prompt_length, 0)
    logprobs = _floats(fields["logprobs"], length, "logprobs") if "logprobs" in fields else None
    advantage = fields.get("advantage")
    if isinstance(advantage, list):
        advantage = _floats(advantage, length, "advantages")
    elif advantage is not None:
        advantage = float(_floats([advantage], 1, "advantage")[0])
    reward = fields.get("reward")
    if reward is not None:
        reward = float(_floats([reward], 1, "reward")[0])
    return Rollout(ids, prompt_length, mask, logprobs, advantage, reward)


def _ids(values: Any, name: str, *, may_be_empty: bool = False) -> NDArray[np.int64]:
    import numpy as np

    if not isinstance(values, list) or not (values or may_be_empty):
        raise NotRolloutsError(MALFORMED, f"{_kind(values)} in place of the ids of {name}")
    if values and (set(map(type, values)) != {int} or min(values) < 0 or max(values) > MAX_ID):
        wrong = next(value for value in values if type(value) is not int or not 0 <= value <= MAX_ID)
        raise NotRolloutsError(MALFORMED, f"{_kind(wrong)} among the ids of {name}")
    return np.array(values, dtype=np.int64)


def _mask(values: Any, length: int, name: str) -> NDArray[np.bool_]:
    import numpy as np

    if not isinstance(values, list) or len(values) != length:
        raise NotRolloutsError(MALFORMED, f"{_kind(values)} in {name}, for {length} ids")
    if not set(map(type, values)) <= {int, bool} or not {0, 1}.issuperset(values):
        wrong = next(value for value in values if type(value) not in (int, bool) or value not in (0, 1))
        raise NotRolloutsError(MALFORMED, f"{_kind(wrong)} in {name}, not 0 or 1")
    return np.array(values, dtype=np.bool_)


def _floats(values: Any, length: int, name: str) -> NDArray[np.float32]:
    import numpy as np

    if not isinstance(values, list) or len(values) != length:
        raise NotRolloutsError(MALFORMED, f"{_kind(values)} in the field {name}, for {length} ids")
    limit = float(np.finfo(np.float32).max)
    if set(map(type, values)) <= {int, float}:
        try:
            numbers = np.array(values, dtype=np.float64)
            if (np.abs(numbers) <= limit).all():  # nan is not
                return numbers.astype(np.float32)
        except OverflowError:  # an integer above 1.8e308
            pass
    wrong = next(value for value in values if type(value) not in (int, float) or not -limit <= value <= limit)
    raise NotRolloutsError(MALFORMED, f"{_kind(wrong)} in the field {name}")


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, int | float):
        return str(value)[:40]
    return f"a list of {len(value)}" if isinstance(value, list) else f"a value of type {type(value).__name__}"
