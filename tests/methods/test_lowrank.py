"""Low rank against explicit projections, at full rank against the full cache, and against the whitened SVD."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from kvbench.cache.basis import Basis, eigenbasis, load_bases, save_bases, second_moment
from kvbench.cache.build import Method, build_cache, prefill
from kvbench.cache.bytes import held_bytes
from kvbench.cache.caches import KVCache
from kvbench.cache.calibrate import bases_of
from kvbench.cache.decode import step
from kvbench.cache.rotary import key_rotations
from kvbench.cache.rule import KeepRule
from kvbench.cache.store import DenseStore, SlotShape
from kvbench.errors import UserError
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.lowrank import LowRank
from kvbench.methods.streaming_llm import StreamingLLM
from tests.cache.test_mla import attended, deepseek
from tests.shared.models import random_llama
from tests.shared.reference import along_channels, attention_matrix, attention_output, rotate

KV_HEADS, D, PROMPT, STEPS = 2, 32, 50, 14
EXACT = random_llama(4, KV_HEADS, D)
FLOAT = random_llama(4, KV_HEADS, D, dtype=torch.float32)


def random_ids(batch: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randint(97, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def ready(store: LowRank, model: Any) -> LowRank:
    """The store, calibrated on random tokens."""
    rotations = key_rotations(model, model.config.num_hidden_layers)
    return store.calibrated(bases_of(model, random_ids(4, 64, seed=9), rotations), rotations)


def decoded(model: Any, method: Method, ids: Tensor, kernel: str = "auto") -> tuple[KVCache, Tensor]:
    cache = build_cache(model, method, ids[:, :PROMPT], STEPS, max_step=3, kernel=kernel)
    assert isinstance(cache, KVCache)
    got = [step(model, ids[:, PROMPT : PROMPT + 3], cache, logits_to_keep=0)]
    got += [step(model, ids[:, t : t + 1], cache) for t in range(PROMPT + 3, PROMPT + STEPS)]
    return cache, torch.cat(got, dim=1)


RULES: dict[str, KeepRule] = {"full": Full(), "h2o": H2O(budget=24), "streaming_llm": StreamingLLM(budget=24)}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("model", "limit"), [(EXACT, 1e-10), (FLOAT, 1e-4)], ids=["float64", "float32"])
def test_full_rank_is_the_full_cache(model: Any, limit: float, name: str) -> None:
    """Behind evictions too, where every head has other positions; float32 logits are up to about 10."""
    ids = random_ids(2, PROMPT + STEPS)
    want = decoded(model, Method(name, RULES[name], DenseStore()), ids)
    got = decoded(model, Method(name, RULES[name], ready(LowRank(rank=1.0), model)), ids)
    assert (got[1] - want[1]).abs().max() < limit
    for ours, theirs in zip(got[0].layers, want[0].layers, strict=True):
        assert torch.equal(ours.kept_positions(), theirs.kept_positions())


@pytest.mark.parametrize("bits", [None, 8, 4])
def test_first_layer_against_explicit_projection(bits: int | None) -> None:
    """Keys from k_proj itself, projected before a rotation written out here; values projected; attention by hand."""
    model, ids, rank = EXACT, random_ids(1, PROMPT + 1), 16
    store = ready(LowRank(rank=0.5, k_bits=bits, v_bits=bits), model)
    basis = store.bases[0]
    assert basis is not None
    attention = model.model.layers[0].self_attn
    with inputs_of(attention.q_proj) as seen, attended(model) as outputs:
        cache = build_cache(model, Method("lowrank", Full(), store), ids[:, :PROMPT], 1)
        step(model, ids[:, PROMPT:], cache)
    x = torch.cat(seen, dim=1)
    query, key, value = (
        projection(x).unflatten(-1, (-1, D)).transpose(1, 2)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    held = []
    for rows, directions in ((key, basis.keys), (value, basis.values)):
        kept = directions[..., :rank]
        coordinates = torch.stack([rows[:, h] @ kept[h] for h in range(KV_HEADS)], dim=1)
        if bits is not None:
            coordinates = along_channels(coordinates, bits, 16)
        held.append(torch.stack([coordinates[:, h] @ kept[h].T for h in range(KV_HEADS)], dim=1))
    positions = torch.arange(PROMPT + 1)
    keys, newest = rotate(held[0], positions, 1e4), rotate(query, positions, 1e4)[:, :, -1:]
    p = attention_matrix(newest, keys, torch.ones(1, PROMPT + 1, dtype=torch.bool), D**-0.5)
    want = attention.o_proj(attention_output(p, held[1]).transpose(1, 2).flatten(2))
    # Angles are the model's, in float32. A code that they push over its edge is off by a step of the code.
    assert (outputs[-1] - want).abs().max() < (1e-5 if bits is None else {8: 1e-3, 4: 2e-2}[bits])


class inputs_of:
    """What a linear layer is given, call by call."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.seen: list[Tensor] = []
        self.hook = module.register_forward_hook(lambda _, given, __: self.seen.append(given[0]))

    def __enter__(self) -> list[Tensor]:
        return self.seen

    def __exit__(self, *_: object) -> None:
        self.hook.remove()


def test_eigenvectors_are_the_whitened_svd_of_the_weights() -> None:
    """Projections on them agree to 2e-12: of W C^(1/2), C the second moment of the inputs."""
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(500, 96, generator=draw, dtype=torch.float64)
    inputs = inputs @ torch.randn(96, 96, generator=draw, dtype=torch.float64)
    weight = torch.randn(D, 96, generator=draw, dtype=torch.float64)
    vectors, energy = eigenbasis(second_moment((inputs @ weight.T).view(1, 1, 500, D)))
    whitening = torch.linalg.cholesky(inputs.T @ inputs / 500)
    left, singular, _ = torch.linalg.svd(weight @ whitening)
    torch.testing.assert_close(energy[0], singular**2, rtol=1e-9, atol=0)
    for rank in (1, 8, 20, D):
        ours, theirs = (side[:, :rank] @ side[:, :rank].T for side in (vectors[0], left))
        assert (ours - theirs).abs().max() < 2e-12


def test_no_other_directions_lose_less() -> None:
    """On the text itself, against random orthonormal directions and against single channels."""
    rows = prefill(EXACT, random_ids(2, 64)).layers[0].value
    vectors, energy = eigenbasis(second_moment(rows))
    total = rows.square().sum(-1).mean((0, 2))
    kept = vectors[..., :8]
    lost = (rows - rows @ kept @ kept.mT).square().sum(-1).mean((0, 2))
    torch.testing.assert_close(lost, energy[:, 8:].sum(-1))
    other = torch.linalg.qr(torch.randn(D, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).Q
    assert (lost < (rows - rows @ other @ other.T).square().sum(-1).mean((0, 2))).all()
    assert (lost < total - rows[..., :8].square().sum(-1).mean((0, 2))).all()


def test_energy_picks_ranks_by_layer_and_side() -> None:
    """The least multiple of 8 that keeps the share in every head, found here by counting up."""
    store = ready(LowRank(energy=0.9), EXACT)
    for index, basis in enumerate(store.bases):
        assert basis is not None
        layer = store.for_layer(index)
        for kept, energy in ((layer.keys, basis.key_energy), (layer.values, basis.value_energy)):
            rank = next(r for r in range(8, D + 1, 8) if (energy[:, :r].sum(-1) >= 0.9 * energy.sum(-1) - 1e-6).all())
            assert kept.shape[-1] == rank
    assert ready(LowRank(energy=1.0), EXACT).for_layer(0).keys.shape[-1] == D


@pytest.mark.parametrize("store", [LowRank(), LowRank(rank=0.25), LowRank(k_bits=4, v_bits=4), LowRank(energy=0.9)])
def test_bytes_by_formula(store: LowRank) -> None:
    store = ready(store, FLOAT)
    cache, _ = decoded(FLOAT, Method("lowrank", Full(), store), random_ids(2, PROMPT + STEPS))
    shape = SlotShape(2, KV_HEADS, D, D, PROMPT + STEPS, 3, torch.float32, torch.device("cpu"))
    slots = [held_bytes(layer.slots.buffers(layer.kept)).held for layer in cache.layers]
    assert slots == [store.for_layer(i).planned_bytes(shape) for i in range(len(slots))]
    assert sum(slots) == pytest.approx(len(slots) * store.planned_bytes(shape), abs=len(slots))
    if store.rank == 0.25:
        parts = held_bytes(cache.buffers()).parts
        assert parts["dense"] == 2 * 4 * 2 * KV_HEADS * (PROMPT + STEPS) * 16
        assert parts["basis"] == 2 * 4 * KV_HEADS * D * 16


@pytest.mark.parametrize("store", [LowRank(), LowRank(k_bits=4, v_bits=4)])
def test_the_compiled_kernel_gives_what_the_reference_gives(store: LowRank) -> None:
    method, ids = Method("h2o", H2O(budget=24), ready(store, FLOAT)), random_ids(2, PROMPT + STEPS)
    runs = [decoded(FLOAT, method, ids, kernel) for kernel in ("cpu", "reference")]
    torch.testing.assert_close(runs[0][1], runs[1][1], atol=2e-4, rtol=0)


def test_bases_survive_the_disk_and_a_damaged_file_is_none(tmp_path: Path) -> None:
    bases = bases_of(FLOAT, random_ids(2, 32), key_rotations(FLOAT, 2))
    path = tmp_path / "below" / "bases.safetensors"
    assert load_bases(path, 2, torch.device("cpu")) is None
    save_bases(path, [*bases, None])
    loaded = load_bases(path, 3, torch.device("cpu"))
    assert loaded is not None and loaded[2] is None
    for ours, theirs in zip(bases, loaded, strict=False):
        assert ours is not None and theirs is not None
        assert all(torch.equal(getattr(ours, name), getattr(theirs, name)) for name in vars(ours))
    half = {"0.keys": torch.zeros(2, 4, 4)}  # a whole file, of something else
    for content in (path.read_bytes()[:100], b"", save(half), save({})):
        path.write_bytes(content)
        assert load_bases(path, 2, torch.device("cpu")) is None


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "rank": (lambda: LowRank(rank=0), "rank=0.5"),
    "rank 2": (lambda: LowRank(rank=2), "rank=0.5"),
    "words": (lambda: LowRank(rank="half"), "rank=0.5"),
    "energy": (lambda: LowRank(energy=1.5), "energy=0.5"),  # type: ignore[arg-type]
    "both": (lambda: LowRank(rank=0.5, energy=0.9), "one of them"),
    "bits": (lambda: LowRank(k_bits=5, v_bits=5), "bits=4"),
    "one side": (lambda: LowRank(k_bits=4), "bits=8 or bits=4"),
    "group": (lambda: LowRank(group_size=32), "bits=8"),
    "group 32 of 16": (lambda: LowRank(k_bits=4, v_bits=4, group_size=32).check(D, D), "group=16"),
    "not calibrated": (lambda: build_cache(FLOAT, Method("x", Full(), LowRank()), random_ids(1, 9), 1), "calibrate"),
    "planned by energy": (
        lambda: LowRank(energy=0.9).planned_bytes(SlotShape(1, 1, D, D, 9, 1, torch.float32, torch.device("cpu"))),
        "rank=0.5",
    ),
    "mla": (lambda: build_cache(deepseek(), Method("x", Full(), LowRank()), random_ids(1, 9), 1), "store=dense, int8"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_says_what_to_type(name: str) -> None:
    attempt, answer = WRONG[name]
    with pytest.raises(UserError, match=answer):
        attempt()


def test_basis_fields() -> None:
    """Columns are orthonormal, energies descend and are those of the text."""
    for basis in bases_of(EXACT, random_ids(2, 64), key_rotations(EXACT, 2)):
        assert isinstance(basis, Basis)
        for side, energy in ((basis.keys, basis.key_energy), (basis.values, basis.value_energy)):
            torch.testing.assert_close(side.mT @ side, torch.eye(D, dtype=side.dtype).expand_as(side))
            assert (energy.diff(dim=-1) <= 0).all()
