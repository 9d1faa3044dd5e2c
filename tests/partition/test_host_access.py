"""Programs that read parameters and write gradients in host memory, against the original programs."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxferry.native import operations
from jaxferry.partition import differentiate, partition, read_in_place, store_in_place
from models import gpt, nnx_net
from slowly import slow_but

OPERATIONS = ("dha_gather", "dha_matmul", "dha_read", "dha_matmul_gradient", "gradient_store")


@pytest.fixture
def calls(monkeypatch):
    """Counts operations and runs their twins."""
    counted = collections.Counter()

    def count(name, made):
        def counting(*args, **kwargs):
            counted[name] += 1
            return made(*args, **{**kwargs, "native": False})

        monkeypatch.setattr(operations, name, counting)

    for name in OPERATIONS:
        count(name, getattr(operations, name))
    return counted


@dataclasses.dataclass
class Case:
    """A segment with arguments: `weights`, `others` for the forward; `vectors` hold the weights."""

    layer: object
    derivative: object
    weights: list
    vectors: tuple
    others: tuple

    def backward(self):
        """The backward as `(weights, *others) -> (gradients, cotangents)`, with its arguments."""
        derivative, (inputs, nondiff_inputs) = self.derivative, self.others
        outputs, _, saved = jax.jit(derivative.forward)(self.weights, inputs, nondiff_inputs)
        return derivative.backward, (
            [inputs[i] for i in derivative.inputs_read],
            [nondiff_inputs[i] for i in derivative.nondiff_inputs_read],
            [outputs[i] for i in derivative.outputs_read],
            saved,
            [jnp.cos(output) for output in outputs],
        )


def cases_of(loss_fn, params, batch):
    """Each segment of a loss function, with what the segments before it computed for it."""
    made = partition(loss_fn, params, (batch,))
    graph, leaves = made.graph, jax.tree.leaves(params)
    values = {**graph.constants, **dict(zip(graph.batch, jax.tree.leaves(batch), strict=True))}
    for equation in made.prelude:
        operands = [values[a] if isinstance(a, int) else a.val for a in equation.inputs]
        results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
        values |= zip(equation.outputs, results if equation.primitive.multiple_results else [results], strict=True)
    for segment in made.segments:
        layer = made.layers[segment.group]
        weights = [leaves[leaf.index] for leaf in layer.leaves]
        others = ([values[v] for v in segment.inputs], [values[v] for v in segment.nondiff_inputs])
        yield Case(layer, differentiate(graph, segment), weights, layer.pack(weights), others)
        outputs, nondiff_outputs = jax.jit(segment.forward)(weights, *others)
        values |= zip((*segment.outputs, *segment.nondiff_outputs), (*outputs, *nondiff_outputs), strict=True)


def case_of(apply, shapes, x_shape, dtype=jnp.float32):
    """The one segment of `apply(weights, x)`."""
    keys = jax.random.split(jax.random.key(0), len(shapes) + 1)
    params = {"layer": [jax.random.normal(k, s, dtype) for k, s in zip(keys[1:], shapes, strict=True)]}
    x = jax.random.normal(keys[0], x_shape, dtype)
    (case,) = cases_of(lambda p, b: jnp.sum(jnp.sin(apply(p["layer"], b)).astype(jnp.float32)), params, x)
    return case


def assert_equal(actual, expected, exact=True):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=0 if exact else 2e-5, atol=0 if exact else 2e-5
        ),
        actual,
        expected,
    )


LARGER = [pytest.param("linen", native, marks=pytest.mark.slow) for native in (False, True)]


@functools.cache
def cases_of_model(name):
    task = {"linen": gpt, "nnx": nnx_net}[name](depth=2)
    return list(cases_of(task.loss_fn, task.params, task.batch))


@pytest.mark.parametrize(("name", "native"), [("nnx", False), ("nnx", True), *LARGER])
def test_reading_in_place_changes_no_result_of_any_segment(name, native, calls):
    for case in cases_of_model(name):
        forward = read_in_place(case.derivative.forward, case.layer, (case.weights, *case.others), native=native)
        expected = jax.jit(case.derivative.forward)(case.weights, *case.others)
        assert_equal(jax.jit(forward)(case.vectors, *case.others), expected, exact=not native)
        function, rest = case.backward()
        backward = read_in_place(function, case.layer, (case.weights, *rest), native=native)
        assert_equal(jax.jit(backward)(case.vectors, *rest), jax.jit(function)(case.weights, *rest), exact=not native)
    assert bool(calls["dha_matmul"] and calls["dha_read"]) == native


def test_a_transformer_reads_tables_by_lookup_products_by_product_and_vectors_at_once(calls):
    task = gpt(depth=1)
    counts = {}
    for case in cases_of(task.loss_fn, task.params, task.batch):
        calls.clear()
        forward = read_in_place(case.derivative.forward, case.layer, (case.weights, *case.others), native=True)
        jax.eval_shape(forward, case.vectors, *case.others)
        counts.setdefault(case.layer.name, []).append(dict(calls))
    tables, (block,) = counts["wte"], counts["h_0"]
    assert tables[0] == {"dha_gather": 1}
    assert tables[1] == {"dha_matmul": 1}
    assert block == {"dha_matmul": 4, "dha_read": 1}


# Weight shapes, x, and a product that reads the weight through reorderings.
PRODUCTS = {
    "plain": (lambda w, x: x @ w[0], [(6, 4)], (3, 6)),
    "leading dimensions": (lambda w, x: x @ w[0], [(6, 4)], (2, 3, 6)),
    "transposed": (lambda w, x: x @ w[0].T, [(4, 6)], (3, 6)),
    "weight first": (lambda w, x: w[0] @ x, [(4, 6)], (6, 3)),
    "vector": (lambda w, x: x @ w[0], [(6,)], (3, 6)),
    "heads out": (lambda w, x: jnp.einsum("bd,dhk->bhk", x, w[0]), [(6, 2, 4)], (3, 6)),
    "heads in": (lambda w, x: jnp.einsum("bhk,hkd->bd", x, w[0]), [(2, 4, 6)], (3, 2, 4)),
    "heads in, crossed": (lambda w, x: jnp.einsum("bkh,hkd->bd", x, w[0]), [(2, 4, 6)], (3, 4, 2)),
    "heads out, crossed": (lambda w, x: jnp.einsum("bd,dhk->kbh", x, w[0]), [(6, 2, 4)], (3, 6)),
    "stored flat, used by heads": (lambda w, x: jnp.einsum("bd,dhk->bhk", x, w[0].reshape(6, 2, 4)), [(6, 8)], (3, 6)),
    "stored flat, summed by heads": (
        lambda w, x: jnp.einsum("bhk,hkd->bd", x, w[0].reshape(2, 4, 6)),
        [(8, 6)],
        (3, 2, 4),
    ),
    "cast": (lambda w, x: x.astype(jnp.bfloat16) @ w[0].astype(jnp.bfloat16), [(6, 4)], (3, 6)),
    "one column": (lambda w, x: x @ w[0][:, None], [(6,)], (3, 6)),
}


def check_forward(case, calls, expected, exact=True):
    """What reads in place has the results of the original program, by these operations."""
    arguments = (case.weights, *case.others)
    forward = read_in_place(case.derivative.forward, case.layer, arguments, native=True)
    assert_equal(forward(case.vectors, *case.others), case.derivative.forward(*arguments), exact=exact)
    assert calls == expected


OFTEN = ("plain", "transposed", "weight first", "leading dimensions", "cast")
FORMS = slow_but(OFTEN, PRODUCTS)


@pytest.mark.parametrize("name", FORMS)
def test_products_in_every_form_are_done_in_host_memory(name, calls):
    case = case_of(*PRODUCTS[name])
    check_forward(case, calls, {"dha_matmul": len(case.weights)}, exact=False)


# Not a product with a stored matrix: the weight is read whole.
OTHERS = {
    "summed dimension in the middle": (lambda w, x: jnp.einsum("bh,dhk->bdk", x, w[0]), [(3, 2, 4)], (5, 2)),
    "batched": (lambda w, x: jnp.einsum("bd,bdk->bk", x, w[0]), [(3, 6, 4)], (3, 6)),
    "elementwise": (lambda w, x: x * w[0], [(6,)], (3, 6)),
    "product and sum": (lambda w, x: x @ w[0] + jnp.sum(w[0] ** 2), [(6, 4)], (3, 6)),
    "two weights": (lambda w, x: x + w[0] @ w[1], [(3, 4), (4, 6)], (3, 6)),
    "rows of a transposed table": (lambda w, x: w[0].T[jnp.array([1, 0])] + x, [(3, 2)], (2, 3)),
    "more precision than usual": (lambda w, x: jnp.matmul(x, w[0], precision="highest"), [(6, 4)], (3, 6)),
    "cast twice": (lambda w, x: x @ w[0].astype(jnp.bfloat16).astype(jnp.float32), [(6, 4)], (3, 6)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_readers_are_given_a_device_copy(name, calls):
    case = case_of(*OTHERS[name])
    check_forward(case, calls, {"dha_read": 1})


def read_by(mode):
    return lambda table, indices: table.at[indices].get(mode=mode)


LOOKUPS = {
    "index": lambda table, indices: table[indices],
    **{mode: read_by(mode) for mode in ("clip", "fill", "promise_in_bounds")},
}


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint8, jnp.uint32])
@pytest.mark.parametrize("lookup", LOOKUPS.values(), ids=LOOKUPS)
@pytest.mark.usefixtures("allowed_nans")  # out of range, "fill" reads NaN
def test_lookups_out_of_range_follow_their_mode(lookup, dtype, calls):
    indices = np.array([[0, 3], [99, -1 if jnp.issubdtype(dtype, jnp.signedinteger) else 200]]).astype(dtype)
    case = case_of(lambda w, x: lookup(w[0], indices) * x, [(5, 3)], (2, 2, 3))
    check_forward(case, calls, {"dha_gather": 1})


@pytest.mark.parametrize(
    ("indices", "dtype", "num_rows"),
    [([0, 100, 127], jnp.int8, 1000), ([0, 2**31, 2**32 - 1], jnp.uint32, 10)],
    ids=str,
)
def test_indices_of_any_dtype_find_their_rows_or_the_last_one(indices, dtype, num_rows, calls):
    given = jnp.array(indices, dtype)
    case = case_of(lambda w, x: jnp.take(w[0], given, axis=0, mode="clip") * x, [(num_rows, 3)], (3, 3))
    check_forward(case, calls, {"dha_gather": 1})


def test_the_default_precision_of_all_products_is_kept(calls):
    with jax.default_matmul_precision("highest"):
        check_forward(case_of(lambda w, x: x @ w[0], [(6, 4)], (3, 6)), calls, {"dha_read": 1})


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("name", "native"), [("nnx", False), ("nnx", True), *LARGER])
def test_stored_gradients_are_those_that_the_backward_returns(name, native, accumulate, calls):
    for case in cases_of_model(name):
        if case.derivative.has_rows:
            continue
        function, rest = case.backward()
        expected, cotangents = jax.jit(function)(case.weights, *rest)
        stored = store_in_place(
            function, case.layer, (case.weights, *rest), accumulate=accumulate, native=native, fused_bytes=0
        )
        before = case.layer.pack([jnp.sin(w) for w in case.weights])
        vectors, kept, others = jax.jit(stored)(before, case.weights, *rest)
        packed = case.layer.pack(expected)
        if accumulate:
            packed = [a + b for a, b in zip(before, packed, strict=True)]
        assert_equal(list(vectors), list(packed), exact=False)
        assert_equal(others, cotangents)
        assert (kept is None) == bool(native and any(leaf.shape[1:] for leaf in case.layer.leaves))
    assert bool(calls["dha_matmul_gradient"]) == native


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.usefixtures("allowed_nans")  # it writes over NaN
def test_gradients_of_products_in_every_form_are_never_whole(name, calls):
    case = case_of(*PRODUCTS[name])
    function, rest = case.backward()
    expected, _ = function(case.weights, *rest)
    stored = store_in_place(function, case.layer, (case.weights, *rest), accumulate=False, native=True, fused_bytes=0)
    empty = [jnp.full(v.shape, jnp.nan, v.dtype) for v in case.layer.vectors]
    vectors, kept, _ = stored(empty, case.weights, *rest)
    assert_equal(list(vectors), list(case.layer.pack(expected)), exact=False)
    assert kept is None and calls == {"dha_matmul_gradient": len(case.weights)}


@pytest.mark.parametrize(("name", "options"), [("plain", {}), ("more precision than usual", {"fused_bytes": 0})])
def test_small_gradients_and_those_of_more_precision_are_left_to_xla(name, options, calls):
    case = case_of(*(PRODUCTS | OTHERS)[name])
    function, rest = case.backward()
    stored = store_in_place(function, case.layer, (case.weights, *rest), accumulate=False, native=True, **options)
    _, kept, _ = stored(list(case.vectors), case.weights, *rest)
    assert calls == {"gradient_store": 1} and len(kept) == 1


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_sum_of_a_loop_is_stored_with_the_bits_of_its_rounded_value_and_has_no_copy(dtype, accumulate, calls):
    case = case_of(lambda w, x: x @ w[0], [(37, 6)], (3, 37), dtype)
    terms = jax.random.normal(jax.random.key(0), (4, 37, 6)) * jnp.exp2(-jnp.arange(37.0))[:, None]  # also subnormal

    def function(weights, terms):
        total = jax.lax.scan(lambda total, term: (total + term, None), jnp.zeros((37, 6)), terms[:-1])[0]
        return [(total + terms[-1]).astype(dtype)], terms[0, 0, 0]

    given, before = (case.weights, terms), [vector * 2 for vector in case.vectors]
    stored = store_in_place(function, case.layer, given, accumulate=accumulate, native=True, fused_bytes=0)
    made = jax.jit(lambda *args: stored(*args)[:2])
    vectors, kept = made(before, *given)
    [gradient], _ = jax.jit(function)(*given)
    known = before[0].reshape(37, 6).astype(jnp.float32) * accumulate
    np.testing.assert_array_equal(vectors[0].reshape(37, 6), (known + gradient.astype(jnp.float32)).astype(dtype))
    np.testing.assert_array_equal(kept[0], gradient.astype(jnp.float32))
    assert calls["gradient_store"]
    whole = [eqn.outvars[0].aval for eqn in jax.make_jaxpr(stored)(before, *given).jaxpr.eqns]
    assert not [aval for aval in whole if aval.shape == (37, 6) and aval.dtype == dtype]
