"""The table of faults is whole: every row has a test and guards, or an answer; nothing rots."""

from __future__ import annotations

import ast

import pytest

from tests.fault_table import ROOT, Guard, defined_names, fault_tests, faults_in_name, read_table

ROWS = read_table()
TESTS = fault_tests()
GUARDS = [
    pytest.param(guard, id=f"{fault}-{guard.at}")
    for fault, row in ROWS.items()
    for guard in row.guard
]


def test_every_row_has_a_test_and_a_guard_or_an_answer() -> None:
    tested = {fault for test in TESTS for fault in test.faults}
    unprotected = [
        fault
        for fault, row in ROWS.items()
        if not row.answer and not (row.guard and fault in tested)
    ]
    assert not unprotected, (
        f"mark a test and name a guard, or say why it cannot happen: {unprotected}"
    )
    both = [fault for fault, row in ROWS.items() if row.answer and row.guard]
    assert not both, f"a fault that cannot happen needs no guard: {both}"


def test_every_marked_test_is_of_a_row() -> None:
    unknown = {test.node: test.faults - ROWS.keys() for test in TESTS}
    assert not {node: faults for node, faults in unknown.items() if faults}


def test_a_row_is_short_and_named_by_its_id() -> None:
    for fault, row in ROWS.items():
        assert faults_in_name(f"test_{fault.lower()}_") == {fault}
        for text in (row.fault, row.answer):
            assert "\n" not in text
            assert len(text) <= 200, fault


@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_exists_and_can_be_taken_away(guard: Guard) -> None:
    source = (ROOT / guard.file).read_text(encoding="utf-8")
    assert source.count(guard.text) == 1, "its text must stand once in the file"
    assert guard.text != guard.without
    if guard.file.endswith(".py"):
        assert guard.name in defined_names(source)
        ast.parse(source.replace(guard.text, guard.without))


def test_ids_are_read_from_names() -> None:
    assert faults_in_name("test_b21_b22_b23_states") == {"B21", "B22", "B23"}
    assert faults_in_name("TestB46WrongConventions") == {"B46"}
    assert not faults_in_name("test_both_ends")
    assert not faults_in_name("TestBytes")
