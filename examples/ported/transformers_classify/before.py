"""A BERT learns to classify sequences of several lengths, with transformers' Trainer."""

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed


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
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long(), "labels": labels}


def compute_metrics(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def main():
    args = TrainingArguments(
        output_dir="bert-brackets",
        per_device_train_batch_size=16,
        per_device_eval_batch_size=16,
        max_steps=30,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=3,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=10,
        save_strategy="steps",
        save_steps=10,
        load_best_model_at_end=True,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(
        model=build_model(),
        args=args,
        train_dataset=brackets(240, seed=1),
        eval_dataset=brackets(80, seed=2),
        data_collator=pad,
        compute_metrics=compute_metrics,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
