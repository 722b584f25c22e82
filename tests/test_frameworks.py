"""Compares the recipes of examples/frameworks, for each installed framework, with a simulation in one process.

`make test-frameworks` makes an environment with the frameworks, and runs these tests there.
"""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from harness import WorldPool
from scripts import ROOT, Job, run_script, started
from torch import Tensor
from torch.utils.data import DistributedSampler
from training_cases import distribute, end, start

from fog_pg._extension import find_mpi_library

RECIPES = ROOT / "examples" / "frameworks"
# Each rank takes seconds to import a framework.
TIMEOUT = 240.0
LINE = re.compile(r"rank (\d) on (\S+): loss (\S+), distance from the mean (\d\.\d+)")


def needs(package: str) -> None:
    """Skips the test if a framework is not installed, without importing it."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: make test-frameworks")


def reported(output: str, ranks: int) -> tuple[list[float], list[float]]:
    """Returns the losses and distances that ranks have printed, in the order of ranks."""
    found = {
        int(rank): (backend, float(loss), float(far)) for rank, backend, loss, far in LINE.findall(output)
    }
    assert sorted(found) == list(range(ranks)), output
    assert {backend for backend, _, _ in found.values()} == {"fog"}, output
    return [found[rank][1] for rank in range(ranks)], [found[rank][2] for rank in range(ranks)]


def recipe(name: str, how: str, folder: Path, launcher: str | WorldPool = "torchrun", ranks: int = 2) -> str:
    return run_script([RECIPES / name, "--how", how], ranks, folder / "log.txt", launcher, timeout=TIMEOUT)


# --- expected results ---------------------------------------------------------------------------------------


@pytest.fixture
def problem(monkeypatch: pytest.MonkeyPatch):
    """Imports the module of the recipes' problem, which they import from their own folder."""
    monkeypatch.syspath_prepend(str(RECIPES))
    module = importlib.import_module("problem")
    yield module
    del sys.modules["problem"]


def sampled(problem, ranks: int, shuffle: bool) -> list[list[Tensor]]:
    """Returns the rows of each rank's batches in all epochs, as DistributedSampler deals them."""
    dealt: list[list[Tensor]] = []
    for rank in range(ranks):
        sampler = DistributedSampler(problem.make_rows(), ranks, rank, shuffle=shuffle)
        dealt.append([])
        for epoch in range(problem.EPOCHS):
            sampler.set_epoch(epoch)
            dealt[rank] += torch.tensor([*sampler]).split(problem.BATCH)
    return dealt


def by_batches(problem, ranks: int) -> list[list[Tensor]]:
    """Returns the rows of each rank's batches in all epochs, as accelerate deals them: a batch to each rank in turn."""
    batches = torch.arange(problem.ROWS).split(problem.BATCH)
    return [list(batches[rank::ranks]) * problem.EPOCHS for rank in range(ranks)]


def simulate(problem, rows: list[list[Tensor]], groups: int) -> tuple[list[float], float]:
    """Trains `groups` groups of ranks, each with one model, to whose gradients all its ranks contribute.

    Each step is ``x+ = mean(x) - step(gradient at x)``, with the mean over the groups. One group is DDP.

    Returns:
        The losses of all ranks' models on all rows, and the distance of the models from their mean.
    """
    inputs, targets = problem.make_rows().tensors
    models = [problem.make_net() for _ in range(groups)]
    optimizers = [problem.make_sgd(model) for model in models]
    each = len(rows) // groups
    for batches in zip(*rows):
        for number, (model, optimizer) in enumerate(zip(models, optimizers)):
            optimizer.zero_grad()
            for batch in batches[number * each :][:each]:
                (problem.loss_of(model, inputs[batch], targets[batch]) / each).backward()
        with torch.no_grad():
            for same in zip(*(model.parameters() for model in models)):
                mean = torch.stack(same).mean(0)
                for parameter in same:
                    parameter.copy_(mean)
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        losses = [problem.loss_of(model, inputs, targets).item() for model in models]
        vectors = torch.stack([torch.cat([p.flatten() for p in model.parameters()]) for model in models])
    distance = (vectors - vectors.mean(0)).square().sum().div(groups).sqrt().item()
    return [loss for loss in losses for _ in range(each)], distance


def check(problem, output: str, rows: list[list[Tensor]], how: str) -> None:
    """Compares the output of the ranks with the simulation."""
    alone, together = simulate(problem, rows, len(rows)), simulate(problem, rows, 1)
    # The network learns, and gossip differs from DDP.
    assert (
        max(*alone[0], *together[0]) < 0.3 < problem.loss_of(problem.make_net(), *problem.make_rows().tensors)
    )
    assert alone[0] != pytest.approx(together[0], rel=0.01)
    expected, apart = together if how == "ddp" else alone
    assert (apart > 1e-3) == (how != "ddp")
    losses, distances = reported(output, len(rows))
    assert losses == pytest.approx(expected, rel=1e-3)
    assert distances == pytest.approx([apart] * len(rows), rel=1e-3, abs=2e-6)


# --- the recipes --------------------------------------------------------------------------------------------


# By recipe: its package, and whether its training data are shuffled, as Lightning's are.
PACKAGES = {
    "lightning": ("lightning", True),
    "accelerate": ("accelerate", False),
}


@pytest.mark.parametrize("how", ["ddp", "gossip", "optimizer"])
@pytest.mark.parametrize("name", [*PACKAGES, "ray"])
def test_recipes(problem, tmp_path: Path, name: str, how: str) -> None:
    package, shuffle = PACKAGES.get(name, (name, False))
    needs(package)
    rows = by_batches(problem, 2) if name == "accelerate" else sampled(problem, 2, shuffle)
    run = run_alone if name == "ray" else recipe
    check(problem, run(f"with_{name}.py", how, tmp_path), rows, how)


def test_lightning_starts_ranks_itself(problem, tmp_path: Path) -> None:
    needs("lightning")
    output = run_alone("with_lightning.py", "gossip", tmp_path)
    check(problem, output, sampled(problem, 2, shuffle=True), "gossip")


@pytest.mark.parametrize("how", ["ddp", "gossip", "optimizer"])
def test_transformers(tmp_path: Path, how: str) -> None:
    needs("transformers")
    losses, distances = reported(recipe("with_transformers.py", how, tmp_path), 2)
    assert max(losses) < 0.3  # it begins at log(32)
    # If gradients were averaged over all ranks, both models would be the same.
    assert all((distance > 1e-3) == (how != "ddp") for distance in distances)


RESUMES = """
import fogdist
import fogdist.bluefog.torch as bf
fogdist.init()
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
from with_transformers import Counting, DecentralizedTrainer

def trained(resume):
    torch.manual_seed(0)
    shape = {"n_embd": 8, "n_layer": 1, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=8, bos_token_id=None, eos_token_id=None, **shape))
    options = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "learning_rate": 0.01, "warmup_steps": 2}
    arguments = TrainingArguments(FOLDER, max_steps=6, save_steps=3, per_device_train_batch_size=4, **options)
    DecentralizedTrainer(model=model, args=arguments, train_dataset=Counting()).train(resume_from_checkpoint=resume)
    return torch.cat([each.detach().flatten() for each in model.parameters()])

straight = trained(None)
apart = (bf.broadcast(straight.clone(), 0) - straight).abs().max().item() > 1e-3
resumed = trained(FOLDER + "/checkpoint-3")
print("rank", fogdist.rank(), "apart", apart, "same", torch.equal(straight, resumed), flush=True)
"""


def test_a_trainer_resumes_with_the_state_of_each_rank(tmp_path: Path) -> None:
    needs("transformers")
    script = tmp_path / "resumes.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(RECIPES)!r})\nFOLDER = {str(tmp_path / 'saved')!r}\n{RESUMES}"
    )
    output = run_script([script], 2, tmp_path / "log.txt", "torchrun", timeout=TIMEOUT)
    assert "rank 0 apart False same True" in output and "rank 1 apart True same True" in output, output


@pytest.mark.parametrize("how", ["gossip", "hsdp"])
def test_fsdp2(problem, script_worlds: WorldPool, tmp_path: Path, how: str) -> None:
    output = recipe("with_fsdp2.py", how, tmp_path, script_worlds, ranks=4)
    groups = 2 if how == "gossip" else 1
    expected, apart = simulate(problem, sampled(problem, 4, shuffle=False), groups)
    losses, distances = reported(output, 4)
    assert losses == pytest.approx(expected, rel=1e-3)
    # A rank's distance is that of its shard of the model.
    assert math.hypot(*distances[:2]) == pytest.approx(apart, rel=1e-3, abs=2e-6)
    assert (apart > 1e-3) == (how == "gossip")


def run_alone(name: str, how: str, folder: Path) -> str:
    """Runs a recipe that starts its ranks itself."""
    words = [RECIPES / name, "--how", how]
    # If mpi4py is installed, Lightning asks it whether mpiexec has started it. In an environment beside the project's,
    # mpi4py finds no library by itself.
    environment = {"MPI4PY_LIBMPI": find_mpi_library()}
    with started([Job(words, 2, folder / "log.txt", [sys.executable], environment)]) as (job,):
        assert job.wait(TIMEOUT) == 0, job.output
        return job.output


def save(kind: str, folder: Path) -> None:
    rank, _ = start()
    from accelerate import Accelerator
    from huggingface_hub import save_torch_model
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    called, optimizer = distribute(kind, torch.optim.SGD(model.parameters(), lr=0.01), model)
    called(input_ids=torch.arange(8).view(1, 8)).logits.square().mean().backward()
    optimizer.step()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    own = folder / str(rank)
    for how in ("accelerate", "hub", "transformers"):
        (own / how).mkdir(parents=True)
    model.save_pretrained(own / "transformers")
    save_torch_model(model, own / "hub")
    if rank == 0:  # accelerate saves on the main process only
        Accelerator(cpu=True).save_model(model, own / "accelerate")
    files = {file.parent.name: file for file in own.glob("*/model.safetensors")}
    # transformers 5.24 saves on rank 0 only, older ones on all ranks
    assert files.keys() >= ({"accelerate", "hub", "transformers"} if rank == 0 else {"hub"})
    for file in files.values():
        found = load_file(file)
        assert found.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in found.items())
    end(called, optimizer)


@pytest.mark.parametrize("kind", ["atc", "wrapper"])
def test_savers_have_all_parameters(worlds: WorldPool, kind: str, tmp_path: Path) -> None:
    needs("accelerate")
    needs("transformers")
    worlds(2).run(save, kind, tmp_path)
