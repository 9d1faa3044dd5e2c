"""Single attacks on the library: each does one random harm and asserts that nothing is lost or silently wrong.

An attack is a function of a random number generator and of what the attacks share (`Shared`). It raises if the library
loses something, or answers with another error than the documented one.
"""

import contextlib
import copy
import dataclasses
import functools
import json
import os
import shutil
import signal
import tempfile
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

import jaxferry
import killed_saves
from checkpoints import content, plain
from jaxferry import checkpoint
from jaxferry.cli.recording import Recording
from jaxferry.cli.report import report_page
from jaxferry.costs import Profile
from jaxferry.errors import InputError
from jaxferry.modes import GradientPlace, Mode, UpdatePlace
from jaxferry.partition import partition
from jaxferry.planner import make_plan, policies
from jaxferry.step import LayerPlan, Plan
from jaxferry.weights import Instance
from models import Task, plain_loop
from planned import assert_same_bits, take_steps
from profiles import INSTANCE, transformer

ABOUT = "save_0/about/metadata"
LOSS_RTOL = 2e-5
BATCH = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)


class Shared(contextlib.ExitStack):
    """What the attacks of a campaign share; a context.

    Attributes:
      folder: where they may keep what all tries share.
    """

    def __init__(self):
        super().__init__()
        self.folder = Path(self.enter_context(tempfile.TemporaryDirectory(prefix="jaxferry-attack-")))
        self._scratch = self.folder

    @contextlib.contextmanager
    def one_try(self):
        """A context that deletes the folders of one try."""
        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:
            self._scratch = Path(scratch)
            yield

    @functools.cached_property
    def saves(self):
        """Forks processes that save and are killed, also at a system call where there is a C compiler."""
        (self.folder / "counter").mkdir()
        counter = killed_saves.COMPILER and killed_saves.build_counter(self.folder / "counter")
        return self.enter_context(killed_saves.server(counter))

    @functools.cached_property
    def num_calls(self):
        """The number of system calls of a save that replaces a checkpoint; None without a C compiler."""
        path = self.fresh() / "saved"
        checkpoint.save(content(1), path)
        (answer,) = self.saves.ask(path=path, seeds=[2], kill_at_call=10**9) if killed_saves.COMPILER else [{}]
        return answer.get("calls")

    @functools.cached_property
    def good(self):
        """A checkpoint."""
        checkpoint.save(content(), self.folder / "good")
        return self.folder / "good"

    def fresh(self):
        """An empty folder, for this try."""
        return Path(tempfile.mkdtemp(dir=self._scratch))

    def damaged(self):
        """A copy of a good checkpoint."""
        return shutil.copytree(self.good, self.fresh() / "saved")


def loaded(path):
    """The content of a checkpoint; None if it is refused by the documented error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return plain(checkpoint.load(path))
        except jaxferry.CheckpointError as error:
            assert str(path) in str(error), error
            return None


def flip(rng, shared):
    """Flips bits of a file of a checkpoint."""
    saved = shared.damaged()
    file = rng.choice([path for path in sorted(saved.rglob("*")) if path.is_file() and path.stat().st_size])
    data = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 8])):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    file.write_bytes(data)
    assert loaded(saved) in (None, plain(content())), file


def cut(rng, shared):
    """Cuts a file of a checkpoint short, empties it, or deletes it."""
    saved = shared.damaged()
    file = rng.choice([path for path in sorted(saved.rglob("*")) if path.is_file()])
    if rng.random() < 0.3:
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: rng.randrange(file.stat().st_size + 1)])
    assert loaded(saved) in (None, plain(content())), file


def about(rng, shared):
    """Changes the JSON about a checkpoint."""
    saved = shared.damaged()
    document = json.loads((saved / ABOUT).read_text())
    (saved / ABOUT).write_text(json.dumps(mutated(document, rng)))
    assert loaded(saved) in (None, plain(content()))


def kill(rng, shared):
    """Kills processes that replace a checkpoint, one after the other, at a random moment or system call."""
    path = shared.fresh() / "saved"
    checkpoint.save(content(1), path)
    found = plain(content(1))
    for seed in (2, 4, 5):
        kill = {"kill_after_s": rng.uniform(0, 0.3)}
        if shared.num_calls is not None and rng.random() < 0.5:
            kill = {"kill_at_call": rng.randint(1, shared.num_calls)}
        shared.saves.ask(path=path, seeds=[seed], **kill)
        before, found = found, loaded(path)
        assert found in (before, plain(content(seed))), kill
    checkpoint_of_others_is_swept(path)


def checkpoint_of_others_is_swept(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint.save(content(3), path)
    assert [entry.name for entry in path.parent.iterdir()] == ["saved"]
    assert loaded(path) == plain(content(3))


def race(rng, shared):
    """Two processes replace one checkpoint again and again while it is read."""
    path = shared.fresh() / "saved"
    checkpoint.save(content(0), path)
    allowed = [plain(content(seed)) for seed in range(3)]
    shared.saves.start(path=path, seeds=[1, 2], repeat=rng.randint(1, 4))
    reads = [loaded(path) for _ in range(rng.randint(2, 12))]
    assert [answer.get("error") for answer in shared.saves.answer()] == [None, None]
    assert all(read in allowed for read in reads)
    assert loaded(path) in allowed[1:]
    assert [entry.name for entry in path.parent.iterdir()] == ["saved"]


def full_disk(rng, shared):
    """Limits the size of files to what a checkpoint's do not keep to."""
    path = shared.fresh() / "saved"
    checkpoint.save(content(1), path)
    (answer,) = shared.saves.ask(path=path, seeds=[2], max_file_bytes=rng.randrange(4000))
    if "error" in answer:
        assert answer["error"].startswith(f"CheckpointError: cannot write to {path}: "), answer
        assert loaded(path) == plain(content(1))
    else:
        assert loaded(path) == plain(content(2))
    assert [entry.name for entry in path.parent.iterdir()] == ["saved"]


def records(rng, shared):
    """Reads records with a random change; they are refused by a line, or written as read. Recordings become pages."""
    profile = transformer(rng.randrange(2, 6), rng.randrange(99))
    plan = make_plan(profile, "memferry")
    kind, document = rng.choice(
        [
            (Profile, profile.to_json()),
            (Plan, plan.to_json()),
            (Instance, INSTANCE),
            (Recording, recording(profile, plan).to_json()),
        ]
    )
    try:
        record = kind.from_json(mutated(copy.deepcopy(document), rng))
    except InputError as error:
        assert str(error) and "\n" not in str(error)
        return
    if hasattr(record, "to_json"):
        assert kind.from_json(json.loads(json.dumps(record.to_json()))) == record
    if kind is Recording:
        report_page(record)


def recording(profile, plan):
    """A recording of some steps as the machine model predicts them."""
    memory = {"device_bytes": {"parameters": ((0.0, 5), (1.0, 2))}, "host_bytes": {"gradients": 7}}
    about = {"model": "a model", "machine": {"name": "a machine"}, "accumulate": 1, "memory_budget_bytes": None}
    made = Recording(**about, plan=plan, profile=profile, tasks=(), **memory)
    return dataclasses.replace(made, tasks=made.predicted)


def budget(rng, shared):
    """Plans within a random budget; the plan fits, or the error names a budget that does."""
    profile = transformer(rng.randrange(2, 12), rng.randrange(999), tied=rng.random() < 0.3)
    policy, size = rng.choice(sorted(policies())), int(10 ** rng.uniform(6, 10))
    try:
        plan = make_plan(profile, policy, memory_budget_bytes=size)
    except jaxferry.BudgetError as error:
        assert error.smallest_bytes > size
        size = error.smallest_bytes
        plan = make_plan(profile, policy, memory_budget_bytes=size)
    assert plan.predicted.peak_device_bytes <= size


def model(rng, shared):
    """Trains a random model under a random plan beside plain Optax."""
    loss_fn, params = random_model(rng)
    train_beside_optax(rng, loss_fn, params, random_plan(rng, names_of_layers(loss_fn, params)))


def policy(rng, shared):
    """Trains a random model under a policy's plan for random costs beside plain Optax."""
    loss_fn, params = random_model(rng)
    names = names_of_layers(loss_fn, params)
    layers = transformer(len(names), rng.randrange(999)).layers
    layers = [
        dataclasses.replace(layer, name=name, parameters=name.partition("#")[0])
        for layer, name in zip(layers, names, strict=True)
    ]
    sizes = {layer.parameters: layer.param_bytes for layer in layers}
    layers = [dataclasses.replace(layer, param_bytes=sizes[layer.parameters]) for layer in layers]
    plan = make_plan(Profile({}, tuple(layers)), rng.choice(sorted(policies())), reserve_factor=rng.choice([0, 0.5, 1]))
    train_beside_optax(rng, loss_fn, params, plan)


def names_of_layers(loss_fn, params):
    return [segment.name for segment in partition(loss_fn, params, (BATCH,)).segments]


def train_beside_optax(rng, loss_fn, params, plan):
    """Four steps under the plan, with random options; the losses are those of plain Optax."""
    optimizer = rng.choice(
        [
            # With their usual eps, or by signs, updates say nothing where a gradient is no more than rounding.
            jaxferry.adamw(1e-2, eps=1e-5),
            optax.adam(1e-2, eps=1e-5),
            optax.sgd(1e-2, momentum=0.9),
            optax.rmsprop(1e-3, eps=1e-5),
        ]
    )
    options = rng.choice([{}, {"clip_norm": 0.1}, {"accumulate": 2}, {"remat": "full"}, {"skip_nonfinite": True}])
    options = {"plan": plan, **options, "transport": rng.choice(["ferry", "device_put"])}
    every, clip = options.get("accumulate", 1), options.get("clip_norm")
    reference = optax.chain(optax.clip_by_global_norm(clip), optimizer) if clip else optimizer
    reference = optax.MultiSteps(reference, every) if every > 1 else reference
    step = jaxferry.train_step(loss_fn, optimizer, **options)
    state, losses = take_steps(step, step.init(params), [BATCH] * 4)
    _, expected = plain_loop(Task(loss_fn, params, BATCH), reference, 4)
    np.testing.assert_allclose(losses, expected, rtol=LOSS_RTOL, err_msg=str(options))
    state.settle()


def random_model(rng):
    """A chain of layers of random widths, one of which may be used twice."""
    numbers = np.random.default_rng(rng.randrange(2**32))
    count, width = rng.randrange(1, 5), BATCH.shape[1]
    params = {
        f"l{i}": {"w": numbers.normal(size=(width, width)).astype(np.float32) / 4, "b": np.zeros(width, np.float32)}
        for i in range(count)
    }
    order = [*range(count), *([0] if rng.random() < 0.3 else [])]

    def loss_fn(params, batch):
        x = batch
        for i in order:
            x = x + jnp.tanh(x @ params[f"l{i}"]["w"] + params[f"l{i}"]["b"])
        return jnp.mean(jnp.square(x))

    return loss_fn, params


def random_plan(rng, names):
    """Random modes and gradients; uses of one layer agree on where it is updated."""
    groups = sorted({name.partition("#")[0] for name in names})
    on_device = {group for group in groups if rng.random() < 0.25}
    layers = [
        LayerPlan(name, Mode.RESIDENT, update=UpdatePlace.RESIDENT)
        if name.partition("#")[0] in on_device
        else LayerPlan(name, rng.choice(list(Mode)), rng.choice(list(GradientPlace)))
        for name in names
    ]
    return Plan("random", 1.0, tuple(layers), update_order=rng.choice(["backward", "need"]))


def interrupt(rng, shared):
    """A signal whose handler raises comes at any moment of a step; the state is that before or after it."""
    loss_fn, params = random_model(rng)
    step = jaxferry.train_step(loss_fn, jaxferry.adamw(1e-2))
    expected, reference = [params], step.init(params)
    for _ in range(3):
        reference, _ = step(reference, BATCH)
        expected.append(reference.params)
    state = step.init(params)

    def leave(number, frame):
        raise SystemExit(number)

    before = signal.signal(signal.SIGALRM, leave)
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 3e-2))
        while state.step < 2:
            state, _ = step(state, BATCH)
    except SystemExit:
        pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    while state.step < 3:
        assert_same_bits(state.params, expected[state.step])
        state, _ = step(state, BATCH)
    assert_same_bits(state.params, expected[3])


def fork(rng, shared):
    """A forked child uses the step; it is refused at once, and the parent goes on."""
    loss_fn, params = random_model(rng)
    step = jaxferry.train_step(loss_fn, optax.sgd(1e-2))
    state = step.init(params)
    state, _ = step(state, BATCH)
    use = rng.choice([lambda: step(state, BATCH), lambda: step.init(params), lambda: step.evaluate(state, BATCH)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(30)  # a child that hangs is killed
            use()
        except jaxferry.StateError:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    step(state, BATCH)


_NUMBERS = [0, -1, 1.5, 1e300, float("nan"), float("inf"), 2**70]
_ODD: list[object] = [*_NUMBERS, None, True, False, "", "x", "\u0000", "1" * 99, [], {}, [[]]]


def mutated(document, rng):
    """The document with one random place replaced, deleted, renamed or doubled."""
    place, key = document, None
    parent = None
    while isinstance(place, (dict, list)) and place and (parent is None or rng.random() < 0.85):
        parent, key = place, rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        place = parent[key]
    if parent is None:
        return rng.choice(_ODD)
    how = rng.choice(["replace", "replace", "delete", "rename", "double"])
    if how == "delete":
        del parent[key]
    elif how == "rename" and isinstance(parent, dict):
        parent[f"{key}{rng.choice(['_', 'x', ' '])}"] = parent.pop(key)
    elif how == "double" and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(place))
    else:
        parent[key] = copy.deepcopy(rng.choice(_ODD))
    return document


ATTACKS = {
    function.__name__.replace("_", "-"): function
    for function in (flip, cut, about, kill, race, full_disk, records, budget, model, policy, interrupt, fork)
}
