"""A BERT learns to classify sequences of several lengths."""

from functools import partial

import torch
from transformers import BertConfig, BertForSequenceClassification, get_cosine_schedule_with_warmup, set_seed

from unisono import CheckpointOptions, OptimOptions, PlanOptions, Trainer, TrainOptions


def brackets(count, seed):
    """Strings of up to 12 brackets (2 and 3), and whether they are balanced."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in (2 * torch.randint(1, 7, (count,), generator=generator)).tolist():
        steps = torch.randperm(length, generator=generator) % 2
        depth = (1 - 2 * steps).cumsum(0)
        rows.append({"input_ids": steps + 2, "label": int(depth.min() >= 0)})
    return rows


def build_model():
    set_seed(0)
    config = BertConfig(
        vocab_size=4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    return BertForSequenceClassification(config)


def pad(rows):
    """A classification token (1) in front, and padding (0) at the end."""
    texts = [torch.cat([torch.ones(1, dtype=torch.long), row["input_ids"]]) for row in rows]
    tokens = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    labels = torch.tensor([row["label"] for row in rows])
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "targets": labels}


def main():
    with Trainer(
        build_model(),
        brackets(240, seed=1),
        PlanOptions(global_batch=16, precision="fp32"),
        objective="cross_entropy",
        optimizer=OptimOptions(lr=1e-3, weight_decay=0.0, beta2=0.999),
        schedule=partial(get_cosine_schedule_with_warmup, num_warmup_steps=3, num_training_steps=30),
        options=TrainOptions(steps=30, eval_every_steps=10),
        checkpoint=CheckpointOptions(every_steps=10),
        eval_data=brackets(80, seed=2),
        metrics=["accuracy"],
        collate_fn=pad,
    ) as run:
        run.fit()


if __name__ == "__main__":
    main()
