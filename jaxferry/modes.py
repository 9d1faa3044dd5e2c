"""The ways in which a layer can be held and its gradient be kept: the words of MemFerry, section IV."""

import enum


class Mode(enum.StrEnum):
    """Where forward and backward of a layer read its parameters."""

    GFGB = "GFGB"
    """Loaded before its forward; on the device for forward and backward (MemFerry)."""
    DHA = "DHA"
    """Never loaded: forward and backward read it in host memory (MemFerry)."""
    DFGB = "DFGB"
    """Forward by direct host access, then loaded; backward on the device (MemFerry)."""
    RELOAD = "RELOAD"
    """Loaded for the forward, dropped, loaded again for the backward (L2L; Weight Offloading Strategies)."""
    RESIDENT = "RESIDENT"
    """Always on the device; the copy there is refreshed after each update."""


class GradientPlace(enum.StrEnum):
    """Where the backward of a layer writes its gradient."""

    DEVICE = "device"
    """Into device memory, from where a transfer brings it to the host."""
    HOST = "host"
    """Straight into host memory: gradient offloading (GO-MemFerry)."""


class Remat(enum.StrEnum):
    """What a plan lets a layer keep on the device from its forward to its backward."""

    NONE = "none"
    """All that its derivative asks for: the profile's `activation_bytes`."""
    FULL = "full"
    """Its inputs alone: its backward runs its forward again."""
