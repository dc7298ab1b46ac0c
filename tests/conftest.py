"""Settings for the whole suite."""

from hypothesis import settings

# How long an example takes is the machine's business: timing is benchmarked, not tested.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
