"""eagle3 respond --server against the real `transformers serve`."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from support import chat_tokenizers as kinds
from support.commands import niels_gpt
from support.eagle3_replies import END
from support.tiny_hub_models import write_model

pytestmark = pytest.mark.slow
SAID = ("Hello there.", "I am well.", "The river is long, and its water is cold.", "And why?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny Llama that writes only tokens of ASCII, and ends a turn now and then."""
    from safetensors.torch import load_file, save_file

    from niels_gpt.chat import open_tokenizer

    made = write_model(tmp_path_factory.mktemp("served") / "tiny", seed=0)
    tokenizer, weights = open_tokenizer(str(made)), load_file(made / "model.safetensors")
    head = weights["lm_head.weight"]
    texts = [tokenizer.decode([number]) if number < tokenizer.vocab_size else "" for number in range(len(head))]
    plain = [number for number, text in enumerate(texts) if text.isascii() and text.isprintable() and text]
    for number in set(range(len(head))) - {each for each in plain if each > 6}:
        head[number] = head[plain[-1]] / 2  # never the most probable one, but where all are below 0
    head[END] = weights["model.embed_tokens.weight"][plain[0]] * 4
    save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((made / "generation_config.json").read_text())
    (made / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [END]}))
    return made


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    """The URL of `transformers serve` with this model, in fp32."""
    log = tmp_path_factory.mktemp("log") / "serve.log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), "--host", "127.0.0.1"]
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--device", "cpu", "--dtype", "float32"],
            stdout=out,
            stderr=out,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"},
        )
    try:
        end = time.monotonic() + 120
        while not is_up(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < end, log.read_text()
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def is_up(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("questions") / "chats.jsonl"
    chats = [kinds.turns(*[f"{number} {SAID[number % 4]}"] * (1 + number % 3)) for number in range(24)]
    path.write_text("".join(json.dumps({"id": f"c{at}", "messages": chat}) + "\n" for at, chat in enumerate(chats)))
    return path


def respond(folder, questions, path, *how):
    what = ["--target-model", folder, "--input-data", questions, "--output", path, "--max-new-tokens", 12]
    done = niels_gpt("eagle3", "respond", *what, *how)
    assert done.status == 0, done.err
    rows = {row["id"]: row for row in map(json.loads, path.read_text().splitlines())}
    return rows, json.loads(Path(f"{path}.record").read_text())["counts"]


def test_greedy_replies_are_the_targets_own(folder, server, questions, tmp_path):
    ask = ["--server", server, "--model", folder]
    own = ["--device", "cpu", "--threads", 1, "--batch-size", 1]
    expected, _ = respond(folder, questions, tmp_path / "own.jsonl", *own)
    found, counts = respond(folder, questions, tmp_path / "served.jsonl", *ask)
    assert found == expected and len(expected) > 20
    assert counts["ids_of_text"] >= len(expected) and "other_token_count" not in counts
