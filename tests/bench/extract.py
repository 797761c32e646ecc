"""Extraction against plain prefill: `make bench-extract`, into runs/bench/extract.json.

Two engines of the same settings are up at the same time, each in a process of its own: one that
only reads prompts, and one that does what the extract stage does with them: captures hidden
states, checks every row, encodes a shard and writes it to a file store. They take turns on the
same blocks of prompts (a block is a unit of work), the first alternating, so that a slow minute
of the machine falls on both. The verifier and the prompts are the demonstration's.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers import AutoTokenizer

from eagle3.capture import Sampling, check_states
from eagle3.demo_inputs import CONVERSATIONS_NAME, VERIFIER_NAME, write_inputs
from eagle3.shards import Sample, TokenRow, encode_samples
from eagle3.store import open_store
from eagle3.units import write_unit
from eagle3.vllm_capture import EngineOptions, VllmCapture, VllmGenerator

INPUTS = Path("runs/inputs")
RESULT = Path("runs/bench/extract.json")
NUM_BLOCKS = 7
ROWS_PER_BLOCK = 32
NUM_TURNS = 6
MAX_SEQ_LEN = 512
DTYPE = "float32"

Block = list[list[int]]
Work = Callable[[int, Block], None]


def main() -> int:
    """Run the benchmark, print its result and write it."""
    write_inputs(INPUTS)
    model = INPUTS / VERIFIER_NAME
    blocks = read_blocks(model, INPUTS / CONVERSATIONS_NAME)
    with (
        tempfile.TemporaryDirectory() as states,
        worker(prefill, model, states) as plain,
        worker(extract, model, states) as ours,
    ):
        timed = [take_turns(number, block, plain, ours) for number, block in enumerate(blocks)]
    # The first block warms both engines.
    result = summarise(timed[1:])
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


def read_blocks(model: Path, conversations: Path) -> list[Block]:
    """The first chats as token rows, cut into one block to warm up and `NUM_BLOCKS` more."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows: Block = []
    with conversations.open(encoding="utf-8") as lines:
        while len(rows) < (NUM_BLOCKS + 1) * ROWS_PER_BLOCK:
            messages = json.loads(next(lines))["messages"][:NUM_TURNS]
            ids = tokenizer.apply_chat_template(messages, return_dict=False)
            rows.append(ids[:MAX_SEQ_LEN])
    return [rows[at : at + ROWS_PER_BLOCK] for at in range(0, len(rows), ROWS_PER_BLOCK)]


@contextmanager
def worker(job: Callable[..., None], model: Path, states: str) -> Iterator[Connection]:
    """A process with a running engine; yields the connection that takes blocks."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=job, args=(there, model, states))
    process.start()
    there.close()
    here.recv()
    yield here
    here.send(None)
    process.join()
    if process.exitcode:
        sys.exit(process.exitcode)


def prefill(connection: Connection, model: Path, _states: str) -> None:
    """The worker that only reads: one token is sampled after each prompt, as in extraction."""
    engine = VllmGenerator(options(model))
    serve(connection, lambda _, block: void(engine.generate(block, Sampling(max_tokens=1))))
    engine.close()


def extract(connection: Connection, model: Path, states: str) -> None:
    """The worker that does what the extract stage does with a unit."""
    config = json.loads((model / "config.json").read_text())
    num_layers, hidden_size = config["num_hidden_layers"], config["hidden_size"]
    layer_ids = (2, num_layers // 2, num_layers - 3, num_layers)
    store = open_store(f"file://{states}")
    engine = VllmCapture(options(model), layer_ids=layer_ids)

    def unit(number: int, block: Block) -> None:
        rows, samples = [], []
        for place, row in enumerate(engine.capture(block)):
            ids, hidden = row.token_ids, row.hidden_states
            reason = check_states(row, block[place], num_layers=4, hidden_size=hidden_size)
            assert reason is None, reason
            named = {"row": f"{place:09d}.0", "input_ids": ids, "loss_mask": torch.ones_like(ids)}
            rows.append(TokenRow(**named))
            samples.append(Sample(**named, hidden_states=hidden.to(torch.bfloat16)))
        data = encode_samples(samples, identity="bench")
        write_unit(store, f"hidden-{number:06d}.safetensors", data, rows, identity="bench")

    serve(connection, unit)
    engine.close()


def serve(connection: Connection, work: Work) -> None:
    """Say that the engine is up, then answer each block with the seconds that it took."""
    connection.send("up")
    while (message := connection.recv()) is not None:
        number, block = message
        started = time.monotonic()
        work(number, block)
        connection.send(time.monotonic() - started)


def void(_: object) -> None:
    """Drop a result."""


def options(model: Path) -> EngineOptions:
    """The same for both, and as the stage has it."""
    return EngineOptions(
        model=model, max_model_len=MAX_SEQ_LEN + 1, dtype=DTYPE, max_num_seqs=ROWS_PER_BLOCK
    )


def take_turns(
    number: int, block: Block, plain: Connection, ours: Connection
) -> dict[str, float | int]:
    """One block on both engines, one after the other."""
    seconds = {}
    turns = [("prefill", plain), ("extract", ours)]
    for name, connection in turns if number % 2 else reversed(turns):
        connection.send((number, block))
        seconds[name] = connection.recv()
    return {
        "tokens": sum(map(len, block)),
        "prefill_seconds": seconds["prefill"],
        "extract_seconds": seconds["extract"],
    }


def summarise(blocks: Sequence[dict[str, float | int]]) -> dict[str, object]:
    """The ratio of the medians, with the blocks it comes from."""
    prefill_rates, extract_rates = (
        [block["tokens"] / block[f"{name}_seconds"] for block in blocks]
        for name in ("prefill", "extract")
    )
    each = [ours / plain for ours, plain in zip(extract_rates, prefill_rates, strict=True)]
    ratio = statistics.median(extract_rates) / statistics.median(prefill_rates)
    explanation = (
        "below 1: checking, encoding and writing the states"
        if ratio <= 1
        else f"extraction does more work, so this is the machine's noise: block by block the ratio"
        f" ran from {min(each):.2f} to {max(each):.2f}"
    )
    return {
        "model": "SmolLM2-135M-Instruct",
        "dtype": DTYPE,
        "threads": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "rows_per_block": ROWS_PER_BLOCK,
        "prefill_tokens_per_second": statistics.median(prefill_rates),
        "extract_tokens_per_second": statistics.median(extract_rates),
        "extract_over_prefill": ratio,
        "extract_over_prefill_by_block": each,
        "explanation": explanation,
        "blocks": list(blocks),
    }


if __name__ == "__main__":
    sys.exit(main())
