"""`make bench`: every benchmark, one after the other."""

from benchmarks import attempts, proxy

attempts.main()
print()
proxy.main()
