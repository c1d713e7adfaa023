"""Collectives of ranks in one process: what arrives, how many bytes, and what is said when ranks fall out of step."""

from __future__ import annotations

import threading

import pytest
import torch

from mini_engine.groups import Collective, GroupError, LocalGroup, run_ranks


def ranks(size, work):
    return run_ranks(LocalGroup.create(size), work)


def part(rank: int, *shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * rank


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_collectives_move_the_right_parts(size):
    whole = torch.cat([part(r, 2, 3) for r in range(size)], 1)
    for got in ranks(size, lambda g: g.all_gather(part(g.rank, 2, 3), dim=1)):
        assert torch.equal(got, whole)
    total = sum(part(r, 2, 2 * size) for r in range(size))
    scattered = ranks(size, lambda g: g.reduce_scatter(part(g.rank, 2, 2 * size), dim=1))
    assert torch.equal(torch.cat(scattered, 1), total)
    sent = [part(r, size, 5) for r in range(size)]
    for r, got in enumerate(ranks(size, lambda g: g.all_to_all(sent[g.rank]))):
        assert torch.equal(got, torch.stack([sent[other][r] for other in range(size)]))
    for shape in ((7,), (2, 5), ()):
        for got in ranks(size, lambda g, s=shape: g.all_reduce(part(g.rank, *s))):
            assert torch.equal(got, sum(part(r, *shape) for r in range(size)))


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_that_arrive(size):
    """Of 16-bit x [N, 6]: all-gather (N-1) whole, scatter and all-to-all (N-1)/N, all-reduce twice that."""
    groups = LocalGroup.create(size)
    x = torch.ones(size, 6, dtype=torch.bfloat16)
    run_ranks(groups, lambda g: [g.all_gather(x), g.reduce_scatter(x), g.all_to_all(x), g.all_reduce(x)])
    others, whole = size - 1, 2 * size * 6
    for group in groups:
        assert list(group.records) == [
            Collective("all_gather", others * whole),
            Collective("reduce_scatter", others * whole // size),
            Collective("all_to_all", others * whole // size),
            Collective("all_reduce", 2 * others * whole // size),
        ]
        assert group.num_bytes == sum(record.num_bytes for record in group.records)


def test_one_rank_moves_nothing():
    group = LocalGroup.create(1)[0]
    x = torch.ones(1, 3)
    assert group.all_gather(x) is x and group.all_reduce(x) is x and group.all_to_all(x) is x
    assert torch.equal(group.reduce_scatter(x), x) and not group.records and group.num_bytes == 0


def test_old_records_are_dropped_and_their_bytes_still_count(monkeypatch):
    monkeypatch.setattr("mini_engine.groups.RECORDS_KEPT", 3)
    groups = LocalGroup.create(2)
    run_ranks(groups, lambda g: [g.all_gather(torch.ones(2)) for _ in range(5)])
    assert [(len(group.records), group.num_bytes) for group in groups] == [(3, 5 * 8)] * 2


def test_sums_are_float32_whatever_travels():
    """Rounding every partial sum to bfloat16 would lose each of the small addends."""
    values = [256.0, 1.0, 1.0, 1.0]
    got = ranks(4, lambda g: g.reduce_scatter(torch.full((4,), values[g.rank], dtype=torch.bfloat16)))
    assert torch.cat(got).tolist() == [259.0] * 4 and got[0].dtype == torch.float32


@pytest.mark.parametrize("how", ["_gather", "_swap"])
def test_who_receives_is_safe_from_what_the_sender_does_next(how):
    """What was sent is looked at only after all ranks have changed their own."""

    def work(group):
        x = torch.full((3,), float(group.rank))
        got = getattr(group, how)("some", x if how == "_gather" else x.chunk(3))
        x += 100
        group.all_gather(x)
        return [part[0].item() for part in got]

    assert ranks(3, work) == [[0, 1, 2]] * 3


def test_groups_of_neighbours():
    def work(group):
        pair = group.split(2)
        return pair.rank, pair.all_gather(torch.tensor([float(group.rank)])).tolist(), pair.num_bytes, group.num_bytes

    assert ranks(6, work) == [(r % 2, [r // 2 * 2, r // 2 * 2 + 1], 4, 0) for r in range(6)]


def test_groups_of_groups():
    assert ranks(8, lambda g: g.split(4).split(2).all_gather(torch.tensor([g.rank])).tolist())[6] == [6, 7]


def test_groups_can_run_again_and_after_a_failure():
    groups, threads_before = LocalGroup.create(2), threading.active_count()

    def fail(group):
        if group.rank == 1:
            raise KeyError("lost")
        group.all_gather(torch.ones(1))

    with pytest.raises(KeyError, match="lost"):
        run_ranks(groups, fail)
    for _ in range(3):
        assert run_ranks(groups, lambda g: g.all_gather(torch.tensor([g.rank])).tolist()) == [[0, 1]] * 2
    assert threading.active_count() == threads_before


def test_a_rank_that_skips_a_collective_is_named():
    with pytest.raises(GroupError, match="rank 0 waits in all_gather, but rank 1 has ended"):
        ranks(2, lambda g: g.all_gather(torch.ones(1)) if g.rank == 0 else None)


@pytest.mark.parametrize(
    "other, says",
    [
        (lambda g: g.all_gather(torch.ones(3)), r"rank 0 all_gather of \(\(2,\).*rank 1 all_gather of \(\(3,\)"),
        (lambda g: g.all_gather(torch.ones(2).half()), "float16"),
        (lambda g: g.reduce_scatter(torch.ones(2)), "rank 1 reduce_scatter"),
    ],
)
def test_ranks_that_call_different_things_are_named(other, says):
    with pytest.raises(GroupError, match=says):
        ranks(2, lambda g: g.all_gather(torch.ones(2)) if g.rank == 0 else other(g))


@pytest.mark.parametrize(
    "work, says",
    [
        (lambda g: g.all_to_all(torch.ones(3)), "one part for each of 2 ranks, got 3"),
        (lambda g: g.reduce_scatter(torch.ones(3)), "3 entries"),
        (lambda g: g.split(3), "2 ranks cannot be split into groups of 3"),
    ],
)
def test_shapes_that_cannot_be_dealt_out_are_refused(work, says):
    with pytest.raises(GroupError, match=says):
        ranks(2, work)


def test_gradient_and_inference_mode_are_the_callers():
    def modes(group):
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    assert ranks(2, modes) == [(True, False)] * 2
    with torch.no_grad():
        assert ranks(2, modes) == [(False, False)] * 2
    with torch.inference_mode():
        assert ranks(2, modes) == [(False, True)] * 2
