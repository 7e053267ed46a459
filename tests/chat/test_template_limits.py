"""A chat template that somebody wrote can neither hang the run nor fill the memory."""

import os
import resource
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import chat_tokenizers as kinds

from niels_gpt.chat import template_process
from niels_gpt.chat.template_process import PROCESS
from niels_gpt.chat.tokenizers import open_tokenizer

CHAT = kinds.turns("Hi", "Hello")
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set n = namespace(x='x') %}{% for _ in 'x' * 60 %}{% set n.x = n.x ~ n.x %}{% endfor %}"
ATTACKS = {
    "folded when it is compiled": ("{{ 'x' * 4000000000 }}", "memory"),
    "made when it is rendered": ("{{ messages[0].content * 2000000000 }}", "memory"),
    "doubled": (DOUBLED, "memory"),
    "loops": ("{% if messages[0].content == 'Hi' %}" + LOOPS + "{% endif %}" + kinds.CHATML, "did not end within"),
    "a long text": ("{{ 'x' * 5000000 }}", "5,000,000 characters"),
    "brackets": ("{{ " + "(" * 50_000 + ")" * 50_000 + " }}", None),
    "too long": ("x" * (1 << 20) + "y", "1,048,577 characters"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_template_that_takes_too_much_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    template, said = ATTACKS[name]
    monkeypatch.setattr(template_process, "_SECONDS", 0.5)
    folder = kinds.write_tokenizer(tmp_path / "t", template=template)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=said):
        open_tokenizer(str(folder)).encode_chat(CHAT)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB, of this process"


def test_a_template_that_was_stopped_and_a_forked_child_leave_the_next_one_alone(tmp_path: Path) -> None:
    good = open_tokenizer(str(kinds.write_tokenizer(tmp_path, template=kinds.CHATML)))
    expected = good.encode_chat(CHAT)
    with pytest.raises(ValueError, match="memory"):
        open_tokenizer(str(tmp_path), chat_template="{{ 'x' * 4000000000 }}").encode_chat(CHAT)
    assert good.encode_chat(CHAT) == expected
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = int(PROCESS.render("{{ messages[0].content }}", {}, [CHAT], [(0, 1, {})]) != [("text", "Hi")])
        finally:
            PROCESS.stop()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert good.encode_chat(CHAT) == expected


def test_threads_share_it_and_get_their_own_answers_half_a_surrogate_pair_too() -> None:
    def ask(number: int) -> list[tuple[str, str]]:
        chats = [[{"role": "user", "content": f"{number} {each}"}] for each in range(20)]
        asked = [(each, 1, {}) for each in range(20)]
        return PROCESS.render("{{ '\\ud83d' ~ messages[0].content }}", {}, chats, asked)

    with ThreadPoolExecutor(4) as pool:
        for number, found in enumerate(pool.map(ask, range(4))):
            assert found == [("text", f"\ud83d{number} {each}") for each in range(20)]
