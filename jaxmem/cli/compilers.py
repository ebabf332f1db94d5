"""Threads that wait for compilers; each compiler is a separate process."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor


@contextlib.contextmanager
def compiling(count: int) -> Iterator[ThreadPoolExecutor]:
    """`count` threads.  When the body is interrupted, running compilers are ended."""
    with ThreadPoolExecutor(count) as threads:
        try:
            yield threads
        except BaseException:
            from jaxmem.targets.pool import pool

            threads.shutdown(wait=False, cancel_futures=True)
            pool.close()
            raise
