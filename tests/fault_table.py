"""The table of faults, `faults.toml`, and the tests that answer for its rows.

A row is a fault that somebody met in this work, nearly always without an error message. A test
answers for it by `@pytest.mark.fault("B21")`, or by its name: `test_b21_...`, `TestB21...`. What
stops the fault, its guard, is named by file and name, with the text that a mutation takes out of
it: `tests/guards.py` does so and expects the row's tests to fail.

Tests are found by reading the files, not by importing them, so that this needs no engine.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "tests" / "faults.toml"

_IN_FUNCTION = re.compile(r"test((?:_b\d{2,3})+)_")
_IN_CLASS = re.compile(r"Test((?:B\d{2,3})+)(?![0-9a-z])")
_ID = re.compile(r"\d+")


class Guard(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stops a fault, and how it is taken away.

    Attributes:
        at: `file::name` of a function, class, method or constant; the file alone where it is no
            Python.
        text: a part of it that stands once in the file.
        without: what stands there in its place when the guard is gone.
    """

    at: str
    text: str
    without: str

    @property
    def file(self) -> str:
        """The file, from the top of the project."""
        return self.at.partition("::")[0]

    @property
    def name(self) -> str:
        """What the guard is called in it; empty for a file that is no Python."""
        return self.at.partition("::")[2]


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row: what goes wrong, and the guards that stop it, or why it cannot happen here."""

    fault: str
    answer: str = ""
    guard: tuple[Guard, ...] = ()


@dataclass(frozen=True, kw_only=True)
class FaultTest:
    """A test that answers for faults.

    Attributes:
        node: its id, as pytest takes it, without parameters.
        faults: ids of rows.
        marks: names of the marks of the test, its class and its file.
    """

    node: str
    faults: frozenset[str]
    marks: frozenset[str]


def read_table(path: Path = TABLE) -> dict[str, Fault]:
    """Every row by its id. Raises ValidationError for one that is no row."""
    return msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), dict[str, Fault])


def faults_in_name(name: str) -> frozenset[str]:
    """The ids that the name of a test function or of its class begins with."""
    found = _IN_FUNCTION.match(name) or _IN_CLASS.match(name)
    return frozenset(f"B{number}" for number in _ID.findall(found[1])) if found else frozenset()


def fault_tests(root: Path = ROOT) -> list[FaultTest]:
    """Every test below tests/ that answers for a row, by file and place."""
    paths = sorted((root / "tests").rglob("test_*.py"))
    return [test for path in paths for test in _of_file(path, root) if test.faults]


def defined_names(source: str) -> set[str]:
    """Functions, classes and assigned names of a Python file, a method as `Class.method` too."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        names |= _bound(node)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for part in node.body for name in _bound(part)}
    return names


def _bound(node: ast.stmt) -> set[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else []
    if isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _of_file(path: Path, root: Path) -> Iterator[FaultTest]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    where = path.relative_to(root).as_posix()
    of_file = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and _bound(node) == {"pytestmark"}
    ]
    base = _Marks.of(of_file, "")
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield base.with_(node).test(f"{where}::{node.name}")
    for owner in classes:
        # The tests of a class that is none itself run in the classes that inherit them.
        for runs in _running(owner, classes):
            marks = base.with_(owner) if runs is owner else base.with_(owner).with_(runs)
            for part in owner.body:
                if isinstance(part, ast.FunctionDef) and part.name.startswith("test_"):
                    yield marks.with_(part).test(f"{where}::{runs.name}::{part.name}")


def _running(owner: ast.ClassDef, classes: Sequence[ast.ClassDef]) -> list[ast.ClassDef]:
    if owner.name.startswith("Test"):
        return [owner]
    heirs = [
        one
        for one in classes
        if any(isinstance(base, ast.Name) and base.id == owner.name for base in one.bases)
    ]
    return [runs for heir in heirs for runs in _running(heir, classes)]


@dataclass(frozen=True, kw_only=True)
class _Marks:
    """Marks by name, and the ids that the mark `fault` or a name gives."""

    names: frozenset[str]
    faults: frozenset[str]

    @classmethod
    def of(cls, expressions: Iterable[ast.expr], name: str) -> _Marks:
        """The marks in decorators, or in the value of `pytestmark`."""
        names: set[str] = set()
        faults = set(faults_in_name(name))
        for node in (node for one in expressions for node in ast.walk(one)):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark":
                names.add(node.attr)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
                faults |= {ast.literal_eval(argument) for argument in node.args}
        return cls(names=frozenset(names), faults=frozenset(faults))

    def with_(self, node: ast.FunctionDef | ast.ClassDef) -> _Marks:
        """These and those of a function or class."""
        own = _Marks.of(node.decorator_list, node.name)
        return _Marks(names=self.names | own.names, faults=self.faults | own.faults)

    def test(self, node: str) -> FaultTest:
        """The test that has them."""
        return FaultTest(node=node, faults=self.faults, marks=self.names)
