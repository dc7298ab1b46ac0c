"""The prefix cache: which page holds which tokens after which prefix.

A full page is known by a chained key, ``k_i = H(k_{i-1}, tokens_i)`` with ``k_{-1} = H(salt)``, so
one look-up says that *everything* up to and including the page is equal. H is BLAKE2b: nobody can
build a second prefix with the same key. The page's own tokens are compared all the same.

Requests with equal prefixes that arrive together compute them once. Whoever is admitted first is
the *writer* of the keys it is going to publish; the others wait on the key, not on the writer: if
the writer leaves, the next one to wait takes its place.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from hashlib import blake2b

from turnstile.core.pages import AuditError, PagePool
from turnstile.core.request import Sequence, State


class PrefixCache:
    """Keys to pages, and keys to those who are computing them.

    With ``enabled`` false nothing is ever published, so nothing is ever found.
    """

    def __init__(self, pool: PagePool, *, enabled: bool = True) -> None:
        self.pool = pool
        self.enabled = enabled
        self.queries = 0
        """Tokens looked up."""
        self.hits = 0
        """Tokens found."""
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._tokens_of: dict[int, bytes] = {}
        self._writer_of: dict[bytes, Sequence] = {}
        self._writes: dict[Sequence, list[bytes]] = {}
        self._waiters: dict[bytes, list[Sequence]] = {}
        pool.on_evict = self._forget

    # -- queries (keys are derived on demand, which is their only effect) --------------------------

    def match(self, sequence: Sequence) -> list[int]:
        """The pages of the longest unbroken prefix that is cached or held by somebody."""
        limit = self._most_pages(sequence)
        known = len(sequence.keys)
        fresh = self._derive_keys(sequence, limit)
        pages: list[int] = []
        for key in sequence.keys[:limit]:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        contents = self._contents(sequence, 0, min(known, len(pages))) + fresh
        for i, (page, content) in enumerate(zip(pages, contents, strict=False)):
            if self._tokens_of[page] != content:
                return pages[:i]
        return pages

    def awaited_key(self, sequence: Sequence, matched: int) -> bytes | None:
        """The key to wait on, where running sequences are about to publish pages from ``matched``
        on: that of the last page of the unbroken run. None where nobody is.
        """
        last = None
        for i in range(matched, self._most_pages(sequence)):
            if sequence.keys[i] not in self._writer_of:
                break
            last = sequence.keys[i]
        return last

    def has_page(self, sequence: Sequence, index: int) -> bool:
        """Whether page ``index`` can be found for a sequence that was matched before. O(1)."""
        return index < self._most_pages(sequence) and sequence.keys[index] in self._page_of

    # -- commands ---------------------------------------------------------------------------------

    def count(self, sequence: Sequence, hit_tokens: int) -> None:
        """Record an admitted sequence's look-up in the statistics."""
        if self.enabled:
            self.queries += sequence.total
            self.hits += hit_tokens

    def wait(self, sequence: Sequence, key: bytes) -> None:
        """Park ``sequence`` until ``key`` is published or its writer leaves."""
        self._waiters.setdefault(key, []).append(sequence)

    def start_writing(self, sequence: Sequence) -> None:
        """Make an admitted sequence the writer of its full pages that nobody has or writes."""
        if not self.enabled:
            return
        first = sequence.computed // self.pool.page_size
        last = sequence.total // self.pool.page_size
        self._derive_keys(sequence, last)
        keys = [k for k in sequence.keys[first:last] if k not in self._writer_of]
        keys = [k for k in keys if k not in self._page_of]
        for key in keys:
            self._writer_of[key] = sequence
        if keys:
            self._writes[sequence] = keys

    def stop_writing(self, sequence: Sequence) -> list[Sequence]:
        """The sequence leaves (or lost its pages): give up its keys; returns who waited on them."""
        woken: list[Sequence] = []
        for key in self._writes.pop(sequence, ()):
            if self._writer_of.get(key) is sequence:
                del self._writer_of[key]
                woken += self._waiters.pop(key, ())
        return woken

    def publish(self, sequence: Sequence, before: int) -> list[Sequence]:
        """Publish the pages that became full since ``before`` tokens were computed; returns who
        waited on them. A page whose content is known already stays private: it goes to the free
        list when it is released.
        """
        if not self.enabled:
            return []
        page_size = self.pool.page_size
        first, last = before // page_size, sequence.computed // page_size
        if first == last:
            return []
        self._derive_keys(sequence, last)
        woken: list[Sequence] = []
        contents = self._contents(sequence, first, last)
        for i, content in enumerate(contents, start=first):
            key, page = sequence.keys[i], sequence.table.pages[i]
            if key not in self._page_of:
                self._page_of[key] = page
                self._key_of[page] = key
                self._tokens_of[page] = content
                self.pool.publish(page)
            if self._writer_of.pop(key, None) is not None:
                woken += self._waiters.pop(key, ())
        return woken

    def clear(self) -> int:
        """Forget all pages that nobody holds; returns how many."""
        return self.pool.drop_cached()

    def rebuild(self, running: Seq[Sequence]) -> None:
        """Forget everything but the full pages of those who run, whose keys are derived anew; they
        write what they are still to compute, and nobody waits. The pool has been rebuilt.
        """
        self._page_of.clear()
        self._key_of.clear()
        self._tokens_of.clear()
        self._writer_of.clear()
        self._writes.clear()
        self._waiters.clear()
        for sequence in running:
            sequence.keys = []
            self.publish(sequence, 0)
        for sequence in running:
            self.start_writing(sequence)

    def audit(self, parked: Iterable[Sequence]) -> None:
        """Check that what can be found is there, and that all who are parked will be woken.

        Raises
        ------
        AuditError
        """
        for key, page in self._page_of.items():
            if self._key_of.get(page) != key or page not in self._tokens_of:
                raise AuditError(f"Page {page} is found by a key that is not its own.")
            if not self.pool.is_published(page):
                raise AuditError(f"Page {page} can be found but is not published.")
        if not len(self._page_of) == len(self._key_of) == len(self._tokens_of):
            raise AuditError("A page that cannot be found has still a key or tokens.")
        for key, writer in self._writer_of.items():
            if writer.state is not State.RUNNING or key not in self._writes.get(writer, ()):
                raise AuditError(f"{writer} is to publish a page that it will not compute.")
        for key, waiters in self._waiters.items():
            if key not in self._writer_of:
                raise AuditError(f"{waiters} wait for a page that nobody computes.")
        known = {sequence for waiters in self._waiters.values() for sequence in waiters}
        for sequence in parked:
            if sequence not in known:
                raise AuditError(f"{sequence} is parked and nobody will wake it.")

    # -- inside -----------------------------------------------------------------------------------

    def _most_pages(self, sequence: Sequence) -> int:
        """Most pages that a sequence may take from the cache: 0 where its prompt is to be computed
        anew, and never that of its newest token, whose logits are needed for the next draw.
        """
        request = sequence.request
        if not self.enabled or not request.read_cache or request.score_prompt:
            return 0
        return (sequence.total - 1) // self.pool.page_size

    def _forget(self, page: int) -> None:
        key = self._key_of.pop(page)
        del self._page_of[key]
        del self._tokens_of[page]

    def _contents(self, sequence: Sequence, first: int, last: int) -> list[bytes]:
        """The tokens of the full pages from ``first`` to before ``last``, of each as bytes.

        Converted all at once: converting page by page costs as much as hashing them.
        """
        size = self.pool.page_size
        whole = array("q", sequence.tokens[first * size : last * size])
        step, data = size * whole.itemsize, whole.tobytes()
        return [data[at : at + step] for at in range(0, len(data), step)]

    def _derive_keys(self, sequence: Sequence, pages: int) -> list[bytes]:
        """Derive the keys of so many pages; returns what the pages hold whose keys are new."""
        keys = sequence.keys
        if len(keys) >= pages:
            return []
        key = keys[-1] if keys else _root(sequence.request.salt)
        contents = self._contents(sequence, len(keys), pages)
        for content in contents:
            key = blake2b(key + content, digest_size=32).digest()
            keys.append(key)
        return contents


def _root(salt: bytes) -> bytes:
    return blake2b(salt, digest_size=32, person=b"turnstile-root").digest()
