"""The modes of a layer and the places of its gradient, in the terms of MemFerry, section IV."""

import enum


class Mode(enum.StrEnum):
    """Where a layer's forward and backward read its parameters."""

    GFGB = "GFGB"
    """Loaded before its forward; on the device for forward and backward (MemFerry)."""
    DHA = "DHA"
    """Never loaded: forward and backward read it in host memory (MemFerry)."""
    DFGB = "DFGB"
    """Forward by direct host access; then loaded, backward on the device (MemFerry)."""
    RELOAD = "RELOAD"
    """Loaded for the forward, dropped, loaded again for the backward (L2L; Weight Offloading Strategies)."""
    RESIDENT = "RESIDENT"
    """Always on the device; the device copy is refreshed after each update, unless that runs on the device."""


class GradientPlace(enum.StrEnum):
    """Where a layer's backward writes its gradient."""

    DEVICE = "device"
    """Device memory; a transfer then moves it to the host."""
    HOST = "host"
    """Host memory, directly: gradient offloading (GO-MemFerry)."""


class UpdatePlace(enum.StrEnum):
    """Where a parameter group is updated."""

    HOST = "host"
    """In host memory, where its master parameters and optimizer state live."""
    GPU = "gpu"
    """On the device; masters and state are streamed from host memory and back, the gradient never leaves.

    The new compute copy goes to host memory with them, or stays on the device if the group is RESIDENT."""
    RESIDENT = "resident"
    """On the device, where master parameters, optimizer state and compute copy stay; nothing of the group moves."""


class Subgroups(enum.StrEnum):
    """The size of the pieces in which masters and optimizer state stream through the GPU; see `step.streaming`."""

    LARGE = "large"
    """They keep a link busy during long backwards."""
    SMALL = "small"
    """They need an eighth of the room, so that large groups stream within a small budget."""


class Remat(enum.StrEnum):
    """What a layer keeps on the device from its forward to its backward under a plan."""

    NONE = "none"
    """All residuals of its backward: the profile's `activation_bytes`."""
    PRODUCTS = "products"
    """The results of large products, and its inputs: its backward computes everything else again."""
    FULL = "full"
    """Only its inputs: its backward runs its forward again."""


class ActivationPlace(enum.StrEnum):
    """Where what a layer keeps waits for its backward."""

    DEVICE = "device"
    """On the device."""
    HOST = "host"
    """In host memory, as far as the profile's `offloadable_bytes` go: it leaves after the forward and comes back."""


BLOCK, MODULE, FASTER = "block", "module", "auto"
GRANULARITIES = (BLOCK, MODULE, FASTER)
"""How fine layers are: all parameters between two cuts, those of one module, or whichever is faster."""
