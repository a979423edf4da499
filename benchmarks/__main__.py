"""`make bench`: every benchmark, one after the other, or those that are named: `python -m benchmarks packages`."""

from __future__ import annotations

import argparse

from benchmarks import attempts, packages, proxy, service

BENCHMARKS = {"attempts": attempts.main, "proxy": proxy.main, "service": service.main, "packages": packages.main}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; without one, all")
    names = parser.parse_args().names
    if unknown := [name for name in names if name not in BENCHMARKS]:
        parser.error(f"no benchmark `{unknown[0]}`; hint: name some of {', '.join(BENCHMARKS)}")
    for place, name in enumerate(names or BENCHMARKS):
        if place:
            print()
        # Only this one needs more than this machine has.
        if name == "packages" and not names and (why := packages.unreachable()) is not None:
            print(f"packages: left out, since {why}")
        else:
            BENCHMARKS[name]()


if __name__ == "__main__":
    main()
