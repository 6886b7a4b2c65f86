"""The matrix of comparisons between methods and the set of methods that cannot be told apart from the best."""

import numpy as np
import pytest
from scipy import stats

from kvbench.errors import UserError
from kvbench.results.method_pairs import best_set, holm, holm_matrix, pair_p_values


def _symmetric(mean: float, deviation: float, seed: int, n: int = 32) -> np.ndarray:
    """Differences without skewness, with exactly this mean and standard deviation."""
    half = np.random.default_rng(seed).normal(size=n // 2)
    values = np.concatenate([half, -half])
    return mean + deviation * values / values.std(ddof=1)


def test_p_value_without_skew_is_the_paired_t_test():
    noise, common = _symmetric(0.3, 1, 0), np.random.default_rng(1).normal(size=32)
    found = pair_p_values(np.stack([common + noise, common]))
    assert found == pytest.approx([stats.ttest_rel(common + noise, common).pvalue], rel=1e-9)


def test_p_value_is_never_below_the_paired_t_test():
    values = np.random.default_rng(2).exponential(size=(6, 20)) * np.arange(1, 7)[:, None]
    first, second = np.triu_indices(6, 1)
    plain = stats.ttest_rel(values[first], values[second], axis=1).pvalue
    assert (pair_p_values(values) >= plain * (1 - 1e-9)).all()


def test_holm_by_hand():
    assert holm(np.array([0.03, 0.01, 0.04, 0.5])).tolist() == pytest.approx([0.09, 0.04, 0.09, 0.5])


def test_holm_keeps_order_and_stays_at_most_one():
    p = np.random.default_rng(3).random((50, 21)) ** 3
    corrected = holm(p)
    order = np.argsort(p, axis=1)
    assert (np.diff(np.take_along_axis(corrected, order, 1), axis=1) >= 0).all()
    assert (corrected >= p).all() and corrected.max() <= 1
    assert corrected.min(1) == pytest.approx(np.minimum(p.min(1) * 21, 1))


def test_holm_does_not_count_tests_that_were_not_made():
    found = holm(np.array([0.02, np.nan, 0.01]))
    assert found[[0, 2]].tolist() == pytest.approx([0.02, 0.02]) and np.isnan(found[1])


def test_matrix_is_symmetric_and_differences_are_row_minus_column():
    values = {name: _symmetric(mean, 0.1, seed) for seed, (name, mean) in enumerate([("a", 0.1), ("b", 0.4), ("c", 0)])}
    found = holm_matrix(values)
    assert found.methods == ("a", "b", "c") and found.n == 32
    assert (found.p == found.p.T).all() and (np.diag(found.p) == 1).all()
    assert found.difference == pytest.approx(np.array([[0, -0.3, 0.1], [0.3, 0, 0.4], [-0.1, -0.4, 0]]))


def test_best_set_holds_what_cannot_be_told_apart_from_the_best():
    common = np.random.default_rng(4).normal(size=32)  # hard windows are hard for every method
    values = {
        "far": common + _symmetric(0.5, 0.1, 1),
        "near": common + _symmetric(0.01, 0.1, 2),
        "best": common + _symmetric(0.0, 0.1, 3),
    }
    means = {name: float(each.mean()) for name, each in values.items()}
    assert best_set(holm_matrix(values), means) == ("best", "near")
    assert best_set(holm_matrix(values), means, better="high") == ("far",)


def test_correction_for_all_pairs_widens_the_best_set():
    best = np.random.default_rng(1).normal(size=32)
    values = {"best": best, "second": best + _symmetric(0.045, 0.1, 2)}  # t = 2.5, p = 0.02
    means = {name: float(each.mean()) for name, each in values.items()}
    assert best_set(holm_matrix(values), means) == ("best",)
    values |= {f"other {k}": best + _symmetric(0.02, 0.1, 3 + k) for k in range(5)}
    means = {name: float(each.mean()) for name, each in values.items()}
    assert len(best_set(holm_matrix(values), means)) == 7


def test_with_fewer_than_ten_windows_nothing_is_told_apart():
    values = {"a": np.zeros(9), "b": np.full(9, 5.0)}
    found = holm_matrix(values)
    assert np.isnan(found.p[0, 1]) and found.difference[1, 0] == 5
    assert best_set(found, {"a": 0.0, "b": 5.0}) == ("a", "b")
    assert best_set(holm_matrix({"a": np.zeros(10), "b": np.full(10, 5.0)}), {"a": 0.0, "b": 5.0}) == ("a",)


def test_equal_methods_cannot_be_told_apart():
    same = np.random.default_rng(5).normal(size=16)
    assert holm_matrix({"a": same, "b": same}).p[0, 1] == 1


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_method_without_finite_differences_is_not_tested_and_not_best(bad):
    values = {"a": _symmetric(0.0, 0.1, 1), "b": _symmetric(0.3, 0.1, 2), "broken": np.full(32, bad)}
    found = holm_matrix(values)
    assert np.isnan(found.p[2, :2]).all() and found.p[0, 1] == holm_matrix({k: values[k] for k in "ab"}).p[0, 1]
    assert best_set(found, {"a": 0.0, "b": 0.3, "broken": bad}) == ("a",)


def test_methods_on_other_units_are_refused():
    with pytest.raises(UserError, match=r"differences of b have shape \[11\], a \[12\]"):
        holm_matrix({"a": np.zeros(12), "b": np.zeros(11)})


def test_no_method_and_one_method():
    assert holm_matrix({}).p.shape == (0, 0) and best_set(holm_matrix({}), {}) == ()
    assert best_set(holm_matrix({"a": np.zeros(12)}), {"a": 0.0}) == ("a",)
