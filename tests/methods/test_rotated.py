"""The rotated stores: an orthogonal matrix that cancels out, and 3-bit codes in three words."""

import pytest
import torch

from kvbench.cache.build import Method, build_cache
from kvbench.cache.decode import step
from kvbench.cache.hadamard import hadamard
from kvbench.cache.store import SlotShape
from kvbench.kernels.parts import read_all
from kvbench.kernels.quantise import pack, unpack
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.per_token import PerToken
from tests.shared.models import random_llama


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 256])
def test_the_matrix_is_orthogonal_symmetric_and_its_own_inverse(dim):
    x = torch.randn(3, 5, dim, dtype=torch.float64)
    assert torch.allclose(hadamard(hadamard(x)), x, atol=1e-12)
    assert torch.allclose(hadamard(x).norm(dim=-1), x.norm(dim=-1))
    matrix = hadamard(torch.eye(dim, dtype=torch.float64))
    assert torch.equal(matrix, matrix.T)
    block = dim & -dim
    assert torch.allclose(matrix[:block, :block].abs(), torch.full((block, block), block**-0.5, dtype=torch.float64))
    assert matrix[:block, block:].abs().sum() == 0


def test_three_bit_codes_take_three_words_a_group_of_32():
    codes = torch.randint(0, 8, (4, 6, 32), dtype=torch.uint8)
    packed = pack(codes, 3)
    assert packed.shape == (4, 6, 12)
    assert torch.equal(unpack(packed, 3), codes)
    for code in range(8):
        constant = torch.full((1, 32), code, dtype=torch.uint8)
        assert torch.equal(unpack(pack(constant, 3), 3), constant)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
def test_what_is_held_is_the_rotated_state_within_the_rounding_of_its_groups(bits):
    shape = SlotShape(2, 3, 64, 64, 40, 1, torch.float32, torch.device("cpu"))
    slots = PerToken(bits, bits, rotate=True).allocate(shape)
    key, value = torch.randn(2, 2, 3, 20, 64) * 5
    slots.append(key, value)
    held = read_all(slots.key_parts(), torch.float32)
    groups = hadamard(key).unflatten(-1, (-1, 32))
    step_size = (groups.amax(-1) - groups.amin(-1)) / (2**bits - 1)
    error = (held.unflatten(-1, (-1, 32)) - groups).abs()
    assert (error <= step_size.unsqueeze(-1) * 0.51 + 0.03).all()
    assert (hadamard(held) - key).abs().max() < key.abs().max() * 4 / 2**bits + 0.05


def test_rotating_spreads_an_outlier_channel():
    key = torch.randn(1, 1, 200, 64)
    key[..., 5] *= 30
    shape = SlotShape(1, 1, 64, 64, 200, 1, torch.float32, torch.device("cpu"))
    errors = []
    for rotate in (False, True):
        slots = PerToken(4, 4, rotate=rotate).allocate(shape)
        slots.append(key, key)
        held = read_all(slots.key_parts(), torch.float32)
        errors.append(float(((hadamard(held) if rotate else held) - key).pow(2).mean()))
    assert errors[1] < 0.7 * errors[0]


def test_a_rotated_8_bit_cache_predicts_what_the_full_one_does_and_keeps_the_same_tokens():
    model = random_llama(6, 2, 32, dtype=torch.float32)
    ids = torch.randint(0, 97, (2, 90), generator=torch.Generator().manual_seed(1))
    for rule in (Full(), H2O(budget=40)):
        logits, kept = [], []
        for store in (PerToken(8, 8), PerToken(8, 8, rotate=True)):
            cache = build_cache(model, Method("m", rule, store), ids[:, :50], max_new_tokens=40)
            logits.append(torch.cat([step(model, ids[:, t : t + 1], cache) for t in range(50, 90)], 1))
            kept.append(cache.layers[0].kept_positions())
        # The first forward after the prompt attends over codes of both kinds: they differ by rounding alone.
        assert (logits[0] - logits[1])[:, 0].abs().max() < 0.15 * logits[0].std()
        assert (kept[0] == kept[1]).float().mean() > 0.8
