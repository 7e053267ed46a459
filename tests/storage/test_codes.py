"""Codes of errors and warnings: every place has one of the table, every row is used, and a plain error gets one."""

import ast
import errno
import pickle
import warnings

import pytest
from support import ROOT

from niels_gpt.commands.doctor import explained
from niels_gpt.storage import errors
from niels_gpt.storage.codes import CodedWarning, code_of, codes
from niels_gpt.storage.errors import CacheError, SourceError
from tools import errors_page

SOURCES = [*ROOT.glob("niels_gpt/**/*.py"), *ROOT.glob("pipelines/**/*.py")]


def calls(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def uncoded(source):
    """The calls in a source that make a CacheError or a warning without a code of the table."""
    for name, call in calls(ast.parse(source)):
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        if name == "CacheError":
            code = given.get("code", "none")
        elif name in ("logger.warning", "LOG.warning"):
            code = given.get("extra", "none").removeprefix("{'code': ").removesuffix("}")
        elif name == "warnings.warn":
            code = "none" if isinstance(call.args[0], ast.JoinedStr | ast.Constant) else "error.code"
        elif name in ("CodedWarning", "print_warning"):
            code = ast.unparse(call.args[0])
        else:
            continue
        if code not in ("error.code", "message.code", "code", "''") and code.strip("'") not in codes():
            yield f"{call.lineno}: {ast.unparse(call)[:80]}"


def test_every_warning_and_every_cache_error_has_a_code_of_the_table():
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
    ],
)
def test_a_place_without_a_code_is_found(source):
    assert len(list(uncoded(source))) == 1


def test_every_code_is_used_and_none_twice():
    used = {
        node.value
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert [code for code in codes() if code not in used] == []
    assert len({row.name for row in codes().values()}) == len(codes())


def test_every_row_is_whole():
    for code, row in codes().items():
        assert code == row.code and code[0] in "EW" and code[1:].isdecimal() and len(code) == 4
        assert row.name == row.name.lower() and " " not in row.name
        assert row.meaning.endswith(".") and row.remedy.endswith((".", "`.")), code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (CacheError("a", "b", code="E203"), "E203"),
        (SourceError("bad"), "E302"),
        (SourceError("bad", code="E303"), "E303"),
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
def test_the_code_of_an_error(error, code):
    assert code_of(error) == code
    assert code_of(pickle.loads(pickle.dumps(error))) == code  # from a worker process


def test_a_code_of_another_library_does_not_count():
    error = ValueError("a")
    error.code = "E404 Not Found"
    assert code_of(error) == "E102"


BASES = {
    "CacheError": (ValueError, "E201"),
    "CacheNotFound": (FileNotFoundError, "E204"),
    "DefinitionError": (ValueError, "E104"),
    "FoldError": (ValueError, "E803"),
    "ForkedBuild": (RuntimeError, "E508"),
    "HubError": (ConnectionError, "E601"),
    "HubRefusal": (ValueError, "E602"),
    "ServerError": (ConnectionError, "E613"),
    "ServerRefusal": (ValueError, "E614"),
    "InTheWay": (FileExistsError, "E504"),
    "InputError": (ValueError, "E709"),
    "NoLength": (TypeError, "E109"),
    "NoRoomError": (OSError, "E501"),
    "NotFound": (FileNotFoundError, "E105"),
    "OutOfRange": (IndexError, "E106"),
    "PositionError": (ValueError, "E106"),
    "SourceError": (ValueError, "E302"),
    "SourceNotFound": (FileNotFoundError, "E301"),
    "StateError": (ValueError, "E108"),
    "StreamUseError": (RuntimeError, "E109"),
    "TargetError": (ValueError, "E705"),
    "TargetRunError": (RuntimeError, "E705"),
    "TemplateError": (ValueError, "E407"),
    "TokenizerError": (ValueError, "E408"),
    "TokenizerNotFound": (FileNotFoundError, "E401"),
    "TreeError": (ValueError, "E801"),
    "TreeTypeError": (TypeError, "E801"),
    "UsageError": (ValueError, "E101"),
    "VocabularyError": (ValueError, "E707"),
    "WorkerDied": (RuntimeError, "E506"),
}
"""What callers catch by the classes of Python, and the code that a class has by itself."""


def test_every_class_keeps_its_code_and_the_class_of_python_that_callers_catch():
    classes = {
        name: kind
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.CodedError)
    }
    assert classes.keys() - {"CodedError"} == BASES.keys()
    for name, (base, code) in BASES.items():
        error = classes[name]("a file: a problem")
        assert isinstance(error, base) and code_of(error) == code, name
        assert str(error) == "a file: a problem" and str(pickle.loads(pickle.dumps(error))) == str(error), name


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (FileNotFoundError(errno.ENOENT, "no such file", "a"), "E301"),
        (NotADirectoryError(errno.ENOTDIR, "not a directory", "a"), "E301"),
        (CacheError("a", "b", code="E203"), "E203"),
        (PermissionError(errno.EACCES, "no", "a"), "E502"),
    ],
)
def test_a_missing_file_has_the_code_of_what_was_read_and_every_other_error_its_own(raised, code):
    with pytest.raises(type(raised)) as caught, errors.errors_as("E301"):
        raise raised
    assert caught.value is raised and code_of(raised) == code


def test_a_warning_of_python_ends_in_its_code():
    with pytest.warns(UserWarning, match=r"too short \[W202\]$"):
        warnings.warn(CodedWarning("W202", "too short"), stacklevel=1)


def test_explain_prints_the_row_and_refuses_what_is_no_code():
    row = codes()["E503"]
    text = explained("e503")
    words = " ".join(text.split())
    assert row.name in text and row.meaning in words and row.remedy in words and row.example in words
    with pytest.raises(ValueError, match="E501, E502") as refused:
        explained("E599")
    assert code_of(refused.value) == "E101"


def test_the_page_is_the_table():
    assert errors_page.PAGE.read_text() == errors_page.page(), "run python tools/errors_page.py"
    assert [code for code in codes() if f"{{#{code.lower()}}}" not in errors_page.page()] == []
