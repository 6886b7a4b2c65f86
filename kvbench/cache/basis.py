"""The directions that a layer's keys and values lie in: eigenvectors of their second moment on calibration text."""

from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from kvbench.files import write_atomic


@dataclass(frozen=True)
class Basis:
    """One layer's directions, for each KV head by itself, in descending order of energy.

    keys [Hkv, D, D], values [Hkv, Dv, Dv]: orthonormal columns. key_energy [Hkv, D], value_energy [Hkv, Dv]: the
    second moment along each. Float32, or float64 for a model in float64.
    """

    keys: Tensor
    key_energy: Tensor
    values: Tensor
    value_energy: Tensor


def eigenbasis(moment: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal eigenvectors and eigenvalues of second moments [..., D, D], the largest first.

    Of all projections on r directions the first r columns lose the least of the rows that the moment is of. With
    moment = W C W', where rows are x W' and C is the second moment of the inputs x, they are the left singular vectors
    of W C^(1/2): the whitened singular value decomposition of the projection's weights.
    """
    energy, vectors = torch.linalg.eigh(moment)
    return vectors.flip(-1), energy.flip(-1).clamp(min=0)


def second_moment(rows: Tensor) -> Tensor:
    """Mean of x x' over batch and tokens: float64 [Hkv, D, D] from rows [B, Hkv, T, D]."""
    flat = rows.to(torch.float64).transpose(0, 1).flatten(1, 2)
    return flat.mT @ flat / flat.shape[1]


def save_bases(path: Path, bases: list[Basis | None]) -> None:
    """Write the bases to a safetensors file, the whole file or nothing."""
    from safetensors.torch import save

    tensors = {
        f"{i}.{f.name}": getattr(basis, f.name).cpu().contiguous()
        for i, basis in enumerate(bases)
        if basis is not None
        for f in fields(Basis)
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, save(tensors, {"layers": str(len(bases))}))


def load_bases(path: Path, layers: int, device: torch.device) -> list[Basis | None] | None:
    """The bases of `layers` layers that `save_bases` wrote; None where there is no such file or it cannot be read."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    names = [f.name for f in fields(Basis)]
    try:
        tensors = load_file(path, device=str(device))
        found = [
            Basis(*(tensors[f"{i}.{name}"] for name in names)) if f"{i}.{names[0]}" in tensors else None
            for i in range(layers)
        ]
    except (OSError, SafetensorError, KeyError):
        return None
    return found if any(found) else None
