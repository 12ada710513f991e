"""Short configuration files for ``unisono init --task``: what a task needs, and what one changes first. Torch-free."""

from __future__ import annotations

from typing import Final

_HEAD: Final = "# {title}: unisono train {file}\n# All options with their defaults: unisono init all.toml\n"
_TRAIN: Final = """
[plan]
global_batch = {batch}

[optim]
lr = {lr}

[train]
steps = 1000
eval_every_steps = 100
"""
_PRETRAINED: Final = '# pretrained = "path/to/hugging-face-folder"  # fine-tune it; the sizes below then go\n'

# task → (title, its sections, global batch, learning rate)
_TASKS: Final[dict[str, tuple[str, str, int, float]]] = {
    "language_model": (
        "A language model of your text",
        """
[data]
corpus = "texts"  # a folder of text files; or train = "tokens" of 'mkdir tokens; unisono data pack texts tokens/texts.bin'
seq_len = 256

[model]
{pretrained}num_layers = 4
dim = 128
""",
        32,
        1e-3,
    ),
    "masked_language_model": (
        "A masked language model of your text",
        """
[task]
kind = "masked_language_model"

[data]
corpus = "texts"  # a folder of text files
seq_len = 128

[model]
{pretrained}num_layers = 4
dim = 128
""",
        64,
        1e-3,
    ),
    "image": (
        "Classes of images",
        """
[task]
kind = "image"

[data]
train = "images"  # a folder with a folder per class, .rec files, or a table with the columns image and label
# eval = "held-out"  # by default eval_frac = 0.05 of train

[image]
size = 224

[components]
model = "resnet50"  # resnet14 for a first try
""",
        64,
        1e-3,
    ),
    "text": (
        "Classes of texts",
        """
[task]
kind = "text"
inputs = ["text"]  # or two columns, for pairs of texts
target = "label"

[data]
train = "reviews.csv"
# eval = "held-out"  # by default eval_frac = 0.05 of train
seq_len = 128

[model]
{pretrained}num_layers = 4
dim = 128
""",
        32,
        5e-4,
    ),
    "table": (
        "Classes of rows of a table",
        """
[task]
kind = "table"
target = "label"
# inputs = ["age", "income"]  # by default all other columns

[data]
train = "table.csv"
# eval = "held-out"  # by default eval_frac = 0.05 of train
""",
        64,
        1e-3,
    ),
    "regression": (
        "A number for each row of a table",
        """
[task]
kind = "table"  # or image, or text
predicts = "number"
target = "price"

[data]
train = "table.csv"
# eval = "held-out"  # by default eval_frac = 0.05 of train
""",
        64,
        1e-3,
    ),
    "sequence_labelling": (
        "A label for each word",
        """
[task]
kind = "sequence_labelling"
inputs = ["words"]  # lists of words, or texts with spaces between them
target = "tags"

[data]
train = "tagged.jsonl"
# eval = "held-out"  # by default eval_frac = 0.05 of train
seq_len = 128

[model]
{pretrained}num_layers = 4
dim = 128
""",
        32,
        5e-4,
    ),
}
TASKS: Final = tuple(_TASKS)


def task_starter(task: str, file: str) -> str:
    """The starter file of ``task``, one of ``TASKS``; ``file`` is its name in the comment."""
    title, sections, batch, lr = _TASKS[task]
    body = sections.replace("{pretrained}", _PRETRAINED)
    return _HEAD.format(title=title, file=file) + body + _TRAIN.format(batch=batch, lr=lr)
