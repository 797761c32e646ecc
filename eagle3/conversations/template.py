"""Messages to text: a verifier's chat template, and what has been found out about it.

A text has to come of the messages and the settings alone, whenever and wherever it is rendered: a
run that is continued, its other workers and its later stages render the same again. A server
tells a template today's date; here the date is a setting, so that all of a run has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date
from typing import Any

from jinja2 import Environment, TemplateError
from transformers import PreTrainedTokenizerBase

from eagle3.conversations.messages import Message, Rejected
from eagle3.conversations.tool_calls import find_tool_style
from eagle3.errors import ConfigError, VerifierInvalid

PROBE: Message = {"role": "user", "content": "probe question"}
Tools = list[dict[str, Any]] | None

# What a template's own code raises on messages that it was not written for.
_REFUSALS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    # A recursion without end, and what a tokenizer's own class has left out.
    RuntimeError,
)
# How templates are told to prompt without reasoning. Most know none of these.
_SWITCHES: tuple[dict[str, Any], ...] = ({}, {"enable_thinking": False}, {"thinking": False})
# The only clock that a template has, and what gives it another text each time.
_CLOCK = "strftime_now"
_CHANCE = frozenset({"lipsum", "| random"})


class ChatTemplate:
    """A tokenizer's chat template.

    Args:
        tokenizer: one that has been proven (`Verifier.load_tokenizer`).
        today: what a template that asks for the date is told.

    Attributes:
        source: the template, where it is a single one and nothing but itself decides the text.
        switches: what changes the generation prompt, that of the longest prompt first.

    Raises VerifierInvalid for a template that cannot render one question or draws lots,
    ConfigError where it asks for a date and none is given.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, today: date | None) -> None:
        self._tokenizer = tokenizer
        found = tokenizer.chat_template
        sources = found.values() if isinstance(found, dict) else [found]
        self._fixed = _settled({word for source in sources for word in _words(source)}, today)
        # A class with a method of its own may look at all messages before its template does.
        plain = type(tokenizer).apply_chat_template is PreTrainedTokenizerBase.apply_chat_template
        self.source = found if plain and isinstance(found, str) else None
        self._tool_style = None
        self.switches = self._find_switches()
        self._tool_style = find_tool_style(
            lambda messages: self.text_of(messages, None, prompt=False)
        )

    def text(self, messages: Sequence[Message], tools: Tools, *, prompt: bool, **more: Any) -> str:
        """The text of messages, their tool calls spelt as the template wants them.

        Args:
            prompt: whether the generation prompt follows.
            more: a switch, or another `chat_template`.

        Raises Rejected where the template refuses them.
        """
        return self.text_of(self.spelt(messages), tools, prompt=prompt, **more)

    def text_of(
        self, messages: Sequence[Message], tools: Tools, *, prompt: bool, **more: Any
    ) -> str:
        """The same of messages as they are."""
        text = self._apply(messages, tools, prompt=prompt, tokenize=False, **more)
        assert isinstance(text, str)
        return text

    def probe_ids(self) -> Any:
        """What the tokenizer itself gives for a question's prompt. Raises VerifierInvalid."""
        try:
            return self._apply([PROBE], None, prompt=True, tokenize=True)
        except Rejected as error:
            raise VerifierInvalid(
                "tokenizer",
                wanted="one that encodes a question's prompt",
                found=error.detail,
                remedy="bring every tokenizer file that was published with the model",
            ) from error

    def spelt(self, messages: Sequence[Message]) -> list[Message]:
        """The messages with tool calls as the template wants them. Raises Rejected."""
        return [self._spelt(message) for message in messages]

    def _spelt(self, message: Message) -> Message:
        if "tool_calls" not in message:
            return message
        if self._tool_style is None:
            raise Rejected("tool_calls_unsupported", "the template does not render them")
        return self._tool_style.spell(message)

    def _apply(
        self,
        messages: Sequence[Message],
        tools: Tools,
        *,
        prompt: bool,
        tokenize: bool,
        **more: Any,
    ) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                add_generation_prompt=prompt,
                tokenize=tokenize,
                return_dict=False,
                **self._fixed,
                **more,
            )
        except _REFUSALS as error:
            raise Rejected("template_refused", f"{type(error).__name__}: {error}") from error

    def _find_switches(self) -> list[dict[str, Any]]:
        prompts: dict[str, dict[str, Any]] = {}
        for switch in _SWITCHES:
            try:
                text = self.text([PROBE], None, prompt=True, **switch)
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


def _settled(words: set[str], today: date | None) -> dict[str, Any]:
    """What a template is told beside the messages, so that its text is always the same."""
    if chance := words & _CHANCE:
        raise VerifierInvalid(
            "chat template",
            wanted="one that gives the same text each time",
            found=f"{min(chance)} in it",
            remedy="bring the template that was published with the model",
        )
    if _CLOCK not in words:
        return {}
    if today is None:
        raise ConfigError(
            "prepare.template_date",
            wanted="a date, since the verifier's chat template asks for today's",
            found="none",
            remedy="write one, such as the day when serving begins: all of the run has it then",
        )
    # A variable of a render goes before the environment's own function of that name.
    return {_CLOCK: today.strftime}


def _words(source: Any) -> Iterator[str]:
    """The names that a template reads, and its filters as `| name`."""
    try:
        tokens = [
            (kind, word)
            for _, kind, word in Environment().lex(str(source))
            if kind not in ("whitespace", "data", "string")
        ]
    except TemplateError:
        # Rendering it says what is wrong.
        return
    before = ("", "")
    for kind, word in tokens:
        if kind == "name" and before != ("operator", "."):
            yield f"| {word}" if before in (("operator", "|"), ("name", "filter")) else word
        before = kind, word
