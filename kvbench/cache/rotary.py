"""Taking rotary embeddings off: queries at earlier positions, and keys before their rotation."""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvbench.errors import UserError
from kvbench.models.probe import Attended, probe, takes_positions
from kvbench.models.shape import mla_layout

UNMOVABLE = ("dynamic", "longrope")
"""Kinds of frequencies that change with the length, so that a rotation cannot be taken off."""

IN_CACHE = "positions inside the cache cannot be had; type variant=absolute to keep the original ones"
BEFORE = "its queries before their rotation cannot be had; choose another method than expected_attention"
BEFORE_KEYS = "its keys before their rotation cannot be had; choose another store than lowrank"
"""Ends of error lines: what is impossible where a rotation cannot be taken off, and what to type instead."""

EXACT_ANGLES = 65_536
"""Beyond this many evicted tokens float32 angles are off by more than about 1e-2 rad."""


@dataclass(frozen=True)
class RotateBack:
    """Moves a rotated query e positions back, in the model's own pairing of channels.

    embed: the model's rotary module. apply: its modelling file's `apply_rotary_pos_emb`. layer_type: the
    argument that the module takes beside positions where layers differ (Gemma 3), else None.
    """

    embed: nn.Module
    apply: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    layer_type: str | None
    attention_scaling: float

    def __call__(self, query: Tensor, tokens: int | Tensor) -> Tensor:
        """query [B, Hq, q, D], rotated for position p, rotated for p - tokens instead.

        In float32, or float64 for a float64 query; the angles are float32 in both. tokens: a number, or one on the
        device (int64 []).
        """
        return self._turn_back(query, *self.angles(query, tokens))

    def to_start(self, query: Tensor, first: int | Tensor) -> Tensor:
        """query [B, Hq, n, D], rotated for positions first, first + 1, ..., as it was before (yarn's scaling stays)."""
        return self._turn_back(query, *self._angles_at(query, first, query.shape[2]))

    def by_mean(self, key: Tensor, first: int | Tensor, count: int) -> Tensor:
        """R' k of each key [B, Hkv, T, D], R being the mean rotation over positions first .. first + count - 1."""
        return self._turn_back(key, *(turn.mean(1, keepdim=True) for turn in self._angles_at(key, first, count)))

    def _turn_back(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        exact = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.apply(exact, exact, cos.to(exact.dtype), -sin.to(exact.dtype))[0]

    def angles(self, query: Tensor, tokens: int | Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of position `tokens`, float32 [1, 1, rotary_dim]; the attention scaling taken out again,
        since the query carries it already."""
        return self._angles_at(query, tokens, 1)

    def _angles_at(self, query: Tensor, first: int | Tensor, count: int) -> tuple[Tensor, Tensor]:
        position = (first + torch.arange(count, device=query.device)).unsqueeze(0)
        cos, sin = self.scaled_angles(query, position)
        return cos / self.attention_scaling, sin / self.attention_scaling

    def scaled_angles(self, query: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [rows, n] as the model has them: float32 [rows, n, rotary_dim]."""
        extra = () if self.layer_type is None else (self.layer_type,)
        cos, sin = self.embed(query.new_zeros(1, dtype=torch.float32), position, *extra)
        return cos, sin


class KeyRotation:
    """Takes a layer's rotary embedding off keys and puts it on again, each key at a position of its own.

    The angles and the pairing of channels are the model's own. Its attention scaling (yarn's) stays on the keys, so
    that putting on undoes taking off to the last bits. On a CPU angles are looked up in a table, unless looks_up=False;
    elsewhere they are computed, since the table's length would have to be read from the device.
    """

    def __init__(self, rotate: RotateBack, looks_up: bool = True) -> None:
        self.rotate, self.looks_up = rotate, looks_up
        self.table: tuple[Tensor, Tensor] | None = None  # cos and sin, [positions, rotary_dim]

    def without_table(self) -> "KeyRotation":
        """The same rotation without a table, which reads no number of the device on the host."""
        return KeyRotation(self.rotate, looks_up=False)

    def take_off(self, key: Tensor, position: Tensor) -> Tensor:
        """Keys [B, Hkv, n, D] as they were before they were rotated for positions [B, Hkv, n]."""
        return self._turn(key, position, -1)

    def put_on(self, key: Tensor, position: Tensor) -> Tensor:
        """Keys [B, Hkv, n, D], rotated for positions [B, Hkv, n]; where a slot is empty for position 0."""
        return self._turn(key, position, 1)

    def _turn(self, key: Tensor, position: Tensor, sign: int) -> Tensor:
        exact = key.to(torch.promote_types(key.dtype, torch.float32))
        if position.stride()[:2] == (0, 0):  # one row serves all
            cos, sin = self._angles(exact, position[:1, 0])
            return self.rotate.apply(exact, exact, cos, sign * sin)[0]
        heads = exact.flatten(0, 1).unsqueeze(1)  # a head is a row of the batch: `apply` knows one position a row
        cos, sin = self._angles(exact, position.flatten(0, 1))
        return self.rotate.apply(heads, heads, cos, sign * sin)[0].view_as(exact)

    def _angles(self, key: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [rows, n, rotary_dim] of positions [rows, n], without the attention scaling."""
        at = position.long().clamp(min=0)
        if not self.looks_up or key.device.type != "cpu":
            return _unscaled(*self.rotate.scaled_angles(key, at), key.dtype)
        last = int(at.max()) if at.numel() else 0
        if self.table is None or self.table[0].shape[0] <= last or self.table[0].dtype != key.dtype:
            every = torch.arange(2 * last + 256).unsqueeze(0)
            cos, sin = _unscaled(*self.rotate.scaled_angles(key, every), key.dtype)
            self.table = cos[0], sin[0]
        return self.table[0][at], self.table[1][at]


def _unscaled(cos: Tensor, sin: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines without the attention scaling that both carry."""
    cos, sin = cos.to(dtype), sin.to(dtype)
    length = torch.hypot(cos, sin)
    return cos / length, sin / length


def key_rotations(model: nn.Module, layers: int) -> list[KeyRotation | None]:
    """One for each layer, None where keys carry no position. Raises UserError where a rotation cannot be taken off."""
    if not any(name.endswith("rotary_emb") for name, _ in model.named_modules()):
        return [None] * layers
    found: dict[str | None, KeyRotation] = {}
    rotations: list[KeyRotation | None] = []
    for i in range(layers):
        rotate = rotate_back(model, i, BEFORE_KEYS)
        rotations.append(found.setdefault(rotate.layer_type, KeyRotation(rotate)))
    return rotations


def rotate_back(model: nn.Module, layer: int, instead: str = IN_CACHE) -> RotateBack:
    """How queries of one layer are rotated back.

    Raises UserError, ending in `instead`, for models whose positions are learned or whose frequencies depend on
    the length, and where the check below fails: rotating q at position 7 back by 3 must give q at position 4.
    """
    embed = next((m for name, m in model.named_modules() if name.endswith("rotary_emb")), None)
    family = type(model).__name__
    if mla_layout(model.config) is not None:
        raise UserError(f"{family} rotates a part of each query, and one key for all heads: {instead}")
    if embed is None:
        raise UserError(f"{family} has no rotary embedding: {instead}")
    if _skips_layers(model):
        raise UserError(f"{family} rotates in some of its layers only: {instead}")
    apply = getattr(sys.modules[type(embed).__module__], "apply_rotary_pos_emb", None)
    layer_type = None
    if "layer_type" in inspect.signature(embed.forward).parameters:
        layer_type = model.config.get_text_config().layer_types[layer]  # type: ignore[operator, union-attr]
    prefix = "" if layer_type is None else f"{layer_type}_"
    kinds = getattr(embed, "rope_type", "default")
    kind = kinds.get(layer_type, "default") if isinstance(kinds, dict) else kinds
    if kind in UNMOVABLE:
        raise UserError(f"{family} has {kind} rotary frequencies: {instead}")
    scaling = float(getattr(embed, f"{prefix}attention_scaling", 1.0))
    if apply is None:
        raise UserError(f"{family} rotates its queries in a way of its own: {instead}")
    rotate = RotateBack(embed, apply, layer_type, scaling)
    if not _takes_back(rotate, _head_dim(model)):
        raise UserError(f"{family} {_why_not(rotate, _head_dim(model))}: {instead}")
    if not _turns_what_is_cached(model, layer, rotate):
        raise UserError(f"{family} changes queries and keys after their rotation (a norm, for one): {instead}")
    return rotate


PROBED: WeakKeyDictionary[nn.Module, dict[int, list[Attended]]] = WeakKeyDictionary()
"""Of each model, what its layers hand to attention for the same token at positions 7 and 4."""


def _turns_what_is_cached(model: nn.Module, layer: int, rotate: RotateBack) -> bool:
    """Whether a layer's own query and key at position 7, rotated back by 3, are its own at position 4."""
    if not isinstance(model, PreTrainedModel) or not takes_positions(model):
        return True
    if model not in PROBED:
        PROBED[model] = {position: probe(model, [position]) for position in (7, 4)}
    at_seven, at_four = (next((c for c in PROBED[model][p] if c.layer == layer), None) for p in (7, 4))
    if at_seven is None or at_four is None:
        return True
    pairs = (at_seven.query, at_four.query), (at_seven.key, at_four.key)
    for seven, four in pairs:
        wide = torch.promote_types(four.dtype, torch.float32)
        limit = max(1e-5, 32 * torch.finfo(four.dtype).eps) * float(four.abs().max())
        if float((rotate(seven, 3).to(wide) - four.to(wide)).abs().max()) > limit:
            return False
    return True


WINDOWED_ONLY = ("cohere2", "exaone4", "exaone_moe")
"""Model types that rotate in their sliding-window layers only."""


def _skips_layers(model: nn.Module) -> bool:
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    rotates = getattr(config, "no_rope_layers", None) or [1]  # as SmolLM3 and Llama 4 write it: 0 does not rotate
    windowed = config.model_type.startswith(WINDOWED_ONLY)
    return not all(rotates) or (windowed and "full_attention" in (getattr(config, "layer_types", None) or []))


def _head_dim(model: nn.Module) -> int:
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _why_not(rotate: RotateBack, head_dim: int) -> str:
    """What a family does whose rotation `_takes_back` cannot take off."""
    start = torch.zeros(1, 1, 1, head_dim, device=next(rotate.embed.buffers()).device)
    rotary_dim = rotate.angles(start, 0)[0].shape[-1]
    if rotary_dim < head_dim:
        return f"has partial rotary embeddings ({rotary_dim} of {head_dim} channels), which cannot be taken off here"
    return "rotates its queries in a way that does not compose"


def _takes_back(rotate: RotateBack, head_dim: int) -> bool:
    device = next(rotate.embed.buffers()).device
    query = torch.linspace(-1, 1, head_dim, device=device).view(1, 1, 1, head_dim)
    try:
        at_seven, at_four = (rotate.apply(query, query, *rotate.angles(query, p))[0] for p in (7, 4))
        return torch.allclose(rotate(at_seven, 3), at_four, atol=1e-5)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return False
