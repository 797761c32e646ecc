"""The house stands: imports go down, heavy libraries have one door each, pages stay pages.

A failure says what to do. The floors are those of AGENTS.md, "The house".
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from eagle3.stages import STAGE_NAMES
from tests.conftest import ROOT

FLOORS: tuple[tuple[str, ...], ...] = (
    # 0, facts: the standard library, msgspec and a YAML reader.
    (
        "eagle3",
        "eagle3.errors",
        "eagle3.stages",
        "eagle3.strict_json",
        "eagle3.strict_yaml",
        "eagle3.manifest",
        "eagle3.config",
        "eagle3.config_fields",
        "eagle3.config_text",
        "eagle3.summary",
        "eagle3.chart",
    ),
    # 1, storage.
    (
        "eagle3.store",
        "eagle3.artifact",
        "eagle3.work",
        "eagle3.progress",
        "eagle3.lineage",
        "eagle3.removal",
        "eagle3.planning",
        "eagle3.ordering",
        "eagle3.upstream",
    ),
    # 2, pure work on the CPU.
    (
        "eagle3.shards",
        "eagle3.units",
        "eagle3.vocab",
        "eagle3.coverage",
        "eagle3.verifier",
        "eagle3.conversations",
        "eagle3.demo_inputs",
        "eagle3.acceptance",
        "eagle3.diagnosis",
    ),
    # 3, engines.
    (
        "eagle3.capture",
        "eagle3.onpolicy",
        "eagle3.legacy",
        "eagle3.vllm_capture",
        "eagle3.draft",
        "eagle3.answers",
        "eagle3.evaluation",
        "eagle3.report",
        "eagle3.verification",
        "eagle3.cluster",
    ),
    # 4, the stories.
    (
        "jobs",
        "jobs.arguments",
        "jobs.standard_output",
        "jobs.process",
        "jobs.gate",
        "jobs.prepare",
        "jobs.regenerate",
        "jobs.extract",
        "jobs.vocab",
        "jobs.train",
        "jobs.export",
        "jobs.evaluate",
        "jobs.demo_inputs",
        "jobs.local",
        "jobs.installed",
        "jobs.patience",
        "jobs.runner",
        "jobs.operate",
        "jobs.lineage",
        "jobs.verify",
        "jobs.show",
        "jobs.delete",
        "jobs.importing",
        "jobs.kept_verifier",
        "jobs.plan",
        "jobs.cli",
    ),
)

DOORS: dict[str, str] = {
    "fsspec": "eagle3.store",
    "s3fs": "eagle3.store",
    "botocore": "eagle3.store",
    "vllm": "eagle3.vllm_capture",
    "speculators": "eagle3.draft",
    "hs_connectors": "eagle3.draft",
    "datasets": "eagle3.draft",
    "matplotlib": "eagle3.report",
    "pyarrow": "eagle3.conversations",
    "huggingface_hub": "eagle3.verifier",
    "tokenizers": "eagle3.verifier",
    "kubernetes": "eagle3.cluster",
    "typer": "jobs.cli",
}

# Library -> the floors that may import it.
ONLY_ON: dict[str, tuple[int, ...]] = {
    "torch": (2, 3),
    "transformers": (2, 3),
    "safetensors": (2, 3),
    "numpy": (2, 3),
}

MAX_FILE_LINES = 350
MAX_TEST_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
USUAL_FUNCTION_LINES = 45
MAX_PARAMETERS = 8
FORBIDDEN_WORDS = ("util", "common", "helper", "misc")


@dataclass(frozen=True)
class Source:
    """A file of the package, parsed; `unit` is the module or folder that has a place."""

    path: Path
    module: str
    tree: ast.Module
    text: str

    @property
    def name(self) -> str:
        return str(self.path.relative_to(ROOT))

    @property
    def unit(self) -> str:
        return ".".join(self.module.split(".")[:2])


def sources(*folders: str) -> list[Source]:
    found = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            text = path.read_text(encoding="utf-8")
            found.append(Source(path, module, ast.parse(text), text))
    return found


PACKAGE = sources("eagle3", "jobs")
TESTS = sources("tests")
FLOOR_OF = {unit: number for number, units in enumerate(FLOORS) for unit in units}


def imported(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Every import statement, with the full dotted name of what it brings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}"


def own_imports(source: Source) -> set[str]:
    """The units of this project that a file imports, its own left out."""
    units = set()
    for _, name in imported(source.tree):
        if name.split(".")[0] in ("eagle3", "jobs"):
            unit = ".".join(name.split(".")[:2])
            units.add(unit if unit in FLOOR_OF else name.split(".")[0])
    return units - {source.unit}


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (function.end_lineno or 0) - function.lineno + 1


def named(faults: list[str], remedy: str) -> str:
    return "\n".join([*faults, f"-> {remedy}"])


def test_every_module_has_a_floor():
    lost = sorted({source.unit for source in PACKAGE} - FLOOR_OF.keys())
    assert not lost, named(lost, "give it a place in FLOORS above and a line in AGENTS.md")
    gone = sorted(FLOOR_OF.keys() - {source.unit for source in PACKAGE})
    assert not gone, named(gone, "take it out of FLOORS above and out of AGENTS.md")


def test_imports_only_go_down():
    faults = [
        f"{source.name} (floor {FLOOR_OF[source.unit]}) imports {unit} (floor {FLOOR_OF[unit]})"
        for source in PACKAGE
        for unit in sorted(own_imports(source))
        if FLOOR_OF[unit] > FLOOR_OF[source.unit]
    ]
    assert not faults, named(faults, "move what is shared to the lower floor")


def test_no_two_modules_import_each_other():
    graph: dict[str, set[str]] = {}
    for source in PACKAGE:
        graph.setdefault(source.unit, set()).update(own_imports(source))
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(named([" -> ".join(error.args[1])], "move what both need into a third module"))


def test_no_story_imports_another():
    """What runs, gates and orders stages is no story, nor is a command about artefacts; the
    command line sits on top of all."""
    stories = {f"jobs.{name}" for name in (*STAGE_NAMES, "demo_inputs", "cli")}
    faults = [
        f"{source.name} imports {unit}"
        for source in PACKAGE
        if source.unit in FLOORS[4]
        for unit in sorted(own_imports(source) & stories)
    ]
    assert not faults, named(faults, "move what both stories need into eagle3/")


@pytest.mark.parametrize("library", DOORS)
def test_a_heavy_library_has_one_door(library):
    faults = [
        f"{source.name}:{node.lineno} imports {name}"
        for source in PACKAGE
        for node, name in imported(source.tree)
        if name.split(".")[0] == library and source.unit != DOORS[library]
    ]
    remedy = f"only {DOORS[library]} knows {library}: give it a function that does what you need"
    assert not faults, named(faults, remedy)


@pytest.mark.parametrize("library", ONLY_ON)
def test_tensors_stay_on_their_floors(library):
    faults = [
        f"{source.name}:{node.lineno} imports {name}"
        for source in PACKAGE
        for node, name in imported(source.tree)
        if name.split(".")[0] == library and FLOOR_OF[source.unit] not in ONLY_ON[library]
    ]
    remedy = "stories call nouns of eagle3/; move the work on tensors to floor 2 or 3"
    assert not faults, named(faults, remedy)


def test_imports_stand_at_the_top():
    faults = [
        f"{source.name}:{node.lineno} imports {name} inside {function.name}()"
        for source in PACKAGE
        for function in functions(source)
        for node, name in imported(function)
    ]
    assert not faults, named(faults, "import at the top; a heavy library belongs behind its door")


def test_the_facts_need_no_more_than_msgspec_and_yaml():
    """In a process of its own, since this one has loaded everything."""
    names = ", ".join(unit for unit in FLOORS[0] if unit != "eagle3")
    code = (
        f"import sys, {names}\n"
        "own = {n.split('.')[0] for n in sys.modules} - set(sys.stdlib_module_names)\n"
        "print(*sorted(n for n in own if not n.startswith('_')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    # The last two come with msgspec and PyYAML.
    allowed = {"eagle3", "msgspec", "yaml", "typing_extensions", "cython_runtime"}
    more = set(done.stdout.split()) - allowed
    assert not more, named(sorted(more), "floor 0 is read by the gate: move the import up")


@pytest.mark.parametrize("source", PACKAGE, ids=lambda source: source.name)
def test_a_file_stays_a_page(source):
    count = len(source.text.splitlines())
    assert count <= MAX_FILE_LINES, (
        f"{source.name} has {count} lines of at most {MAX_FILE_LINES}: "
        "make it a folder of the same name"
    )


@pytest.mark.parametrize("source", TESTS, ids=lambda source: source.name)
def test_a_test_file_stays_readable(source):
    count = len(source.text.splitlines())
    assert count <= MAX_TEST_FILE_LINES, f"{source.name} has {count} lines: split it by subject"


def test_functions_stay_short():
    sizes = sorted(
        (lines_of(function), f"{source.name}:{function.lineno} {function.name}")
        for source in PACKAGE
        for function in functions(source)
    )
    long = [f"{name}: {count} lines" for count, name in sizes if count > MAX_FUNCTION_LINES]
    assert not long, named(long, f"split it; {MAX_FUNCTION_LINES} lines at most")
    usual, name = sizes[int(len(sizes) * 0.95)]
    assert usual <= USUAL_FUNCTION_LINES, (
        f"the 95th percentile is {usual} lines ({name}), {USUAL_FUNCTION_LINES} at most: "
        "split the longest"
    )


def test_parameters_stay_few():
    faults = []
    for source in PACKAGE:
        for function in functions(source):
            arguments = function.args
            given = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            count = len([one for one in given if one.arg not in ("self", "cls")])
            if count > MAX_PARAMETERS:
                faults.append(f"{source.name}:{function.lineno} {function.name}: {count}")
    assert not faults, named(faults, "group what belongs together in a dataclass")


def test_no_module_is_a_drawer():
    faults = [
        source.name
        for source in PACKAGE
        if any(word in source.path.stem.lower() for word in FORBIDDEN_WORDS)
    ]
    assert not faults, named(faults, "name it after what it knows")


def test_nothing_is_left_unsaid():
    """Every module, class and function that others may use says what it is."""
    faults = []
    for source in PACKAGE:
        if not ast.get_docstring(source.tree) and source.text.strip():
            faults.append(source.name)
        classes = [node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]
        open_functions = [node for node in source.tree.body if isinstance(node, ast.FunctionDef)]
        faults += [
            f"{source.name}:{node.lineno} {node.name}"
            for node in [*classes, *open_functions]
            if not node.name.startswith("_") and not ast.get_docstring(node)
        ]
    assert not faults, named(
        faults, "write its docstring: what goes in, what comes out, what it raises"
    )


def test_nothing_broad_is_caught_outside_of_a_process_s_main():
    allowed = {"jobs/process.py"}
    faults = []
    for source in PACKAGE:
        for node in ast.walk(source.tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or (
                isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
            )
            if broad and source.name not in allowed:
                faults.append(f"{source.name}:{node.lineno}")
    assert not faults, named(faults, "name the exceptions that you can answer")


def test_nothing_is_promised_for_later():
    words = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X|place" + r"holder)\b", re.I)
    faults = [
        f"{source.name}:{number} {line.strip()}"
        for source in [*PACKAGE, *TESTS]
        for number, line in enumerate(source.text.splitlines(), 1)
        if words.search(line)
    ]
    assert not faults, named(faults, "do it, or leave it out")
