"""YAML as a person means it: a key given twice is an error, and 1e-4 is a number.

PyYAML follows YAML 1.1, which takes the last of two equal keys without a word, reads `1e-4`
(no dot) as text and a key `on` as true. What it cannot make a value of (the 31st of February)
leaves it as any exception; here it is a YAML error with its line.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

_WORDS = {
    "array": "a list",
    "object": "a mapping",
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "null": "nothing",
}


_KINDS = {dict: "a mapping", list: "a list", type(None): "nothing"}
_TAGS = {"null", "bool", "int", "float", "str", "timestamp", "seq", "map"}
_TEXT, _MERGE = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:  # noqa: ARG002
        try:
            # Depth first, so that what holds itself by an alias is found and refused.
            return super().construct_object(node, deep=True)
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            kind = node.tag.rpartition(":")[2]
            raise _error(f"what cannot be read as {kind} ({error})", node) from error

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise _error("half of a surrogate pair, which is no character", node) from error
        return value

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if key.tag not in (_TEXT, _MERGE):
                shown = repr(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                raise _error(f"the key {shown}, which is no text without quotes", key)
            if key.value in seen:
                raise _error(f"the key {key.value!r} a second time", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _error(problem: str, node: yaml.Node) -> yaml.constructor.ConstructorError:
    return yaml.constructor.ConstructorError(problem=problem, problem_mark=node.start_mark)


# Sets, ordered mappings, pairs and bytes are in no configuration.
_Loader.yaml_constructors = {
    tag: made
    for tag, made in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.rpartition(":")[2] in _TAGS
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def loads(text: str) -> object:
    """The plain values of one YAML document. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, Loader=_Loader)
    except RecursionError as error:
        raise yaml.YAMLError("lists or mappings nested too deep") from error


def kind(value: object) -> str:
    """What a value is, in the words of YAML."""
    return _KINDS.get(type(value), "a single value")


def problem(error: Exception) -> str:
    """What is wrong, and in which line, without the excerpt that PyYAML adds."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        told = (error.problem or "").removeprefix("but ").removeprefix("found ")
        return f"{told} in line {error.problem_mark.line + 1}"
    return " ".join(str(error).split())


def in_words(message: str) -> str:
    """What msgspec says of a value, in the words of YAML."""
    for name, word in _WORDS.items():
        message = message.replace(f"`{name}`", word)
    return message[:1].lower() + message[1:]
