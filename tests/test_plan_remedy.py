"""What is said to fit does, and is the least change that does."""

from __future__ import annotations

import re

import torch.nn as nn
from test_planning import batch, net

from fsdp_compile.factory import MakeBatch
from fsdp_compile.passes import PassConfig
from fsdp_compile.plan_remedy import remedy
from fsdp_compile.plan_search import Setting
from fsdp_compile.planning import Plan, make_plan

CONFIG = PassConfig(hardware="h100")


def plan(setting: Setting, ranks: int = 8, factory=net) -> Plan:
    config = PassConfig(bucket=setting.bucket, hardware="h100")
    return make_plan(factory, ranks, config, setting.replicas, reshard_after_forward=setting.reshard)


def said(setting: Setting, memory: int, factory=net) -> str:
    return remedy(factory, plan(setting, factory=factory), setting, CONFIG, memory)


def named(text: str) -> tuple[int, Setting]:
    """The setting that is advised."""
    found = re.fullmatch(
        r"  would fit: --world-size (\d+) --bucket (\w+)(?: --reshard (\w+))?(?: --replicas (\d+))?, with .*", text
    )
    assert found, text
    reshard = {None: None, "true": True, "false": False}[found[3]]
    return int(found[1]), Setting(reshard, found[2], int(found[4] or 1))


def test_without_replicas() -> None:
    memory = plan(Setting(None, "module", 1)).peak
    assert named(said(Setting(None, "module", 4), memory)) == (8, Setting(None, "module", 1))


def deep_net() -> tuple[nn.Module, MakeBatch]:
    """One that takes much more memory if all of it is kept unsharded."""
    model, _ = net()
    model.blocks.extend(nn.Linear(64, 64) for _ in range(9))
    return model, batch


def test_with_all_resharded() -> None:
    kept, resharded = (Setting(reshard, "module", 1) for reshard in (False, True))
    memory = plan(resharded, factory=deep_net).peak
    assert plan(kept, factory=deep_net).peak > memory
    assert named(said(kept, memory, deep_net)) == (8, resharded)


def test_with_more_ranks() -> None:
    """Of the numbers of ranks that are so many times two more, the least that fits."""
    setting = Setting(True, "module", 1)
    peaks = {ranks: plan(setting, ranks).peak for ranks in (8, 16, 32)}
    assert named(said(setting, peaks[32])) == (32, setting)
    assert named(said(setting, peaks[16])) == (16, setting)


def test_what_nothing_helps() -> None:
    assert said(Setting(True, "module", 1), 10_000).startswith("  nothing tried fits: give a rank less data")


def test_what_is_said_to_fit_fits() -> None:
    setting, fitting = Setting(False, "module", 2), 0
    for memory in (25_000, 40_000, 60_000, 80_000):
        text = said(setting, memory)
        if "would fit" in text:
            ranks, other = named(text)
            assert plan(other, ranks).peak <= memory
            fitting += 1
    assert fitting
