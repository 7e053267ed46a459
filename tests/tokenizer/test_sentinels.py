"""An existing tokenizer with the four sentinels: new ids for them, and no other change."""

import json
import os

import pytest
from support.errors import refused
from support.made_tokenizers import any_tokenizer, made_tokenizer, sample_texts, sentencepiece_model, write_tokenizer

from niels_gpt.commands.main import main
from niels_gpt.special_tokens import SPECIAL_TOKEN_NAMES, SPECIAL_TOKENS, find_reserved_literal
from niels_gpt.tokenizer import SentencePieceTokenizer, load_tokenizer
from niels_gpt.tokenizers.document_tokens import document_end
from niels_gpt.tokenizers.sentinels import add_sentinels

TEXTS = [text for text in sample_texts() if find_reserved_literal(text) is None][:40]
CHAT = f"{SPECIAL_TOKENS[0]}a text{SPECIAL_TOKENS[3]}{SPECIAL_TOKENS[1]}{SPECIAL_TOKENS[3]}"
OF_MODELS = {"unigram": {}, "bpe": {"model_type": "bpe"}, "prefix": {"add_dummy_prefix": True}}


@pytest.fixture(
    scope="module", params=["neox", "t5", "small llama3", pytest.param("llama3", marks=pytest.mark.slow), *OF_MODELS]
)
def source(request, tmp_path_factory):
    """A tokenizer without the sentinels, of each kind."""
    if request.param not in OF_MODELS:
        return any_tokenizer(request.param)
    return sentencepiece_model(tmp_path_factory.mktemp("model") / "m.model", **OF_MODELS[request.param])


def test_the_sentinels_are_the_next_ids_and_no_other_id_changes(tmp_path, source):
    before = load_tokenizer(source)
    made = add_sentinels(source, tmp_path / "out")
    after, size = load_tokenizer(tmp_path / "out", sentinels="required"), before.vocab_size
    assert made.tokenizer_sha256 == after.sha256 != before.sha256
    assert (made.model_path, made.tokenizer_kind) == (after.model_path, after.kind) and after.kind == before.kind
    assert (made.vocab_size_before, made.vocab_size, after.vocab_size) == (size, size + 4, size + 4)
    assert (
        made.special_token_ids
        == after.special_token_ids()
        == dict(zip(SPECIAL_TOKEN_NAMES, range(size, size + 4), strict=True))
    )
    assert [ids.tolist() for ids in after.encode_batch(TEXTS)] == [ids.tolist() for ids in before.encode_batch(TEXTS)]
    assert [after.token(token_id) for token_id in range(size)] == [before.token(token_id) for token_id in range(size)]
    assert (after.eos_id, after.unk_id) == (before.eos_id, before.unk_id)
    assert after.control_ids == before.control_ids | set(range(size, size + 4))
    end = document_end(after)
    assert end is not None and (end.token, end.id) == (SPECIAL_TOKENS[3], size + 3)
    ids = after.encode(CHAT)
    assert [each for each in ids if each >= size] == [size, size + 3, size + 1, size + 3]
    assert after.decode(ids) == CHAT
    assert not after.control_ids.intersection(after.encode_plain([CHAT])[0].tolist())
    if source.name != "m.model" or before.decode(before.encode(" x")) == " x":  # without a dummy prefix
        assert after.decode(after.encode_plain([CHAT])[0].tolist()) == CHAT


def test_the_other_files_are_copied_and_nothing_is_overwritten(tmp_path):
    source = write_tokenizer(tmp_path / "t", "t5")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "weights.bin").write_bytes(b"0")
    out = tmp_path / "new" / "out"
    add_sentinels(source / "tokenizer.json", out)
    assert sorted(os.listdir(out)) == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(os.listdir(out.parent)) == ["out"]
    assert (out / "tokenizer_config.json").read_bytes() == (source / "tokenizer_config.json").read_bytes()
    changed, original = (json.loads((folder / "tokenizer.json").read_text()) for folder in (out, source))
    added = changed.pop("added_tokens")
    assert added[: len(original["added_tokens"])] == original.pop("added_tokens") and changed == original
    with refused("E504", out, kind=FileExistsError):
        add_sentinels(source, out)
    with refused("E102", out / "tokenizer.json"):
        add_sentinels(out, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_tokenizer_with_some_of_the_sentinels_is_refused(tmp_path):
    source = made_tokenizer("t5")
    for special, expected in ((True, "1 of the four"), (False, "0 of them special")):
        content = json.loads((source / "tokenizer.json").read_text())
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"].append({"id": 1_100, "content": SPECIAL_TOKENS[0], **flags, "special": special})
        path = tmp_path / "tokenizer.json"
        path.write_text(json.dumps(content))
        with refused("E404", path, expected):
            load_tokenizer(path)
    some = sentencepiece_model(tmp_path / "some.model", user_defined_symbols=list(SPECIAL_TOKENS[:3]))
    with refused("E404", some, "niels-gpt train-tokenizer"):
        load_tokenizer(some)


def test_a_model_without_the_sentinels_opens_where_they_are_optional(tmp_path):
    path = sentencepiece_model(tmp_path / "spm.model")
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, SentencePieceTokenizer) and tokenizer.special_token_ids() == {}
    assert (tokenizer.unk_id, tokenizer.eos_id) == (0, 2)
    assert {tokenizer.token(token_id) for token_id in tokenizer.control_ids} == {"<s>", "</s>", "<mask>"}
    text = "a <tool> and </s><mask>"
    ids = tokenizer.encode(text)
    assert tokenizer.token_id("<tool>") in ids and not tokenizer.control_ids.intersection(ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_plain([text])[0].tolist() == ids
    assert document_end(tokenizer) == document_end(tokenizer, "eos") == document_end(tokenizer, "</s>")
    for opened in (
        lambda: SentencePieceTokenizer(path),
        lambda: load_tokenizer(tmp_path, sentinels="required"),
        lambda: load_tokenizer(made_tokenizer("t5"), sentinels="required"),
    ):
        with refused("E404", "none of the four", "niels-gpt add-sentinels ", " OUT"):
            opened()


def test_flags_of_sentencepiece_are_refused_for_bpe(capsys):
    flags = ["train-tokenizer", "--input-glob", "none", "--kind", "bpe"]
    assert main([*flags, "--model-type", "unigram"]) == 2
    assert "error[E101]: --model-type: for SentencePiece, without effect with --kind bpe" in capsys.readouterr().err
    assert main(flags) == 1


def test_the_command(tmp_path, capsys):
    assert main(["add-sentinels", str(made_tokenizer("t5")), str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "sys = 1100, usr = 1101, asst = 1102, eot = 1103" in printed
    assert "1,100 ids before, 1,104 now" in printed and "32 bits" not in printed
    assert main(["add-sentinels", str(made_tokenizer("t5")), str(tmp_path / "out")]) == 1
    assert "error[E504]" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_says_where_tokens_become_wider(tmp_path, capsys):
    content = json.loads((made_tokenizer("t5") / "tokenizer.json").read_text())
    content["model"]["vocab"] += [[f"\u4e00{n}", -50.0] for n in range((1 << 16) - 1_100)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert main(["add-sentinels", str(tmp_path), str(tmp_path / "out"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["vocab_size_before"], result["vocab_size"]) == (1 << 16, (1 << 16) + 4)
    assert main(["add-sentinels", str(tmp_path), str(tmp_path / "out2")]) == 0
    assert "32 bits" in capsys.readouterr().out
