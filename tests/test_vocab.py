"""The mapping between the draft's vocabulary and the verifier's: built right, or refused."""

import importlib.util
import itertools
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from eagle3 import artifact as artifacts
from eagle3.artifact import Artifact
from eagle3.coverage import coverage
from eagle3.errors import ConfigError, ManifestInvalid, MappingInvalid
from eagle3.manifest import Manifest
from eagle3.shards import TokenRow
from eagle3.store import open_store
from eagle3.vocab import (
    COUNTS_NAME,
    MAPPING_NAME,
    Mapping,
    build_mapping,
    check_mapping,
    counts_from_dict,
    counts_to_dict,
    decode,
    decode_counts,
    encode,
    encode_counts,
    load_counts,
    load_mapping,
    mapping_sha256,
    supervised_counts,
)

V = 64
REQUIRED = (0, 1, 2)
KIMI_VOCAB, KIMI_DRAFT = 163_840, 32_000


# A busy machine is no failure.
calm = settings(deadline=None, max_examples=60)


def upstream() -> ModuleType:
    """speculators' own module, without the package around it, whose import takes 14 s."""
    package = importlib.util.find_spec("speculators")
    path = Path(package.submodule_search_locations[0]) / "train" / "vocab_mapping.py"
    spec = importlib.util.spec_from_file_location("upstream_vocab_mapping", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build_vocab_mappings_from_distribution = upstream().build_vocab_mappings_from_distribution


def counts_of(**by_id: int) -> torch.Tensor:
    """`counts_of(i7=3)`: token 7 three times."""
    return counts_from_dict({int(key[1:]): count for key, count in by_id.items()}, V)


def mapping_of(ids: list[int], vocab_size: int = V) -> Mapping:
    """The right mapping for these ids."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[ids] = True
    return Mapping(t2d=t2d, d2t=torch.tensor(ids) - torch.arange(len(ids)))


def refusal(mapping: Mapping, required: tuple[int, ...] = ()) -> str:
    with pytest.raises(MappingInvalid) as caught:
        check_mapping(mapping, vocab_size=V, required_ids=required)
    return str(caught.value)


count_dicts = st.dictionaries(st.integers(0, V - 1), st.integers(1, 50), min_size=1)


class TestBuild:
    def test_the_most_frequent_tokens_are_taken_and_ties_go_to_the_lower_id(self) -> None:
        counts = counts_of(i9=5, i40=7, i41=5, i42=5, i50=1)
        assert build_mapping(counts, 3, ()).draft_ids.tolist() == [9, 40, 41]

    def test_special_and_stop_ids_are_always_in_though_they_never_occur(self) -> None:
        counts = counts_of(i9=5, i40=7)
        assert build_mapping(counts, 3, (63, 2)).draft_ids.tolist() == [2, 40, 63]

    def test_d2t_holds_offsets(self) -> None:
        mapping = build_mapping(counts_of(i9=5, i40=7), 2, ())
        assert mapping.d2t.tolist() == [9, 39]
        assert mapping.t2d.nonzero().flatten().tolist() == [9, 40]

    @calm
    @given(count_dicts, st.integers(3, V), st.sets(st.integers(0, V - 1), max_size=3))
    def test_every_mapping_keeps_the_invariants_and_survives_its_bytes(
        self, counts: dict[int, int], size: int, required: set[int]
    ) -> None:
        mapping = build_mapping(counts_from_dict(counts, V), size, required)
        ids = mapping.draft_ids
        assert (ids[1:] > ids[:-1]).all()
        assert required <= set(ids.tolist())
        assert int(mapping.t2d.sum()) == size == mapping.draft_vocab_size
        data = encode(mapping, required_ids=required)
        again = decode(data, "mapping", vocab_size=V, required_ids=required)
        assert torch.equal(again.t2d, mapping.t2d)
        assert torch.equal(again.d2t, mapping.d2t)
        assert encode(again, required_ids=required) == data

    @calm
    @given(count_dicts, st.integers(1, V))
    def test_equal_to_upstreams_builder_where_no_id_is_required(
        self, counts: dict[int, int], size: int
    ) -> None:
        d2t, t2d = build_vocab_mappings_from_distribution(counts, size, V)
        mapping = build_mapping(counts_from_dict(counts, V), size, ())
        assert torch.equal(mapping.d2t, d2t)
        assert torch.equal(mapping.t2d, t2d)

    @calm
    @given(count_dicts, st.integers(8, V), st.data())
    def test_equal_to_upstreams_builder_where_it_takes_the_required_ids_itself(
        self, counts: dict[int, int], size: int, data: st.DataObject
    ) -> None:
        d2t, t2d = build_vocab_mappings_from_distribution(counts, size, V)
        chosen = t2d.nonzero().flatten().tolist()
        required = data.draw(st.sets(st.sampled_from(chosen), max_size=8))
        tensor = counts_from_dict(counts, V)
        # A filler is one of the lowest ids, and required ids may take the place of one.
        if required <= counts.keys() or not required:
            mapping = build_mapping(tensor, size, required)
            assert torch.equal(mapping.d2t, d2t)
            assert torch.equal(mapping.t2d, t2d)

    @calm
    @given(count_dicts, st.randoms(), st.integers(3, V))
    def test_the_order_in_which_tokens_were_counted_does_not_matter(
        self, counts: dict[int, int], source: random.Random, size: int
    ) -> None:
        items = list(counts.items())
        source.shuffle(items)
        first, second = counts_from_dict(counts, V), counts_from_dict(dict(items), V)
        assert torch.equal(first, second)
        assert torch.equal(build_mapping(first, size, ()).d2t, build_mapping(second, size, ()).d2t)

    @calm
    @given(count_dicts, st.integers(3, V))
    def test_no_choice_of_the_same_size_covers_more(
        self, counts: dict[int, int], size: int
    ) -> None:
        tensor = counts_from_dict(counts, V)
        best = sum(sorted(counts.values(), reverse=True)[:size]) / sum(counts.values())
        assert coverage(tensor, build_mapping(tensor, size, ())) == pytest.approx(best)

    def test_at_the_real_size_it_takes_a_moment_and_covers_what_occurs(self) -> None:
        counts = torch.zeros(KIMI_VOCAB, dtype=torch.int64)
        generator = torch.Generator().manual_seed(0)
        counts[torch.randperm(KIMI_VOCAB, generator=generator)[:1200]] = 3
        mapping = build_mapping(counts, KIMI_DRAFT, range(163_584, KIMI_VOCAB))
        assert coverage(counts, mapping) == 1.0
        assert mapping.draft_vocab_size == KIMI_DRAFT


class TestRefusedToBuild:
    @pytest.mark.parametrize("kind", ["array", "list", "int32", "float", "matrix", "negative"])
    def test_b40_anything_but_an_int64_tensor_of_counts(self, kind: str) -> None:
        counts = torch.ones(V, dtype=torch.int64)
        wrong = {
            "array": numpy.ones(V, dtype=numpy.int64),
            "list": [1] * V,
            "int32": counts.int(),
            "float": counts.float(),
            "matrix": counts.reshape(8, 8),
            "negative": -counts,
        }[kind]
        with pytest.raises(MappingInvalid, match="int64 tensor of shape"):
            build_mapping(wrong, 8, ())

    def test_b40_a_tensor_is_never_read_as_a_dict_nor_a_dict_as_a_tensor(self) -> None:
        counts = torch.zeros(2048, dtype=torch.int64)
        counts[torch.arange(0, 1500, 100)] = 7
        ours = build_mapping(counts, 400, ())
        assert coverage(counts, ours) == 1.0
        # Upstream takes the same tensor without an error; its ids are the counts' values.
        d2t, _ = build_vocab_mappings_from_distribution(counts, 400, 2048)
        assert not torch.equal(d2t, ours.d2t)
        with pytest.raises(MappingInvalid, match="mapping of token id to count"):
            counts_from_dict(counts, 2048)
        with pytest.raises(MappingInvalid, match="found dict"):
            build_mapping({5: 1}, 8, ())

    @pytest.mark.parametrize(
        ("counts", "found"),
        [
            ({"5": 1}, "str to int"),
            ({5: "1"}, "int to str"),
            ({5: 1.5}, "int to float"),
            ({5.0: 1}, "float to int"),
            ({5: True}, "int to bool"),
            ({5: None}, "int to NoneType"),
            ({5: torch.tensor(3)}, "int to Tensor"),
            ({torch.tensor(5): 3}, "Tensor to int"),
            ({5: torch.ones(3)}, "int to Tensor"),
            ({5: numpy.int64(3)}, "int to int64"),
            ({5: -1}, "found -1"),
            ({5: 2**63}, f"found {2**63}"),
        ],
    )
    def test_b40_a_dict_of_anything_but_whole_numbers(
        self, counts: dict[Any, Any], found: str
    ) -> None:
        with pytest.raises(MappingInvalid, match="token counts") as caught:
            counts_from_dict(counts, V)
        assert found in str(caught.value)

    def test_b43_a_row_with_an_id_past_the_last_row_of_lm_head(self) -> None:
        ids, mask = torch.tensor([3, V]), torch.ones(2, dtype=torch.int64)
        row = TokenRow(row="0", input_ids=ids, loss_mask=mask)
        with pytest.raises(MappingInvalid, match=r"ids from 0 to 63.*found 64"):
            supervised_counts([row], V)
        masked = TokenRow(row="0", input_ids=ids, loss_mask=torch.tensor([1, 0]))
        assert counts_to_dict(supervised_counts([masked], V)) == {3: 1}

    def test_b42_a_draft_vocabulary_larger_than_the_verifiers_names_both(self) -> None:
        with pytest.raises(ConfigError) as caught:
            build_mapping(counts_of(i5=1), 100, ())
        assert "at most 64" in str(caught.value)
        assert "found 100" in str(caught.value)

    def test_one_too_small_for_the_special_ids_names_both(self) -> None:
        with pytest.raises(ConfigError, match=r"at least 3.*found 2"):
            build_mapping(counts_of(i5=1), 2, REQUIRED)

    def test_no_supervised_token_at_all(self) -> None:
        with pytest.raises(MappingInvalid, match="loss masks"):
            build_mapping(torch.zeros(V, dtype=torch.int64), 8, REQUIRED)


class TestB46WrongConventions:
    """Every one of these is accepted by upstream's loader."""

    right = mapping_of([2, 5, 9, 40])

    def test_absolute_ids_are_called_by_their_name(self) -> None:
        ids = self.right.draft_ids
        assert "(I1)" in (told := refusal(Mapping(t2d=self.right.t2d, d2t=ids)))
        assert "absolute ids" in told

    def test_unsorted(self) -> None:
        d2t = torch.tensor([9, 4, 0, 37])
        told = refusal(Mapping(t2d=self.right.t2d, d2t=d2t))
        assert "(I1)" in told
        assert "9 then 5, at draft ids 0 and 1" in told

    def test_repeated(self) -> None:
        told = refusal(Mapping(t2d=self.right.t2d, d2t=torch.tensor([2, 1, 1, 37])))
        assert "2 then 2" in told

    def test_zeros(self) -> None:
        told = refusal(Mapping(t2d=self.right.t2d, d2t=torch.zeros(4, dtype=torch.int64)))
        assert "(I3)" in told
        assert "2 where draft id 0 stands for 0" in told

    def test_float(self) -> None:
        assert "(I4)" in refusal(Mapping(t2d=self.right.t2d, d2t=self.right.d2t.float()))

    def test_int32(self) -> None:
        assert "(I4)" in refusal(Mapping(t2d=self.right.t2d, d2t=self.right.d2t.int()))

    @pytest.mark.parametrize("fill", [-100, -1])
    def test_negative(self, fill: int) -> None:
        d2t = torch.full((4,), fill)
        assert "(I2)" in (told := refusal(Mapping(t2d=self.right.t2d, d2t=d2t)))
        assert f"ids from {fill}" in told

    def test_past_the_end(self) -> None:
        d2t = torch.tensor([2, 4, 7, V])
        assert "(I2)" in refusal(Mapping(t2d=self.right.t2d, d2t=d2t))

    def test_t2d_as_integers(self) -> None:
        assert "(I4)" in refusal(Mapping(t2d=self.right.t2d.long(), d2t=self.right.d2t))

    def test_t2d_of_another_verifier(self) -> None:
        other = mapping_of([2, 5, 9, 40], vocab_size=V + 16)
        assert "shape [64]" in refusal(other)

    def test_t2d_with_one_too_many(self) -> None:
        t2d = self.right.t2d.clone()
        t2d[63] = True
        assert "(I5)" in refusal(Mapping(t2d=t2d, d2t=self.right.d2t))

    def test_t2d_of_another_mapping(self) -> None:
        assert "(I3)" in refusal(Mapping(t2d=mapping_of([2, 5, 9, 41]).t2d, d2t=self.right.d2t))

    def test_the_two_swapped(self) -> None:
        assert "(I4)" in refusal(Mapping(t2d=self.right.d2t, d2t=self.right.t2d))

    def test_a_special_id_left_out(self) -> None:
        assert "none of [0, 1]" in refusal(self.right, required=REQUIRED)

    def test_refused_on_write_and_on_read(self) -> None:
        absolute = Mapping(t2d=self.right.t2d, d2t=self.right.draft_ids)
        with pytest.raises(MappingInvalid):
            encode(absolute, required_ids=())
        data = save({"t2d": absolute.t2d, "d2t": absolute.d2t})
        with pytest.raises(MappingInvalid, match=r"s3://x/mapping.*absolute"):
            decode(data, "s3://x/mapping", vocab_size=V, required_ids=())

    @calm
    @given(
        st.lists(st.integers(-9, 9), min_size=1, max_size=5),
        st.lists(st.booleans(), min_size=8, max_size=8),
        st.sets(st.integers(0, 7), max_size=2),
    )
    @example([0, 0, 0], [True] * 3 + [False] * 5, set())
    @example([1, 1, 1], [False, True, True, True] + [False] * 4, {2})
    def test_exactly_what_keeps_the_invariants_is_written_and_read(
        self, d2t: list[int], t2d: list[bool], required: set[int]
    ) -> None:
        mapping = Mapping(t2d=torch.tensor(t2d), d2t=torch.tensor(d2t))
        ids, told = (
            [i + offset for i, offset in enumerate(d2t)],
            [*itertools.compress(range(8), t2d)],
        )
        right = ids == sorted(set(ids)) == told and required <= set(told)
        data = save({"t2d": mapping.t2d, "d2t": mapping.d2t})
        if right:
            assert encode(mapping, required_ids=required) == data
            found = decode(data, "mapping", vocab_size=8, required_ids=required)
            assert torch.equal(found.draft_ids, torch.tensor(told))
            return
        with pytest.raises(MappingInvalid, match=r"\(I[1-5]\)"):
            encode(mapping, required_ids=required)
        with pytest.raises(MappingInvalid, match=r"mapping: .*\(I[1-5]\)"):
            decode(data, "mapping", vocab_size=8, required_ids=required)

    @calm
    @given(st.data())
    def test_any_other_offset_is_noticed(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, 3))
        wrong = data.draw(st.integers(-V, V).filter(lambda v: v != int(self.right.d2t[at])))
        d2t = self.right.d2t.clone()
        d2t[at] = wrong
        refusal(Mapping(t2d=self.right.t2d, d2t=d2t))


class TestBytes:
    @pytest.mark.parametrize("cut", [0, 4, 9, -1])
    def test_a_truncated_mapping_is_refused(self, cut: int) -> None:
        data = encode(mapping_of([2, 5]), required_ids=())
        with pytest.raises(MappingInvalid, match="a safetensors file"):
            decode(data[:cut], "mapping", vocab_size=V, required_ids=())

    def test_other_tensors_are_refused_by_name(self) -> None:
        with pytest.raises(MappingInvalid, match="t2d_mask"):
            decode(save({"t2d_mask": torch.ones(2)}), "mapping", vocab_size=V, required_ids=())

    @calm
    @given(count_dicts)
    def test_counts_survive_as_dict_and_as_bytes(self, counts: dict[int, int]) -> None:
        tensor = counts_from_dict(counts, V)
        assert counts_to_dict(tensor) == counts
        assert torch.equal(decode_counts(encode_counts(tensor), "counts", vocab_size=V), tensor)

    def test_b43_counts_of_another_vocabulary_size_name_both(self) -> None:
        data = encode_counts(torch.ones(V - 3, dtype=torch.int64))
        with pytest.raises(MappingInvalid, match=r"64 counts.*found 61"):
            decode_counts(data, "counts", vocab_size=V)

    def test_b43_an_id_past_the_last_row_of_lm_head(self) -> None:
        with pytest.raises(MappingInvalid, match="ids from 0 to 63"):
            counts_from_dict({V: 1}, V)

    def test_the_hash_is_of_the_tensors(self) -> None:
        first, second = mapping_of([2, 5, 9]), mapping_of([2, 5, 10])
        assert mapping_sha256(first) == mapping_sha256(mapping_of([2, 5, 9]))
        assert mapping_sha256(first) != mapping_sha256(second)
        assert mapping_sha256(first) != mapping_sha256(mapping_of([2, 5, 9], V + 1))


class TestArtifact:
    """Only what a manifest names by hash is ever used."""

    def artifact(self, root: Path, path: str, data: bytes, **fields: Any) -> Artifact:
        store = open_store(str(root))
        files = (artifacts.put(store, path, data),)
        manifest = Manifest(artifact="vocab", identity="", files=files, **fields)
        return Artifact(store=store, manifest=manifest)

    def test_b118_a_mapping_that_the_manifest_does_not_name_is_refused(self, tmp_path) -> None:
        named, lying = mapping_of([2, 5]), mapping_of([2, 6])
        facts = {"mapping_sha256": mapping_sha256(named)}
        data = encode(lying, required_ids=())
        artifact = self.artifact(tmp_path / "one", MAPPING_NAME, data, facts=facts)
        with pytest.raises(MappingInvalid, match=mapping_sha256(named)):
            load_mapping(artifact, vocab_size=V, required_ids=())
        data = encode(named, required_ids=())
        artifact = self.artifact(tmp_path / "two", MAPPING_NAME, data, facts=facts)
        (tmp_path / "two" / "t2d.npy").write_bytes(b"of another run")
        assert torch.equal(load_mapping(artifact, vocab_size=V, required_ids=()).d2t, named.d2t)
        (tmp_path / "two" / MAPPING_NAME).write_bytes(encode(lying, required_ids=()))
        with pytest.raises(ManifestInvalid, match="other bytes"):
            load_mapping(artifact, vocab_size=V, required_ids=())

    def test_b48_counts_that_the_rows_manifest_does_not_name_are_refused(self, tmp_path) -> None:
        counts = encode_counts(counts_of(i5=1))
        artifact = self.artifact(tmp_path, "other.safetensors", counts)
        (tmp_path / COUNTS_NAME).write_bytes(counts)
        with pytest.raises(ManifestInvalid, match="an object that the manifest names"):
            load_counts(artifact, vocab_size=V)
