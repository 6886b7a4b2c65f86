"""transformers' own quantised caches, as comparators: what a reader would get from the library itself.

A layer gets the prompt in one `update`, then decodes the way transformers does: `update` dequantises everything it
holds at every step, and transformers' sdpa attention runs over the floats (`kvbench.cache.attention` passes them on).
No slots, no kernel and no keep rule of ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Literal

import transformers
from torch import Tensor
from transformers import PreTrainedModel, cache_utils
from transformers.cache_utils import Cache

from kvbench.cache.decode_cache import DecodeCache
from kvbench.cache.forward import forward
from kvbench.cache.record import PrefillRecord, clock
from kvbench.cache.slots import Buffer, SlotShape
from kvbench.cache.state import in_model_order
from kvbench.cache.store import Store
from kvbench.errors import UserError

BACKENDS = {
    "quanto": ("QuantoQuantizedLayer", "optimum-quanto", 0),
    "hqq": ("HQQQuantizedLayer", "hqq", 1),
    "fp8": ("Fp8QuantizedLayer", None, None),
}
"""The class, the package it needs, and the axis that transformers' documentation recommends for it."""

NO_WINDOWS = (
    "transformers' quantised caches have no sliding-window layers, and this model has; choose methods whose "
    "names do not begin with hf_"
)


@dataclass(frozen=True)
class StockStore(Store):
    """A quantised cache layer of transformers, with its own defaults: groups of 64, and up to 127 tokens as they are.

    Every `residual_length` tokens it quantises everything anew, what was quantised before included. `fp8` has neither
    groups nor a residual; its scale is one for all heads, fixed by the prompt, and what exceeds it becomes NaN.
    Raises UserError where the backend's package is missing.
    """

    backend: Literal["quanto", "hqq", "fp8"] = "quanto"
    bits: int = 4
    group_size: int = 64
    residual_length: int = 128

    writable: ClassVar[bool] = False
    brings_cache: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.backend not in tuple(BACKENDS):
            raise UserError(f"backend={self.backend} is none of transformers' caches; type {', '.join(BACKENDS)}")
        _, package, _ = BACKENDS[self.backend]
        try:
            installed = package is None or bool(version(package))
        except PackageNotFoundError:
            installed = False
        if not installed:
            raise UserError(f"hf_{self.backend} needs {package}; type pip install 'kvbench[comparators]'")
        if not hasattr(cache_utils, BACKENDS[self.backend][0]):
            raise UserError(f"transformers {transformers.__version__} has no {self.backend} cache; a newer one has")

    @property
    def static_scales(self) -> bool:
        return self.backend == "fp8"

    def layer(self) -> Any:
        """An empty layer."""
        name, _, axis = BACKENDS[self.backend]
        if self.backend == "fp8":
            return getattr(cache_utils, name)()
        return getattr(cache_utils, name)(
            nbits=self.bits,
            axis_key=axis,
            axis_value=axis,
            q_group_size=self.group_size,
            residual_length=self.residual_length,
        )

    def planned_bytes(self, shape: SlotShape) -> int:
        """The most that so many tokens take: the residual as long as it gets."""
        numbers = shape.batch * shape.kv_heads * (shape.key_dim + shape.value_dim)
        if self.backend == "fp8":
            return numbers * shape.slots + 2 * 4
        newest = min(self.residual_length - 1, shape.slots)
        coded = numbers * (shape.slots - newest)
        pairs = 2 * shape.dtype.itemsize * coded // self.group_size  # scale and zero in the model's dtype
        return coded * self.bits // 8 + pairs + numbers * newest * shape.dtype.itemsize


class StockCache(DecodeCache, Cache):
    """One stock layer for each layer with keys and values, ready to decode after its prompt."""

    replaces_tensors = True
    not_captured = "transformers' own cache grows, and a graph wants memory that stays"

    def __init__(self, store: StockStore, record: PrefillRecord) -> None:
        layers = [store.layer() for _ in record.layers]
        states = [state.copy() for state in record.states]
        for layer, recorded in zip(layers, record.layers, strict=True):
            if recorded.scoring.window is not None:
                raise UserError(NO_WINDOWS)
            here = recorded.at_home()
            layer.update(here.key.clone(), here.value.clone())
        super().__init__(layers=in_model_order(layers, states))
        self.attention_layers, self.states = layers, states
        self.last_logits = record.logits.clone()
        self.prompt_tokens = self.positions_processed = record.prompt_tokens

    @property
    def seen(self) -> int:
        return int(self.get_seq_length())

    @property
    def kept_tokens(self) -> float:
        return float(self.seen)

    @property
    def has_compressed(self) -> bool:
        return True

    def run(self, model: PreTrainedModel, ids: Tensor, logits_to_keep: int) -> Tensor:
        """Feed ids [B, q]. There is always room: a stock cache grows by concatenation."""
        logits = forward(model, ids, self, logits_to_keep)
        self.positions_processed += ids.shape[1]
        return logits

    def buffers(self) -> Iterator[Buffer]:
        """Every tensor that the layers hold: narrow ones are codes, those beside them scales."""
        for state in self.states:
            yield from state.buffers()
        for layer in self.attention_layers:
            for name, held in vars(layer).items():
                for tensor in tensors_in(held):
                    part = "residual" if name in ("keys", "values") else "scales"
                    yield Buffer("codes" if tensor.element_size() == 1 else part, tensor, 1.0)


def stock_cache(store: Store, record: PrefillRecord) -> StockCache:
    """The stock cache of the record's prompts, and how long it took to build; copies from the record."""
    if not isinstance(store, StockStore):
        raise TypeError(f"{type(store).__name__} brings no cache of transformers'")
    started = clock(record.ids.device)
    cache = StockCache(store, record)
    cache.compress_ms = 1e3 * (clock(record.ids.device) - started)
    return cache


def tensors_in(held: Any) -> Iterator[Tensor]:
    """The plain tensors in a tensor of a package's own class, a tuple or a dict."""
    if isinstance(held, Tensor) and hasattr(held, "__tensor_flatten__"):
        names, _ = held.__tensor_flatten__()
        held = [getattr(held, name) for name in names]
    if isinstance(held, Tensor):
        yield held
    for item in held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else ():
        yield from tensors_in(item)
