"""Measuring the engine on this machine; `measure.run` is `mini-engine bench`."""
