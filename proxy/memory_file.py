"""Files that lie in memory, and their seals. Standard library only.

By the C library and by number: a Python that was built for an old C library runs on a new one, and has no names for
them. Owns: these calls. Must not: know what is in the files.
"""

from __future__ import annotations

import ctypes
import fcntl
import os

_libc = ctypes.CDLL(None, use_errno=True)

# linux/memfd.h and linux/fcntl.h
_MFD_CLOEXEC = 0x1
_MFD_ALLOW_SEALING = 0x2
_F_ADD_SEALS = 1024 + 9
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW, _SEAL_WRITE = 0x1, 0x2, 0x4, 0x8


def create(name: str) -> int:
    """A descriptor, close-on-exec, of an empty file in memory that can be sealed. Raises `OSError`."""
    descriptor: int = _libc.memfd_create(name.encode(), ctypes.c_uint(_MFD_CLOEXEC | _MFD_ALLOW_SEALING))
    if descriptor < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"memfd_create: {os.strerror(number)}")
    return descriptor


def seal(descriptor: int) -> None:
    """From now on nobody changes the file, nor this. Raises `OSError`: a mapping can be written to, or it is sealed."""
    fcntl.fcntl(descriptor, _F_ADD_SEALS, _SEAL_SEAL | _SEAL_SHRINK | _SEAL_GROW | _SEAL_WRITE)
