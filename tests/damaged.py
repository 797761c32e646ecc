"""What verifying says of a run that is damaged again and again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from eagle3.errors import Eagle3Error
from eagle3.stages import ARTIFACT_KINDS
from eagle3.store import open_store
from eagle3.upstream import gate
from eagle3.verification import Depth, artifacts_at, verify
from tests.corruption import Breaker, Damage

EVERY_KIND = {"flip", "truncate", "swap", "delete", "rename", "duplicate"}


def faults(run: Path, kinds: set[str], depth: Depth, scratch: Path) -> list[Eagle3Error]:
    """What verifying these artefacts of a run finds."""
    found = []
    for kind in sorted(kinds):
        verdict = verify(open_store(str(run / kind)), depth, scratch=scratch)
        found += list(verdict.findings)
    return found


def opens(run: Path, kinds: set[str]) -> bool:
    """Whether the gate of a stage lets all of these artefacts through."""
    try:
        for kind in sorted(kinds):
            gate(str(run / kind), (kind,))
    except Eagle3Error:
        return False
    return True


def damage_and_verify(run: Path, scratch: Path, *, seed: int, times: int) -> Counter[str]:
    """Damage a run so many times; every damage must be found, and by the gate what it claims.

    Returns how often each kind of damage was done, and `gate` how many the gate had to find.
    """
    breaker, done = Breaker(run, seed), Counter[str]()
    for _ in range(times):
        damage = breaker.damage()
        try:
            _check(damage, run, scratch)
        finally:
            breaker.mend()
        done[damage.kind] += 1
        done["gate"] += damage.gate_claims
    committed = {store.url.rpartition("/")[2] for store in artifacts_at(str(run))}
    assert committed <= set(ARTIFACT_KINDS)
    assert faults(run, committed, "full", scratch) == [], "a run that was put back is whole"
    return done


def _check(damage: Damage, run: Path, scratch: Path) -> None:
    assert faults(run, damage.artifacts, "full", scratch), f"{damage} was not found"
    by_gate = faults(run, damage.artifacts, "gate", scratch)
    assert bool(by_gate) == damage.gate_claims, f"{damage}: the gate found {by_gate}"
    assert opens(run, damage.artifacts) != damage.gate_claims, f"{damage}: the gate opened"
