"""What `eagle3 show` prints: masks that can be read, and nothing that a terminal would obey."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eagle3.conversations import bracketed, stretches, visible
from eagle3.errors import ConfigError, ManifestInvalid, UpstreamMissing
from jobs import show
from jobs.cli import main
from tests import chat_tokenizers as chats
from tests.test_prepare import chat, run_prepare, write_config, write_jsonl
from tests.tiny_verifiers import make_llama

EVIL = "look \x1b[31mred\x1b]0;title\x07 \u202egnp.exe"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared run of eight conversations, one of them hostile, and three rejected rows."""
    folder = tmp_path_factory.mktemp("show")
    verifier = make_llama(folder / "verifier", num_layers=4)
    evil = {
        "messages": [{"role": "user", "content": EVIL}, {"role": "assistant", "content": "No."}]
    }
    bad = [{"messages": [{"role": "bot\x1b[2J", "content": "x"}]}, "{\x1b[2J", {"text": "x"}]
    data = write_jsonl(folder / "chats.jsonl", [evil, *[chat(i) for i in range(7)], *bad])
    config = write_config(folder, verifier, data, heldout_share=0.0, max_rejected_share=0.5)
    assert run_prepare(config, folder / "run") == 0
    return folder / "run"


def shown(url: Path | str, *, terminal: bool = False, **arguments: Any) -> str:
    out = io.StringIO()
    console = Console(
        file=out, force_terminal=terminal, color_system="standard" if terminal else None
    )
    assert show.run(str(url), console, **{"rows": 3, **arguments}) == 0
    return out.getvalue()


def test_supervised_tokens_stand_in_brackets_where_there_is_no_terminal(run: Path) -> None:
    text = shown(run / "prepare", row="000000002.0")
    assert "row 000000002.0:" in text
    assert "[[Answer 0 of chat 1.<|im_end|>]]" in text
    assert "<|im_start|>user\nQuestion 1 of chat 1?<|im_end|>" in text
    assert text.count("[[") == text.count("]]") == 2
    assert "\x1b" not in text


def test_on_a_terminal_they_are_coloured(run: Path) -> None:
    text = shown(run / "prepare", row="000000002.0", terminal=True)
    assert "\x1b[1;32mAnswer 0 of chat 1." in text
    assert "[[" not in text


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_text_holds_never_reaches_the_terminal_raw(run: Path, terminal: bool) -> None:
    text = shown(run / "prepare", rows=1, terminal=terminal)
    assert "look \\x1b[31mred\\x1b]0;title\\x07 \\u202egnp.exe" in text
    assert not set(text) & {"\x07", "\u202e"}
    told = shown(run / "prepare", rejected=True, terminal=terminal)
    assert "\x1b[2J" not in text + told


def test_rejected_rows_are_shown_with_reason_file_and_line(run: Path) -> None:
    text = shown(run / "prepare", rejected=True)
    assert "11 in, 8 kept, 3 rejected" in text
    assert "unknown_role:bot\\x1b[2J" in text
    assert "chats.jsonl:9" in text
    assert "not_json" in text
    assert "chats.jsonl:10" in text
    assert "unknown_form (its keys are text)" in text
    assert '{"text": "x"}' in text


def test_the_number_of_rows_is_that_asked_for(run: Path) -> None:
    assert shown(run / "prepare", rows=2).count("\nrow ") == 2
    assert shown(run / "prepare", rows=50).count("\nrow ") == 8


def test_what_cannot_be_shown_is_refused_with_what_can(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--row: wanted the name of a row"):
        shown(run / "prepare", row="000000099.0")
    with pytest.raises(ConfigError, match="an artefact with token rows"):
        shown(run / "verifier")
    with pytest.raises(UpstreamMissing, match=r"RUN/prepare"):
        shown(tmp_path)


def test_a_changed_shard_is_refused(run: Path, tmp_path: Path) -> None:
    for kind in ("prepare", "verifier"):
        (tmp_path / kind).mkdir()
        for path in (run / kind).iterdir():
            (tmp_path / kind / path.name).write_bytes(path.read_bytes())
    shard = tmp_path / "prepare/rows-000000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x01")
    with pytest.raises(ManifestInvalid, match="other bytes"):
        shown(tmp_path / "prepare")


def test_the_command_reaches_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", f"{run}/prepare", "--rows", "1"]) == 0
    assert "[[No.<|im_end|>]]" in capsys.readouterr().out
    assert main(["show", f"{run}"]) == 66
    assert "name the artefact's own folder" in capsys.readouterr().err


def test_stretches_hold_every_token_of_a_tokenizer_without_offsets() -> None:
    tokenizer = chats.slow_tokenizer()
    ids = tokenizer.encode("a é<|im_end|>\nb", add_special_tokens=False)
    mask = [0] * len(ids)
    # Between the two bytes of one letter.
    at = ids.index("é".encode()[1])
    mask[at:-2] = [1] * (len(ids) - 2 - at)
    parts = stretches(tokenizer, ids, mask)
    assert [part.special for part in parts].count(True) == 1
    assert bracketed(parts).endswith("<|im_end|>]]\nb")


def test_visible_leaves_lines_and_letters_and_spells_out_the_rest() -> None:
    assert visible("é 日\n\t") == "é 日\n\t"
    assert visible("\r\x00\ud800\u200b") == "\\r\\x00\\ud800\\u200b"
    assert json.loads(json.dumps(visible("\x9b"))) == "\\x9b"
