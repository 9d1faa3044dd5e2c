"""Which parameter groups a plan may update on the GPU, as far as the profile goes."""

from jaxferry.costs.records import Profile


def updatable_groups(profile: Profile) -> list[int]:
    """The groups that a plan may update on the device: those whose layers state `update_gpu_s`."""
    layers = ((group, profile.layers[members[0]]) for group, members in enumerate(profile.groups))
    return [group for group, layer in layers if layer.has_gradient and layer.update_gpu_s is not None]


def streamable_groups(profile: Profile) -> list[int]:
    """The groups that a policy may stream: those whose layers state all times of that."""
    layers = {group: profile.layers[profile.groups[group][0]] for group in updatable_groups(profile)}
    return [group for group, x in layers.items() if x.state_up_s is not None and x.state_down_s is not None]
