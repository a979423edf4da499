"""The service, from another program: `Client`, and `AsyncClient` for programs with an event loop.

Owns: what is sent, what is sent again, and which error is which. Must not: load what runs calls; it is for an agent
host, which has the service beside it and not in it.
"""

from sandbox.client.asynchronous import AsyncClient, AsyncTaskHandle
from sandbox.client.attempts import Retries
from sandbox.client.errors import (
    Busy,
    ConnectionLost,
    InvalidCall,
    NotFound,
    ServiceError,
    Unauthorised,
    Unavailable,
)
from sandbox.client.operations import Readiness
from sandbox.client.sync import Client, TaskHandle

__all__ = [
    "AsyncClient",
    "AsyncTaskHandle",
    "Busy",
    "Client",
    "ConnectionLost",
    "InvalidCall",
    "NotFound",
    "Readiness",
    "Retries",
    "ServiceError",
    "TaskHandle",
    "Unauthorised",
    "Unavailable",
]
