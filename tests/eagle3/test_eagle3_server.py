"""eagle3 respond --server: replies by the chat-completions API, from a server that is a stranger."""

import contextlib
import json
import logging
import time
import traceback
from pathlib import Path

import pytest
from support import chat_tokenizers as kinds
from support.chat_servers import ChatServer
from support.commands import niels_gpt
from support.eagle3_replies import END, appending
from support.errors import refused

from niels_gpt.chat import open_tokenizer
from niels_gpt.eagle3.server import Client, chat_url
from niels_gpt.storage.waits import Waits

ASKED = [f"Page {number}?" for number in range(12)]
SOON = Waits(0.0, 0.01)
WITH_TOOLS = "{{ tools | tojson if tools }}" + kinds.CHATML.replace(
    "message.content +",
    "message.content + (message.tool_calls[0].function | tojson if message.tool_calls else '') +",
)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer with its template, and a config: no weights."""
    import transformers

    made = kinds.write_tokenizer(tmp_path_factory.mktemp("served") / "tiny", template=kinds.CHATML)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    transformers.LlamaConfig(**sizes, vocab_size=400, max_position_embeddings=512).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder):
    return open_tokenizer(str(folder))


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(
        "".join(json.dumps({"id": f"c{at}", "messages": kinds.turns(text)}) + "\n" for at, text in enumerate(ASKED))
    )
    return path


@pytest.fixture
def run(folder, chats, tmp_path):
    """Runs the command in this process; returns how it ended and the file."""

    def done(server, *more, name="replies.jsonl", env=None):
        path = tmp_path / name
        what = ["--target-model", folder, "--input-data", chats, "--output", path, "--max-new-tokens", 64]
        ask = ["--server", getattr(server, "url", server), "--model", "tiny", "--concurrency", 4]
        return niels_gpt(*what, *ask, *more, module="niels_gpt.eagle3.respond", env=env), path

    return done


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def record_of(path):
    return json.loads(Path(f"{path}.record").read_text())


def page_of(question):
    return int(question["messages"][-1]["content"].split()[1].rstrip("?"))


def says(question):
    """A reply of its own to each page; the first pages answer last."""
    page = page_of(question)
    time.sleep(0.01 * (12 - page))
    return f"Page {page} is long."


# --- questions and rows -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["plain", "strict", "vllm", "sglang"])
def test_replies_come_in_the_order_of_the_chats_with_ids_where_the_server_gives_them(run, tokenizer, form):
    with ChatServer(tokenizer, says, form=form) as server:
        done, path = run(server, "--form", "ids", "--temperature", "0.5", "--top-p", "0.9", "--seed", "7")
    assert done.status == 0, done.err
    rows, record = rows_of(path), record_of(path)
    assert [row["id"] for row in rows] == [f"c{page}#1" for page in range(12)]
    for page, row in enumerate(rows):
        text = f"<|im_start|>user\nPage {page}?<|im_end|>\n<|im_start|>assistant\nPage {page} is long.<|im_end|>"
        assert tokenizer.decode(row["input_ids"]) == text and row["finish"] == "stop"
        assert (
            tokenizer.decode([each for each, bit in zip(row["input_ids"], row["loss_mask"], strict=True) if bit])
            == f"Page {page} is long.<|im_end|>"
        )
    by = "ids_of_server" if form in ("vllm", "sglang") else "ids_of_text"
    assert record["counts"][by] == 12 and "other_token_count" not in record["counts"]
    assert record["counts"]["served: tiny"] == record["counts"]["served: fp_1"] == 12
    assert record["server"] == {"url": f"{server.url}/v1", "reproducible": False}
    assert record["settings"]["server"] == {"model": "tiny", "ids": "auto"} and "run" not in record["settings"]
    assert record["settings"]["target"]["weights_sha256"] is None
    answered = [each for each in server.questions if form != "strict" or "return_token_ids" not in each]
    assert len(answered) == 12 and len(server.questions) <= (16 if form == "strict" else 12)
    assert {(each["model"], each["temperature"], each["top_p"], each["max_tokens"]) for each in answered} == {
        ("tiny", 0.5, 0.9, 64)
    }
    assert len({each["seed"] for each in answered}) == 12 and not any(server.keys)


def test_system_prompt_tools_calls_and_earlier_replies_reach_the_server(run, chats, folder, tmp_path):
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        {"role": "system", "content": "Be brief."},
        *kinds.turns("Page 1?", "a", "Page 2?"),
        {"role": "assistant", "content": "", "tool_calls": [call], "weight": 0},
        {"role": "tool", "content": "4"},
    ]
    template = tmp_path / "tools.jinja"
    template.write_text(WITH_TOOLS)
    chats.write_text(json.dumps({"id": "c", "messages": chat, "tools": TOOLS}) + "\n")
    with_tools = open_tokenizer(str(folder), chat_template=WITH_TOOLS)
    with ChatServer(with_tools, lambda _: "It is 4.") as server:
        done, _ = run(server, "--turns", "last", "--chat-template", template, name="last.jsonl")
        assert done.status == 0, done.err
        chats.write_text(json.dumps({"id": "c", "messages": chat[:4]}) + "\n")
        assert run(server)[0].status == 0
    last, first, second = server.questions
    assert last["tools"] == TOOLS and last["messages"][:4] == chat[:4] and last["messages"][5] == chat[5]
    arguments = {"name": "add", "arguments": '{"a": 1}'}
    calls = [{"id": "call_0", "type": "function", "function": arguments}]
    assert last["messages"][4] == {"role": "assistant", "content": "", "tool_calls": calls}
    assert [each["content"] for each in first["messages"]] == ["Be brief.", "Page 1?"] and "tools" not in first
    assert [each["content"] for each in second["messages"]] == ["Be brief.", "Page 1?", "It is 4.", "Page 2?"]


def test_the_ids_that_the_target_chose_are_kept_where_its_text_has_others(run, tokenizer, chats):
    letters = [tokenizer._backend.encoded([each])[0][0][0] for each in "Hello"]
    fox = tokenizer._backend.encoded(["🦊"])[0][0]
    assert len(fox) > 1 and tokenizer._backend.encoded(["Hello"])[0][0] != letters
    chats.write_text("".join(chats.read_text().splitlines(True)[:2]))
    ids = [[*letters, END], [*letters, fox[0], END]]
    with ChatServer(tokenizer, lambda asked: {"text": "Hello", "ids": ids[page_of(asked)]}, form="vllm") as server:
        rows = rows_of(run(server, "--form", "ids")[1])
        assert [row["input_ids"][-len(own) :] for row, own in zip(rows, ids, strict=True)] == ids
        done, path = run(server, name="messages.jsonl")
        assert record_of(path)["counts"]["replaced_characters"] == 1 and [row["id"] for row in rows_of(path)] == ["c0"]
    assert "--form ids keeps them" in done.out
    with ChatServer(tokenizer, lambda asked: {"text": "Hello" + "\ufffd" * page_of(asked), "ids": ids[0]}) as server:
        _, path = run(server, "--form", "ids", name="text.jsonl")
    counts = record_of(path)["counts"]
    assert (counts["replaced_characters"], counts["replies"], counts["other_token_count"]) == (1, 1, 1)


def test_what_is_not_the_targets_own_text_is_dropped_and_counted(run, tokenizer):
    dropped = {
        1: ("finished_otherwise", {"text": "so", "finish": "content_filter"}),
        2: ("reasoning_split_off", {"text": "so", "message": {"reasoning_content": "hm"}}),
        3: ("calls_tools", {"text": "so", "finish": "tool_calls", "message": {"tool_calls": [{}]}}),
        4: ("special_text", {"text": "so <|eot|> it is"}),
        5: ("empty_reply", {"text": " \n"}),
        6: ("other_prompt", {"text": "so", "usage": {"prompt_tokens": 7}}),
        9: ("longer_than_asked", {"text": "so", "usage": {"completion_tokens": 65}}),
        7: ("refused_by_server", {"status": 400, "body": b'{"error": {"message": "too long"}}'}),
    }

    def answer(asked):
        page = page_of(asked)
        time.sleep(0.2 * (page > 0))  # an answer that fits comes first
        return dropped[page][1] if page in dropped else "Fine."

    with ChatServer(tokenizer, answer) as server:
        done, path = run(server)
    counts = record_of(path)["counts"]
    assert [counts[reason] for reason, _ in dropped.values()] == [1] * 8 and counts["replies"] == 4
    assert [row["id"] for row in rows_of(path)] == [f"c{page}" for page in (0, 8, 10, 11)]
    assert "too long" in done.err and "reasoning parser" in done.out


def refusing(page, status, *, slow=0.3):
    """Answers at once to all pages but the named one, which gets a status; the others answer later."""

    def answer(asked):
        if page_of(asked) in page:
            return {"status": status, "body": b"not this one"}
        time.sleep(slow)
        return "Fine."

    return answer


@pytest.mark.parametrize("status", [400, 500])
def test_a_chat_that_the_server_refuses_before_its_first_reply_does_not_end_the_run(
    run, tokenizer, monkeypatch, status
):
    monkeypatch.setattr("niels_gpt.eagle3.server.ATTEMPTS", 1)
    with ChatServer(tokenizer, refusing([0, 2], status)) as server:
        done, path = run(server)
        assert done.status == 0, done.err
        server.says = lambda _: {"status": status, "body": b"none of them"}
        failed, _ = run(server, name="failed.jsonl")
    assert record_of(path)["counts"]["refused_by_server"] == 2 and len(rows_of(path)) == 10
    assert "not this one" in done.err
    assert (
        failed.status == 1 and f"error[E{613 if status == 500 else 614}]" in failed.err and "none of them" in failed.err
    )


def test_a_server_that_fails_from_some_chat_on_ends_the_run_and_loses_no_chat(run, tokenizer, monkeypatch):
    monkeypatch.setattr("niels_gpt.eagle3.server.ATTEMPTS", 1)
    with ChatServer(tokenizer, refusing(range(2, 12), 500, slow=0)) as server:
        done, path = run(server, "--concurrency", "1")
        assert done.status == 1 and "error[E613]" in done.err
        server.says = says
        assert run(server)[0].status == 0
    assert len(rows_of(path)) == 12 and "refused_by_server" not in record_of(path)["counts"]


def test_a_prompt_of_which_the_server_says_nothing_is_counted(run, tokenizer):
    with ChatServer(tokenizer, lambda _: {"text": "Fine.", "usage": None}) as server:
        done, path = run(server)
    assert record_of(path)["counts"]["prompt_not_compared"] == 12 and "prompt_not_compared 12" in done.out


def test_three_refusals_are_shown_and_a_bounded_number_of_names_is_counted(run, tokenizer):
    refusal = {"status": 422, "body": b"too long"}
    with ChatServer(tokenizer, lambda asked: refusal if page_of(asked) > 4 else "Fine.") as server:
        done, path = run(server, "--concurrency", "1")
    assert done.err.count("too long") == 3 and record_of(path)["counts"]["refused_by_server"] == 7
    with ChatServer(
        tokenizer, lambda asked: {"text": "Fine.", "names": (f"a{page_of(asked)}", f"b{page_of(asked)}")}
    ) as server:
        _, path = run(server, name="names.jsonl")
    counts = record_of(path)["counts"]
    names = [name for name in counts if name.startswith("served: ")]
    assert len(names) == 17 and counts["served: other names"] == 8


@pytest.mark.parametrize("form", ["plain", "vllm"])
def test_a_server_with_another_template_is_refused(run, tokenizer, form):
    other = {"text": "so", "prompt_ids": [2, 9, 9], "usage": {"prompt_tokens": 3}}
    with ChatServer(tokenizer, lambda _: other, form=form) as server:
        done, path = run(server)
    assert done.status == 1 and "error[E614]" in done.err and "--chat-template" in done.err
    assert ("token 1:" if form == "vllm" else "3 tokens there") in done.err and not path.exists()


def test_ids_may_be_required_or_never_asked_for(run, tokenizer):
    with ChatServer(tokenizer, says, form="vllm") as server:
        assert record_of(run(server, "--server-ids", "never")[1])["counts"]["ids_of_text"] == 12
        assert not any("return_token_ids" in each for each in server.questions)
    for form in ("plain", "strict"):
        with ChatServer(tokenizer, says, form=form) as server:
            done, _ = run(server, "--server-ids", "require", name=f"{form}.jsonl")
            assert done.status == 1 and "error[E614]" in done.err


# --- resuming ---------------------------------------------------------------------------------------------------------


def test_a_killed_run_resumes_at_another_port_and_asks_only_for_the_rest(run, tokenizer):
    with ChatServer(tokenizer, says) as server:
        whole = run(server, name="whole.jsonl")[1].read_bytes()
        appended = []

        def killed(append, file, chats):
            append(file, chats)
            appended.extend(chats)
            if len(appended) == 5:
                raise KeyboardInterrupt

        with appending(killed):
            done, path = run(server)
        assert done.status == 130 and not path.exists()
    with ChatServer(tokenizer, says) as server:
        done, _ = run(server, "--model", "other")
        assert done.status == 1 and "error[E703]" in done.err and "server" in done.err
        done, path = run(server, "--concurrency", "2")
        assert done.status == 0 and path.read_bytes() == whole and len(server.questions) == 7
    assert record_of(path)["server"]["url"].startswith(server.url)


# --- a stranger -------------------------------------------------------------------------------------------------------

QUESTION = {"messages": kinds.turns("Page 3?"), "max_tokens": 4}


def asking(server, **more):
    return Client(chat_url(server.url), "tiny", waits=SOON, **{"timeout_s": 5.0, **more}).ask(QUESTION)


def test_a_busy_server_is_asked_again_and_a_dead_one_not_for_ever(tokenizer, caplog):
    busy = [{"status": 429, "headers": {"Retry-After": "0"}, "body": b"slow down"}, {"status": 503, "body": b"loading"}]
    left = list(busy)
    with ChatServer(tokenizer, lambda _: left.pop(0) if left else "so") as server:
        assert asking(server).text == "so" and len(server.questions) == 3
        assert [record.code for record in caplog.records] == ["W613", "W613"] and "slow down" in caplog.text
        server.says = lambda _: busy[1]
        with refused("E613", "6 attempts", "503 loading"):
            asking(server)
        server.says = lambda _: {"status": 429, "headers": {"Retry-After": "9999"}, "body": b""}
        with refused("E613", "1 attempts"):
            asking(server)
    assert len(server.questions) == 10
    with refused("E613", "6 attempts"):  # nobody listens any more
        asking(server)


def test_an_answer_without_end_is_cut_off_in_time_and_in_bytes(tokenizer, monkeypatch):
    def drips(begin, piece, status=200):
        def answer(handler):
            handler.wfile.write(b"HTTP/1.1 %d OK\r\n" % status + begin)
            with contextlib.suppress(OSError):  # the client hangs up
                for _ in range(100):
                    handler.wfile.write(piece)
                    time.sleep(0.02)

        return answer

    def pours(handler):
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(b" " * 65536)
        except OSError:
            pass

    monkeypatch.setattr("niels_gpt.eagle3.server.ATTEMPTS", 2)
    with ChatServer(tokenizer, says) as server:
        for drip in [
            drips(b"\r\n", b" "),
            drips(b"X: ", b"x"),
            drips(b"Transfer-Encoding: chunked\r\n\r\n1;", b"x"),
            drips(b"\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", status=100),
            lambda _: time.sleep(0.5),
        ]:
            server.says = lambda _, drip=drip: {"write": drip}
            with refused("E613", "2 attempts", "no whole answer in 0.1 s"):
                asking(server, timeout_s=0.1)
        server.says = lambda _: {"write": pours}
        with refused("E614", "16,777,216 bytes"):
            asking(server)


def test_an_answer_that_ends_early_is_asked_for_again(tokenizer, caplog):
    half = {"headers": {"Content-Length": 10_000}, "body": b'{"choices": ['}
    left = [half, {**half, "status": 503}]
    with ChatServer(tokenizer, lambda _: left.pop(0) if left else "so") as server:
        assert asking(server).text == "so" and len(server.questions) == 3
    assert caplog.text.count("bytes early") == 2


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"<html>", "Expecting value"),
        (b"[" * 100_000, "not an answer"),
        (b"[]", "the answer"),
        (b'{"choices": []}', "choices[0]"),
        (b'{"choices": [{"message": {"content": 7}}]}', "choices[0].message.content"),
        (b'{"choices": [{"message": {}, "token_ids": [1, -1]}]}', "choices[0].token_ids"),
        (b'{"choices": [{"message": {}, "token_ids": [true]}]}', "choices[0].token_ids"),
        (b'{"choices": [{"message": {}}], "usage": {"prompt_tokens": "7"}}', "usage.prompt_tokens"),
    ],
)
def test_a_broken_answer_is_named_by_its_field(tokenizer, body, field):
    with ChatServer(tokenizer, lambda _: {"body": body}) as server, refused("E614", server.url, field):
        asking(server)
    assert len(server.questions) == 1


def test_a_refusal_has_the_servers_words_printable_and_short(tokenizer):
    words = b'{"error": {"message": "no\\u001b[31m such model' + b"!" * 9999 + b'"}}'
    words = {"status": 404, "body": words}
    with ChatServer(tokenizer, lambda _: words) as server, refused("E614", "404", "no [31m such model!!!") as found:
        asking(server)
    assert len(str(found)) < 500 and str(found).isprintable()


def test_a_redirect_is_not_followed(tokenizer):
    with ChatServer(tokenizer, says) as other:
        place = f"{other.url}/v1/chat/completions"
        elsewhere = {"status": 307, "headers": {"Location": place}, "body": b""}
        with ChatServer(tokenizer, lambda _: elsewhere) as server, refused("E614", "307", place):
            asking(server, key="secret-key")
    assert other.questions == []


def test_the_key_is_sent_and_appears_nowhere(run, tokenizer, caplog):
    caplog.set_level(logging.DEBUG)
    key, env = "sk-secret-4711", {"MY_KEY": "sk-secret-4711\n"}
    with ChatServer(tokenizer, says) as server:
        done, path = run(server, "--api-key-env", "MY_KEY", env=env)
        dry, _ = run(server, "--api-key-env", "MY_KEY", "--dry-run", name="dry.jsonl", env=env)
        assert set(server.keys) == {f"Bearer {key}"} and len(server.keys) == 12
        echo = {"status": 401, "body": json.dumps({"error": f"wrong key {key}"}).encode()}
        server.says = lambda _: echo
        failed, _ = run(server, "--api-key-env", "MY_KEY", name="failed.jsonl", env=env)
        assert failed.status == 1 and "wrong key ***" in failed.err
        server.says = lambda _: {**echo, "status": 500}
        with refused("E613", "***") as found:
            asking(server, key=key)
        server.says = lambda _: {"text": "so", "usage": {"prompt_tokens": key}}
        with refused("E614", "usage.prompt_tokens", "***") as broken:
            asking(server, key=key)
        server.says = lambda _: {"text": "so", "names": (key, f"fp_{key}")}
        assert asking(server, key=key).served == ("***", "fp_***")
    assert "the key in $MY_KEY" in dry.out and f"POST {server.url}/v1/chat/completions" in dry.out
    files = [file.read_text() for file in path.parent.iterdir()]
    shown = [
        done.out,
        done.err,
        dry.out,
        dry.err,
        failed.out,
        failed.err,
        *("".join(traceback.format_exception(each.error)) for each in (found, broken)),
        caplog.text,
        repr(Client("u", "m", key=key)),
    ]
    assert not any("secret" in text for text in [*files, *shown])
    with pytest.raises(ValueError) as error:
        Client("u", "m", key="secret\r\nX: y")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        (["--server", "http://me:secret@host/v1", "--model", "m"], "--api-key-env"),
        (["--server", "http://me:12/secret@host", "--model", "m"], "--api-key-env"),
        (["--server", "http://host/v1?key=secret", "--model", "m"], "--api-key-env"),
        (["--server", "http://host", "--model", "m", "--api-key-env", "sk-secret"], "--api-key-env"),
        (["--server", "file:///etc/passwd", "--model", "m"], "--server"),
        (["--server", "http://host/a b", "--model", "m"], "--server"),
        (["--server", "http://host:port", "--model", "m"], "--server"),
        (["--server", "http://host"], "--model"),
        (["--server", "http://host", "--model", "m", "--device", "cpu"], "--device"),
        (["--server", "http://host", "--model", "m", "--batch-size", "4"], "--batch-size"),
        (["--concurrency", "4"], "--concurrency"),
    ],
)
def test_options_that_do_not_go_together_are_named(folder, chats, tmp_path, arguments, found):
    what = ["--target-model", folder, "--input-data", chats, "--output", tmp_path / "r.jsonl"]
    done = niels_gpt(*what, *arguments, module="niels_gpt.eagle3.respond")
    assert done.status == 2 and found in done.err and "secret" not in done.err


def test_a_url_without_a_path_has_the_usual_one():
    assert chat_url("http://h:8000/") == "http://h:8000/v1" == chat_url("http://h:8000/v1/")
    assert chat_url("https://h/openai") == "https://h/openai"
