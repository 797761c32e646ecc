"""The draft's vocabulary: which tokens it can propose, and how its ids map to the verifier's.

Two tensors say it, in the convention of speculators and vLLM (V rows of the verifier's lm_head,
D tokens of the draft):

* `t2d` bool [V]: whether the draft has this token.
* `d2t` int64 [D]: *offsets*: draft id i stands for the verifier's id `i + d2t[i]`.

A mapping in another convention loads without an error everywhere else and makes every draft id
mean another token. So these hold on every write and every read:

* I1  ids = arange(D) + d2t are strictly increasing
* I2  every id is in [0, V)
* I3  t2d is true at exactly these ids
* I4  d2t is int64 of shape (D,), t2d is bool of shape (V,)
* I5  t2d has D true entries, and every special and stop id is among them

Counts are an int64 tensor [V] throughout. This is the only module that changes between that and
a dict of token id -> count: upstream's builder, given a tensor, returns nonsense in silence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from collections.abc import Mapping as MappingType
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from eagle3.artifact import Artifact
from eagle3.errors import ConfigError, MappingInvalid
from eagle3.shards import TokenRow

MAPPING_NAME = "mapping.safetensors"
COUNTS_NAME = "token_counts.safetensors"
_COUNTS_KEY = "counts"
_MOST = torch.iinfo(torch.int64).max


@dataclass(frozen=True, kw_only=True)
class Mapping:
    """t2d bool [V] and d2t int64 [D], as the module's docstring has them."""

    t2d: torch.Tensor
    d2t: torch.Tensor

    @property
    def draft_ids(self) -> torch.Tensor:
        """int64 [D]: the verifier's id of each draft id."""
        return torch.arange(self.d2t.numel(), dtype=torch.int64) + self.d2t

    @property
    def draft_vocab_size(self) -> int:
        """D."""
        return int(self.d2t.numel())


def counts_from_dict(counts: MappingType[int, int], vocab_size: int) -> torch.Tensor:
    """Token id -> count as an int64 tensor [vocab_size].

    Raises MappingInvalid for anything but a mapping of whole numbers, for an id outside the
    vocabulary and for a count that is negative or too large.
    """
    if not isinstance(counts, MappingType):
        raise MappingInvalid(
            "token counts",
            wanted="a mapping of token id to count",
            found=type(counts).__name__,
            remedy="pass a tensor to build_mapping itself",
        )
    tensor = torch.zeros(vocab_size, dtype=torch.int64)
    for token_id, count in counts.items():
        # A fraction would be cut to a whole number, and a 0-dimensional tensor taken as one.
        if type(token_id) is not int or type(count) is not int:
            raise MappingInvalid(
                "token counts",
                wanted="int to int",
                found=f"{type(token_id).__name__} to {type(count).__name__}",
                remedy="convert whole numbers to int, and count again what is none",
            )
        _check_id(token_id, vocab_size)
        if not 0 <= count <= _MOST:
            raise MappingInvalid(
                f"token counts: {token_id}",
                wanted="a count from 0 to 2**63 - 1",
                found=count,
                remedy="count again",
            )
        tensor[token_id] = count
    return tensor


def supervised_counts(rows: Iterable[TokenRow], vocab_size: int) -> torch.Tensor:
    """int64 [V]: how often each token is supervised in these rows.

    Raises MappingInvalid for an id outside the vocabulary.
    """
    none = torch.zeros(0, dtype=torch.int64)
    rows = list(rows)
    ids = torch.cat([none, *(row.input_ids for row in rows)])
    mask = torch.cat([none, *(row.loss_mask for row in rows)])
    counts = torch.bincount(ids[mask == 1], minlength=vocab_size)
    _check_id(counts.numel() - 1, vocab_size)
    return counts


def counts_to_dict(counts: torch.Tensor) -> dict[int, int]:
    """The tokens that occur, token id -> count, ascending."""
    check_counts(counts)
    ids = counts.nonzero().flatten()
    return dict(zip(ids.tolist(), counts[ids].tolist(), strict=True))


def encode_counts(counts: torch.Tensor) -> bytes:
    """Counts int64 [V] as the bytes of `token_counts.safetensors`."""
    check_counts(counts)
    return save({_COUNTS_KEY: counts})


def decode_counts(data: bytes, where: str, *, vocab_size: int) -> torch.Tensor:
    """Counts int64 [V] from bytes; `where` names them in an error. Raises MappingInvalid."""
    counts = _decoded(data, where, (_COUNTS_KEY,))[_COUNTS_KEY]
    check_counts(counts)
    if counts.numel() != vocab_size:
        raise MappingInvalid(
            where,
            wanted=f"{vocab_size} counts, the rows of the verifier's lm_head",
            found=counts.numel(),
            remedy="take the rows and the verifier from the same run",
        )
    return counts


def check_size(draft_vocab_size: int, vocab_size: int, num_required: int) -> None:
    """D must hold the special and stop ids and be no more than V. Raises ConfigError."""
    least = max(1, num_required)
    if draft_vocab_size > vocab_size:
        raise ConfigError(
            "vocab.draft_vocab_size",
            wanted=f"at most {vocab_size}, the verifier's vocabulary",
            found=draft_vocab_size,
            remedy="lower it",
        )
    if draft_vocab_size < least:
        raise ConfigError(
            "vocab.draft_vocab_size",
            wanted=f"at least {least}, the special and stop ids",
            found=draft_vocab_size,
            remedy="raise it",
        )


def by_preference(counts: torch.Tensor, required_ids: Iterable[int]) -> torch.Tensor:
    """Every id, int64 [V], in the order in which a vocabulary takes them.

    The required ids come first, then the most frequent, ties to the lower id. Raises
    MappingInvalid for counts that are no counts.
    """
    check_counts(counts)
    preferred = counts.clone()
    preferred[sorted(set(required_ids))] = _MOST
    return torch.argsort(preferred, descending=True, stable=True)


def build_mapping(
    counts: torch.Tensor, draft_vocab_size: int, required_ids: Iterable[int]
) -> Mapping:
    """The required ids and the most frequent tokens, ties to the lower id.

    Args:
        counts: supervised tokens by id, int64 [V].
        draft_vocab_size: D.
        required_ids: special and stop ids, whose absence would keep the draft from ever
            proposing the end of an answer.

    Raises ConfigError where D does not fit between the required ids and V, MappingInvalid for
    counts that are no counts.
    """
    check_counts(counts)
    vocab_size, required = int(counts.numel()), sorted(set(required_ids))
    check_size(draft_vocab_size, vocab_size, len(required))
    if not counts.any():
        raise MappingInvalid(
            "token counts",
            wanted="supervised tokens",
            found="none in any row",
            remedy="look at the loss masks that prepare wrote",
        )
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[by_preference(counts, required)[:draft_vocab_size]] = True
    ids = t2d.nonzero().flatten()
    mapping = Mapping(t2d=t2d, d2t=ids - torch.arange(draft_vocab_size, dtype=torch.int64))
    check_mapping(mapping, vocab_size=vocab_size, required_ids=required)
    return mapping


def check_mapping(
    mapping: Mapping, *, vocab_size: int, required_ids: Iterable[int], where: str = "mapping"
) -> None:
    """The invariants I1 to I5. Raises MappingInvalid naming the first that does not hold."""
    _check_types(mapping, vocab_size, where)
    _check_ids(mapping, vocab_size, where)
    t2d, ids = mapping.t2d, mapping.draft_ids
    told = t2d.nonzero().flatten()
    if told.numel() != ids.numel():
        wanted = f"{ids.numel()} true entries, as many as d2t has"
        raise _broken(f"{where}: t2d (I5)", wanted, told.numel())
    if not torch.equal(told, ids):
        at = int((told != ids).nonzero()[0])
        found = f"{int(told[at])} where draft id {at} stands for {int(ids[at])}"
        raise _broken(f"{where}: t2d (I3)", "true at exactly the ids i + d2t[i]", found)
    missing = [i for i in sorted(set(required_ids)) if not (0 <= i < vocab_size and bool(t2d[i]))]
    if missing:
        raise _broken(f"{where}: t2d (I5)", "every special and stop id", f"none of {missing[:5]}")


def _check_types(mapping: Mapping, vocab_size: int, where: str) -> None:
    """I4."""
    t2d, d2t = mapping.t2d, mapping.d2t
    if d2t.dtype != torch.int64 or d2t.dim() != 1 or not d2t.numel():
        found = f"{d2t.dtype} of shape {list(d2t.shape)}"
        raise _broken(f"{where}: d2t (I4)", "int64 of shape (D,)", found)
    if t2d.dtype != torch.bool or list(t2d.shape) != [vocab_size]:
        found = f"{t2d.dtype} of shape {list(t2d.shape)}"
        raise _broken(f"{where}: t2d (I4)", f"bool of shape [{vocab_size}]", found)


def _check_ids(mapping: Mapping, vocab_size: int, where: str) -> None:
    """I1 and I2. Absolute ids, the usual mistake, are called by their name."""
    ids, told = mapping.draft_ids, mapping.t2d.nonzero().flatten()
    if torch.equal(mapping.d2t, told) and not torch.equal(ids, told):
        raise _broken(f"{where}: d2t (I1)", "offsets, so that id = i + d2t[i]", "absolute ids")
    falls = (ids[1:] <= ids[:-1]).nonzero().flatten()
    if falls.numel():
        at = int(falls[0])
        found = f"{int(ids[at])} then {int(ids[at + 1])}, at draft ids {at} and {at + 1}"
        raise _broken(f"{where}: d2t (I1)", "strictly increasing ids i + d2t[i]", found)
    if int(ids[0]) < 0 or int(ids[-1]) >= vocab_size:
        found = f"ids from {int(ids[0])} to {int(ids[-1])}"
        raise _broken(f"{where}: d2t (I2)", f"ids from 0 to {vocab_size - 1}", found)


def encode(mapping: Mapping, *, required_ids: Iterable[int]) -> bytes:
    """The mapping as the bytes of `mapping.safetensors`, checked. The same mapping, same bytes."""
    check_mapping(mapping, vocab_size=int(mapping.t2d.numel()), required_ids=required_ids)
    return save({"t2d": mapping.t2d, "d2t": mapping.d2t})


def decode(data: bytes, where: str, *, vocab_size: int, required_ids: Iterable[int]) -> Mapping:
    """A mapping from bytes, checked; `where` names it in an error. Raises MappingInvalid."""
    tensors = _decoded(data, where, ("d2t", "t2d"))
    mapping = Mapping(t2d=tensors["t2d"], d2t=tensors["d2t"])
    check_mapping(mapping, vocab_size=vocab_size, required_ids=required_ids, where=where)
    return mapping


def mapping_sha256(mapping: Mapping) -> str:
    """Hash of the two tensors, whatever file they lie in."""
    digest = hashlib.sha256()
    for tensor in (mapping.t2d.to(torch.uint8), mapping.d2t):
        digest.update(f"{list(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def load_mapping(artifact: Artifact, *, vocab_size: int, required_ids: Iterable[int]) -> Mapping:
    """The mapping of a committed `vocab/` artefact: the one its manifest names by hash, no other.

    Raises ManifestInvalid, MappingInvalid.
    """
    where = f"{artifact.store.url}/{MAPPING_NAME}"
    data = artifact.read(MAPPING_NAME)
    mapping = decode(data, where, vocab_size=vocab_size, required_ids=required_ids)
    wanted, found = artifact.manifest.facts.get("mapping_sha256"), mapping_sha256(mapping)
    if found != wanted:
        raise _broken(where, f"the mapping {wanted} of its manifest", found)
    return mapping


def load_counts(artifact: Artifact, *, vocab_size: int) -> torch.Tensor:
    """The token counts of a committed artefact of rows, int64 [V].

    They must be of all its rows, which are the ones that extract reads. Raises ManifestInvalid,
    MappingInvalid.
    """
    where = f"{artifact.store.url}/{COUNTS_NAME}"
    counts = decode_counts(artifact.read(COUNTS_NAME), where, vocab_size=vocab_size)
    wanted, found = artifact.manifest.facts.get("supervised_tokens"), int(counts.sum())
    if found != wanted:
        raise _broken(where, f"the {wanted} supervised tokens that its manifest says", found)
    return counts


def _check_id(token_id: int, vocab_size: int) -> None:
    if not 0 <= token_id < vocab_size:
        raise MappingInvalid(
            "token counts",
            wanted=f"ids from 0 to {vocab_size - 1}, the rows of lm_head",
            found=token_id,
            remedy="count with the verifier's own tokenizer",
        )


def check_counts(counts: torch.Tensor) -> None:
    """Counts are an int64 tensor [V], none below 0. Raises MappingInvalid for anything else."""
    if not isinstance(counts, torch.Tensor):
        found = type(counts).__name__
    elif counts.dtype != torch.int64 or counts.dim() != 1:
        found = f"{counts.dtype} of shape {list(counts.shape)}"
    elif counts.numel() and int(counts.min()) < 0:
        found = f"a count of {int(counts.min())}"
    else:
        return
    raise MappingInvalid(
        "token counts",
        wanted="an int64 tensor of shape (V,), none negative",
        found=found,
        remedy="convert a dict with counts_from_dict",
    )


def _decoded(data: bytes, where: str, names: tuple[str, ...]) -> dict[str, torch.Tensor]:
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise _broken(where, "a safetensors file", error) from error
    if sorted(tensors) != sorted(names):
        found = ", ".join(sorted(tensors)) or "none"
        raise _broken(where, f"the tensors {' and '.join(names)}", found)
    return tensors


def _broken(field: str, wanted: str, found: object) -> MappingInvalid:
    return MappingInvalid(
        field,
        wanted=wanted,
        found=found,
        remedy="run the stage that wrote it again under a prefix of its own",
    )
