"""Text in pieces: the ids of the whole, for tokenizers that cut a text by its length as well."""

import re
from typing import Any

import pytest

from eagle3.config import PrepareConfig
from eagle3.conversations import Converter, FormOfFile, Kept, RawRow, Rejected, Renderer
from eagle3.conversations.encoding import Encoder
from tests import chat_tokenizers as chats

EVERY, RUN = 400_000, 25_000


class Cutting(chats.ByteTokenizer):
    """Cuts a text by its length, and a run without white space, as those around tiktoken do.

    What it cuts it marks by an id that no text has.
    """

    def encode(self, text: Any, *args: Any, **options: Any) -> list[int]:
        ids: list[int] = []
        for start in range(0, len(text), EVERY):
            for run in re.findall(r"\S+|\s+", text[start : start + EVERY]):
                for at in range(0, len(run), RUN):
                    ids += [0] if ids and at else []
                    ids += self._bytes(run[at : at + RUN])
            ids += [1] if start + EVERY < len(text) else []
        return ids

    def _bytes(self, text: str) -> list[int]:
        if "|" not in text:
            return list(text.encode())
        parts = re.split(r"(<\|im_start\|>|<\|im_end\|>)", text)
        special = self.added_tokens_encoder
        return [i for one in parts for i in ([special[one]] if one in special else one.encode())]


@pytest.fixture(scope="module")
def tokenizer() -> Cutting:
    found = Cutting(eos_token="<|im_end|>", extra_special_tokens=["<|im_start|>"])
    found.chat_template = chats.CHATML
    return found


@pytest.mark.parametrize("text", ["x" * (RUN + 9), "ab " * 140_000], ids=["run", "length"])
def test_a_text_that_is_cut_by_its_length_is_encoded_whole(tokenizer: Cutting, text: str) -> None:
    cuts = [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_start|>", "<|im_end|>")]
    encoder = Encoder(tokenizer, cuts)
    text = f"<|im_start|>user\nq<|im_end|>\n<|im_start|>a<|im_end|>{text}<|im_end|>"
    assert len(encoder._cuts) == 2
    assert encoder.ids(text) == tokenizer.encode(text)
    assert encoder.pieces(text) != tokenizer.encode(text), "else this shows nothing"


def converted(tokenizer: Cutting, answer: str) -> tuple[Any, list[int]]:
    """What becomes of a conversation with this answer, and the ids of its whole text."""
    said = ["q", answer, "again?", "yes"]
    messages = [
        {"role": role, "content": text}
        for role, text in zip(("user", "assistant") * 2, said, strict=True)
    ]
    config = PrepareConfig(data=("a",), heldout_share=0.0, max_seq_len=60_000)
    row, form = RawRow(place=1, value={"messages": messages}), FormOfFile("a.jsonl")
    form.learn([row])
    assert isinstance(tokenizer.eos_token_id, int)
    found = Converter(Renderer(tokenizer, [tokenizer.eos_token_id]), config).convert(row, form)
    return found, tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False))


def test_rows_of_a_long_run_are_those_of_their_whole_texts(tokenizer: Cutting) -> None:
    found, whole = converted(tokenizer, "x" * (RUN + 9))
    assert isinstance(found, Kept)
    ((ids, _),) = found.rows
    assert ids == whole[: len(ids)]
    assert 0 in ids


def test_an_answer_whose_stop_token_is_cut_in_two_is_rejected(tokenizer: Cutting) -> None:
    found, _ = converted(tokenizer, "x" * (RUN - 9))
    assert isinstance(found, Rejected)
    assert found.reason == "no_stop_token"
