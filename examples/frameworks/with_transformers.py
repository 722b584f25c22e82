"""transformers' Trainer on fog: with DDP, with DDP whose ranks gossip, with a fogdist optimizer.

    torchrun --nproc_per_node=2 examples/frameworks/with_transformers.py --how ddp
    torchrun --nproc_per_node=2 examples/frameworks/with_transformers.py --how gossip
    torchrun --nproc_per_node=2 examples/frameworks/with_transformers.py --how optimizer

A tiny GPT-2 with random weights learns to count, so nothing is downloaded.
"""

from __future__ import annotations

import functools
import shutil
import tempfile
from typing import Any

import fogdist
import torch
import torch.distributed as dist
from fogdist import checkpoint
from problem import read_how, report
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import Dataset
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

WORDS = 32
LENGTH = 8


class Counting(Dataset[dict[str, Tensor]]):
    """Sequences that count on from each number, modulo the number of words."""

    def __len__(self) -> int:
        return WORDS

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        words = (place + torch.arange(LENGTH)) % WORDS
        return {"input_ids": words, "labels": words}


class GossipTrainer(Trainer):
    """A Trainer whose DDP averages parameters with the neighbors in place of gradients with all ranks."""

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_model

        def prepare_model(*arguments: Any, **options: Any) -> nn.Module:
            model = prepare(*arguments, **options)
            if isinstance(model, DistributedDataParallel):  # not for an evaluation
                model.register_comm_hook(fogdist.GossipState(), fogdist.gossip_hook)
            return model

        self.accelerator.prepare_model = prepare_model


class StatesOfRanks(TrainerCallback):
    """Saves the state of each rank with a Trainer's checkpoints, and loads it: the Trainer has that of rank 0 only."""

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any
    ) -> None:
        path = self.path(args, state)
        if fogdist.rank() == 0:  # a Trainer that has resumed saves a step again
            shutil.rmtree(path, ignore_errors=True)
        dist.barrier()
        checkpoint.save(path, of["model"], self.wrapped(of["optimizer"]), step=state.global_step)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **of: Any
    ) -> None:
        if state.global_step:  # the Trainer has resumed
            checkpoint.load(self.path(args, state), of["model"], self.wrapped(of["optimizer"]))

    def path(self, args: TrainingArguments, state: TrainerState) -> str:
        return f"{args.output_dir}/checkpoint-{state.global_step}/ranks"

    def wrapped(self, optimizer: Any) -> Optimizer:
        return getattr(optimizer, "optimizer", optimizer)  # accelerate has wrapped it


class DecentralizedTrainer(Trainer):
    """A Trainer whose optimizer averages parameters with the neighbors."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.add_callback(StatesOfRanks())

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        # accelerate leaves a model that is only evaluated as it is; else it would be wrapped in DDP.
        prepare = functools.partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.accelerator.prepare_model = prepare

    def create_optimizer(self, *arguments: Any, **options: Any) -> Optimizer:
        if self.optimizer is None:
            optimizer = super().create_optimizer(*arguments, **options)
            self.optimizer = fogdist.DecentralizedOptimizer(optimizer, self.model)
        return self.optimizer


@torch.no_grad()
def loss_of_all(model: GPT2LMHeadModel) -> float:
    """Returns the mean cross-entropy on all sequences."""
    model.eval()
    data = Counting()
    words = torch.stack([data[place]["input_ids"] for place in range(len(data))])
    return model(input_ids=words, labels=words).loss.item()


def main() -> None:
    how = read_how("transformers on fog.", "ddp", "gossip", "optimizer")
    fogdist.init()  # before TrainingArguments, which adopts the group
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=WORDS,
        n_positions=LENGTH,
        n_embd=32,
        n_layer=1,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=8,
            num_train_epochs=30,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=0,
        )
        kind = {"ddp": Trainer, "gossip": GossipTrainer, "optimizer": DecentralizedTrainer}[how]
        trainer = kind(model=model, args=arguments, train_dataset=Counting())
        trainer.train()
    report(model, loss_of_all(model))


if __name__ == "__main__":
    main()
