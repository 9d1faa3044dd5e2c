"""Scenarios of several processes (`process_runs.Member`): where parameters come from, what `apply` returns, layers read
in host memory, and shares of gradients that are not finite."""

NUM_WORDS, NUM_COLUMNS = 11, 7
CASES = ("skipped", "refused", "clipped", "accumulated", "scaled")
"""Where one element of a gradient is not finite, while the loss is: see `nonfinite_step`."""


def init_params(rng):
    """Parameters of sizes that no number of processes divides, of draws that `init_from` computes layer by layer."""
    import jax

    keys = jax.random.split(rng, 2)
    return {
        "table": {"w": jax.random.normal(keys[0], (NUM_WORDS, NUM_COLUMNS))},
        "head": {"w": jax.random.normal(keys[1], (NUM_COLUMNS, NUM_WORDS)), "b": jax.numpy.zeros(NUM_WORDS)},
    }


def next_words(params, words):
    """Logits for the word after each row of words."""
    import jax.numpy as jnp

    return jnp.tanh(params["table"]["w"][words]).sum(1) @ params["head"]["w"] + params["head"]["b"]


def word_loss(params, batch):
    """The loss of predicting each row's last word."""
    import jax
    import jax.numpy as jnp

    logits = jax.nn.log_softmax(next_words(params, batch[:, :-1]))
    return -jnp.take_along_axis(logits, batch[:, -1:], 1).mean()


def words_of(num_rows):
    """Rows of words."""
    import numpy as np

    return np.random.default_rng(0).integers(0, NUM_WORDS, (num_rows, 4))


def trained_from(step, state, num_rows, own):
    """Losses of a few steps, and the words that greedy decoding adds to each row."""
    import numpy as np

    from jaxferry.processes import distributed

    losses, words = [], words_of(num_rows)
    for _ in range(3):
        state, metrics = step(state, own(words))
        losses.append(float(metrics["loss"]))
    for _ in range(3):
        logits = distributed.whole(step.apply(state, next_words, own(words)))
        words = np.concatenate([words[:, 1:], logits.argmax(-1)[:, None]], 1)
    return {"losses": losses, "words": words.tolist()}


def stored(folder):
    """The parameters as a safetensors file's tensors, the head's matrix transposed."""
    from jaxferry.checkpoint import pretrained

    tensors = pretrained.open_safetensors(folder / "weights.safetensors")

    def source_of(path):
        return pretrained.Source("/".join(path), is_transposed=path == ("head", "w"))

    import jax

    shapes = jax.eval_shape(init_params, jax.random.key(0))
    return pretrained.arrange(tensors, shapes, source_of)


def nonfinite_step(case, **where):
    """A training step, its parameters, and batches: with the second, the last element's gradient is not finite.

    That element belongs to the last process, the row to the first one.
    """
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxferry

    options = {
        "skipped": {"skip_nonfinite": True},
        "refused": {"check_gradients": True},
        "clipped": {"clip_norm": 1.0},
        "accumulated": {"accumulate": 2, "skip_nonfinite": True},
        "scaled": {"loss_scale": "dynamic"},
    }[case]

    def rooted(params, batch):
        return jnp.sqrt(params["w"] - batch).sum(1).mean()

    def scaled(params, batch):
        return (params["w"] * batch).sum(1).mean()

    good, w = np.zeros((8, NUM_COLUMNS), np.float32), np.ones(NUM_COLUMNS, np.float32)
    bad = good.copy()
    bad[0, -1] = 1.0
    if case == "scaled":
        w[-1] = 1e-30
        bad[0, -1] = 8e34  # the loss's scale, 2^16 at first, makes it overflow
    step = jaxferry.train_step(scaled if case == "scaled" else rooted, optax.sgd(1e-3), **options, **where)
    return step, {"w": w}, [good, bad, good, good]


def nonfinite_results(case, own, **where):
    """What each step says, and the parameters afterwards."""
    import numpy as np

    from jaxferry.errors import NonFiniteError

    step, params, batches = nonfinite_step(case, **where)
    state, told = step.init(params), []
    for batch in batches:
        try:
            state, metrics = step(state, own(batch))
        except NonFiniteError as error:
            told.append([error.step, error.layer])
            continue
        told.append([bool(metrics.get("skipped", False)), float(metrics.get("loss_scale", 1.0))])
    return {"told": told, "step": state.step, "w": np.asarray(state.params["w"]).tolist()}


class Starts:
    """Scenarios of `process_runs.Member`."""

    def starts(self):
        """Models that are initialised layer by layer, or read from a file of which each process reads its part."""
        import jax
        import numpy as np

        from jaxferry.checkpoint import pretrained

        step, num_read, found = self._step_of(word_loss, self._adam.adamw(1e-2), mesh=self.mesh), [0], {}
        state = step.init_from(init_params, jax.random.key(0))
        found["drawn"] = trained_from(step, state, 8, self.own)
        rows = pretrained.StoredTensor.rows

        def counted(tensor, start, stop):
            array = rows(tensor, start, stop)
            num_read[0] += np.asarray(array).nbytes
            return array

        pretrained.StoredTensor.rows = counted
        found["read"] = trained_from(step, step.init(stored(self.folder)), 8, self.own)
        return found | {"num_read": num_read[0]}

    def nonfinites(self):
        """Steps of which one process's share is not finite."""
        return {case: nonfinite_results(case, self.own, mesh=self.mesh) for case in CASES}

    def read_plan(self):
        """Reads parameters and writes gradients in host memory where a layer can."""
        from jaxferry.modes import GradientPlace, Mode

        return self.model.plan((Mode.DHA, Mode.DFGB, Mode.GFGB, Mode.DHA), gradient=GradientPlace.HOST)

    def read_losses(self, params, loss_fn, optimizer, options, batches):
        """Losses if all segments read parameters and write gradients in host memory."""
        from jaxferry.modes import GradientPlace, Mode
        from jaxferry.step import LayerPlan, Plan

        step = self._step_of(loss_fn, optimizer, mesh=self.mesh, **options)
        step.declare(params)
        names = [segment.name for segment in step.prepare(self.own(batches[0])).partition.segments]
        plan = Plan("any", 0.0, tuple(LayerPlan(name, Mode.DHA, gradient=GradientPlace.HOST) for name in names))
        step = self._step_of(loss_fn, optimizer, mesh=self.mesh, plan=plan, **options)
        state, losses = step.init(params), []
        for batch in batches:
            state, metrics = step(state, self.own(batch))
            losses.append(float(metrics["loss"]))
        return losses

    def reads(self, batch, key):
        """Losses, and the bytes of what programs read in host memory, of layers that processes exchange."""
        step = self.step(plan=True, clip_norm=0.5)
        state, losses, _ = self.train(step, step.init(self.model.params()))
        on_device = self.device_bytes(step, state)
        groups = step.prepare(self.own(batch), key).program.read_in_place
        predicted = step.compiler.model.host_bytes(state.host.layers, groups)["copies to read in place"]
        whole = sum(state.host.layers[group].num_bytes for group in groups)
        held = state.host.whole_copies.num_bytes
        return {"losses": losses, "held": held, "predicted": predicted, "whole": whole, "device": on_device}

    def device_bytes(self, step, state):
        """The most bytes on one device during a few steps, and those that are predicted."""
        from watched import most_on_one_device

        held = most_on_one_device(lambda: self.train(step, state))
        state.block_until_ready()
        batch, key = self.model.batches(1, 8)[0]
        return held, step.prepare(self.own(batch), key).peak.array_bytes

    def measures(self):
        """A plan for measured times, of which those of the last process's programs are a second longer."""
        import dataclasses

        import jax

        from brief import measure_briefly
        from jaxferry.training import profiles

        measure_briefly()
        measured, is_last = profiles.MeasuredLayers.profiles, self.number == jax.process_count() - 1

        def late(*given, **more):
            layers = measured(*given, **more)
            return tuple(dataclasses.replace(each, forward_s=each.forward_s + is_last) for each in layers)

        profiles.MeasuredLayers.profiles = late
        options = {"mesh": self.mesh, "policy": "auto", "profile": "measure"}
        step = self._step_of(word_loss, self._adam.adamw(1e-2), **options)
        state, words = step.init(init_params(jax.random.key(0))), self.own(words_of(8))
        losses = [float(step(state, words)[1]["loss"]) for _ in range(2)]
        prepared = step.prepare(words)
        again = step.measure(init_params(jax.random.key(0)), words)
        is_same = [layer.activation_bytes for layer in again.layers] == [
            layer.activation_bytes for layer in prepared.profile.layers
        ]
        profile, plan = prepared.profile.to_json(), prepared.plan.to_json()
        return {"losses": losses, "profile": profile, "plan": plan, "is_same": is_same}
