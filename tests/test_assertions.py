"""What a syntax tree can show of tests that cannot fail: no assertion, one that always holds, and wide tolerances.

Each check takes the path of a file under tests/ and its source, and returns its complaints; its wrong and right samples
stay beside it. Whether a test that may fail does fail is asked by dev/mutants.py.
"""

import ast
import io
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent

# What float32 needs where two ways to compute the same are compared. A wider tolerance is of draws, of bf16 or int8, or
# of a number that was printed with few digits: the comment on its line says of which, and how far off a fault would be.
WIDEST = 1e-4
TOLERANCES = {"rel", "abs", "rtol", "atol"}
WORDS = 3  # that a reason has at least

Check = Callable[[str, str], list[str]]


def called(node: ast.AST) -> str:
    """The last part of the name of what a call calls: pytest.raises -> raises."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def asserts(function: ast.AST, helpers: set[str]) -> bool:
    """An assert statement, pytest.raises, warns or fail, a library's assert_..., or a helper that has one of these."""
    for node in ast.walk(function):
        name = called(node)
        if isinstance(node, ast.Assert) or name in {"raises", "warns", "fail", *helpers} or name.startswith("assert_"):
            return True
    return False


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def asserting(source: str, helpers: set[str]) -> set[str]:
    """The names of the functions in a source that assert, by themselves or by what they call."""
    tree, found = ast.parse(source), set(helpers)
    while more := {f.name for f in functions(tree) if asserts(f, found)} - found:
        found |= more
    return found


def shared_helpers() -> set[str]:
    """Those that test files import or have as fixtures."""
    files = [file for file in TESTS.rglob("*.py") if not file.name.startswith("test_")]
    return set().union(*(asserting(file.read_text("utf-8"), set()) for file in files))


SHARED = shared_helpers()


def check_asserts(path: str, source: str) -> list[str]:
    helpers = {name for name in asserting(source, SHARED) if not name.startswith("test")}
    return [
        f"{path}:{function.lineno}: {function.name} asserts nothing"
        for function in functions(ast.parse(source))
        if function.name.startswith("test") and not asserts(function, helpers)
    ]


def holds_anyway(test: ast.expr) -> bool:
    if isinstance(test, ast.Tuple):
        return bool(test.elts)
    if isinstance(test, ast.Constant):
        return bool(test.value)
    if isinstance(test, ast.BoolOp):
        return (any if isinstance(test.op, ast.Or) else all)(map(holds_anyway, test.values))
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        left, right = test.left, test.comparators[0]
        if isinstance(test.ops[0], ast.GtE) and called(left) == "len" and ast.unparse(right) == "0":
            return True
        return isinstance(test.ops[0], ast.Eq | ast.Is | ast.LtE | ast.GtE) and ast.dump(left) == ast.dump(right)
    return False


def only_tells_kinds(test: ast.expr) -> bool:
    """That there is something, or of which class: true of any result, right or wrong."""
    if isinstance(test, ast.Compare):
        return isinstance(test.ops[0], ast.IsNot) and ast.unparse(test.comparators[0]) == "None"
    if isinstance(test, ast.BoolOp):
        return all(map(only_tells_kinds, test.values))
    return called(test) in {"isinstance", "hasattr", "callable"}


def check_may_fail(path: str, source: str) -> list[str]:
    complaints = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert) and holds_anyway(node.test):
            complaints.append(f"{path}:{node.lineno}: `{ast.unparse(node)}` always holds")
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            statements = [inner.test for inner in ast.walk(node) if isinstance(inner, ast.Assert)]
            calls = any(asserts(inner, set()) for inner in ast.walk(node) if isinstance(inner, ast.Call))
            if statements and not calls and all(map(only_tells_kinds, statements)):
                complaints.append(f"{path}:{node.lineno}: {node.name} only tells of which class something is")
    return complaints


def explained(source: str) -> set[int]:
    """Lines with a comment of some words."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token for token in tokens if token.type == tokenize.COMMENT]
    return {token.start[0] for token in comments if len(token.string.lstrip("# ").split()) >= WORDS}


def is_narrow(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and (not isinstance(node.value, int | float) or node.value <= WIDEST)


def is_distance(node: ast.AST) -> bool:
    """abs(x), or the norm of a difference."""
    return called(node) == "abs" or (
        called(node) == "norm" and any(isinstance(inner, ast.Sub) for inner in ast.walk(node))
    )


def tolerances(node: ast.AST) -> Iterator[ast.expr]:
    """rel=..., {"rtol": ...}, approx(x, ...), and the bound of a difference: (a - b).abs().max() < ..."""
    if isinstance(node, ast.Call):
        yield from (keyword.value for keyword in node.keywords if keyword.arg in TOLERANCES)
        yield from node.args[1:2] if called(node) == "approx" else ()
    if isinstance(node, ast.Dict):
        for key, value in zip(node.keys, node.values, strict=True):
            if isinstance(key, ast.Constant) and key.value in TOLERANCES:
                yield value
    if isinstance(node, ast.Compare):
        sides = [node.left, *node.comparators]
        for operator, less, more in zip(node.ops, sides, sides[1:], strict=False):
            if isinstance(operator, ast.Gt | ast.GtE):
                less, more = more, less
            ordered = isinstance(operator, ast.Lt | ast.LtE | ast.Gt | ast.GtE)
            if ordered and any(map(is_distance, ast.walk(less))):
                yield more


def check_tolerances(path: str, source: str) -> list[str]:
    reasons = explained(source)
    wide = [x for node in ast.walk(ast.parse(source)) for x in tolerances(node) if not is_narrow(x)]
    return [
        f"{path}:{x.lineno}: {ast.unparse(x)} is no tolerance of at most {WIDEST}: compare with what is exact, or say "
        "on this line why it has to be so wide"
        for x in wide
        if x.lineno not in reasons
    ]


CHECKS = [check_asserts, check_may_fail, check_tolerances]


@pytest.mark.parametrize("check", CHECKS)
def test_tests_keep_the_rule(check: Check) -> None:
    files = sorted(TESTS.rglob("*.py"))
    complaints = [line for file in files for line in check(file.relative_to(TESTS).as_posix(), file.read_text("utf-8"))]
    assert len(files) > 100 and not complaints, "\n".join(complaints)


WRONG: list[tuple[Check, str]] = [
    (check_asserts, "def test_it():\n    f()"),
    (check_asserts, "class TestIt:\n    def test_it(self):\n        f()"),
    (check_asserts, "def helper():\n    assert f()\ndef test_it():\n    g()"),
    (check_asserts, "def helper():\n    f()\ndef test_it():\n    helper()"),
    (check_asserts, "def test_it():\n    check(f())"),  # there is no such helper
    (check_may_fail, "def test_it():\n    assert True"),
    (check_may_fail, "def test_it():\n    assert (f() == 1, 'a tuple')"),
    (check_may_fail, "def test_it():\n    assert x or True"),
    (check_may_fail, "def test_it():\n    assert x.y == x.y"),
    (check_may_fail, "def test_it():\n    assert len(x) >= 0"),
    (check_may_fail, "def test_it():\n    assert isinstance(f(), int)"),
    (check_may_fail, "def test_it():\n    x = f()\n    assert x is not None and hasattr(x, 'y')"),
    (check_tolerances, "assert a == pytest.approx(b, rel=0.01)"),
    (check_tolerances, "assert a == pytest.approx(b, 0.01)"),
    (check_tolerances, "assert a == pytest.approx(0, abs=1e9)  # speed"),  # says nothing
    (check_tolerances, "assert_close(a, b, rtol=0, atol=bound)"),
    (check_tolerances, "# bf16 has eight bits\nassert_close(a, b, rtol=0.01, atol=0)"),
    (check_tolerances, "LOOSE = {'rtol': 0, 'atol': 0.01}"),
    (check_tolerances, "assert (a - b).abs().max() < 0.3"),
    (check_tolerances, "assert 0.3 > abs(a - b)"),
    (check_tolerances, "assert 0 < abs(a - b) <= 0.1 * b"),
]

RIGHT: list[tuple[Check, str]] = [
    (check_asserts, "def test_it():\n    for x in f():\n        assert x == 1"),
    (check_asserts, "def test_it():\n    with pytest.raises(ConfigError):\n        f()"),
    (check_asserts, "def test_it():\n    torch.testing.assert_close(f(), 1)"),
    (check_asserts, "def helper():\n    assert f()\ndef other():\n    helper()\ndef test_it():\n    other()"),
    (check_asserts, "def helper():\n    f()"),
    (check_may_fail, "def test_it():\n    assert f() == (1, 2) and x.y == x.z"),
    (check_may_fail, "def test_it():\n    assert isinstance(f(), int) and f() == 1"),
    (check_may_fail, "def test_it():\n    assert x is not None\n    assert_close(x, y)"),
    (check_tolerances, "assert a == pytest.approx(b, rel=1e-4) and c == pytest.approx(d)"),
    (check_tolerances, "assert a == pytest.approx(b, rel=0.01)  # four standard deviations of 10,000 draws"),
    (check_tolerances, "assert_close(a, b, rtol=0, atol=1e-11)"),
    (check_tolerances, "assert (a - b).abs().max() > 0.3 and abs(c - d) < 1e-5 and x < 0.5"),
]


@pytest.mark.parametrize(("check", "source"), WRONG)
def test_wrong_sample_is_rejected(check: Check, source: str) -> None:
    assert len(check("test_it.py", source)) == 1


@pytest.mark.parametrize(("check", "source"), RIGHT)
def test_right_sample_is_accepted(check: Check, source: str) -> None:
    assert check("test_it.py", source) == []


def test_every_check_has_a_wrong_and_a_right_sample() -> None:
    assert {check for check, _ in WRONG} == {check for check, _ in RIGHT} == set(CHECKS)
