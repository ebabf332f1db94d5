"""`jaxmem completion`: the script that makes a shell complete commands, targets and policies."""

import click
from click.shell_completion import get_completion_class

_HOW = {
    "bash": 'eval "$(jaxmem completion bash)"  # in ~/.bashrc',
    "zsh": 'eval "$(jaxmem completion zsh)"  # in ~/.zshrc',
    "fish": "jaxmem completion fish > ~/.config/fish/completions/jaxmem.fish",
}


@click.command(epilog="\b\n" + "\n".join(_HOW.values()))
@click.argument("shell", type=click.Choice(list(_HOW)))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell."""
    kind = get_completion_class(shell)
    assert kind is not None  # click has all three
    root = ctx.find_root().command
    click.echo(kind(root, {}, "jaxmem", "_JAXMEM_COMPLETE").source())
