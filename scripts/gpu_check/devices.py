"""Stage devices: what the build sees. A program without its device computes on the CPU and says nothing."""

from __future__ import annotations

from gpu_check.programs import checked
from gpu_check.stage import Context, Outcome
from llamafork.build.check import DEVICE, PREFIX
from llamafork.errors import EnvironmentFault


def look(ctx: Context) -> Outcome:
    listing = checked(ctx.run([ctx.programs("fork") / "llama-bench", "--list-devices"], most=60))
    seen = [(m[1], m[2], int(m[3] or 0)) for m in map(DEVICE.match, listing.out.splitlines()) if m]
    mine = [one for one in seen if one[0].startswith(PREFIX[ctx.options.backend])]
    if not mine:
        raise EnvironmentFault(
            f"{ctx.options.backend} was asked for, and the build sees no device of it",
            why=f"llama-bench --list-devices: {', '.join(name for name, _, _ in seen) or 'none'}",
            do="nothing was measured: on the CPU alone it would mean nothing",
        )
    version = checked(ctx.run([ctx.programs("fork") / "llama-bench", "--version"], most=60))
    numbers = {
        "devices": [{"name": name, "description": text, "mib": mib} for name, text, mib in mine],
        "version": [line for line in (version.out + version.err).splitlines() if "version" in line or "series" in line],
    }
    return Outcome("; ".join(f"{name} {text}, {mib} MiB" for name, text, mib in mine), numbers)


def first(ctx: Context) -> str:
    """The device that tests are run on."""
    found: str = ctx.found["devices"]["devices"][0]["name"]
    return found
