"""A causal language model learns to add, with transformers' Trainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator, set_seed

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
    args = TrainingArguments(
        output_dir="gpt2-sums",
        per_device_train_batch_size=8,
        per_device_eval_batch_size=64,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=5e-3,
        weight_decay=0.01,
        lr_scheduler_type="linear",
        warmup_steps=3,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(
        model=build_model(),
        args=args,
        train_dataset=sums(160, seed=1),
        eval_dataset=sums(40, seed=2),
        data_collator=default_data_collator,
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()


if __name__ == "__main__":
    main()
