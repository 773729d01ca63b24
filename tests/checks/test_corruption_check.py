"""Flipped bits are found and named, wherever they are, and nothing else is taken for one."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from flips import flip
from harness import World, distributed
from inside import STEP_WITHOUT_HOOKS, local_of, params_of, plan_of, refusal_of
from models import Mlp
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adafactor, Adam, AdamW

import onecopy
from onecopy import ZeroRedundancyOptimizer
from onecopy.checks.corruption_check import Checksums
from onecopy.sharding.sharded_params import CHUNK, checksum, fingerprint

SMALL = {"bucket_mb": 0.0002}  # some seven buckets of the 328 elements


# ------------------------------------------------------------------ in training


class Training:
    """A model in one of the modes, with data of its own on every rank."""

    def __init__(self, world: World, mode: str, check_every: int | None, **options: Any) -> None:
        model: Any = Mlp().to(torch.bfloat16 if "masters" in mode else torch.float32)
        self.model, self.world, self.mode = model, world, mode
        self.module: Any = model
        if "frozen" in mode:
            model.norm.requires_grad_(False)
        if "masters" in mode:
            options = {"master_dtype": torch.float32, **options}
        if "ddp" in mode:
            self.module = DistributedDataParallel(model)
        cls = {"whole": Adafactor, "sgd": SGD}.get(mode.rsplit(maxsplit=1)[-1], AdamW)
        self.optimizer = ZeroRedundancyOptimizer(
            model.named_parameters(), cls, lr=0.01, check_every=check_every, **SMALL, **options
        )
        self.is_attached = "attached" in mode
        if self.is_attached:
            self.optimizer.attach(self.module, lazy_gather="lazy" in mode)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.module(self.model.batch((self.world.rank,))).backward()

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.backward()
            self.optimizer.step()

    def until_it_raises(self, steps: int) -> str:
        """The error that one of the next steps ends in, and "" if none does."""
        for _ in range(steps):
            try:
                self.step()
            except RuntimeError as error:
                return str(error)
        return ""


MODES = ["drop-in", "drop-in ddp", "drop-in frozen", "drop-in masters", "drop-in whole"]
MODES += ["attached", "attached lazy", "attached ddp", "attached frozen", "attached masters"]
MODES += ["attached whole"]


@distributed(2, 3)
@pytest.mark.parametrize("mode", MODES)
def test_no_false_alarm_in_normal_training(world: World, mode: str) -> None:
    training = Training(world, mode, check_every=3)
    for round_ in range(5):
        training.step(7)
        if "lazy" in mode:
            training.optimizer.wait()
        if round_ == 1:
            training.optimizer.assert_replicas_equal()
        if round_ == 2:
            training.optimizer.consolidate_state_dict()
            saved = [training.optimizer.state_dict() if world.rank == 0 else None]
            torch.distributed.broadcast_object_list(saved)
            training.optimizer.load_state_dict(copy.deepcopy(saved[0]))
        if round_ == 3:
            with torch.no_grad():  # as weight clipping does it, on all ranks
                for param in training.model.parameters():
                    param.clamp_(-0.5, 0.5)
            training.optimizer.consolidate_state_dict()
    training.optimizer.assert_replicas_equal()


@distributed(2, 3)
@pytest.mark.parametrize("mode", MODES)
def test_a_bit_flipped_in_a_parameter_is_found_within_check_every_steps(
    world: World, mode: str
) -> None:
    source = random.Random(mode)  # the same on all ranks
    training = Training(world, mode, check_every=4)
    for _ in range(4):
        training.step(source.randrange(1, 5))
        training.optimizer.wait()
        odd = source.randrange(world.size)
        name, param = source.choice(list(training.model.named_parameters()))
        if world.rank == odd:
            flip(param, source)
        else:
            flip(param.detach().clone(), source)  # the same numbers are drawn
        text = training.until_it_raises(4)
        assert f"({name}) is not the same on all ranks" in text, (name, text)
        assert f"rank {odd}" in text
        same_again(training)


@distributed(2, 3)
@pytest.mark.parametrize("mode", [*MODES, "drop-in sgd"])
def test_a_bit_flipped_in_the_state_is_found_within_check_every_steps(
    world: World, mode: str
) -> None:
    options = {"momentum": 0.9} if mode.endswith("sgd") else {}
    training = Training(world, mode, check_every=3, **options)
    source = random.Random(world.rank)
    for odd in range(world.size):
        training.step(2)
        state = tensors_of_state(training.optimizer)
        if world.rank == odd:
            # A step counter gone wild may raise in the class itself, on that rank alone.
            key, tensor = source.choice([entry for entry in state if entry[0] != "step"])
            flip(tensor, source)
        text = training.until_it_raises(3)
        assert "although no step was taken" in text or "state that differs" in text, text
        assert f"rank {odd}: " in text
        if world.rank == odd:
            assert key in text
        same_again(training)


def tensors_of_state(optimizer: ZeroRedundancyOptimizer) -> list[tuple[str, torch.Tensor]]:
    found = [
        ("master_param", owned.tensor) for owned in local_of(optimizer).shards if owned.has_master
    ]
    for state in optimizer.state.values():
        found += [(key, value) for key, value in state.items() if torch.is_tensor(value)]
    return [(key, tensor) for key, tensor in found if tensor.numel()]


def same_again(training: Training) -> None:
    """What the flip has left behind is removed, on all ranks: another model, another run."""
    with torch.no_grad():
        for param in training.model.parameters():
            memory = param.data
            memory.nan_to_num_(0.0, 1.0, -1.0).clamp_(-1, 1)
            torch.distributed.broadcast(memory, 0)
    for _, tensor in tensors_of_state(training.optimizer):
        tensor.data.nan_to_num_(0.0, 1.0, -1.0).clamp_(0, 5)
    training.optimizer.state = training.optimizer.state
    training.optimizer.zero_grad()


@distributed(2, 3)
def test_a_check_by_hand_finds_what_has_flipped_since_the_last_step(world: World) -> None:
    training = Training(world, "drop-in", check_every=1000)
    training.step(3)
    training.optimizer.assert_replicas_equal()
    state = tensors_of_state(training.optimizer)
    if world.rank == 1:
        flip(next(tensor for key, tensor in state if key == "exp_avg_sq"), random.Random(0))
    with pytest.raises(RuntimeError, match="rank 1: exp_avg_sq, before step 4"):
        training.optimizer.assert_replicas_equal()


@distributed(2, 3)
def test_counters_of_the_parts_of_a_parameter_are_compared_even_without_check_every(
    world: World,
) -> None:
    weight = torch.nn.Parameter(torch.ones(100))
    optimizer = ZeroRedundancyOptimizer([weight], Adam, lr=0.1)
    weight.grad = torch.ones(100)
    optimizer.step()
    optimizer.assert_replicas_equal()
    if world.rank == 0:
        next(iter(optimizer.state.values()))["step"] += 1
    with pytest.raises(RuntimeError, match=r"parts of parameter 0 .*rank 0: step = 2\.0"):
        optimizer.assert_replicas_equal()


@distributed(2)
def test_state_that_the_user_writes_is_no_damage_if_he_says_so(world: World) -> None:
    training = Training(world, "drop-in", check_every=1)
    training.step(2)
    for tensor in training.optimizer.state:
        training.optimizer.state[tensor]["exp_avg"].zero_()
    before = {tensor: dict(state) for tensor, state in training.optimizer.state.items()}
    training.optimizer.state = training.optimizer.state
    assert before == dict(training.optimizer.state)
    assert before
    training.step(2)
    for tensor in training.optimizer.state:
        training.optimizer.state[tensor]["exp_avg"].zero_()
    with pytest.raises(RuntimeError, match=r"although no step was taken: .*exp_avg, before step 5"):
        training.step()


@distributed(3)
@pytest.mark.parametrize("who", ["owner", "another"])
def test_a_flip_that_the_next_step_heals_or_spreads_is_found_later(world: World, who: str) -> None:
    """After the step all replicas are equal again: only the history knows."""
    training = Training(world, "drop-in", check_every=5)
    training.step(1)
    param = training.model.get_parameter("norm.weight")
    owners = {shard.rank for shard in _shards(training.optimizer, param)}
    odd = min(owners) if who == "owner" else min({0, 1, 2} - owners)
    if world.rank == odd:
        param.data.view(torch.int32)[0] ^= 1 << 20
    training.step(1)
    fresh = ZeroRedundancyOptimizer(training.model.named_parameters(), SGD, lr=0.1)
    fresh.assert_replicas_equal()
    text = training.until_it_raises(3)
    assert "norm.weight" in text
    assert "before step 1 to 5" in text
    assert f"rank {odd}" in text


def _shards(optimizer: ZeroRedundancyOptimizer, param: torch.Tensor) -> list[Any]:
    index = next(i for i, p in enumerate(params_of(optimizer)) if p is param)
    plan = plan_of(optimizer)
    of_all: Callable[[int], Any] = plan.shards
    return [p for rank in range(plan.world_size) for p in of_all(rank) if p.param == index]


# ------------------------------------------------------------------ histories stay level


@distributed(2)
def test_a_difference_that_stays_is_found_again_if_the_step_is_called_again(world: World) -> None:
    training = Training(world, "drop-in", check_every=2)
    training.step()
    param = training.model.get_parameter("norm.weight")
    if world.rank == 1:
        param.data.view(torch.int32)[0] ^= 1 << 20
    training.backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"norm.weight.* is not the same on all ranks"):
            training.optimizer.step()
    torch.distributed.broadcast(param.data, 0)
    training.optimizer.step()
    training.step(5)


@distributed(2, 3)
@pytest.mark.parametrize("buckets", [1, 2])
def test_a_step_that_failed_in_the_middle_on_one_rank_leaves_the_histories_level(
    world: World, buckets: int
) -> None:
    model = Mlp()
    optimizer = ZeroRedundancyOptimizer(
        model.named_parameters(), SGD, lr=0.01, momentum=0.9, check_every=6, **SMALL
    )

    def backward() -> None:
        optimizer.zero_grad()
        model(model.batch((0,))).backward()

    assert len(plan_of(optimizer).buckets) > 2
    for _ in range(2):
        backward()
        optimizer.step()
    optimizer.consolidate_state_dict()
    saved = [optimizer.state_dict() if world.rank == 0 else None]
    torch.distributed.broadcast_object_list(saved)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    backward()
    if world.rank == 1:
        real, calls = getattr(*STEP_WITHOUT_HOOKS), itertools.count(1)

        def breaks(inner: Any) -> Callable[[], Any]:
            assert next(calls) <= buckets, "broken"
            return real(inner)

        with (
            mock.patch.object(*STEP_WITHOUT_HOOKS, breaks),
            pytest.raises(AssertionError, match="broken"),
        ):
            optimizer.step()
        assert refusal_of(optimizer) is not None
    else:
        optimizer.step()
    optimizer.load_state_dict(copy.deepcopy(saved[0]))
    model.load_state_dict(weights)
    for _ in range(10):
        backward()
        optimizer.step()
    optimizer.assert_replicas_equal()


@distributed(2)
def test_a_flip_is_remembered_when_the_plan_changes(world: World) -> None:
    training = Training(world, "drop-in frozen", check_every=6)
    training.step()
    name, param = next(
        (name, param) for name, param in training.model.named_parameters() if param.requires_grad
    )
    if world.rank == 1:
        param.data.view(torch.int32).flatten()[0] ^= 1 << 20
    training.step()
    training.model.norm.requires_grad_(True)
    plan = plan_of(training.optimizer)
    training.step()
    assert plan_of(training.optimizer) is not plan
    text = training.until_it_raises(3)
    assert f"({name}) is not the same on all ranks" in text
    assert "before step 1 to 6" in text


@distributed(2)
def test_state_that_flips_before_the_plan_changes_is_found(world: World) -> None:
    training = Training(world, "drop-in frozen", check_every=3)
    training.step()
    if world.rank == 0:
        flip(dict(tensors_of_state(training.optimizer))["exp_avg"], random.Random(0))
    training.model.norm.requires_grad_(True)
    assert "rank 0: exp_avg, before step 2" in training.until_it_raises(3)


@distributed(2)
def test_a_step_that_was_refused_on_all_ranks_is_looked_at_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if only one of them had looked: the one whose master copies were to follow."""
    monkeypatch.setenv("ONECOPY_CHECK", "step")
    narrow = torch.nn.Parameter(torch.ones(40, dtype=torch.bfloat16))
    wide = torch.nn.Parameter(torch.ones(50))
    optimizer = ZeroRedundancyOptimizer(
        [narrow, wide],
        AdamW,
        lr=0.01,
        check_every=4,
        master_dtype=torch.float32,
        partition="whole",
        **SMALL,
    )

    def step() -> None:
        narrow.grad = torch.ones_like(narrow)
        wide.grad = torch.ones_like(wide)
        optimizer.step()

    def clamp(most: float) -> None:
        with torch.no_grad():
            narrow.clamp_(-1, most)
            wide.clamp_(-1, most)

    step()
    clamp(0.5)
    if world.rank == 1:
        wide.requires_grad_(False)
    with pytest.raises(onecopy.RanksDisagree):
        step()
    wide.requires_grad_(True)
    clamp(0.25)
    for _ in range(5):
        step()
    optimizer.assert_replicas_equal()


@distributed(2)
def test_state_that_is_gone_is_not_kept_in_memory(world: World) -> None:
    training = Training(world, "drop-in", check_every=100)
    training.step(3)
    before = [weakref.ref(tensor) for _, tensor in tensors_of_state(training.optimizer)]
    training.optimizer.state = {}
    assert before
    assert not any(ref() is not None for ref in before)


class MakesItAnew(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, _: Any = None) -> None:
        before = []
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                before.append(weakref.ref(state.setdefault("m", torch.zeros_like(param))))
                state["m"] = 0.9 * state["m"] + param.grad
                param.sub_(group["lr"] * state["m"])
        assert not any(ref() is not None for ref in before)


@distributed(2)
def test_state_that_a_class_makes_anew_is_there_once(world: World) -> None:
    model = Mlp()
    options = {"lr": 0.01, "check_every": 3, **SMALL}
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), MakesItAnew, **options)
    for _ in range(7):
        optimizer.zero_grad()
        model(model.batch((world.rank,))).backward()
        for param in model.parameters():
            torch.distributed.all_reduce(param.grad)
        optimizer.step()


class Wrapped(torch.Tensor):
    """A tensor whose elements are elsewhere, as quantized ones are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class KeepsWrapped(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, _: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                state.setdefault("m", Wrapped(torch.zeros_like(param))).inner.add_(param.grad)
                param.sub_(group["lr"] * state["m"].inner)


@distributed(2)
def test_state_in_a_tensor_subclass_is_watched_where_its_elements_are(world: World) -> None:
    model = Mlp()
    options = {"lr": 0.01, "check_every": 3, "partition": "whole", **SMALL}
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), KeepsWrapped, **options)

    def step() -> None:
        optimizer.zero_grad()
        model(model.batch((0,))).backward()
        optimizer.step()

    step()
    if world.rank == 1:
        flip(next(iter(optimizer.state.values()))["m"].inner, random.Random(0))
    step()
    with pytest.raises(RuntimeError, match=r"rank 1: m\.inner, before step 2"):
        step()


@distributed(2)
@pytest.mark.parametrize("check_every", [None, 2])
def test_steps_in_inference_mode_and_with_another_default_device_do_not_disturb_later_ones(
    world: World, check_every: int | None
) -> None:
    model = Mlp()
    options = {"lr": 0.01, "check_every": check_every, **SMALL}
    optimizer = ZeroRedundancyOptimizer(model.named_parameters(), SGD, **options)
    for mode in (torch.inference_mode(), torch.device("meta"), contextlib.nullcontext()) * 2:
        optimizer.zero_grad()
        model(model.batch((0,))).backward()
        with mode:
            optimizer.step()
    optimizer.assert_replicas_equal()


@distributed(2)
def test_state_of_a_class_that_does_not_step_by_bucket_is_watched(world: World) -> None:
    training = Training(world, "drop-in", check_every=3)
    for _ in range(6):
        training.optimizer.zero_grad()
        training.module(training.model.batch((world.rank,))).backward()
        training.optimizer.step(lambda: 1.0)
    tensors = dict(tensors_of_state(training.optimizer))
    if world.rank == 0:
        flip(tensors["exp_avg_sq"], random.Random(0))
    for _ in range(2):
        training.backward()
        training.optimizer.step(lambda: 1.0)
    training.backward()
    with pytest.raises(RuntimeError, match="rank 0: exp_avg_sq, before step 7"):
        training.optimizer.step(lambda: 1.0)


def replaces(state: dict[str, Any]) -> None:
    state["exp_avg"] = state["exp_avg"] + 1


def gives_other_memory(state: dict[str, Any]) -> None:
    state["exp_avg"].data = state["exp_avg"].data + 1


@distributed(2, 3)
@pytest.mark.parametrize("change", [replaces, gives_other_memory])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_state_in_other_memory_on_one_rank_is_noticed(
    world: World, steps: int, change: Callable[[dict[str, Any]], None]
) -> None:
    training = Training(world, "drop-in", check_every=1)
    training.step(steps)
    if world.rank == 1:
        for state in training.optimizer.state.values():
            change(state)
    with pytest.raises(RuntimeError, match=rf"rank 1: exp_avg, before step {steps + 1}"):
        training.step()


@distributed(2, 3)
@pytest.mark.parametrize("steps", [1, 3])
def test_state_whose_memory_was_freed_is_looked_at_without_harm(world: World, steps: int) -> None:
    """As it is when it waits elsewhere for its step."""
    training = Training(world, "drop-in", check_every=100)
    training.step(steps)
    kept = [(tensor, tensor.clone()) for _, tensor in tensors_of_state(training.optimizer)]
    for tensor, _ in kept:
        tensor.untyped_storage().resize_(0)
    with contextlib.suppress(RuntimeError):  # that it has changed
        training.optimizer.assert_replicas_equal()
    for tensor, copied in kept:
        tensor.untyped_storage().resize_(copied.untyped_storage().nbytes())
        tensor.copy_(copied)
    training.optimizer.state = training.optimizer.state
    training.step(2)


# ------------------------------------------------------------------ before it is saved


def saves(optimizer: ZeroRedundancyOptimizer, directory: Path) -> None:
    optimizer.save(directory)


def consolidates(optimizer: ZeroRedundancyOptimizer, _: Path) -> None:
    optimizer.consolidate_state_dict()


def saves_by_torch(optimizer: ZeroRedundancyOptimizer, directory: Path) -> None:
    dcp.save({"optim": optimizer.sharded()}, checkpoint_id=directory)


def loads(optimizer: ZeroRedundancyOptimizer, directory: Path) -> None:
    optimizer.load(directory)


def loads_by_torch(optimizer: ZeroRedundancyOptimizer, directory: Path) -> None:
    dcp.load({"optim": optimizer.sharded()}, checkpoint_id=directory)


@distributed(2, 3)
@pytest.mark.parametrize(
    ("save", "load"),
    [(saves, loads), (saves_by_torch, loads_by_torch), (consolidates, None)],
    ids=["save", "dcp", "consolidate"],
)
def test_state_in_which_a_bit_has_flipped_is_not_saved(
    world: World, tmp_path: Path, save: Any, load: Any
) -> None:
    training = Training(world, "drop-in", check_every=100)
    optimizer = training.optimizer
    training.step(2)
    save(optimizer, tmp_path)
    torch.distributed.barrier()
    files = contents_of(tmp_path)
    torch.distributed.barrier()
    before = full_state(optimizer)
    training.step(2)
    names = [name for name, _ in training.model.named_parameters()]
    if world.rank == 1:
        flip(dict(tensors_of_state(optimizer))["exp_avg"], random.Random(0))
    with pytest.raises(RuntimeError, match=r"has changed although no step was taken") as caught:
        save(optimizer, tmp_path)
    text = str(caught.value)
    assert any(f"({name})" in text for name in names), text
    assert "It is not saved" in text
    torch.distributed.barrier()
    assert contents_of(tmp_path) == files
    if load is not None:
        again = Training(world, "drop-in", check_every=100)
        load(again.optimizer, tmp_path)
        for number, state in full_state(again.optimizer).items():
            assert torch.equal(state["exp_avg"], before[number]["exp_avg"]), names[number]
        again.step(2)


def full_state(optimizer: ZeroRedundancyOptimizer) -> dict[int, Any]:
    """On rank 0; nothing on others."""
    optimizer.consolidate_state_dict()
    state: dict[int, Any] = {}
    if torch.distributed.get_rank() == 0:
        state = optimizer.state_dict()["state"]
        assert state
    return state


def contents_of(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# ------------------------------------------------------------------ fingerprints


INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.uint8]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_any_flipped_bit_changes_fingerprint_and_checksum(dtype: torch.dtype, offset: int) -> None:
    source = random.Random(offset)
    for length in (1, 2, 3, 7, 8, 9, 64, 1000):
        whole = torch.randint(0, 2, (length + offset,)).to(dtype)
        tensor = whole[offset:]
        for of in (fingerprint, checksum):
            before = int(of(tensor))
            assert int(of(tensor.clone())) == before  # wherever in memory it lies
            for _ in range(8):
                changed = whole.clone()[offset:]
                flip(changed, source)
                assert int(of(changed)) != before


def test_a_fingerprint_knows_the_places_of_elements_and_strides_do_not_matter() -> None:
    tensor = torch.randn(40, 50)
    swapped = tensor.clone()
    swapped[3], swapped[7] = tensor[7], tensor[3]
    assert fingerprint(tensor) != fingerprint(swapped)
    shifted = torch.zeros(2 * CHUNK * 2)
    shifted[0] = 1.0
    assert fingerprint(shifted) != fingerprint(shifted.roll(2 * CHUNK))
    assert fingerprint(torch.zeros(0)) == 0 == checksum(torch.zeros(0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_prepared_checksums_are_those_of_the_tensors_and_see_every_change(
    dtype: torch.dtype,
) -> None:
    source = random.Random(0)
    memory = (torch.rand(200) * 100).to(dtype)
    tensors = [memory[:8], memory[8:31], memory[31:60], memory[60], memory[61], memory[62:62]]
    tensors += [memory[64:94].view(5, 6).t(), memory[100:130].view(5, 6)[:, ::2]]
    prepared = Checksums(tensors)
    for _ in range(30):
        before = prepared.now()
        assert before.tolist() == [int(checksum(tensor)) for tensor in tensors]
        changed = source.choice([i for i, tensor in enumerate(tensors) if tensor.numel()])
        flip(tensors[changed], source)
        assert (prepared.now() != before).nonzero().flatten().tolist() == [changed]
    assert prepared.are_of(tensors)
    assert not prepared.are_of([*tensors[:-1], tensors[-1].clone()])
    tensors[0].data = tensors[0].clone()
    assert not prepared.are_of(tensors)


def test_values_moved_between_chunks_change_the_fingerprint() -> None:
    first, second = torch.zeros(2 * CHUNK + 2), torch.zeros(2 * CHUNK + 2)  # two in each word
    first[0], second[2 * CHUNK] = 1.0, 1.0
    assert fingerprint(first) != fingerprint(second)
