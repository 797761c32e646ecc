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


def growing(template: str) -> nodes.Template | None:
    """The template that renders all turns at once, or None where that is not proven to be right.

    `turn_parts` makes it render.
    """
    try:
        tree = _parse(template)
    except TemplateSyntaxError:
        # A tag that only the tokenizer's own environment knows.
        return None
    at = _loop(tree.body)
    if at is None or not _is_local(tree, at):
        return None
    if _asked(tree.body[at]) == {"first"}:
        # To ask a loop costs a sandbox more than all else: the first message has a loop of its own.
        loops = [_marked(template, at, first=True), _marked(template, at, first=False)]
    else:
        loops = [_marked(template, at)]
    tree.body[at:] = loops
    return tree


def turn_parts(
    render: Callable[[nodes.Template], str], template: nodes.Template, num_messages: int
) -> list[tuple[str, str, str]] | None:
    """Of each message: its text, and what follows it without and with a generation prompt.

    A history's render is the texts of its messages and what follows the last of them.

    Args: render: renders a conversation of so many messages by a template.

    None where a text of the conversation looks like our marks.
    """
    parts = render(template).split(_MARK)
    if len(parts) != 3 * num_messages + 1:
        return None
    return list(zip(parts[:-1:3], parts[1::3], parts[2::3], strict=True))


def _marked(template: str, at: int, *, first: bool | None = None) -> nodes.For:
    """The loop with what follows it inside, twice; `first` settles which messages it is for."""
    tree, without, prompted = (_parse(template) for _ in range(3))
    loop = tree.body[at]
    assert isinstance(loop, nodes.For), "_loop finds one"
    if first is not None:
        for node in loop.body:
            _settle_first(node, first)
        ends = (None, nodes.Const(1)) if first else (nodes.Const(1), None)
        messages = nodes.Name(_MESSAGES, "load")
        loop.iter = nodes.Getitem(messages, nodes.Slice(*ends, None), "load")
        assert tree.environment is not None, "the parser gives it its own"
        loop.set_environment(tree.environment)
        loop.set_lineno(1)
    for tail, prompt in ((without.body[at + 1 :], False), (prompted.body[at + 1 :], True)):
        loop.body.append(_mark(tree))
        loop.body.extend(_with_prompt(node, prompt) for node in tail)
    loop.body.append(_mark(tree))
    return loop


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
        and _asked(loop) <= _BACKWARD
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


def _asked(loop: nodes.Node) -> set[str]:
    """What the loop's body asks the loop for; an empty word where it hands the loop on."""
    assert isinstance(loop, nodes.For), "_loop finds one"
    own = [one for part in loop.body for one in _of_this_loop(part)]
    asked = [one.attr for one in own if isinstance(one, nodes.Getattr) and _is_loop(one.node)]
    return {*asked, *([""] if sum(map(_is_loop, own)) != len(asked) else [])}


def _of_this_loop(node: nodes.Node) -> Iterator[nodes.Node]:
    """A part of a loop and all below, but for the bodies of loops in it.

    There alone `loop` is another one: what such a loop goes over, its condition and its `else` are
    still asking this one.
    """
    yield node
    below = node.iter_child_nodes(exclude=("body",) if isinstance(node, nodes.For) else None)
    for child in below:
        yield from _of_this_loop(child)


def _is_loop(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == "loop"


def _settle_first(node: nodes.Node, first: bool) -> None:
    """Whether it is the first message is known in a loop that holds no other, or all others."""
    own = {id(one) for one in _of_this_loop(node)}
    for child, field, holder in _places(node):
        if isinstance(child, nodes.Getattr) and id(child) in own and _is_loop(child.node):
            _replace(child, field, holder, first)


def _with_prompt(node: nodes.Node, prompt: bool) -> nodes.Node:
    """A part after the loop in which it is settled whether a generation prompt is wanted."""
    for name, field, holder in _places(node):
        if isinstance(name, nodes.Name) and name.name == _PROMPT:
            _replace(name, field, holder, prompt)
    return node


def _replace(node: nodes.Node, field: str | int, holder: Any, value: bool) -> None:
    settled = nodes.Const(value, lineno=node.lineno, environment=node.environment)
    if isinstance(field, str):
        setattr(holder, field, settled)
    else:
        holder[field] = settled


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
