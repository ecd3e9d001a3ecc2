"""The ranks that other tests run on: results, exceptions, hangs, and a clean start after each."""

import time

import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailed


def total(value):
    tensor = torch.tensor(float(dist.get_rank() + value))
    dist.all_reduce(tensor)
    return dist.get_rank(), tensor.item()


def raise_on_rank_1():
    if dist.get_rank() == 1:
        raise ValueError("only here")
    dist.barrier()


def unpicklable():
    return lambda: None


def hang_on_rank_0():
    if dist.get_rank() == 0:
        time.sleep(1000)


def test_results_come_in_order_of_ranks(ranks2):
    assert ranks2.run(total, 1) == [(0, 3.0), (1, 3.0)]


def test_one_rank_raises(ranks2):
    with pytest.raises(RanksFailed, match="only here"):
        ranks2.run(raise_on_rank_1, timeout=5)
    assert ranks2.run(total, 1) == [(0, 3.0), (1, 3.0)]


def test_one_rank_hangs(ranks2):
    with pytest.raises(RanksFailed, match="hang_on_rank_0"):
        ranks2.run(hang_on_rank_0, timeout=3)
    assert ranks2.run(total, 2) == [(0, 5.0), (1, 5.0)]


def test_a_result_that_cannot_be_sent_is_an_error(ranks2):
    with pytest.raises(RanksFailed, match="lambda"):
        ranks2.run(unpicklable, timeout=20)
