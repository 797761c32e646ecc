"""All turns of a conversation by one render, for templates that provably only ever add.

Each turn is asked twice: with its answer, and without it but with the generation prompt. Rendering
every history from its start costs the square of the number of turns. Where a template goes over
the messages once, forwards, and nothing in that loop can know what follows, a history's render is
the text up to the end of its last message and what comes after the loop. So the part after the
loop is put into it, after every message, once as without and once as with a generation prompt,
and one render holds every turn. That is decided from the template's syntax tree. A template that
looks ahead, as those do that drop earlier reasoning, is rendered turn by turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, nodes

_MARK = "\x00turn\x00"
_MESSAGES, _PROMPT = "messages", "add_generation_prompt"
# What a loop knows of the messages so far.
_BACKWARD = frozenset({"first", "index", "index0", "previtem"})
# They remember how often they were asked, or see more than their arguments.
_STATEFUL = frozenset({"cycler", "joiner", "lipsum", "self", "caller", "varargs", "kwargs"})
_REFUSED = (
    nodes.Include,
    nodes.Import,
    nodes.FromImport,
    nodes.Extends,
    nodes.Block,
    nodes.CallBlock,
    nodes.Break,
    nodes.Continue,
    nodes.ContextReference,
    nodes.DerivedContextReference,
)

Render = Callable[[Any], str]


def growing(template: str) -> nodes.Template | None:
    """The template that renders all turns at once, or None where that is not proven to be right.

    `turn_texts` makes it render. Where it was proven, it is what a call of the loop's end after
    each message would give.
    """
    try:
        parsed = [_parse(template) for _ in range(3)]
    except TemplateSyntaxError:
        # A tag that only the tokenizer's own environment knows.
        return None
    tree, without, prompted = parsed
    at = _loop(tree.body)
    if at is None or not _is_local(tree, at):
        return None
    loop = tree.body[at]
    assert isinstance(loop, nodes.For), "_loop finds one"
    for tail, prompt in ((without.body[at + 1 :], False), (prompted.body[at + 1 :], True)):
        loop.body.append(_mark(tree))
        loop.body.extend(_with_prompt(node, prompt) for node in tail)
    loop.body.append(_mark(tree))
    del tree.body[at + 1 :]
    return tree


def turn_texts(
    render: Render, template: nodes.Template, answers: Sequence[int]
) -> list[tuple[str, str]] | None:
    """(prompt, whole) of each answer, as rendering each history by itself would give.

    Args:
        render: renders a conversation to its last answer by a template.
        answers: places of the answers among its messages.

    None where a text of the conversation looks like our marks.
    """
    parts = render(template).split(_MARK)
    if len(parts) != 3 * (answers[-1] + 1) + 1:
        return None
    said: list[str] = []
    texts = []
    wanted = frozenset(answers)
    prompt = ""
    for place in range(answers[-1] + 1):
        text, without, prompted = parts[3 * place : 3 * place + 3]
        if place in wanted:
            texts.append((prompt, "".join([*said, text, without])))
        said.append(text)
        prompt = "".join([*said, prompted]) if place + 1 in wanted else ""
    return texts


def _parse(template: str) -> nodes.Template:
    # As tokenizers set it up: the two settings decide about white space.
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    return environment.parse(template)


def _loop(body: Sequence[nodes.Node]) -> int | None:
    """Where the one plain loop over all messages is."""
    places = [
        at
        for at, node in enumerate(body)
        if isinstance(node, nodes.For)
        and isinstance(node.iter, nodes.Name)
        and node.iter.name == _MESSAGES
        and isinstance(node.target, nodes.Name)
        and not (node.test or node.else_ or node.recursive)
    ]
    return places[0] if len(places) == 1 else None


def _is_local(tree: nodes.Template, at: int) -> bool:
    """Whether the loop's text after each message, and what follows it, come of the past alone."""
    loop = tree.body[at]
    assert isinstance(loop, nodes.For), "_loop finds one"
    tail = tree.body[at + 1 :]
    if any(isinstance(node, _REFUSED) for node in _inside([tree])):
        return False
    names = {name.name for name in _names([tree])}
    stored = {name.name for name in _names([loop]) if name.ctx != "load"}
    prompted = {name.name for name in _names([*tree.body[:at], loop])}
    assigned = [node for node in _inside(tail) if isinstance(node, _ASSIGNING)]
    read_after = {name.name for name in _names(tail)}
    return (
        not names & _STATEFUL
        and _PROMPT not in prompted
        and not assigned
        and not read_after & (stored | {"loop"})
        and _sees_first_only(tree, loop)
        and all(_looks_back(node) for node in loop.body)
    )


_ASSIGNING = (nodes.Assign, nodes.AssignBlock, nodes.Macro, nodes.NSRef, nodes.For)


def _sees_first_only(tree: nodes.Template, loop: nodes.For) -> bool:
    """Whether all the template has of the messages beside the loop is the first one."""
    firsts = [
        node.node
        for node in _inside([tree])
        if isinstance(node, nodes.Getitem)
        and isinstance(node.arg, nodes.Const)
        and node.arg.value == 0
    ]
    allowed = {id(node) for node in [loop.iter, *firsts]}
    return all(id(name) in allowed for name in _names([tree]) if name.name == _MESSAGES)


def _looks_back(node: nodes.Node, *, nested: bool = False) -> bool:
    """Whether a part of the loop asks it for nothing that is to come."""
    if isinstance(node, nodes.For):
        inner = [*node.body, *node.else_, *([node.test] if node.test else [])]
        return _looks_back(node.iter, nested=nested) and all(
            _looks_back(part, nested=True) for part in inner
        )
    if isinstance(node, nodes.Name) and node.name == "loop" and not nested:
        return False
    if _is_loop(node) and not nested:
        asked = node.attr if isinstance(node, nodes.Getattr) else None
        return asked in _BACKWARD
    return all(_looks_back(child, nested=nested) for child in node.iter_child_nodes())


def _is_loop(node: nodes.Node) -> bool:
    return (
        isinstance(node, nodes.Getattr)
        and isinstance(node.node, nodes.Name)
        and node.node.name == "loop"
    )


def _with_prompt(node: nodes.Node, prompt: bool) -> nodes.Node:
    """A part after the loop in which it is settled whether a generation prompt is wanted."""
    for name, field, holder in _places(node):
        if isinstance(name, nodes.Name) and name.name == _PROMPT:
            settled = nodes.Const(prompt, lineno=name.lineno, environment=name.environment)
            if isinstance(field, str):
                setattr(holder, field, settled)
            else:
                holder[field] = settled
    return node


def _places(node: nodes.Node) -> Iterator[tuple[Any, str | int, Any]]:
    """Every node below, with where it can be replaced."""
    for field in node.fields:
        value = getattr(node, field)
        if isinstance(value, list):
            for at, child in enumerate(value):
                if isinstance(child, nodes.Node):
                    yield child, at, value
                    yield from _places(child)
        elif isinstance(value, nodes.Node):
            yield value, field, node
            yield from _places(value)


def _inside(parts: Sequence[nodes.Node]) -> Iterator[nodes.Node]:
    for part in parts:
        yield part
        yield from _inside(list(part.iter_child_nodes()))


def _names(parts: Sequence[nodes.Node]) -> list[nodes.Name]:
    return [node for node in _inside(parts) if isinstance(node, nodes.Name)]


def _mark(tree: nodes.Template) -> nodes.Output:
    environment = tree.environment
    text = nodes.TemplateData(_MARK, lineno=1, environment=environment)
    return nodes.Output([text], lineno=1, environment=environment)
