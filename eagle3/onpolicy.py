"""Conversations that the verifier answers itself, unit by unit.

Of a recorded conversation only what was said to the model is kept; every answer is the
verifier's own, and the next prompt is rendered with it, as a server would. A unit's answers
follow from its conversations, the settings and the seed alone.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from typing import Any

import torch

from eagle3.artifact import Artifact
from eagle3.capture import Generator, Sampling, Told
from eagle3.config import RegenerateConfig
from eagle3.conversations import Message, Rejected, Renderer, RowBuilder, RowRecord
from eagle3.errors import ConfigError
from eagle3.shards import TokenRow, encode_rows
from eagle3.store import Store
from eagle3.units import Unit, WrittenUnit, adopt_unit, cut_units, longest_row, write_unit
from eagle3.verifier import LoadedVerifier
from eagle3.vocab import counts_to_dict, supervised_counts
from eagle3.work import UnitRecord


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is answered, and in which units.

    Attributes:
        template_date: as `prepare` rendered its rows and the held-out prompts.
        identity: that of the claim, once there is one.
    """

    settings: RegenerateConfig
    max_seq_len: int
    units: tuple[Unit, ...]
    template_date: date | None
    identity: str = ""

    @property
    def num_rows(self) -> int:
        """Prepared rows of all units; a conversation has one or more."""
        return sum(unit.num_rows for unit in self.units)

    def under(self, identity: str) -> Plan:
        """The same plan, for objects that name this identity."""
        return replace(self, identity=identity)


def plan_answers(rows: Artifact, settings: RegenerateConfig) -> Plan:
    """Cut the units. Raises ConfigError where no answer would fit into a row, ManifestInvalid."""
    longest = longest_row(rows)
    if settings.max_new_tokens >= longest:
        raise ConfigError(
            "regenerate.max_new_tokens",
            wanted=f"less than {longest}, the longest row that prepare allowed",
            found=settings.max_new_tokens,
            remedy="lower it, or raise prepare.max_seq_len",
        )
    units = cut_units(rows.manifest.files, settings.unit_rows)
    # Of the rows, not of this run's configuration: those may be another run's.
    told = (rows.manifest.config or {}).get("template_date")
    return Plan(
        settings=settings,
        max_seq_len=longest,
        units=units,
        template_date=date.fromisoformat(told) if told else None,
    )


class Chat:
    """One conversation being answered, turn by turn.

    Args:
        name: its source row, the part of a row's name before the piece.
        messages: the recorded conversation.
        tools: the tools that were offered.
        max_seq_len: longest row; a turn is asked only where its longest answer still fits.
        max_new_tokens: longest answer.

    Attributes:
        reason: why the conversation gave no row, or why it ended early; None while all is well.
    """

    def __init__(
        self,
        name: str,
        messages: Sequence[Message],
        tools: list[dict[str, Any]] | None,
        *,
        max_seq_len: int,
        max_new_tokens: int,
    ) -> None:
        self.reason: str | None = None
        self.name = name
        self._turns = prompts_of(messages)
        self._tools = tools
        self._room = max_seq_len - max_new_tokens
        self._history: list[Message] = []
        self._prompt: list[int] = []
        self._builder = RowBuilder(max_seq_len)

    @property
    def turns_left(self) -> int:
        """Turns that have not been asked for yet."""
        return len(self._turns)

    def next_prompt(self, renderer: Renderer) -> list[int] | None:
        """Token ids to answer next, or None when the conversation is over."""
        if not self._turns or self.reason:
            return None
        self._history.extend(self._turns.pop(0))
        try:
            self._prompt = renderer.prompt_ids(self._history, self._tools)
        except Rejected as rejected:
            self.reason = rejected.reason
            return None
        if len(self._prompt) > self._room:
            self.reason = "too_long"
            return None
        return self._prompt

    def take_answer(self, answer_ids: Sequence[int], text: str) -> None:
        """Take the verifier's answer to the last prompt.

        An answer that says nothing ends the conversation before this turn.

        Args:
            answer_ids: with its stop token, where it came.
            text: the same without special tokens, for the history.
        """
        if not text.strip():
            self.reason = "empty_answer"
            return
        added = self._builder.add_turn(self._prompt, answer_ids)
        assert added, "the prompt left room for the longest answer"
        self._history.append({"role": "assistant", "content": text})

    def rows(self) -> list[TokenRow]:
        """The token rows of all answered turns; only the answers are supervised."""
        return [
            TokenRow(
                row=f"{self.name}.{piece}",
                input_ids=torch.tensor(ids, dtype=torch.int64),
                loss_mask=torch.tensor(mask, dtype=torch.int64),
            )
            for piece, (ids, mask) in enumerate(self._builder.rows())
        ]


def prompts_of(messages: Sequence[Message]) -> list[list[Message]]:
    """What was said to the model before each of its answers, turn by turn.

    A tool's result belongs to a call that the verifier has not made: the turns end before it.
    """
    turns: list[list[Message]] = []
    said: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            break
        if message["role"] != "assistant":
            said.append(message)
        elif said:
            turns.append(said)
            said = []
    if any(message["role"] == "user" for message in said):
        turns.append(said)
    return turns


def answers_in(row: TokenRow, stop_ids: Sequence[int]) -> tuple[int, int]:
    """(answers, clipped answers) of a row: a clipped one was cut before its stop token.

    An answer is an unbroken run of supervised tokens; a prompt lies between any two.
    """
    following = torch.cat([row.loss_mask[1:], torch.zeros(1, dtype=torch.int64)])
    ends = (row.loss_mask == 1) & (following == 0)
    last = row.input_ids[ends]
    stopped = torch.isin(last, torch.tensor(stop_ids, dtype=torch.int64))
    return len(last), int((~stopped).sum())


class Answerer:
    """Has the turns of a unit's conversations answered by an engine.

    Args:
        check_stop: called before each call of the engine; what it raises gives the unit up, of
            which nothing has been written by then.
    """

    def __init__(
        self,
        generator: Generator,
        verifier: LoadedVerifier,
        plan: Plan,
        check_stop: Callable[[], None],
    ) -> None:
        self._generator = generator
        self._tokenizer = verifier.load_tokenizer()
        self._renderer = Renderer(self._tokenizer, verifier.stop_ids, today=plan.template_date)
        self._plan = plan
        self._check_stop = check_stop

    def answer(self, unit: Unit, records: Sequence[RowRecord], told: Told) -> list[Chat]:
        """The unit's conversations, one turn of all of them answered at a time.

        Args:
            told: hears on the way how many of the unit's rows that is, by the share of its turns.
        """
        settings = self._plan.settings
        # Only the first row of a conversation brings its messages.
        chats = [
            Chat(
                record.row.partition(".")[0],
                record.messages,
                record.tools,
                max_seq_len=self._plan.max_seq_len,
                max_new_tokens=settings.max_new_tokens,
            )
            for record in records
            if record.messages
        ]
        turns = sum(min(chat.turns_left, settings.max_turns) for chat in chats)
        answered = 0

        def tell(count: int) -> None:
            told(unit.num_rows * (answered + count) // turns)

        for turn in range(settings.max_turns):
            self._check_stop()
            # Of its own for every call, and the same whenever the call is made again.
            seed = zlib.crc32(f"{settings.seed} {unit.number} {turn}".encode())
            count = self._answer_turn(chats, seed, tell)
            if not count:
                break
            answered += count
        return chats

    def _answer_turn(self, chats: Sequence[Chat], seed: int, told: Told) -> int:
        """One turn of every open conversation; returns how many there were."""
        settings = self._plan.settings
        asked = [(chat, chat.next_prompt(self._renderer)) for chat in chats]
        open_chats = [(chat, prompt) for chat, prompt in asked if prompt is not None]
        if not open_chats:
            return 0
        sampling = Sampling(
            max_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
            top_k=settings.top_k,
            seed=seed,
        )
        prompts = [prompt for _, prompt in open_chats]
        completions = self._generator.generate(prompts, sampling, told)
        for (chat, _), completion in zip(open_chats, completions, strict=True):
            text = self._tokenizer.decode(
                list(completion.token_ids),
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
            chat.take_answer(completion.token_ids, str(text))
        return len(open_chats)


def write_answers(
    output: Store,
    verifier: LoadedVerifier,
    plan: Plan,
    unit: Unit,
    chats: Sequence[Chat],
    seconds: float,
) -> UnitRecord:
    """Write a unit's shard and return the record to make of it.

    All counts are taken from what the shard holds, which may be another worker's answers. Raises
    ShardInvalid and IdentityConflict as `adopt_unit`.
    """
    rows = [row for chat in chats for row in chat.rows()]
    path = f"rows-{unit.number:06d}.safetensors"
    written: WrittenUnit | None = None
    if rows:
        data = encode_rows(rows, identity=plan.identity)
        written = write_unit(output, path, data, rows, identity=plan.identity)
    elif output.exists(path):
        written = adopt_unit(output, path, identity=plan.identity)
    rows = list(written.rows) if written else []
    kept = {row.row.partition(".")[0] for row in rows}
    lost = [chat for chat in chats if chat.name not in kept]
    reasons = Counter(chat.reason or "rejected_by_another_worker" for chat in lost)
    answers = [answers_in(row, verifier.stop_ids) for row in rows]
    counts = supervised_counts(rows, verifier.vocab_size)
    return UnitRecord(
        unit=unit.number,
        rows_in=len(chats),
        rows_kept=len(chats) - len(lost),
        files=(written.entry,) if written else (),
        rejected=dict(reasons),
        facts={
            "turns": sum(count for count, _ in answers),
            "clipped": sum(clipped for _, clipped in answers),
            "supervised_tokens": int(counts.sum()),
        },
        token_counts=counts_to_dict(counts),
        measured={"answer_seconds": seconds},
    )
