"""Rows to shards against the bare tokenizer: `make bench-prepare`, into runs/bench/prepare.json.

All get the same conversations of the demonstration and the same one core, since each worker of
prepare is such a process. The bare tokenizer is measured twice, in one batch each time: handed
finished texts, each conversation rendered once, the least that anybody who tokenises them must do;
and handed the rows, which it renders by `apply_chat_template`, the least that comes from rows to
ids. Ours reads the lines, finds every turn's prompt and answer, checks them, and writes shards,
lines and counts to a file store. They take turns on the same blocks of rows, the order going
round, so that a slow minute of the machine falls on all.

What we add is a price for each answer, whatever its length, so all are measured on two forms of
these chats: as they are, many answers of about twenty tokens; and each as one question and one
answer of all its other words, several hundred tokens, as the data that drafts are trained on.

Memory is the highest that a process of its own reached which prepared the rows once, and four
times as many of them.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from eagle3.config import PrepareConfig
from eagle3.conversations import Converter, Preparation, Renderer, open_sources, outcomes
from eagle3.demo_inputs import CONVERSATIONS_NAME, VERIFIER_NAME, write_inputs
from eagle3.store import open_store

INPUTS = Path("runs/inputs")
RESULT = Path("runs/bench/prepare.json")
NUM_BLOCKS = 7
ROWS_PER_BLOCK = 1024
MEMORY_ROWS = 300
SIZES = (1, 4)
MAX_SEQ_LEN = 2048


def main(argv: Sequence[str]) -> int:
    """Run the benchmark, print its result and write it; or one size, for its memory."""
    if argv:
        return measured_size(Path(argv[0]), int(argv[1]))
    # Before the tokenizer makes a thread for each core.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    write_inputs(INPUTS)
    tokenizer = AutoTokenizer.from_pretrained(INPUTS / VERIFIER_NAME)
    lines = fitting(tokenizer)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        result = {
            **measured(lines, tokenizer, folder / "chats"),
            "long_answers": measured([joined(line) for line in lines], tokenizer, folder / "long"),
            **memory(lines[:MEMORY_ROWS], folder),
        }
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


def fitting(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The conversations that are not cut, since the bare tokenizer cuts none either."""
    lines = (INPUTS / CONVERSATIONS_NAME).read_text(encoding="utf-8").splitlines(keepends=True)
    lines = lines[: 2 * ROWS_PER_BLOCK]
    texts = [rendered(tokenizer, line) for line in lines]
    lengths = map(len, tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"])
    return [line for line, length in zip(lines, lengths, strict=True) if length <= MAX_SEQ_LEN]


def joined(line: str) -> str:
    """A conversation as its first question and one answer, of all that comes after."""
    asked, *rest = (message["content"] for message in json.loads(line)["messages"])
    answer = {"role": "assistant", "content": "\n".join(rest)}
    return json.dumps({"messages": [{"role": "user", "content": asked}, answer]}) + "\n"


def measured(
    lines: Sequence[str], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> dict[str, Any]:
    """All on these rows, in turns."""
    folder.mkdir()
    timed = [block(number, lines, tokenizer, folder) for number in range(NUM_BLOCKS)]
    # The first block warms all.
    return summarise(timed[1:])


def block(
    number: int, lines: Sequence[str], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> dict[str, float]:
    """One block of rows by each, one after the other."""
    first = number * ROWS_PER_BLOCK % (len(lines) - ROWS_PER_BLOCK + 1)
    rows = lines[first : first + ROWS_PER_BLOCK]
    path = folder / f"block-{number}.jsonl"
    path.write_text("".join(rows), encoding="utf-8")
    texts = [rendered(tokenizer, row) for row in rows]
    found: dict[str, float] = {"rows": len(rows)}
    turns: list[tuple[str, Callable[[], int]]] = [
        ("bare", lambda: bare(tokenizer, texts)),
        ("rows", lambda: from_rows(tokenizer, rows)),
        ("ours", lambda: prepared(tokenizer, path, folder / f"run-{number}", len(rows))),
    ]
    turn = number % len(turns)
    for name, work in turns[turn:] + turns[:turn]:
        started, used = time.monotonic(), time.process_time()
        found[f"{name}_tokens"] = work()
        found[f"{name}_seconds"] = time.monotonic() - started
        found[f"{name}_processor_seconds"] = time.process_time() - used
    return found


def rendered(tokenizer: PreTrainedTokenizerBase, row: str) -> str:
    return str(tokenizer.apply_chat_template(json.loads(row)["messages"], tokenize=False))


def bare(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> int:
    """The tokens of a batch of texts."""
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return sum(map(len, ids))


def from_rows(tokenizer: Any, rows: Sequence[str]) -> int:
    """The tokens of a batch of conversations, as the tokenizer's own call makes them of rows."""
    chats = [json.loads(row)["messages"] for row in rows]
    return sum(map(len, tokenizer.apply_chat_template(chats, return_dict=False)))


def prepared(tokenizer: PreTrainedTokenizerBase, data: Path, store: Path, num_rows: int) -> int:
    """The tokens in the shards that prepare makes of a file, in one process."""
    config = PrepareConfig(data=(str(data),), max_seq_len=MAX_SEQ_LEN, heldout_share=0.0)
    converter = shared_converter(tokenizer, config)
    sources = open_sources(config.data)
    made = Preparation(open_store(str(store)), config, rows=num_rows, vocab_size=len(tokenizer))
    for source, where, outcome in outcomes(converter, sources, num_rows):
        made.take(outcome, where=where, source=source)
    return made.finish().total_tokens


_converters: dict[int, Converter] = {}


def shared_converter(tokenizer: PreTrainedTokenizerBase, config: PrepareConfig) -> Converter:
    """One for all blocks: looking at the tokenizer is part of starting, not of a row."""
    if id(tokenizer) not in _converters:
        assert isinstance(tokenizer.eos_token_id, int)
        renderer = Renderer(tokenizer, [tokenizer.eos_token_id])
        _converters[id(tokenizer)] = Converter(renderer, config)
    return _converters[id(tokenizer)]


def memory(lines: Sequence[str], folder: Path) -> dict[str, Any]:
    """Highest memory of a process of its own at each size."""
    peaks = {}
    for size in SIZES:
        data = folder / f"size-{size}.jsonl"
        with data.open("w", encoding="utf-8") as file:
            for copy in range(size):
                # Another first word, so that no copy is a duplicate.
                file.writelines(
                    line.replace('"content": "', f'"content": "{copy} ', 1) for line in lines
                )
        command = [sys.executable, "-m", "tests.bench.prepare", str(data), str(size * len(lines))]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        peaks[f"{size * len(lines)} rows, {data.stat().st_size / 1e6:.1f} MB"] = json.loads(told)
    values = list(peaks.values())
    return {"peak_mb": peaks, "peak_growth_mb": round(values[-1] - values[0], 1)}


def measured_size(data: Path, num_rows: int) -> int:
    """Prepare a file and print the highest memory of this process, in MB."""
    tokenizer = AutoTokenizer.from_pretrained(INPUTS / VERIFIER_NAME)
    with tempfile.TemporaryDirectory() as store:
        prepared(tokenizer, data, Path(store), num_rows)
    # Not getrusage, whose figure begins with that of the process that started this one.
    status = Path("/proc/self/status").read_text()
    peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    print(int(peak.split()[1]) * 1024 / 1e6)
    return 0


def summarise(blocks: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Rows a second of each, and the ratios of the medians."""
    baselines = {"bare": "bare_tokenizer", "rows": "tokenizer_from_rows"}
    rates = {
        name: [block["rows"] / block[f"{name}_seconds"] for block in blocks]
        for name in (*baselines, "ours")
    }
    median = {name: statistics.median(rate) for name, rate in rates.items()}
    result: dict[str, Any] = {
        "tokenizer": "SmolLM2-135M-Instruct",
        "cores": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "rows_per_block": ROWS_PER_BLOCK,
        "rows_per_second": median["ours"],
    }
    for name, baseline in baselines.items():
        each = zip(rates["ours"], rates[name], strict=True)
        result |= {
            f"{baseline}_rows_per_second": median[name],
            f"rate_over_{baseline}": median["ours"] / median[name],
            f"rate_over_{baseline}_by_block": [round(ours / other, 3) for ours, other in each],
            f"processor_time_over_{baseline}": statistics.median(
                block[f"{name}_processor_seconds"] / block["ours_processor_seconds"]
                for block in blocks
            ),
        }
    for name in rates:
        result[f"tokens_of_{name}"] = sum(block[f"{name}_tokens"] for block in blocks)
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
