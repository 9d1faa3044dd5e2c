"""Reproduces Figures 10(a) and 10(b) of MemFerry: GPU utilization, and time against the gradients kept on the GPU.

    python benchmarks/papers/memferry_tuning.py

Writes `memferry_tuning.json` and a PNG. All is simulated on an A100 with PCIe 3, in the steady state. Figure 10(b) is
drawn as `jaxferry tune --policy go-memferry` draws it, against the reserve factor: where a plan for a smaller factor is
faster, it stands for the larger one too, so the drawn time cannot rise. The table counts the plans of each factor alone
(`alone_s`), and that of factor 1, where no gradient is written to host memory, apart (`at_one_s`). Beside it `auto`'s
time against the memory budget, with any gradients, and the knee.
"""

import itertools
from collections.abc import Sequence

from figures import Row, arguments, new_figure, save, write
from paper_models import known_models

from jaxferry.costs import Profile, estimate_profile, find_machine
from jaxferry.modes import MODULE
from jaxferry.planner import AutoSearch, Request, SweepPoint, knee, make_plan, sweep_finest
from jaxferry.step import Lane, predict, simulate

MACHINE = "a100-pcie3"
SYSTEMS = {
    "zero-offload": "DeepSpeed",
    "native-offload": "Native-Offload",
    "memferry": "MemFerry",
    "go-memferry": "GO-MemFerry",
    "auto": "auto (ours)",
}
FACTORS = [number / 20 for number in range(20)]
NUM_BUDGETS = 12
COLOURS = ("#2f6fb7", "#1b7f5c", "#e08a1e", "#6a4c93")


def utilization(profile: Profile) -> dict[str, float]:
    """The share of a steady step in which the GPU computes, by system; `auto` as `memferry` without more memory."""
    plans = {name: make_plan(profile, name) for name in SYSTEMS if name != "auto"}
    budget = plans["memferry"].predicted.peak_device_bytes
    plans["auto"] = make_plan(profile, "auto", memory_budget_bytes=budget)
    found = {}
    for name, plan in plans.items():
        simulation = simulate(profile, plan)
        found[name] = simulation.lanes[Lane.GPU].busy_s / simulation.steady_step_s
    return found


def within_budgets(profile: Profile) -> list[SweepPoint]:
    """The plans of `auto` within budgets from the smallest to that of the fastest plan."""
    search = AutoSearch(profile, Request())
    low, high = search.smallest_bytes, search.plan(None).details["unlimited_needed_bytes"]
    budgets = [int(low * (high / low) ** (number / (NUM_BUDGETS - 1))) for number in range(NUM_BUDGETS)]
    plans = [predict(profile, search.plan(budget)) for budget in budgets]
    return [SweepPoint(plan.reserve_factor, budget, plan) for plan, budget in zip(plans, budgets, strict=True)]


def alone_s(profile: Profile, factors: Sequence[float]) -> list[float]:
    """The steady step of GO-MemFerry for each of these reserve factors, in seconds."""
    plans = [make_plan(profile, "go-memferry", reserve_factor=factor) for factor in factors]
    return [plan.predicted.steady_step_s for plan in plans]


def is_convex(values: list[float]) -> bool:
    """Whether no point of the curve lies above a chord between two others, by more than 1 % of its height."""
    size = (max(values) - min(values)) or 1.0
    return all(
        values[number] <= values[i] + (values[j] - values[i]) * (number - i) / (j - i) + 0.01 * size
        for i, j in itertools.combinations(range(len(values)), 2)
        for number in range(i + 1, j)
    )


def rows_of(
    shares: dict[str, float], times: dict[str, list[float]], at_one_s: dict[str, float], budgets: dict
) -> list[Row]:
    """Returns the rows of the README's table; `times` are those of each factor below 1 alone, by model."""
    falls = sum(each == sorted(each, reverse=True) for each in times.values())
    convex = sum(is_convex(each) for each in times.values())
    drop = ", ".join(f"{name} {1 - each[-1] / each[0]:.1%}" for name, each in times.items())
    rises = max(at_one_s[name] / each[-1] - 1 for name, each in times.items())
    more = [100 * (shares["memferry"] - shares[name]) for name in ("zero-offload", "native-offload")]
    size = budgets["knee"]["peak_device_bytes"] / 1e9
    return [
        Row(
            "MemFerry, Fig. 10(a)",
            "GPT-2: GPU utilization of DeepSpeed",
            "63.1 %",
            f"{shares['zero-offload']:.1%}",
            "the GPU's efficiency, and the batch, are assumed",
        ),
        Row(
            "MemFerry, Fig. 10(a)",
            "MemFerry above DeepSpeed, Native-Offload",
            "18.5, 1.5 points",
            f"{more[0]:.1f}, {more[1]:.1f} points",
            "our baselines have no cost of allocating gradients; steady state",
        ),
        Row(
            "MemFerry, Fig. 10(a)",
            "GO-MemFerry above DeepSpeed",
            "27 points",
            f"{100 * (shares['go-memferry'] - shares['zero-offload']):.1f} points",
        ),
        Row(
            "MemFerry, Fig. 10(b)",
            "time falls as the reserve factor rises",
            "yes",
            f"{falls} of {len(times)} models never rise up to 0.95; from first to last {drop}; "
            f"at 1 up to {rises:.1%} more",
            "at 1 no gradient is GO, though some are faster so; the plan of each factor alone: `tune` lets that of a "
            "smaller factor stand for a larger one",
        ),
        Row("MemFerry, Fig. 10(b)", "the curves are convex", "yes", f"{convex} of {len(times)} models, to 1 %"),
        Row(
            "MemFerry, Fig. 10(b)",
            f"knee of time against memory, {budgets['model']}",
            "",
            f"{budgets['knee']['steady_step_s'] * 1e3:.0f} ms in {size:.2f} GB",
            "ours only",
        ),
    ]


def draw(shares: dict[str, float], curves: dict[str, list[dict]], budgets: dict, path) -> None:
    figure, axes = new_figure(1, 3, figsize=(15, 4.6))
    bars, factors, memory = axes.flat
    bars.bar(range(len(shares)), [100 * share for share in shares.values()], 0.6, color="#2f6fb7")
    bars.set_xticks(range(len(shares)), [SYSTEMS[name] for name in shares], rotation=15)
    bars.set_ylabel("GPU busy, % of a steady step")
    bars.set_title("10(a): GPT-2-medium")
    for (name, curve), colour in zip(curves.items(), COLOURS, strict=False):
        times = [point["steady_step_s"] / curve[0]["steady_step_s"] for point in curve]
        factors.plot(FACTORS, times, marker="o", markersize=3.5, color=colour, label=name)
    factors.set_xlabel("reserve factor: share of gradient bytes that may stay")
    factors.set_ylabel("iteration time, all gradients GO = 1")
    factors.set_title("10(b): GO-MemFerry")
    factors.legend(frameon=False, fontsize=9)
    points = [point for point in budgets["points"] if point["fits"]]
    sizes = [point["memory_budget_bytes"] / 1e9 for point in points]
    memory.plot(sizes, [1e3 * point["steady_step_s"] for point in points], marker="o", markersize=4, color="#1b7f5c")
    best = budgets["knee"]
    memory.plot(best["memory_budget_bytes"] / 1e9, 1e3 * best["steady_step_s"], "D", color="#b8352f", label="knee")
    memory.set_xscale("log")
    memory.set_xlabel("memory budget, GB")
    memory.set_ylabel("iteration time, ms")
    memory.set_title(f"time against memory: auto, {budgets['model']}")
    memory.legend(frameon=False, fontsize=9)
    figure.suptitle("MemFerry, Figure 10, simulated: A100, PCIe 3")
    save(figure, path)


def main() -> None:
    output = arguments(__doc__).output
    machine = find_machine(MACHINE)
    profiles = {model.name: estimate_profile(model.layers(), machine) for model in known_models()}
    shares = utilization(profiles["GPT-2-medium"])
    curves = {
        name: [point.to_json() for point in sweep_finest(profile, "go-memferry", FACTORS, None, Request(), MODULE)]
        for name, profile in profiles.items()
    }
    alone = {name: alone_s(profile, FACTORS) for name, profile in profiles.items()}
    at_one_s = {name: alone_s(profile, [1.0])[0] for name, profile in profiles.items()}
    model = "BERT-base"
    points = within_budgets(profiles[model])
    best = knee(points)
    assert best is not None
    budgets = {"model": model, "points": [point.to_json() for point in points], "knee": best.to_json()}
    draw(shares, curves, budgets, output / "memferry_figure_10.png")
    document = {"machine": MACHINE, "utilization": shares, "factors": FACTORS, "curves": curves, "alone_s": alone}
    document |= {"at_one_s": at_one_s, "budgets": budgets}
    write(output, "memferry_tuning", document, rows_of(shares, alone, at_one_s, budgets))


if __name__ == "__main__":
    main()
