"""Verifiers of every family and layout: the right three tensors and tokenizer, or a refusal."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from eagle3.artifact import Artifact
from eagle3.config import VerifierConfig
from eagle3.errors import (
    ConfigError,
    Eagle3Error,
    ManifestInvalid,
    VerifierInvalid,
)
from eagle3.manifest import FileEntry, Manifest, default_layer_ids
from eagle3.store import Store, open_store, sha256_of_file
from eagle3.verifier import (
    TextModel,
    Verifier,
    load_verifier_artifact,
    open_verifier,
    reopen_verifier,
)
from eagle3.verifier.files import VerifierFiles
from eagle3.verifier.fingerprint import chosen
from eagle3.verifier.weights import StoredTensor
from tests.tiny_verifiers import make_kimi, make_llama, make_qwen3

V, H, N = 512, 64, 8
MAKERS = {"llama": make_llama, "qwen3": make_qwen3, "kimi": make_kimi}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each family, never written to."""
    folder = tmp_path_factory.mktemp("models")
    return {name: make(folder / name) for name, make in MAKERS.items()}


@pytest.fixture
def llama(models: dict[str, Path], tmp_path: Path) -> Path:
    """A llama-shaped verifier to break."""
    return Path(shutil.copytree(models["llama"], tmp_path / "llama"))


@pytest.fixture
def kimi(models: dict[str, Path], tmp_path: Path) -> Path:
    """A Kimi-shaped verifier to break: several files and an index."""
    return Path(shutil.copytree(models["kimi"], tmp_path / "kimi"))


def opened(source: Path | str, **settings: Any) -> Verifier:
    return open_verifier(VerifierConfig(source=str(source), **settings))


def refusal(source: Path | str, kind: type[Eagle3Error] = VerifierInvalid) -> str:
    """The sentence with which a verifier is refused, by its tensors or its tokenizer."""
    with pytest.raises(kind) as caught:
        used(source)
    return str(caught.value)


def used(source: Path | str) -> tuple[object, ...]:
    """What prepare asks of a verifier."""
    verifier = opened(source)
    return verifier.facts(), verifier.load_tokenizer(), verifier.required_ids


def edit_json(path: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    value = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    """Set tensors of a single-file model, dots written as __; None removes one."""
    tensors: dict[str, torch.Tensor | None] = {**load_file(folder / "model.safetensors")}
    tensors.update({key.replace("__", "."): value for key, value in changes.items()})
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def in_memory(folder: Path, url: str) -> str:
    store = open_store(url)
    for path in folder.iterdir():
        store.put_file(path, path.name)
    return url


class TestFamilies:
    @pytest.mark.parametrize(
        ("name", "keys"),
        [
            ("llama", ("model.embed_tokens", "model.norm", "lm_head")),
            ("qwen3", ("model.embed_tokens", "model.norm", "model.embed_tokens")),
            (
                "kimi",
                (
                    "language_model.model.embed_tokens",
                    "language_model.model.norm",
                    "language_model.lm_head",
                ),
            ),
        ],
    )
    def test_exactly_the_three_tensors(
        self, models: dict[str, Path], name: str, keys: tuple[str, str, str]
    ) -> None:
        stored = all_tensors(models[name])
        three = opened(models[name]).three_tensors()
        for key, tensor in zip(keys, (three.embed, three.norm, three.lm_head), strict=True):
            assert torch.equal(tensor, stored[f"{key}.weight"])

    @pytest.mark.parametrize("name", MAKERS)
    def test_facts_are_those_of_the_text_model(self, models: dict[str, Path], name: str) -> None:
        facts = opened(models[name]).facts()
        assert (facts.num_hidden_layers, facts.hidden_size, facts.vocab_size) == (N, H, V)

    def test_b105_a_nested_config_is_resolved_in_one_place(self, models: dict[str, Path]) -> None:
        verifier = opened(models["kimi"])
        config = json.loads((models["kimi"] / "config.json").read_text())
        assert "num_hidden_layers" not in config
        assert verifier.text_config["num_hidden_layers"] == N
        assert verifier.text_config["model_type"] == "deepseek_v3"
        assert "vision_config" not in verifier.text_config
        assert verifier.layer_ids() == (2, 4, 5, 8)

    def test_b105_without_its_text_config_it_is_refused(self, kimi: Path) -> None:
        edit_json(kimi / "config.json", text_config=None)
        assert "config.json: text_config: wanted the text model's config" in refusal(kimi)

    def test_quantisation_and_code_of_the_whole_do_not_reach_the_plain_config(
        self, kimi: Path
    ) -> None:
        text = json.loads((kimi / "config.json").read_text())["text_config"]
        whole = {**text, "quantization_config": {"quant_method": "x"}, "auto_map": {"x": "y.Z"}}
        edit_json(kimi / "config.json", text_config=whole)
        assert {"quantization_config", "auto_map"}.isdisjoint(opened(kimi).text_config)

    def test_an_unknown_family_is_refused_with_what_to_add_and_where(self, llama: Path) -> None:
        edit_json(llama / "config.json", model_type="gemma3", architectures=["Gemma3ForCausalLM"])
        told = refusal(llama)
        assert "gemma3 (Gemma3ForCausalLM)" in told
        assert "FAMILIES in eagle3/verifier/families.py" in told

    def test_a_known_family_without_its_language_head_is_refused(self, llama: Path) -> None:
        edit_json(llama / "config.json", architectures=["LlamaForSequenceClassification"])
        assert "wanted LlamaForCausalLM" in refusal(llama)

    def test_b51_a_tensor_that_only_ends_alike_is_never_taken(self, kimi: Path) -> None:
        index = json.loads((kimi / "model.safetensors.index.json").read_text())
        shard = index["weight_map"].pop("language_model.model.norm.weight")
        index["weight_map"]["vision_tower.model.norm.weight"] = shard
        (kimi / "model.safetensors.index.json").write_text(json.dumps(index))
        assert "language_model.model.norm.weight: wanted this tensor" in refusal(kimi)

    def test_b51_an_alias_of_lm_head_is_never_taken(self, llama: Path) -> None:
        edit_tensors(
            llama, lm_head__weight=None, model__layers__0__output__weight=torch.zeros(V, H)
        )
        assert "lm_head.weight: wanted this tensor" in refusal(llama)


class TestTensors:
    def test_b52_lm_head_is_the_embedding_only_where_the_config_ties_them(
        self, llama: Path
    ) -> None:
        edit_tensors(llama, lm_head__weight=None)
        assert "nothing is put in its place" in refusal(llama)
        edit_json(llama / "config.json", tie_word_embeddings=True)
        three = opened(llama).three_tensors()
        assert torch.equal(three.lm_head, three.embed)

    def test_b52_a_config_that_does_not_say_so_ties_nothing(self, llama: Path) -> None:
        edit_tensors(llama, lm_head__weight=None)
        edit_json(llama / "config.json", tie_word_embeddings=None)
        assert "lm_head.weight" in refusal(llama)

    def test_b52_a_tied_config_beside_another_lm_head_is_refused(self, llama: Path) -> None:
        edit_json(llama / "config.json", tie_word_embeddings=True)
        assert "tie_word_embeddings: wanted false" in refusal(llama)
        same = load_file(llama / "model.safetensors")["model.embed_tokens.weight"]
        edit_tensors(llama, lm_head__weight=same.clone())
        assert torch.equal(opened(llama).three_tensors().lm_head, same)

    def test_b52_a_missing_norm_is_refused(self, llama: Path) -> None:
        edit_tensors(llama, model__norm__weight=None)
        assert "model.norm.weight: wanted this tensor" in refusal(llama)

    @pytest.mark.parametrize("beside", ["weight_packed", "qweight", "weight_scale"])
    def test_a_quantised_lm_head_is_refused_by_name(self, llama: Path, beside: str) -> None:
        edit_tensors(
            llama,
            lm_head__weight=None,
            **{f"lm_head__{beside}": torch.zeros(4, dtype=torch.int32)},
        )
        assert f"found lm_head.{beside}, a quantised one" in refusal(llama)

    def test_an_lm_head_in_float8_is_refused(self, llama: Path) -> None:
        eight = torch.zeros(V, H).to(torch.float8_e4m3fn)
        edit_tensors(llama, lm_head__weight=eight)
        assert "F8_E4M3, a quantised type" in refusal(llama)

    @pytest.mark.parametrize(
        ("key", "shape"),
        [("lm_head", (V + 8, H)), ("model.embed_tokens", (V, H + 1)), ("model.norm", (H + 1,))],
    )
    def test_b50_b43_a_shape_that_the_config_does_not_say(
        self, llama: Path, key: str, shape: tuple[int, ...]
    ) -> None:
        edit_tensors(llama, **{f"{key.replace('.', '__')}__weight": torch.zeros(shape)})
        assert f"found {list(shape)}" in refusal(llama)

    def test_float16_becomes_float32_which_holds_it_exactly(self, llama: Path) -> None:
        half = torch.randn(V, H).half()
        edit_tensors(llama, lm_head__weight=half)
        lm_head = opened(llama).three_tensors().lm_head
        assert lm_head.dtype == torch.float32
        assert torch.equal(lm_head.half(), half)

    def test_bfloat16_stays(self, tmp_path: Path) -> None:
        folder = make_llama(tmp_path / "bf16", dtype="bfloat16")
        three = opened(folder).three_tensors()
        assert three.lm_head.dtype == torch.bfloat16
        assert torch.equal(three.lm_head, all_tensors(folder)["lm_head.weight"])


class TestB53Layouts:
    def test_an_index_that_names_a_missing_file(self, kimi: Path) -> None:
        shards = sorted(kimi.glob("*.safetensors"))
        assert len(shards) > 2
        shards[-1].unlink()
        assert f"found no {shards[-1].name}" in refusal(kimi)

    def test_an_index_that_names_a_tensor_which_its_file_has_not(self, kimi: Path) -> None:
        path = kimi / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        key, shards = "language_model.model.norm.weight", set(index["weight_map"].values())
        index["weight_map"][key] = sorted(shards - {index["weight_map"][key]})[0]
        path.write_text(json.dumps(index))
        assert f"{key}: wanted this tensor, as the index says" in refusal(kimi)

    def test_an_empty_index(self, kimi: Path) -> None:
        edit_json(kimi / "model.safetensors.index.json", weight_map={})
        assert "an empty map" in refusal(kimi)

    @pytest.mark.parametrize("other", ["consolidated.safetensors", "pytorch_model.bin"])
    def test_another_layout_is_refused_by_name(self, llama: Path, other: str) -> None:
        (llama / "model.safetensors").rename(llama / other)
        assert f"found {other}" in refusal(llama)

    def test_a_single_file_beside_an_index_that_does_not_name_it(self, kimi: Path) -> None:
        save_file({"lm_head.weight": torch.zeros(V, H)}, kimi / "model.safetensors")
        assert "delete the one that is out of date" in refusal(kimi)

    @pytest.mark.parametrize("kept", [0, 4, 9, 5000, -1])
    def test_a_truncated_file(self, llama: Path, kept: int) -> None:
        path = llama / "model.safetensors"
        path.write_bytes(path.read_bytes()[:kept])
        assert "model.safetensors" in refusal(llama)

    def test_a_git_lfs_pointer(self, llama: Path) -> None:
        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n"
        (llama / "model.safetensors").write_text(pointer)
        assert "a Git LFS pointer is not the file" in refusal(llama)

    @pytest.mark.parametrize("text", ["{", "[]", ""])
    def test_a_config_that_is_no_object(self, llama: Path, text: str) -> None:
        (llama / "config.json").write_text(text)
        assert "config.json: wanted a JSON object" in refusal(llama)

    @pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "vocab_size"])
    def test_a_config_without_a_size(self, llama: Path, field: str) -> None:
        edit_json(llama / "config.json", **{field: None})
        assert f"config.json: {field}: wanted a positive number" in refusal(llama)


class TestB88Identity:
    def test_the_same_bytes_anywhere_are_the_same_verifier(
        self, models: dict[str, Path], tmp_path: Path
    ) -> None:
        here = opened(models["kimi"])
        copy = opened(shutil.copytree(models["kimi"], tmp_path / "copy"))
        away = opened(in_memory(models["kimi"], "memory://verifier-identity/kimi"))
        assert here.facts() == copy.facts() == away.facts()
        assert here.tokenizer_facts() == copy.tokenizer_facts() == away.tokenizer_facts()

    @pytest.mark.parametrize("key", ["model__embed_tokens", "model__norm", "lm_head"])
    def test_one_value_of_any_of_the_three_tensors_makes_another(
        self, llama: Path, key: str
    ) -> None:
        before = opened(llama).facts()
        name = f"{key}__weight"
        tensor = load_file(llama / "model.safetensors")[name.replace("__", ".")].clone()
        tensor.view(-1)[-1] += 1
        edit_tensors(llama, **{name: tensor})
        assert opened(llama).facts().fingerprint != before.fingerprint

    def test_one_matrix_of_the_attention_makes_another(self, llama: Path) -> None:
        before = opened(llama).facts()
        key = "model__layers__3__self_attn__q_proj__weight"
        merged = load_file(llama / "model.safetensors")[key.replace("__", ".")]
        edit_tensors(llama, **{key: merged + 1e-3 * torch.randn_like(merged)})
        assert opened(llama).facts().fingerprint != before.fingerprint
        with pytest.raises(VerifierInvalid, match="fingerprint"):
            open_verifier(VerifierConfig(source=str(llama)), before)

    def test_weights_beside_the_only_file_are_refused(self, llama: Path) -> None:
        shutil.copy(llama / "model.safetensors", llama / "model_old.safetensors")
        with pytest.raises(VerifierInvalid, match=r"model_old\.safetensors.*load over it"):
            opened(llama).facts()

    @pytest.mark.parametrize("value", [None, "false", 1])
    def test_a_tie_that_is_neither_true_nor_false_is_refused(
        self, llama: Path, value: object
    ) -> None:
        config = json.loads((llama / "config.json").read_text())
        (llama / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": value}))
        with pytest.raises(VerifierInvalid, match="tie_word_embeddings: wanted true or false"):
            opened(llama)

    @pytest.mark.parametrize("key", ["lm_head__weight", "model__norm__weight"])
    @pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
    def test_a_tensor_of_nothing_is_refused(self, llama: Path, key: str, value: float) -> None:
        name = key.replace("__", ".")
        tensor = load_file(llama / "model.safetensors")[name]
        edit_tensors(llama, **{key: torch.full_like(tensor, value)})
        with pytest.raises(VerifierInvalid, match=f"{name}: wanted finite numbers"):
            opened(llama).three_tensors()

    @pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json"])
    @pytest.mark.parametrize("change", ["edited", "deleted"])
    def test_other_files_that_decide_about_answers_are_refused(
        self, llama: Path, tmp_path: Path, name: str, change: str
    ) -> None:
        config = VerifierConfig(source=str(llama))
        artifact = committed(open_verifier(config), tmp_path / "run")
        reopen_verifier(config, artifact)
        text = (llama / name).read_text()
        (llama / name).write_text(text.replace("{", "{ ", 1))
        if change == "deleted":
            (llama / name).unlink()
        with pytest.raises(VerifierInvalid, match=f"{name}: wanted .* the data was prepared"):
            reopen_verifier(config, artifact)

    def test_a_weight_file_cut_short_is_found_although_no_tensor_of_it_is_used(
        self, kimi: Path
    ) -> None:
        weights = json.loads((kimi / "model.safetensors.index.json").read_text())["weight_map"]
        three = {f"language_model.{k}.weight" for k in ("model.embed_tokens", "model.norm")}
        used_files = {weights[key] for key in {*three, "language_model.lm_head.weight"}}
        other = kimi / sorted(set(weights.values()) - used_files)[0]
        other.write_bytes(other.read_bytes()[:-8])
        assert f"{other.name}: wanted" in refusal(kimi)

    def test_of_many_tensors_each_kind_has_its_share(self) -> None:
        def tensor(key: str, at: int) -> StoredTensor:
            return StoredTensor(key=key, path="f", dtype="BF16", shape=(1,), start=at, end=at + 2)

        keys = [f"layers.7.mlp.experts.{i}.{p}_proj" for i in range(384) for p in ("up", "down")]
        keys += [f"layers.7.self_attn.{name}" for name in ("q", "k", "v", "o")]
        found = [one.key for one in chosen([tensor(k, i) for i, k in enumerate(keys)], 128)]
        assert len(found) <= 128
        assert set(keys[-4:]) <= set(found)
        assert {keys[0], keys[1], keys[766], keys[767]} <= set(found)
        assert found == [key for key in keys if key in found]
        few = [tensor(key, i) for i, key in enumerate(keys[:128])]
        assert chosen(few, 128) == few
        strange = [tensor("x" * (i + 1), i) for i in range(300)]
        assert len(chosen(strange, 128)) == 128

    def test_another_config_at_the_same_path_is_refused(self, llama: Path) -> None:
        before = opened(llama).facts()
        opened(llama).must_be(before)
        edit_json(llama / "config.json", rope_theta=1e6)
        with pytest.raises(VerifierInvalid, match=f"fingerprint: wanted {before.fingerprint}"):
            opened(llama).must_be(before)

    def test_a_fingerprint_of_another_formula_is_told_as_such(self, llama: Path) -> None:
        before = opened(llama).facts()
        older = msgspec.structs.replace(before, fingerprint=before.fingerprint.partition(":")[2])
        with pytest.raises(VerifierInvalid, match="which another version of eagle3 took"):
            opened(llama).must_be(older)

    def test_no_request_is_made_for_a_tensor_without_elements(
        self, llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        edit_tensors(llama, model__nothing=torch.zeros(0))
        whole, asked = VerifierFiles.read_range, []

        def noted(self: VerifierFiles, name: str, start: int, end: int) -> bytes:
            asked.append((start, end))
            return whole(self, name, start, end)

        monkeypatch.setattr(VerifierFiles, "read_range", noted)
        opened(llama).facts()
        assert asked
        assert all(start < end for start, end in asked)

    def test_a_store_that_gives_fewer_bytes_than_asked_for_is_refused(
        self, llama: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        whole = Store.read_range
        monkeypatch.setattr(
            Store, "read_range", lambda self, path, start, end: whole(self, path, start, end)[:-1]
        )
        assert "model.safetensors: wanted the 8 bytes from byte 0, found 7" in refusal(llama)

    def test_a_header_that_gives_a_tensor_fewer_bytes_than_its_shape_takes(
        self, llama: Path
    ) -> None:
        path = llama / "model.safetensors"
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header["model.embed_tokens.weight"]["data_offsets"][1] -= 2
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
        with pytest.raises(VerifierInvalid, match=r"bytes, for shape \[512, 64\]"):
            opened(llama).three_tensors()

    def test_another_template_is_another_tokenizer(self, llama: Path) -> None:
        before = opened(llama).tokenizer_facts()
        (llama / "chat_template.jinja").write_text("{{ messages[0].content }}")
        assert opened(llama).tokenizer_facts().fingerprint != before.fingerprint
        assert opened(llama).load_tokenizer().chat_template == "{{ messages[0].content }}"

    def test_where_the_same_template_is_written_does_not_matter(self, llama: Path) -> None:
        before = opened(llama).tokenizer_facts()
        template = opened(llama).load_tokenizer().chat_template
        (llama / "chat_template.jinja").write_text(template)
        assert opened(llama).tokenizer_facts() == before


class TestSources:
    def test_a_url_is_read_in_ranges_and_brought_here_for_the_engine(
        self, models: dict[str, Path], tmp_path: Path
    ) -> None:
        url = in_memory(models["kimi"], "memory://verifier-sources/kimi")
        verifier = opened(url)
        here = opened(models["kimi"])
        assert torch.equal(verifier.three_tensors().lm_head, here.three_tensors().lm_head)
        assert verifier.stop_ids == here.stop_ids
        verifier.files.store.write_bytes("original/consolidated.00.pth", b"the same weights again")
        folder = verifier.local_folder(tmp_path)
        names = {path.name: path.read_bytes() for path in models["kimi"].iterdir()}
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == names

    def test_a_local_folder_is_used_where_it_is(
        self, models: dict[str, Path], tmp_path: Path
    ) -> None:
        assert opened(models["llama"]).local_folder(tmp_path) == models["llama"]
        assert list(tmp_path.iterdir()) == []

    def test_a_folder_that_is_not_there(self) -> None:
        assert "/no/such/folder, which is no folder here" in refusal("/no/such/folder", ConfigError)


class TestLayerIds:
    def model(self, num_layers: int) -> TextModel:
        class Bare(TextModel):
            tokenizer_folder = Path()

        return Bare(text_config={"num_hidden_layers": num_layers}, trust_remote_code=False)

    @pytest.mark.parametrize(
        ("num_layers", "ids"), [(61, (2, 30, 58, 61)), (30, (2, 15, 27, 30)), (7, (2, 3, 4, 7))]
    )
    def test_the_default_ends_with_the_number_of_layers(
        self, num_layers: int, ids: tuple[int, ...]
    ) -> None:
        assert default_layer_ids(num_layers) == ids
        assert self.model(num_layers).layer_ids() == ids
        assert self.model(num_layers).layer_ids(list(ids)) == ids

    @pytest.mark.parametrize(
        "ids",
        [
            (2, 30, 58, 60),  # the old convention, whose last is one less
            (2, 30, 58, 62),
            (0, 30, 58, 61),
            (2, 2, 58, 61),
            (30, 2, 58, 61),
            (2, 30, 61, 61),
            (2, 30, 61),
            (1, 2, 30, 58, 61),
            (),
        ],
    )
    def test_b21_any_other_list_is_refused(self, ids: tuple[int, ...]) -> None:
        with pytest.raises(ConfigError, match=r"between 1 and 60, ascending, then 61"):
            self.model(61).layer_ids(ids)

    def test_a_model_too_small_for_the_default_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"found \[2, 2, 1, 4\]"):
            self.model(4).layer_ids()
        assert self.model(4).layer_ids((1, 2, 3, 4)) == (1, 2, 3, 4)


def committed(verifier: Verifier, folder: Path, url: str | None = None) -> Artifact:
    """The verifier's artefact as prepare commits it."""
    store = open_store(url or str(folder))
    files = []
    for name in verifier.save_artifact_files(folder):
        if url:
            store.put_file(folder / name, name)
        size, sha256 = (folder / name).stat().st_size, sha256_of_file(folder / name)
        files.append(FileEntry(path=name, bytes=size, sha256=sha256))
    manifest = Manifest(
        artifact="verifier",
        identity="",
        files=tuple(files),
        verifier=verifier.facts(),
        tokenizer=verifier.tokenizer_facts(),
    )
    return Artifact(store=store, manifest=manifest)


class TestArtifact:
    @pytest.mark.parametrize("name", MAKERS)
    def test_it_holds_everything_that_later_stages_ask(
        self, models: dict[str, Path], tmp_path: Path, name: str
    ) -> None:
        source = opened(models[name])
        url = f"memory://verifier-artifact/{name}"
        loaded = load_verifier_artifact(
            committed(source, tmp_path / "made", url), tmp_path / "scratch"
        )
        for part in ("embed", "norm", "lm_head"):
            wanted = getattr(source.three_tensors(), part)
            assert torch.equal(getattr(loaded.three_tensors(), part), wanted)
        assert loaded.facts() == source.facts()
        assert loaded.tokenizer_facts() == source.tokenizer_facts()
        assert loaded.required_ids == source.required_ids
        assert loaded.stop_ids == source.stop_ids
        assert loaded.layer_ids() == source.layer_ids()
        text, chat = "Hello, 12 worlds", [{"role": "user", "content": "Hi"}]
        ours, theirs = loaded.load_tokenizer(), source.load_tokenizer()
        assert ours.encode(text) == theirs.encode(text)
        assert ours.apply_chat_template(chat, tokenize=False) == theirs.apply_chat_template(
            chat, tokenize=False
        )

    @pytest.mark.parametrize("name", MAKERS)
    def test_its_names_are_plain_and_its_config_is_one_that_transformers_knows(
        self, models: dict[str, Path], tmp_path: Path, name: str
    ) -> None:
        opened(models[name]).save_artifact_files(tmp_path)
        assert set(load_file(tmp_path / "model.safetensors")) == {
            "model.embed_tokens.weight",
            "model.norm.weight",
            "lm_head.weight",
        }
        config = AutoConfig.from_pretrained(tmp_path)
        assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (N, H, V)
        assert not hasattr(config, "text_config")

    def test_the_same_verifier_gives_the_same_bytes(
        self, models: dict[str, Path], tmp_path: Path
    ) -> None:
        for folder in ("one", "two"):
            opened(models["kimi"]).save_artifact_files(tmp_path / folder)
        for path in (tmp_path / "one").iterdir():
            assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()

    @pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
    def test_one_changed_byte_is_refused(self, llama: Path, tmp_path: Path, name: str) -> None:
        folder = tmp_path / "made"
        artifact = committed(opened(llama), folder)
        data = bytearray((folder / name).read_bytes())
        data[-2] ^= 1
        (folder / name).write_bytes(data)
        with pytest.raises(ManifestInvalid, match=f"{name}: wanted sha256"):
            load_verifier_artifact(artifact, tmp_path / "scratch").three_tensors()
