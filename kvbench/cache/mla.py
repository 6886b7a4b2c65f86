"""Multi-head latent attention (DeepSeek V2, arXiv:2405.04434, section 2.1): what its cache holds.

The model's attention hands `update` a latent c [B, 1, q, r] and a rotated key [B, 1, q, dr] that all heads share, calls
its own `expand_kv` on what `update` returns, and then attends. Three layouts:

- expand: the cache holds the keys and values of all heads, as without MLA.
- latent: the cache holds c and the rotated key, r + dr numbers a token; every step expands them for all heads.
- absorbed: the cache holds the same, and nothing is expanded: with W_uk and W_uv the halves of kv_b_proj,
  scores = (q_nope W_uk) . c + q_pe . k_pe and output = (p c) W_uv'. To the engine that is one KV head of r + dr
  channels whose value is the latent.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvbench.cache.slots import Buffer, CapturedSlots, Slots, SlotShape
from kvbench.cache.store import DenseStore, Store
from kvbench.errors import UserError
from kvbench.kernels.parts import Dense, Packed, Part, Split, read_all
from kvbench.models.shape import mla_layout


@dataclass(frozen=True)
class Latents:
    """How one layer's latents become keys and values. attention: its module. layout: expand | latent | absorbed."""

    attention: Any
    layout: str

    @property
    def rank(self) -> int:
        """Numbers of a latent, r."""
        return int(self.attention.kv_lora_rank)

    @property
    def up(self) -> tuple[Tensor, Tensor]:
        """W_uk [H, nope, r] and W_uv [H, dv, r]: views of kv_b_proj's weight."""
        weight: Tensor = self.attention.kv_b_proj.weight
        key_dim, value_dim = self.attention.qk_nope_head_dim, self.attention.v_head_dim
        heads = weight.unflatten(0, (-1, key_dim + value_dim))
        return heads[:, :key_dim], heads[:, key_dim:]

    def keys_and_values(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values as the cache holds them, from c [B, 1, q, r] and the rotated key [B, 1, q, dr].

        expand: [B, H, q, nope + dr] and [B, H, q, dv]. Otherwise [B, 1, q, r + dr] and its first r channels, a view.
        """
        if self.layout == "expand":
            return self._stock(latent, rotated)
        key = torch.cat([latent, rotated], dim=-1)
        return key, key[..., : self.rank]

    def heads(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of all heads, from `keys_and_values`: [B, H, q, nope + dr] and [B, H, q, dv]."""
        return (key, value) if self.layout == "expand" else self._stock(value, key[..., self.rank :])

    def absorb(self, query: Tensor) -> Tensor:
        """The query [B, H, q, nope + dr] for keys of `keys_and_values`: [B, H, q, r + dr] unless expanded."""
        if self.layout == "expand":
            return query
        nope, rotated = query.split([self.attention.qk_nope_head_dim, self.attention.qk_rope_head_dim], dim=-1)
        return torch.cat([torch.einsum("bhqn,hnr->bhqr", nope, self.up[0]), rotated], dim=-1)

    def project(self, output: Tensor) -> Tensor:
        """p c [B, H, q, r] -> the heads' output [B, H, q, dv]."""
        return torch.einsum("bhqr,hvr->bhqv", output, self.up[1])

    def _stock(self, latent: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
        key, value = type(self.attention).expand_kv(self.attention, latent, rotated)
        return key, value


@dataclass(frozen=True)
class LatentStore(Store):
    """The latent held by `codes`; the rotated key in the model's dtype, or in 16 bits where the latent is quantised.

    Codes run along the latent's channels. The rotated key is not quantised: its few channels carry the position, and it
    is a ninth of the cached numbers.
    """

    codes: Store
    latents: Latents

    def check(self, key_dim: int, value_dim: int) -> None:
        self.codes.check(value_dim, 0)

    def allocate(self, shape: SlotShape) -> "LatentSlots":
        return LatentSlots(self, shape)

    def shapes(self, shape: SlotShape) -> tuple[SlotShape, SlotShape]:
        """The shapes of the latents and of the rotated keys; neither has values."""
        sixteen = shape.dtype if shape.dtype.itemsize == 2 else torch.float16
        dtype = shape.dtype if isinstance(self.codes, DenseStore) else sixteen
        return (
            replace(shape, key_dim=shape.value_dim, value_dim=0),
            replace(shape, key_dim=shape.key_dim - shape.value_dim, value_dim=0, dtype=dtype),
        )

    def rotated_store(self) -> DenseStore:
        """The store of the rotated keys."""
        return self.codes if isinstance(self.codes, DenseStore) else DenseStore()

    def planned_bytes(self, shape: SlotShape) -> int:
        latent, rotated = self.shapes(shape)
        return self.codes.planned_bytes(latent) + self.rotated_store().planned_bytes(rotated)


class LatentSlots(Slots):
    """Latents and rotated keys in buffers of their own; absorbed they are attended over as held, else expanded."""

    def __init__(self, store: LatentStore, shape: SlotShape) -> None:
        self.latents, self.dtype, self.rank = store.latents, shape.dtype, shape.value_dim
        self.absorbs = store.latents.layout == "absorbed"
        latent, rotated = store.shapes(shape)
        self.codes, self.rotated = store.codes.allocate(latent), store.rotated_store().allocate(rotated)

    def fill(self, key: Tensor, value: Tensor) -> None:
        self.codes.fill(value, value[..., :0])
        self.rotated.fill(key[..., self.rank :], value[..., :0])
        self.length = self.codes.length

    def append(self, key: Tensor, value: Tensor) -> None:
        self.codes.append(value, value[..., :0])
        self.rotated.append(key[..., self.rank :], value[..., :0])
        self.length = self.codes.length

    def overwrite(self, slot: Tensor, key: Tensor, value: Tensor) -> None:
        self.codes.overwrite(slot, value, value[..., :0])
        self.rotated.overwrite(slot, key[..., self.rank :], value[..., :0])

    def settle(self) -> None:
        self.codes.settle()

    def transform_query(self, query: Tensor) -> Tensor:
        if not self.absorbs:
            return query
        latent, rotated = self.latents.absorb(query).tensor_split([self.rank], dim=-1)
        return torch.cat([self.codes.transform_query(latent), rotated], dim=-1)

    def restore_output(self, output: Tensor) -> Tensor:
        return self.latents.project(self.codes.restore_output(output)) if self.absorbs else output

    def read_back(self) -> tuple[Tensor, Tensor]:
        latent = self.codes.restore_keys(read_all(self.codes.key_parts(), torch.float32))
        key = torch.cat([latent, read_all(self.rotated.key_parts(), torch.float32)], dim=-1)
        return key, key[..., : self.rank]

    @property
    def has_quantised(self) -> bool:
        return self.codes.has_quantised

    def key_parts(self) -> Sequence[Part]:
        return self.keys_of(self.codes.key_parts())

    def value_parts(self) -> Sequence[Part]:
        return self.values_of(self.codes.key_parts())

    def keys_of(self, held: Sequence[Part]) -> Sequence[Part]:
        """The keys of the slots whose latents are `held`: latents and rotated keys, or keys expanded for all heads."""
        if not self.absorbs:
            key = torch.einsum("bsr,hnr->bhsn", self._latent(held), self.latents.up[0])
            rotated = self.rotated.keys[:, :, : key.shape[2]].to(key.dtype)
            return [Dense(torch.cat([key, rotated.expand(-1, key.shape[1], -1, -1)], dim=-1))]
        parts: list[Part] = []
        start = 0
        for part in held:
            if not isinstance(part, Dense | Packed):
                raise TypeError(f"latents cannot be held as {type(part).__name__}")
            parts.append(Split(part, Dense(self.rotated.keys[:, :, start : start + part.length])))
            start += part.length
        return parts

    def values_of(self, held: Sequence[Part]) -> Sequence[Part]:
        """The values of the slots whose latents are `held`."""
        if self.absorbs:
            return held
        return [Dense(torch.einsum("bsr,hvr->bhsv", self._latent(held), self.latents.up[1]))]

    def _latent(self, held: Sequence[Part]) -> Tensor:
        """The latents c as the store gives them back, in the model's dtype: [B, S, r]."""
        rows = read_all(held, torch.promote_types(self.dtype, torch.float32))
        return self.codes.restore_output(rows).squeeze(1).to(self.dtype)

    def captured(self) -> CapturedSlots:
        return CapturedLatents(self)

    def count(self) -> None:
        self.codes.count()
        self.rotated.count()
        self.length = self.codes.length

    def buffers(self, kept: int) -> Iterator[Buffer]:
        yield from self.codes.buffers(kept)
        yield from self.rotated.buffers(kept)


class CapturedLatents(CapturedSlots):
    """The captured form of `LatentSlots`, over whole buffers."""

    def __init__(self, slots: LatentSlots) -> None:
        codes = slots.codes.captured()
        super().__init__(slots, codes.keys, codes.keys)
        self.held = slots
        self.packs = (slots.absorbs and codes.packs[0],) * 2

    def key_parts(self) -> Sequence[Part]:
        return self.held.keys_of(self.keys)

    def value_parts(self) -> Sequence[Part]:
        return self.held.values_of(self.keys)


def latents_of(model: nn.Module) -> list[Latents] | None:
    """The latents of each layer of a model with multi-head latent attention, None for other models.

    Raises UserError where the model's weights or its attention are not as the layouts need them.
    """
    layout = mla_layout(getattr(model, "config", None))
    if layout is None:
        return None
    found = [Latents(module, layout) for module in _attentions(model)]
    family = type(model).__name__.removesuffix("ForCausalLM")
    one_a_layer = len(found) == getattr(model.config, "num_hidden_layers", None)
    if not one_a_layer or any(hasattr(latents.attention, "indexer") for latents in found):
        raise UserError(
            f"the {family} family's latent attention is not DeepSeek V2's or V3's, and its cache cannot be "
            "taken over; choose another model"
        )
    for latents in found:
        module = latents.attention
        rows = module.num_heads * (module.qk_nope_head_dim + module.v_head_dim)
        weight = module.kv_b_proj.weight
        if layout != "expand" and (weight.shape != (rows, latents.rank) or not weight.is_floating_point()):
            raise UserError(
                f"kv_b_proj of {family} is not held as plain numbers, so model.mla={layout} cannot read "
                "it; type model.mla=expand"
            )
    return found


def check_store(store: Store, layout: str | None) -> None:
    """Raise UserError where the store cannot hold a model of that layout."""
    if layout not in (None, "expand") and not store.holds_latents:
        # A store that calibrates takes off the rotation, and expanded keys are rotated in part only.
        expanded = "" if store.calibrates else ", or model.mla=expand"
        raise UserError(
            f"{type(store).__name__} needs keys and values of each head, and model.mla={layout} caches one "
            f"latent for all; type store=dense, int8, int4 or rot4{expanded}"
        )


@contextmanager
def latents_handed_on(model: nn.Module) -> Iterator[None]:
    """Inside the block `expand_kv` skips cache layers; afterwards the model is unchanged."""
    modules = _attentions(model)
    for module in modules:
        module.expand_kv = partial(_hand_on, module)
    try:
        yield
    finally:
        for module in modules:
            del module.expand_kv


def _hand_on(attention: Any, latent: Any, rotated: Any) -> tuple[Any, Any]:
    """A cache layer is handed on and attends over its own slots; plain tensors (no cache) are expanded."""
    if isinstance(latent, Tensor):
        return type(attention).expand_kv(attention, latent, rotated)  # type: ignore[no-any-return]
    return latent, rotated


def _attentions(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(type(module), "expand_kv")]
