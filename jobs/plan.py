"""`eagle3 plan`: what a run will take, stage by stage, before any GPU is asked for.

Reads manifests, the verifier's config.json and the sizes of the files of conversations; computes
nothing and writes nothing. The arithmetic is `eagle3.planning`'s.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.config import RunConfig
from eagle3.config_fields import settings_that_affect
from eagle3.planning import (
    Known,
    RunPlan,
    StagePlan,
    bytes_of,
    bytes_per_token,
    know,
    served_parameters,
    tokens_of,
    training_memory,
)
from eagle3.stages import Stage, stage_named
from eagle3.store import Store, open_store
from eagle3.work import Work
from jobs.local import chosen_stages
from jobs.process import input_urls


def show(plan: RunPlan, console: Console) -> None:
    """Print a plan as tables and sentences."""
    console.print(_table(plan))
    console.print(Text(f"Rows and tokens: {plan.counted}."))
    console.print(
        f"Storage: {_size(plan.storage_bytes)}, {_size(plan.bytes_to_write)} of it still to be "
        f"written. GPU-hours to come: {plan.gpu_hours:,.1f}."
    )
    console.print(
        f"Training reads {_size(plan.training_bytes)} in all epochs; for its GPUs not to wait, "
        f"the store must give {_size(plan.training_bytes_per_second)} a second."
    )
    if plan.memory is not None:
        memory = plan.memory
        console.print(
            f"The draft trains {memory.trained_parameters / 1e6:,.0f} M parameters, and reads "
            f"{memory.frozen_parameters / 1e6:,.0f} M frozen ones: {_size(memory.states)} over "
            f"all GPUs, and {_size(memory.activations)} of activations on each: "
            f"{_size(memory.per_gpu)} a GPU."
        )
    for warning in plan.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))


def as_json(plan: RunPlan) -> str:
    """The plan for another program."""
    return msgspec.json.format(msgspec.json.encode(plan), indent=2).decode()


def make_plan(
    config: RunConfig, store: Store | None, *, nodes: int = 1, rates: Sequence[Path] = ()
) -> RunPlan:
    """The plan of a run; the arguments and the errors are those of `know`."""
    chosen = chosen_stages(config, None, None)
    known = know(config, store, chosen, nodes=nodes, rates=rates)
    stages = tuple(_stage(known, stage) for stage in chosen)
    train, train_rate = stage_named("train"), known.rates["train"].tokens_per_second
    per_token = bytes_per_token(known.verifier.hidden_size)
    return RunPlan(
        stages=stages,
        counted=known.counted,
        storage_bytes=sum(stage.bytes for stage in stages),
        bytes_to_write=sum(stage.bytes for stage in stages if stage.state == "to run"),
        gpu_hours=sum(stage.hours * stage.gpus for stage in stages),
        training_bytes_per_second=train_rate * per_token,
        training_bytes=known.tokens * per_token * config.train.epochs,
        memory=training_memory(config, known.verifier, known.shape, train.gpus)
        if known.shape
        else None,
        warnings=tuple(_warnings(known, stages)),
    )


def _stage(known: Known, stage: Stage) -> StagePlan:
    state, why = _state(known, stage)
    tokens = tokens_of(stage.name, known.config, known.tokens)
    rate = known.rates.get(stage.name) if tokens else None
    nodes = known.nodes if stage.indexed else 1
    hours = tokens / rate.tokens_per_second / nodes / 3600 if rate else 0.0
    committed = known.standing.get(stage.writes[-1])
    size = _bytes(known, stage)
    if committed is not None:
        written = [known.standing[kind] for kind in stage.writes if kind in known.standing]
        size = sum(entry.bytes for one in written for entry in one.manifest.files)
    return StagePlan(
        stage=stage.name,
        state=state,
        why=why,
        rows=known.rows if tokens and stage.name != "evaluate" else 0,
        tokens=tokens,
        bytes=size,
        gpus=stage.gpus * nodes,
        hours=hours if state == "to run" else 0.0,
        rate=rate,
    )


def _bytes(known: Known, stage: Stage) -> int:
    drafts = served_parameters(known.shape, known.config, known.verifier) if known.shape else 0
    counts = (known.rows, known.tokens)
    return bytes_of(stage.name, known.config, known.verifier, drafts, counts)


def _state(known: Known, stage: Stage) -> tuple[str, str]:
    """Whether the stage is done, and why it is not."""
    if known.store is None:
        return "to run", "no store was named"
    committed = known.standing.get(stage.writes[-1])
    section = getattr(known.config, stage.name)
    if committed is not None:
        if committed.store.url != known.store.child(stage.writes[-1]).url:
            return "cached", f"read from {committed.store.url}"
        differing = _differing(section, _resolved(section, committed.manifest.config))
        if differing:
            return "refused", f"{stage.name}.{differing}; use a store prefix of its own"
        stale = _stale(known, stage, committed)
        return ("refused", stale) if stale else ("cached", f"committed as {committed.digest[:12]}")
    claim = _claimed(known.store, stage)
    if claim is not None:
        differing = _differing(section, claim)
        if differing:
            return "refused", f"begun with {stage.name}.{differing}; use a prefix of its own"
        units = len(Work(known.store, stage.name).finished_units())
        return "to run", f"begun, {units} units done" if units else "begun"
    missing = [kinds for kinds in stage.reads.values() if not known.standing.keys() & {*kinds}]
    return "to run", f"waits for {missing[0][-1]}" if missing else "what it reads is there"


def _resolved(section: msgspec.Struct, config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that affect, of a section as a manifest recorded it; none of another version."""
    try:
        return settings_that_affect(msgspec.convert(config, type(section)))
    except msgspec.ValidationError:
        return {}


def _claimed(store: Store, stage: Stage) -> dict[str, Any] | None:
    try:
        record = msgspec.json.decode(store.read_bytes(f"work/{stage.name}/claim.json"))
        settings: dict[str, Any] = record["settings"]
    except FileNotFoundError:
        return None
    except (msgspec.DecodeError, KeyError, TypeError):
        return {}
    return settings


def _differing(section: msgspec.Struct, standing: Mapping[str, Any]) -> str:
    """The first field that affects the result and stands otherwise; empty where all agree."""
    for name, value in settings_that_affect(section).items():
        if name in standing and standing[name] != value:
            return f"{name} {standing[name]}, and is {value} now"
    return ""


def _stale(known: Known, stage: Stage, committed: Artifact) -> str:
    """Which input is another than the one that the artefact was made from, if any."""
    assert known.store is not None, "asked of a run with a store"
    for name, url in input_urls(known.config, known.store, stage).items():
        ref = committed.manifest.inputs.get(name)
        found = artifacts.find(open_store(url))
        if ref is not None and found is not None and found.digest != ref.digest:
            return f"input {name} is {found.digest[:12]} and was {ref.digest[:12]}"
    return ""


def _warnings(known: Known, stages: Sequence[StagePlan]) -> Iterator[str]:
    for stage in stages:
        if stage.state == "refused":
            yield f"{stage.stage} would be refused: {stage.why}"
    assumed = [stage.stage for stage in stages if stage.hours and _is_assumed(stage)]
    if assumed:
        yield f"hours of {', '.join(assumed)} rest on assumed rates: measure, and give --rates"
    if known.shape is None:
        yield (
            "the draft's memory and size are left out: train.geometry does not say its shape, and "
            "the verifier's attention lends none"
        )
    needed = sum(stage.bytes for stage in stages if stage.state == "to run")
    free = _free(known.store)
    if free is not None and free < needed:
        yield f"the store has room for {_size(free)}, and {_size(needed)} are to be written"
    longest = known.config.prepare.max_seq_len
    unit = longest * bytes_per_token(known.verifier.hidden_size)
    if unit > known.config.extract.unit_bytes:
        yield f"a row of {longest} tokens is {_size(unit)} of states, more than extract.unit_bytes"


def _is_assumed(stage: StagePlan) -> bool:
    return stage.rate is not None and stage.rate.source == "assumed"


def _free(store: Store | None) -> int | None:
    """Bytes free where the run is to lie, if that is a disk of this machine."""
    place = store.local_path() if store is not None else None
    if place is None:
        return None
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def _table(plan: RunPlan) -> Table:
    table = Table(box=None)
    table.add_column("stage", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("rows", "tokens", "writes", "GPUs", "hours", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why")
    for stage in plan.stages:
        rate = stage.rate
        table.add_row(
            stage.stage,
            stage.state,
            f"{stage.rows:,}" if stage.rows else "",
            f"{stage.tokens:,}" if stage.tokens else "",
            _size(stage.bytes) if stage.bytes else "",
            str(stage.gpus) if stage.gpus else "",
            f"{stage.hours:,.2f}" if stage.hours else "",
            f"{rate.tokens_per_second:,.0f} {rate.source}" if rate and stage.hours else "",
            Text(stage.why),
        )
    return table


def _size(num_bytes: float) -> str:
    return decimal(round(num_bytes))
