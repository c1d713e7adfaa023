"""The real scheduler under a virtual clock: see `loop.py`.

    timeline = simulate(book_requests(), book_policies()["chunked"], analysis.BOOK_STEP)

Names are loaded when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mini_engine.simulator.agents import agent_requests
    from mini_engine.simulator.cost import RooflineCost
    from mini_engine.simulator.examples import book_policies, book_requests
    from mini_engine.simulator.fit import MeasuredStep, fit_run
    from mini_engine.simulator.loop import Simulator, simulate
    from mini_engine.simulator.report import summary
    from mini_engine.simulator.tiers import PrefixPrices, PrefixReplay, belady_report, keyed_trace
    from mini_engine.simulator.timeline import Timeline
    from mini_engine.simulator.traces import load_agent_sessions, load_mooncake
    from mini_engine.simulator.workloads import Request, fixed_arrivals, poisson_arrivals, request_list

_HOME = {
    "MeasuredStep": "fit",
    "RooflineCost": "cost",
    "fit_run": "fit",
    "book_policies": "examples",
    "book_requests": "examples",
    "summary": "report",
    "Simulator": "loop",
    "simulate": "loop",
    "Timeline": "timeline",
    "load_agent_sessions": "traces",
    "load_mooncake": "traces",
    "Request": "workloads",
    "fixed_arrivals": "workloads",
    "poisson_arrivals": "workloads",
    "request_list": "workloads",
    "agent_requests": "agents",
    "PrefixPrices": "tiers",
    "PrefixReplay": "tiers",
    "belady_report": "tiers",
    "keyed_trace": "tiers",
}
__all__ = [
    "MeasuredStep",
    "PrefixPrices",
    "PrefixReplay",
    "Request",
    "RooflineCost",
    "Simulator",
    "Timeline",
    "agent_requests",
    "belady_report",
    "book_policies",
    "book_requests",
    "fit_run",
    "fixed_arrivals",
    "keyed_trace",
    "load_agent_sessions",
    "load_mooncake",
    "poisson_arrivals",
    "request_list",
    "simulate",
    "summary",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'mini_engine.simulator' has no attribute {name!r}")
    return getattr(import_module(f"mini_engine.simulator.{_HOME[name]}"), name)
