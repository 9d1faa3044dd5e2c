"""Times training steps of any contender: an object that makes a step when called, and ends its work in `finish()`."""

import resource
import statistics
import time

from benchmarks.gpu import settings


def warm_up(contender):
    """Makes the steps that are not timed; returns their losses and the seconds of the first."""
    begin_s = time.perf_counter()
    first = contender()
    first_step_s = time.perf_counter() - begin_s
    return [first, *(contender() for _ in range(settings.WARM_UP - 1))], first_step_s


def timed_steps(contender, num_steps, end_s):
    """Times steps; few of them if `time.monotonic()` passes `end_s`.

    Returns the losses, the seconds between them, and the mean seconds including the final updates.
    """
    losses, seconds, begin_s = [], [], time.perf_counter()
    last_s = begin_s
    while len(seconds) < num_steps and (len(seconds) < settings.MIN_STEPS or time.monotonic() < end_s):
        losses.append(contender())
        now_s = time.perf_counter()
        seconds.append(now_s - last_s)
        last_s = now_s
    contender.finish()
    return losses, seconds, (time.perf_counter() - begin_s) / len(seconds)


def summary(seconds, mean_s, tokens_per_step):
    """The part of a contender's result that follows from its times, and the process's host memory."""
    step_s = statistics.median(seconds)
    return {
        "step_s": step_s,
        "mean_s": mean_s,
        "tokens_per_s": tokens_per_step / step_s,
        "seconds_of_steps": seconds,
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
