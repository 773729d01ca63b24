"""A process of its own that ends while a thread of gloo's has not let go of a tensor yet, for
tests/comm/test_waiting.py.

    python late_thread.py [without]

All threads share one processor, and gloo's get it only if nobody else wants it: the main thread is
told that a collective is done, and runs on to its end before the thread that did it can go on. It
can in the last moment, in which the interpreter is not to be had.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys

import torch
import torch.distributed as dist

LONG_CALCULATION = functools.partial(pow, 7, 400_000)  # in C, all the time with the interpreter

processors = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, processors[:1])
atexit.register(LONG_CALCULATION)  # the last of all
atexit.register(os.sched_setaffinity, 0, processors[1:])  # of the main thread

if sys.argv[1:] != ["without"]:
    import onecopy  # noqa: F401

before = {*os.listdir("/proc/self/task")}
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for task in {*os.listdir("/proc/self/task")} - before:
    os.sched_setscheduler(int(task), os.SCHED_IDLE, os.sched_param(0))
KEPT = dist.group.WORLD  # or the threads would be joined
dist.all_reduce(torch.ones(1_000_000), async_op=True).wait()
