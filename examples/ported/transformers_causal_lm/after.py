"""A causal language model learns to add."""

from functools import partial

import torch
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup, set_seed

from unisono import CheckpointOptions, OptimOptions, PlanOptions, Trainer, TrainOptions

CHARACTERS = "0123456789+= "


def encode(text, length=12):
    return [CHARACTERS.index(character) for character in text.ljust(length)]


def sums(count, seed):
    """Texts such as "31+7=38"; only the sum counts in the loss."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for one, other in torch.randint(100, (count, 2), generator=generator).tolist():
        question, answer = f"{one}+{other}=", f"{one + other}"
        tokens = torch.tensor(encode(question + answer))
        mask = tokens != CHARACTERS.index(" ")
        labels = tokens.where(mask, -100)
        labels[: len(question)] = -100
        rows.append({"input_ids": tokens, "attention_mask": mask.long(), "labels": labels})
    return rows


def build_model():
    set_seed(0)
    config = GPT2Config(
        vocab_size=len(CHARACTERS),
        n_positions=12,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return GPT2LMHeadModel(config)


def main():
    train = sums(160, seed=1)
    epoch = len(train) // 16
    with Trainer(
        build_model(),
        train,
        PlanOptions(global_batch=16, micro_batch=8, precision="fp32"),
        objective="model_loss",
        optimizer=OptimOptions(
            lr=5e-3, weight_decay=0.01, groups=({"match": "*.w[tp]e.weight", "weight_decay": 0.01},), beta2=0.999
        ),
        schedule=partial(get_linear_schedule_with_warmup, num_warmup_steps=3, num_training_steps=2 * epoch),
        options=TrainOptions(epochs=2, eval_every_steps=epoch),
        checkpoint=CheckpointOptions(every_steps=epoch, keep_last=2),
        eval_data=sums(40, seed=2),
    ) as run:
        run.fit()


if __name__ == "__main__":
    main()
