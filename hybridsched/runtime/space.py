"""Watches the free space of the run folder: below queue.min_free_bytes no new sample is admitted.

Owns the controller's entry in ``Rollouter.blocked``. What is under way goes on, and finished samples are kept by
whoever holds them: this only keeps a disk that is filling up from becoming a full one. Does not: remove anything.
"""

from __future__ import annotations

import asyncio

from hybridsched.runtime.parts import Parts
from hybridsched.runtime.plan import CONTROLLER


async def watch_space(parts: Parts) -> None:
    """Look every queue.retry_s, until cancelled. Returns at once when queue.min_free_bytes is 0."""
    queue = parts.services.config.queue
    while queue.min_free_bytes:
        free = await parts.services.offload(parts.services.store.free_bytes)
        blocked = parts.rollouter.blocked
        low = free < queue.min_free_bytes
        if low != (CONTROLLER in blocked):
            text = f"{free} bytes free in the run folder (queue.min_free_bytes = {queue.min_free_bytes})"
            parts.log.event("fault", CONTROLLER, new="admission stopped" if low else "admission goes on", reason=text)
            if low:
                blocked[CONTROLLER] = text
            else:
                del blocked[CONTROLLER]
                parts.rollouter.pump()
            parts.changed.notify()
        await asyncio.sleep(queue.retry_s)
