"""The unfinished groups in queues, by what they do, and all in one order."""

from bisect import bisect_left, insort

from pagedattn_serve.scheduling.sequence import SequenceGroup, SequenceStatus

# A group of priority p stands where a group of priority 0 would stand that came p times this many requests later. So of
# the requests with a better priority, only those among the next p times this many pass it.
PLACES_PER_PRIORITY = 10_000


class GroupQueues:
    """Each group is in the queue of its sequences' status. The queues are sorted by `SequenceGroup.order`: by arrival,
    shifted by priority. They are the same lists for ever.

    waiting, running, swapped: the queues.
    by_id: the groups of all queues, by request id.
    max_num_batched_tokens: what a step holds. A group with more tokens is long.
    """

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: list[SequenceGroup] = []
        self.running: list[SequenceGroup] = []
        self.swapped: list[SequenceGroup] = []
        self.by_id: dict[str, SequenceGroup] = {}
        self._short_waiting: list[SequenceGroup] = []  # those of them that are not long, in order, too
        self._num_arrived = 0

    def has(self, group: SequenceGroup) -> bool:
        """Whether this very group is in a queue."""
        return self.by_id.get(group.request_id) is group

    def is_long(self, group: SequenceGroup) -> bool:
        """Whether the group's tokens, once they are all to be computed, do not fit in a step."""
        return sum(sequence.num_tokens for sequence in group.sequences) > self.max_num_batched_tokens

    def add(self, group: SequenceGroup) -> None:
        """Give a new group its place in the order. It waits."""
        group.order = (self._num_arrived + group.priority * PLACES_PER_PRIORITY, self._num_arrived)
        self._num_arrived += 1
        self.by_id[group.request_id] = group
        self._enter(group, SequenceStatus.WAITING)

    def move(self, group: SequenceGroup, status: SequenceStatus) -> None:
        """Give the sequences of a group this status, and the group a place in its queue."""
        self._leave(group, group.sequences[0].status)
        for sequence in group.sequences:
            sequence.status = status
        self._enter(group, status)

    def remove(self, group: SequenceGroup, status: SequenceStatus) -> None:
        """Forget a group that had this status, and has no sequences left."""
        del self.by_id[group.request_id]
        self._leave(group, status)

    def restart(self, groups: list[SequenceGroup]) -> None:
        """Forget all groups but these, which wait afterwards."""
        self.by_id = {group.request_id: group for group in groups}
        for queue in (self.waiting, self.running, self.swapped, self._short_waiting):
            queue.clear()
        for group in groups:
            for sequence in group.sequences:
                sequence.status = SequenceStatus.WAITING
            self._enter(group, SequenceStatus.WAITING)

    def next_waiting(self) -> SequenceGroup | None:
        """The first waiting group that may be let in. A long prompt may not, while another one is in prefill: it would
        hold blocks for nothing, and miss the blocks that the other is about to fill, if both begin alike."""
        if not self.waiting or not self.is_long(self.waiting[0]):
            return self.waiting[0] if self.waiting else None
        long = next((group for group in self.running if group.in_prefill and self.is_long(group)), None)
        if long is None or self.waiting[0].order < long.order:
            return self.waiting[0]
        return self._short_waiting[0] if self._short_waiting else None

    def _enter(self, group: SequenceGroup, status: SequenceStatus) -> None:
        insort(self._queue_of(status), group, key=place_of)
        if status is SequenceStatus.WAITING and not self.is_long(group):
            insort(self._short_waiting, group, key=place_of)

    def _leave(self, group: SequenceGroup, status: SequenceStatus) -> None:
        queue = self._queue_of(status)
        del queue[bisect_left(queue, group.order, key=place_of)]
        if status is SequenceStatus.WAITING:
            place = bisect_left(self._short_waiting, group.order, key=place_of)
            if self._short_waiting[place : place + 1] == [group]:
                del self._short_waiting[place]

    def _queue_of(self, status: SequenceStatus) -> list[SequenceGroup]:
        if status is SequenceStatus.RUNNING:
            return self.running
        return self.swapped if status is SequenceStatus.SWAPPED else self.waiting


def place_of(group: SequenceGroup) -> tuple[int, int]:
    """A group's place among all groups, to sort by."""
    return group.order
