"""Copies of an optimizer, and what users do to parameters behind its back."""

from __future__ import annotations

import copy
import pickle
import tempfile

import pytest
import torch
from harness import World, distributed, pretend_hosts
from inside import plan_of, traffic_of
from manners import BUCKET_VIEW, give_gradients, sharded
from models import (
    SMALL_BUCKETS,
    ConvNet,
    MixedNet,
    Mlp,
    TiedNet,
    Twins,
    assert_same_on_all_ranks,
    assert_same_parameters,
)
from torch import nn
from torch.optim import SGD, AdamW, Optimizer, lr_scheduler

from onecopy import ZeroRedundancyOptimizer

# ---------------------------------------- copies ----------------------------------------


@distributed(1, 2, 3, 4)
@BUCKET_VIEW
def test_a_copy_of_model_and_optimizer_trains_on_as_the_original_would(
    world: World, bucket_view: bool
) -> None:
    zero = {"parameters_as_bucket_view": bucket_view}
    for model in (Mlp(), TiedNet(), MixedNet(), ConvNet()):
        twins = Twins(world, model, AdamW, ddp=False, zero=zero, lr=0.01)
        twins.train(2)
        original, original_optimizer = twins.model, twins.optimizer
        frozen_in_time = copy.deepcopy(twins.model)
        twins.model, twins.optimizer = copy.deepcopy((twins.model, twins.optimizer))
        twins.ddp = twins.model
        ours = {id(p) for p in twins.model.parameters()}
        listed = {id(p) for group in twins.optimizer.param_groups for p in group["params"]}
        assert listed == ours
        twins.train(3)
        assert_same_parameters(original, frozen_in_time)

        for param in original.parameters():
            param.grad = torch.zeros_like(param)
        original_optimizer.step()  # and the original is still alive
        twins.assert_equal()
        assert not torch.equal(next(original.parameters()), next(frozen_in_time.parameters()))
        assert_same_on_all_ranks(original)


@distributed(1, 2, 3)
@BUCKET_VIEW
def test_a_copy_of_the_optimizer_alone_trains_its_own_parameters(
    world: World, bucket_view: bool
) -> None:
    twins = Twins(world, Mlp(), AdamW, zero={"parameters_as_bucket_view": bucket_view}, lr=0.01)
    lr_scheduler.ExponentialLR(twins.optimizer, 0.5)  # wraps `step` of the original
    twins.train(2)
    calls: list[int] = []
    twins.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    copied = copy.deepcopy(twins.optimizer)
    assert copied.param_groups[0]["params"][0] is not twins.optimizer.param_groups[0]["params"][0]
    before = copy.deepcopy(twins.model)
    for target, source in zip(
        copied.param_groups[0]["params"], twins.model.parameters(), strict=True
    ):
        target.grad = source.grad.clone()
    copied.step()
    assert not calls
    assert_same_parameters(twins.model, before)
    twins.step()
    twins.assert_equal()
    assert calls == [1]
    for copied_param, param in zip(
        copied.param_groups[0]["params"], twins.model.parameters(), strict=True
    ):
        assert torch.equal(copied_param, param)  # both have taken the same step
    copied.consolidate_state_dict()


@distributed(1, 2)
def test_pickling_is_refused_with_advice(world: World) -> None:
    optimizer = sharded(Mlp())
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(optimizer)
    with (
        tempfile.TemporaryFile() as file,
        pytest.raises(TypeError, match="state_dict"),
    ):
        torch.save(optimizer, file)


# ---------------------------------------- behind the optimizer's back ----------------------------


@distributed(1, 2, 3)
@BUCKET_VIEW
def test_another_dtype_after_construction_is_refused_by_name(
    world: World, bucket_view: bool
) -> None:
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(), AdamW, parameters_as_bucket_view=bucket_view, lr=0.01
    )
    model.to(torch.float64)
    give_gradients(model)
    if world.size == 1 and not bucket_view:
        optimizer.step()  # nothing is sharded or moved: the plain class follows
        return
    with pytest.raises(RuntimeError, match=r"first\.weight.*float32.*float64"):
        optimizer.step()


@distributed(2, 3)
@BUCKET_VIEW
def test_one_parameter_of_another_dtype_is_refused_by_name(world: World, bucket_view: bool) -> None:
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(), AdamW, parameters_as_bucket_view=bucket_view, lr=0.01
    )
    give_gradients(model)
    optimizer.step()
    model.second.to(torch.bfloat16)
    give_gradients(model)
    with pytest.raises(RuntimeError, match=r"second\.weight.*float32.*bfloat16"):
        optimizer.step()


@distributed(1, 2, 3, 4)
@BUCKET_VIEW
def test_parameters_that_were_given_other_memory_train_on(world: World, bucket_view: bool) -> None:
    for model in (Mlp(), MixedNet(), ConvNet()):
        twins = Twins(
            world, model, AdamW, ddp=False, zero={"parameters_as_bucket_view": bucket_view}, lr=0.01
        )
        twins.train(2)
        for each, _, _ in twins.both():
            for param in each.parameters():
                param.data = param.data.clone() * 2
        twins.train(2)
        first = next(twins.model.parameters())
        first.data = first.data.clone()
        twins.train(2)
        # In and out of another dtype, with gradients that came in between.
        twins.model.to(torch.float64)
        for param, other in zip(
            twins.model.parameters(), twins.plain_model.parameters(), strict=True
        ):
            param.data = param.data.to(other.dtype)
        twins.train(2)
        twins.assert_moved()
        assert_same_on_all_ranks(twins.model)


@distributed(1, 2, 3)
@BUCKET_VIEW
def test_values_written_into_the_parameters_are_trained_from(
    world: World, bucket_view: bool
) -> None:
    twins = Twins(world, Mlp(), AdamW, zero={"parameters_as_bucket_view": bucket_view}, lr=0.01)
    twins.train(2)
    saved = copy.deepcopy(twins.model.state_dict())
    twins.train(2)
    for model, _, _ in twins.both():
        model.load_state_dict(saved)
    twins.assert_equal()
    twins.train(2)
    for model, _, _ in twins.both():
        nn.init.constant_(model.first.weight, 0.25)
    twins.train(2)


def replaced(model: nn.Module) -> dict[str, torch.Tensor]:
    """What `load_state_dict(..., assign=True)` takes: other tensors with the same values."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@distributed(1, 2, 3)
@BUCKET_VIEW
@pytest.mark.parametrize("set_to_none", [True, False], ids=["none", "zeros"])
def test_replaced_parameters_are_refused_at_the_next_step(
    world: World, bucket_view: bool, set_to_none: bool
) -> None:
    model = Mlp()
    optimizer = sharded(model, parameters_as_bucket_view=bucket_view)
    model(model.batch((world.rank,))).backward()
    optimizer.step()
    model.load_state_dict(replaced(model), assign=True)
    optimizer.zero_grad(set_to_none=set_to_none)
    model(model.batch((world.rank,))).backward()
    with pytest.raises(RuntimeError, match="assign=True"):
        optimizer.step()


@distributed(1, 2, 3)
def test_a_part_of_the_parameters_replaced_is_refused_at_the_next_step(world: World) -> None:
    model = Mlp()
    optimizer = sharded(model)
    model.second.load_state_dict(replaced(model.second), assign=True)
    model(model.batch((world.rank,))).backward()
    with pytest.raises(RuntimeError, match="assign=True"):
        optimizer.step()


@distributed(1, 2, 3)
@BUCKET_VIEW
def test_another_memory_format_after_construction_is_refused_by_name(
    world: World, bucket_view: bool
) -> None:
    model = ConvNet(torch.contiguous_format)
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(), AdamW, parameters_as_bucket_view=bucket_view, lr=0.01
    )
    model.to(memory_format=torch.channels_last)
    give_gradients(model)
    if world.size == 1 and not bucket_view:
        optimizer.step()
        return
    with pytest.raises(RuntimeError, match=r"first\.weight.*stride"):
        optimizer.step()


@distributed(2, 3, timeout=40, pg_timeout=8)
@BUCKET_VIEW
@pytest.mark.parametrize("cls", [SGD, AdamW])
def test_another_dtype_before_detach_is_refused_at_the_next_step(
    world: World, cls: type[Optimizer], bucket_view: bool
) -> None:
    model = Mlp()
    optimizer = sharded(model, cls, parameters_as_bucket_view=bucket_view)
    optimizer.attach(model)
    model(model.batch((world.rank,))).backward()
    optimizer.step()
    model.double()
    optimizer.detach()
    assert all(param.dtype is torch.float64 for param in model.parameters())
    model(model.batch((world.rank,)).double()).backward()
    with pytest.raises(RuntimeError, match="has changed since the optimizer was built"):
        optimizer.step()
    assert all(param.dtype is torch.float64 for param in model.parameters())


@distributed(2)
def test_a_compiled_module_trains_the_same(world: World) -> None:
    twins = Twins(world, Mlp(), AdamW, lr=0.01)
    twins.plain_ddp, twins.ddp = (torch.compile(ddp, backend="eager") for _, ddp, _ in twins.both())
    twins.train(2)
    twins.assert_moved()


# ---------------------------------------- cost ----------------------------------------


@distributed(2, 3, 4)
@BUCKET_VIEW
def test_a_step_sends_what_was_planned_and_no_more(world: World, bucket_view: bool) -> None:
    pretend_hosts(world)  # else a rank may pass on what others own
    model = Mlp()
    model.norm.requires_grad_(False)
    for bucket_mb in (SMALL_BUCKETS, 25):
        optimizer = sharded(model, bucket_mb=bucket_mb, parameters_as_bucket_view=bucket_view)
        pieces = list(plan_of(optimizer).pieces(world.rank))
        traffic = traffic_of(optimizer)
        for _ in range(2):
            model.zero_grad()
            model(model.batch((world.rank,))).backward()
            messages, sent = traffic.messages, traffic.bytes
            optimizer.step()
            share = sum(4 * piece.numel for piece in pieces)
            assert traffic.bytes - sent == share * (world.size - 1)
            buckets = {piece.bucket for piece in pieces}
            assert traffic.messages - messages == len(buckets) * (world.size - 1)
        total = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)
        assert abs(share - total / world.size) <= 4
    assert len(buckets) == 1
