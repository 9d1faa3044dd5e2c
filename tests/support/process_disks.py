"""Scenarios of several processes (`process_runs.Member`): masters and optimizer state in a scratch file of each."""

DEPTH, WIDTH, NUM_STEPS, NUM_ROWS = 6, 65, 4, 8  # of sizes that no number of processes divides
CASES = ("own", "optax", "rounded")
SECONDS_A_BYTE = (1e-9, 3e-9)
"""What a byte takes from the first process's disk, and to it; from that of the second one, twice that, and so on."""
LEAST_BYTES = 64
"""What is in the file, small as the models are, but for counts."""


def parameters():
    """Layers of one size."""
    import numpy as np

    generator = np.random.default_rng(0)
    return {f"l{i}": {"w": generator.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 8} for i in range(DEPTH)}


def rows():
    """Rows of each step."""
    import numpy as np

    return np.random.default_rng(1).normal(size=(NUM_STEPS, NUM_ROWS, WIDTH)).astype(np.float32)


def step_of(case, **options):
    """A training step of one of the `CASES`."""
    import jax.numpy as jnp
    import optax

    import jaxferry
    from models import chain

    optimizer, own = {
        "own": (jaxferry.adamw(1e-2), {"compute_dtype": jnp.bfloat16, "clip_norm": 0.5}),
        "optax": (optax.adamw(1e-2), {"accumulate": 2}),
        "rounded": (
            jaxferry.adamw(1e-2, masters="bfloat16"),
            {"compute_dtype": jnp.bfloat16, "policy": "auto", "profile": "estimate"},
        ),
    }[case]
    return jaxferry.train_step(chain(), optimizer, **own, **options)


def bits(state):
    """Parameters and optimizer state of a training state, as the digest of their bits."""
    import hashlib

    import jax
    import numpy as np

    leaves = jax.tree.leaves((state.params, state.opt_state))
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in leaves)).hexdigest()


def save_alone(folder):
    """Saves a checkpoint of one process, with a scratch file."""
    from planned import take_steps

    step = step_of("own", scratch=folder, host_memory=1)
    state, _ = take_steps(step, step.init(parameters()), rows())
    step.save(state, folder / "alone")


class Disks:
    """Scenarios of `process_runs.Member`."""

    def disks(self):
        """The same training with and without scratch files; one process has memory for more layers than the others."""
        from jaxferry.optimizer import Scratch, on_disk

        on_disk._LEAST_BYTES = LEAST_BYTES
        Scratch.seconds_a_byte = lambda file: tuple((1 + self.number) * own for own in SECONDS_A_BYTE)
        (self.folder / "scratch").mkdir(exist_ok=True)
        return {case: self.disk(case) for case in CASES}

    def disk(self, case):
        """One of the cases."""
        from planned import take_steps

        given = list(map(self.own, rows()))
        plain = step_of(case, mesh=self.mesh)
        plain.declare(parameters())
        host_bytes = plain.compiler.model.host_bytes()
        layer_bytes = (host_bytes["master parameters"] + host_bytes["optimizer state"]) // DEPTH
        # With three slots, the first process needs five layers on the disk, and the others none.
        limit = sum(host_bytes.values()) - 3 * layer_bytes // 2 if self.number == 0 else "1GiB"
        disk = step_of(case, mesh=self.mesh, scratch=self.folder / "scratch", host_memory=limit)
        states, losses = [], []
        for step in (plain, disk):
            state, own = take_steps(step, step.init(parameters()), given)
            states.append(state)
            losses.append(own)
        found = {"losses": losses, "bits": [list(map(bits, states))]}
        found["groups"] = [unit.layers[0] for unit in states[1].host.units if unit.is_on_disk]
        copy = states[1].copy()
        found["copied"] = [unit.layers[0] for unit in copy.host.units if unit.is_on_disk]
        disk.save(states[1], self.folder / case, wait=False)
        for step, state in zip((plain, disk), states, strict=True):
            take_steps(step, state, given[:2])
            state.params, state.opt_state = state.params, state.opt_state
            take_steps(step, state, given[:2])
        disk.wait_for_saves()
        found["bits"] += [list(map(bits, states)), [found["bits"][0][0], bits(copy)]]
        found["bits"].append([found["bits"][0][0], bits(plain.restore(self.folder / case))])
        if case == "own":
            found["alone"] = bits(disk.restore(self.folder / "alone"))
            disk.apply(states[1], lambda params, x: x @ (params["l1"]["w"] + params["l5"]["w"]), given[0])
            found["bits"].append(list(map(bits, states)))
            layers = states[1].host.layers
            found["rearranged"] = [layers[unit.layers[0]].name for unit in states[1].host.units if unit.is_on_disk]
        profile = disk.prepare(given[0]).profile
        found["seconds"] = [(layer.state_read_s, layer.state_write_s) for layer in profile.layers]
        found["rates"] = disk.compiler.model.disk.seconds_a_byte
        return found
