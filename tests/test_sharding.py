"""Four processes on one machine, over gloo, that share the blocks of PSGD: sharded parameters, and whole ones."""

import datetime
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel
from toys import HVP, fill, forks_with_torch, same

from psgd_lit.affine import affine_blocks
from psgd_lit.blocks import leaves
from psgd_lit.closures import is_sharded
from psgd_lit.optim import PSGD
from psgd_lit.sharding import SharedPSGD, assigned, here, normal, owners_of

RANKS = 4
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module.*returned a view"),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "whiten": {"hvp": "whiten", "momentum": 0.5, "weight_decay": 0.1},
    "approx": {"hvp": "approx", "update_every": 2, "damping": 0.1, "max_norm": 0.05},
    "traditional": {
        "hvp": "approx",
        "damping": 0.1,
        "damping_kind": "traditional",
        "preconditioner": "diagonal",
    },
    "climbing": {
        "hvp": "whiten",
        "maximize": True,
        "preconditioner": "scan-or-kron",
        "normalizer": "running",
    },
}


class Transformer(nn.Module):
    """One layer of attention and one of a feed-forward network; some parameters have fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(7, 6)
        self.attend = nn.Linear(6, 18, bias=False)  # keys have no bias: its gradient is nothing but rounding
        self.norm = nn.LayerNorm(6)
        self.feed = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6, bias=False))
        self.head = nn.Linear(6, 3)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        q, k, v = self.attend(self.norm(x)).chunk(3, -1)
        x = x + (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return self.head(x + self.feed(x))


def network(seed: int = 0) -> nn.Module:
    return fill(Transformer(), seed).double()


def loss_of(net: nn.Module, rows: slice = slice(None)) -> Tensor:
    """The loss of some of eight sequences."""
    source = torch.Generator().manual_seed(1)
    words = torch.randint(7, (8, 5), generator=source)[rows]
    classes = torch.randint(3, (8, 5), generator=source)[rows]
    return nn.functional.cross_entropy(net(words).flatten(0, 1), classes.flatten())


def shard(net: nn.Module, mesh: Any, **kwargs: Any) -> nn.Module:
    """Shard each layer, and what is left."""
    for layer in (net.attend, net.feed, net.head):
        fully_shard(layer, mesh=mesh, **kwargs)
    return fully_shard(net, mesh=mesh, **kwargs)


def backward_of(opt: PSGD, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A closure that calls backward."""

    def closure() -> Tensor:
        opt.zero_grad()
        value = loss()
        value.backward()
        return value

    return closure


def whole(net: nn.Module) -> list[Tensor]:
    """The weights, put together."""
    return [(p.full_tensor() if is_sharded(p) else p).detach().clone() for p in net.parameters()]


def make(net: nn.Module, kind: type[PSGD] = SharedPSGD, **kwargs: Any) -> PSGD:
    return kind(net.named_parameters(), lr=0.05, blocks=affine_blocks(net), **kwargs)


def taken(opt: PSGD, loss: Callable[[], Tensor], steps: int = 5) -> None:
    for _ in range(steps):
        opt.step(backward_of(opt, loss))


def alone(returns: bool = False, **kwargs: Any) -> list[Tensor]:
    """One process with all rows and PSGD, which is given the same probes; its closure may only return the loss."""
    net = network()
    opt = make(net, PSGD, probes="normal", **kwargs)  # those of shards
    place = {p: i for i, p in enumerate(owners_of(opt.param_groups, 1))}

    def draw(params: list[Tensor], seed: int, t: int, law: str = "normal") -> dict[Tensor, Tensor]:
        return {p: normal(p, place[p], (0, p.numel()), seed, t).view(p.shape) for p in params}

    with patch("psgd_lit.probes.draw_by_parameter", draw):
        for _ in range(5):
            opt.step((lambda: loss_of(net)) if returns else backward_of(opt, lambda: loss_of(net)))
    return whole(net)


def sharded(mesh: Any, rows: slice, steps: int = 5, seed: int = 0, **kwargs: Any) -> tuple[nn.Module, PSGD]:
    """The same, where ranks hold shards and some rows."""
    net = shard(network(seed), mesh)
    opt = make(net, **kwargs)
    taken(opt, lambda: loss_of(net, rows), steps)
    return net, opt


def copied(group: Any, rows: slice, weight: float = 1.0, wrapped: bool = False, **kwargs: Any) -> list[Tensor]:
    """The same, where ranks hold all parameters and the optimizer averages."""
    net = network()
    opt = make(net, process_group=group, **kwargs)
    model = DistributedDataParallel(net) if wrapped else net
    for _ in range(5):
        if wrapped:
            opt.step(backward_of(opt, lambda: loss_of(model, rows)))
        else:
            opt.step(lambda: loss_of(net, rows), weight=weight)
    return whole(net)


def poisoned(mesh: Any, rank: int) -> dict[str, Any]:
    """One rank has one loss that is not a number, though its gradient is finite."""
    net = shard(network(), mesh)
    opt = make(net, hvp="whiten", momentum=0.5)
    ends = []
    for t in range(3):
        bad = float("nan") if (t, rank) == (1, 2) else 0.0
        opt.step(lambda bad=bad: backward_of(opt, lambda: loss_of(net))() + bad)
        ends.append(whole(net))
    return {"ends": ends, "skipped": opt.skipped}


def accumulated(mesh: Any) -> dict[str, list[list[Tensor]]]:
    """The step, and what is in `.grad`, of a closure that adds to what one call of backward has left there."""
    done = {}
    for hvp in ("whiten", "approx"):
        net = shard(network(), mesh)
        opt = make(net, hvp=hvp, init_scale=1.0, max_norm=1e9)
        start = whole(net)
        loss_of(net).backward()
        single = [p.grad.full_tensor() for p in net.parameters()]

        def adding(net: nn.Module = net) -> Tensor:
            loss = loss_of(net)
            loss.backward()
            return loss

        opt.step(adding)
        step = [a - b for a, b in zip(start, whole(net), strict=True)]
        done[hvp] = [step, [p.grad.full_tensor() for p in net.parameters()], single]
    return done


def saved(net: nn.Module, opt: PSGD, folder: Path, group: Any, options: StateDictOptions) -> None:
    state = dict(zip(("net", "opt"), get_state_dict(net, opt, options=options), strict=True))
    dcp.save(state, checkpoint_id=folder, process_group=group)


def loaded(mesh: Any, folder: Path, group: Any, options: StateDictOptions, **kwargs: Any) -> tuple[nn.Module, PSGD]:
    """Another network and its optimizer, on as many ranks as the mesh has, from a checkpoint."""
    net, opt = sharded(mesh, slice(None), 0, 5, **kwargs)
    state = dict(zip(("net", "opt"), get_state_dict(net, opt, options=options), strict=True))
    dcp.load(state, checkpoint_id=folder, process_group=group)
    set_state_dict(net, opt, model_state_dict=state["net"], optim_state_dict=state["opt"], options=options)
    return net, opt


def resharded(line: Any, pair: Any, rank: int, folder: Path, flat: bool, name: str) -> dict[str, list[Tensor]]:
    """Two ranks, a checkpoint, four ranks, another, and two again, beside two that go on."""
    options, settings = StateDictOptions(flatten_optimizer_state_dict=flat), SETTINGS[name]
    two, four = pair.get_group(), line.get_group()
    there, back = folder / f"two {name} {flat}", folder / f"four {name} {flat}"
    net, opt = sharded(pair, slice(None), 3, **settings)
    if rank < 2:
        saved(net, opt, there, two, options)
    dist.barrier()
    wide, wide_opt = loaded(line, there, four, options, **settings)
    ends = {"loaded": whole(wide), "saved": whole(net)}
    taken(opt, lambda: loss_of(net), 2)
    taken(wide_opt, lambda: loss_of(wide), 2)
    ends |= {"two": whole(net), "four": whole(wide)}
    saved(wide, wide_opt, back, four, options)
    narrow, narrow_opt = loaded(pair, back, two, options, **settings)
    for one, other in ((net, opt), (narrow, narrow_opt)):
        taken(other, lambda one=one: loss_of(one), 2)
    assert opt.param_groups[0]["t"] == narrow_opt.param_groups[0]["t"] == 7
    return ends | {"two on": whole(net), "two again": whole(narrow)}


def whole_state(mesh: Any, rank: int, folder: Path) -> dict[str, Any]:
    """The state of all ranks in one file, from which four ranks, and a process alone, go on."""
    settings = SETTINGS["whiten"]
    net, opt = sharded(mesh, slice(None), 3, **settings)
    state = opt.whole_state_dict()
    if rank == 0:
        torch.save(state, folder / "whole.pt")
    dist.barrier()
    read = torch.load(folder / "whole.pt", weights_only=True)
    again, single = shard(network(5), mesh), network()
    other, one = make(again, **settings), make(single, PSGD, **settings)
    for p, q in zip(again.parameters(), net.parameters(), strict=True):
        here(p.data).copy_(here(q.data))
    other.load_state_dict(read)
    one.load_state_dict(read)
    taken(opt, lambda: loss_of(net), 2)
    taken(other, lambda: loss_of(again), 2)
    held = [i for i, entry in enumerate(one.state.values()) if "Q" in entry]
    return {"on": whole(net), "again": whole(again), "empty": state == {}, "held": held}


def do_all(rank: int, folder: Path) -> dict[str, Any]:
    """All that four ranks do together, and what the first of them does alone."""
    line = init_device_mesh("cpu", (RANKS,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    pair, world = grid["shards"], dist.group.WORLD
    done: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        if rank == 0:
            done[f"{name} alone"] = alone(**settings)
        for label, mesh, count in (("line", line, 4), ("grid", grid, 4), ("pair", pair, 2)):
            net, opt = sharded(mesh, slice(rank % count, None, count), **settings)
            done[f"{name} {label}"] = whole(net)
            done[f"{name} {label} Q"] = [i for i, p in enumerate(net.parameters()) if "Q" in opt.state[p]]
    done["describe"] = opt.describe()
    mine = slice(rank, None, RANKS)
    for hvp in HVP:
        if rank == 0:
            done[f"copied {hvp} alone"] = alone(returns=True, hvp=hvp, damping=0.1)
        done[f"copied {hvp}"] = copied(world, mine, hvp=hvp, damping=0.1)
    some = [slice(0, 4), slice(4, 5), slice(5, 6), slice(6, 8)][rank]
    done["weighted"] = copied(world, some, some.stop - some.start, damping=0.1)
    done["wrapped"] = copied(world, mine, wrapped=True, hvp="whiten", damping=0.1)
    done["poisoned"] = poisoned(line, rank)
    done["accumulated"] = accumulated(line)
    for name, flat in (("whiten", False), ("approx", True)):
        done[f"resharded {name}"] = resharded(line, pair, rank, folder, flat, name)
    done["whole"] = whole_state(line, rank, folder)
    return done


def left_alone(rank: int, folder: Path) -> dict[str, Any]:
    """A rank dies between two steps; the others hear of it, keep what they had, and write no whole checkpoint."""
    net = network()
    opt = make(net, process_group=dist.group.WORLD)
    opt.step(lambda: loss_of(net))
    if rank == RANKS - 1:
        os._exit(0)
    before, words = whole(net), []
    for act in (
        lambda: opt.step(lambda: loss_of(net)),
        lambda: saved(net, opt, folder / "torn", None, StateDictOptions()),
    ):
        try:
            act()
        except Exception as error:
            words.append(type(error).__name__)
    return {"words": words, "kept": same(before, whole(net)), "t": opt.param_groups[0]["t"]}


def work(rank: int, folder: str) -> None:
    """Do everything as one of the ranks, and store what came out."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    seconds = datetime.timedelta(seconds=300)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=seconds)
    done = do_all(rank, Path(folder))
    torch.save(done, Path(folder) / f"{rank}.pt")
    dist.barrier()
    torch.save(done | {"left": left_alone(rank, Path(folder))}, Path(folder) / f"{rank}.pt")
    os._exit(0)  # without the others there is no orderly end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """What each of four processes did; they start once for all."""
    context = forks_with_torch()
    workers = [context.Process(target=work, args=(rank, str(folder))) for rank in range(RANKS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(900)
    assert [worker.exitcode for worker in workers] == [0] * RANKS
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]


def close(one: list[Tensor], other: list[Tensor]) -> bool:
    """Whether weights are equal but for rounding."""
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(one, other, strict=True))


def moved(end: list[Tensor]) -> bool:
    """Whether each weight is somewhere else than at the start."""
    return not any(close([a], [b]) for a, b in zip(end, network().parameters(), strict=True))


@pytest.mark.parametrize("label", ["line", "grid", "pair"])
@pytest.mark.parametrize("name", SETTINGS)
def test_shards_walk_the_path_of_one_process(ranks, name, label):
    """Four ranks in a line, two copies on two ranks each, and two ranks: the path of PSGD with the whole batch."""
    for rank in ranks:
        assert close(rank[f"{name} {label}"], ranks[0][f"{name} alone"])
        assert same(rank[f"{name} {label}"], ranks[0][f"{name} {label}"])
    assert moved(ranks[0][f"{name} alone"])


@pytest.mark.parametrize(("label", "teams"), [("line", [0b1111]), ("grid", [0b1111]), ("pair", [0b0011, 0b1100])])
def test_each_block_has_one_owner(ranks, label, teams):
    """The Q of a block is on one rank of each team, and no rank has nothing to do."""
    held = [rank[f"whiten {label} Q"] for rank in ranks]
    for team in teams:
        parts = [part for rank, part in enumerate(held) if team >> rank & 1]
        assert sorted(i for part in parts for i in part) == [
            0,
            1,
            2,
            3,
            4,
            6,
            7,
        ]  # biases are with their weights
        assert all(parts)


def test_the_table_names_owners(ranks):
    """All ranks print the same table, whose last column is the owner."""
    head, *lines = ranks[0]["describe"].splitlines()
    assert {rank["describe"] for rank in ranks} == {ranks[0]["describe"]}
    assert head.endswith("rank")
    assert {line.split()[-1] for line in lines} == {"0", "1"}


@pytest.mark.parametrize("hvp", HVP)
def test_whole_parameters_are_shared_too(ranks, hvp):
    """Ranks that hold all parameters fit some blocks each, and have the same bits."""
    for rank in ranks:
        assert close(rank[f"copied {hvp}"], ranks[0][f"copied {hvp} alone"])
        assert same(rank[f"copied {hvp}"], ranks[0][f"copied {hvp}"])
    assert moved(ranks[0][f"copied {hvp}"])


def test_a_wrapped_model_is_averaged_once(ranks):
    """DistributedDataParallel has averaged before, and a mean of equal gradients changes nothing."""
    assert close(ranks[0]["wrapped"], ranks[0]["copied whiten alone"])


def test_unequal_batches_are_weighted(ranks):
    """Ranks with four, one, one and two of the rows."""
    assert all(close(rank["weighted"], ranks[0]["copied exact alone"]) for rank in ranks)


def test_a_bad_loss_on_one_rank(ranks):
    """All ranks skip the step and count it."""
    for rank in ranks:
        first, second, third = rank["poisoned"]["ends"]
        assert same(first, second)
        assert not same(second, third)
        assert rank["poisoned"]["skipped"] == 1
        assert all(x.isfinite().all() for x in third)


@pytest.mark.parametrize("hvp", ["whiten", "approx"])
def test_a_closure_that_adds_to_grad(ranks, hvp):
    """The sum is in `.grad` and is what the step takes; Q is the identity still."""
    for rank in ranks:
        step, gradient, single = rank["accumulated"][hvp]
        assert close(step, [0.05 * g for g in gradient])
        assert close(gradient, [2 * g for g in single])


@pytest.mark.parametrize("name", ["whiten", "approx"])
def test_a_checkpoint_goes_to_other_numbers_of_ranks(ranks, name):
    """From two ranks to four and back to two, nested and flat: the path of two that go on."""
    for rank in ranks:
        ends = rank[f"resharded {name}"]
        assert same(ends["saved"], ends["loaded"])
        assert close(ends["two"], ends["four"])
        assert close(ends["two on"], ends["two again"])
        assert not close(ends["two"], ends["saved"])
        assert not close(ends["two on"], ends["two"])


def test_the_whole_state_goes_anywhere(ranks):
    """One rank gives it; four ranks go on with the same bits, and PSGD alone has the Q of all blocks."""
    for number, rank in enumerate(ranks):
        assert same(rank["whole"]["on"], rank["whole"]["again"])
        assert rank["whole"]["empty"] == (number > 0)
        assert len(rank["whole"]["held"]) == 7


def test_a_rank_that_dies_is_an_error_for_the_others(ranks, folder):
    """Within the timeout of the group; nothing has changed, and the checkpoint lacks the file that makes it one."""
    for rank in ranks[:-1]:
        assert len(rank["left"]["words"]) == 2
        assert rank["left"]["kept"]
        assert rank["left"]["t"] == 1
    assert not (folder / "torn" / ".metadata").exists()


@pytest.fixture
def one() -> Iterator[Any]:
    """One process that is a group by itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


CANNOT_BE_MADE = [
    ({"hvp": "exact"}, 'choose "whiten", or "approx"'),
    ({"hvp": "forward"}, 'choose "whiten", or "approx"'),
    ({"preconditioner": "dense"}, "one block of all parameters"),
    ({"preconditioner": "splu"}, "one block of all parameters"),
    ({"monotone": True}, "is for one process"),
    ({"probes": "rademacher"}, "are not shared"),
]


@pytest.mark.parametrize(("wrong", "words"), CANNOT_BE_MADE)
def test_what_shards_cannot_have_is_refused(one, wrong, words):
    """When the optimizer is made, with the way out."""
    net = shard(network(), one)
    with pytest.raises(ValueError, match=words):
        SharedPSGD(net.parameters(), **{"hvp": "whiten"} | wrong)


def test_parameters_that_are_not_alike_are_refused(one):
    """Whole ones without a group, some sharded and some not, complex ones, and shards by columns."""
    net, plain = shard(network(), one), network()
    with pytest.raises(ValueError, match="pass process_group"):
        SharedPSGD(plain.parameters())
    with pytest.raises(ValueError, match="on 2 meshes"):
        SharedPSGD([*net.parameters(), *plain.parameters()], hvp="whiten")
    with pytest.raises(ValueError, match="complex"):
        SharedPSGD(
            [torch.zeros(2, dtype=torch.complex64, requires_grad=True)],
            process_group=dist.group.WORLD,
        )
    columns = fully_shard(nn.Linear(2, 2), mesh=one, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    with pytest.raises(ValueError, match="cut by rows"):
        SharedPSGD(columns.parameters(), hvp="whiten")


def test_steps_that_shards_cannot_take_are_refused(one):
    """Each says what to call instead, and counts nothing."""
    net = shard(network(), one)
    opt = make(net, hvp="approx")
    loss_of(net).backward()
    with pytest.raises(RuntimeError, match="two backward passes"):
        opt.step()
    opt.zero_grad()
    with pytest.raises(RuntimeError, match=r"calls backward\(\) and returns the loss"):
        opt.step(lambda: loss_of(net))
    with pytest.raises(ValueError, match="weight must be"):
        opt.step(backward_of(opt, lambda: loss_of(net)), weight=2.0)
    with pytest.raises(RuntimeError, match="diagnostics"):
        opt.diagnostics()
    half = shard(network(), one, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    other = make(half, hvp="approx")
    with pytest.raises(ValueError, match="bfloat16"):
        other.step(backward_of(other, lambda: loss_of(half)))
    assert opt.param_groups[0]["t"] == other.param_groups[0]["t"] == 0


def test_mixed_precision_serves_whitening(one):
    """A model may compute in bfloat16: its gradients arrive in the dtype of the parameters."""
    net = shard(network().float(), one, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    opt = make(net, hvp="whiten")
    first = loss_of(net).detach()
    taken(opt, lambda: loss_of(net), 30)
    assert loss_of(net).detach() < first
    assert {leaf.dtype for entry in opt.state.values() for leaf in leaves(entry.get("Q", ()))} == {torch.float32}


def test_the_state_of_one_rank_of_several_is_refused(one):
    """A block that has begun, and whose Q was left elsewhere."""
    net = shard(network(), one)
    opt = make(net, hvp="whiten")
    taken(opt, lambda: loss_of(net), 1)
    state = opt.state_dict()
    state["state"][0] = {"owner": torch.tensor(1)}
    with pytest.raises(ValueError, match="whole_state_dict"):
        make(net, hvp="whiten").load_state_dict(state)


def test_frozen_parameters_and_new_groups(one):
    """A frozen one stays, and joins when it is thawed; earlier blocks keep their owners when a group is added."""
    net = shard(network(), one)
    net.words.weight.requires_grad_(False)
    opt = SharedPSGD(net.parameters(), hvp="whiten")
    before, owners = whole(net), dict(opt.sharing.owner)
    taken(opt, lambda: loss_of(net), 2)
    stays = [torch.equal(*pair) for pair in zip(before, whole(net), strict=True)]
    assert stays == [True] + [False] * (len(stays) - 1)
    net.words.weight.requires_grad_(True)
    taken(opt, lambda: loss_of(net), 2)
    assert not torch.equal(before[0], whole(net)[0])
    more = fully_shard(nn.Linear(2, 2), mesh=one)
    opt.add_param_group({"params": list(more.parameters())})
    assert {p: opt.sharing.owner[p] for p in owners} == owners


def test_the_dearest_blocks_go_first():
    """No rank has more than the mean and one block, and what a rank does already counts."""
    costs = [5.0, 9.0, 1.0, 3.0, 3.0, 7.0, 2.0]
    owners = assigned(costs, [0.0] * 3)
    loads = [sum(c for c, owner in zip(costs, owners, strict=True) if owner == r) for r in range(3)]
    assert loads == [10.0, 10.0, 10.0]
    assert assigned([1.0], [3.0, 2.0, 5.0]) == [1]


@pytest.mark.parametrize("cut", [(0, 3), (3, 11), (7, 7), (10, 25), (0, 25)])
def test_numbers_do_not_hang_on_who_draws_them(cut):
    """Across chunks, and of empty shards."""
    p, whole = torch.zeros(5, 5), normal(torch.zeros(5, 5), 2, (0, 25), 3, 7, chunk=4)
    assert torch.equal(normal(p, 2, cut, 3, 7, chunk=4), whole[slice(*cut)])
    for other in ((3, 3, 7), (2, 4, 7), (2, 3, 8)):
        place, seed, t = other
        assert not torch.equal(normal(p, place, (0, 25), seed, t, chunk=4), whole)


def test_numbers_are_standard_normal():
    """Their mean and variance over chunks."""
    x = normal(torch.zeros(10_000), 0, (0, 10_000), 0, 0, chunk=100)
    assert abs(x.mean()) < 0.04
    assert abs(x.var() - 1) < 0.06


def test_the_threshold_stands_still_after_a_hundred_steps(one):
    """It is the norm of all parameters over all ranks until then."""
    net = shard(network(), one)
    opt, seen, norms = make(net, hvp="approx"), [], []
    for _ in range(104):
        norms.append(torch.stack([p.square().sum() for p in whole(net)]).sum().sqrt().clamp(min=1.0))
        taken(opt, lambda: loss_of(net), 1)
        seen.append(opt.param_groups[0]["reference"])
    torch.testing.assert_close(torch.stack(seen[:100]).double(), torch.stack(norms[:100]).double(), rtol=1e-5, atol=0)
    assert all(torch.equal(x, seen[99]) for x in seen[100:])
    assert not torch.equal(norms[103], norms[99])
