"""The two processes behind an executor: the launcher and the proxy, started together and again when one is lost.

Owns: their lives. Must not: know calls.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from proxy.control import Proxy, ProxyConfig, ProxyUnavailable
from sandbox.isolation.client import IsolationUnavailable, Launcher, LauncherConfig
from sandbox.settings import Settings


class Backend:
    """Starts what is missing on `ready`, and nothing before it."""

    def __init__(self, settings: Settings, *, audit_path: Path, upstream_ca_file: Path | None) -> None:
        self._settings = settings
        self._proxy_config = ProxyConfig(settings.state_dir / "authority", audit_path, upstream_ca_file)
        self._starting = asyncio.Lock()
        self._launcher: Launcher | None = None
        self._proxy: Proxy | None = None

    async def ready(self) -> tuple[Launcher, Proxy]:
        """Both processes, running. Raises `IsolationUnavailable`, `ProxyUnavailable`."""
        async with self._starting:
            if self._proxy is not None and self._proxy.lost.is_set():
                await self._proxy.close()
                self._proxy = None
            if self._launcher is not None and self._launcher.lost.is_set():
                await self._launcher.close()
                self._launcher = None
            if self._proxy is None or self._launcher is None:
                await self._start()
            assert self._launcher is not None and self._proxy is not None
            return self._launcher, self._proxy

    async def close(self) -> None:
        """End both, the launcher first: it takes the sandboxes with it."""
        async with self._starting:
            launcher, proxy = self._launcher, self._proxy
            self._launcher = self._proxy = None
            if launcher is not None:
                await launcher.close()
            if proxy is not None:
                await proxy.close()

    @property
    def launcher_pid(self) -> int | None:
        return self._launcher.pid if self._launcher is not None else None

    @property
    def proxy_pid(self) -> int | None:
        return self._proxy.pid if self._proxy is not None else None

    async def _start(self) -> None:
        """The proxy announces its authority early, so that the launcher starts while mitmproxy is still imported."""
        proxy = self._proxy or await Proxy.start(self._proxy_config, command=self._settings.proxy_command)
        try:
            certificate = await proxy.certificate()
            if self._launcher is None:
                self._launcher = await Launcher.start(
                    LauncherConfig(
                        authority_certificate=certificate,
                        state_dir=self._settings.state_dir,
                        packages=self._settings.python_packages,
                    )
                )
            await proxy.ready()
        except (IsolationUnavailable, ProxyUnavailable):
            await proxy.close()
            self._proxy = None
            raise
        self._proxy = proxy
