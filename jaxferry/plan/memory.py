"""How much device memory a plan takes."""

from jaxferry.plan.evaluate import PlanEvaluator
from jaxferry.plan.records import Plan
from jaxferry.profiling.records import Profile


def peak_device_bytes(profile: Profile, plan: Plan) -> int:
    """The most bytes held at any instant of a chain of steps: copies, activations, gradients; as the simulator says.

    Raises:
      InputError: if the plan is for another profile.
    """
    plan.check_profile(profile)
    return int(PlanEvaluator(profile).plan(plan).peak_bytes[0])


def smallest_peak_bytes(profile: Profile) -> int:
    """The peak that no plan goes below: all activations, which every plan holds between the last forward and backward.

    Those count that are left if each layer that can runs its forward again. All layers DHA and all gradients GO reach
    it.
    """
    return sum(min(layer.kept_bytes(False), layer.kept_bytes(layer.can_recompute)) for layer in profile.layers)
