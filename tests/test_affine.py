"""Blocks of parameters: bijections that keep every entry, layers that are the maps they say, and runs on them."""

import copy
import io
from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from toys import equal, fill, generator, loss_of, network, same, take, weights

from psgd_lit.affine import (
    Block,
    Piece,
    affine_block,
    affine_blocks,
    as_real,
    flat_block,
    layer_blocks,
    parameter_block,
)
from psgd_lit.blocks import choose, cover, leaves
from psgd_lit.derivatives import draw_probes
from psgd_lit.graphs import SecondDerivativeError
from psgd_lit.groups.diagonal import Diagonal
from psgd_lit.groups.kron import Kron
from psgd_lit.groups.normalization import Normalization
from psgd_lit.groups.triangular import Triangular
from psgd_lit.optim import PSGD
from psgd_lit.settings import PAPER

D = torch.float64


def normal(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, dtype=D, generator=generator(seed))


def theta(block: Block) -> Tensor:
    """The block's array of its parameters' values, `(batch, outputs, features)`."""
    return block.join({p: p.detach() for p in block.params}, D)


def with_one(x: Tensor) -> Tensor:
    """Features along the last dimension, with the constant 1 at their end."""
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


BIJECTIONS: dict[str, Callable[[], Block]] = {
    "number": lambda: parameter_block(normal()),
    "vector": lambda: parameter_block(normal(3)),
    "matrix": lambda: parameter_block(normal(3, 4)),
    "image": lambda: parameter_block(normal(3, 2, 2, 2)),
    "complex": lambda: parameter_block(torch.view_as_complex(normal(3, 2))),
    "turned": lambda: Block((Piece(normal(2, 3, 4), (1, 4, 6), (2, 3, 4), (2, 0, 1)),)),
    "flat": lambda: flat_block([normal(3, 2), normal(), torch.view_as_complex(normal(2, 2))]),
    "with bias": lambda: affine_block(normal(3, 4), normal(3))[0],
    "gates": lambda: affine_block(normal(6, 4), normal(6), batch=3)[0],
    "inputs first": lambda: affine_block(normal(4, 3, 2, 2), normal(6), batch=2, inputs_first=True)[0],
    "complex with bias": lambda: affine_block(
        torch.view_as_complex(normal(3, 4, 2)), torch.view_as_complex(normal(3, 2))
    )[0],
}


@pytest.mark.parametrize("kind", BIJECTIONS)
def test_a_block_is_a_bijection(kind):
    """Join and split undo each other, every entry has one place, and a missing parameter counts as zero."""
    block = BIJECTIONS[kind]()
    values = {p: as_real(p) for p in block.params}
    numbers, count = {}, 0
    for p, value in values.items():
        numbers[p] = torch.arange(count, count + value.numel(), dtype=D).view(value.shape)
        count += value.numel()
        if p.is_complex():
            numbers[p] = torch.view_as_complex(numbers[p])
    array = block.join(numbers, D)
    assert array.shape == (block.batch, *block.shape)
    assert sorted(array.flatten().tolist()) == list(range(count))
    assert all(torch.equal(back, as_real(numbers[p])) for p, back in block.split(array).items())
    first, *others = block.params
    partial = block.split(block.join({first: numbers[first]}, D))
    assert torch.equal(partial[first], as_real(numbers[first]))
    assert not any(partial[p].any() for p in others)


@pytest.mark.parametrize("layout", ["channels last", "transposed"])
def test_a_block_does_not_see_the_layout(layout):
    """The same array from another memory format."""
    value = normal(4, 3, 2, 2)
    moved = (
        value.contiguous(memory_format=torch.channels_last)
        if layout == "channels last"
        else value.transpose(0, 1).contiguous().transpose(0, 1)
    )
    assert torch.equal(theta(parameter_block(value)), theta(parameter_block(moved)))


class Layer(NamedTuple):
    """A layer, and its forward written as Theta times features."""

    make: Callable[[], nn.Module]
    forward: Callable[[nn.Module, list[Tensor]], tuple[Tensor, Tensor]]
    shapes: list[tuple[int, int, int]]  # of the blocks: batch, outputs, features


def dense_linear(layer: nn.Module, arrays: list[Tensor]) -> tuple[Tensor, Tensor]:
    x = normal(5, layer.in_features)
    features = x if layer.bias is None else with_one(x)
    return layer(x), features @ arrays[0][0].T


def dense_embedding(layer: nn.Module, arrays: list[Tensor]) -> tuple[Tensor, Tensor]:
    tokens = torch.tensor([0, 2, 2, 1])
    return layer(tokens), nn.functional.one_hot(tokens, layer.num_embeddings).to(D) @ arrays[0][0].T


def dense_convolution(layer: nn.Module, arrays: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Each output is Theta times the patch below it; patches are read off an identity by the layer's own geometry."""
    dims = len(layer.kernel_size)
    x = normal(2, layer.in_channels, *(5, 6, 4)[:dims])
    members, inputs = layer.groups, layer.in_channels // layer.groups
    size = inputs * prod(layer.kernel_size)
    pick = torch.eye(size, dtype=D).view(size, inputs, *layer.kernel_size)
    convolve = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[dims - 1]
    out = []
    for member, part in enumerate(x.split(inputs, 1)):
        patches = convolve(part, pick, None, layer.stride, layer.padding, layer.dilation).movedim(1, -1)
        features = patches if layer.bias is None else with_one(patches)
        out.append((features @ arrays[0][member].T).movedim(-1, 1))
    assert members == len(out)
    return layer(x), torch.cat(out, 1)


def dense_transpose(layer: nn.Module, arrays: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Theta with a kernel: each output entry is a sum over inputs and kernel places, the columns of a row."""
    dims = len(layer.kernel_size)
    x = normal(2, layer.in_channels, *(3, 4, 2)[:dims])
    inputs = layer.in_channels // layer.groups
    convolve = (
        nn.functional.conv_transpose1d,
        nn.functional.conv_transpose2d,
        nn.functional.conv_transpose3d,
    )[dims - 1]
    out = []
    for member, part in enumerate(x.split(inputs, 1)):
        rows = arrays[0][member]
        kernel = rows[:, : inputs * prod(layer.kernel_size)]
        # one output channel for each column: what multiplies it
        size = kernel.shape[1]
        pick = torch.eye(size, dtype=D).view(size, inputs, *layer.kernel_size).transpose(0, 1)
        features = convolve(part, pick, None, layer.stride, layer.padding).movedim(1, -1)
        features = features if layer.bias is None else with_one(features)
        out.append((features @ rows.T).movedim(-1, 1))
    return layer(x), torch.cat(out, 1)


def gates(x: Tensor, h: Tensor, arrays: list[Tensor], with_bias: bool) -> tuple[Tensor, Tensor]:
    """The contributions of input and hidden state, `(batch, gates * hidden)` each."""
    feature = with_one if with_bias else (lambda z: z)
    return tuple(
        torch.cat([feature(z) @ rows.T for rows in array], -1) for z, array in zip((x, h), arrays, strict=True)
    )


def cell(kind: str, x: Tensor, h: Tensor, c: Tensor, arrays: list[Tensor], with_bias: bool) -> tuple[Tensor, Tensor]:
    """One step of a recurrent layer, from its equations in torch's documentation."""
    a, b = gates(x, h, arrays, with_bias)
    if kind == "RNN":
        return (a + b).tanh(), c
    if kind == "LSTM":
        i, f, g, o = (a + b).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    (ra, za, na), (rb, zb, nb) = a.chunk(3, -1), b.chunk(3, -1)
    r, z = (ra + rb).sigmoid(), (za + zb).sigmoid()
    return (1 - z) * (na + r * nb).tanh() + z * h, c


def dense_recurrent(layer: nn.Module, arrays: list[Tensor]) -> tuple[Tensor, Tensor]:
    """A recurrent layer of any depth and direction, or one step of a cell."""
    kind = type(layer).__name__.removesuffix("Cell")
    if type(layer).__name__.endswith("Cell"):
        x, h = normal(2, layer.input_size), normal(2, layer.hidden_size, seed=4)
        out, _ = cell(kind, x, h, h, arrays, layer.bias)
        return layer(x, (h, h))[0] if kind == "LSTM" else layer(x, h), out
    x = normal(3, 2, layer.input_size)
    seen, directions = list(x), 2 if layer.bidirectional else 1
    for depth in range(layer.num_layers):
        outs = []
        for way in range(directions):
            mine = arrays[2 * (depth * directions + way) :][:2]
            h = c = x.new_zeros(2, layer.hidden_size)
            steps = []
            for z in seen[:: -1 if way else 1]:
                h, c = cell(kind, z, h, c, mine, layer.bias)
                steps.append(h)
            outs.append(steps[:: -1 if way else 1])
        seen = [torch.cat(parts, -1) for parts in zip(*outs, strict=True)]
    return layer(x)[0], torch.stack(seen)


def dense_attention(layer: nn.Module, arrays: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Self-attention from its heads' maps; the output layer is a Linear of its own, with a block of its own."""
    x = normal(2, 3, layer.embed_dim)
    heads = layer.num_heads
    if len(arrays) == 2:  # one block of three times the heads, and the output layer's
        maps, out = arrays
        features = with_one(x) if layer.in_proj_bias is not None else x
        q, k, v = (torch.stack([features @ rows.T for rows in maps[i * heads :][:heads]], 1) for i in range(3))
    else:
        *maps, out = arrays
        bias = layer.in_proj_bias.detach().view(3, heads, 1, -1)
        q, k, v = (torch.stack([x @ rows.T for rows in array], 1) + bias[i] for i, array in enumerate(maps))
    mixed = (q @ k.transpose(-1, -2) / (layer.embed_dim // heads) ** 0.5).softmax(-1) @ v
    joined = mixed.transpose(1, 2).flatten(2)
    return layer(x, x, x)[0], (with_one(joined) if layer.out_proj.bias is not None else joined) @ out[0].T


LAYERS: dict[str, Layer] = {
    "Linear": Layer(lambda: nn.Linear(4, 3), dense_linear, [(1, 3, 5)]),
    "Linear without bias": Layer(lambda: nn.Linear(4, 3, bias=False), dense_linear, [(1, 3, 4)]),
    "Embedding": Layer(lambda: nn.Embedding(5, 3), dense_embedding, [(1, 3, 5)]),
    "Conv1d": Layer(lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), dense_convolution, [(1, 3, 7)]),
    "Conv2d": Layer(lambda: nn.Conv2d(2, 3, (3, 2), dilation=2), dense_convolution, [(1, 3, 13)]),
    "Conv2d in groups": Layer(lambda: nn.Conv2d(4, 6, 2, groups=2), dense_convolution, [(2, 3, 9)]),
    "Conv2d by depth": Layer(lambda: nn.Conv2d(4, 4, 3, groups=4, bias=False), dense_convolution, [(4, 1, 9)]),
    "Conv3d": Layer(lambda: nn.Conv3d(2, 3, 2), dense_convolution, [(1, 3, 17)]),
    "ConvTranspose1d": Layer(lambda: nn.ConvTranspose1d(2, 3, 3, stride=2), dense_transpose, [(1, 3, 7)]),
    "ConvTranspose2d": Layer(lambda: nn.ConvTranspose2d(4, 6, 2, groups=2), dense_transpose, [(2, 3, 9)]),
    "ConvTranspose3d": Layer(lambda: nn.ConvTranspose3d(2, 3, 2, bias=False), dense_transpose, [(1, 3, 16)]),
    "RNN": Layer(
        lambda: nn.RNN(3, 2, num_layers=2),
        dense_recurrent,
        [(1, 2, 4), (1, 2, 3), (1, 2, 3), (1, 2, 3)],
    ),
    "LSTM": Layer(lambda: nn.LSTM(3, 2), dense_recurrent, [(4, 2, 4), (4, 2, 3)]),
    "LSTM of two directions": Layer(
        lambda: nn.LSTM(3, 2, bidirectional=True, bias=False),
        dense_recurrent,
        [(4, 2, 3), (4, 2, 2)] * 2,
    ),
    "GRU": Layer(lambda: nn.GRU(3, 2), dense_recurrent, [(3, 2, 4), (3, 2, 3)]),
    "RNNCell": Layer(lambda: nn.RNNCell(3, 2), dense_recurrent, [(1, 2, 4), (1, 2, 3)]),
    "LSTMCell": Layer(lambda: nn.LSTMCell(3, 2, bias=False), dense_recurrent, [(4, 2, 3), (4, 2, 2)]),
    "GRUCell": Layer(lambda: nn.GRUCell(3, 2), dense_recurrent, [(3, 2, 4), (3, 2, 3)]),
    "attention": Layer(
        lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        dense_attention,
        [(6, 2, 5), (1, 4, 5)],
    ),
    "attention without bias": Layer(
        lambda: nn.MultiheadAttention(4, 2, batch_first=True, bias=False),
        dense_attention,
        [(6, 2, 4), (1, 4, 4)],
    ),
    "attention apart": Layer(
        lambda: nn.MultiheadAttention(4, 2, batch_first=True, kdim=4, vdim=4),
        dense_attention,
        [(6, 2, 5), (1, 4, 5)],
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_its_theta_times_features(name):
    """The block's rows times what it multiplies, with the constant 1 last, is the layer's own forward."""
    layer = fill(LAYERS[name].make().double())
    blocks = affine_blocks(layer)
    assert [(block.batch, *block.shape) for block in blocks] == LAYERS[name].shapes
    held = [p for block in blocks for p in block.params]
    assert len(held) == len(set(held))
    assert set(held) == set(layer.parameters()), "no parameter is left out"
    expected, found = LAYERS[name].forward(layer, [theta(block) for block in blocks])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    assert all(block.constant == (len(block.params) == 2) for block in blocks)


def test_attention_of_different_widths():
    """Query, key and value maps of their own: heads apart, and the common bias stays a block of its own."""
    layer = fill(nn.MultiheadAttention(4, 2, kdim=3, vdim=5, batch_first=True).double())
    blocks = affine_blocks(layer)
    assert [(block.batch, *block.shape) for block in blocks] == [
        (2, 2, 4),
        (2, 2, 3),
        (2, 2, 5),
        (1, 4, 5),
    ]
    *maps, out = (theta(block) for block in blocks)
    given = [normal(2, 3, n, seed=n) for n in (4, 3, 5)]
    bias = layer.in_proj_bias.detach().view(3, 2, 1, 2)
    q, k, v = (torch.stack([x @ r.T for r in rows], 1) + b for x, rows, b in zip(given, maps, bias, strict=True))
    mixed = ((q @ k.transpose(-1, -2) / 2**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2)
    torch.testing.assert_close(with_one(mixed) @ out[0].T, layer(*given)[0], rtol=1e-10, atol=1e-12)
    covered = cover(layer.parameters(), blocks)
    assert sum([*map(id, block.params)] == [id(layer.in_proj_bias)] for block in covered) == 1


def test_lstm_with_projections():
    """The projected state has a map of its own, without a bias."""
    layer = fill(nn.LSTM(3, 4, proj_size=2).double())
    shapes = [(block.batch, *block.shape) for block in affine_blocks(layer)]
    assert shapes == [(4, 4, 4), (4, 4, 3), (1, 2, 4)]
    assert {p for block in affine_blocks(layer) for p in block.params} == set(layer.parameters())


def test_unknown_layers_keep_a_block_for_each_parameter():
    """Normalisation, bilinear maps, bare parameters: nothing is lost, nothing joined."""
    net = nn.ModuleList([nn.BatchNorm1d(3), nn.Bilinear(2, 3, 4), nn.PReLU(), nn.LayerNorm(3), nn.Linear(2, 2)])
    assert len(affine_blocks(net)) == 1
    assert layer_blocks(net[1]) == []
    params = list(net.parameters())
    covered = cover(params, affine_blocks(net))
    assert sorted(id(p) for block in covered for p in block.params) == sorted(map(id, params))


def lowers(opt: PSGD, loss: Callable[[], Tensor], steps: int = 15) -> None:
    """Take steps, and see the loss fall."""
    first = loss().item()
    for _ in range(steps):
        take(opt, loss)
    assert loss().item() < first
    assert opt.skipped == 0


def cnn() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2),
        nn.Tanh(),
        nn.Conv2d(4, 4, 2, groups=2),
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    x, y = normal(6, 1, 7, 7).float(), normal(6, 2).float()
    return net, lambda model: (model(x) - y).square().mean()


class LastState(nn.Module):
    """A recurrent layer and a linear one on its last output."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.out = layer, nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x)[0][:, -1])


def recurrent(layer: nn.Module) -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x = normal(6, 5, 2).float()
    return LastState(layer), lambda model: (model(x) - x.sum((1, 2))[:, None]).square().mean()


class Attention(nn.Module):
    """Self-attention over five places, whose exact second derivative needs the plain kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.out = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return self.out(self.mix(x, x, x, need_weights=False)[0]).mean(1)


def attending() -> tuple[nn.Module, Callable[[nn.Module], Tensor]]:
    x = normal(6, 5, 4).float()
    return Attention(), lambda model: (model(x) - x[:, 0, :1]).square().mean()


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module], Tensor]]]] = {
    "MLP": lambda: (network(), loss_of),
    "CNN": cnn,
    "LSTM": lambda: recurrent(nn.LSTM(2, 4, batch_first=True)),
    "GRU": lambda: recurrent(nn.GRU(2, 4, batch_first=True)),
    "attention": attending,
}


@pytest.mark.parametrize("name", ["kron", "scan", "dense", "diagonal"])
@pytest.mark.parametrize("model", MODELS)
def test_blocks_lower_the_loss(model, name):
    """And every parameter moves, which none would whose place were lost."""
    net, loss = MODELS[model]()
    fill(net)
    start = weights(net)
    opt = PSGD(net.parameters(), lr=0.02, preconditioner=name, blocks=affine_blocks(net))
    lowers(opt, lambda: loss(net))
    # a key's bias moves every score of a query alike, and has no gradient but rounding
    moved = [not torch.equal(a, b) for a, b in zip(start, weights(net), strict=True)]
    assert all(moved)


@pytest.mark.parametrize("name", ["kron", "scan"])
def test_a_run_on_blocks_is_that_of_the_group_by_hand(name):
    """Learning P for [W b] with probes and products joined, and W and b moved by its parts, step for step."""
    net, plain = network(D), network(D)
    opt = PSGD(
        net.parameters(),
        lr=0.1,
        preconditioner=name,
        blocks=affine_blocks(net),
        seed=4,
        **PAPER,
    )
    layers = [plain[0], plain[2]]
    groups, states = [], []
    for layer in layers:
        rows, columns = layer.out_features, layer.in_features + 1
        factors = (Triangular(), Triangular()) if name == "kron" else (Diagonal(), Normalization())
        groups.append(Kron(*factors))
        states.append(groups[-1].init((rows, columns), (), dtype=D))
    params = list(plain.parameters())

    def column(values: list[Tensor], i: int) -> Tensor:
        return torch.cat([values[2 * i], values[2 * i + 1][:, None]], 1).reshape(-1, 1)

    for t in range(5):
        opt.step(lambda: loss_of(net))
        probe = draw_probes(params, 4, t)
        gradient = torch.autograd.grad(loss_of(plain), params, create_graph=True)
        product = torch.autograd.grad(gradient, params, probe, materialize_grads=True, allow_unused=True)
        for i, layer in enumerate(layers):
            step = groups[i].precondition(states[i], column([g.detach() for g in gradient], i))
            step = step.view(layer.out_features, -1)
            states[i] = groups[i].update(states[i], column(probe, i), column(list(product), i), 0.01)
            with torch.no_grad():
                layer.weight -= 0.1 * step[:, :-1]
                layer.bias -= 0.1 * step[:, -1]
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-9, atol=1e-11)
    for layer, state in zip((net[0], net[2]), states, strict=True):
        for a, b in zip(leaves(opt.state[layer.weight]["Q"]), leaves(state), strict=True):
            torch.testing.assert_close(a[0], b, rtol=1e-9, atol=1e-11)


def test_members_of_a_batch_are_preconditioned_apart():
    """Each gate has a Q of its own, equal to that of a run on it alone."""
    whole = torch.nn.Parameter(normal(6, 4))
    (block,) = affine_block(whole, batch=3)
    curvature = normal(6, 4, seed=5).abs()
    opt = PSGD([whole], lr=0.1, blocks=[block], hvp="whiten", **PAPER)
    parts = [nn.Parameter(piece.clone()) for piece in whole.detach().split(2)]
    probes = draw_probes([whole], 0, 0)[0].split(2)
    group = Kron(Triangular(), Triangular())
    gradient = curvature * whole.detach()
    whole.grad = gradient.clone()
    opt.step()
    for i, part in enumerate(parts):
        g = gradient.split(2)[i].reshape(-1, 1)
        Q = group.update(group.init((2, 4), (), dtype=D), probes[i].reshape(-1, 1), g, 0.01)
        for a, b in zip(leaves(opt.state[whole]["Q"]), leaves(Q), strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-12, atol=1e-14)
        assert part.shape == (2, 4)


@pytest.mark.parametrize("name", ["kron", "scan"])
def test_a_checkpoint_with_blocks_goes_on(name):
    """Bit for bit, also after two loadings; the state sits at a block's first parameter."""
    net, twin = network(), network()
    opt, other = (
        PSGD(n.parameters(), lr=0.05, preconditioner=name, blocks=affine_blocks(n), momentum=0.5) for n in (net, twin)
    )
    for _ in range(3):
        opt.step(lambda: loss_of(net))
    assert ["Q" in opt.state[p] for p in net.parameters()] == [True, False, True, False]
    for _ in range(2):
        file = io.BytesIO()
        torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        twin.load_state_dict(saved["net"])
        other.load_state_dict(saved["opt"])
        assert equal(other.state_dict(), opt.state_dict())
        assert other.describe() == opt.describe()
        for _ in range(3):
            opt.step(lambda: loss_of(net))
            other.step(lambda: loss_of(twin))
        assert same(weights(net), weights(twin))


def test_copies_keep_their_blocks():
    """A deep copy of model and optimizer has blocks of the copied parameters."""
    net = network()
    opt = PSGD(net.parameters(), lr=0.05, preconditioner="scan", blocks=affine_blocks(net))
    opt.step(lambda: loss_of(net))
    twin, other = copy.deepcopy((net, opt))
    opt.step(lambda: loss_of(net))
    other.step(lambda: loss_of(twin))
    assert same(weights(net), weights(twin))
    assert other.describe() == opt.describe()


def test_blocks_in_param_groups():
    """Each group has its own, by argument or for all groups alike; what a group lacks stays apart."""
    net = network()
    blocks = affine_blocks(net)
    groups = [
        {"params": net[0].parameters(), "preconditioner": "scan"},
        {"params": net[2].parameters()},
    ]
    opt = PSGD(groups, lr=0.05, blocks=blocks)
    assert [len(line.split(", ")) for line in opt.describe().splitlines()[1:]]
    lowers(opt, lambda: loss_of(net))
    assert "Q" not in opt.state[net[0].bias]
    own = PSGD(
        [
            {"params": net[0].parameters(), "blocks": blocks[:1]},
            {"params": net[2].parameters()},
        ],
        lr=0.05,
    )
    assert len(own.describe().splitlines()) == 1 + 1 + 2
    lowers(own, lambda: loss_of(net))


def test_a_block_across_param_groups_is_refused():
    """Weights with decay and biases without, as many do: the error says what to do."""
    net = network()
    groups = [
        {"params": [net[0].weight, net[2].weight], "weight_decay": 0.1},
        {"params": [net[0].bias, net[2].bias], "weight_decay": 0.0},
    ]
    with pytest.raises(ValueError, match=r"lacks \[\(6,\)\]; give all parameters of a block to one param group"):
        PSGD(groups, lr=0.1, blocks=affine_blocks(net))


def test_wrong_blocks_are_refused():
    """Two blocks that share a parameter; blocks that don't fit the preconditioner; scan without a constant."""
    net = network()
    weight, bias = net[0].weight, net[0].bias
    with pytest.raises(ValueError, match="another block holds one too"):
        PSGD(
            net.parameters(),
            lr=0.1,
            blocks=[*affine_block(weight, bias), parameter_block(weight)],
        )
    with pytest.raises(ValueError, match="affine_blocks"):
        PSGD(net.parameters(), lr=0.1, preconditioner="scan")
    with pytest.raises(ValueError, match="affine_blocks"):
        PSGD(net.parameters(), lr=0.1, preconditioner="scan", blocks=affine_block(weight))
    with pytest.raises(ValueError, match="does not fit"):
        PSGD(
            net.parameters(),
            lr=0.1,
            preconditioner=Kron(Triangular()),
            blocks=affine_blocks(net),
        )


def test_blocks_of_another_model_are_left_out():
    """They hold none of these parameters, and are refused if no block holds any."""
    net, other = network(), network()
    opt = PSGD(net.parameters(), lr=0.1, blocks=affine_blocks(nn.ModuleList([net[0], other[2]])))
    assert len(opt.describe().splitlines()) == 4
    with pytest.raises(ValueError, match="none of the blocks holds a parameter"):
        PSGD(net.parameters(), lr=0.1, blocks=affine_blocks(other))


def test_tied_layers():
    """The first layer that uses a weight has it; the other's bias stays on its own; every entry moves once."""
    one, two = nn.Linear(3, 3), nn.Linear(3, 3)
    two.weight = one.weight
    net = fill(nn.Sequential(one, nn.Tanh(), two))
    blocks = affine_blocks(net)
    assert [block.params for block in blocks] == [(one.weight, one.bias)]
    opt = PSGD(net.parameters(), lr=0.05, blocks=blocks)
    x = normal(5, 3).float()
    lowers(opt, lambda: (net(x) - x).square().mean())


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("name", ["kron", "scan"])
def test_half_a_block_is_frozen(name, frozen):
    """The frozen part counts as zero and stays; the other trains, and both do after a thaw."""
    net = network()
    opt = PSGD(
        net.parameters(),
        lr=0.05,
        preconditioner=name,
        blocks=affine_blocks(net),
        weight_decay=0.01,
    )
    still = getattr(net[0], frozen)
    still.requires_grad_(False)
    before = still.detach().clone()
    lowers(opt, lambda: loss_of(net))
    assert torch.equal(still, before)
    still.requires_grad_(True)
    lowers(opt, lambda: loss_of(net))
    assert not torch.equal(still, before)


def test_hooked_layers():
    """Hooks on modules and on tensors see what they always see, and change what they always change."""
    net, seen = network(), []
    opt = PSGD(net.parameters(), lr=0.05, blocks=affine_blocks(net))
    before = net[2].bias.detach().clone()
    handles = [
        net[0].register_forward_hook(lambda *_: seen.append("forward")),
        net[2].bias.register_hook(lambda g: torch.zeros_like(g)),
    ]
    opt.step(lambda: loss_of(net))
    assert seen == ["forward"]
    assert torch.equal(net[2].bias, before)
    for handle in handles:
        handle.remove()
    opt.step(lambda: loss_of(net))
    assert not torch.equal(net[2].bias, before)


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", "orthogonal"])
@pytest.mark.parametrize("hvp", ["exact", "approx", "whiten"])
def test_parametrized_layers(kind, hvp):
    """The weight isn't a parameter then: what is one has a block, the bias too, and the run fits."""
    layer = nn.Linear(4, 4)
    net = nn.Sequential(getattr(parametrizations, kind)(layer), nn.Tanh(), nn.Linear(4, 2))
    fill(net)
    blocks = affine_blocks(net)
    assert all(isinstance(p, nn.Parameter) for block in blocks for p in block.params)
    held = [p for block in cover(net.parameters(), blocks) for p in block.params]
    assert sorted(map(id, held)) == sorted(map(id, net.parameters()))
    net.train(False)  # spectral_norm's power iteration would be a second random function in training
    opt = PSGD(net.parameters(), lr=0.02, blocks=blocks, hvp=hvp)
    if (hvp, kind) == ("exact", "weight_norm"):  # whose second derivative is wrong in torch
        with pytest.raises(SecondDerivativeError, match="weight_norm"):
            opt.step(lambda: loss_of(net))
        return
    lowers(opt, lambda: loss_of(net))


def test_scan_takes_layers_without_a_bias_in_a_group_of_their_own():
    """As its error says."""
    net = fill(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2, bias=False)))
    blocks = affine_blocks(net)
    with pytest.raises(ValueError, match="for layers without a bias choose"):
        PSGD(net.parameters(), lr=0.05, preconditioner="scan", blocks=blocks)
    groups = [
        {"params": net[0].parameters()},
        {"params": net[2].parameters(), "preconditioner": "kron"},
    ]
    lowers(PSGD(groups, lr=0.05, preconditioner="scan", blocks=blocks), lambda: loss_of(net))


def test_a_dense_block_follows_the_order_of_the_given_blocks():
    """One vector of all parameters: blocks only order it, and the run on it is a run on the flat vector."""
    net = network(D)
    params = list(net.parameters())
    (choice,) = choose("dense", params, affine_blocks(net))
    assert choice.block.params == tuple(params)
    assert choice.block.shape == (sum(p.numel() for p in params),)


def test_nothing_of_a_layers_internals_is_touched():
    """Blocks only point at parameters."""
    layers: list[Any] = [spec.make() for spec in LAYERS.values()]
    for layer in layers:
        before = {name: id(p) for name, p in layer.named_parameters()}
        affine_blocks(layer)
        assert {name: id(p) for name, p in layer.named_parameters()} == before
