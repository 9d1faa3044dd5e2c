"""The device memory of a plan."""

from jaxferry.plan.evaluate import PlanEvaluator
from jaxferry.plan.records import Plan
from jaxferry.profiling.records import Profile


def peak_device_bytes(profile: Profile, plan: Plan) -> int:
    """The most bytes of copies, activations and gradients at any instant of a chain of steps, from the simulator.

    Raises:
      InputError: if the plan is for another profile.
    """
    plan.check_profile(profile)
    return int(PlanEvaluator(profile).plan(plan).peak_bytes[0])


def smallest_peak_bytes(profile: Profile) -> int:
    """The smallest peak of any plan: all activations, which every plan holds between the last forward and backward.

    Each layer that can recompute counts with what it then keeps. A plan with all layers DHA and all gradients GO
    reaches this peak.
    """
    return sum(min(layer.kept_bytes(False), layer.kept_bytes(layer.can_recompute)) for layer in profile.layers)
