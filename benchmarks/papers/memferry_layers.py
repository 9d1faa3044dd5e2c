"""Reproduces Figures 3(b) to 3(d) of MemFerry: forward and backward of single layers, on the GPU and by DHA.

    python benchmarks/papers/memferry_layers.py

Writes `memferry_layers.json` and a PNG. Layers are those of BERT-base, 8 of 128 tokens, on an A100 with PCIe 3; the
convolution is one of 3x3 over 256 channels of 14 x 14 pixels, as in a ResNet-50 for 8 images. Times are estimated by a
roofline with the bytes that our kernels move: a product by DHA stages its weights, each byte once, while it computes.
The paper's text gives only which way is faster, and 5 to 10 % for the slowdown of a backward by DHA.
"""

from figures import Row, arguments, legend, new_figure, save, write
from paper_models import ITEM, known_models, product

from jaxferry.costs import LayerCosts, LayerProfile, estimate_profile, find_machine

MACHINE = "a100-pcie3"
LAYERS = {
    "embeddings.word": "Embedding",
    "block0.norm1": "LayerNorm",
    "block0.query": "Linear",
    "block0.feed_forward1": "Linear (wide)",
    "convolution": "Convolution",
}
ON_GPU, BY_DHA = "#2f6fb7", "#b8352f"


def convolution() -> LayerCosts:
    """A 3x3 convolution of 256 channels, 8 images of 14 x 14."""
    pixels, channels = 8 * 14 * 14, 256
    parameters = 9 * channels**2 + channels
    flops, moved = 2 * pixels * 9 * channels**2, ITEM * (2 * pixels * channels + parameters)
    return product("convolution", parameters, flops, moved, 2)


def times_of(layer: LayerProfile) -> dict[str, float]:
    """The bars of the three panels, in seconds; a forward on the GPU includes the transfer, as in the paper."""
    return {
        "forward_on_gpu": layer.load_s + layer.forward_s,
        "forward_dha": layer.forward_dha_s,
        "backward_on_gpu": layer.backward_s,
        "backward_dha": layer.backward_dha_s,
        "backward_gradient_on_gpu": layer.backward_s,
        "backward_gradient_dha": layer.backward_go_s,
    }


PANELS = {
    "(b) forward": ("forward_on_gpu", "forward_dha"),
    "(c) backward": ("backward_on_gpu", "backward_dha"),
    "(d) backward, where the gradient goes": ("backward_gradient_on_gpu", "backward_gradient_dha"),
}


def rows_of(times: dict[str, dict[str, float]]) -> list[Row]:
    """Returns the rows of the README's table."""

    def ratios(of: str, over: str) -> str:
        return ", ".join(f"{name} {each[of] / each[over]:.2f}" for name, each in times.items())

    item = "MemFerry, Fig. 3"
    staged = "our products stage weights by panels while they compute, so DHA does not lose to load-then-compute"
    read = "without a load in between, a product by DHA is bound by the link; the paper's layers are not"
    return [
        Row(
            f"{item}(b)",
            "forward by DHA over load and forward",
            "below 1: Embedding, LayerNorm; above: Linear, Convolution",
            ratios("forward_dha", "forward_on_gpu"),
            staged,
        ),
        Row(
            f"{item}(c)",
            "backward by DHA over on the GPU",
            "1.05 to 1.10",
            ratios("backward_dha", "backward_on_gpu"),
            read,
        ),
        Row(
            f"{item}(d)",
            "backward that writes its gradient over one that does not",
            "above 1",
            ratios("backward_gradient_dha", "backward_gradient_on_gpu"),
            "the link's time of a dense gradient; a lookup's backward alone only adds a few rows",
        ),
    ]


def main() -> None:
    output = arguments(__doc__).output
    costs = {layer.name: layer for layer in (*known_models()[0].layers(), convolution())}
    profile = estimate_profile([costs[name] for name in LAYERS], find_machine(MACHINE))
    times = {LAYERS[layer.name]: times_of(layer) for layer in profile.layers}
    figure, axes = new_figure(1, 3, figsize=(15, 4.6))
    for axis, (title, keys) in zip(axes.flat, PANELS.items(), strict=True):
        for offset, (key, label, colour) in enumerate(
            zip(keys, ("on the GPU", "by DHA"), (ON_GPU, BY_DHA), strict=True)
        ):
            places = [place + 0.38 * (offset - 0.5) for place in range(len(times))]
            axis.bar(places, [1e6 * each[key] for each in times.values()], 0.36, color=colour, label=label)
        axis.set_xticks(range(len(times)), times, rotation=12)
        axis.set_yscale("log")
        axis.set_ylim(bottom=1)
        axis.set_title(title)
        axis.set_ylabel("microseconds")
    figure.suptitle("MemFerry, Figures 3(b) to (d), simulated: layers of BERT-base and a convolution, A100, PCIe 3")
    legend(figure, axes.flat[0], 2)
    save(figure, output / "memferry_figure_3.png", bottom=0.06)
    write(output, "memferry_layers", {"machine": MACHINE, "seconds": times}, rows_of(times))


if __name__ == "__main__":
    main()
