"""Bytes of one file that become bytes of another by reference: a snapshot in the time of a system call.

File systems that copy on write (XFS with reflink, btrfs) can share blocks between files; whoever writes to one of them later
writes elsewhere. Others cannot, and neither can two file systems: then the caller copies.
"""

from __future__ import annotations

import errno
import fcntl
import struct

FICLONERANGE = 0x4020940D
"""ioctl of Linux (ioctl_ficlonerange(2)): source handle, source offset, bytes, target offset; all of 64 bits."""

CANNOT = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.ETXTBSY)
"""What is answered where blocks cannot be shared: other file systems, another one, ranges that do not begin at a block."""


def clone_range(source: int, start: int, size: int, target: int, at: int) -> bool:
    """Let bytes [at, at + size) of an open file be those from `start` on of another; return whether that could be done.

    Args:
        source: handle of the file that has the bytes.
        start: first byte of the range in `source`; a multiple of the file system's block, which is 4096 bytes or less.
        size: bytes of the range; a multiple of the block.
        target: handle of the file that gets the bytes.
        at: first byte of the range in `target`; a multiple of the block.

    Raises:
        OSError: of the drive (a full one).
    """
    try:
        fcntl.ioctl(target, FICLONERANGE, struct.pack("qQQQ", source, start, size, at))
    except OSError as error:
        if error.errno in CANNOT:
            return False
        raise
    return True
