"""`Prefetch`: a background thread runs an iterator up to a number of items ahead of its consumer.

How: thread and consumer share a `Channel`, a short queue under one condition. The thread has references to the channel
and the iterator but not to the consumer, so dropping the consumer closes the channel and the thread ends. An
exception of the iterator is raised in the consumer, after the items before it; every wait of the consumer has
a deadline.

What it does not do: interrupt an iterator that hangs. The consumer gets an error at the deadline; the thread
is a daemon and ends with the process.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

from shardwise.errors import RunError

Item = TypeVar("Item")


class Channel(Generic[Item]):
    """A queue of at most `size` items; the producer ends it, perhaps with an error, or the consumer closes it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._items: deque[Item] = deque()
        self._changed = threading.Condition()
        self._ended = False
        self._error: BaseException | None = None
        self._closed = False

    def put(self, item: Item) -> bool:
        """Waits for room and appends an item; returns False, without appending, once the channel is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._items) < self._size)
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._closed

    def end(self, error: BaseException | None = None) -> None:
        with self._changed:
            self._ended, self._error = True, error
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()

    def get(self, timeout_s: float, what: str) -> Item:
        """Waits for the next item and returns it.

        Raises StopIteration at the end, the producer's error, or `RunError` after `timeout_s` seconds, which names
        `what` was awaited.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            # items that were read before the end or an error are still given out
            while not self._items:
                if self._ended or self._closed:
                    # the error is raised once; later calls raise StopIteration
                    error, self._error = self._error, None
                    raise error or StopIteration
                left = deadline - time.monotonic()
                # reading may hang forever on a network disk
                if left <= 0:
                    raise RunError(f"{what} gave nothing for {timeout_s:g} s; is its storage reachable?")
                self._changed.wait(left)
            item = self._items.popleft()
            self._changed.notify_all()
            return item


class Prefetch(Generic[Item]):
    """An iterator over `items` that a background thread reads up to `ahead` items in advance.

    timeout_s   seconds that the consumer waits for an item, else `RunError`
    what        name of what reads the items, for that error

    An error raised by `items` is raised in the consumer.
    """

    def __init__(self, items: Iterator[Item], ahead: int, *, timeout_s: float, what: str) -> None:
        self._channel: Channel[Item] = Channel(ahead)
        self._timeout_s = timeout_s
        self._what = what
        self._thread = threading.Thread(
            target=_pump, args=(items, self._channel), name="shardwise-prefetch", daemon=True
        )
        self._finalizer = weakref.finalize(self, _shut, self._channel, self._thread, 1.0)
        self._thread.start()

    def __iter__(self) -> Prefetch[Item]:
        return self

    def __next__(self) -> Item:
        return self._channel.get(self._timeout_s, self._what)

    def close(self, wait_s: float = 5.0) -> None:
        """Ends the thread; waits at most `wait_s` seconds for a read under way."""
        if self._finalizer.detach():
            _shut(self._channel, self._thread, wait_s)


def _pump(items: Iterator[Item], channel: Channel[Item]) -> None:
    """Puts each item into the channel until that is closed, then ends the channel, with the error if one was raised."""
    try:
        for item in items:
            if not channel.put(item):
                return
    except BaseException as error:  # any error, even SystemExit, is raised in the consumer
        channel.end(error)
    else:
        channel.end()


def _shut(channel: Channel, thread: threading.Thread, wait_s: float) -> None:
    channel.close()
    if thread is not threading.current_thread():
        thread.join(wait_s)
