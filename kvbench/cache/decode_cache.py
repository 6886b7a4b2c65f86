"""What every kind of cache answers, so that measures and checks need not ask which kind it is."""

from collections.abc import Iterator
from typing import ClassVar, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.cache.attention import kvbench_attention
from kvbench.cache.forward import check_ids, check_known
from kvbench.cache.slots import Buffer
from kvbench.cache.snapshot import Snapshot
from kvbench.errors import UserError


class DecodeCache:
    """A method's cache of one prompt batch, ready to decode.

    last_logits: [B, V], the model's prediction after the prompt. prompt_tokens: the prompt's length.
    positions_processed: token positions of a row that were run through the model for this cache, the prompt's first.
    compress_ms: wall time of building the cache. prefill_ms: wall time of the prompt's forwards, where the prompt was
    read in chunks; None where the cache was built from a record, which has the time. compressed_before_last_logits:
    whether a chunk before the prompt's last one had been compressed.
    """

    recomputes: ClassVar[bool] = False
    """Whether every step runs the whole prefix through the model, because nothing is cached."""
    not_captured: ClassVar[str | None] = None
    """Why this kind of cache has no step for a CUDA graph; None where it may have one."""
    replaces_tensors: ClassVar[bool] = False
    """Whether a forward puts new tensors in the place of old ones and never writes into one that is held."""
    shares_memory: bool = False
    """Whether other requests use some of the cache's memory."""
    compress_ms: float = 0.0
    prefill_ms: float | None = None
    compressed_before_last_logits: bool = False

    last_logits: Tensor
    prompt_tokens: int
    positions_processed: int

    @property
    def kernel_name(self) -> str:
        """What decode attention runs on."""
        return "sdpa"

    @property
    def seen(self) -> int:
        """Tokens of a row so far, its prompt's included."""
        raise NotImplementedError

    @property
    def kept_tokens(self) -> float:
        """Tokens held per KV head now, the mean over the layers that the method applies to."""
        raise NotImplementedError

    @property
    def has_compressed(self) -> bool:
        """Whether any token has been evicted or quantised."""
        raise NotImplementedError

    def buffers(self) -> Iterator[Buffer]:
        """Every tensor that the cache holds."""
        raise NotImplementedError

    def kept_positions(self) -> dict[int, Tensor]:
        """By layer, the positions of kept tokens in ascending order, EMPTY behind a shorter head's: int64 [B, Hkv, n].

        Of the layers that the method applies to; empty where the cache has no slots.
        """
        return {}

    def step(self, model: PreTrainedModel, ids: Tensor, logits_to_keep: int = 1) -> Tensor:
        """Feed ids [B, q] and return the logits of the last `logits_to_keep` of them, [B, n, V]; 0 returns all.

        The method evicts or quantises afterwards. Raises UserError for ids that do not continue the cache's batch, and
        kvbench.cache.counters.CacheFull past what the cache was built for; the cache is as before then.
        """
        check_ids(ids)
        if ids.device.type == "cpu" or ids.shape[1] > 1:  # single tokens on a GPU must not wait for the device
            check_known(model, ids)
        with torch.inference_mode(), kvbench_attention(model):
            self.check_room(ids)
            return self.run(model, ids, logits_to_keep)

    def run(self, model: PreTrainedModel, ids: Tensor, logits_to_keep: int) -> Tensor:
        """`step` without its checks, inside `kvbench_attention`."""
        raise NotImplementedError

    def predictions(self, model: PreTrainedModel, targets: Tensor, size: int) -> Iterator[tuple[Tensor, bool]]:
        """Logits [B, V] for each of targets [B, n] in turn, and whether something had been compressed before.

        Targets are fed `size` at a time. The first is predicted by the prompt's last logits.
        """
        yield self.last_logits, self.compressed_before_last_logits
        for start in range(0, targets.shape[1] - 1, size):
            engaged = self.has_compressed
            block = targets[:, start : min(start + size, targets.shape[1] - 1)]
            for logits in self.step(model, block, block.shape[1]).unbind(1):
                yield logits, engaged

    def check_room(self, ids: Tensor) -> None:
        """Raise UserError unless ids [B, q] continue this batch, and CacheFull unless they fit."""
        batch = self.last_logits.shape[0]
        if ids.shape[0] != batch:
            raise UserError(f"ids has {ids.shape[0]} rows and the cache {batch}; give one row for each prompt")

    @torch.inference_mode()
    def snapshot(self) -> Snapshot:
        """What the cache holds now, for `restore`; it takes as much memory as the cache.

        Raises UserError where other requests share the cache's memory.
        """
        if self.shares_memory:
            raise UserError(
                "this cache shares blocks with other requests and cannot go back alone; build one of its own: "
                "build_cache(model, method, record)"
            )
        return Snapshot(self, copies=not self.replaces_tensors)

    @torch.inference_mode()
    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this cache, in the same memory: what follows gives the same bits as then.

        A captured decode step (`kvbench.cache.captured`) counts by itself and has to be captured again. Raises
        UserError for another cache's snapshot.
        """
        if snapshot.root is not self:
            raise UserError("this snapshot is of another cache; restore one that this cache's snapshot() returned")
        snapshot.put_back()

    # Without a snapshot evicted tokens cannot come back, and slots belong to one prompt: what transformers' caches can
    # do is refused.

    def reset(self) -> None:
        """Raise UserError, as the following methods do: build another cache from the record instead."""
        self.refuse("emptied")

    def crop(self, max_length: int) -> None:
        self.refuse("cut back")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.refuse("reordered")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.refuse("repeated")

    def batch_select_indices(self, indices: Tensor) -> None:
        self.refuse("taken apart")

    def __deepcopy__(self, memo: object) -> "DecodeCache":
        self.refuse("copied with copy.deepcopy")

    def refuse(self, what: str) -> NoReturn:
        """Raise UserError: the cache cannot be `what`."""
        raise UserError(f"a compressed cache cannot be {what}; build another: build_cache(model, method, record)")
