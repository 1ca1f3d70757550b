"""The problems on sequences: what is drawn, what the networks compute, and that they can be differentiated twice."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psgd_lit.experiments.author import AuthorProblem, author_batch, normals, uniforms
from psgd_lit.experiments.sequences import (
    ADDITION,
    CHUNK,
    DELAYED_XOR,
    PROBLEMS,
    Batch,
    PeepholeLSTM,
    SequenceProblem,
    Task,
    VanillaRNN,
    error_rate,
    logistic_loss,
)

TASKS = [ADDITION, DELAYED_XOR]
NETWORKS = [VanillaRNN(4), PeepholeLSTM(3)]


def generator(seed: int = 0) -> torch.Generator:
    """A generator in a known state."""
    return torch.Generator().manual_seed(seed)


def in_double(network: VanillaRNN | PeepholeLSTM, scale: float = 2.0) -> list[torch.Tensor]:
    """Weights large enough to bend every nonlinearity, in double precision."""
    return [(scale * p.detach()).double().requires_grad_() for p in network.init(generator())]


# Tasks -----------------------------------------------------------------------------------------------------------


@given(st.integers(4, 60), st.integers(0, 20), st.integers(0, 2**31 - 1))
def test_addition(length: int, count: int, seed: int) -> None:
    """Two distinct marks in the first half, and their mean as the answer."""
    inputs, target = ADDITION.sample(length, count, generator(seed))
    values, marks = inputs.unbind(2)
    assert inputs.shape == (length, count, 2)
    assert target.shape == (count,)
    assert ((marks == 0) | (marks == 1)).all()
    assert (marks.sum(0) == 2).all()
    assert not marks[length // 2 :].any()
    assert torch.allclose(target, torch.where(marks == 1, values, 0).sum(0) / 2, atol=1e-7)


@given(st.integers(4, 60), st.integers(0, 20), st.integers(0, 2**31 - 1))
def test_delayed_xor(length: int, count: int, seed: int) -> None:
    """A mark in the first tenth, one in the rest of the first half, and whether their values differ."""
    inputs, target = DELAYED_XOR.sample(length, count, generator(seed))
    values, marks = inputs.unbind(2)
    assert (values.abs() == 1).all()
    assert not marks[length // 2 + 1 :].any()
    for k in range(count):
        where = marks[:, k].nonzero()[:, 0].tolist()
        assert 1 <= len(where) <= 2
        assert where[0] < math.ceil(length / 10)
        assert len(where) == 1 or where[1] >= length // 10
        assert (len(set(values[where, k].tolist())) == 2) == (target[k].item() == 1)


@pytest.mark.parametrize("task", TASKS)
def test_samples_follow_the_generator(task: Task) -> None:
    """The same state gives the same sequences, and a state that was saved continues."""
    source = generator()
    first, state = task.sample(20, 8, source), source.get_state()
    second = task.sample(20, 8, source)
    assert torch.equal(task.sample(20, 8, generator()).inputs, first.inputs)
    assert torch.equal(task.sample(20, 8, generator().set_state(state)).inputs, second.inputs)
    assert not torch.equal(first.inputs, second.inputs)


def test_losses_at_extremes() -> None:
    """A confident mistake costs its margin, a confident answer nothing, and zero is no answer."""
    huge = torch.tensor([1e4, -1e4], requires_grad=True)
    loss = logistic_loss(huge, torch.tensor([1.0, 1.0]))
    assert loss == 5e3
    assert torch.autograd.grad(loss, huge)[0].tolist() == [0, -0.5]
    assert error_rate(torch.zeros(3), torch.ones(3)) == 1


# Networks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("network", NETWORKS, ids=repr)
def test_sequences_do_not_mix(network: VanillaRNN | PeepholeLSTM) -> None:
    """A batch gives what its sequences give alone; an empty batch gives nothing."""
    params, inputs = in_double(network), ADDITION.sample(7, 5, generator(1)).inputs.double()
    alone = torch.cat([network(params, inputs[:, k : k + 1]) for k in range(5)])
    assert torch.allclose(network(params, inputs), alone, rtol=1e-12)
    assert network(params, inputs[:, :0]).shape == (0,)


@pytest.mark.parametrize("network", NETWORKS, ids=repr)
def test_two_derivatives(network: VanillaRNN | PeepholeLSTM) -> None:
    """Gradients and their gradients agree with finite differences, for every parameter."""
    inputs = ADDITION.sample(5, 2, generator(1)).inputs.double()

    def output(*params: torch.Tensor) -> torch.Tensor:
        return network(list(params), inputs)

    assert torch.autograd.gradcheck(output, in_double(network))
    assert torch.autograd.gradgradcheck(output, in_double(network))


def test_lstm_of_biases() -> None:
    """With biases alone the cell is a geometric series."""
    network = PeepholeLSTM(2)
    params = [torch.zeros_like(p, dtype=torch.float64) for p in network.init(generator())]
    for matrix, bias in zip(params, (0.3, 1.0, -0.7, 0.2, 0.1), strict=True):
        matrix[:, -1] = bias
    params[4][0, :2] = torch.tensor([1.0, 2.0])

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    forget = sigmoid(1.0)
    cell = sigmoid(0.3) * math.tanh(-0.7) * (1 - forget**9) / (1 - forget)
    expected = 3 * sigmoid(0.2) * math.tanh(cell) + 0.1
    output = network(params, torch.zeros(9, 1, 2, dtype=torch.float64))
    assert abs(output.item() - expected) < 1e-12


@pytest.mark.parametrize("gate", range(4))
def test_lstm_gates_see_everything(gate: int) -> None:
    """Each gate depends on the input, the state and the cell: no column of its matrix is idle."""
    network = PeepholeLSTM(3)
    params, inputs = in_double(network), ADDITION.sample(6, 4, generator(1)).inputs.double()
    (gradient,) = torch.autograd.grad(network(params, inputs).sum(), params[gate])
    assert (gradient != 0).any(0).all()


# Problems --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "length", "batch", "shapes"),
    [
        ("addition_rnn", 30, 1, [(20, 23), (1, 21)]),
        ("addition_lstm", 50, 128, [(30, 63)] * 4 + [(1, 31)]),
        ("xor_rnn", 50, 128, [(30, 33), (1, 31)]),
        ("xor_lstm", 100, 128, [(30, 63)] * 4 + [(1, 31)]),
    ],
)
def test_problems(name: str, length: int, batch: int, shapes: list[tuple[int, int]]) -> None:
    """The sizes of the author's program; fresh parameters are leaves and differ by seed."""
    problem = PROBLEMS[name]
    params = problem.init(generator())
    assert (problem.length, problem.batch) == (length, batch)
    assert [tuple(p.shape) for p in params] == shapes
    assert all(p.is_leaf and p.requires_grad for p in params)
    assert not torch.equal(params[0], problem.init(generator(1))[0])


def test_error_has_no_graph() -> None:
    """The error that is reported costs no graph; the loss that is trained has one."""
    problem = SequenceProblem(ADDITION, VanillaRNN(3), length=6, batch=2, steps=1)
    params, batch = problem.init(generator()), problem.sample(5, generator(1))
    assert isinstance(batch, Batch)
    assert problem.loss(params, batch).requires_grad
    assert not problem.error(params, batch).requires_grad


@pytest.mark.parametrize("count", [1, CHUNK, CHUNK + 1, 3 * CHUNK])
@pytest.mark.parametrize("task", TASKS)
def test_tests_come_in_pieces(task: Task, count: int) -> None:
    """The pieces are one sample of the same generator, none larger than the limit, and their errors make up its own."""
    problem = SequenceProblem(task, VanillaRNN(3), length=6, batch=2, steps=1)
    params, whole = problem.init(generator()), problem.sample(count, generator(1))
    pieces = list(problem.tests(count, generator(1)))
    assert torch.equal(torch.cat([piece.inputs for piece in pieces], dim=1), whole.inputs)
    assert torch.equal(torch.cat([piece.target for piece in pieces]), whole.target)
    assert max(len(piece.target) for piece in pieces) <= CHUNK
    mean = sum(len(piece.target) * problem.error(params, piece).item() for piece in pieces) / count
    assert math.isclose(mean, problem.error(params, whole).item(), rel_tol=1e-5)


# The author's draw -----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 30), st.integers(0, 30))
def test_numbers_are_those_of_numpy(seed: int, count: int, pairs: int) -> None:
    """Uniform numbers, choices and an even count of normal ones are numpy's, in any order, to the last bit."""
    numpy, source = np.random.RandomState(seed), generator(seed)
    for _ in range(2):
        assert uniforms(count, source).tolist() == numpy.rand(count).tolist()
        assert torch.randint(2, (count,), generator=source).tolist() == numpy.choice([0, 1], count).tolist()
        assert normals(2 * pairs, source).tolist() == numpy.normal(size=2 * pairs).tolist()


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_authors_draw_is_one_stream_of_numpy(name: str) -> None:
    """Weights, ten thousand tests and then the batches, as numpy draws them one after another."""
    problem, source, numpy = (
        AuthorProblem(**vars(PROBLEMS[name])),
        generator(3),
        np.random.RandomState(3),
    )
    start, n, length = problem.init(source), problem.network.hidden, problem.length
    if isinstance(problem.network, VanillaRNN):
        rows = [
            numpy.normal(0, 0.1, (2, n)),
            np.linalg.qr(numpy.normal(size=(n, n)))[0],
            np.zeros((1, n)),
        ]
        expected = [
            np.concatenate(rows),
            np.append(numpy.normal(0, 0.1, (n, 1)), [[0.0]], axis=0),
        ]
    else:
        sizes = [2 * n + 3, 2 * n + 2, 2 * n + 3, 2 * n + 3]
        inner, forget, outer, candidate = (numpy.normal(0, 0.1, (size, n)) for size in sizes)
        forget = np.append(forget, np.ones((1, n)), axis=0)
        expected = [inner, forget, candidate, outer, numpy.normal(0, 0.1, (n + 1, 1))]
    for p, matrix in zip(start, expected, strict=True):
        assert torch.allclose(p.detach().double(), torch.tensor(matrix.T), atol=1e-6)
    for number in range(10_003):
        if problem.task is ADDITION:
            values, marks = 2 * numpy.rand(length) - 1, np.zeros(2)
            while marks[0] == marks[1]:
                marks = np.floor(numpy.rand(2) * length / 2)
        else:
            values = numpy.choice([-1.0, 1.0], length)
            marks = np.floor([numpy.rand() * 0.1 * length, numpy.rand() * 0.4 * length + 0.1 * length])
        if number >= 10_000:
            one = problem.sample(1, source)
            assert one.inputs[:, 0, 0].tolist() == values.astype(np.float32).tolist()
            assert one.inputs[:, 0, 1].nonzero().flatten().tolist() == sorted(set(marks.astype(int).tolist()))


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(4, 60))
def test_marks_of_the_author(seed: int, length: int) -> None:
    """Marks lie where those of our own draw may lie, and the answers are those of the task."""
    inputs, target = author_batch(ADDITION, length, 20, generator(seed))
    assert (inputs[: (length + 1) // 2, :, 1].sum(0) == 2).all()
    assert torch.allclose(inputs.prod(2).sum(0) / 2, target, atol=1e-6)
    inputs, target = author_batch(DELAYED_XOR, length, 20, generator(seed))
    marks = inputs[..., 1]
    assert (marks.argmax(0) <= (length - 1) // 10).all()
    assert not marks[(length + 1) // 2 :].any()
    assert torch.equal(target == 1, inputs.prod(2).sum(0).abs() + (marks.sum(0) - 2).abs() == 0)
