"""Optimizers of other people, unmodified."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import schedulefree
import torch
from harness import World, distributed
from lion_pytorch import Lion
from models import (
    SMALL_BUCKETS,
    ConvNet,
    Mlp,
    TiedNet,
    Twins,
    assert_same_on_all_ranks,
    assert_same_parameters,
)
from prodigyopt import Prodigy
from torch.optim import SGD, AdamW

from onecopy import ZeroRedundancyOptimizer, is_elementwise

BUCKET_VIEW = pytest.mark.parametrize(
    "bucket_view", [False, True], ids=["own-storage", "bucket-view"]
)


def switch(twins: Twins, mode: str) -> None:
    for _, _, optimizer in twins.both():
        getattr(optimizer, mode)()
    twins.assert_equal()
    assert_same_on_all_ranks(twins.model)


@distributed(1, 2, 3, 4)
@BUCKET_VIEW
@pytest.mark.parametrize("foreach", [False, True], ids=["plain", "foreach"])
def test_schedule_free_adamw_is_bit_equal_through_train_and_eval(
    world: World, bucket_view: bool, foreach: bool
) -> None:
    twins = Twins(
        world,
        TiedNet(),
        schedulefree.AdamWScheduleFree,
        zero={"parameters_as_bucket_view": bucket_view},
        lr=0.02,
        warmup_steps=2,
        weight_decay=0.01,
        foreach=foreach,
    )
    switch(twins, "train")
    twins.train(3)
    trained = copy.deepcopy(twins.model)
    switch(twins, "eval")
    assert not torch.equal(trained.mix.weight, twins.model.mix.weight), "eval() moved nothing"
    assert twins.optimizer.param_groups[0]["train_mode"] is False
    switch(twins, "train")
    assert twins.optimizer.param_groups[0]["train_mode"] is True
    twins.train(3)
    switch(twins, "eval")
    twins.assert_moved()


@distributed(1, 2, 3)
def test_other_schedule_free_classes_are_bit_equal(world: World) -> None:
    classes = (schedulefree.SGDScheduleFree, schedulefree.RAdamScheduleFree)
    for cls, model in zip(classes, (Mlp(), ConvNet()), strict=True):
        twins = Twins(world, model, cls, lr=0.05, foreach=False)
        switch(twins, "train")
        twins.train(3)
        switch(twins, "eval")


@distributed(1, 2, 3)
def test_train_and_eval_reach_one_class_of_two(world: World) -> None:
    def groups(model: Mlp) -> list[dict[str, Any]]:
        free = {"optimizer_class": schedulefree.AdamWScheduleFree, "lr": 0.02}
        return [
            {"params": model.first.parameters(), **free},
            {"params": [*model.norm.parameters(), *model.second.parameters()]},
        ]

    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(groups(model), SGD, bucket_mb=SMALL_BUCKETS, lr=0.1)
    optimizer.train()
    for step in range(3):
        optimizer.zero_grad()
        model(model.batch((world.rank, step))).backward()
        optimizer.step()
    before = copy.deepcopy(model)
    optimizer.eval()
    assert not torch.equal(model.first.weight, before.first.weight)
    assert_same_parameters(model.second, before.second)
    assert_same_on_all_ranks(model)


@distributed(1, 2)
def test_stepping_a_schedule_free_optimizer_in_eval_mode_is_its_own_error(world: World) -> None:
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), schedulefree.AdamWScheduleFree, lr=0.02)
    model(model.batch((world.rank,))).backward()
    with pytest.raises(Exception, match=r"[Tt]rain"):
        optimizer.step()


@distributed(1, 2, 3, 4)
@BUCKET_VIEW
def test_lion_is_cut_and_bit_equal(world: World, bucket_view: bool) -> None:
    assert is_elementwise(Lion, lr=0.01)
    twins = Twins(
        world,
        Mlp(),
        Lion,
        zero={"parameters_as_bucket_view": bucket_view},
        lr=0.01,
        weight_decay=0.1,
    )
    twins.train(4)
    twins.assert_moved()
    owned = sum(p.numel() for g in twins.optimizer.optim.param_groups for p in g["params"])
    total = sum(p.numel() for p in twins.model.parameters())
    assert owned in (total // world.size, total // world.size + 1)


@distributed(1, 2, 3)
def test_prodigy_is_refused_with_the_reason_unless_the_user_insists(world: World) -> None:
    model = Mlp()
    with pytest.raises(ValueError, match=r"Prodigy.*depends on the other parameters.*whole"):
        ZeroRedundancyOptimizer(model.parameters(), Prodigy, lr=1.0)
    assert not is_elementwise(Prodigy, lr=1.0)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), Prodigy, partition="whole", lr=1.0)
    before = copy.deepcopy(model)
    for step in range(3):
        optimizer.zero_grad()
        model(model.batch((world.rank, step))).backward()
        optimizer.step()
        assert_same_on_all_ranks(model)
    assert not torch.equal(model.first.weight, before.first.weight)


@distributed(1, 2)
def test_only_what_the_class_has_is_passed_through(world: World) -> None:
    model = Mlp()
    plain = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01)
    assert not hasattr(plain, "train")
    assert not hasattr(plain, "eval")
    with pytest.raises(AttributeError, match=r"AdamW.*'unheard_of'"):
        _ = plain.unheard_of
    with pytest.raises(AttributeError, match="_private"):
        _ = plain._private
    free = ZeroRedundancyOptimizer(model.parameters(), schedulefree.AdamWScheduleFree, lr=0.01)
    assert callable(free.train)
    assert callable(free.eval)
    assert not hasattr(free, "unheard_of")
