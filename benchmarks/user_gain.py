"""What users gain over ZeRO-Offload: less device memory at its speed, and larger models in the same memory.

    python benchmarks/user_gain.py [--only memory|size] [--models bert:base gpt2:medium]

The models are the examples', one layer per block, in bfloat16, batch 8. Nothing runs: times are estimated and steps
simulated, in the steady state and within budgets that hold however long transfers take. Prints two tables and writes
`benchmarks/results/user_gain.json`; with `--models` it only prints the rows of these models.

- **Memory**: for each of the papers' models on a machine, the smallest device memory in which `auto` is no slower than
  `zero-offload`, relative to what `zero-offload` needs: once with nothing recomputed, once with recomputation left to
  `auto`, and once with recomputation left to `auto` beside a `zero-offload` that recomputes every block, which needs
  less and takes longer. Updates run on the host, as in `zero-offload`. Budgets are found to 1 %.

  The memory is **compiled for an H200**. All programs that a step of any plan may run are compiled for it, and the
  search plans with their temporaries, as it does with a profile that is measured there. Each plan that is compared is
  then prepared as `train_step` prepares it, its programs are compiled too, and its memory is that of a replay of the
  step with the sizes of the compiled programs (`tests/native/compiled_steps.py`). The script ends with an error if
  the engine's count is not within 2 % of it, or if `train_step` changes a plan. The JSON also has what the planner
  and the engine count, and the whole comparison with estimated temporaries (`estimated`).
- **Size**: the deepest Transformer-XL, with blocks like those of the 1.7B model, whose step fits into the memory that a
  JAX process takes of a machine, by policy; each also with every block recomputed, and so with what a block keeps in
  host memory until its backward (`offload_activations`). `auto` is the leanest that it can be. Only memory decides, not
  time; host memory is not limited, and no model is tried that has more than 4,096 blocks. This memory is simulated,
  with estimated temporaries.

Expected: 42 % less memory on average, models 3 times as large. It takes about 6 minutes on two cores.
"""

import argparse
import dataclasses
import statistics

import auto_gap  # sets the environment before jax is imported
import jax
import measure
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.machine import facts
from jaxferry.costs import MACHINES, NO_RECOMPUTATION, Profile, default_budget_bytes
from jaxferry.modes import Remat
from jaxferry.planner import AutoSearch, Request, coded_plan, make_plan
from jaxferry.records import read_json
from jaxferry.step import CROSSING_SLOTS, DHA, RELOAD, Plan, needed_bytes, predict
from native.compiled_steps import TOLERANCE, CompiledModel, compare_step, peak_bytes
from native.cuda_library import cuda_library

MODELS = (
    "bert:base",
    "roberta:base",
    "bert:large",
    "gpt2:medium",
    "transformer_xl:1b",
    "transformer_xl:2.4b",
    "transformer_xl:4.3b",
    "transformer_xl:6.7b",
)
MACHINE = "h200-pcie5"
DEEPENED, MACHINES_OF_SIZE = "transformer_xl:1.7b", ("v100-pcie3", "rtx4090-pcie4", "h200-pcie5")
MOST_BLOCKS = 4096
RECOMPUTING, OFFLOADING = ", recomputing", ", recomputing, activations in host memory"
OWN, AGAIN = "zero_offload", "recomputing_zero_offload"
COMPARED = {
    "not_recomputing": ("nothing recomputed", OWN),
    "recomputing": ("auto may recompute", OWN),
    "both_recomputing": ("both may recompute", AGAIN),
}
"""The plans of `auto`: the title of each, and the plan that it is compared with."""
WAYS = ("compiled", "estimated")
BACKWARDS = ("backward_s", "backward_dha_s", "backward_go_s")
POLICIES = ("zero-offload", "native-overlapped", "memferry", "go-memferry", "l2l")


def without_recomputation(profile: Profile) -> Profile:
    """The profile in which no plan may recompute."""
    return profile.only_recomputing([False] * len(profile.layers))


def leanest(search: AutoSearch, rival: Plan) -> Plan:
    """The plan of `auto` in the smallest budget, to 1 %, in which it is no slower than `rival`."""

    def within(budget: int) -> Plan | None:
        plan = predict(search.profile, search.plan(budget))
        return plan if _seconds(plan) <= _seconds(rival) * (1 + 1e-9) else None

    low, high = search.smallest_bytes, needed_bytes(search.profile, rival)
    found = within(low)
    if found is not None:
        return found
    found = within(high)
    assert found is not None, "a policy that fits is faster than auto"
    while high > 1.01 * low:
        middle = int((low * high) ** 0.5)
        better = within(middle)
        found, low, high = (found, middle, high) if better is None else (better, low, middle)
    return found


def compared_plans(profile: Profile) -> dict[str, Plan]:
    """The plans whose memory is compared: two of `zero-offload`, and those of `auto`."""
    plain = without_recomputation(profile)
    own = make_plan(plain, "zero-offload")
    again = predict(profile, recomputing(profile, own))
    search = AutoSearch(profile, Request(), places=())
    found = (leanest(AutoSearch(plain, Request(), places=()), own), leanest(search, own), leanest(search, again))
    return {OWN: own, AGAIN: again, **dict(zip(COMPARED, found, strict=True))}


def memory_row(name: str) -> dict:
    """The memory of one model's plans, compiled and estimated."""
    traced = auto_gap.Traced(name)
    model, estimated = CompiledModel(traced.loss_fn, traced.params, traced.batch), traced.on(MACHINE)
    return {
        "model": name,
        "compiled": compiled_facts(model, model.with_temporaries(estimated, traced.variants)),
        "estimated": estimated_facts(estimated),
    }


def estimated_facts(profile: Profile) -> dict:
    """Memory and time of the compared plans, with the profile's temporaries."""
    plans = compared_plans(profile)
    return _facts(plans, {key: needed_bytes(profile, plan) for key, plan in plans.items()})


def compiled_facts(model: CompiledModel, profile: Profile) -> dict:
    """Likewise with the temporaries of compiled programs: what planner and engine count, and the compiled programs."""
    plans, counted, compiled = compared_plans(profile), {}, {}
    for key, plan in plans.items():
        prepared, programs = model.step(plan=plan, profile=profile)
        if prepared.plan.layers != plan.layers:
            raise AssertionError(f"train_step has changed the plan of {key}")
        counted[key], compiled[key] = peak_bytes(compare_step(model, prepared, programs))
        if abs(counted[key] - compiled[key]) > TOLERANCE * compiled[key]:
            raise AssertionError(f"{key}: the engine counts {counted[key]} bytes, XLA has {compiled[key]}")
    planned = {key: needed_bytes(profile, plan) for key, plan in plans.items()}
    return {**_facts(plans, compiled), "planned_bytes": planned, "counted_bytes": counted}


def _facts(plans: dict[str, Plan], sizes: dict[str, int]) -> dict:
    saved = {key: 1 - sizes[key] / sizes[rival] for key, (_, rival) in COMPARED.items()}
    return {
        "bytes": sizes,
        "saved": saved,
        "seconds": {key: _seconds(plan) for key, plan in plans.items()},
        "modes": {
            key: {m.value: plan.modes.count(m) for m in dict.fromkeys(plan.modes)} for key, plan in plans.items()
        },
        "recompute": {key: sum(plan.recomputes) for key, plan in plans.items()},
    }


def _seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.steady_step_s


def deepened(profile: Profile, num_blocks: int) -> Profile:
    """The profile with as many copies of a block in the middle."""
    blocks = [index for index, layer in enumerate(profile.layers) if layer.name.startswith("block")]
    middle = profile.layers[blocks[len(blocks) // 2]]
    own = [
        dataclasses.replace(middle, name=f"block_{number}", parameters=f"block_{number}")
        for number in range(num_blocks)
    ]
    return dataclasses.replace(profile, layers=(*profile.layers[: blocks[0]], *own, *profile.layers[blocks[-1] + 1 :]))


def needs(profile: Profile, policy: str) -> int:
    """Device memory of a policy's plan; of `auto` that of its leanest."""
    if policy.endswith(OFFLOADING):
        return needs(offloading(profile), policy.removesuffix(OFFLOADING))
    if policy == "auto":
        size = len(profile.layers)
        on_host = np.ones(size, dtype=bool)
        remats = [Remat.FULL if layer.can_recompute else Remat.NONE for layer in profile.layers]
        modes = [np.full(size, mode, dtype=np.int8) for mode in (DHA, RELOAD)]
        plans = [coded_plan(policy, 0.0, profile, each, on_host, remats=remats) for each in modes]
        return min(needed_bytes(profile, plan) for plan in plans)
    name = policy.removesuffix(RECOMPUTING)
    plan = make_plan(without_recomputation(profile), name)
    return needed_bytes(profile, recomputing(profile, plan) if name != policy else plan)


def offloading(profile: Profile) -> Profile:
    """The profile in which every block recomputes, and what it keeps waits in host memory for its backward.

    What the last blocks keep stays, as in the engine: their backwards follow too soon.
    """
    blocks = [index for index, layer in enumerate(profile.layers) if layer.can_recompute]
    layers = list(profile.layers)
    for index in blocks:
        layer = layers[index]
        kept, is_moved = layer.kept_bytes(Remat.FULL), index in blocks[: -2 * CROSSING_SLOTS]
        moved = kept if is_moved else 0
        layers[index] = dataclasses.replace(
            layer,
            **NO_RECOMPUTATION,
            activation_bytes=kept,
            save_bytes=moved,
            fetch_bytes=moved,
            **{key: getattr(layer, key) + layer.recompute_s for key in BACKWARDS},
            temporary_bytes={
                name.removesuffix("_recompute"): size
                for name, size in sorted(layer.temporary_bytes.items(), key=lambda pair: len(pair[0]))
            },
        )
    return dataclasses.replace(profile, layers=tuple(layers))


def recomputing(profile: Profile, plan: Plan) -> Plan:
    """The plan with every layer recomputed that can be."""
    layers = tuple(
        dataclasses.replace(layer, remat=Remat.FULL) if known.can_recompute else layer
        for layer, known in zip(plan.layers, profile.layers, strict=True)
    )
    return dataclasses.replace(plan, layers=layers)


def deepest(profile: Profile, policy: str, budget: int) -> float:
    """Parameters of the deepest model that fits, in billions."""

    def fits(num_blocks: int) -> bool:
        return needs(deepened(profile, num_blocks), policy) <= budget

    low, high = 1, 2
    while high < MOST_BLOCKS and fits(high):
        low, high = high, 2 * high
    while high - low > max(1, low // 50):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    found = deepened(profile, low)
    return sum(found.layers[members[0]].param_bytes for members in found.groups) / 2 / 1e9


def size_rows() -> list[dict]:
    """The deepest model of each policy, by machine."""
    traced, rows = auto_gap.Traced(DEEPENED), []
    for machine in MACHINES_OF_SIZE:
        profile, budget = traced.on(machine), default_budget_bytes(MACHINES[machine].to_json())
        names = [f"{name}{more}" for name in POLICIES for more in ("", RECOMPUTING, OFFLOADING)]
        names += ["auto", f"auto{OFFLOADING}"]
        found = {name: deepest(profile, name, budget) for name in names}
        rows.append({"machine": machine, "budget_bytes": budget, "billions": found})
    return rows


def print_memory(rows: list[dict]) -> None:
    """Prints what each model saves: compiled, and with estimated temporaries."""
    title = f"smallest memory in which auto is no slower than zero-offload, {MACHINE}: compiled (estimated)"
    table = Table("model", title=title)
    for head in ("zero-offload, GB", "recomputing, GB", *(title for title, _ in COMPARED.values())):
        table.add_column(head, justify="right")
    for row in rows:
        sizes = [tuple(row[how]["bytes"][key] / 1e9 for how in WAYS) for key in (OWN, AGAIN)]
        shares = [tuple(row[how]["saved"][key] for how in WAYS) for key in COMPARED]
        cells = [f"{compiled:.2f} ({estimated:.2f})" for compiled, estimated in sizes]
        table.add_row(row["model"], *cells, *map(_percent, shares))
    if len(rows) > 1:
        means = means_of(rows)
        table.add_row("mean", "", "", *(_percent(tuple(means[how][key] for how in WAYS)) for key in COMPARED))
    Console(width=120).print(table)


def means_of(rows: list[dict]) -> dict[str, dict[str, float]]:
    """The mean share saved, compiled and estimated."""
    return {how: {key: statistics.mean(row[how]["saved"][key] for row in rows) for key in COMPARED} for how in WAYS}


def _percent(shares: tuple[float, ...]) -> str:
    compiled, estimated = shares
    return f"-{compiled:.0%} (-{estimated:.0%})"


def print_sizes(sizes: list[dict]) -> None:
    """Prints the deepest models."""
    deep = Table("policy", title=f"largest {DEEPENED.split(':')[0]} by memory, billions of parameters, simulated")
    for row in sizes:
        deep.add_column(row["machine"], justify="right")
    for name in sizes[0]["billions"]:
        deep.add_row(name, *(f"{row['billions'][name]:.1f}" for row in sizes))
    Console(width=120).print(deep)


def main() -> None:
    """Runs the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="MODEL", help="only print these models' memory")
    parser.add_argument("--only", choices=("memory", "size"), help="keep the other part of the results")
    arguments = parser.parse_args()
    path = measure.RESULTS / "user_gain.json"
    found = read_json(path) if arguments.only and path.exists() else {}
    if arguments.only != "size":
        cuda_library()
        memory = []
        for name in arguments.models or MODELS:
            memory.append(memory_row(name))
            print_memory(memory[-1:])
        print_memory(memory)
        if arguments.models:
            return
        found |= {"memory": memory, "mean_saved": means_of(memory)}
    if arguments.only != "memory":
        found["size"] = size_rows()
        print_sizes(found["size"])
    about = {"computed_on": facts("none"), "machine": MACHINE, "batch": auto_gap.BATCH, "jax": jax.__version__}
    measure.write("user_gain", found | about)


if __name__ == "__main__":
    main()
