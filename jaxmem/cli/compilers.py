"""Threads that wait for compilers; each compiler is a process of its own."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor


@contextlib.contextmanager
def compiling(count: int) -> Iterator[ThreadPoolExecutor]:
    """So many at once.  When the body is interrupted, compilers still at work are ended."""
    with ThreadPoolExecutor(count) as threads:
        try:
            yield threads
        except BaseException:
            from jaxmem.targets.pool import pool

            threads.shutdown(wait=False, cancel_futures=True)
            pool.close()
            raise
