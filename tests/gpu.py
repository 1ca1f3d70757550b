"""Check and measure the library on a CUDA machine that has torch and nothing else: `make gpu`.

Each result is written to `nbs/results/gpu.json` as soon as it is there, the most important first.
Images are random bytes in the shapes of the published ones, for times do not depend on what they show.
`DEVICE=cpu STEPS=2 OUT=file make gpu` tries the script itself, on small sizes.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from psgd_lit.blocks import choose, leaves  # noqa: E402
from psgd_lit.buckets import Bucket, map_leaves  # noqa: E402
from psgd_lit.experiments.image_data import Images  # noqa: E402
from psgd_lit.experiments.images import IMAGE_PROBLEMS, ImageProblem  # noqa: E402
from psgd_lit.experiments.methods import METHODS, make_optimizer, step_size  # noqa: E402
from psgd_lit.experiments.records import Stopwatch, environment  # noqa: E402
from psgd_lit.groups.diagonal import Diagonal, Equilibration  # noqa: E402
from psgd_lit.groups.kron import Kron  # noqa: E402
from psgd_lit.groups.normalization import Normalization  # noqa: E402
from psgd_lit.groups.protocol import Group  # noqa: E402
from psgd_lit.groups.sparse_lu import SparseLU  # noqa: E402
from psgd_lit.groups.triangular import Triangular  # noqa: E402
from psgd_lit.optim import PSGD  # noqa: E402

GROUPS: list[tuple[Group, Any]] = [
    (Triangular(), 96),
    (Diagonal(), 96),
    (Equilibration(), 96),
    (SparseLU(10), 96),
    (Kron(Triangular(), Triangular()), (8, 12)),
    (Kron(Diagonal(), Normalization()), (8, 12)),
]


@contextmanager
def no_synchronisation(device: str) -> Any:
    """Raise if the host waits for the device."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def seconds(call: Callable[[], Any], device: str, repeats: int) -> float:
    """The median time of a call, with the device's work included."""
    times = []
    for _ in range(repeats + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[2:])


def groups_agree(device: str) -> dict[str, float]:
    """The largest relative difference between host and device after 20 updates, without a synchronisation."""
    differences = {}
    for group, shape in GROUPS:
        source = torch.Generator().manual_seed(0)
        here, there = group.init(shape, (3,)), group.init(shape, (3,), device=device)
        pairs = torch.randn(20, 2, 3, 96, 1, generator=source)
        moved = pairs.to(device)
        for (v, h), (v_there, h_there) in zip(pairs, moved, strict=True):
            here = group.update(here, v, h, lr=0.1)
            with no_synchronisation(device):
                there = group.update(there, v_there, h_there, lr=0.1)
        assert all(leaf.device.type == device for leaf in leaves(there))
        one, other = (
            group.matrix(here),
            group.matrix(map_leaves(lambda leaf: leaf.cpu(), there)),
        )
        differences[repr(group)] = float((one - other).norm() / one.norm())
        assert differences[repr(group)] < 1e-3, (group, differences)
    return differences


def network(width: int, depth: int, device: str) -> nn.Module:
    """A tanh network of square layers."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*layers).to(device)


def optimizer_steps(device: str, width: int, depth: int, repeats: int) -> dict[str, float]:
    """Seconds of a step, by method, on one network; PSGD's steps without a synchronisation."""
    source = torch.Generator(device).manual_seed(0)
    x = torch.randn(128, width, device=device, generator=source)
    times = {}
    methods: dict[str, Any] = {
        "sgd": None,
        "kron": {},
        "kron, not due": {"update_every": 10**9},
    }
    methods["esgd"] = {"preconditioner": "esgd"}
    for name, settings in methods.items():
        net = network(width, depth, device)

        def loss(net: nn.Module = net) -> Tensor:
            return net(x).square().mean()

        if settings is None:
            sgd = torch.optim.SGD(net.parameters(), lr=0.01)

            def call(
                net: nn.Module = net,
                sgd: torch.optim.SGD = sgd,
                loss: Callable[[], Tensor] = loss,
            ) -> None:
                sgd.zero_grad()
                loss().backward()
                sgd.step()
        else:
            psgd = PSGD(net.parameters(), lr=0.01, **settings)
            psgd.step(loss)

            def call(psgd: PSGD = psgd, loss: Callable[[], Tensor] = loss) -> None:
                with no_synchronisation(device):
                    psgd.step(loss)

        times[name] = seconds(call, device, repeats)
    return times


def triangular_steps(device: str, sizes: list[int], repeats: int) -> dict[str, dict[str, float]]:
    """Seconds of one dense update, by the running sum and by the plain product."""
    group, times = Triangular(), {}
    for n in sizes:
        Q = group.init(n, device=device)
        source = torch.Generator(device).manual_seed(0)
        a, b = torch.randn(2, n, 1, device=device, generator=source)
        none = torch.zeros(1, device=device)
        times[str(n)] = {
            "running sum": seconds(
                lambda Q=Q, a=a, b=b, none=none: group.step_of_sums(Q, a + b, a - b, 0.01, none),
                device,
                repeats,
            ),
            "plain": seconds(
                lambda Q=Q, a=a, b=b, none=none: Group.step_of_sums(group, Q, a + b, a - b, 0.01, none),
                device,
                repeats,
            ),
        }
    return times


def bucket_steps(device: str, width: int, depth: int, repeats: int) -> dict[str, float]:
    """Seconds of one update of many equal blocks, in one bucket and in one bucket each."""
    params = [torch.zeros(width, width, device=device) for _ in range(depth)]
    choices = choose("kron", params)
    source = torch.Generator(device).manual_seed(0)
    v = {p: torch.randn(width, width, device=device, generator=source) for p in params}
    together, alone = (
        Bucket(choices, 1.0, [None] * depth),
        [Bucket([choice], 1.0, [None]) for choice in choices],
    )
    return {
        "one bucket": seconds(lambda: together.fit(v, v, 0.01), device, repeats),
        "a bucket each": seconds(lambda: [bucket.fit(v, v, 0.01) for bucket in alone], device, repeats),
    }


def random_images(colours: int, side: int, device: str) -> Images:
    """Bytes in the shape of published images, and labels."""
    source = torch.Generator(device).manual_seed(0)
    x = torch.randint(256, (2000, colours, side, side), device=device, generator=source, dtype=torch.uint8)
    y = torch.randint(10, (2000,), device=device, generator=source)
    return Images(x, y, x, y)


def image_problem(name: str, device: str, batch: int) -> ImageProblem:
    """One of Experiments 3 to 5 on random bytes; a batch of 0 is the usual one."""
    images = random_images(1, 28, device) if name.startswith("mnist") else random_images(3, 32, device)
    problem = IMAGE_PROBLEMS[name]
    return replace(problem, load=lambda device: images, batch=batch or problem.batch)


def step_of(name: str, method: str, device: str, batch: int) -> Callable[[], Any]:
    """A training step of a method on one of Experiments 3 to 5, on a batch that stays."""
    problem = image_problem(name, device, batch)
    source = torch.Generator(device).manual_seed(0)
    params, data = problem.init(source), problem.sample(problem.batch, source)
    optimizer: Any = make_optimizer(method, params, *step_size(name, method))
    return lambda: optimizer.step(lambda: problem.loss(params, data))


def experiment_steps(device: str, steps: int, batch: int) -> dict[str, dict[str, dict[str, float]]]:
    """Milliseconds of a step of each method on Experiments 3 to 5, by CUDA events, and the ratio to SGD.

    After the first steps none of them may make the host wait; Adam is torch's own, and is not asked.
    """
    times: dict[str, dict[str, dict[str, float]]] = {}
    for name in IMAGE_PROBLEMS:
        times[name] = {}
        for method in ("sgd", *(m for m in METHODS if m not in ("sgd", "dense"))):
            step, watch = step_of(name, method, device, batch), Stopwatch(device)
            for _ in range(3):
                step()
            with no_synchronisation(device if method != "adam" else "cpu"):
                for _ in range(steps):
                    watch.mark()
                    step()
                    watch.mark()
            median = 1000 * watch.read().quantile(0.5)
            ratio = median / times[name]["sgd"]["median_ms"] if method != "sgd" else 1.0
            times[name][method] = {
                "median_ms": float(f"{median:.4g}"),
                "ratio": float(f"{ratio:.4g}"),
            }
    return times


def captured_updates(device: str) -> dict[str, float]:
    """The largest relative difference between updates that a CUDA graph replays and the same made one by one.

    Without CUDA nothing can be captured, and the function that would be is called again in place of a replay.
    """
    differences = {}
    for group, shape in GROUPS:
        source = torch.Generator().manual_seed(1)
        pairs = torch.randn(6, 2, 3, 96, 1, generator=source).to(device)
        v, h = pairs[0].clone()
        state = group.init(shape, (3,), device=device)

        def update(group: Group = group, state: Any = state, v: Tensor = v, h: Tensor = h) -> None:
            new = group.update(state, v, h, lr=0.1)
            for old, leaf in zip(leaves(state), leaves(new), strict=True):
                old.copy_(leaf)

        replay = captured(update, device)
        start = map_leaves(lambda leaf: leaf.clone(), group.init(shape, (3,), device=device))
        for old, leaf in zip(leaves(state), leaves(start), strict=True):
            old.copy_(leaf)
        expected = start
        for pair in pairs:
            v.copy_(pair[0])
            h.copy_(pair[1])
            replay()
            expected = group.update(expected, pair[0], pair[1], lr=0.1)
        one, other = group.matrix(state), group.matrix(expected)
        differences[repr(group)] = float((one - other).norm() / other.norm())
        assert differences[repr(group)] < 1e-3, (group, differences)
    return differences


def captured(call: Callable[[], None], device: str) -> Callable[[], None]:
    """What replays a call: a CUDA graph of it, after three calls that warm up on a stream of their own."""
    if device != "cuda":
        return call
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def main() -> None:
    """Run all checks on the device that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    where = os.environ.get("OUT", ROOT / "nbs" / "results" / "gpu.json")
    parser.add_argument("--device", default=os.environ.get("DEVICE", "cuda"), choices=["cuda", "cpu"])
    parser.add_argument("--steps", type=int, default=int(os.environ.get("STEPS", "50")), help="that are timed")
    parser.add_argument("--out", type=Path, default=where)
    parser.add_argument("--quick", action="store_true", help="small sizes, to try the script itself")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device: nothing was measured (try the script with --device cpu --quick --out FILE)")
    device, is_small = options.device, options.quick or options.steps < 10
    repeats, batch = (2, 2) if is_small else (20, 0)
    width, depth, sizes = (16, 3, [128]) if is_small else (256, 16, [1000, 2000, 4000, 7591])
    name = torch.cuda.get_device_name() if device == "cuda" else platform.machine()
    results: dict[str, Any] = environment(device) | {"device": name, "steps": options.steps}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for key, run in {
        "groups agree with the host": lambda: groups_agree(device),
        "updates in a graph agree": lambda: captured_updates(device),
        "experiments 3 to 5": lambda: experiment_steps(device, options.steps, batch),
        "seconds a step": lambda: optimizer_steps(device, width, depth, repeats),
        "seconds a dense update": lambda: triangular_steps(device, sizes, min(repeats, 5)),
        "seconds an update of many blocks": lambda: bucket_steps(device, width, depth, repeats),
    }.items():
        results[key] = run()
        options.out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{key}: {json.dumps(results[key])}", flush=True)


if __name__ == "__main__":
    main()
