"""``unisono completion``: prints the script that lets a shell complete commands, options and paths."""

from __future__ import annotations

import click

from unisono.cli.common import common_options, print_result

_SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(_SHELLS))
@common_options
def command(shell: str, as_json: bool) -> None:
    """Print the completion script of SHELL.

    \b
    source <(unisono completion bash)   # in ~/.bashrc
    source <(unisono completion zsh)    # in ~/.zshrc, after compinit
    unisono completion fish > ~/.config/fish/completions/unisono.fish
    """
    from click.shell_completion import get_completion_class

    from unisono.cli.main import cli

    kind = get_completion_class(shell)
    assert kind is not None, "click has the three shells"
    script = kind(cli, {}, "unisono", "_UNISONO_COMPLETE").source()
    print_result(as_json, {"shell": shell, "script": script}, script)
