"""A verifier's tokenizer: the declared class, proven on texts and special tokens, or refused."""

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from eagle3.artifact import Artifact
from eagle3.errors import ConfigError, ManifestInvalid, VerifierInvalid
from eagle3.verifier import load_verifier_artifact
from eagle3.verifier import tokenizer as tokenizers
from tests import test_verifier
from tests.test_verifier import MAKERS, V, committed, edit_json, opened, refusal

# The fixtures of the verifiers themselves.
models, llama, kimi = test_verifier.models, test_verifier.llama, test_verifier.kimi


class TestTokenizer:
    @pytest.mark.parametrize("name", MAKERS)
    def test_stop_and_required_ids(self, models: dict[str, Path], name: str) -> None:
        verifier = opened(models[name])
        assert verifier.stop_ids == (0, 2)
        assert verifier.required_ids == (0, 1, 2)

    def test_without_generation_config_the_tokenizers_own_end_is_left(self, llama: Path) -> None:
        (llama / "generation_config.json").unlink()
        assert opened(llama).stop_ids == (2,)

    def test_b43_a_stop_id_that_lm_head_has_no_row_for(self, llama: Path) -> None:
        edit_json(llama / "generation_config.json", eos_token_id=[2, V])
        assert "wanted ids below 512" in refusal(llama)

    def test_b43_an_added_token_past_the_last_row_of_lm_head(self, llama: Path) -> None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(llama)
        tokenizer.add_tokens([f"<extra{i}>" for i in range(V - len(tokenizer) + 1)])
        tokenizer.save_pretrained(llama)
        assert "token ids: wanted ids below 512, the rows of lm_head, found 512" in refusal(llama)

    def test_no_chat_template(self, llama: Path) -> None:
        edit_json(llama / "tokenizer_config.json", chat_template=None)
        assert "chat template: wanted one" in refusal(llama)

    def test_b01_a_class_that_loses_spaces_is_replaced_by_the_raw_tokenizer(
        self, llama: Path
    ) -> None:
        edit_json(llama / "tokenizer_config.json", tokenizer_class="LlamaTokenizerFast")
        wrong = AutoTokenizer.from_pretrained(llama)
        raw = Tokenizer.from_file(str(llama / "tokenizer.json"))
        assert wrong.encode("a b", add_special_tokens=False) != raw.encode("a b").ids
        right = opened(llama).load_tokenizer()
        assert right.encode("a b", add_special_tokens=False) == raw.encode("a b").ids
        assert right.decode(right.encode("a b")) == "a b"
        assert right.chat_template

    def test_a_vocabulary_that_does_not_give_texts_back(self, llama: Path) -> None:
        raw = json.loads((llama / "tokenizer.json").read_text())
        raw["normalizer"] = {"type": "Lowercase"}
        (llama / "tokenizer.json").write_text(json.dumps(raw))
        assert "back from its own ids" in refusal(llama)

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("tokenizer.json", "{"),
            ("tokenizer.json", "version https://git-lfs.github.com/spec/v1"),
            ("tokenizer.json", '{"model": {"type": "of-a-later-release"}}'),
            ("tokenizer_config.json", "{"),
            ("tokenizer_config.json", "[]"),
            ("generation_config.json", "{"),
            ("generation_config.json", "[]"),
            ("generation_config.json", '{"eos_token_id": "2"}'),
        ],
    )
    def test_a_broken_file_is_named(self, llama: Path, name: str, text: str) -> None:
        (llama / name).write_text(text)
        assert name in refusal(llama)

    def test_a_tokenizer_that_is_not_there(self, llama: Path) -> None:
        (llama / "tokenizer.json").unlink()
        assert "tokenizer" in refusal(llama)


SLOW_TOKENIZER = """
import base64
from pathlib import Path
import tiktoken
from transformers import PreTrainedTokenizer

PATTERN = r"\\s?\\p{L}+|\\s?\\p{N}|[^\\s\\p{L}\\p{N}]+|\\s+"


class TinyTikToken(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}
    special = {"<|im_end|>": 256, "<|im_start|>": 257, "<think>": 258, "</think>": 259}

    def __init__(self, vocab_file, **kwargs):
        lines = Path(vocab_file).read_text().splitlines()
        ranks = {base64.b64decode(k): int(v) for k, v in (line.split() for line in lines)}
        self.model = tiktoken.Encoding(
            "tiny", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=self.special
        )
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return self.model.n_vocab

    def get_vocab(self):
        names = {i: f"t{i}" for i in range(256)} | {v: k for k, v in self.special.items()}
        return {name: i for i, name in names.items()}

    def encode(self, text, **kwargs):
        return self.model.encode(text, ALLOWED)

    def decode(self, ids, **kwargs):
        return self.model.decode(list(ids))

    def _convert_token_to_id(self, token):
        return self.get_vocab()[token]

    def _convert_id_to_token(self, index):
        return {i: name for name, i in self.get_vocab().items()}[index]
"""


def make_slow(folder: Path, *, keeps_specials: bool = True) -> Path:
    """Turn a verifier's tokenizer into one in tiktoken's format, with code of its own."""
    (folder / "tokenizer.json").unlink()
    ranks = (f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))
    (folder / "tiktoken.model").write_text("".join(ranks))
    allowed = 'allowed_special="all"' if keeps_specials else "disallowed_special=()"
    code = SLOW_TOKENIZER.replace("ALLOWED", allowed)
    (folder / "tokenization_tiny.py").write_text(code)
    special = {
        str(i): {"content": token, "special": True}
        for i, token in enumerate(["<|im_end|>", "<|im_start|>", "<think>", "</think>"], 256)
    }
    edit_json(
        folder / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["tokenization_tiny.TinyTikToken", None]},
        tokenizer_class="TinyTikToken",
        added_tokens_decoder=special,
        eos_token="<|im_end|>",
        pad_token=None,
        additional_special_tokens=None,
        extra_special_tokens=None,
    )
    edit_json(folder / "generation_config.json", eos_token_id=256)
    return folder


def beside_a_class(folder: Path) -> None:
    """Give a folder with a tokenizer.json a class of its own that encodes as that does."""
    (folder / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\n"
        "class Own(PreTrainedTokenizerFast):\n    pass\n"
    )
    edit_json(
        folder / "tokenizer_config.json",
        auto_map={"AutoTokenizer": [None, "tokenization_own.Own"]},
        tokenizer_class="PreTrainedTokenizerFast",
    )


class TestWhatLiesBesideAnArtefact:
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("added_tokens.json", '{"<stray>": 500}'),
            ("special_tokens_map.json", '{"eos_token": "a"}'),
            ("additional_chat_templates/tool_use.jinja", "stray"),
            ("tokenization_stray.py", "raise SystemExit"),
            ("model.safetensors.index.json", "{}"),
        ],
    )
    def test_is_not_seen_by_what_loads_it(
        self, llama: Path, tmp_path: Path, name: str, text: str
    ) -> None:
        source, made = opened(llama), tmp_path / "made"
        artifact = committed(source, made)
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(text)
        loaded = load_verifier_artifact(artifact, tmp_path / "scratch")
        assert loaded.required_ids == source.required_ids
        assert loaded.load_tokenizer().chat_template == source.load_tokenizer().chat_template
        assert len(loaded.load_tokenizer()) == len(source.load_tokenizer())
        there = {path.name for path in loaded.folder.rglob("*") if path.is_file()}
        assert there == {entry.path for entry in artifact.manifest.files}

    def test_a_generation_config_that_the_verifier_has_not_ends_no_answer(
        self, llama: Path, tmp_path: Path
    ) -> None:
        (llama / "generation_config.json").unlink()
        artifact = committed(opened(llama), tmp_path / "made")
        (tmp_path / "made/generation_config.json").write_text('{"eos_token_id": 7}')
        assert load_verifier_artifact(artifact, tmp_path / "scratch").stop_ids == (2,)

    def test_a_tokenizer_that_is_not_the_manifest_s_is_refused(
        self, llama: Path, tmp_path: Path
    ) -> None:
        artifact = committed(opened(llama), tmp_path / "made")
        facts = msgspec.structs.replace(artifact.manifest.tokenizer, fingerprint="0" * 64)
        manifest = msgspec.structs.replace(artifact.manifest, tokenizer=facts)
        other = Artifact(store=artifact.store, manifest=manifest)
        with pytest.raises(ManifestInvalid, match=r"tokenizer\.fingerprint: wanted 0000"):
            load_verifier_artifact(other, tmp_path / "scratch").load_tokenizer()


class TestB02RemoteCode:
    @pytest.mark.fault("B89")
    def test_it_runs_only_when_the_configuration_says_so(self, kimi: Path) -> None:
        told = refusal(make_slow(kimi), ConfigError)
        assert "verifier.trust_remote_code: wanted true" in told
        assert "tokenization_tiny.TinyTikToken" in told

    def test_the_declared_class_is_loaded_and_keeps_special_tokens_whole(self, kimi: Path) -> None:
        verifier = opened(make_slow(kimi), trust_remote_code=True)
        tokenizer = verifier.load_tokenizer()
        assert type(tokenizer).__name__ == "TinyTikToken"
        assert not tokenizer.is_fast
        assert tokenizer.encode("a<think>b") == [97, 258, 98]
        assert verifier.stop_ids == (256,)
        assert verifier.required_ids == (256, 257, 258, 259)

    def test_one_that_was_rebuilt_as_another_class_is_refused(
        self, kimi: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Rebuilding:
            @staticmethod
            def from_pretrained(folder: Path, **options: Any) -> Any:
                found = AutoTokenizer.from_pretrained(folder, **options)
                found.__class__ = type("Rebuilt", (type(found),), {})
                return found

        monkeypatch.setattr(tokenizers, "AutoTokenizer", Rebuilding)
        verifier = opened(make_slow(kimi), trust_remote_code=True)
        with pytest.raises(VerifierInvalid, match=r"TinyTikToken, found Rebuilt"):
            verifier.load_tokenizer()

    def test_one_that_splits_special_tokens_is_refused(self, kimi: Path) -> None:
        verifier = opened(make_slow(kimi, keeps_specials=False), trust_remote_code=True)
        with pytest.raises(VerifierInvalid, match=r"special token <\|im_end\|>: wanted the one id"):
            verifier.load_tokenizer()

    def test_one_that_encodes_otherwise_than_the_tokenizer_json_beside_it_is_refused(
        self, kimi: Path
    ) -> None:
        beside = (kimi / "tokenizer.json").read_bytes()
        make_slow(kimi)
        (kimi / "tokenizer.json").write_bytes(beside)
        verifier = opened(kimi, trust_remote_code=True)
        with pytest.raises(VerifierInvalid, match=r"to give the ids of tokenizer\.json for 'a b'"):
            verifier.load_tokenizer()

    def test_which_of_two_that_agree_encodes_is_part_of_its_identity(
        self, llama: Path, tmp_path: Path
    ) -> None:
        beside_a_class(llama)
        facts = {}
        for trusted, kind in ((True, "Own"), (False, "TokenizersBackend")):
            verifier = opened(llama, trust_remote_code=trusted)
            assert kind in {one.__name__ for one in type(verifier.load_tokenizer()).__mro__}
            facts[trusted] = verifier.tokenizer_facts().fingerprint
        assert facts[True] != facts[False]
        source = opened(llama, trust_remote_code=True)
        artifact = committed(source, tmp_path / "made")
        for scratch, trusted in (("a", True), ("b", False)):
            loaded = load_verifier_artifact(artifact, tmp_path / scratch, trust_remote_code=trusted)
            if trusted:
                assert loaded.required_ids == source.required_ids
                continue
            for _ in range(2):
                with pytest.raises(ManifestInvalid, match=r"tokenizer\.fingerprint: wanted"):
                    _ = loaded.required_ids

    def test_one_whose_class_nobody_else_knows_must_be_trusted_first(self, llama: Path) -> None:
        beside_a_class(llama)
        edit_json(llama / "tokenizer_config.json", tokenizer_class="Own")
        with pytest.raises(ConfigError, match=r"trust_remote_code: wanted true, to run .*Own"):
            opened(llama).load_tokenizer()

    def test_its_code_is_part_of_its_identity_and_of_the_artefact(
        self, kimi: Path, tmp_path: Path
    ) -> None:
        before = opened(make_slow(kimi), trust_remote_code=True)
        names = before.save_artifact_files(tmp_path / "artefact")
        assert {"tokenization_tiny.py", "tiktoken.model"} <= set(names)
        fingerprint = before.tokenizer_facts().fingerprint
        with (kimi / "tokenization_tiny.py").open("a") as code:
            code.write("# changed\n")
        after = opened(kimi, trust_remote_code=True).tokenizer_facts()
        assert after.fingerprint != fingerprint
