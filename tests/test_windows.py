"""Windows of a split: bounds, shards, ranks, and what is drawn."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from grt.data.loader import Split, batch, bigram_entropy, check_ids, n_windows, windows


def make_split(tmp_path: Path, ids: list[int], shard: int = 10**9, vocab_size: int = 257) -> Split:
    """A split over given ids, cut into shards of `shard` tokens."""
    shards = []
    for n, start in enumerate(range(0, len(ids), shard)):
        piece = np.array(ids[start : start + shard], "<u2")
        (tmp_path / f"val-{n:05}.bin").write_bytes(piece.tobytes())
        shards.append({"file": f"val-{n:05}.bin", "tokens": len(piece)})
    entry = {"documents": 1, "tokens": len(ids), "bytes": len(ids), "sha256": "", "shards": shards}
    return Split("val", tmp_path, entry, "uint16", vocab_size)


@pytest.mark.parametrize("shard", [1, 3, 7, 100])
def test_reads_cross_shards(tmp_path, shard):
    ids = list(range(20))
    split = make_split(tmp_path, ids, shard)
    for start in range(21):
        for length in range(21 - start):
            got = split.read(start, length)
            assert got.dtype == np.int64 and got.tolist() == ids[start : start + length]


def test_exactly_one_window_works_and_one_token_less_is_refused(tmp_path):
    split = make_split(tmp_path, list(range(9)))
    for step in range(20):
        ids, targets = batch(split, seed=0, step=step, slot=0, rows=range(2), context=8)
        assert ids.tolist() == [list(range(8))] * 2 and targets.tolist() == [list(range(1, 9))] * 2
    assert [t.tolist() for _, t in windows(split, 8, None, 4)] == [[list(range(1, 9))]]
    message = "val split in .* has 9 tokens but a window needs 10"
    with pytest.raises(ValueError, match=message):
        batch(split, seed=0, step=0, slot=0, rows=range(2), context=9)
    with pytest.raises(ValueError, match=message):
        n_windows(split, 9)


def test_every_start_is_drawn(tmp_path):
    split = make_split(tmp_path, list(range(12)))
    ids, targets = batch(split, seed=1, step=0, slot=0, rows=range(400), context=8)
    assert set(ids[:, 0].tolist()) == {0, 1, 2, 3} and targets.max() == 11
    assert ids.dtype == targets.dtype == torch.int64 and ids.is_contiguous() and targets.is_contiguous()
    assert torch.equal(ids[:, 1:], targets[:, :-1])


def test_batches_are_pure_and_ranks_divide_them(tmp_path):
    split = make_split(tmp_path, [i % 257 for i in range(20000)], 1500)
    here = dict(seed=3, step=5, slot=1, context=16)
    whole = batch(split, rows=range(8), **here)
    batch(split, seed=0, step=0, slot=0, rows=range(3), context=16)
    np.random.seed(0)
    ranks = [batch(split, rows=range(k * 2, k * 2 + 2), **here) for k in range(4)]
    for one, parts in zip(whole, zip(*ranks, strict=True), strict=True):
        assert torch.equal(one, torch.cat(parts))
    assert len({tuple(row) for row in whole[0].tolist()}) == 8
    for change in ("seed", "step", "slot"):
        assert not torch.equal(whole[0], batch(split, rows=range(8), **here | {change: here[change] + 1})[0])


def test_offsets_never_change_between_versions(tmp_path):
    split = make_split(tmp_path, list(range(257)))
    ids, _ = batch(split, seed=0, step=0, slot=0, rows=range(4), context=1)
    assert ids[:, 0].tolist() == [19, 122, 21, 142]  # a change would break exact resume of old runs


@pytest.mark.parametrize("n", [9, 16, 17, 24, 25, 33])
def test_windows_tile_the_split(tmp_path, n):
    split = make_split(tmp_path, list(range(n)), shard=5)
    assert n_windows(split, 8) == (n - 1) // 8
    batches = list(windows(split, 8, None, 2))
    assert [len(ids) for ids, _ in batches][:-1] == [2] * (len(batches) - 1)
    ids, targets = (torch.cat(part).flatten().tolist() for part in zip(*batches, strict=True))
    assert ids == list(range(len(ids))) and targets == list(range(1, len(ids) + 1))
    assert len(ids) == 8 * ((n - 1) // 8)
    assert sum(len(ids) for ids, _ in windows(split, 8, 2, 16)) == n_windows(split, 8, 2) == min(2, (n - 1) // 8)


def test_check_ids():
    check_ids(np.array([0, 256]), 257, "here")
    with pytest.raises(ValueError, match="here holds id 257, beyond its vocabulary of 257"):
        check_ids(np.array([257]), 257, "here")


def test_bigram_entropy(tmp_path, monkeypatch):
    assert bigram_entropy(make_split(tmp_path, [1, 2] * 50)) == 0.0
    monkeypatch.setattr("grt.data.loader.BLOCK", 7)  # pairs across blocks must count
    ids = np.random.default_rng(0).integers(0, 4, 1000).tolist()
    pairs = list(itertools.pairwise(ids))
    naive = -sum(math.log(pairs.count(pair) / ids[:-1].count(pair[0])) for pair in pairs) / len(pairs)
    assert bigram_entropy(make_split(tmp_path, ids)) == pytest.approx(naive, rel=1e-12)
    with pytest.raises(ValueError, match="up to 1024, not 1025"):
        bigram_entropy(make_split(tmp_path, ids, vocab_size=1025))
