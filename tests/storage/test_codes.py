"""Codes of errors and warnings: every place has one of the table, every row is used, and a plain error gets one."""

import ast
import errno
import importlib
import pickle
import warnings
from collections.abc import Iterator

import pytest
from support import ROOT

from niels_gpt.storage.codes import CODES, CodedWarning, code_of, coded, explained
from niels_gpt.storage.errors import CacheError
from tools import errors_page

SOURCES = [*ROOT.glob("niels_gpt/**/*.py"), *ROOT.glob("pipelines/**/*.py")]
TABLES = "code_tables"


def calls(tree: ast.Module) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def uncoded(source: str) -> Iterator[str]:
    """The calls in a source that make a CacheError or a warning without a code of the table."""
    for name, call in calls(ast.parse(source)):
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        if name == "CacheError":
            code = given.get("code", "none")
        elif name in ("logger.warning", "LOG.warning"):
            code = given.get("extra", "none").removeprefix("{'code': ").removesuffix("}")
        elif name == "warnings.warn":
            code = "none" if isinstance(call.args[0], ast.JoinedStr | ast.Constant) else "error.code"
        elif name in ("CodedWarning", "coded", "print_warning"):
            code = ast.unparse(call.args[0])
        else:
            continue
        if code not in ("error.code", "message.code", "code", "''") and code.strip("'") not in CODES:
            yield f"{call.lineno}: {ast.unparse(call)[:80]}"


def test_every_warning_and_every_cache_error_has_a_code_of_the_table() -> None:
    found = [f"{path}:{where}" for path in SOURCES for where in uncoded(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        'CacheError(path, "empty")',
        'CacheError(path, "empty", code="E999")',
        'logger.warning("slow")',
        'logger.warning("slow", extra={"code": "slow"})',
        'warnings.warn(f"{path}: short", stacklevel=2)',
        'CodedWarning("W999", "short")',
        'raise coded("E1", ValueError())',
    ],
)
def test_a_place_without_a_code_is_found(source: str) -> None:
    assert len(list(uncoded(source))) == 1


def test_every_code_is_used_and_none_twice() -> None:
    used = {
        node.value
        for path in SOURCES
        if TABLES not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert [code for code in CODES if code not in used] == []
    assert len({row.name for row in CODES.values()}) == len(CODES)


def test_every_row_is_whole() -> None:
    for code, row in CODES.items():
        assert code == row.code and code[0] in "EW" and code[1:].isdecimal() and len(code) == 4
        assert row.name == row.name.lower() and " " not in row.name
        assert row.meaning.endswith(".") and row.remedy.endswith((".", "`.")), code


def raised(code: str) -> BaseException:
    """The error that a call raises."""
    module, _, call = code.partition(": ")
    try:
        eval(call, vars(importlib.import_module(f"niels_gpt.{module}")))
    except Exception as error:
        return error
    raise AssertionError(f"{call} raised nothing")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CacheError("a", "b", code="E203"), "E203"),
        (coded("E302", ValueError("bad")), "E302"),
        (OSError(errno.ENOSPC, "full"), "E501"),
        (PermissionError(errno.EACCES, "no"), "E502"),
        (OSError(errno.EIO, "bad"), "E509"),
        (FileNotFoundError("a"), "E105"),
        (ConnectionResetError("a"), "E601"),
        (ModuleNotFoundError("a"), "E901"),
        (ValueError("a"), "E102"),
        (RuntimeError("a"), "E902"),
    ],
)
def test_the_code_of_an_error(error: BaseException, code: str) -> None:
    assert code_of(error) == code
    assert code_of(pickle.loads(pickle.dumps(error))) == code  # from a worker process


def test_a_code_of_another_library_does_not_count() -> None:
    error = ValueError("a")
    error.code = "E404 Not Found"  # type: ignore[attr-defined]
    assert code_of(error) == "E102"


@pytest.mark.parametrize(
    ("call", "code"),
    [
        ("cache.meta: int('x')", "E102"),  # no frame of the package itself: the class decides
        ("prefix_tree.layout.radix: tree_of_paths([1], [])", "E801"),
        ("prefix_tree.savings.rollouts: _parsed(b'x', 'path', 1, None)", "E804"),
        ("eagle3.target: default_eagle3_aux_layer_ids(2)", "E705"),
        ("sampling.state: state_count({'a': -1}, 'a')", "E108"),
        ("data.files.mirrors: mirror_root('/nowhere')", "E301"),
    ],
)
def test_a_plain_error_has_the_code_of_the_place_that_raised_it(call: str, code: str) -> None:
    assert code_of(raised(call)) == code


def test_a_warning_of_python_ends_in_its_code() -> None:
    with pytest.warns(UserWarning, match=r"too short \[W202\]$"):
        warnings.warn(CodedWarning("W202", "too short"), stacklevel=1)


def test_explain_prints_the_row_and_refuses_what_is_no_code() -> None:
    row = CODES["E503"]
    text = explained("e503")
    words = " ".join(text.split())
    assert row.name in text and row.meaning in words and row.remedy in words and row.example in words
    with pytest.raises(ValueError, match="E501, E502") as refused:
        explained("E599")
    assert code_of(refused.value) == "E101"


def test_the_page_is_the_table() -> None:
    assert errors_page.PAGE.read_text() == errors_page.page(), "run python tools/errors_page.py"
    assert [code for code in CODES if f"{{#{code.lower()}}}" not in errors_page.page()] == []
