"""Every refusal the engine makes on purpose.

One line that names the cause, the numbers and what would work. They derive from `ValueError`, so that a caller who
knows nothing of this module still catches them; the command line prints them without a traceback.
"""


class EngineError(ValueError):
    """Base of all deliberate refusals."""


class ConfigError(EngineError):
    """An engine or model setting that cannot work, alone or together with another one."""


class ModelLoadError(EngineError):
    """A model that cannot be found, read or understood."""


class RequestError(EngineError):
    """A request that could never be served. Nothing of it was queued."""


class PoolTooSmall(RequestError):
    """A request (or the model's own maximum) that needs more KV blocks than the pool has."""
