"""Write the bundled sample: python -m tools.sample.generate [DEST]

Without DEST the packaged files are replaced, by the same bytes unless this program changed. Python's random generator
is fine here, though torch's is the rule elsewhere (D9): it decides the words of the sample, and no byte of a cache. The
awkward cases are deliberate; each has its comment.
"""

from __future__ import annotations

import json
import random  # decides the bundled sample's words once, here; no cache bytes and no batches (D9)
import sys
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from niels_gpt.paths import REPO_ROOT
from tools.sample.prose import REQUESTS, fill, paragraph, pick, question, some, topic_at
from tools.sample.topics import GIVEN_NAMES, SURNAMES, TOPICS, TOWNS

SEED = 20_240_310
LONG_SENTINEL = "<|ngpt_eot_84a5023f67d74cf29cc4001becde983c|>"
SHORT_SENTINEL = "<|asst|>"
Row = dict[str, Any]


def sample_files() -> dict[str, bytes]:
    """Make every file of the corpus: relative POSIX path to content."""
    files = {
        "HuggingFaceFW/fineweb-edu/train-00000.jsonl": _jsonl(_web_pages()),
        "databricks/databricks-dolly-15k/databricks-dolly-15k.jsonl": _jsonl(_dolly_rows()),
    }
    for split, articles in (("train", 30), ("validation", 6), ("test", 6)):
        files[f"Salesforce/wikitext/{split}.txt"] = _articles(split, articles).encode()
    for split, trees in (("train", 26), ("validation", 6)):
        files[f"OpenAssistant/oasst1/{split}.messages.jsonl"] = _jsonl(_messages(split, trees))
    return files | _notes() | _books()


def write_sample(dest: Path) -> list[Path]:
    """Write the corpus below `dest` and return its files, in order of relative path."""
    written = []
    for name, content in sorted(sample_files().items()):
        path = dest / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        written.append(path)
    return written


def _rng(part: str) -> random.Random:
    # One generator for each part, so that a change to one leaves the files of the others alone.
    return random.Random(SEED + int.from_bytes(part.encode(), "big"))


def _jsonl(rows: Iterator[Row]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(bytes=bytes(int(rng.random() * 256) for _ in range(16)), version=4))


def _date(rng: random.Random) -> str:
    return f"2024-{1 + int(rng.random() * 3):02d}-{1 + int(rng.random() * 28):02d}T08:{int(rng.random() * 60):02d}:00Z"


def _web_pages() -> Iterator[Row]:
    rng = _rng("web")
    for index in range(120):
        topic = topic_at(index)
        title = f"Notes on {topic.name} from {pick(rng, TOWNS)}"
        body = "\n\n".join(paragraph(rng, topic, sentences=3 + int(rng.random() * 2)) for _ in range(2))
        text = _awkward_page(index, f"{title}\n\n{body}")
        score = round(2.5 + 2 * rng.random(), 4)
        yield {
            "text": text,
            "id": f"<urn:uuid:{_uuid(rng)}>",
            "dump": "CC-MAIN-2024-10",
            "url": f"https://example.org/{topic.name}/{index}",
            "date": _date(rng),
            "file_path": "sample/train-00000.jsonl",
            "language": "en",
            "language_score": round(0.9 + 0.1 * rng.random(), 4),
            "token_count": len(text) // 4,
            "score": score,
            "int_score": round(score),
        }


def _awkward_page(index: int, text: str) -> str:
    return {
        11: "",  # an empty document, which must not break a cache
        23: text + f"\n\nA page that quotes {LONG_SENTINEL} must not end a document.",
        37: text.replace("\n\n", "\r\n\r\n").replace(". ", ".\t") + "   ",  # CRLF, tabs, trailing spaces
        53: text + "\n\nThe mark \u2581 stands for a space inside SentencePiece.",
        71: text + "\n\n潮汐和面包在同一个港口。 コーヒーを一杯。 Ωμέγα, naïve façade, 🦉🌋 e\u0301.",
        89: " \n ",  # nothing but white space
        97: text.split("\n", maxsplit=1)[0],  # one short line
    }.get(index, text)


def _articles(split: str, number: int) -> str:
    # As in wikitext, a line begins and ends with a space, blank lines are a space, and tokens stand apart.
    rng, lines = _rng(f"wikitext {split}"), [""]
    for index in range(number):
        topic, town = topic_at(index + len(split)), TOWNS[(index + len(split)) % len(TOWNS)]
        lines += [f"= {topic.name.capitalize()} of {town} =", "", _spaced(paragraph(rng, topic, sentences=4)), ""]
        for section in ("History", "Practice"):
            lines += [f"= = {section} = =", "", _spaced(paragraph(rng, topic, sentences=3)), ""]
    return "".join(f" {line} \n" if line else " \n" for line in lines)


def _spaced(text: str) -> str:
    return text.replace(".", " .").replace(",", " ,").replace("-", " @-@ ")


def _dolly_rows() -> Iterator[Row]:
    rng = _rng("dolly")
    for index in range(200):
        topic = topic_at(index)
        with_context = index % 3 == 0
        context = paragraph(rng, topic, sentences=4) if with_context else ""
        first = context.split(". ", maxsplit=1)[0].rstrip(".") + "."
        row = {
            "instruction": fill(rng, pick(rng, REQUESTS), topic) if with_context else question(rng, topic),
            "context": context,
            "response": first if with_context else paragraph(rng, topic, sentences=2 + int(rng.random() * 3)),
            "category": ("closed_qa", "open_qa", "general_qa")[index % 3],
        }
        yield row | _awkward_dolly(index)


def _awkward_dolly(index: int) -> Row:
    return {
        17: {"response": "  "},  # blank: the loader drops it
        42: {"context": " \n"},  # white space only: as good as no context
        58: {"response": f"Never write {SHORT_SENTINEL} or {LONG_SENTINEL} in an answer."},
        77: {"instruction": "Übersetze «good morning» ins Französische! 🥐", "response": "« Bonjour ! »"},
        101: {"instruction": "Sort these:\r\n\t- pears\r\n\t- apples  ", "response": "\t- apples\n\t- pears"},
        150: {"response": "Yes"},
    }.get(index, {})


def _message(rng: random.Random, tree: list[Row], parent: Row | None, text: str, **changes: Any) -> Row:
    """Append one message in upstream's schema, with the role opposite to its parent's."""
    own_id = _uuid(rng)
    row: Row = {
        "message_id": own_id,
        "parent_id": parent["message_id"] if parent else None,
        "user_id": _uuid(rng),
        "created_date": _date(rng),
        "text": text,
        "role": "assistant" if parent and parent["role"] == "prompter" else "prompter",
        "lang": "en",
        "review_count": 3,
        "review_result": True,
        "deleted": False,
        "rank": None,
        "synthetic": False,
        "model_name": None,
        "detoxify": None,
        "message_tree_id": tree[0]["message_tree_id"] if tree else own_id,
        "tree_state": "ready_for_export",
        "emojis": None,
        "labels": None,
    }
    tree.append(row | changes)
    return tree[-1]


def _messages(split: str, number: int) -> Iterator[Row]:
    rng = _rng(f"oasst1 {split}")
    for index in range(number):
        topic, tree = topic_at(index + 5 * len(split)), list[Row]()
        root = _message(rng, tree, None, question(rng, topic))
        if split == "train" and index == 4:
            yield from tree  # a prompt that nobody answered
            continue
        for rank in range(1 + int(rng.random() * 2.3)):
            answer = _message(rng, tree, root, paragraph(rng, topic, sentences=3), rank=rank)
            if rng.random() < 0.5:
                again = _message(rng, tree, answer, question(rng, topic))
                _message(rng, tree, again, f"Certainly. {paragraph(rng, topic, sentences=2)}", rank=0)
        if split == "train":
            _awkward_tree(rng, tree, index)
        yield from tree


def _awkward_tree(rng: random.Random, tree: list[Row], index: int) -> None:
    root, answer = tree[0], tree[1]
    if index == 2:  # an orphan with a reply of its own
        lost = _message(rng, tree, root, "My question is gone.", parent_id=_uuid(rng))
        _message(rng, tree, lost, "Then so is this answer's place.")
    elif index == 6:  # a cycle of two
        one = _message(rng, tree, root, "I answer the message that answers me.")
        two = _message(rng, tree, one, "And I you.")
        one["parent_id"] = two["message_id"]
    elif index == 8:  # another language, and what follows it
        other = _message(rng, tree, answer, "¿Puedes explicarlo en español, por favor?", lang="es")
        _message(rng, tree, other, "Claro que sí, con mucho gusto. 🙂", lang="es")
    elif index == 10:
        _message(rng, tree, root, "This reply was taken back.", deleted=True)
    elif index == 12:  # a blank message in the middle
        blank = _message(rng, tree, answer, " \n")
        _message(rng, tree, blank, "An answer to nothing.")
    elif index == 14:  # one role twice in a row
        _message(rng, tree, answer, "I forgot to say more.", role="assistant")
    elif index == 16:
        _message(rng, tree, root, f"  A reply that spells {SHORT_SENTINEL} out.\r\n")


def _notes() -> dict[str, bytes]:
    rng, notes = _rng("roam"), dict[str, bytes]()
    for index, topic in enumerate(TOPICS):
        name = topic.name.capitalize() if index % 4 else f"topics/{topic.name}"
        notes[f"roam/{name}.md"] = _note(rng, index).encode()
    for day in range(1, 17):
        notes[f"roam/journal/2024/2024_03_{day:02d}.md"] = _journal(rng, day).encode()
    notes["roam/cafe ideas.md"] = "- Café ☕ idées\n    - crème brûlée 🍮 → [[Bread]]\n\t- 珈琲 #drinks\n".encode()
    notes["roam/empty.md"] = b""
    notes["roam/old encoding.md"] = b"- a note saved as Latin-1: caf\xe9, na\xefve \xff\xfe\n- see [[Libraries]]\n"
    return notes


def _note(rng: random.Random, index: int) -> str:
    topic, (first, second) = topic_at(index), some(rng, TOPICS, 2)
    facts = "\n".join(f"    - {fact}" for fact in some(rng, topic.facts, 3))
    return (
        f"# {topic.name.capitalize()}\n\n- Read by {pick(rng, GIVEN_NAMES)} #reading #{topic.name}\n{facts}\n"
        f"        - compare [[{first.name}]] and [[{second.name}|the other note]]\n"
        f"- {fill(rng, 'Ask {person} about the {things} in {town}.', topic)}\n    - [ ] write it down\n"
    )


def _journal(rng: random.Random, day: int) -> str:
    topics = some(rng, TOPICS, 2)
    lines = [f"- 08:{day:02d} [[{topic.name}]] {paragraph(rng, topic, sentences=2)} #daily" for topic in topics]
    return "\n\t".join(lines) + f"\n- tomorrow: [[2024_03_{day + 1:02d}]]"  # no newline at the end, as some editors do


def _books() -> dict[str, bytes]:
    ends = {"the-tide-clock": "\n", "a-winter-at-hollowdale": "\r\n"}
    return {f"gutenberg/{title}.txt": _book(title, end) for title, end in ends.items()}


def _book(title: str, end: str) -> bytes:
    rng, heading = _rng(title), title.replace("-", " ").upper()
    chapters = [heading, f"by {pick(rng, GIVEN_NAMES)} {pick(rng, SURNAMES)}"]
    for number, topic in enumerate(some(rng, TOPICS, 8), 1):
        chapters += [f"CHAPTER {number}. {topic.name.capitalize()}"]
        chapters += [_wrapped(paragraph(rng, topic, sentences=7), end) for _ in range(2)]
    text = (end * 2).join(chapters) + end
    return (b"\xef\xbb\xbf" if end == "\r\n" else b"") + text.encode()  # CRLF and a byte order mark, as many books have


def _wrapped(text: str, end: str) -> str:
    lines = [""]
    for word in text.split(" "):
        if len(lines[-1]) + len(word) >= 72:
            lines.append(word)
        else:
            lines[-1] = f"{lines[-1]} {word}".strip()
    return end.join(lines)


def main(arguments: Sequence[str]) -> None:
    """Write the corpus into the folder named, or into the package."""
    if len(arguments) > 1 or arguments[:1] in (["-h"], ["--help"]):
        sys.exit(__doc__)
    dest = Path(arguments[0]) if arguments else REPO_ROOT / "niels_gpt" / "data" / "sample"
    files = write_sample(dest)
    print(f"{len(files)} files, {sum(path.stat().st_size for path in files):,} bytes in {dest}")


if __name__ == "__main__":
    main(sys.argv[1:])
