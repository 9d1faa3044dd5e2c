"""The programs of the host optimizer: initial states, and one donated jitted update for each unit.

    gradient vectors --unscale, clip--> update --> master, state (in place), compute copy (in place)

With an optimizer of `jaxferry.optimizer.optimizers`, an update is one call into the native library (`FusedUpdate`).
Otherwise XLA compiles Optax's update. Masters and state are leaves of the model's own tree; gradients and the compute
copy are flat vectors.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxferry.native import host_sums, is_available
from jaxferry.optimizer.fused_update import Factors, FusedUpdate, factors_program, in_order
from jaxferry.optimizer.optimizers import HostRule, fused_rule, master_form
from jaxferry.optimizer.pieces import filled, on_host
from jaxferry.optimizer.replay import TreeUpdate
from jaxferry.optimizer.split_masters import JoinedMasters, LazyArray, MasterForm, SplitMaster, is_split, split
from jaxferry.optimizer.update_group import (
    OfLayers,
    UpdateGroup,
    by_leaf,
    by_master,
    masters_by_leaf,
    packed,
    path_names,
    vectors_arriving,
)
from jaxferry.partition import Layer, bits_of, trace, zeros_of
from jaxferry.settings import traced_settings
from jaxferry.step import Arrival
from jaxferry.transport import Compiling, Placement, begin_shared, can_view, finished, shares_of, updated_vectors

_FACTORS = "factors"


class Update(Protocol):
    """Updates units of one layout on the host; `reads_shares` where gradients may be as several devices share them."""

    reads_shares: bool

    def __call__(
        self, unit: UpdateGroup, vectors: OfLayers, gradients: OfLayers, norm: Any, scale: Any, extra: Any = ()
    ) -> OfLayers:
        """Updates a unit's masters and state in place, and returns the new compute copy; waits for both.

        `vectors` are the compute copy of each layer in pinned memory, overwritten where the CPU can; `gradients` the
        vectors that have arrived, none for a layer that no segment reads. `norm` and `scale` are fp32 scalars: the
        global norm of the gradients after the division by the scale.
        """
        ...

    def begin_step(self, unit: UpdateGroup, norm: Any, scale: Any) -> None:
        """Does what the first update of a step does for all units, for a measurement of the others."""
        ...


class CompiledUpdate:
    """An update that XLA has compiled, for units with these trained parameters.

    `program` maps `(masters, state, vectors, gradients, norm, scale, extra)` to `(masters, state, vectors)`, with
    vectors of trained parameters alone. Masters and state are donated; if the device is a CPU, so are vectors, else
    there are none. `joined` has room for masters that are split, which the program takes whole.
    """

    reads_shares = False

    def __init__(self, program: Any, placement: Placement, layers: Sequence[Layer], joined: JoinedMasters) -> None:
        self.program, self._placement, self._layers, self._joined = program, placement, layers, joined
        self._nums = [len(layer.vectors) for layer in layers]

    def __call__(
        self, unit: UpdateGroup, vectors: OfLayers, gradients: OfLayers, norm: Any, scale: Any, extra: Any = ()
    ) -> OfLayers:
        """See `Update`."""
        pairs = zip(vectors, self._nums, strict=True)
        old = [of_layer[:num] if self._placement.is_cpu else () for of_layer, num in pairs]
        before = unit.masters
        forms = {own.form for own in before if isinstance(own, SplitMaster)}
        masters = self._joined.masters(before) if forms else before
        made = jax.block_until_ready(self.program(masters, unit.state, old, gradients, norm, scale, [*extra]))
        unit.masters, unit.state, new = made
        if self._placement.is_cpu:
            found = [(*own, *of_layer[num:]) for own, of_layer, num in zip(new, vectors, self._nums, strict=True)]
        else:
            found = updated_vectors(vectors, new, self._placement, self._layers)
        for form in forms:
            whole = unit.masters
            split_unit(unit, self._layers, found, form, self._placement, before)
            self._joined.keep(whole, unit.masters)
        return found

    def begin_step(self, unit: UpdateGroup, norm: Any, scale: Any) -> None:
        """See `Update`."""


class _InitialState:
    """Makes initial states: all threads write zeros, most of the state, and a program makes what else there is."""

    def __init__(
        self, init: Callable[[Any], list[jax.Array]], masters: Sequence[jax.Array], placement: Placement
    ) -> None:
        self._placement = placement
        graph = trace(init, [jax.ShapeDtypeStruct(master.shape, master.dtype) for master in masters], (), {})
        avals = list(map(graph.aval_of, graph.outputs))
        self._zeros = {i: avals[i] for i in zeros_of(graph) if bits_of(avals[i].dtype) >= 8}

        def others(masters: Any) -> list[jax.Array]:
            return [leaf for i, leaf in enumerate(init(masters)) if i not in self._zeros]

        self._others = jax.jit(others, out_shardings=placement.host) if len(self._zeros) < len(avals) else None

    def __call__(self, masters: Sequence[jax.Array]) -> list[jax.Array]:
        made: list[jax.Array] = []
        if self._others is not None:
            in_memory = [on_host(own, self._placement) if isinstance(own, LazyArray) else own for own in masters]
            made = list(self._others(in_memory))
        for number, aval in sorted(self._zeros.items()):
            made.insert(number, filled(aval.shape, aval.dtype, self._placement, host_sums.clear))
        return list(made)


def split_unit(
    unit: UpdateGroup,
    layers: Sequence[Layer],
    vectors: OfLayers,
    form: MasterForm,
    placement: Placement,
    before: Sequence[Any] = (),
) -> None:
    """Stores masters of a unit by the bf16 copy that its vectors have of them; `layers` are its trained parts.

    If these are new values of masters `before`, they take the place of those.
    """
    made, shares = [], dict[tuple[int, int], list[np.ndarray]]()
    placed, known = in_order(layers, placement.ownership), before or [None] * len(unit.masters)
    for master, old, (number, leaf, pieces) in zip(unit.masters, known, placed, strict=True):
        if is_split(leaf):
            key = number, leaf.vector
            if key not in shares:
                shares[key] = [own.view(np.uint16) for own in shares_of(vectors[number][leaf.vector], placement)]
            master = split(master, [piece.of(shares[key]) for piece in pieces], form, old)
        made.append(master)
    unit.masters = made


class UpdatePrograms:
    """Compiles updates of the transformation on the model's tree; equal units share one."""

    def __init__(self, tree: TreeUpdate, placement: Placement, clip_norm: float | None) -> None:
        self._tree, self._placement, self._clip_norm = tree, placement, clip_norm
        self._programs: dict[Any, Any] = {}
        self._updates: dict[Any, Update] = {}
        self._begun: dict[Any, Compiling] = {}
        self._factors: Factors | None = None
        self._forms: dict[Any, MasterForm] = {}
        self._joined = JoinedMasters(placement)

    def init_state(self, unit: UpdateGroup, masters: Sequence[jax.Array]) -> list[jax.Array]:
        """The initial Optax state of a unit, in host memory."""
        keys = unit.keys  # the function is kept, and so is what it refers to: not the unit, which holds arrays

        def init(masters: Any) -> list[jax.Array]:
            return self._tree.init(keys, jax.device_put(masters, jax.memory.Space.Device))

        key = (self._tree.init_content(unit.leaves) or unit.leaves, tuple(master.shape for master in masters))
        if key not in self._programs:
            self._programs[key] = _InitialState(init, masters, self._placement)
        state: list[jax.Array] = self._programs[key](masters)
        return state

    @property
    def master_form(self) -> MasterForm:
        """The form of masters: whole unless the library updates compute copies in place, or `split_all` says so."""
        return MasterForm.SPLIT if self.joins_masters else self._form_of_library

    @functools.cached_property
    def _form_of_library(self) -> MasterForm:
        state = self._tree.state_of(self._tree.leaves)
        return master_form(self._tree.optimizer, state) if self._writes_in_place else MasterForm.WHOLE

    @property
    def joins_masters(self) -> bool:
        """Whether masters are split although XLA compiles updates, which take them whole: one update at a time."""
        return self._joined.keeps

    def can_split_all(self) -> bool:
        """Whether masters that XLA updates can be split."""
        can_write = self._placement.is_cpu or can_view(self._placement)
        return self._form_of_library is MasterForm.WHOLE and can_write and is_available("cpu")

    def split_all(self, splits: bool) -> None:
        """Has masters split or whole that `can_split_all` speaks of, before there is a state."""
        self._joined.keeps = splits

    @functools.cached_property
    def _writes_in_place(self) -> bool:
        """Whether the library may write compute copies where they are; shares of devices do not end where blocks do."""
        where, rule = self._placement, fused_rule(self._tree.optimizer, self._tree.state_of(self._tree.leaves), [], [])
        has_blocks = rule is not None and rule.moment_dtype == np.uint8
        return where.is_cpu or (can_view(where) and not (has_blocks and where.num_devices > 1))

    def form_of(self, unit: UpdateGroup, layers: Sequence[Layer]) -> MasterForm:
        """That of a unit's masters; equal units share the answer."""
        if self.master_form is MasterForm.WHOLE:
            return MasterForm.WHOLE
        key = self.key(unit, layers, [Arrival.OWN] * len(layers))
        if key not in self._forms:
            can_split = self._rule(unit, [Arrival.OWN] * len(unit.layers), layers) is not None
            is_alone = len(unit.layers) == 1 and not unit.joins_parts_of(self._owned(unit, layers))
            can_split |= self.joins_masters and is_alone
            self._forms[key] = self.master_form if can_split else MasterForm.WHOLE
        return self._forms[key]

    def compile(self, units: Sequence[UpdateGroup], layers: Sequence[Layer], arrivals: Sequence[Arrival]) -> None:
        """Stores every unit's `Update` in `unit.programs` for how its gradients arrive; equal units share it."""
        wanted, missing, rules = self._begin(units, layers, arrivals)
        settings = traced_settings()
        begun = {key: self._begun.pop((key, settings), None) for key in missing}
        programs = finished({key: compiling for key, compiling in begun.items() if compiling is not None})
        if _FACTORS in programs:
            counts, *_ = programs[_FACTORS].args_info[0]
            self._factors = Factors(programs.pop(_FACTORS), len(counts))
        for key, program in programs.items():
            trained = [layers[i].trained for i in missing[key][0].layers]
            self._updates[key] = CompiledUpdate(program, self._placement, trained, self._joined)
        for key, rule in rules.items():
            self._updates[key] = self._fused(rule, missing[key][0], missing[key][1], layers)
        for unit, how, key in wanted:
            unit.programs[how] = self._updates[key]

    def begin(self, units: Sequence[UpdateGroup], layers: Sequence[Layer], arrivals: Sequence[Arrival]) -> None:
        """Lets threads compile what `compile` will return, for shapes or arrays; that call raises what fails here."""
        with contextlib.suppress(Exception):
            self._begin(units, layers, arrivals)

    def settle(self) -> None:
        """Waits for the threads that compile."""
        with contextlib.suppress(Exception):
            finished(self._begun)

    def _begin(
        self, units: Sequence[UpdateGroup], layers: Sequence[Layer], arrivals: Sequence[Arrival]
    ) -> tuple[list[tuple[UpdateGroup, Any, Any]], dict[Any, Any], dict[Any, HostRule]]:
        """Begins to compile what is missing.

        Returns the units without an update, each with arrivals and key; by key, one such unit of those that are not
        compiled; and the rules of those that the native library updates.
        """
        missing: dict[Any, Any] = {}
        wanted = []
        for unit in units:
            reads = tuple(arrivals[layer] for layer in unit.layers)
            if reads not in unit.programs:
                key = self.key(unit, layers, arrivals)
                wanted.append((unit, reads, key))
                if key not in self._updates:
                    missing.setdefault(key, (unit, reads))
        found = {key: self._rule(unit, reads, layers) for key, (unit, reads) in missing.items()}
        rules = {key: rule for key, rule in found.items() if rule is not None}
        contents = {key: self._content(key, given[0]) for key, given in missing.items() if key not in rules}
        if rules and self._factors is None:
            key = next(iter(rules))
            content = self._tree.content(missing[key][0].leaves)
            contents[_FACTORS] = content and ("factors", content, self._clip_norm, self._placement)
            missing[_FACTORS] = (missing[key][0], rules[key])
        settings = traced_settings()
        new = {key: content for key, content in contents.items() if (key, settings) not in self._begun}

        def lowered(key: Any) -> Any:
            unit, how = missing[key]
            return self._lower_factors(unit, how) if key == _FACTORS else self._lower(unit, layers, how)

        begun = begin_shared(new, lowered)
        self._begun |= {(key, settings): compiling for key, compiling in begun.items()}
        return wanted, missing, rules

    def plain(self, unit: UpdateGroup, layers: Sequence[Layer]) -> Callable[..., Any]:
        """The update of a unit by Optax, for a jitted function on any device.

        It maps `(masters, state, gradients, norm, extra)` to `(masters, state)`. `gradients` are in the master dtypes,
        by index of the leaf; `layers` are the unit's trained parameters.
        """
        keys, in_order = unit.keys, by_master(unit, layers)  # not the unit, which holds arrays

        def update(masters: Any, state: Any, gradients: dict[int, jax.Array], norm: jax.Array, extra: Any) -> Any:
            return self._tree.update(keys, in_order(self._clipped(gradients, norm)), masters, state, extra)

        return update

    def key(self, unit: UpdateGroup, layers: Sequence[Layer], arrivals: Sequence[Arrival]) -> Any:
        """Returns everything that the update of a unit depends on: units with equal keys share a program."""
        layouts = tuple(layer.layout for layer in self._owned(unit, layers))
        shapes = tuple(tuple(master.shape) for master in unit.masters)
        content = self._tree.content(unit.leaves) or unit.leaves
        return (content, shapes, layouts, tuple(arrivals[i] for i in unit.layers))

    def plain_content(self, unit: UpdateGroup) -> tuple[Hashable, bool]:
        """Everything that `plain` depends on besides the layers' layouts, and whether that is so for all models."""
        content = self._tree.content(unit.leaves)
        is_shared = content is not None and not unit.is_by_part and len(unit.layers) == 1
        return (content or unit.leaves, self._clip_norm), is_shared

    def _content(self, key: Any, unit: UpdateGroup) -> Hashable | None:
        """Everything that a compiled update depends on, whatever the model; None if that cannot be compared."""
        if unit.is_by_part or len(unit.layers) > 1 or self._tree.content(unit.leaves) is None:
            return None
        placement = self._placement
        return ("update", key, self._clip_norm, placement, placement.is_cpu)

    def text(self, unit: UpdateGroup, layers: Sequence[Layer], arrivals: Sequence[Arrival]) -> str:
        """Returns a text that says what a unit's update does; masters and state may be shapes."""
        reads = tuple(arrivals[i] for i in unit.layers)
        rule = self._rule(unit, reads, layers)
        if rule is None:
            text: str = self._lower(unit, layers, reads).as_text()
            return f"joined masters\n{text}" if self.joins_masters else text
        layouts = [layer.layout for layer in self._owned(unit, layers)]
        dtypes = self._dtypes_arriving(unit, layers, reads)
        return f"fused {rule.step} {dtypes} {self._writes_in_place} {layouts}"

    def _lower_factors(self, unit: UpdateGroup, rule: HostRule) -> Any:
        state, where = self._tree.state_of(unit.leaves), self._placement.host_compute
        count, number = (jax.ShapeDtypeStruct((), dtype, sharding=where) for dtype in (jnp.int32, jnp.float32))
        function, num_counts = factors_program(rule, state, self._clip_norm)
        jitted = jax.jit(function, out_shardings=where, keep_unused=True)
        return jitted.trace([count] * num_counts, number, number).lower()

    def _fused(
        self, rule: HostRule, unit: UpdateGroup, reads: Sequence[Arrival], layers: Sequence[Layer]
    ) -> FusedUpdate:
        assert self._factors is not None
        trained, state = [layers[i].trained for i in unit.layers], self._tree.state_of(unit.leaves)
        found: list[bool] = []
        jax.eval_shape(lambda params: found.extend(rule.decays(params)), self._tree.params)
        of_leaves = dict(zip(self._tree.leaves, found, strict=True))
        decays, dtypes = [of_leaves[leaf] for leaf in unit.leaves], self._dtypes_arriving(unit, layers, reads)
        where = self._placement, self._writes_in_place
        return FusedUpdate(rule, self._factors, trained, state, decays, dtypes, *where)

    def _lower(self, unit: UpdateGroup, layers: Sequence[Layer], reads: Sequence[Arrival]) -> Any:
        placement, unit_layers = self._placement, self._owned(unit, layers)
        update, masters_of = self.plain(unit, unit_layers), masters_by_leaf(unit, unit_layers)

        def flat_update(
            masters: Any, state: Any, vectors: Any, gradients: Any, norm: Any, scale: Any, extra: Any
        ) -> Any:
            # Operands of different memory kinds do not mix; on a CPU this placement copies nothing.
            host = (masters, state, vectors, gradients)
            masters, state, vectors, gradients = jax.device_put(host, jax.memory.Space.Device)
            masters, state = update(masters, state, by_leaf(unit_layers, gradients, scale), norm, extra)
            return masters, state, packed(unit_layers, masters_of(masters), vectors)

        def struct(x: Any, where: Any) -> Any:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

        def structs(vectors: Any) -> Any:
            return tuple(struct(v, placement.update_output) for v in vectors)

        gradients = list(map(structs, self._arrived(unit, layers, reads)))
        vectors = [structs(layer.vectors if placement.is_cpu else ()) for layer in unit_layers]
        number = jax.ShapeDtypeStruct((), jnp.float32, sharding=placement.host_compute)
        extra = [struct(x, placement.host_compute) for x in self._tree.extra]
        masters, states = ([struct(x, placement.host) for x in leaves] for leaves in (unit.masters, unit.state))

        jitted = jax.jit(
            flat_update,
            donate_argnums=(0, 1, 2) if placement.is_cpu else (0, 1),
            keep_unused=True,
            out_shardings=(placement.host, placement.host, placement.update_output),
        )
        return jitted.trace(masters, states, vectors, gradients, number, number, extra).lower()

    def _arrived(self, unit: UpdateGroup, layers: Sequence[Layer], reads: Sequence[Arrival]) -> list[tuple[Any, ...]]:
        """The vectors of gradients that arrive, of each of a unit's layers; shapes."""
        pairs = zip(self._owned(unit, layers), reads, strict=True)
        return [vectors_arriving(layer, arrival) for layer, arrival in pairs]

    def _dtypes_arriving(self, unit: UpdateGroup, layers: Sequence[Layer], reads: Sequence[Arrival]) -> list[np.dtype]:
        return [vector.dtype for of_layer in self._arrived(unit, layers, reads) for vector in of_layer]

    def _owned(self, unit: UpdateGroup, layers: Sequence[Layer]) -> list[Layer]:
        return [self._placement.ownership.of(layers[i].trained) for i in unit.layers]

    def _rule(self, unit: UpdateGroup, reads: Sequence[Arrival], layers: Sequence[Layer]) -> HostRule | None:
        """Returns the native library's rule for a unit; None if Optax has to update it."""
        own, state = self._owned(unit, layers), self._tree.state_of(unit.leaves)
        if unit.joins_parts_of(own) or [name for name, _ in unit.state_keys] != path_names(state):
            return None
        return fused_rule(self._tree.optimizer, state, own, [arrival is not Arrival.NONE for arrival in reads])

    def _clipped(self, gradients: dict[int, jax.Array], norm: jax.Array) -> dict[int, jax.Array]:
        """Scales gradients to `clip_norm` if `norm` exceeds it: `optax.clip_by_global_norm` with a given norm."""
        if self._clip_norm is None:
            return gradients
        limit = jnp.float32(self._clip_norm)
        return {
            i: jnp.where(norm < limit, g, (g / norm.astype(g.dtype)) * limit.astype(g.dtype))
            for i, g in gradients.items()
        }
