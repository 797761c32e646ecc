"""Verifying what is committed: from outside as the gate does it, or every byte and number of it.

* `gate`: the manifest and its seal, its sums, every object by one listing with its size, and the
  inputs as far as they can be read: their digests, and what they must agree on. No torch.
* `full`: besides, every byte is hashed, an object that no manifest names is told, and what the
  objects hold is read: tensors by shape, type and finiteness, rows by checksum and mask, and
  every count that the manifest says is counted again.

The checks of a kind's contents are a module of its own, imported when an artefact of that kind is
verified in full: `rows`, `states`, `tensors`, `drafts` and `figures`.
"""

from eagle3.verification.outside import Outside, artifacts_at, look_at
from eagle3.verification.whole import DEPTHS, Depth, Verdict, verify

__all__ = ["DEPTHS", "Depth", "Outside", "Verdict", "artifacts_at", "look_at", "verify"]
