"""The table of stages. A new one is a function from Context to Outcome and a line here, in the order of running."""

from __future__ import annotations

from gpu_check import building, cache, cache_speed, devices, identity, model, ops, profiling, speed
from gpu_check.stage import Stage

EXTRA = 5  # stages of this priority fill what time is left
STAGES = (
    Stage("build", building.fork, building.fork_cost, 0),
    Stage("devices", devices.look, lambda ctx: 8.0, 0, needs=("build",)),
    Stage("backend-ops", ops.experts, ops.experts_cost, 1, needs=("devices",)),
    Stage("skip-ids", ops.skipped, ops.skipped_cost, 1, needs=("devices",)),
    Stage("model", model.make, model.cost, 2, needs=("devices",)),
    Stage("cache-output", cache.output, cache.output_cost, 2, needs=("model",)),
    Stage("cache-audit", cache.audit, cache.audit_cost, 2, needs=("model",)),
    Stage("cache-speed", cache_speed.measure, cache_speed.cost, 2, needs=("model",)),
    Stage("profile", profiling.decode, profiling.cost, 4, needs=("model",)),
    Stage("stock", building.stock, building.stock_cost, 3, needs=("devices",)),
    Stage("identity", identity.compare, identity.cost, 2, needs=("stock", "model")),
    Stage("speed", speed.measure, speed.cost, 3, needs=("stock", "model")),
    Stage("backend-ops-all", ops.everything, ops.everything_cost, EXTRA, needs=("devices",)),
)
