"""What a call of decode attention may be given beside queries, keys, values and scoring."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class AttendOptions:
    """Options of one call of decode attention over S slots, `kvbench.kernels.reference.attend`.

    visible: bool, broadcastable to [B, Hkv, q, S]; None where every query sees every slot. No query sees slots that a
        head does not have (`Paged`).
    sink_query: [B, Hq, q, D], the query for the first `n_sink` slots (StreamingLLM's positions); None: `query` itself.
    want_probabilities: False where the caller ignores them; a kernel may then return None in their place.
    lengths: int32 on the device, broadcastable to [B, Hkv, 3]: slots whose keys are packed, whose values are packed,
        and filled ones in all. The parts then span whole buffers: at most one packed part, then at most one of dense
        rows, perhaps a ring. Slots that are not filled get probability 0; `visible` spans all of them. None: the parts
        span filled slots alone.
    """

    visible: Tensor | None = None
    sink_query: Tensor | None = None
    n_sink: int = 0
    want_probabilities: bool = True
    lengths: Tensor | None = None


NO_OPTIONS = AttendOptions()
"""Every query sees every slot, and probabilities are wanted."""
