"""What shows that imported states are this verifier's, and the last of them before its final norm.

Sizes and layer ids show neither: every fine-tune of a model has the same. No engine is here to ask,
so the states are held against what the verifier's norm and lm_head make of them, at a few positions
whose next id is supervised. Three things refuse a folder; each is proof, and right data shows none:

- Divided by the norm's weights, the last state has a root mean square of 1 everywhere. That is what
  the norm makes; before it the figure is another for every token.
- Another captured layer tells what follows, and the last one clearly less: an order of layers.
- The last state tells nothing of what follows, by an lm_head that was trained.

What cannot be shown so: of two verifiers with nearly the same norm and lm_head, such as a model and
a light fine-tune of it, whose states these are. And of random weights, which tests have, no more
than the first; a folder is let through then, and `measured` says that nothing was proven.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from eagle3.capture import Head
from eagle3.errors import CaptureInvalid
from eagle3.legacy.folder import OldFolder, OldRow

SAMPLES, POSITIONS = 16, 64
"""Samples looked at, and positions of each. Sixteen human chats gave 705 positions and 86 ids to
SmolLM2-135M, whose states told 0.916 of them; two chats gave 14 ids and 0.859. More would cost the
reading of more samples, of which one of a large verifier may be half a gigabyte."""

LEAST_IDS = 32
"""Fewer say too little: see `chance`, which is 0.65 for so many."""

TELLS = 0.7
"""What another layer must tell, at least, for the order to be wrong: four deviations from chance,
for `LEAST_IDS`. Of SmolLM2's layers the outputs of 1, 14, 26 and 29 told 0.60, 0.60, 0.81, 0.92."""

LAYER_MARGIN = 0.05
"""How much more than the last that layer must tell. In right order it told 0.04 (a tiny random
verifier's answers) to 0.11 less."""

NORMED_WITHIN = 0.01
"""How near to 1 the root mean square of normed states is, at all positions. SmolLM2's and a tiny
verifier's, in bfloat16, were within 0.0033; before the norm they were 11.8 to 39.9 and 10 to 23."""

LEAST_POSITIONS = 8

TRAINED_DIRECTION = 10.0
"""Above it an lm_head was trained: SmolLM2's has 22,028, random weights 1.0."""

_ROWS_AT_ONCE = 8192
# Standard deviation of a share that is anything from 0 to 1.
_UNIFORM = math.sqrt(1 / 12)


class Proof(NamedTuple):
    """What was found.

    Attributes:
        positions: judged.
        ids: different ones that follow at two of them or more.
        tells: see `tells`, by the last state; 0.5 is chance, and 1 the best there is.
        other_layer: the same by the other captured layer that has the most.
        least_scale, most_scale: root mean square of the last state, divided by the norm's weights.
        direction: see `direction`, of the verifier's lm_head.
    """

    positions: int
    ids: int
    tells: float
    other_layer: float
    least_scale: float
    most_scale: float
    direction: float

    @property
    def chance(self) -> float:
        """The most that chance tells: three deviations of as many shares as there are ids.

        SmolLM2's states told 0.48 to 0.51 to its lm_head in other bases, as another model's is,
        where this was 0.59, and 0.73 of a list of hashes; a tiny verifier's 0.50 to another's.
        """
        return 0.5 + 3 * _UNIFORM / math.sqrt(max(self.ids, 1))

    @property
    def proven(self) -> bool:
        """Whether the last state tells what follows, over enough ids for that to be no chance."""
        return self.ids >= LEAST_IDS and self.tells > self.chance

    def as_measured(self) -> dict[str, float]:
        """The same as a manifest's `measured` has it."""
        figures = {f"proof_{name}": float(value) for name, value in self._asdict().items()}
        return {"proof": float(self.proven), **figures}


def prove_states(old: OldFolder, head: Head) -> Proof:
    """Hold a folder's last states against the verifier's norm and lm_head.

    Reads up to `SAMPLES` samples. Raises CaptureInvalid for what the module names, ShardInvalid
    for a damaged sample.
    """
    states, following = _positions(_spread(old))
    found = measure(states, following, head)
    where = f"{old.store.url}: hidden_states"
    if (
        found.positions >= LEAST_POSITIONS
        and 1 - NORMED_WITHIN < found.least_scale <= found.most_scale < 1 + NORMED_WITHIN
    ):
        raise CaptureInvalid(
            where,
            wanted="last states as they enter the verifier's final norm",
            found=f"what leaves it: divided by its weights they have a root mean square of "
            f"{found.least_scale:.4f} to {found.most_scale:.4f} at {found.positions} positions",
            remedy="extract them again before the norm",
        )
    if found.ids < LEAST_IDS:
        return found
    if found.other_layer >= max(TELLS, found.tells + LAYER_MARGIN):
        raise CaptureInvalid(
            where,
            wanted="the last layer's states last, which tell best what follows",
            found=f"{found.tells:.2f} of 1 by the last, {found.other_layer:.2f} by another",
            remedy="see in which order they were captured, and extract them again",
        )
    if not found.proven and found.direction >= TRAINED_DIRECTION:
        raise CaptureInvalid(
            where,
            wanted="last states that tell this verifier's norm and lm_head what follows, above "
            f"{found.chance:.2f} of 1",
            found=f"{found.tells:.2f}, where chance is 0.5, of {found.ids} ids at "
            f"{found.positions} positions",
            remedy="name the verifier that these states are of as verifier.source",
        )
    return found


def measure(states: torch.Tensor, following: torch.Tensor, head: Head) -> Proof:
    """The figures of states [P, L, H] and of the id that follows each, int64 [P]."""
    last = states[:, -1].float()
    weights = head.norm.float()
    divided = last[:, weights != 0] / weights[weights != 0]
    scales = divided.square().mean(dim=1).sqrt()
    recurring = (torch.bincount(following) > 1).nonzero().flatten()
    at = torch.isin(following, recurring)
    *others, own = (
        tells(layer[at], following[at], recurring, head) for layer in states.unbind(dim=1)
    )
    return Proof(
        positions=len(following),
        ids=len(recurring),
        tells=own,
        other_layer=max(others, default=0.5),
        least_scale=float(scales.min()) if len(scales) else 0.0,
        most_scale=float(scales.max()) if len(scales) else 0.0,
        direction=direction(head.lm_head),
    )


def tells(states: torch.Tensor, following: torch.Tensor, ids: torch.Tensor, head: Head) -> float:
    """How well states [P, H] tell which of `ids` follows: 0.5 by chance, 1 always.

    The share of the other ids whose logits are below that of the one that follows; the mean over
    an id's positions, then over the ids. So a logit that rests on the id alone, as a common word's
    may, comes to 0.5 whatever it is, and how sure the verifier is of itself does not count.
    """
    if len(ids) < 2:
        return 0.5
    hidden = states.float()
    scale = torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + head.eps)
    logits = (hidden * scale * head.norm.float()) @ head.lm_head[ids].float().T
    column = torch.searchsorted(ids, following)
    own = logits.gather(1, column[:, None])
    below = (logits < own).sum(dim=1) + ((logits == own).sum(dim=1) - 1) / 2
    share = below / (len(ids) - 1)
    summed = torch.zeros(len(ids)).index_add_(0, column, share)
    return float((summed / torch.bincount(column, minlength=len(ids))).mean())


def direction(lm_head: torch.Tensor) -> float:
    """How far the rows of an lm_head [V, H] share a direction: about 1 where they are random.

    V times the squared length of their mean, over their mean squared length. Training moves all
    rows together, those of ids that never come most of all.
    """
    total, squared = torch.zeros(lm_head.shape[1]), 0.0
    for start in range(0, len(lm_head), _ROWS_AT_ONCE):
        rows = lm_head[start : start + _ROWS_AT_ONCE].float()
        total += rows.sum(dim=0)
        squared += float(rows.square().sum())
    return float(total.square().sum()) / squared if squared else 0.0


def _spread(old: OldFolder) -> Iterator[OldRow]:
    """Samples evenly spaced over the folder: another tool may have written its end."""
    count = old.manifest.total_samples
    for number in sorted({at * count // SAMPLES for at in range(SAMPLES)}):
        yield old.row(number)


def _positions(rows: Iterable[OldRow]) -> tuple[torch.Tensor, torch.Tensor]:
    """(states [P, L, H], following [P]) of supervised ids, evenly spaced over each good sample."""
    states, following = [], []
    for row in rows:
        if row.reason:
            continue
        at = row.loss_mask[1:].nonzero().flatten()
        chosen = at[torch.arange(0, len(at), max(1, -(-len(at) // POSITIONS)))]
        states.append(row.hidden_states[chosen])
        following.append(row.input_ids[chosen + 1])
    if not states:
        return torch.zeros(0, 1, 1), torch.zeros(0, dtype=torch.int64)
    return torch.cat(states), torch.cat(following)
