"""The requests an engine works on: by the caller's name, and by the scheduler's sequence."""

from collections.abc import Iterable, Set

from kv8.engine.completion import Completion, CompletionGroup
from kv8.engine.request import Request
from kv8.outputs import RequestOutput


class Roster:
    """Groups that have not been handed back as finished, and their unfinished completions."""

    def __init__(self) -> None:
        self._groups: dict[str, CompletionGroup] = {}
        self._by_sequence: dict[int, tuple[CompletionGroup, Completion]] = {}

    @property
    def sequences(self) -> Set[int]:
        """The unfinished completions' sequences."""
        return self._by_sequence.keys()

    def add(self, group: CompletionGroup) -> None:
        """Take in a group under a name not in use."""
        self._groups[group.output.request_id] = group
        for completion in group.completions:
            self._by_sequence[completion.request.sequence] = (group, completion)

    def group(self, request_id: str) -> CompletionGroup | None:
        """Return the group of that name, or `None`."""
        return self._groups.get(request_id)

    def find(self, request: Request) -> tuple[CompletionGroup, Completion]:
        """Return an unfinished completion and its group."""
        return self._by_sequence[request.sequence]

    def find_all(self, requests: Iterable[Request]) -> list[tuple[CompletionGroup, Completion]]:
        """Return those of ``requests`` that are unfinished, in their order."""
        known = self._by_sequence
        return [known[r.sequence] for r in requests if r.sequence in known]

    def end(self, completion: Completion) -> None:
        """Let go of a completion that has ended."""
        del self._by_sequence[completion.request.sequence]

    def publish(self, groups: Iterable[CompletionGroup]) -> list[RequestOutput]:
        """Return the groups' outputs, each once, and let go of those that have ended."""
        outputs = [group.refresh() for group in dict.fromkeys(groups)]
        for output in outputs:
            if output.finished:
                del self._groups[output.request_id]
        return outputs
