"""The two processes behind an executor: the launcher and the proxy, started together and again when one is lost.

Owns: their lives. Must not: know calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from proxy.control import Proxy, ProxyConfig, ProxyUnavailable
from sandbox.isolation.client import IsolationUnavailable, Launcher, LauncherConfig
from sandbox.isolation.pool import WarmPool
from sandbox.settings import Settings


class Backend:
    """Starts what is missing on `ready`, and nothing before it."""

    def __init__(
        self,
        settings: Settings,
        *,
        audit_path: Path,
        upstream_ca_file: Path | None,
        readable: Callable[[], tuple[Path, ...]],
    ) -> None:
        """`readable` gives the directories of the host that sandboxes may be shown; it is asked at each start."""
        self._settings = settings
        self._readable = readable
        self._proxy_config = ProxyConfig(settings.state_dir / "authority", audit_path, upstream_ca_file)
        self._starting = asyncio.Lock()
        self._pool: WarmPool | None = None
        self._proxy: Proxy | None = None

    async def ready(self) -> tuple[WarmPool, Proxy]:
        """Both processes, running. Raises `IsolationUnavailable`, `ProxyUnavailable`.

        Who does not wait any more leaves a start to those who do.
        """
        starting = asyncio.ensure_future(self._ready())
        starting.add_done_callback(lambda done: done.cancelled() or done.exception())  # perhaps nobody waits
        return await asyncio.shield(starting)

    async def _ready(self) -> tuple[WarmPool, Proxy]:
        async with self._starting:
            if self._proxy is not None and self._proxy.lost.is_set():
                await self._proxy.close()
                self._proxy = None
            if self._pool is not None and self._pool.launcher.lost.is_set():
                await _end(self._pool)
                self._pool = None
            if self._proxy is None or self._pool is None:
                await self._start()
            assert self._pool is not None
            assert self._proxy is not None
            return self._pool, self._proxy

    async def close(self) -> None:
        """End both, the launcher first: it takes the sandboxes with it."""
        async with self._starting:
            pool, proxy = self._pool, self._proxy
            self._pool = self._proxy = None
            if pool is not None:
                await _end(pool)
            if proxy is not None:
                await proxy.close()

    @property
    def launcher_pid(self) -> int | None:
        return self._pool.launcher.pid if self._pool is not None else None

    @property
    def proxy_pid(self) -> int | None:
        return self._proxy.pid if self._proxy is not None else None

    async def _start(self) -> None:
        """The proxy announces its authority early, so that the launcher starts while mitmproxy is still imported."""
        proxy = self._proxy or await Proxy.start(self._proxy_config, command=self._settings.proxy_command)
        try:
            certificate = await proxy.certificate()
            if self._pool is None:
                launcher = await Launcher.start(
                    LauncherConfig(
                        authority_certificate=certificate,
                        state_dir=self._settings.state_dir,
                        packages=self._settings.python_packages,
                        readable=self._readable(),
                    )
                )
                self._pool = WarmPool(launcher, self._settings.warm_sandboxes)
            await proxy.ready()
        except (IsolationUnavailable, ProxyUnavailable):
            await proxy.close()
            self._proxy = None
            raise
        self._proxy = proxy


async def _end(pool: WarmPool) -> None:
    """The launcher first: what waits ends with it, and is then only given back."""
    await pool.launcher.close()
    await pool.close()
