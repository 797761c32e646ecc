"""Shards: what is written comes back, one row costs one ranged read, and damage never passes."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from eagle3.errors import IdentityConflict, ShardInvalid
from eagle3.shards import (
    Sample,
    ShardReader,
    TokenRow,
    encode_rows,
    encode_samples,
    header_of,
    read_rows,
    read_sample,
)
from eagle3.store import Store, open_store


def token_row(row: str, ids: list[int], supervised: int = 1) -> TokenRow:
    mask = [0] * (len(ids) - supervised) + [1] * supervised
    return TokenRow(row=row, input_ids=torch.tensor(ids), loss_mask=torch.tensor(mask))


def sample(row: str, tokens: int, layers: int = 4, hidden: int = 8, seed: int = 0) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    return Sample(
        row=row,
        input_ids=torch.arange(tokens),
        loss_mask=torch.tensor([0] * (tokens - 1) + [1]),
        hidden_states=torch.randn(tokens, layers, hidden, generator=generator).bfloat16(),
    )


def samples_of(*lengths: int) -> list[Sample]:
    return [sample(f"{i:09d}.0", length, seed=i) for i, length in enumerate(lengths)]


def store_with(tmp_path: Path, data: bytes) -> Store:
    store = open_store(str(tmp_path))
    store.write_bytes("a.safetensors", data)
    return store


token_rows = st.lists(
    st.lists(st.integers(0, 2**40), min_size=1, max_size=12).flatmap(
        lambda ids: st.integers(1, len(ids)).map(lambda n: (ids, n))
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=60, deadline=None)
@given(rows=token_rows)
def test_token_rows_survive_the_round_trip(rows: list[tuple[list[int], int]]) -> None:
    store = open_store("memory://shards-round-trip")
    written = [token_row(f"{i:09d}.0", ids, n) for i, (ids, n) in enumerate(rows)]
    store.write_bytes("a", encode_rows(written))
    found = read_rows(store, "a")
    assert [row.row for row in found] == [row.row for row in written]
    for one, other in zip(found, written, strict=True):
        assert torch.equal(one.input_ids, other.input_ids)
        assert torch.equal(one.loss_mask, other.loss_mask)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    layers=st.integers(1, 5),
    hidden=st.sampled_from([4, 8, 12]),
)
def test_samples_survive_the_round_trip_bit_for_bit(
    lengths: list[int], layers: int, hidden: int
) -> None:
    store = open_store("memory://shards-samples")
    written = [sample(f"{i:09d}.1", n, layers, hidden, seed=i) for i, n in enumerate(lengths)]
    store.write_bytes("a", encode_samples(written))
    reader = ShardReader(store, "a")
    refs = reader.refs()
    assert [(ref.row, ref.num_tokens) for ref in refs] == [
        (s.row, len(s.input_ids)) for s in written
    ]
    for ref, original in reversed(list(zip(refs, written, strict=True))):
        found = reader.read(ref, finite=True)
        assert torch.equal(found.input_ids, original.input_ids)
        assert torch.equal(found.loss_mask, original.loss_mask)
        assert torch.equal(
            found.hidden_states.view(torch.int16), original.hidden_states.view(torch.int16)
        )


def test_safetensors_itself_opens_a_shard(tmp_path: Path) -> None:
    written = samples_of(3, 1, 7)
    path = tmp_path / "a.safetensors"
    path.write_bytes(encode_samples(written))
    with safe_open(path, framework="pt") as opened:
        assert len(list(opened.keys())) == 9
        for one in written:
            assert torch.equal(opened.get_tensor(f"{one.row}/input_ids"), one.input_ids)
            assert torch.equal(opened.get_tensor(f"{one.row}/loss_mask"), one.loss_mask)
            assert torch.equal(opened.get_tensor(f"{one.row}/hidden_states"), one.hidden_states)


def test_the_same_rows_give_the_same_bytes() -> None:
    assert encode_samples(samples_of(2, 5)) == encode_samples(samples_of(2, 5))
    assert encode_samples(samples_of(2, 5)) != encode_samples(samples_of(2, 6))


def test_a_shard_names_the_identity_of_its_unit_and_hides_it_from_its_rows(tmp_path: Path) -> None:
    written = samples_of(3, 1)
    data = encode_samples(written, identity="a" * 64)
    store = store_with(tmp_path, data)
    assert header_of(data, "a").identity == "a" * 64
    assert header_of(encode_samples(written), "a").identity == ""
    reader = ShardReader(store, "a.safetensors")
    assert [ref.row for ref in reader.refs(identity="a" * 64)] == [one.row for one in written]
    with pytest.raises(
        IdentityConflict, match=r"a\.safetensors: wanted .*b{16}.*found one of a{16}"
    ):
        reader.refs(identity="b" * 64)
    with safe_open(tmp_path / "a.safetensors", framework="pt") as opened:
        assert len(list(opened.keys())) == 6


def test_a_shard_that_names_no_identity_may_be_read_and_is_never_adopted(tmp_path: Path) -> None:
    data = encode_rows([token_row("a", [1, 2])])
    store = store_with(tmp_path, data)
    assert ShardReader(store, "a.safetensors").refs(identity="b" * 64)
    with pytest.raises(IdentityConflict, match="or of an older eagle3"):
        header_of(data, "a").refuse_other("b" * 64, "a")


def test_one_row_costs_one_ranged_read_of_its_bytes(tmp_path: Path) -> None:
    class Counting(Store):
        def read_range(self, path: str, start: int, end: int) -> bytes:
            asked.append(end - start)
            return super().read_range(path, start, end)

    asked: list[int] = []
    store_with(tmp_path, encode_samples(samples_of(4, 6, 3)))
    reader = ShardReader(Counting(str(tmp_path)), "a.safetensors")
    refs = reader.refs()
    assert len(asked) == 1
    reader.read(refs[1])
    assert asked[1:] == [6 * (8 + 8 + 4 * 8 * 2)]


def test_a_header_longer_than_the_first_read_is_read_whole(tmp_path: Path) -> None:
    rows = [token_row(f"{i:09d}.0", [i, i]) for i in range(1000)]
    store = store_with(tmp_path, encode_rows(rows))
    assert len(ShardReader(store, "a.safetensors").refs()) == 1000


def test_readers_and_refs_can_be_pickled_into_a_worker(tmp_path: Path) -> None:
    store = store_with(tmp_path, encode_samples(samples_of(4, 6)))
    reader = ShardReader(store, "a.safetensors")
    again, refs = pickle.loads(pickle.dumps((reader, reader.refs())))
    assert torch.equal(again.read(refs[1]).input_ids, torch.arange(6))


@pytest.mark.parametrize("place", ["first", "middle", "last"])
@pytest.mark.fault("B111")
def test_a_flipped_bit_is_found_on_read(tmp_path: Path, place: str) -> None:
    data = bytearray(encode_samples(samples_of(4)))
    start = len(data) - 4 * (8 + 8 + 64)
    at = {"first": start, "middle": start + 100, "last": len(data) - 1}[place]
    data[at] ^= 1
    store = store_with(tmp_path, bytes(data))
    ref = ShardReader(store, "a.safetensors").refs()[0]
    with pytest.raises(ShardInvalid, match="CRC-32"):
        read_sample(store, ref)
    with pytest.raises(ShardInvalid, match="CRC-32"):
        read_rows(store, "a.safetensors")


@pytest.mark.parametrize("keep", [0, 4, 9, 200, -1])
@pytest.mark.fault("B111")
def test_a_cut_object_is_refused(tmp_path: Path, keep: int) -> None:
    data = encode_samples(samples_of(4, 4))
    store = store_with(tmp_path, data[:keep])
    with pytest.raises(ShardInvalid):
        read_rows(store, "a.safetensors")
    with pytest.raises(ShardInvalid):
        _read_each(store, "a.safetensors")


def test_bytes_beyond_the_last_row_are_refused(tmp_path: Path) -> None:
    store = store_with(tmp_path, encode_rows([token_row("a", [1])]) + b"\0")
    with pytest.raises(ShardInvalid, match="bytes, as its header says"):
        read_rows(store, "a.safetensors")


def _read_each(store: Store, path: str) -> list[Sample]:
    return [read_sample(store, ref) for ref in ShardReader(store, path).refs()]


def edited(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) >= 1
    assert len(old) == len(new)
    return data.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"I64"', b'"F64"'),
        (b'"BF16"', b'"F16" '),
        (b'"shape":[4]', b'"shape":[5]'),
        (b"/loss_mask", b"/loss_musk"),
        (b'"data_offsets":[32,64]', b'"data_offsets":[40,72]'),
        (b'"__metadata__"', b'"__metadatb__"'),
    ],
)
def test_a_header_that_contradicts_itself_is_refused(
    tmp_path: Path, old: bytes, new: bytes
) -> None:
    store = store_with(tmp_path, edited(encode_samples(samples_of(4)), old, new))
    with pytest.raises(ShardInvalid):
        ShardReader(store, "a.safetensors").refs()


def without_mask(row: TokenRow) -> TokenRow:
    return TokenRow(row=row.row, input_ids=row.input_ids, loss_mask=torch.zeros_like(row.loss_mask))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda r: without_mask(r), "at least one 1"),
        (lambda r: TokenRow(row="a", input_ids=r.input_ids[:1], loss_mask=r.loss_mask), "ids"),
        (
            lambda r: TokenRow(row="a", input_ids=r.input_ids.int(), loss_mask=r.loss_mask),
            "int64",
        ),
        (lambda r: TokenRow(row="a", input_ids=-r.input_ids, loss_mask=r.loss_mask), "from 0"),
        (lambda r: TokenRow(row="a", input_ids=r.input_ids, loss_mask=r.loss_mask * 2), "0 and 1"),
    ],
)
def test_a_wrong_row_is_never_written(spoil: Callable[[TokenRow], TokenRow], named: str) -> None:
    with pytest.raises(ShardInvalid, match=named):
        encode_rows([spoil(token_row("a", [3, 4, 5]))])


def test_hidden_states_of_another_type_or_length_are_never_written() -> None:
    good = sample("a", 3)
    for states in (good.hidden_states.half(), good.hidden_states[:2], good.hidden_states[:, 0]):
        with pytest.raises(ShardInvalid, match="bfloat16"):
            encode_samples(
                [
                    Sample(
                        row="a",
                        input_ids=good.input_ids,
                        loss_mask=good.loss_mask,
                        hidden_states=states,
                    )
                ]
            )


def test_two_rows_of_one_name_and_an_empty_shard_are_refused() -> None:
    with pytest.raises(ShardInvalid, match="row name"):
        encode_rows([token_row("a", [1]), token_row("a", [2])])
    with pytest.raises(ShardInvalid, match="at least one row"):
        encode_rows([])


def test_nan_is_found_when_asked_for(tmp_path: Path) -> None:
    spoiled = sample("a", 3)
    spoiled.hidden_states[1, 2, 3] = float("nan")
    store = store_with(tmp_path, encode_samples([spoiled]))
    reader = ShardReader(store, "a.safetensors")
    ref = reader.refs()[0]
    assert torch.isnan(reader.read(ref).hidden_states).any()
    with pytest.raises(ShardInvalid, match="finite"):
        reader.read(ref, finite=True)


def test_a_token_row_is_not_taken_for_a_sample(tmp_path: Path) -> None:
    store = store_with(tmp_path, encode_rows([token_row("a", [1, 2])]))
    reader = ShardReader(store, "a.safetensors")
    with pytest.raises(ShardInvalid, match="hidden states"):
        reader.read(reader.refs()[0])


def test_a_row_of_which_nothing_is_supervised_is_written_for_regenerate_and_never_trained_on(
    tmp_path: Path,
) -> None:
    ids = torch.tensor([5, 6, 7])
    row = TokenRow(row="0", input_ids=ids, loss_mask=torch.zeros_like(ids))
    with pytest.raises(ShardInvalid, match="with at least one 1"):
        encode_rows([row])
    store = open_store(str(tmp_path))
    store.create_bytes("a.safetensors", encode_rows([row], unanswered=True))
    assert [ref.num_tokens for ref in ShardReader(store, "a.safetensors").refs()] == [3]
    with pytest.raises(ShardInvalid, match="with at least one 1"):
        read_rows(store, "a.safetensors")
