"""What a release of the library tokenizers gives: in this process, and in one that imports another release.

As a module: `in_release(folder, function, *arguments)` calls one of the functions below in a process with the release
in `folder`, and returns its result as JSON has it. As a script it is that process.
"""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

from niels_gpt.storage.codes import code_of
from niels_gpt.tokenizers.engine import open_engine
from niels_gpt.tokenizers.huggingface import HuggingFaceTokenizer

RELEASE = "1.0.0rc3"
DECODED = 500  # texts
ROOT = Path(__file__).parents[2]


def environment(folder):
    """Return the environment of a process that imports the packages of `folder` first."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT, ROOT / "tests")))}


def in_release(folder, function, *arguments):
    done = subprocess.run(
        [sys.executable, __file__, function.__name__],
        input=json.dumps(arguments),
        env=environment(folder),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def seen(files, texts):
    """Return what each tokenizer.json gives for the texts, and says of itself; code and text of an error."""
    return [_seen(file, texts) for file in files]


def _seen(file, texts):
    try:
        tokenizer = HuggingFaceTokenizer(file)
    except Exception as error:
        return {"code": code_of(error), "text": str(error)}
    ids = [each.tolist() for each in tokenizer.encode_batch(texts)]
    return {
        "ids": ids,
        "plain": [each.tolist() for each in tokenizer.encode_plain(texts)],
        "decoded": [tokenizer.decode(each) for each in ids[:DECODED]],
        "tokens": [tokenizer.token(number) for number in range(tokenizer.vocab_size)],
        "by token": [tokenizer.token_id(tokenizer.token(number)) for number in range(tokenizer.vocab_size)],
        "added": tokenizer.added_tokens(),
        "special": [sorted(tokenizer.control_ids), tokenizer.unk_id, tokenizer.eos_id, list(tokenizer.start_ids)],
    }


def engines(file, texts):
    """Return the names of the engines by choice, whether their ids are equal, the note, and codes of warnings."""
    codes = []
    watch = logging.Handler(logging.WARNING)
    watch.emit = lambda record: codes.append(getattr(record, "code", ""))
    tokenizer = HuggingFaceTokenizer(file)
    logging.getLogger("niels_gpt").addHandler(watch)
    try:
        opened = [open_engine(tokenizer, choice) for choice in ("auto", "reference", "gigatoken")]
    finally:
        logging.getLogger("niels_gpt").removeHandler(watch)
    ids = [engine.encode([text.encode() for text in texts], first=0)[0].tolist() for engine in opened]
    return [engine.name for engine in opened], ids[0] == ids[1] == ids[2], tokenizer.library.note, codes


def refusal(folder):
    """Return code and text of the error of opening a folder as a target's tokenizer, for chats by its template."""
    from niels_gpt.chat.tokenizers import open_tokenizer

    try:
        open_tokenizer(folder)
    except Exception as error:
        return [code_of(error), str(error)]


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*json.load(sys.stdin))))
