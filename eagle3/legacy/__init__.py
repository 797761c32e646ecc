"""Version 1 of hidden states, as older tools left it: read, checked in full, and taken over.

A folder holds `data_config.json` with ten fields, `data_{i}.pt` for each sample (a dict of
`input_ids` int64 [T], `loss_mask` [T] and `hidden_states`, a list of bfloat16 [T, H] for each
layer), `token_freq.pt` [V], `t2d.pt` [V] and `d2t.pt` [D]. It is read here and nowhere else.

Its layer ids count a layer's *output* from 0; ours name the residual stream that *enters* a layer,
which is one more, see `inputs_of`. What it does not hold is of which conversation a row is, so
no prompt can be shown to be unknown to a draft that was trained on it.
"""

from eagle3.legacy.folder import CONVENTION, OldFolder, OldManifest, OldRow, inputs_of
from eagle3.legacy.proof import Proof, prove_states
from eagle3.legacy.takeover import Cut, Taken, take_over

__all__ = [
    "CONVENTION",
    "Cut",
    "OldFolder",
    "OldManifest",
    "OldRow",
    "Proof",
    "Taken",
    "inputs_of",
    "prove_states",
    "take_over",
]
