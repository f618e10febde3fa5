"""A decoder whose cache is pruned: the same session, another keep ratio at each call."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from benchmarks.cached_decoder import build_decoder
from controller.models.kv_cache import (
    KEEP_RATIO,
    KEPT_ENTRIES,
    CachedAttention,
    cached_attention,
    past_inputs,
    prune_cache,
)
from controller.models.sessions import Arrays, open_session, run
from sla.errors import ModelError

WIDTH, HEADS = 64, 4


DECODER = build_decoder()
CACHE, LAYER_NAMES = DECODER.cache, list(DECODER.layers)


@pytest.fixture(scope="module")
def decoder() -> Any:
    return DECODER.model


def feeds(past: int, items: int = 2) -> Arrays:
    rng = np.random.default_rng(past)
    caches = {
        f"past.{name}": rng.standard_normal((items, HEADS, past, WIDTH // HEADS)).astype(np.float32) for name in CACHE
    }
    return {"x": rng.standard_normal((items, 1, WIDTH)).astype(np.float32), **caches}


def ratio(value: float) -> Arrays:
    return {KEEP_RATIO: np.array(value, np.float32)}


def test_the_keep_ratio_changes_from_call_to_call(decoder: Any) -> None:
    pruned = prune_cache(decoder, LAYER_NAMES)
    onnx.checker.check_model(pruned)
    session = open_session(pruned.SerializeToString(), "pruned")
    plain = run(open_session(decoder.SerializeToString(), "plain"), feeds(19), ["y", *CACHE], "plain")
    for keep, count in ((1.0, 20), (0.7, 14), (0.3, 6), (0.0001, 1)):
        made = run(session, {**feeds(19), **ratio(keep)}, ["y", KEPT_ENTRIES, *CACHE], "pruned")
        np.testing.assert_allclose(made["y"], plain["y"], rtol=0, atol=1e-5)  # this call still sees all entries
        assert made[KEPT_ENTRIES].shape == (2, count)
        assert (made[KEPT_ENTRIES][:, -1] == 19).all()  # the newest one
        for name in CACHE:
            for item in range(2):
                expected = plain[name][item][:, made[KEPT_ENTRIES][item]]
                np.testing.assert_allclose(made[name][item], expected, rtol=0, atol=1e-5)


def test_the_entries_that_are_looked_at_most_are_kept(decoder: Any) -> None:
    pruned = prune_cache(decoder, LAYER_NAMES)
    for layer in LAYER_NAMES:
        pruned.graph.output.append(onnx.ValueInfoProto(name=layer.weights))
    names = [KEPT_ENTRIES, *(layer.weights for layer in LAYER_NAMES)]
    made = run(open_session(pruned.SerializeToString(), "it"), {**feeds(15), **ratio(0.5)}, names, "it")
    importance = sum(made[layer.weights].sum(axis=(1, 2)) for layer in LAYER_NAMES)
    for item in range(2):
        old = importance[item][:-1]
        best = np.sort(np.argsort(-old, kind="stable")[:7])
        assert made[KEPT_ENTRIES][item].tolist() == [*best, 15]


def test_decoding_goes_on_with_the_pruned_cache_and_stays_close(decoder: Any) -> None:
    session = open_session(prune_cache(decoder, LAYER_NAMES).SerializeToString(), "it")
    rng = np.random.default_rng(9)
    steps = [rng.standard_normal((1, 1, WIDTH)).astype(np.float32) for _ in range(12)]
    results: dict[float, list[np.ndarray]] = {}
    for keep in (1.0, 0.8):
        state = {name: value for name, value in feeds(24, items=1).items() if name != "x"}
        results[keep] = []
        for step, x in enumerate(steps):
            now = ratio(keep if step == 3 else 1.0)
            made = run(session, {"x": x, **state, **now}, ["y", *CACHE], "it")
            state = {f"past.{name}": made[name] for name in CACHE}
            results[keep].append(made["y"].ravel())
    assert state["past.key.0"].shape[2] == 23 + 8  # of 28 entries 23 were kept
    pairs = zip(results[1.0], results[0.8], strict=True)
    cosines = [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in pairs]
    assert cosines[:4] == pytest.approx([1.0] * 4)
    assert min(cosines) > 0.8


def test_what_is_no_cache_is_refused(decoder: Any) -> None:
    with pytest.raises(ModelError, match="attention weights 'nothing'"):
        prune_cache(decoder, [CachedAttention("nothing", "key.0", "value.0")])
    with pytest.raises(ModelError, match="not a cache output"):
        prune_cache(decoder, [CachedAttention(LAYER_NAMES[0].weights, "x", "value.0")])
    with pytest.raises(ModelError, match="pruned already"):
        prune_cache(prune_cache(decoder, LAYER_NAMES), LAYER_NAMES[:1])
    with pytest.raises(ModelError, match="at least one layer"):
        prune_cache(decoder, [])


def test_the_layers_with_a_cache_are_found_from_the_graph(decoder: Any, mlp: Any) -> None:
    assert cached_attention(decoder) == LAYER_NAMES
    with pytest.raises(ModelError, match="no pairs of cache outputs"):
        cached_attention(mlp)


def test_where_a_cache_goes_back_in_is_found_from_the_graph(decoder: Any) -> None:
    assert past_inputs(decoder, LAYER_NAMES) == DECODER.past
    with pytest.raises(ModelError, match="grows from no input"):
        past_inputs(decoder, [CachedAttention(LAYER_NAMES[0].weights, "y", "key.0")])
