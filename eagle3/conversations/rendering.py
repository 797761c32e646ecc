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
from typing import Any

import msgspec
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from eagle3.conversations.encoding import Encoder
from eagle3.conversations.growing import growing, turn_texts
from eagle3.conversations.messages import REASONING, Message, Rejected
from eagle3.conversations.tool_calls import find_tool_style
from eagle3.errors import VerifierInvalid
from eagle3.verifier.tokenizer import special_ids

# What a template's own code raises on messages that it was not written for.
_REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
# How templates are told to prompt without reasoning. Most know none of these.
_SWITCHES: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False}, {"thinking": False})
_PROBE_USER: Message = {"role": "user", "content": "probe question"}
Tools = list[dict[str, Any]] | None


@dataclass(frozen=True, kw_only=True)
class Script:
    """A conversation to its last answer, whose texts have been checked.

    Attributes: text: its render.
    """

    messages: Sequence[Message]
    tools: Tools
    text: str


class Renderer:
    """A verifier's tokenizer with its chat template, and what has been found out about them.

    Args:
        tokenizer: one that has been proven (`Verifier.load_tokenizer`).
        stop_ids: ids that end an answer.

    Raises VerifierInvalid for a template that cannot render one question.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._stops = frozenset(stop_ids)
        self._encoder = Encoder(tokenizer, ())
        self._switches = self._find_switches()
        prompt = self._prove_encoding()
        special = special_ids(tokenizer)
        # Published role markers are not always marked as special, but they are never spelt out.
        self._marks = frozenset(prompt) & (special | set(tokenizer.added_tokens_decoder))
        self._encoder = Encoder(tokenizer, self._stops | self._marks)
        template = tokenizer.chat_template
        self._growing = growing(template) if isinstance(template, str) else None
        self._control = _literals(tokenizer, special | self._marks)
        self._control_in_answer = _literals(tokenizer, self._marks & special | self._stops)
        self._tool_style = find_tool_style(
            lambda messages: self._render_as_is(messages, None, prompt=False)
        )

    def prompt_ids(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """Ids of a history with the generation prompt, as a server sends them to the verifier.

        Raises Rejected where the template refuses these messages.
        """
        return self._ids(self._render(messages, tools, prompt=True))

    def script(self, messages: Sequence[Message], tools: Tools) -> Script:
        """A conversation that ends with an answer, rendered and checked. Raises Rejected."""
        return Script(messages=messages, tools=tools, text=self.check_texts(messages, tools))

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
        at_once = self._turns_at_once(script, answers)
        for number, place in enumerate(answers):
            if at_once is not None:
                texts = at_once[number]
            else:
                texts = self._turn_texts(script.messages[: place + 1], script.tools)
            yield self._turn_ids(*texts, script.messages[place])

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
        starts = (
            self._render(messages[:-1], tools, prompt=True, **switch) for switch in self._switches
        )
        return list(starts), self._render(messages, tools, prompt=False)

    def _turns_at_once(
        self, script: Script, answers: Sequence[int]
    ) -> list[tuple[list[str], str]] | None:
        """The same of every answer, where the template gives them by one render."""
        template = self._growing
        if template is None or len(answers) < 2:
            return None
        spelt = [self._for_template(message) for message in script.messages]
        found = []
        for switch in self._switches:

            def render(template: Any, switch: dict[str, Any] = switch) -> str:
                return self._render_as_is(
                    spelt, script.tools, prompt=False, chat_template=template, **switch
                )

            try:
                texts = turn_texts(render, template, answers)
            except Rejected:
                # What follows the loop may refuse a message that no history ends with.
                return None
            if texts is None:
                return None
            found.append(texts)
        wholes = [whole for _, whole in found[self._switches.index({})]]
        # The proof of it on this very conversation.
        if wholes[-1] != script.text:
            return None
        prompts = zip(*([prompt for prompt, _ in texts] for texts in found), strict=True)
        return [(list(starts), whole) for starts, whole in zip(prompts, wholes, strict=True)]

    def check_texts(self, messages: Sequence[Message], tools: Tools) -> str:
        """No message may forge a turn, and none may vanish. Returns the render; raises Rejected.

        A special token that is spelt out in a text would become the token itself. In an answer
        only those count that mark turns or end them: others may be the verifier's own speech.
        """
        if tools and self._control.search(_as_json(tools)):
            raise Rejected("control_token", "in the tools")
        for message in messages:
            pattern = self._control_in_answer if _is_answer(message) else self._control
            if found := pattern.search(_as_json(message)):
                raise Rejected("control_token", f"{found[0]} in a {message['role']} message")
        text = self._render(messages, tools, prompt=False)
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
        return text

    def _answer(self, tail: list[int]) -> list[int]:
        end = next((i for i, token in enumerate(tail) if token in self._stops), None)
        if end is None:
            raise Rejected("no_stop_token", "the template does not end the answer")
        if end == 0:
            raise Rejected("empty_answer", "the template renders nothing for it")
        if tail[0] in self._marks:
            raise Rejected("role_marker_supervised", "the template has no generation prompt")
        return tail[: end + 1]

    def _ids(self, text: str) -> list[int]:
        return self._encoder.ids(text)

    def _render(
        self,
        messages: Sequence[Message],
        tools: Tools,
        *,
        prompt: bool,
        **switch: Any,
    ) -> str:
        spelt = [self._for_template(message) for message in messages]
        return self._render_as_is(spelt, tools, prompt=prompt, **switch)

    def _render_as_is(
        self,
        messages: Sequence[Message],
        tools: Tools,
        *,
        prompt: bool,
        **switch: Any,
    ) -> str:
        text = self._apply(messages, tools, prompt=prompt, tokenize=False, **switch)
        assert isinstance(text, str)
        return text

    def _apply(
        self,
        messages: Sequence[Message],
        tools: Tools,
        *,
        prompt: bool,
        tokenize: bool,
        **switch: Any,
    ) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=prompt,
                tokenize=tokenize,
                return_dict=False,
                **switch,
            )
        except _REFUSALS as error:
            raise Rejected("template_refused", f"{type(error).__name__}: {error}") from error

    def _for_template(self, message: Message) -> Message:
        if "tool_calls" not in message:
            return message
        if self._tool_style is None:
            raise Rejected("tool_calls_unsupported", "the template does not render them")
        return self._tool_style.spell(message)

    def _find_switches(self) -> list[dict[str, Any]]:
        """The switches that change the generation prompt, those of the longest prompt first."""
        prompts: dict[str, dict[str, Any]] = {}
        for switch in _SWITCHES:
            try:
                text = self._render([_PROBE_USER], None, prompt=True, **switch)
            except Rejected as error:
                if switch:
                    continue
                raise VerifierInvalid(
                    "chat template",
                    wanted="one that renders a question",
                    found=error.detail,
                    remedy="bring the template that was published with the model",
                ) from error
            prompts.setdefault(text, switch)
        return [prompts[text] for text in sorted(prompts, key=len, reverse=True)]

    def _prove_encoding(self) -> list[int]:
        """The ids of a prompt, the same whether its text is encoded or the tokenizer is asked."""
        ids = self._ids(self._render([_PROBE_USER], None, prompt=True))
        asked = self._apply([_PROBE_USER], None, prompt=True, tokenize=True)
        if ids != asked:
            raise VerifierInvalid(
                "chat template",
                wanted=f"the ids of its text, {ids}",
                found=f"{asked} from apply_chat_template",
                remedy="use a tokenizer whose template is text, as servers expect it",
            )
        return ids


class RowBuilder:
    """Turns of one conversation as token rows.

    Turns share a row as long as the next prompt begins with exactly the ids so far; a new row
    starts where it does not, as when a template drops earlier reasoning. So every row is what
    the verifier would have seen.

    Args: max_tokens: longest row; None is no limit.
    """

    def __init__(self, max_tokens: int | None = None) -> None:
        self._max_tokens = max_tokens
        self._rows: list[tuple[list[int], list[int]]] = []

    def add_turn(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> bool:
        """Add a prompt (the whole history) and its answer; only the answer is supervised.

        Returns False, and changes nothing, where the row would become too long.
        """
        total = len(prompt_ids) + len(answer_ids)
        if self._max_tokens is not None and total > self._max_tokens:
            return False
        ids, mask = self._rows[-1] if self._rows else ([], [])
        if not self._rows or list(prompt_ids[: len(ids)]) != ids:
            ids, mask = [], []
            self._rows.append((ids, mask))
        mask.extend([0] * (len(prompt_ids) - len(ids)) + [1] * len(answer_ids))
        ids.extend([*prompt_ids[len(ids) :], *answer_ids])
        return True

    def rows(self) -> list[tuple[list[int], list[int]]]:
        """(input_ids, loss_mask) of each row, in the order of the turns."""
        return self._rows


def _check_said(message: Message, text: str, start: int) -> None:
    """An answer's own render holds its reasoning and what it says. Raises Rejected."""
    thought, _, rest = message["content"].rpartition("</think>")
    thought = thought.rpartition("<think>")[2] or message.get(REASONING, "")
    for kind, part in (("reasoning", thought), ("answer", rest)):
        if text.find(part.strip(), start) < 0:
            raise Rejected(f"template_drops_{kind}", part[:80])


def _is_answer(message: Message) -> bool:
    return bool(message["role"] == "assistant")


def _as_json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _literals(tokenizer: PreTrainedTokenizerBase, ids: frozenset[int]) -> re.Pattern[str]:
    """A pattern that finds any of these tokens spelt out; one that finds nothing for none."""
    tokens = sorted(tokenizer.convert_ids_to_tokens(sorted(ids)), key=lambda token: -len(token))
    return re.compile("|".join(re.escape(token) for token in tokens) or r"(?!)")
