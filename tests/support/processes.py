"""One of several processes that train together, each on devices of its own: `start` runs them all.

python processes.py ADDRESS NUM_PROCESSES PROCESS NUM_DEVICES FOLDER SCENARIO

Prints what it found as JSON.
"""

import faulthandler
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
BATCH, NUM_STEPS = 8, 5
OPTIONS = {
    "accumulate": {"accumulate": 2, "clip_norm": 0.5},
    "scaled": {"loss_scale": "dynamic", "skip_nonfinite": True},
    "offloaded": {"remat": "full", "offload_activations": True},
    "planned": {"policy": "auto", "profile": "estimate", "memory_budget": "1MiB"},
    "recorded": {"record_steps": 2},
}
SURVIVORS_END_IN_S = 200
"""JAX notices within 100 s that a process is gone, and takes some time to end the others."""


def start(scenario, num_processes, num_devices, folder, python=sys.executable, timeout_s=600):
    """Runs a scenario; returns what each process has printed, or of those that failed the end of their errors."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={num_devices} --xla_backend_optimization_level=0"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    common = [python, __file__, address, str(num_processes)]
    rest = [str(num_devices), str(folder), scenario]
    running = [
        subprocess.Popen(
            [*common, str(number), *rest], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )
        for number in range(num_processes)
    ]
    try:
        ended = [process.communicate(timeout=timeout_s) for process in running]
    finally:
        for process in running:
            process.kill()
    pairs = zip(running, ended, strict=True)
    return [
        json.loads(out.splitlines()[-1]) if not process.returncode else err[-3000:] for process, (out, err) in pairs
    ]


class Member:
    """A process of the training, with its part of each batch."""

    def __init__(self, folder):
        import jax
        import optax

        import jaxferry
        import test_mesh

        self.number, self.folder, self.model = jax.process_index(), folder, test_mesh
        self.mesh, self._step_of, self._adam = (
            jax.make_mesh((jax.device_count(),), ("data",)),
            jaxferry.train_step,
            optax,
        )

    def step(self, loss_fn=None, **options):
        """A training step over all devices."""
        return self._step_of(loss_fn or self.model.loss_fn, self._adam.adamw(1e-2), mesh=self.mesh, **options)

    def own(self, batch):
        """This process's rows."""
        import jax

        rows = BATCH // jax.process_count()
        return {name: array[self.number * rows : (self.number + 1) * rows] for name, array in batch.items()}

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

        step = self.step(clip_norm=0.5)
        state, losses, metrics = self.train(step, step.init(self.model.params()))
        batch, key = self.model.batches(1, BATCH)[0]
        found = {"losses": losses, "norm": float(metrics["grad_norm"])}
        found["evaluated"] = float(step.evaluate(state, self.own(batch), key)[0])
        found["params"] = [np.asarray(leaf).tolist() for leaf in jax.tree.leaves(state.params)]
        found["shapes"] = list(metrics["aux"]["logits"].shape)
        found["held"] = step.prepare(self.own(batch), key).peak.held

        step.save(state, self.folder / "state")
        again = step.restore(self.folder / "state")
        (_, after, _), (_, after_restore, _) = self.train(step, state), self.train(step, again)
        found["restored"] = after == after_restore
        step.save(state, self.folder / "later", wait=False)
        found["later"] = step.restore(self.folder / "later").step
        found["errors"] = {"unwritable": _error(lambda: step.save(state, "/proc/nowhere/state"))}
        (self.folder / "state" / "arrays").rename(self.folder / "gone") if self.number == 0 else None

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
        found["errors"]["plan"] = differing(remat="full" if is_other else "none")
        return found

    def options(self):
        """Losses with other options."""
        found = {}
        for name, options in OPTIONS.items():
            step = self.step(**options)
            found[name] = self.train(step, step.init(self.model.params()))[1]
        return found

    def dies(self):
        """One process is killed after a checkpoint; how the other ends is for the caller to see."""
        step = self.step()
        state, losses, _ = self.train(step, step.init(self.model.params()))
        step.save(state, self.folder / "state")
        if self.number == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start_s = time.monotonic()
        try:
            self.train(step, state, 1000)
        except Exception as error:  # noqa: BLE001 - which one is JAX's affair
            return {"error": str(error)[:500], "seconds": time.monotonic() - start_s}
        return losses

    def goes_on(self):
        """Training from the checkpoint that `dies` has left."""
        step = self.step()
        state = step.restore(self.folder / "state", self.model.params())
        return {"step": state.step, "losses": self.train(step, state)[1]}


def _error(action):
    try:
        action()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return "none"


def main():
    """Runs one process."""
    address, num_processes, number, num_devices, folder, scenario = sys.argv[1:]
    sys.path[:0] = [str(TESTS), str(TESTS / "support")]
    faulthandler.dump_traceback_later(float(os.environ.get("HANGS_AFTER_S", "400")), exit=True)
    import jax

    jax.distributed.initialize(address, int(num_processes), int(number))
    assert jax.local_device_count() == int(num_devices)
    print(json.dumps(getattr(Member(Path(folder)), scenario)()))


if __name__ == "__main__":
    main()
