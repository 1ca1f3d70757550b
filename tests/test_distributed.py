"""Two processes on one machine, over gloo: the worker, and what else it shows of data parallel training."""

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from toys import HVP, fill, forks_with_torch, loss_of, network, same, states, weights

from psgd_lit.affine import affine_blocks
from psgd_lit.blocks import leaves
from psgd_lit.derivatives import mean_over_ranks
from psgd_lit.optim import PSGD

HALVES = (slice(0, 16), slice(16, 32))


class Outcome(NamedTuple):
    """Where a run ended."""

    weights: list[Tensor]
    state: list[Tensor]
    start: list[Tensor]
    skipped: int = 0


def run(opt: PSGD, net: nn.Module, take: Callable[[int], Any], steps: int = 5) -> Outcome:
    """Take steps, and tell where they led."""
    start = weights(net)
    for t in range(steps):
        take(t)
    state = [leaf.clone() for s in opt.state.values() for leaf in (*leaves(s.get("Q", ())), s["momentum"])]
    return Outcome(weights(net), state, start, opt.skipped)


def first_way(rows: slice, group: Any, **kwargs: Any) -> Outcome:
    """A closure that returns the loss of some rows."""
    net = network(torch.float64)
    opt = PSGD(net.parameters(), lr=0.05, momentum=0.5, process_group=group, **kwargs)
    return run(opt, net, lambda t: opt.step(lambda: loss_of(net, rows)))


def by_backward(rows: slice, group: Any, wrapped: bool, **kwargs: Any) -> Outcome:
    """Plain backward and a bare step, through DistributedDataParallel or averaged by the optimizer."""
    net = network(torch.float64)
    model = DistributedDataParallel(net) if wrapped else net
    opt = PSGD(net.parameters(), lr=0.05, momentum=0.5, hvp="whiten", process_group=group, **kwargs)

    def take(t: int) -> None:
        opt.zero_grad()
        loss_of(model, rows).backward()
        opt.step()

    return run(opt, net, take)


def wrapped_first_way(rows: slice, group: Any) -> Outcome:
    """Exact products under DistributedDataParallel, whose own reduction autograd.grad passes by."""
    net = network(torch.float64)
    model = DistributedDataParallel(net)
    opt = PSGD(net.parameters(), lr=0.05, momentum=0.5, process_group=group)
    return run(opt, net, lambda t: opt.step(lambda: loss_of(model, rows)))


def unused(rank: int, group: Any) -> Outcome:
    """Each rank uses another part of the model."""
    parts = nn.ModuleList([fill(nn.Linear(2, 2), i) for i in (1, 2)])
    opt = PSGD(parts.parameters(), lr=0.05, momentum=0.5, process_group=group, weight_decay=0.1)
    return run(opt, parts, lambda t: opt.step(lambda: parts[rank](torch.ones(3, 2)).square().mean()))


def unused_backward(rank: int, group: Any) -> Outcome:
    """The same by plain backward, with layers of different sizes."""
    parts = nn.ModuleList([fill(nn.Linear(2, 2), 1), fill(nn.Linear(3, 3), 2)])
    opt = PSGD(parts.parameters(), lr=0.05, momentum=0.5, process_group=group, hvp="whiten")

    def take(t: int) -> None:
        opt.zero_grad()
        parts[rank](torch.ones(3, 2 + rank)).square().mean().backward()
        opt.step()

    return run(opt, parts, take)


def warned(group: Any) -> list[Tensor]:
    """Whether a step warns, by closures that return the loss and that call backward."""
    net = network(torch.float64)
    model = DistributedDataParallel(net)
    found = []
    for calls_backward in (False, True):
        opt = PSGD(net.parameters(), lr=0.05, hvp="whiten", process_group=group)

        def closure(opt: PSGD = opt, calls_backward: bool = calls_backward) -> Tensor:
            opt.zero_grad()
            loss = loss_of(model)
            if calls_backward:
                loss.backward()
            return loss

        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            opt.step(closure)
        found.append(torch.tensor(any("process_group" in str(w.message) for w in heard)))
    return found


def undefined(rank: int, group: Any) -> Outcome:
    """One rank has a batch whose loss is not a number, and whose gradient is finite."""
    net = network(torch.float64)
    opt = PSGD(net.parameters(), lr=0.05, momentum=0.5, process_group=group)
    added = [0.0, float("nan") if rank else 0.0, 0.0, 0.0, 0.0]
    return run(opt, net, lambda t: opt.step(lambda: loss_of(net, HALVES[rank]) + added[t]))


def bad(rank: int, group: Any) -> Outcome:
    """One rank has one bad batch."""
    net = network(torch.float64)
    opt = PSGD(net.parameters(), lr=0.05, momentum=0.5, process_group=group)
    factor = [1.0, float("nan") if rank else 1.0, 1.0, 1.0, 1.0]
    return run(opt, net, lambda t: opt.step(lambda: factor[t] * loss_of(net, HALVES[rank])))


def means(rank: int, group: Any) -> list[Tensor]:
    """What the mean over ranks makes of tensors of several kinds."""
    tensors = [
        torch.full((2, 3), float(rank)),
        torch.full((), 10.0 * rank, dtype=torch.float64),
        torch.empty(0),
        torch.full((2,), rank + 1j * rank),
        torch.full((3, 2), 2.0 * rank).T,
    ]
    return mean_over_ranks(tensors, group)


def work(rank: int, folder: str) -> None:
    """Do everything as one of two ranks, and store what came out."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = dist.group.WORLD
    mine, whole = HALVES[rank], slice(None)
    done: dict[str, Any] = {
        "exact": first_way(mine, group),
        "approx": first_way(mine, group, hvp="approx"),
        "damped": first_way(mine, group, damping=0.1, update_every=2, preconditioner="dense"),
        "wrapped": wrapped_first_way(mine, group),
        "backward": by_backward(mine, None, wrapped=True),
        "averaged": by_backward(mine, group, wrapped=False),
        "unused": unused(rank, group),
        "unused backward": unused_backward(rank, group),
        "warned alone": warned(None),
        "warned": warned(group),
        "bad": bad(rank, group),
        "undefined": undefined(rank, group),
        "means": means(rank, group),
    }
    if rank == 0:
        done |= {
            "exact alone": first_way(whole, None),
            "approx alone": first_way(whole, None, hvp="approx"),
            "damped alone": first_way(whole, None, damping=0.1, update_every=2, preconditioner="dense"),
            "wrapped alone": first_way(whole, None),
            "backward alone": by_backward(whole, None, wrapped=False),
        }
    torch.save({name: tuple(x) for name, x in done.items()}, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


def two_processes(folder: Path) -> list[dict[str, Any]]:
    """Run both ranks in fresh processes, and return what each did."""
    context = forks_with_torch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        workers = [context.Process(target=work, args=(rank, str(folder))) for rank in (0, 1)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(120)
    assert [worker.exitcode for worker in workers] == [0, 0]
    return [
        {
            name: Outcome(*x) if len(x) == 4 else list(x)
            for name, x in torch.load(folder / f"{rank}.pt", weights_only=True).items()
        }
        for rank in (0, 1)
    ]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Outcome]]:
    """What each of two processes did; they start once for all."""
    return two_processes(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("run", ["exact", "approx", "damped", "wrapped", "backward"])
def test_17_data_parallel(ranks, run):
    """Two processes with half a batch each: ranks have the same bits, and walk the path of one with the whole batch."""
    first, second = (rank[run] for rank in ranks)
    assert same(first.weights, second.weights)
    assert same(first.state, second.state)
    alone = ranks[0][f"{run} alone"]
    for a, b in zip(first.weights + first.state, alone.weights + alone.state, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)
    assert not any(torch.equal(a, b) for a, b in zip(first.weights, alone.start, strict=True))


@pytest.mark.parametrize("run", ["unused", "unused backward"])
def test_17_a_rank_without_a_gradient(ranks, run):
    """What one rank does not use counts as zero there, and no rank waits for another for ever."""
    first, second = (rank[run] for rank in ranks)
    assert same(first.weights, second.weights)
    assert same(first.state, second.state)
    assert not any(torch.equal(a, b) for a, b in zip(first.weights, first.start, strict=True))


def test_17_nobody_averages_without_a_word(ranks):
    """A closure that calls no backward, and no group: a warning. One that does, or a group: none."""
    for rank in ranks:
        assert [bool(x) for x in rank["warned alone"]] == [True, False]
        assert not any(rank["warned"])


@pytest.mark.parametrize("run", ["bad", "undefined"])
def test_17_a_bad_batch_on_one_rank(ranks, run):
    """All ranks skip, and count, the step, also where the loss alone is bad."""
    first, second = (rank[run] for rank in ranks)
    assert first.skipped == second.skipped == 1
    assert same(first.weights, second.weights)
    assert same(first.state, second.state)
    assert all(x.isfinite().all() for x in first.weights + first.state)


def test_17_exact_products_pass_a_wrapped_model_by(ranks):
    """Whether DistributedDataParallel wraps the model or not, the first way gives the same."""
    for one, other in (
        (ranks[0]["exact"], ranks[0]["wrapped"]),
        (ranks[0]["backward"], ranks[0]["averaged"]),
    ):
        for a, b in zip(one.weights + one.state, other.weights + other.state, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_17_a_mean_of_tensors_of_several_kinds(ranks):
    """Shapes, dtypes and complex numbers come back as they went, from one reduction for each kind."""
    expected = [
        torch.full((2, 3), 0.5),
        torch.full((), 5.0, dtype=torch.float64),
        torch.empty(0),
        torch.full((2,), 0.5 + 0.5j),
        torch.full((2, 3), 1.0),
    ]
    for rank in ranks:
        for mean, value in zip(rank["means"], expected, strict=True):
            torch.testing.assert_close(mean, value, rtol=0, atol=0)


@pytest.fixture
def alone() -> Iterator[None]:
    """One process that is a group by itself, as torch's distributed checkpoints need it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@pytest.mark.parametrize("name", ["dense", "splu", "kron", "scan", "diagonal", "esgd"])
@pytest.mark.parametrize(("hvp", "momentum"), [("exact", 0.0), ("exact", 0.5), ("whiten", 0.0)])
@pytest.mark.usefixtures("alone")
def test_05_distributed_checkpoints_go_on(flat, name, hvp, momentum, tmp_path):
    """Through files, into a new model, with and without flattened states: the next steps have the same bits."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def make(seed: int, lr: Any) -> tuple[nn.Module, PSGD]:
        net = network(seed=seed)
        kind: dict[str, Any] = {"preconditioner": name, "hvp": hvp, "momentum": momentum}
        return net, PSGD(net.parameters(), lr=lr, blocks=affine_blocks(net), **kind)

    for lr in (0.05, torch.tensor(0.05)):
        (net, opt), (twin, other) = make(0, lr), make(5, lr)
        for _ in range(3):
            opt.step(lambda net=net: loss_of(net))
        folder = tmp_path / type(lr).__name__
        dcp.save(
            dict(zip(("net", "opt"), get_state_dict(net, opt, options=options), strict=True)),
            checkpoint_id=folder,
        )
        loaded = dict(zip(("net", "opt"), get_state_dict(twin, other, options=options), strict=True))
        dcp.load(loaded, checkpoint_id=folder)
        set_state_dict(
            twin,
            other,
            model_state_dict=loaded["net"],
            optim_state_dict=loaded["opt"],
            options=options,
        )
        assert same(states(opt), states(other))
        for _ in range(2):
            opt.step(lambda net=net: loss_of(net))
            other.step(lambda twin=twin: loss_of(twin))
        assert same(weights(net), weights(twin))
        assert opt.param_groups[0]["t"] == other.param_groups[0]["t"] == 5


OPTIONS = {
    "nested": {},
    "flat": {"flatten_optimizer_state_dict": True},
    "full": {"full_state_dict": True, "cpu_offload": True},
}


def sent(saved: dict[str, Any], empty: dict[str, Any], by: str, folder: Path) -> dict[str, Any]:
    """Carry a state by memory, by a distributed checkpoint into an empty state, or by one as a torch file."""
    if by == "memory":
        return saved
    dcp.save({"opt": saved}, checkpoint_id=folder)
    if by == "file":
        dcp.load({"opt": empty}, checkpoint_id=folder)
        return empty
    dcp_to_torch_save(folder, folder / "one.pt")
    return torch.load(folder / "one.pt", weights_only=True)["opt"]


@pytest.mark.parametrize("by", ["memory", "file", "converted file"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("name", ["dense", "splu", "kron", "scan"])
@pytest.mark.parametrize("settings", [{"momentum": 0.5}, {}], ids=["momentum", "plain"])
@pytest.mark.usefixtures("alone")
def test_every_parameter_has_an_entry_in_a_distributed_checkpoint(by, options, name, settings, tmp_path):
    """Also one whose block keeps its state elsewhere, so that torch's strict loading takes what its saving gave."""

    def make(seed: int) -> tuple[nn.Module, PSGD]:
        net = network(seed=seed)
        return net, PSGD(
            net.parameters(),
            lr=0.05,
            preconditioner=name,
            blocks=affine_blocks(net),
            **settings,
        )

    (net, opt), (twin, other) = make(0), make(5)
    for _ in range(2):
        opt.step(lambda: loss_of(net))
    how = StateDictOptions(**options)
    saved, empty = (get_optimizer_state_dict(*pair, options=how) for pair in ((net, opt), (twin, other)))
    if options is not OPTIONS["flat"]:
        assert all(saved["state"][key] for key, _ in net.named_parameters())
    loaded = sent(saved, empty, by, tmp_path)
    set_optimizer_state_dict(twin, other, loaded, options=how)
    twin.load_state_dict(net.state_dict())
    assert same(states(opt), states(other))
    for _ in range(2):
        opt.step(lambda: loss_of(net))
        other.step(lambda: loss_of(twin))
    assert same(weights(net), weights(twin))


@pytest.mark.parametrize("hvp", HVP)
@pytest.mark.usefixtures("alone")
def test_sharded_parameters_are_refused_with_the_way_out(hvp):
    """FSDP2 computes with other tensors than the optimizer holds."""
    net = network()
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ValueError, match="SharedPSGD"):
        PSGD(net.parameters(), hvp=hvp)


@pytest.mark.usefixtures("alone")
def test_parameters_that_are_sharded_later_have_no_gradient():
    """An optimizer that was made before the model was sharded holds tensors that the loss no longer uses."""
    net = network()
    opt = PSGD(net.parameters())
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(RuntimeError, match="uses none of the optimizer's 4 trainable parameters"):
        opt.step(lambda: loss_of(net))
    assert opt.param_groups[0]["t"] == 0
