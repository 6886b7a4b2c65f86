"""Low rank: keys and values as coordinates along the leading eigenvectors of calibration text."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from kvbench.cache.basis import Basis
from kvbench.cache.coordinates import Coordinates
from kvbench.cache.rotary import KeyRotation
from kvbench.cache.store import DenseStore, SlotShape, Store
from kvbench.errors import UserError
from kvbench.methods.per_token import PerToken

STEP = 8
"""Ranks are multiples of this: kernels read 8 channels at a time, and it is the smallest group of codes."""


@dataclass(frozen=True)
class LowRank(Store):
    """Coordinates along the leading eigenvectors of each KV head's second moment.

    This equals the whitened singular value decomposition of the projection weights (Yuan et al., 2023,
    arXiv:2312.05821; of the cache: Chang et al., 2024, arXiv:2407.21118). It gives a trained model latents like those
    that MLA is trained with.

    Keys are taken before their rotary embedding; each step rebuilds them and rotates them for their positions. Values
    stay coordinates until the output. `rank`: share of the head size that is kept. `energy`: instead of `rank`, the
    smallest rank that keeps this share of a layer's second moment in every head, for keys and for values. Ranks are
    rounded up to a multiple of 8. With `k_bits` and `v_bits` the coordinates are quantised as in the int8 and int4
    stores.
    """

    rank: float | None = None
    energy: float | None = None
    k_bits: int | None = None
    v_bits: int | None = None
    group_size: int | None = None
    bases: tuple[Basis | None, ...] = field(default=(), repr=False, compare=False)
    rotations: tuple[KeyRotation | None, ...] = field(default=(), repr=False, compare=False)

    calibrates: ClassVar[bool] = True
    poolable: ClassVar[bool] = False  # a key is rotated for the position of its slot

    def __post_init__(self) -> None:
        if self.rank is not None and self.energy is not None:
            raise UserError(f"rank={self.rank} and energy={self.energy} are both given; type one of them")
        for name, share in (("rank", self.rank), ("energy", self.energy)):
            known = share is None or (isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 1)
            if not known:
                raise UserError(f"{name}={share} for lowrank; type a share above 0 and up to 1, for example {name}=0.5")
        if (self.k_bits is None) != (self.v_bits is None):
            raise UserError("lowrank quantises both keys and values, or neither; type bits=8 or bits=4")
        if self.k_bits is None and self.group_size is not None:
            raise UserError(f"group={self.group_size} without bits for lowrank; type bits=8 or bits=4 as well")
        self._codes(64, 64)

    def check(self, key_dim: int, value_dim: int) -> None:
        if self.energy is None:
            ranks = self._ranks(key_dim, value_dim)
            self._codes(*ranks).check(*ranks)

    def calibrated(self, bases: Sequence[Basis | None], rotations: Sequence[KeyRotation | None]) -> "LowRank":
        return replace(self, bases=tuple(bases), rotations=tuple(rotations))

    def for_layer(self, index: int) -> Coordinates:
        if not self.bases:
            raise UserError("lowrank is not calibrated; type method = calibrate(method, loaded)")
        basis = self.bases[index]
        if basis is None:
            raise UserError(f"lowrank has no basis for layer {index}, which a window bounded during calibration")
        key_rank, value_rank = self._ranks(basis.keys.shape[-1], basis.values.shape[-1], basis)
        return Coordinates(
            self._codes(key_rank, value_rank),
            basis.keys[..., :key_rank].contiguous(),
            basis.values[..., :value_rank].contiguous(),
            self.rotations[index],
        )

    def planned_bytes(self, shape: SlotShape) -> int:
        """The mean over layers where ranks go by energy. Raises UserError for those before calibration."""
        if self.energy is not None and self.bases:
            layers = [self.for_layer(i).planned_bytes(shape) for i, basis in enumerate(self.bases) if basis is not None]
            return round(sum(layers) / len(layers))
        ranks = self._ranks(shape.key_dim, shape.value_dim)
        codes = self._codes(*ranks).planned_bytes(replace(shape, key_dim=ranks[0], value_dim=ranks[1]))
        numbers = shape.kv_heads * (shape.key_dim * ranks[0] + shape.value_dim * ranks[1])
        return codes + numbers * max(4, shape.dtype.itemsize)

    def _codes(self, key_rank: int, value_rank: int) -> Store:
        """The store that holds the coordinates."""
        if self.k_bits is None or self.v_bits is None:
            return DenseStore()
        fitting = next((size for size in (32, 16) if key_rank % size == value_rank % size == 0), STEP)
        codes: Store = PerToken(self.k_bits, self.v_bits, fitting if self.group_size is None else self.group_size)
        return codes

    def _ranks(self, key_dim: int, value_dim: int, basis: Basis | None = None) -> tuple[int, int]:
        """Numbers of coordinates of a key and of a value."""
        if self.energy is None:
            share = 0.5 if self.rank is None else self.rank
            return rounded_up(share * key_dim, key_dim), rounded_up(share * value_dim, value_dim)
        if basis is None:
            raise UserError(f"ranks by energy={self.energy} are known only after calibration; type rank=0.5 instead")
        return needed(basis.key_energy, self.energy), needed(basis.value_energy, self.energy)


def rounded_up(rank: float, dim: int) -> int:
    """`rank` as a multiple of STEP, at most `dim`."""
    return min(dim, STEP * max(1, -int(-rank // STEP)))


def needed(energy: Tensor, share: float) -> int:
    """The least rank, rounded up, that keeps that share of the energy [Hkv, D] in every head."""
    kept = energy.cumsum(-1) / energy.sum(-1, keepdim=True).clamp(min=1e-30)
    short = int((kept < share - 1e-6).sum(-1).max())  # float32 sums end a little off 1
    return rounded_up(short + 1, energy.shape[-1])
