"""The demonstration's verifier and conversations: whole, usable, and the same every time."""

import json
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from eagle3.config import VerifierConfig
from eagle3.demo_inputs import (
    CONVERSATIONS_NAME,
    VERIFIER_NAME,
    conversations,
    turns_of,
    write_conversations,
    write_inputs,
    write_verifier,
)
from eagle3.errors import EnvironmentMisconfigured
from eagle3.store import sha256_of_file
from eagle3.verifier import open_verifier
from jobs import demo_inputs

ASKS = "what did you do on your holidays?"


def kept(*turns: str) -> list[str]:
    """What is left of one chat."""
    found = list(conversations([("chat", list(turns))]))
    return [message["content"] for message in found[0]["messages"]] if found else []


class TestConversations:
    def test_the_first_writer_is_the_user_and_lines_of_a_turn_are_joined(self) -> None:
        chat = {
            "messages": [
                [{"text": "Hi  there,"}, {"text": "how are you\ndoing?"}],
                [{"text": "fine"}],
            ]
        }
        (row,) = conversations([("one", turns_of(chat))])
        assert row == {
            "id": "one",
            "messages": [
                {"role": "user", "content": "Hi there, how are you doing?"},
                {"role": "assistant", "content": "fine"},
            ],
        }

    def test_greetings_that_wait_for_an_answer_are_left_out(self) -> None:
        assert kept("Hello?", "hey", ASKS, "nothing") == [ASKS, "nothing"]

    def test_whoever_says_something_first_becomes_the_user(self) -> None:
        assert kept("Hello?", ASKS, "nothing") == [ASKS, "nothing"]

    def test_a_first_prompt_too_long_for_a_demonstration_is_passed_over(self) -> None:
        assert kept(f"{ASKS} I was away. " * 20, "ok", ASKS, "nothing") == [ASKS, "nothing"]

    def test_nobody_answered(self) -> None:
        assert kept(ASKS) == []
        assert kept("hi", "hello") == []

    def test_an_unanswered_end_is_left_out(self) -> None:
        assert kept(ASKS, "nothing", "really?") == [ASKS, "nothing"]

    @pytest.mark.parametrize(
        "noise", ["a a a a a a a a", "ok f F f f f f", "yesssssssssssssss", "??????????????", ""]
    )
    def test_a_chat_ends_before_noise(self, noise: str) -> None:
        assert kept(ASKS, "nothing", noise, "stop that", ASKS, "no") == [ASKS, "nothing"]

    @pytest.mark.parametrize("said", ["no no no no, stop", "so soooo good", "2 2 2 2 and 4"])
    def test_what_people_say_is_not_noise(self, said: str) -> None:
        assert kept(ASKS, said) == [ASKS, said]

    def test_of_chats_with_the_same_opening_the_first_is_kept(self) -> None:
        chats = [
            ("one", [ASKS, "nothing"]),
            ("two", [ASKS.upper().replace("?", " !"), "a lot"]),
        ]
        assert [row["id"] for row in conversations(chats)] == ["one"]

    @settings(deadline=None, max_examples=60)
    @given(st.lists(st.lists(st.text(alphabet="ab ?\n", max_size=60), max_size=8), max_size=6))
    def test_whatever_comes_in_turns_alternate_and_end_with_an_answer(
        self, chats: list[list[str]]
    ) -> None:
        named = [
            (str(i), [" ".join(turn.split()) for turn in turns]) for i, turns in enumerate(chats)
        ]
        rows = list(conversations(named))
        for row in rows:
            roles = [message["role"] for message in row["messages"]]
            assert roles == ["user", "assistant"] * (len(roles) // 2)
            assert all(message["content"] for message in row["messages"])
        openings = [re.findall(r"\w+", row["messages"][0]["content"]) for row in rows]
        assert len(openings) == len({tuple(opening) for opening in openings})

    def test_the_packages_chats_are_the_same_bytes_every_time(self, tmp_path: Path) -> None:
        path = tmp_path / CONVERSATIONS_NAME
        write_conversations(path)
        rows = [json.loads(line) for line in path.read_bytes().splitlines()]
        assert len(rows) == 3559
        assert sum(len(row["messages"]) // 2 for row in rows) > 30_000
        assert sha256_of_file(path) == (
            "d07d057effd70ea434bacbe6fa45ebbab5c7d048053e24fc3b4f5b3e16f6c291"
        )


class TestWriting:
    def test_what_is_there_is_left_alone(self, tmp_path: Path, capsys) -> None:
        (tmp_path / VERIFIER_NAME).mkdir()
        (tmp_path / CONVERSATIONS_NAME).write_text("mine\n")
        assert demo_inputs.main(["--out", str(tmp_path)]) == 0
        assert (tmp_path / CONVERSATIONS_NAME).read_text() == "mine\n"
        assert "all there already" in capsys.readouterr().out

    def test_a_failure_leaves_nothing_behind(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr("eagle3.demo_inputs._GGUF_NAME", "no-such-file.gguf")
        with pytest.raises(EnvironmentMisconfigured):
            write_inputs(tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_a_missing_package_is_one_sentence(self, tmp_path: Path, monkeypatch, capsys) -> None:
        (tmp_path / VERIFIER_NAME).mkdir()
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        assert demo_inputs.main(["--out", str(tmp_path)]) == 78
        told = capsys.readouterr().err
        assert "chitchat_dataset: wanted its file dataset.json, found no such package" in told
        assert "make setup" in told
        assert told.count("\n") == 1


@pytest.mark.engine
def test_the_verifier_is_whole_and_normal(tmp_path: Path) -> None:
    folder = tmp_path / VERIFIER_NAME
    write_verifier(folder)
    config = json.loads((folder / "config.json").read_text())
    assert config["model_type"] == "llama"
    assert "quantization_config" not in config
    assert (config["rms_norm_eps"], config["dtype"]) == (1e-5, "bfloat16")

    verifier = open_verifier(VerifierConfig(source=str(folder)))
    three = verifier.three_tensors()
    assert three.lm_head.shape == (49_152, 576)
    assert three.lm_head.dtype == torch.bfloat16
    assert verifier.stop_ids == (2,)
    assert verifier.required_ids == tuple(range(17))

    # It answers as a trained model does, and ends its answer.
    tokenizer = verifier.load_tokenizer()
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=False,
        return_tensors="pt",
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answer = model.generate(prompt, max_new_tokens=24, do_sample=False)[0, prompt.shape[1] :]
    assert "The capital of France is Paris." in tokenizer.decode(answer)
    assert answer[-1] == 2
