"""What must hold on every admitted release of torch, and differs between releases inside torch."""

from __future__ import annotations

import ast
import base64
import copy
import importlib
import inspect
import io
import json
import os
import pickle
import re
import subprocess
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from attached import AttachedTwins
from fixtures.checkpoints import write
from harness import World, distributed
from inside import in_flight, plan_of, private_groups, transport_of, without_split
from models import assert_same_on_all_ranks
from test_lazy_gather import Delays
from test_structure import FILES, PACKAGE, tree_of
from together import FOLLOWS_SET_TIMEOUT, set_timeout
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW
from torch.torch_version import TorchVersion
from torch.utils.checkpoint import checkpoint

from onecopy import ZeroRedundancyOptimizer
from onecopy.torch_private import CHECKED, make_process_group, timeout_of

SIZES = (2, 3, 4)
STEPS = 3


# ------------------------------------------------------------------ process groups


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + rank))


def expected(ranks: list[int]) -> list[torch.Tensor]:
    """The parameters after training on the batches of these ranks, without any sharding."""
    model = model_of()
    optimizer = AdamW(model.parameters(), lr=0.1)
    for number in range(STEPS):
        for rank in ranks:
            (model(batch(rank, number)).square().sum() / len(ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach() for param in model.parameters()]


def trained(world: World, group: Any, attached: bool) -> nn.Module:
    """A model trained in a group, of which this rank is a member, as ``expected`` does."""
    model = model_of()
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, process_group=group, lr=0.1)
    if attached:
        optimizer.attach(ddp)
    for number in range(STEPS):
        ddp(batch(world.rank, number)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if attached:
        optimizer.detach()
    return model


def check_training(world: World, group: Any, attached: bool = False) -> None:
    model = trained(world, group, attached)
    for mine, theirs in zip(
        model.parameters(), expected(dist.get_process_group_ranks(group)), strict=True
    ):
        torch.testing.assert_close(mine.detach(), theirs, rtol=1e-4, atol=1e-5)


def check_sum(world: World, ranks: list[int], group: Any) -> None:
    total = torch.tensor([world.rank + 1.0])
    dist.all_reduce(total, group=group)
    assert total.item() == sum(rank + 1 for rank in ranks)


@distributed(*SIZES, pg_timeout=30)
@pytest.mark.parametrize("attached", [False, True], ids=["drop-in", "attached"])
def test_subgroups_that_overlap(world: World, attached: bool) -> None:
    """Some ranks are in more groups than others; a group may list its ranks in any order."""
    last = world.size - 1
    several = [[0, last], [rank for rank in range(world.size) if rank != 1], [last, 0]]
    for ranks in several:
        options = {} if ranks == sorted(ranks) else {"sort_ranks": False}
        if options and "sort_ranks" not in dist.new_group.__code__.co_varnames:
            continue
        group = dist.new_group(ranks, **options)
        if world.rank in ranks and len(ranks) > 1:
            check_training(world, group, attached)
    check_training(world, dist.group.WORLD, attached)


@distributed(*SIZES, pg_timeout=30)
@pytest.mark.parametrize("attached", [False, True], ids=["drop-in", "attached"])
def test_groups_that_the_user_makes_after_ours(world: World, attached: bool) -> None:
    everyone = list(range(world.size))
    members = everyone[:2]
    group = dist.new_group(members)
    if world.rank in members:
        check_training(world, group, attached)
    check_sum(world, everyone, dist.new_group(everyone))
    check_training(world, dist.group.WORLD, attached)
    check_sum(world, everyone, dist.new_group(everyone))
    if world.rank in members:
        check_sum(world, members, dist.new_group(members, use_local_synchronization=True))


@distributed(*SIZES, pg_timeout=30)
@pytest.mark.parametrize("attached", [False, True], ids=["drop-in", "attached"])
def test_groups_that_only_their_members_make(world: World, attached: bool) -> None:
    """Made before ours and after. Since torch 2.14 the members then count more groups than the
    other ranks, and a ``new_group`` of all ranks hangs without us, too: none is made here."""
    members = [0, 1]

    def local() -> Any:
        if world.rank not in members:
            return None
        return dist.new_group(members, use_local_synchronization=True)

    before = local()
    if before is not None:
        check_training(world, before, attached)
    check_training(world, dist.group.WORLD, attached)
    after = local()
    if after is not None:
        check_sum(world, members, after)
        check_training(world, after, attached)


@distributed(3, 4, pg_timeout=30)
@pytest.mark.parametrize("attached", [False, True], ids=["drop-in", "attached"])
def test_groups_of_which_one_member_has_an_optimizer(world: World, attached: bool) -> None:
    """The members of the group that is made last know different numbers of groups of ours."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], list(range(2, world.size)))]
    if world.rank < 2:
        check_training(world, groups[0], attached)
    if world.rank in (1, 2):
        both = dist.new_group([1, 2], use_local_synchronization=True)
        check_sum(world, [1, 2], both)
        check_training(world, both, attached)
    dist.barrier()
    if world.rank < 2:
        dist.destroy_process_group(groups[0])


@distributed(*SIZES, pg_timeout=30)
@pytest.mark.parametrize("attached", [False, True], ids=["drop-in", "attached"])
def test_groups_that_are_destroyed_and_made_anew(world: World, attached: bool) -> None:
    members = [0, 1]
    for _ in range(3):
        group = dist.new_group(members)
        if world.rank in members:
            check_training(world, group, attached)
            dist.destroy_process_group(group)
        del group
        dist.barrier()
    check_training(world, dist.group.WORLD, attached)


@distributed(*SIZES, pg_timeout=30)
@pytest.mark.parametrize("attached", [False, True], ids=["drop-in", "attached"])
def test_the_default_group_is_made_anew(world: World, attached: bool) -> None:
    check_training(world, dist.group.WORLD, attached)
    store = dist.PrefixStore("anew", dist.distributed_c10d._get_default_store())
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size)
    check_training(world, dist.group.WORLD, attached)


@distributed(*SIZES, pg_timeout=30)
@pytest.mark.parametrize("attached", [False, True], ids=["drop-in", "attached"])
def test_a_timeout_that_is_set_later(world: World, attached: bool) -> None:
    """On the user's group: ours follows it when the ranks next do something together."""
    for group in (dist.new_group([0, 1], timeout=timedelta(seconds=30)), dist.group.WORLD):
        if world.rank in dist.get_process_group_ranks(group):
            model = model_of()
            optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, group, lr=0.1)
            patience = transport_of(optimizer).monitor.patience
            if timeout_of(group) is None:
                pytest.skip("this torch does not tell a gloo group's timeout")
            assert patience() == 30
            set_timeout(timedelta(seconds=17), group)
            assert patience() == 17
            check_training(world, group, attached)
            assert timeout_of(private_groups()[group]) == timedelta(seconds=17)
            set_timeout(timedelta(seconds=30), group)
            check_training(world, group, attached)
            assert timeout_of(private_groups()[group]) == timedelta(seconds=30)


@pytest.mark.skipif(not FOLLOWS_SET_TIMEOUT, reason="gloo's collectives do not, in this release")
@distributed(2, pg_timeout=60, fresh=True)
@pytest.mark.parametrize("attached", [False, True], ids=["drop-in", "attached"])
def test_a_missing_rank_is_waited_for_as_long_as_was_set_last(world: World, attached: bool) -> None:
    model = model_of()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1)
    if attached:
        optimizer.attach(model)
    dist.barrier()
    set_timeout(timedelta(seconds=3), dist.group.WORLD)
    if world.rank == 1:
        return

    def train() -> None:
        model(batch(0, 0)).square().sum().backward()
        optimizer.step()

    start = time.monotonic()
    with pytest.raises(RuntimeError, match="a collective failed"):
        train()
    assert time.monotonic() - start < 40  # and not 60


@distributed(3)
def test_the_users_groups_are_named_as_without_us(world: World) -> None:
    def name_of_next() -> str:
        return dist.new_group([0, 1, 2]).group_name

    first = int(name_of_next())
    ZeroRedundancyOptimizer(model_of().parameters(), AdamW, lr=0.1)
    group = dist.new_group([0, 1])
    if world.rank < 2:
        ZeroRedundancyOptimizer(model_of().parameters(), AdamW, group, lr=0.1)
    assert int(name_of_next()) == first + 2


@distributed(3)
def test_a_torch_without_the_private_function(world: World) -> None:
    helper = dist.distributed_c10d._new_process_group_helper
    group = dist.new_group([0, 1])
    with mock.patch.object(dist, "distributed_c10d", _Without(dist.distributed_c10d)):
        if world.rank < 2:
            with pytest.raises(ValueError, match="cannot make a process group"):
                ZeroRedundancyOptimizer(model_of().parameters(), AdamW, group, lr=0.1)
        made = make_process_group("any", [0, 1, 2], "gloo", None)
    assert helper is dist.distributed_c10d._new_process_group_helper
    check_sum(world, [0, 1, 2], made)


class _Without:
    """A module without some of its names."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name == "_new_process_group_helper":
            raise AttributeError(name)
        return getattr(self._module, name)


def test_a_subgroup_does_not_split_the_communicator_of_all_ranks() -> None:
    """Which NCCL would do, as a collective of all ranks, if the default group has a device."""

    class Group:
        bound_device_id: Any = torch.device("cuda:0")

    group = Group()
    with without_split(group):
        assert group.bound_device_id is None
    assert group.bound_device_id == torch.device("cuda:0")


# ------------------------------------------------------------------ torch.compile


# Dynamo asks a tensor for its gradient and hides the warning, which is an error here, when it is
# shown (torch/_dynamo/variables/builder.py, safe_has_grad).
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@distributed(2)
@pytest.mark.parametrize("first", ["compiled", "eager", "copied"])
def test_a_lazy_gather_under_torch_compile(world: World, first: str) -> None:
    """Compiled from the first forward on, no wait stands inside of compiled code: the forward stays
    one graph. Modules that were called before they were compiled wait for themselves."""
    torch.compiler.reset()
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    twins = AttachedTwins(
        world, Chain(), AdamW, "module", zero={"bucket_mb": 0.0005}, attach={"lazy_gather": True}
    )
    assert len(plan_of(twins.optimizer).buckets) > 1
    if first == "eager":
        twins.backward()
        twins.step()
    twins.ddp = torch.compile(twins.model, backend=backend)
    if first == "copied":
        copied = copy.deepcopy(twins.model)
        torch.compile(copied, backend=backend)(twins.model.batch(0))
    for _ in range(3):
        with Delays(world):
            twins.backward()
            twins.step()
    twins.assert_same(rtol=1e-5, atol=1e-6)
    assert_same_on_all_ranks(twins.model)
    if first == "compiled":
        assert graphs == [5, 5]  # before and after it is known which modules are called


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@distributed(2, 3)
def test_compiled_parts_that_are_called_without_the_root_wait_for_themselves(world: World) -> None:
    torch.compiler.reset()
    model = Chain()
    parts = [torch.compile(part, backend="eager") for part in model.parts]
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01, bucket_mb=0.0005)
    optimizer.attach(model, lazy_gather=True)
    twin = copy.deepcopy(model)
    plain = AdamW(twin.parameters(), lr=0.01)
    for number in range(3):
        with Delays(world):
            x = model.batch((world.rank, number))
            for part in parts:
                x = part(x)
            assert not in_flight(optimizer)
            x.square().sum().backward()
            optimizer.step()
        for rank in range(world.size):
            (twin(twin.batch((rank, number))) / world.size).backward()
        plain.step()
        plain.zero_grad()
    optimizer.wait()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@distributed(2)
def test_a_compiled_part_is_computed_again_in_backward_without_a_graph_break(world: World) -> None:
    torch.compiler.reset()

    class Checkpointed(Chain):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.compiled[0], inputs, use_reentrant=False).square().sum()

    model = Checkpointed()
    model.compiled = [torch.compile(model.parts, backend="eager", fullgraph=True)]  # no child
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.01, bucket_mb=0.0005)
    optimizer.attach(model, lazy_gather=True)
    for number in range(3):
        with Delays(world):
            model(model.batch((world.rank, number))).backward()
            optimizer.step()
    optimizer.wait()
    assert_same_on_all_ranks(model)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.parts(inputs).square().sum()

    def batch(self, seed: Any) -> torch.Tensor:
        return torch.randn(4, 6, generator=torch.Generator().manual_seed(hash(seed) % 1000))


# ------------------------------------------------------------------ DDP's options of 2.15


def has_option(name: str) -> bool:
    return name in inspect.signature(DistributedDataParallel.__init__).parameters


@pytest.mark.skipif(not has_option("lazy_bucket_allocation"), reason="an option of torch 2.15")
@distributed(1, 2, 3, 4)
@pytest.mark.parametrize("as_view", [False, True])
def test_ddp_that_allocates_its_buckets_for_each_backward(world: World, as_view: bool) -> None:
    ddp = {"lazy_bucket_allocation": True, "gradient_as_bucket_view": as_view}
    twins = AttachedTwins(world, Chain(), AdamW, "ddp", ddp=ddp, lr=0.01)
    during: list[int] = []
    hook = next(twins.model.parameters()).register_hook(
        lambda _: during.append(twins.optimizer.memory_report().ddp_buckets)
    )
    twins.train(3)
    hook.remove()
    assert set(during) == {sum(4 * param.numel() for param in twins.model.parameters())}
    assert twins.optimizer.memory_report().ddp_buckets == 0
    plain = AttachedTwins(world, Chain(), AdamW, "ddp", lr=0.01)
    assert plain.optimizer.memory_report().ddp_buckets == during[0]


@pytest.mark.skipif(
    not hasattr(DistributedDataParallel, "require_manual_backward_finalization"),
    reason="an option of torch 2.15",
)
@distributed(2)
def test_ddp_that_does_not_end_a_backward_by_itself_is_refused(world: World) -> None:
    model = Chain()
    ddp: Any = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1)
    ddp.require_manual_backward_finalization = True
    with pytest.raises(ValueError, match="which is when an attached optimizer takes them"):
        optimizer.attach(ddp)
    ddp.require_manual_backward_finalization = False
    optimizer.attach(ddp)
    ddp(model.batch(0)).backward()
    optimizer.step()
    ddp.require_manual_backward_finalization = True
    with pytest.raises(ValueError, match="Set it to False"):
        ddp(model.batch(0))


# ------------------------------------------------------------------ checkpoints of other releases


WRITERS = ("2.6.0", "2.13.0", "2.14.1", "2.15.0")  # releases of torch
WRITTEN = [f"{who}-{release}" for who in ("ours", "torch") for release in WRITERS]


def unpacked(name: str, directory: Path) -> Path:
    files = json.loads(Path(write.__file__).with_name(f"{name}.json").read_text())
    path = directory / name
    path.mkdir()
    for each, content in files.items():
        (path / each).write_bytes(base64.b64decode(content))
    return path


def plain_twin() -> tuple[nn.Module, AdamW]:
    """What the checkpoints hold: a model that has taken two steps."""
    model = write.model()
    optimizer = AdamW(model.parameters(), lr=0.1)
    for number in range(2):
        write.step(optimizer, model, number)
    return model, optimizer


@distributed(1, 2)
@pytest.mark.parametrize("name", WRITTEN)
def test_a_checkpoint_of_another_release_is_read(world: World, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if world.rank == 0:
        unpacked(name, tmp_path)
    dist.barrier()
    (model, plain), twin = plain_twin(), write.model()
    twin.load_state_dict(model.state_dict())
    optimizer = ZeroRedundancyOptimizer(twin.parameters(), AdamW, lr=0.5)
    optimizer.load(path, twin)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for number in range(2, 4):
        write.step(plain, model, number)
        write.step(optimizer, twin, number)
    for mine, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@distributed(1)
@pytest.mark.parametrize("release", WRITERS)
def test_torch_reads_what_we_wrote_on_another_release(
    world: World, release: str, tmp_path: Path
) -> None:
    """Torch asks for every option of the present class: those that are newer are left out."""
    _, plain = plain_twin()
    model = write.model()
    other = AdamW(model.parameters(), lr=0.5)
    path = unpacked(f"ours-{release}", tmp_path)
    state = {"optim": get_optimizer_state_dict(model, other)}
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    (group,) = state["optim"]["param_groups"]
    newer = [option for option in group if f"optim.param_groups.0.{option}" not in saved]
    if release == torch.__version__.partition("+")[0]:
        assert newer == []
    for option in newer:
        del group[option]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DCP itself
        dcp.load(state, checkpoint_id=path)
    for index, key in enumerate(("weight", "bias")):
        found = state["optim"]["state"][key]
        for what, value in plain.state_dict()["state"][index].items():
            torch.testing.assert_close(found[what], value, rtol=1e-6, atol=1e-6)


@distributed(1, 2)
def test_tensors_are_described_by_the_five_fields_of_old_releases(
    world: World, tmp_path: Path
) -> None:
    """Since torch 2.15 there is a sixth, and older releases refuse to read it."""
    model = write.model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), AdamW, lr=0.1)
    write.step(optimizer, model, 0)
    optimizer.save(tmp_path, model)
    if world.rank == 0:
        fields: list[int] = []

        class Reader(pickle.Unpickler):
            def find_class(self, module: str, name: str) -> Any:
                found = super().find_class(module, name)
                if name != "TensorProperties":
                    return found
                return type(name, (), {"__setstate__": lambda _, s: fields.append(len(s))})

        Reader(io.BytesIO((tmp_path / ".metadata").read_bytes())).load()
        assert set(fields) == {5}


# ------------------------------------------------------------------ make test-torch


@pytest.mark.parametrize(
    ("release", "said"),
    [
        ("", "say which torch"),
        ("1.13.1", "is too old: 2.6 or later is admitted"),
        ("2.5.1", "is too old: 2.6 or later is admitted"),
        ("2.6.0", "torch==2.6.0"),
        ("2.14.1", "torch==2.14.1"),
        ("3.0.0", "torch==3.0.0"),
    ],
)
def test_make_test_torch_takes_every_admitted_release(release: str, said: str) -> None:
    command = ["make", "-n", "test-torch", f"TORCH={release}", f"TORCH_VENV=no-such-{release}"]
    outside_of_make = {key: value for key, value in os.environ.items() if "MAKE" not in key}
    done = subprocess.run(
        command,
        cwd=PACKAGE.parent,
        env=outside_of_make,
        capture_output=True,
        text=True,
        check=False,
    )
    assert said in done.stdout + done.stderr
    assert (done.returncode == 0) == said.startswith("torch"), done.stderr


# ------------------------------------------------------------------ private names


# What starts with an underscore and is neither torch's nor a name that the package defines.
OTHERS = {
    "_Unpickler": "pickle",
    "_codecs": "the module of codecs.encode, in pickles",
    "_asdict": "named tuples",
    "_replace": "named tuples",
    "_fields": "named tuples",
    "_onecopy_interrupts": "an attribute that the package sets on exceptions",
}


# Listed names without an underscore that torch does not document.
INTERNAL = {"pg_map", "pg_names", "pg_group_ranks", "bound_device_id", "hooked"}


def is_private(name: str) -> bool:
    return name in INTERNAL or (name.startswith("_") and not name.startswith("__") and name != "_")


def defined_names() -> set[str]:
    """All names that the package defines: functions, classes, variables, fields and attributes."""
    found: set[str] = set()
    for file in FILES:
        for node in ast.walk(tree_of(file)):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                found.add(node.attr)
    return found


def private_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Attributes, imports and words in quotes that look like a private name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if is_private(node.value) and node.value.isidentifier():
                yield node.value, node.lineno
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            origin = getattr(node, "module", None) or ""
            for name in [*origin.split("."), *(a for n in node.names for a in n.name.split("."))]:
                if is_private(name) and not origin.startswith("onecopy"):
                    yield name, node.lineno


LISTED = {name.rpartition(".")[2] for name in CHECKED}
MODULE = PACKAGE / "torch_private.py"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_private_names_of_torch_stand_in_one_module(file: Any) -> None:
    if file == MODULE:
        return
    ours = defined_names() - LISTED
    for name, line in private_names(tree_of(file)):
        assert name in ours or name in OTHERS, (
            f"{file}:{line}: {name} is a private name of torch: it belongs into torch_private.py"
        )


def test_every_private_name_is_listed_and_every_listed_one_is_used() -> None:
    own = {
        node.name if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else node.id
        for node in tree_of(MODULE).body
        for node in ([node] if hasattr(node, "name") else getattr(node, "targets", ()))
        if hasattr(node, "name") or hasattr(node, "id")
    }
    used = {name for name, _ in private_names(tree_of(MODULE))} - own
    dotted = {part for name in CHECKED for part in name.split(".")}
    prefixes = {"_optimizer_", "_hooks", *OTHERS}
    assert used - dotted - prefixes == set()
    text = MODULE.read_text().partition("# ---")[2]
    assert [name for name in LISTED if name not in text] == []


def roots() -> dict[str, Any]:
    """Objects that have the listed names, by the first part of the name."""
    weight = nn.Parameter(torch.zeros(1))
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    ddp.join_hook(divide_by_initial_world_size=True)
    return {
        "torch": torch,
        "nn.Module": nn.Linear(1, 1),
        "OptimizedModule": torch.compile(nn.Linear(1, 1), backend="eager"),
        "CheckpointWrapper": checkpoint_wrapper(nn.Linear(1, 1)),
        "FullyShardedDataParallel": {FSDP_WRAPPED_MODULE: nn.Linear(1, 1)},
        "DistributedDataParallel": ddp,
        "ProcessGroup": dist.group.WORLD,
        "Backend": dist.group.WORLD._get_backend(torch.device("cpu")),
        "Joinable": ZeroRedundancyOptimizer([weight], AdamW),
        "Optimizer": torch.optim.Adam([weight], fused=True),
    }


def find(name: str, objects: dict[str, Any]) -> Any:
    """The object of a listed name. Raises if this release does not have it."""
    root = max((root for root in objects if name.startswith(f"{root}.")), key=len)
    found = objects[root]
    for part in name[len(root) + 1 :].split("."):
        if isinstance(found, ModuleType) and not hasattr(found, part):
            found = importlib.import_module(f"{found.__name__}.{part}")
        else:
            found = found[part] if isinstance(found, dict) else getattr(found, part)
    return found


@distributed(1)
def test_the_private_names_are_there(world: World) -> None:
    objects = roots()
    missing = []
    for name, if_missing in CHECKED.items():
        since = re.match(r"before ([\d.]+): .", if_missing)
        if since and TorchVersion(torch.__version__) < since[1]:
            continue
        assert if_missing
        try:
            find(name, objects)
        except (AttributeError, ImportError):
            missing.append(name)
    assert missing == []
