"""What steps.py and contenders.py share: the contenders' names and the sizes and lengths of their runs."""

PROFILE = "profile"
PLAIN, RECIPE = "plain", "recipe"
POLICIES = (
    "native-overlapped",
    "exact",
    "zero-offload",
    "l2l",
    "auto",
    "memferry",
    "native-offload",
    "go-memferry",
)
# The most important come first, in case time runs out; what is not ours is known to work.
CONTENDERS = (PROFILE, *POLICIES, PLAIN, RECIPE)
# Batch rows and sequence length for each size.
BATCHES = {"tiny": (2, 32), "124m": (8, 1024), "medium": (8, 1024), "xl": (4, 1024)}
WARM_UP = 3
MIN_STEPS = 3
LEARNING_RATE = 1e-4
