"""Lightning, Accelerate and transformers' Trainer walk the path of a plain loop, where they are installed.

The recipes that the book shows for them are run here, as they stand on the page.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest
import torch
from gates import NBS
from torch import Tensor, nn
from toys import batch, loss_of, network, quiet, same, weights

from psgd_lit.optim import PSGD

BATCHES = [slice(i, i + 8) for i in range(0, 32, 8)]
CURVE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}


def plain_loop(hvp: str, epochs: int = 2, pieces: int = 1, half: bool = False, **settings: Any) -> nn.Module:
    """The same training without a trainer; each step sees so many batches, in bfloat16 under autocast if `half`."""
    net = network()
    opt = PSGD(net.parameters(), hvp=hvp, **settings)
    rows = [BATCHES[i : i + pieces] for i in range(0, 4, pieces)]

    def loss(some: list[slice]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            return torch.stack([loss_of(net, one) for one in some]).mean()

    for some in rows * epochs:
        opt.step(lambda some=some: loss(some))
    return net


def close(net: nn.Module, other: nn.Module) -> None:
    for p, q in zip(weights(net), weights(other), strict=True):
        torch.testing.assert_close(p, q, **CURVE)


def loader() -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*batch()), batch_size=8)


def lightning_module(hvp: str, manual: bool = False, **settings: Any) -> Any:
    """A module by Lightning's book, with `backward` as the guide says."""
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.automatic_optimization = network(), not manual

        def training_step(self, pair: tuple[Tensor, Tensor]) -> Tensor | None:
            def loss() -> Tensor:
                return (self.net(pair[0]) - pair[1]).square().mean()

            if not manual:
                return loss()
            self.optimizers().step(loss)
            return None

        def backward(self, loss: Tensor) -> None:
            loss.backward(create_graph=hvp == "exact" and self.optimizers().due)

        def configure_optimizers(self) -> PSGD:
            return PSGD(self.net.parameters(), hvp=hvp, **settings)

    return Module()


def fit(module: Any, folder: Path, epochs: int = 2, resume: str | None = None, **settings: Any) -> Any:
    """Train a module, and return the trainer."""
    lightning = pytest.importorskip("lightning")
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        enable_checkpointing=False,
        default_root_dir=folder,
        **silent,
        **settings,
    )
    with quiet():
        trainer.fit(module, loader(), ckpt_path=resume)
    return trainer


pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _no_trace() -> Iterator[None]:
    """Accelerate's state is one for the process; other tests must not meet it."""
    yield
    if state := sys.modules.get("accelerate.state"):
        state.GradientState._reset_state()


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("hvp", ["whiten", "approx", "exact"])
def test_lightning(hvp, manual, tmp_path):
    module = lightning_module(hvp, manual)
    fit(module, tmp_path)
    close(module.net, plain_loop(hvp))


@pytest.mark.parametrize("hvp", ["whiten", "exact"])
def test_lightning_accumulates(hvp, tmp_path):
    module = lightning_module(hvp)
    fit(module, tmp_path, accumulate_grad_batches=2)
    close(module.net, plain_loop(hvp, pieces=2))


@pytest.mark.parametrize("hvp", ["whiten", "exact"])
def test_lightning_resumes(hvp, tmp_path):
    module, path = lightning_module(hvp), str(tmp_path / "one.ckpt")
    fit(module, tmp_path, epochs=1).save_checkpoint(path)
    other = lightning_module(hvp)
    fit(other, tmp_path, resume=path)
    close(other.net, plain_loop(hvp))


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("hvp", ["whiten", "exact"])
def test_lightning_in_bfloat16(hvp, manual, tmp_path):
    """Mixed precision is that of a plain loop under autocast, and no other than float32 would be."""
    module = lightning_module(hvp, manual)
    fit(module, tmp_path, precision="bf16-mixed")
    close(module.net, plain_loop(hvp, half=True))
    with pytest.raises(AssertionError):
        close(module.net, plain_loop(hvp))


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_lightning_in_bfloat16_has_no_differences(manual, tmp_path):
    """A difference of gradients in bfloat16 is refused, with a graph or without one, and nothing has moved."""
    module = lightning_module("approx", manual)
    with pytest.raises(ValueError, match=r'bfloat16.*hvp="exact"'):
        fit(module, tmp_path, precision="bf16-mixed")
    assert same(weights(module.net), weights(network()))


def test_lightning_clips_what_approx_subtracts(tmp_path):
    with pytest.warns(UserWarning, match="gradient_clip_val.*max_norm"):
        fit(lightning_module("approx"), tmp_path, gradient_clip_val=0.1)


def accelerated(n: int = 1, **settings: Any) -> tuple[Any, ...]:
    """A prepared model, its optimizer and data, and the accelerator."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=n)
    net = network()
    return accelerator, *accelerator.prepare(net, PSGD(net.parameters(), **settings), loader())


def train(accelerator: Any, net: Any, opt: Any, data: Any, epochs: int = 2) -> None:
    """The loop of the guide."""
    for x, y in [pair for _ in range(epochs) for pair in data]:
        with accelerator.accumulate(net), quiet():
            needs_graph = opt.optimizer.param_groups[0]["hvp"] == "exact" and opt.optimizer.due
            accelerator.backward((net(x) - y).square().mean(), create_graph=needs_graph)
            opt.step()
            opt.zero_grad()


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("hvp", ["whiten", "exact"])
def test_accelerate(hvp, n):
    accelerator, net, opt, data = accelerated(n, hvp=hvp)
    train(accelerator, net, opt, data)
    close(net, plain_loop(hvp, pieces=n))


def test_accelerate_by_a_closure():
    _, net, opt, data = accelerated(hvp="approx")
    for x, y in [pair for _ in range(2) for pair in data]:
        opt.step(lambda x=x, y=y: (net(x) - y).square().mean())
    close(net, plain_loop("approx"))


def test_accelerate_saves_and_loads(tmp_path):
    accelerator, net, opt, data = accelerated(hvp="whiten")
    train(accelerator, net, opt, data, epochs=1)
    accelerator.save_state(str(tmp_path))
    before = weights(net)
    train(accelerator, net, opt, data, epochs=1)
    accelerator.load_state(str(tmp_path))
    assert same(before, weights(net))
    train(accelerator, net, opt, data, epochs=1)
    close(net, plain_loop("whiten"))


def test_accelerate_says_that_batches_are_lost():
    accelerator, net, opt, data = accelerated(n=4, hvp="exact")

    def by_closures() -> None:
        for x, y in data:
            with accelerator.accumulate(net):
                opt.step(lambda x=x, y=y: (net(x) - y).square().mean())

    with pytest.warns(UserWarning, match="accumulates over 4 batches.*never seen"):
        by_closures()


def transformers_trainer(model: nn.Module, opt: PSGD, folder: Path) -> Any:
    """A Trainer that goes through the rows in order, with a constant step size."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate").state.GradientState._reset_state()
    arguments = transformers.TrainingArguments(
        str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=8,
        max_grad_norm=0.0,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
    )
    constant = torch.optim.lr_scheduler.LambdaLR(opt, lambda _: 1.0)
    return transformers.Trainer(model, arguments, train_dataset=samples(), optimizers=(opt, constant))


class Regression(nn.Module):
    """The network as transformers wants it: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.net(x) - labels).square().mean()}


def samples() -> list[dict[str, Tensor]]:
    return [{"x": x, "labels": y} for x, y in zip(*batch(), strict=True)]


def test_transformers_trainer(tmp_path):
    model = Regression()
    transformers_trainer(model, PSGD(model.parameters(), hvp="whiten"), tmp_path).train()
    close(model.net, plain_loop("whiten"))


@pytest.mark.parametrize("hvp", ["exact", "approx", "forward"])
def test_transformers_trainer_has_no_second_derivative(hvp, tmp_path):
    """What can't be had is refused at the first step, with the product that can, and nothing has moved."""
    model = Regression()
    trainer = transformers_trainer(model, PSGD(model.parameters(), hvp=hvp), tmp_path)
    with pytest.raises(RuntimeError, match=r'(?s)Three ways to call step.*plain backward\(\) for hvp="whiten"'):
        trainer.train()
    assert same(weights(model.net), weights(network()))


# What the book shows ---------------------------------------------------------------------------------------------


def recipe(name: str) -> str:
    """The code block of the page's recipe that imports a package."""
    page = nbformat.read(NBS / "start/04_recipes_for_trainers.ipynb", as_version=4)
    text = "\n".join(cell.source for cell in page.cells if cell.cell_type == "markdown")
    (found,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if re.search(name, code)]
    return str(found)


def follow(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Run a recipe as it stands, in an empty folder, and return what it has trained."""
    pytest.importorskip(name)
    monkeypatch.chdir(folder)
    net = network()
    with quiet():
        exec(
            recipe(rf"(import|from) {name}\b"),
            {"net": net, "loader": loader(), "dataset": samples()},
        )
    return net


@pytest.mark.parametrize(("name", "pieces"), [("lightning", 1), ("accelerate", 2)])
def test_recipes_walk_the_path_of_a_plain_loop(name, pieces, tmp_path, monkeypatch):
    close(follow(name, tmp_path, monkeypatch), plain_loop("exact", pieces=pieces))


def test_recipe_logs_what_steps_have_done(tmp_path):
    lightning = pytest.importorskip("lightning")
    names = {"lightning": lightning}
    exec(recipe("class Diagnostics"), names)
    module = lightning_module("exact", manual=True)
    fit(module, tmp_path, callbacks=[names["Diagnostics"](2)])
    found = {name: float(x) for name, x in module.trainer.callback_metrics.items()}
    assert found["psgd/step_norm"] > 0
    assert found["psgd/clip"] == 1
    assert found["psgd/age"] >= 0


def test_recipe_for_transformers_trains(tmp_path, monkeypatch):
    pytest.importorskip("accelerate").state.GradientState._reset_state()
    net = follow("transformers", tmp_path, monkeypatch)
    assert loss_of(net) < loss_of(network())
