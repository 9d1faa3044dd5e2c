"""One of several processes that train together, each on devices of its own: `start` runs them all.

python process_runs.py ADDRESS NUM_PROCESSES PROCESS NUM_DEVICES FOLDER SCENARIO

Prints what it found as JSON.
"""

import faulthandler
import functools
import json
import math
import os
import random
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

from process_disks import Disks
from process_starts import Starts

TESTS = Path(__file__).parents[1]
BATCH, NUM_STEPS, NUM_LONG = 8, 5, 20
OPTIONS = {
    "accumulate": {"accumulate": 2, "clip_norm": 0.5},
    "weighed": {"accumulate": 2, "weight": "num_even"},
    "scaled": {"loss_scale": "dynamic", "skip_nonfinite": True},
    "offloaded": {"remat": "full", "offload_activations": True},
    "planned": {"policy": "auto", "profile": "estimate", "memory_budget": "1MiB"},
    "recorded": {"record_steps": 2},
    "read": {"plan": True},
    "read and written": {"plan": True, "accumulate": 2, "clip_norm": 0.5},
}
"""Options of a training step; `plan` stands for that of `Member.read_plan`."""
SHUFFLED = {"overlapped": {}, "clipped": {"clip_norm": 0.5}, "read": {"plan": True}}
QUICKLY = "--xla_backend_optimization_level=0"
"""The flag with which XLA compiles quickly."""
HANGS_AFTER_S = 3
KINDS = ("frozen", "joint", "mixed", "scanned", "whole")
"""Models and optimizers of `kind`."""
HEARTBEAT_TIMEOUT_S, JOIN_TIMEOUT_S, SURVIVORS_END_IN_S = 10, 40, 60
"""After how long a process counts as dead, or as missing, and within which time the others end, on a busy machine."""


def start(scenario, num_processes, num_devices, folder, timeout_s=600, meanwhile=None, script=__file__, flags=QUICKLY):
    """Runs a scenario; returns what each process has printed, or of those that failed the end of their errors.

    Args:
      scenario: a method of `Member`.
      num_processes: how many run.
      num_devices: the devices of each.
      folder: where they may write.
      timeout_s: how long they may take.
      meanwhile: called with the processes while they run.
      script: what each runs; it calls `main` with a class of its own scenarios.
      flags: further flags of XLA.
    """
    address = free_address()
    flags = f"--xla_force_host_platform_device_count={num_devices} {flags}"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    common = [sys.executable, script, address, str(num_processes)]
    rest = [str(num_devices), str(folder), scenario]
    running = [
        subprocess.Popen(
            [*common, str(number), *rest], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for number in range(num_processes)
    ]
    pairs = zip(running, _texts_of(running, timeout_s, meanwhile), strict=True)
    return [
        json.loads(out.splitlines()[-1]) if not process.returncode else err[-3000:] for process, (out, err) in pairs
    ]


def command(num_processes, arguments, timeout_s=300, meanwhile=None):
    """Runs `jaxferry` in several processes; returns status, output and errors of each."""
    address = free_address()
    common = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COORDINATOR_ADDRESS": address}
    common |= {"JAX_NUM_PROCESSES": str(num_processes), "XLA_FLAGS": QUICKLY}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "jaxferry", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**common, "JAX_PROCESS_ID": str(number)},
        )
        for number in range(num_processes)
    ]
    pairs = zip(running, _texts_of(running, timeout_s, meanwhile), strict=True)
    return [(process.returncode, *texts) for process, texts in pairs]


def free_address():
    """An address on this machine that nothing listens to."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


def _texts_of(running, timeout_s, meanwhile):
    """Output and errors of each process once all have ended."""
    try:
        if meanwhile is not None:
            meanwhile(running)
        return [process.communicate(timeout=timeout_s) for process in running]
    finally:
        for process in running:
            process.kill()


class Member(Starts, Disks):
    """A process of the training, with its part of each batch."""

    def __init__(self, folder):
        import jax
        import optax

        import jaxferry
        from processes import test_mesh

        self.number, self.folder, self.model = jax.process_index(), folder, test_mesh
        self.mesh, self._step_of, self._adam = (
            jax.make_mesh((jax.device_count(),), ("data",)),
            jaxferry.train_step,
            optax,
        )

    def step(self, loss_fn=None, **options):
        """A training step over all devices."""
        if options.get("plan"):
            options["plan"] = self.read_plan()
        return self._step_of(loss_fn or self.model.loss_fn, self._adam.adamw(1e-2), mesh=self.mesh, **options)

    def own(self, batch):
        """This process's rows."""
        import jax

        rows = BATCH // jax.process_count()
        return jax.tree.map(lambda array: array[self.number * rows : (self.number + 1) * rows], batch)

    def train(self, step, state, num_steps=NUM_STEPS, first=0):
        """Trains; returns the state, the losses and the last metrics."""
        losses = []
        for batch, key in self.model.batches(num_steps, BATCH)[first:]:
            state, metrics = step(state, self.own(batch), key)
            losses.append(float(metrics["loss"]))
        return state, losses, metrics

    def trains(self):
        """Losses, parameters, checkpoints, and what the processes must not differ in."""
        import jax
        import numpy as np

        from jaxferry.processes import distributed

        step = self.step(clip_norm=0.5)
        state, losses, metrics = self.train(step, step.init(self.model.params()))
        batch, key = self.model.batches(1, BATCH)[0]
        found = {"losses": losses, "norm": float(metrics["grad_norm"]), "host": host_bytes(step, state)}
        found["evaluated"] = float(step.evaluate(state, self.own(batch), key)[0])
        alike = distributed.alike((batch, key))
        found["given whole"] = [float(step.evaluate(state, *alike)[0]), bool(distributed.whole(alike)[1] == key)]
        found["params"] = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(state.params)]
        found["shapes"] = list(metrics["aux"]["logits"].shape)
        found["read"], found["nonfinite"] = self.reads(batch, key), self.nonfinites()
        found["device"] = self.device_bytes(step, step.init(self.model.params()))

        step.save(state, self.folder / "state")
        again = step.restore(self.folder / "state")
        (_, after, _), (_, after_restore, _) = self.train(step, state), self.train(step, again)
        found["restored"] = after == after_restore
        step.save(state, self.folder / "later", wait=False)
        found["later"] = step.restore(self.folder / "later").step
        found["errors"] = {"unwritable": _error(lambda: step.save(state, "/proc/nowhere/state"))}
        for name, path, extra in (
            ("paths", f"differs {self.number}", {}),
            ("extra", "extra", {"a": np.full(2, self.number)}),
            ("extra of one", "extra", {"a": "text" if self.number else np.ones(2)}),
        ):
            found["errors"][name] = _error(functools.partial(step.save, state, self.folder / path, extra=extra))
        found["refused saves"] = [path.name for path in (*self.folder.glob("differs *"), *self.folder.glob("extra*"))]
        (self.folder / "state" / "save_0").rename(self.folder / "gone") if self.number == 0 else None

        def twice(*given):
            loss, aux = self.model.loss_fn(*given)
            return 2 * loss, aux

        def differing(rows=BATCH, loss_fn=None, **options):
            other = self.step(loss_fn, **options)
            other.declare(self.model.params())
            batch, key = self.model.batches(1, rows)[0]
            return _error(lambda: other.prepare(batch, key))

        is_other = self.number == 1
        found["errors"]["shapes"] = differing(rows=4 if is_other else 8)
        found["errors"]["code"] = differing(loss_fn=twice if is_other else None)
        found["errors"]["optimizer"] = differing(clip_norm=0.5 if is_other else 1.0)
        found["errors"]["scratch"] = differing(**({"scratch": self.folder} if is_other else {}))
        found["errors"]["profile"] = differing(profile="measure" if is_other else "estimate", policy="auto")
        params = self.model.params()
        params["first"]["b"] += float(is_other)
        found["errors"]["parameters"] = _error(lambda: self.step().init(params))
        found["errors"]["plan"] = differing(remat="full" if is_other else "none")
        return found | {"measured": self.measures(), "disks": self.disks()}

    def options(self):
        """Losses with other options."""
        found = {}
        for name, options in OPTIONS.items():
            step = self.step(**options)
            found[name] = self.train(step, step.init(self.model.params()), NUM_LONG)[1]
        return found

    def kinds(self):
        """Losses and states of other models and optimizers; they are saved, copied, assigned and go on."""
        import jax
        import numpy as np

        found = {}
        for name in KINDS:
            params, loss_fn, optimizer, options = kind(name)
            step = self._step_of(loss_fn, optimizer, mesh=self.mesh, **options)
            state, losses = step.init(params), []
            for number, batch in enumerate(plain_batches()):
                state, metrics = step(state, self.own(batch))
                losses.append(float(metrics["loss"]))
                if number == 1:
                    step.save(state, self.folder / name)
                    state = step.restore(self.folder / name)
                if number == 2:
                    copied, state.params, state.opt_state = state.copy(), state.params, state.opt_state
                    assert all(map(np.array_equal, jax.tree.leaves(copied.params), jax.tree.leaves(state.params)))
            found[name] = {
                "losses": losses,
                "read": self.read_losses(params, loss_fn, optimizer, options, plain_batches()),
                "params": [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(state.params)],
                "state": [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(state.opt_state)],
                "host": host_bytes(step, state),
            }
        return found

    def killed(self):
        """Trains from the last checkpoint, if there is one, and saves after each step, until it is killed.

        Returns the losses from there on.
        """
        import jaxferry

        step, folder = self.step(), self.folder / "series"
        known = jaxferry.list_checkpoints(folder) if folder.exists() else []
        state = step.restore(folder, self.model.params()) if known else step.init(self.model.params())
        first, losses = state.step, []
        for batch, key in self.model.batches(NUM_LONG, BATCH)[first:]:
            state, metrics = step(state, self.own(batch), key)
            losses.append(float(metrics["loss"]))
            step.save(state, folder, keep_last=2, wait=len(losses) % 2 == 0)
        step.wait_for_saves()
        return {"first": first, "losses": losses}

    def shuffles(self):
        """Losses and parameters if each process updates in a random order of its own, and at random moments."""
        import jax
        import numpy as np

        from jaxferry.engine import executor, ready_tasks

        drawn, order = random.Random(self.number), []

        def take(heap):
            return heap.pop(drawn.randrange(len(heap)))

        def late(action):
            def run(step, instruction):
                time.sleep(0.03 * drawn.random())
                order.append(instruction.task.name)
                return action(step, instruction)

            return run

        ready_tasks.heapq = types.SimpleNamespace(heappush=lambda heap, item: heap.append(item), heappop=take)
        for operation in (executor.Operation.UPDATE, executor.Operation.OFFLOAD, executor.Operation.LOAD):
            executor.OPERATIONS[operation] = late(executor.OPERATIONS[operation])
        found = {}
        for name, options in SHUFFLED.items():
            step = self.step(**options)
            state, losses, _ = self.train(step, step.init(self.model.params()), NUM_LONG)
            params = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(state.params)]
            found[name] = {"losses": losses, "params": params}
        return {"trained": found, "order": [name for name in order if name.startswith("update")]}

    def hangs(self):
        """One process is alive, but does not begin its last step."""
        from jaxferry.processes import coordination_client, watch

        watch(coordination_client(), self.number, HANGS_AFTER_S)
        step = self.step()
        state, _, _ = self.train(step, step.init(self.model.params()))
        if self.number == 1:
            time.sleep(100 * HANGS_AFTER_S)
        self.train(step, state)


def plain_batches():
    """Batches of `kind`."""
    import numpy as np

    generator = np.random.default_rng(1)
    return [{"x": generator.normal(size=(BATCH, WIDTH)).astype(np.float32)} for _ in range(NUM_STEPS)]


WIDTH, LENGTH = 6, 3


def kind(name):
    """Parameters, loss function, optimizer and options of one of `KINDS`; with scalars, and sizes that are ragged."""
    import jax
    import jax.numpy as jnp
    import optax

    keys = jax.random.split(jax.random.key(2), 3)
    params = {
        "in": {"w": jax.random.normal(keys[0], (WIDTH, WIDTH)), "scale": jnp.float32(0.9)},
        "layers": {"w": 0.5 * jax.random.normal(keys[1], (LENGTH, WIDTH, WIDTH)), "scale": jnp.ones(LENGTH)},
        "out": {"w": jax.random.normal(keys[2], (WIDTH, 1)), "b": jnp.zeros(1)},
    }

    def block(x, own):
        return x + own["scale"] * jnp.tanh(x @ own["w"]), None

    def loss_fn(params, batch):
        x = batch["x"] @ params["in"]["w"] * params["in"]["scale"]
        x = jax.lax.scan(block, x, params["layers"])[0]
        return ((x @ params["out"]["w"] + params["out"]["b"]) ** 2).mean()

    by_name = {"layers": "trust", "in": "adam", "out": "adam"}
    labels = {top: jax.tree.map(lambda _, top=top: by_name[top], own) for top, own in params.items()}
    optimizers = {
        "frozen": optax.chain(optax.adamw(1e-2), optax.contrib.reduce_on_plateau(0.5, patience=1, rtol=0.9)),
        "joint": optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2)),
        "mixed": optax.multi_transform({"trust": optax.lamb(1e-2), "adam": optax.adam(1e-2)}, labels),
        "scanned": optax.inject_hyperparams(optax.adamw)(learning_rate=1e-2),
        "whole": optax.adafactor(1e-2),
    }
    options = {"trainable": lambda path: "in" not in path} if name == "frozen" else {}
    return params, loss_fn, optimizers[name], options


def host_bytes(step, state):
    """The bytes that a process holds in host memory, and those that it predicts."""
    import jax

    state.block_until_ready()
    units = [array for unit in state.host.units for array in (*unit.masters, *unit.state)]
    vectors = [shard.data for own in state.host.vectors for vector in own for shard in vector.addressable_shards]
    found = [sum(array.nbytes for array in arrays) for arrays in (units, vectors)]
    predicted = step.compiler.model.host_bytes(state.host.layers)
    shapes = step.compiler.model.optimizer.state_shapes.values()
    whole = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*jax.tree.leaves(step.compiler.model.params), *shapes))
    return {
        "held": found[0],
        "copy": found[1],
        "predicted": predicted["master parameters"] + predicted["optimizer state"],
        "predicted copy": predicted["compute copy"],
        "whole": whole,
    }


def _error(action):
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return "none"


def main(member=Member):
    """Runs one process.

    Args:
      member: the class of its scenarios.
    """
    address, num_processes, number, num_devices, folder, scenario = sys.argv[1:]
    sys.path[:0] = [str(TESTS), str(TESTS / "support")]
    faulthandler.dump_traceback_later(float(os.environ.get("HANGS_AFTER_S", "400")), exit=True)
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    os.environ.update(zip(names, (address, num_processes, number), strict=True))
    import jax

    from jaxferry.processes import distributed

    distributed.start(join_timeout_s=JOIN_TIMEOUT_S, heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S)
    assert jax.local_device_count() == int(num_devices)
    print(json.dumps(getattr(member(Path(folder)), scenario)()))


if __name__ == "__main__":
    main()
