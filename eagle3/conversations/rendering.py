"""Messages to token ids, and where an answer begins in them.

A mask is found by rendering alone: the conversation with the answer must begin with exactly the
ids of the conversation without it and with the generation prompt, and what follows, to the stop
token and with it, is what the verifier would have generated. No pattern is looked for in text or
ids, no character offset is used (some tokenizers have none), and no generation tag (stock
templates have none).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import msgspec
from transformers import PreTrainedTokenizerBase

from eagle3.conversations.encoding import Encoder
from eagle3.conversations.growing import growing, turn_parts
from eagle3.conversations.messages import REASONING, Message, Rejected
from eagle3.conversations.template import PROBE, ChatTemplate, Tools
from eagle3.errors import VerifierInvalid
from eagle3.verifier.tokenizer import special_ids

_PROVEN_EACH = 16  # One conversation in so many is rendered in both ways.


@dataclass(frozen=True, kw_only=True)
class Script:
    """A conversation to its last answer, whose texts have been checked.

    Attributes:
        text: its render.
        parts: as `eagle3.conversations.growing` gives them, where the template is such a one.
    """

    messages: Sequence[Message]
    tools: Tools
    text: str
    parts: list[tuple[str, str, str]] | None


class Renderer:
    """A verifier's tokenizer with its chat template, and what has been found out about them.

    Args:
        tokenizer: one that has been proven (`Verifier.load_tokenizer`).
        stop_ids: ids that end an answer.
        today: what a template that asks for the date is told, `prepare.template_date`.

    Raises VerifierInvalid or ConfigError for a template that cannot be used, as `ChatTemplate`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: Sequence[int],
        *,
        today: date | None = None,
    ) -> None:
        self._stops = frozenset(stop_ids)
        self._encoder = Encoder(tokenizer, ())
        self._template = ChatTemplate(tokenizer, today)
        prompt = self._prove_encoding()
        self._tokenizer = tokenizer
        special = special_ids(tokenizer)
        self._silent: set[tuple[int, ...]] = set()
        # Published role markers are not always marked as special, but they are never spelt out.
        self._marks = frozenset(prompt) & (special | set(tokenizer.added_tokens_decoder))
        self._wordless = special | self._marks | self._stops
        self._encoder = Encoder(tokenizer, self._stops | self._marks)
        source = self._template.source
        one_prompt = len(self._template.switches) == 1
        self._growing = growing(source) if source is not None and one_prompt else None
        self._rendered = 0
        self._control = _literals(tokenizer, special | self._marks)
        self._control_in_answer = _literals(tokenizer, self._marks & special | self._stops)

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Ids of a history with the generation prompt, as a server sends them to the verifier.

        Raises Rejected where the template refuses these messages.
        """
        return self._ids(self._template.text(messages, tools, prompt=True))

    def script(self, messages: Sequence[Message], tools: Tools) -> Script:
        """A conversation that ends with an answer, rendered and checked. Raises Rejected."""
        parts = self._parts(messages, tools)
        text = _whole(parts) if parts else self._template.text(messages, tools, prompt=False)
        self._check_texts(messages, tools, text)
        if not self._encoder.is_piecewise(text):
            parts = None
        return Script(messages=messages, tools=tools, text=text, parts=parts)

    def learn(self, texts: Iterable[str]) -> None:
        """Encode at once what the turns of these renders will need."""
        self._encoder.learn(texts)

    def turns(self, script: Script) -> Iterator[tuple[list[int], list[int]]]:
        """(prompt, answer) of each answer, in order.

        The answer ends with its stop token. A template that can prompt with and without
        reasoning has several prompts; the longest that the render begins with is taken, so that
        nothing is supervised that a prompt supplies.

        Raises Rejected.
        """
        answers = [at for at, message in enumerate(script.messages) if _is_answer(message)]
        if script.parts is not None:
            yield from self._grown_turns(script.messages, script.parts, answers)
            return
        for place in answers:
            texts = self._turn_texts(script.messages[: place + 1], script.tools)
            yield self._turn_ids(*texts, script.messages[place])

    def _grown_turns(
        self,
        messages: Sequence[Message],
        parts: Sequence[tuple[str, str, str]],
        answers: Sequence[int],
    ) -> Iterator[tuple[list[int], list[int]]]:
        """The same where every history begins with the one before: only what is new is encoded."""
        known: list[int] = []
        pending, at = "", 0
        for place in answers:
            pending = "".join([pending, *(said for said, _, _ in parts[at:place])])
            start = pending + parts[place - 1][2]
            history = pending + parts[place][0]
            text = history + parts[place][1]
            prompt, answer = self._split(start, text, messages[place])
            prompt = known + prompt
            yield prompt, answer
            at, pending = place + 1, history
            end = self._encoder.end_of(text, answer[-1], len(start))
            if end is not None and end <= len(history):
                known, pending = prompt + answer, history[end:]

    def _split(self, start: str, text: str, said: Message) -> tuple[list[int], list[int]]:
        """(prompt, answer) of texts that begin where a history was cut."""
        found = self._encoder.split(text, len(start)) if text.startswith(start) else None
        if found is None or not found[0]:
            raise Rejected("prompt_not_a_prefix", "the render with the answer begins otherwise")
        prompt, answer = found[0], self._answer(found[1])
        _check_said(said, text, len(start))
        return prompt, answer

    def _turn_ids(
        self, starts: Sequence[str], text: str, said: Message
    ) -> tuple[list[int], list[int]]:
        whole = self._ids(text)
        for start in starts:
            prompt = self._ids(start) if text.startswith(start) else []
            if prompt and whole[: len(prompt)] == prompt:
                answer = self._answer(whole[len(prompt) :])
                _check_said(said, text, len(start))
                self._encoder.know(text, len(start), [*prompt, *answer])
                return prompt, answer
        raise Rejected("prompt_not_a_prefix", "the render with the answer begins otherwise")

    def _turn_texts(self, messages: Sequence[Message], tools: Tools) -> tuple[list[str], str]:
        """(prompts, whole) of the last message, an answer."""
        text = self._template.text
        starts = [
            text(messages[:-1], tools, prompt=True, **switch) for switch in self._template.switches
        ]
        return starts, text(messages, tools, prompt=False)

    def _parts(
        self, messages: Sequence[Message], tools: Tools
    ) -> list[tuple[str, str, str]] | None:
        """The render in parts, where the template only ever adds to what it said."""
        template = self._growing
        if template is None:
            return None
        spelt = self._template.spelt(messages)

        def render(template: Any) -> str:
            return self._template.text_of(spelt, tools, prompt=False, chat_template=template)

        try:
            parts = turn_parts(render, template, len(messages))
        except Rejected:
            # What follows the loop may refuse a message that no history ends with.
            return None
        self._rendered += 1
        if parts is not None and self._rendered % _PROVEN_EACH == 1:
            self._prove(spelt, tools, parts)
        return parts

    def _prove(
        self, spelt: Sequence[Message], tools: Tools, parts: Sequence[tuple[str, str, str]]
    ) -> None:
        """Hold the parts against the real renders: the whole, and one answer with its prompt.

        Raises VerifierInvalid, since rows made before would be as wrong as this one.
        """
        answers = [at for at, message in enumerate(spelt) if _is_answer(message)]
        # Another turn each time.
        place = answers[self._rendered // _PROVEN_EACH % len(answers)]
        before = "".join(said for said, _, _ in parts[:place])
        asked = (
            (len(spelt), False, _whole(parts)),
            (place + 1, False, before + parts[place][0] + parts[place][1]),
            (place, True, before + parts[place - 1][2]),
        )
        for end, prompt, ours in asked:
            real = self._template.text_of(spelt[:end], tools, prompt=prompt)
            if real != ours:
                at = next(i for i in range(len(real) + 1) if real[: i + 1] != ours[: i + 1])
                raise VerifierInvalid(
                    "chat template",
                    wanted=f"the text of all turns at once to be that of each: {real[at:][:40]!r}",
                    found=f"{ours[at:][:40]!r} after {at} characters of {end} messages",
                    remedy="report it with the template, and use no row that was made with it",
                )

    def check_texts(self, messages: Sequence[Message], tools: Tools) -> None:
        """No message may forge a turn, and none may vanish. Raises Rejected.

        A special token that is spelt out in a text would become the token itself. In an answer
        only those count that mark turns or end them: others may be the verifier's own speech.
        """
        self._check_texts(messages, tools, self._template.text(messages, tools, prompt=False))

    def _check_texts(self, messages: Sequence[Message], tools: Tools, text: str) -> None:
        if tools and self._control.search(_as_json(tools)):
            raise Rejected("control_token", "in the tools")
        for message in messages:
            pattern = self._control_in_answer if _is_answer(message) else self._control
            # A message of a role and a content has nothing else to look through.
            texts = message["content"] if len(message) == 2 else _as_json(message)
            if found := pattern.search(texts):
                raise Rejected("control_token", f"{found[0]} in a {message['role']} message")
        start = 0
        for message in messages:
            wanted = message["content"].strip()
            if message["role"] == "user":
                at = text.find(wanted, start)
                start = at + len(wanted)
            else:
                at = text.find(wanted) if message["role"] == "system" else 0
            if at < 0:
                raise Rejected("template_drops_turn", f"a {message['role']} message is lost")

    def _answer(self, tail: list[int]) -> list[int]:
        # Once for each of the few stop tokens, since a loop over the ids costs more than the rest.
        ends = [tail.index(token) for token in self._stops if token in tail]
        end = min(ends, default=None)
        if end is None:
            raise Rejected("no_stop_token", "the template does not end the answer")
        if end == 0:
            raise Rejected("empty_answer", "the template renders nothing for it")
        if tail[0] in self._marks:
            raise Rejected("role_marker_supervised", "the template has no generation prompt")
        self._check_ended(tuple(tail[end + 1 :]))
        return tail[: end + 1]

    def _check_ended(self, after: tuple[int, ...]) -> None:
        """A template may end an answer of several tool calls before the last of them. Raises
        Rejected: a verifier says all of it first, and nothing past its stop token."""
        if after and after not in self._silent:
            said = self._tokenizer.decode([i for i in after if i not in self._wordless])
            if str(said).strip():
                raise Rejected("answer_goes_on", f"after its stop token with {str(said)[:80]!r}")
            self._silent.add(after)

    def _ids(self, text: str) -> list[int]:
        return self._encoder.ids(text)

    def _prove_encoding(self) -> list[int]:
        """The ids of a prompt, the same whether its text is encoded or the tokenizer is asked."""
        ids = self._ids(self._template.text([PROBE], None, prompt=True))
        asked = self._template.probe_ids()
        if ids != asked:
            raise VerifierInvalid(
                "chat template",
                wanted=f"the ids of its text, {ids}",
                found=f"{asked} from apply_chat_template",
                remedy="use a tokenizer whose template is text, as servers expect it",
            )
        return ids


def _check_said(message: Message, text: str, start: int) -> None:
    """An answer's own render holds its reasoning and what it says. Raises Rejected."""
    thought, _, rest = message["content"].rpartition("</think>")
    thought = thought.rpartition("<think>")[2] or message.get(REASONING, "")
    for kind, part in (("reasoning", thought), ("answer", rest)):
        if text.find(part.strip(), start) < 0:
            raise Rejected(f"template_drops_{kind}", part[:80])


def _whole(parts: Sequence[tuple[str, str, str]]) -> str:
    return "".join([*(said for said, _, _ in parts), parts[-1][1]])


def _is_answer(message: Message) -> bool:
    return bool(message["role"] == "assistant")


def _as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _literals(tokenizer: PreTrainedTokenizerBase, ids: frozenset[int]) -> re.Pattern[str]:
    """A pattern that finds any of these tokens spelt out; one that finds nothing for none."""
    tokens = sorted(tokenizer.convert_ids_to_tokens(sorted(ids)), key=lambda token: -len(token))
    return re.compile("|".join(re.escape(token) for token in tokens) or r"(?!)")
