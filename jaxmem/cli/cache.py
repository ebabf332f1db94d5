"""`jaxmem cache`: the compilers' results cached on disk."""

import click


@click.group()
def cache() -> None:
    """Show or clear the compilers' results cached on disk."""


@cache.command()
def show() -> None:
    """Print the folder of the cache, and how many results it holds."""
    from jaxmem._util.text import size
    from jaxmem.targets import Cache

    store = Cache()
    count, total = store.usage()
    click.echo(f"{store.root}\n{count} results, {size(total)}")


@cache.command()
def clear() -> None:
    """Delete all cached results."""
    from jaxmem._util.text import size
    from jaxmem.targets import Cache

    store = Cache()
    count, total = store.usage()
    store.clear()
    click.echo(f"deleted {count} results, {size(total)}")
