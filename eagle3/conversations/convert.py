"""A row of data to what prepare keeps of it: token rows, or a held-out prompt, or a reason."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from eagle3.config import PrepareConfig
from eagle3.conversations import messages as parsing
from eagle3.conversations.messages import Conversation, Message, Rejected, role_map
from eagle3.conversations.reading import RawRow
from eagle3.conversations.rendering import Renderer, Script
from eagle3.conversations.row_builder import RowBuilder
from eagle3.conversations.split import conversation_id, is_heldout
from eagle3.errors import ConversationsInvalid

_DIGEST_BYTES = 16
_EXCERPT = 1000
# Of a conversation that is far too long only the beginning can become a row.
_CHARACTERS_PER_TOKEN = 8


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A usable conversation.

    Attributes:
        conversation: the id that its first prompt gives it.
        digest: equal for conversations that are equal throughout.
    """

    conversation: str
    digest: bytes
    messages: list[Message]
    tools: list[dict[str, Any]] | None


@dataclass(frozen=True, kw_only=True)
class Kept(Outcome):
    """A conversation to train on.

    Attributes:
        rows: (input_ids, loss_mask) of each token row.
        counts: turns, turns_too_long (left out at the end, whole turns only), clipped (1 where
            that happened), rows_too_short (of the conversation's token rows, left out),
            unanswered (1 where there is no answer, and so nothing to train on before regenerate),
            and tokens_once (of one render to the last turn that fits).
    """

    rows: list[tuple[list[int], list[int]]]
    counts: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class HeldOut(Outcome):
    """A conversation kept away from training; `messages` end before the first answer."""

    input_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class _Answered:
    """A conversation to train on, before its ids are known."""

    found: Conversation
    name: str
    script: Script


class FormOfFile:
    """The one form of a file's rows: that of the first row that has any.

    Args: url: of the file, as errors name it.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._found: tuple[str, int] | None = None

    def learn(self, rows: Iterable[RawRow]) -> None:
        """Look for the form in the file's next rows, unless it is known."""
        for raw in rows:
            if self._found is not None:
                return
            with contextlib.suppress(Rejected):
                forms = parsing.forms_of(raw.record())
                self._found = (forms[0], raw.place) if len(forms) == 1 else None

    def check(self, record: Mapping[str, Any], place: int) -> str:
        """The form of this row. Raises Rejected for none, ConversationsInvalid for a mixture."""
        forms = parsing.forms_of(record)
        if not forms:
            raise Rejected("unknown_form", f"its keys are {', '.join(map(str, record))[:80]}")
        if self._found is None or forms != (self._found[0],):
            wanted = f"{self._found[0]}, as line {self._found[1]}" if self._found else "one form"
            raise ConversationsInvalid(
                f"{self.url}:{place}",
                wanted=wanted,
                found=" and ".join(forms),
                remedy="split the file, so that all rows of each have one form",
            )
        return forms[0]


class Converter:
    """Rows to outcomes, by one renderer and one configuration. Pure: a row decides its outcome."""

    def __init__(
        self, renderer: Renderer, config: PrepareConfig, *, unanswered: bool = False
    ) -> None:
        """Args: unanswered: keep conversations without an answer, since regenerate gives them one.

        Raises ConfigError for a role map that leads nowhere.
        """
        self._renderer = renderer
        self._config = config
        self._unanswered = unanswered
        self._roles = role_map(config.roles)

    def convert(self, raw: RawRow, form: FormOfFile) -> Kept | HeldOut | Rejected:
        """What becomes of a row. Raises ConversationsInvalid for a file of mixed forms."""
        return self.convert_all([raw], form)[0]

    def convert_all(
        self, rows: Sequence[RawRow], form: FormOfFile
    ) -> list[Kept | HeldOut | Rejected]:
        """The same of many rows of a file, which costs less for each."""
        begun = [self._begun(raw, form) for raw in rows]
        most = _CHARACTERS_PER_TOKEN * self._config.max_seq_len
        self._renderer.learn(one.script.text[:most] for one in begun if isinstance(one, _Answered))
        return [
            self._ended(one, raw) if isinstance(one, _Answered) else one
            for raw, one in zip(rows, begun, strict=True)
        ]

    def _begun(self, raw: RawRow, form: FormOfFile) -> Kept | HeldOut | Rejected | _Answered:
        try:
            record = raw.record()
            found = parsing.parse(
                record,
                form.check(record, raw.place),
                self._roles,
                unanswered=self._unanswered,
            )
            name = conversation_id(found.messages)
            if is_heldout(name, self._config.heldout_share):
                return self._held_out(found, name)
            answers = _answers(found.messages)
            if not answers:
                return self._asked(found, name)
            script = self._renderer.script(found.messages[: answers[-1] + 1], found.tools)
            return _Answered(found=found, name=name, script=script)
        except Rejected as rejected:
            rejected.text = _excerpt(raw)
            return rejected

    def _ended(self, begun: _Answered, raw: RawRow) -> Kept | Rejected:
        try:
            return self._kept(begun)
        except Rejected as rejected:
            rejected.text = _excerpt(raw)
            return rejected

    def _held_out(self, found: Conversation, name: str) -> HeldOut:
        prompt, ids = self._prompt(found)
        return HeldOut(
            conversation=name,
            digest=_digest(found),
            messages=prompt,
            tools=found.tools,
            input_ids=ids,
        )

    def _prompt(self, found: Conversation) -> tuple[list[Message], list[int]]:
        """The messages up to the first answer, and their ids. Raises Rejected."""
        answers = _answers(found.messages)
        prompt = found.messages[: answers[0]] if answers else found.messages
        self._renderer.check_texts(prompt, found.tools)
        ids = self._renderer.prompt_ids(prompt, found.tools)
        if len(ids) >= self._config.max_seq_len:
            raise Rejected("too_long", f"a prompt of {len(ids)} tokens")
        return prompt, ids

    def _asked(self, found: Conversation, name: str) -> Kept:
        """A conversation that nobody has answered: one row, of which nothing is supervised."""
        _, ids = self._prompt(found)
        return Kept(
            conversation=name,
            digest=_digest(found),
            messages=found.messages,
            tools=found.tools,
            rows=[(ids, [0] * len(ids))],
            counts={"unanswered": 1, "tokens_once": len(ids)},
        )

    def _kept(self, begun: _Answered) -> Kept:
        found = begun.found
        builder = RowBuilder(self._config.max_seq_len)
        fitting = once = 0
        for prompt, answer in self._renderer.turns(begun.script):
            if not builder.add_turn(prompt, answer):
                if fitting == 0:
                    length = len(prompt) + len(answer)
                    raise Rejected("too_long", f"{length} tokens to the end of the first answer")
                break
            fitting += 1
            once = len(prompt) + len(answer)
        rows = [row for row in builder.rows() if sum(row[1]) >= self._config.min_supervised_tokens]
        if not rows:
            raise Rejected("too_few_supervised")
        return Kept(
            conversation=begun.name,
            digest=_digest(found),
            messages=found.messages,
            tools=found.tools,
            rows=rows,
            counts={
                "turns": fitting,
                "turns_too_long": (too_long := len(_answers(found.messages)) - fitting),
                "clipped": int(too_long > 0),
                "rows_too_short": len(builder.rows()) - len(rows),
                "tokens_once": once,
            },
        )


def _answers(messages: list[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _excerpt(raw: RawRow) -> str:
    """The beginning of a row, as text whatever it holds."""
    if isinstance(raw.value, bytes):
        return raw.value[:_EXCERPT].decode(errors="replace").strip()
    return str(raw.value)[:_EXCERPT]


def _digest(found: Conversation) -> bytes:
    text = msgspec.json.encode([found.messages, found.tools], order="deterministic")
    return hashlib.sha256(text).digest()[:_DIGEST_BYTES]
