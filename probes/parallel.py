"""Whole layers side by side, instead of threads inside each product.

The matrix products of a probe are small. A BLAS that splits each over its threads spends more time meeting at the end
of each product than it saves, and on a busy machine it can take several times as long as one thread does. The layers of
a study are independent, so the threads that BLAS was allowed (all cores, or what OMP_NUM_THREADS says) take a layer
each, and BLAS gets one. Products then round the same way whatever the number of cores, so results do not depend on it.

Constraint: the BLAS limit holds for the whole process while the work runs, and is put back afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor


def for_each(count: int, work: Callable[[int], None]) -> None:
    """Call `work(0)` … `work(count - 1)`, each writing its own results, on as many threads as BLAS may use."""
    # It comes with scikit-learn, which uses it for the same purpose; it ships no types.
    from threadpoolctl import threadpool_info, threadpool_limits  # type: ignore[import-untyped]

    allowed = max((pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"), default=1)
    with threadpool_limits(limits=1, user_api="blas"), ThreadPoolExecutor(min(allowed, count)) as threads:
        # Reading the results re-raises the first error and cancels the layers that have not begun.
        for _ in threads.map(work, range(count)):
            pass
