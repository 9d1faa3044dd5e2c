"""Runs one contender of steps.py and prints its result as one line of JSON. Usage: contenders.py OUTPUT_DIR CONTENDER

steps.py starts one process per contender. The result holds the times of a loop of training steps and their memory.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples" / "gpt2"))

import jaxferry
from benchmarks import measure
from benchmarks.gpu import inputs, models, settings, timing
from jaxferry.costs import Profile
from jaxferry.modes import GradientPlace, Mode, UpdatePlace
from jaxferry.step import Kind, Lane, chrome_trace, machine

COMPUTE_DTYPE = jnp.bfloat16
THREADS = {"issuing": "jaxferry H2D", "host": "jaxferry host"}
"""Beginnings of the names of JaxFerry's threads."""


def make_batch(arguments, model):
    return {"tokens": inputs.tokens(arguments.batch, arguments.seq, model.vocab_size)}


class OneJit:
    """One jitted step: `plain`, or JAX's recipe, which keeps parameters and moments in pinned host memory."""

    def __init__(self, loss_fn, params, batch, is_offloaded):
        device = jax.devices()[0]
        optimizer = optax.adamw(settings.LEARNING_RATE)
        on_device = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
        home = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host") if is_offloaded else on_device
        state = jax.eval_shape(optimizer.init, params)
        # Adam's counter is a scalar; offloading it gains nothing.
        homes = jax.tree.map(lambda leaf: home if leaf.ndim else on_device, (params, state))

        def step(params, state, batch):
            if is_offloaded:
                params, state = jax.device_put((params, state), jax.memory.Space.Device)
            compute = jax.tree.map(lambda leaf: leaf.astype(COMPUTE_DTYPE), params)
            loss, gradients = jax.value_and_grad(loss_fn)(compute, batch)
            gradients = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients)
            updates, state = optimizer.update(gradients, state, params)
            return optax.apply_updates(params, updates), state, loss

        self.batch = jax.device_put(batch, on_device)
        # AdamW's state starts as zeros. They too are made on the host, to stay out of the device's peak.
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), state)
        self.params, self.state = jax.device_put((params, zeros), homes)
        jitted = jax.jit(
            step,
            in_shardings=(*homes, on_device),
            out_shardings=(*homes, on_device),
            donate_argnums=(0, 1),
        )
        start_s = time.perf_counter()
        self.run = jitted.lower(self.params, self.state, self.batch).compile()
        self.compile_s = time.perf_counter() - start_s

    def __call__(self):
        self.params, self.state, loss = self.run(self.params, self.state, self.batch)
        return float(loss)

    def finish(self):
        jax.block_until_ready((self.params, self.state))

    def facts(self, step_s):
        stats = self.run.memory_analysis()
        return {"compiled_temporary_bytes": None if stats is None else stats.temp_size_in_bytes}


class Ferry:
    """A policy of JaxFerry."""

    def __init__(self, model, params, batch, policy, profile, memory_budget, plan=None):
        self.batch = jax.device_put(batch)
        self.profile_kind = profile if isinstance(profile, str) else "measured"
        self.step = jaxferry.train_step(
            model.loss_fn,
            jaxferry.adamw(settings.LEARNING_RATE),
            remat=model.remat,
            policy=policy,
            plan=plan,
            profile=profile,
            memory_budget=memory_budget,
            compute_dtype=COMPUTE_DTYPE,
            record_steps=4,
        )
        start_s = time.perf_counter()
        self.state = self.step.init(params)
        self.init_s = time.perf_counter() - start_s
        self.prepared = self.step.prepare(batch)
        self.step.compile_updates(self.state, batch)
        self.compile_s = time.perf_counter() - start_s

    def __call__(self):
        self.state, metrics = self.step(self.state, self.batch)
        return float(metrics["loss"])

    def finish(self):
        self.state.block_until_ready()

    def save_trace(self, path):
        """Writes the last steps as a Chrome trace, if they were recorded."""
        if (run := self.step.recorded()) is not None:
            path.write_text(json.dumps(chrome_trace(run)))

    def facts(self, step_s):
        prepared = self.prepared
        schedule = prepared.schedule
        work_s = {lane.value: sum(task.duration_s for task in schedule.tasks if task.lane is lane) for lane in Lane}
        run = self.step.recorded()
        predicted_s, bound_s = machine.steady_step_s(schedule), max(work_s.values())
        return {
            "profile": self.profile_kind,
            "init_s": self.init_s,
            "predicted_s": predicted_s,
            "bound_s": bound_s,
            "measured_over_predicted": step_s / predicted_s,
            "measured_over_bound": step_s / bound_s,
            "busy": {lane: work / step_s for lane, work in work_s.items()},
            "recorded": recorded_shares(run),
            "mean_of_kind_s": mean_of_kind_s(run),
            "counted_bytes": prepared.peak.total,
            "modes": [mode.value for mode in prepared.modes],
            "updates": [layer.update.value for layer in prepared.plan.layers],
            "num_executables": prepared.num_executables,
            "only_moves_data": only_moves_data(prepared),
        }


def only_moves_data(prepared):
    """Whether no layer computes in host memory, and the host updates all, so that every sum keeps its order."""
    in_place = any(mode in (Mode.DHA, Mode.DFGB) for mode in prepared.modes)
    layers = prepared.plan.layers
    on_host = all(layer.update is UpdatePlace.HOST for layer in layers)
    return on_host and not in_place and all(layer.gradient is not GradientPlace.HOST for layer in layers)


def recorded_shares(run):
    """The share of the recorded steps in which each lane had a task; None if nothing was recorded."""
    if run is None or max(run.ends_s) <= 0:
        return None
    busy_s = dict.fromkeys(Lane, 0.0)
    for task, start, end in zip(run.schedule.tasks, run.starts_s, run.ends_s, strict=True):
        busy_s[task.lane] += end - start
    return {lane.value: seconds / max(run.ends_s) for lane, seconds in busy_s.items()}


def mean_of_kind_s(run):
    """The recorded and the planned mean seconds of each kind of task; None if nothing was recorded.

    Forward and backward of the last segment are one program, recorded as its forward: together they are a "loss".
    """
    if run is None:
        return None
    seconds, of_loss, last = {}, (Kind.FORWARD, Kind.BACKWARD), max(task.segment for task in run.schedule.tasks)
    for task, start, end in zip(run.schedule.tasks, run.starts_s, run.ends_s, strict=True):
        name = "loss" if task.segment == last and task.kind in of_loss else task.kind.value
        seconds.setdefault(name, []).append((end - start, task.duration_s))
    means = {kind: [statistics.mean(column) for column in zip(*pairs)] for kind, pairs in seconds.items()}
    return means | {"loss": [len(of_loss) * mean for mean in means["loss"]]}


def streamed_plan(prepared):
    """The plan of a step with all updates streamed through the GPU."""
    layers = [
        dataclasses.replace(layer, gradient=GradientPlace.DEVICE, update=UpdatePlace.GPU)
        if known.has_gradient
        else layer
        for layer, known in zip(prepared.plan.layers, prepared.profile.layers, strict=True)
    ]
    return dataclasses.replace(
        prepared.plan, policy=settings.STREAMED, layers=tuple(layers), predicted=None, details={}
    )


def thread_cpu_s():
    """CPU seconds so far of the threads that issue work for the device and that update on the host."""
    return {name: measure.thread_cpu_s(prefix) for name, prefix in THREADS.items()}


def profile_path(arguments):
    return arguments.output / f"profile_{arguments.size}.json"


def make(arguments, model):
    params, batch = model.make_params(), make_batch(arguments, model)
    name = arguments.contender
    if name in (settings.PLAIN, settings.RECIPE):
        return OneJit(model.plain_loss_fn, params, batch, name == settings.RECIPE)
    path = profile_path(arguments)
    # Steps can be timed without a measured profile.
    profile = Profile.load(path) if path.is_file() else "estimate"
    if name == settings.STREAMED:
        overlapped = Ferry(model, params, batch, "native-overlapped", profile, arguments.memory_budget)
        plan, profile = streamed_plan(overlapped.prepared), overlapped.prepared.profile
        del overlapped
        return Ferry(model, params, batch, None, profile, arguments.memory_budget, plan)
    policy = "auto" if name == settings.ALL_MEMORY else name
    return Ferry(model, params, batch, policy, profile, arguments.memory_budget)


def measure_profile(arguments, model):
    """Measures the profile that the policies plan with, and saves it for their processes."""
    step = jaxferry.train_step(
        model.loss_fn,
        jaxferry.adamw(settings.LEARNING_RATE),
        profile="measure",
        remat=model.remat,
        compute_dtype=COMPUTE_DTYPE,
    )
    profile = step.measure(model.shapes, make_batch(arguments, model))
    profile.save(profile_path(arguments))
    return {"machine": measure.machine(), "layers": len(profile.layers)}


def run(arguments):
    """Runs the contender and returns its result as JSON values."""
    end_s = time.monotonic() + arguments.limit / 2
    model = models.of_size(arguments.size, arguments.attention)
    if arguments.contender == settings.PROFILE:
        return measure_profile(arguments, model)
    contender = make(arguments, model)
    (losses, first_step_s), before_s = timing.warm_up(contender), thread_cpu_s()
    more, seconds, mean_s = timing.timed_steps(contender, arguments.steps, end_s)
    cpu_s = {name: (now - before_s[name]) / len(seconds) for name, now in thread_cpu_s().items()}
    times = timing.summary(seconds, mean_s, arguments.batch * arguments.seq)
    stats = jax.devices()[0].memory_stats() or {}
    if isinstance(contender, Ferry):
        contender.save_trace(arguments.output / f"trace_{arguments.size}_{arguments.contender}.json")
    return {
        **times,
        "model_flops_per_s": model.flops(arguments.batch, arguments.seq) / times["step_s"],
        "thread_cpu_s": cpu_s,
        "peak_device_bytes": stats.get("peak_bytes_in_use"),
        "compile_s": contender.compile_s,
        "first_step_s": first_step_s,
        "memory_budget_bytes": arguments.memory_budget,
        "losses": losses + more,
        "machine": measure.machine() | {"host_threads": os.environ.get("JAXFERRY_HOST_THREADS", "default")},
        **contender.facts(times["step_s"]),
    }


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=pathlib.Path, help="folder of profile_SIZE.json")
    parser.add_argument("contender", choices=settings.CONTENDERS)
    parser.add_argument("--size", required=True, choices=settings.BATCHES)
    parser.add_argument("--batch", type=int, required=True, help="rows")
    parser.add_argument("--seq", type=int, required=True, help="tokens per row")
    parser.add_argument("--steps", type=int, required=True, help="timed steps")
    parser.add_argument("--limit", type=float, required=True, help="seconds for this contender")
    parser.add_argument("--memory-budget", type=int, help="bytes")
    parser.add_argument("--attention", help="xla or cudnn; default: the device's own")
    return parser.parse_args()


if __name__ == "__main__":
    print(json.dumps(run(parse())))
