"""`eagle3 plan`: what a run will take, stage by stage, before any GPU is asked for.

Reads manifests, the verifier's config.json and the sizes of the files of conversations; computes
nothing and writes nothing. The arithmetic is `eagle3.planning`'s.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
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
from eagle3.errors import ManifestInvalid
from eagle3.planning import (
    Done,
    Known,
    RunPlan,
    StagePlan,
    bytes_of,
    bytes_per_token,
    done_of,
    know,
    other_data,
    other_settings,
    served_parameters,
    tokens_of,
    training_memory,
)
from eagle3.stages import Stage, stage_named
from eagle3.store import Store, open_store
from eagle3.work import Claim, Work
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
        bytes_to_write=sum(stage.bytes_to_write for stage in stages),
        gpu_hours=sum(stage.hours * stage.gpus for stage in stages),
        training_bytes_per_second=train_rate * per_token,
        training_bytes=known.tokens * per_token * config.train.epochs,
        memory=training_memory(config, known.verifier, known.shape, train.gpus)
        if known.shape
        else None,
        warnings=tuple(_warnings(known, stages)),
    )


def _stage(known: Known, stage: Stage) -> StagePlan:
    state, why, done = _state(known, stage)
    tokens = tokens_of(stage.name, known.config, known.tokens)
    rate = known.rates.get(stage.name) if tokens else None
    nodes = known.nodes if stage.indexed else 1
    hours = tokens / rate.tokens_per_second / nodes / 3600 if rate else 0.0
    left = round(_bytes(known, stage) * (1 - done.share))
    size = done.bytes + left
    if stage.writes[-1] in known.standing:
        written = [known.standing[kind] for kind in stage.writes if kind in known.standing]
        size = sum(entry.bytes for one in written for entry in one.manifest.files)
    return StagePlan(
        stage=stage.name,
        state=state,
        why=why,
        rows=known.rows if tokens and stage.name != "evaluate" else 0,
        tokens=tokens,
        bytes=size,
        bytes_to_write=left if state == "to run" else 0,
        gpus=stage.gpus * nodes,
        hours=hours * (1 - done.share) if state == "to run" else 0.0,
        rate=rate,
    )


def _bytes(known: Known, stage: Stage) -> int:
    drafts = served_parameters(known.shape, known.config, known.verifier) if known.shape else 0
    counts = (known.rows, known.tokens)
    return bytes_of(stage.name, known.config, known.verifier, drafts, counts)


def _state(known: Known, stage: Stage) -> tuple[str, str, Done]:
    """Whether the stage is done, why it is not, and what of it is."""
    if known.store is None:
        return "to run", "no store was named", Done()
    committed = known.standing.get(stage.writes[-1])
    if committed is not None and committed.store.url != known.store.child(stage.writes[-1]).url:
        return "cached", f"read from {committed.store.url}", Done()
    try:
        claim = Work(known.store, stage.name).standing()
    except ManifestInvalid as error:
        return "refused", str(error), Done()
    if committed is None and claim is None:
        missing = [kinds for kinds in stage.reads.values() if not known.standing.keys() & {*kinds}]
        why = f"waits for {missing[0][-1]}" if missing else "what it reads is there"
        return "to run", why, Done()
    refused = _refused(known, stage, claim, committed)
    if refused:
        return "refused", refused, Done()
    if committed is not None:
        return "cached", f"committed as {committed.digest[:12]}", Done()
    done = done_of(known.store, stage.name, known.config, known.rows)
    if done.units:
        return "to run", f"begun, {done.units} units done, {done.share:.0%} of the rows", done
    return "to run", "begun; told as if nothing of it were done", done


def _refused(known: Known, stage: Stage, claim: Claim | None, committed: Artifact | None) -> str:
    """Why `run` would refuse what stands or was begun; empty where it would go on."""
    differing = other_settings(
        known.config, stage.name, known.verifier, claim=claim, committed=committed
    )
    begun = "" if committed is not None else "begun with "
    if differing:
        return f"{begun}{differing}; use a store prefix of its own"
    if stage.name == "prepare" and (other := other_data(known.config, claim, committed)):
        return f"{other}; use a store prefix of its own"
    return _stale(known, stage, claim, committed)


def _stale(known: Known, stage: Stage, claim: Claim | None, committed: Artifact | None) -> str:
    """Which input is another than the one that the stage was done or begun with, if any."""
    assert known.store is not None, "asked of a run with a store"
    was: dict[str, Any] = dict(claim.inputs) if claim is not None else {}
    if committed is not None:
        was |= {name: ref.digest for name, ref in committed.manifest.inputs.items()}
    for name, url in input_urls(known.config, known.store, stage).items():
        found = artifacts.find(open_store(url))
        if name in was and found is not None and found.digest != was[name]:
            return f"input {name} is {found.digest[:12]} and was {was[name][:12]}"
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
    needed = sum(stage.bytes_to_write for stage in stages)
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
