"""Settings of checkpoints: when one is written, how many stay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from unisono.config import option
from unisono.config.fields import options_repr
from unisono.errors import Problem, inert_problem


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointOptions:
    """When a run saves itself. The end of a run and a request to stop always save, whatever is set here."""

    __repr__ = options_repr

    every_steps: int = option(50, "Steps between two checkpoints; 0 = only at the end and when asked to stop.", ge=0)
    keep_last: int = option(3, "Newest checkpoints that stay.", ge=1)
    keep_every_steps: int = option(
        0,
        "Checkpoints whose step is a multiple of this stay for good; 0 = none do.",
        applies_with="checkpoint.every_steps above 0",
        ge=0,
    )
    keep_best: int = option(1, "Checkpoints with the lowest evaluation loss that stay.", ge=0)
    asynchronous: bool = option(True, "Write in the background while training continues.")
    max_failures: int = option(3, "Failed saves in a row after which the run stops; fewer are only reported.", ge=1)

    upload_to: str = option(
        "", "Address of fsspec (s3://bucket/run) where committed checkpoints are copied to and resumed from; '' = none."
    )

    def problems(self) -> Iterator[tuple[str, Problem]]:
        """Steps to keep where only the last one is saved, an address that is none, by field name."""
        if self.upload_to and "://" not in self.upload_to:
            yield (
                "upload_to",
                Problem(
                    given=f"upload_to {self.upload_to!r}",
                    rule="an address names its filesystem, as s3://bucket/folder does",
                    consequence="checkpoints would have no copy",
                    nearest=f"checkpoint.upload_to='file://{self.upload_to}' for a folder; run.dir for the run itself",
                ),
            )
        if self.keep_every_steps and not self.every_steps:
            yield (
                "keep_every_steps",
                inert_problem(
                    f"keep_every_steps {self.keep_every_steps} with every_steps 0",
                    "it chooses among the checkpoints that every_steps writes",
                    "checkpoint.every_steps=50, or leave checkpoint.keep_every_steps out",
                ),
            )
