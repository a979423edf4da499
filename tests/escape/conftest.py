"""Every escape test runs twice: by an executor of the user who runs the tests, and by one of an unprivileged user's.

The fixture is `confined`, of the tests as a whole.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.lab import Run

type Confined = Callable[..., Run]
