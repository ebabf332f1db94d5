"""`jaxmem cache`: the compiled results kept on disk."""

import click


@click.group()
def cache() -> None:
    """The results of compilers that are kept on disk."""


@cache.command()
def show() -> None:
    """Print where it is and how much is in it."""
    from jaxmem.targets import Cache
    from jaxmem.text import size

    store = Cache()
    count, total = store.usage()
    click.echo(f"{store.root}\n{count} results, {size(total)}")


@cache.command()
def clear() -> None:
    """Delete all of it."""
    from jaxmem.targets import Cache
    from jaxmem.text import size

    store = Cache()
    count, total = store.usage()
    store.clear()
    click.echo(f"deleted {count} results, {size(total)}")
