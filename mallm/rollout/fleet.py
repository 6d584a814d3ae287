"""Which of several servers answers a request, and which of them are alive. No HTTP in here."""

import dataclasses
import time
from collections.abc import Collection, Iterable, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Limits:
    """How much is asked at once, and how long failures are borne.

    Attributes:
      in_flight: requests of a process under way at once, each with all candidates of its prompt; rollout workers share
        them.
      request_s: seconds until a request without a whole reply counts as failed.
      connect_s: seconds for a connection, and for a server to say what it is.
      sync_s: seconds for a server to take new weights.
      tries: of one request, the first included.
      backoff_s: pause before the second try; it doubles with each further one.
      patience_s: with no server of a policy alive, how long requests wait for one before they fail.
      slack: a prompt goes to the server that has seen its like, unless that has so many more requests than the idlest.
    """

    in_flight: int = 256
    request_s: float = 300.0
    connect_s: float = 30.0
    sync_s: float = 600.0
    tries: int = 5
    backoff_s: float = 0.25
    patience_s: float = 60.0
    slack: int = 4

    def __post_init__(self) -> None:
        for name in ('in_flight', 'request_s', 'connect_s', 'sync_s', 'tries', 'backoff_s'):
            if not vars(self)[name] > 0:
                raise ValueError(f'serving.{name}={vars(self)[name]}: must be positive')
        for name in ('patience_s', 'slack'):
            if vars(self)[name] < 0:
                raise ValueError(f'serving.{name}={vars(self)[name]}: must be 0 or positive')


class Server:
    """What is known of one server."""

    def __init__(self, url: str, policies: Iterable[str]) -> None:
        self.url = url
        self.policies = tuple(sorted(policies))
        self.up = False
        self.fault = 'not connected yet'
        self.reads_text = False
        self.version = ''
        self.in_flight = 0
        self.holds: dict[str, str] = {}
        """Name of the weights it holds of each policy, the base's under ''."""

    def __str__(self) -> str:
        return f'{self.url} ({"up" if self.up else f"down: {self.fault}"})'


class Fleet:
    """The servers of every policy; one server may be of several."""

    def __init__(self, endpoints: Mapping[str, Sequence[str]], limits: Limits) -> None:
        if empty := sorted(policy for policy, urls in endpoints.items() if not urls):
            raise ValueError(f'policies {empty} have no server: name at least one URL for each')
        urls = dict.fromkeys(url for urls in endpoints.values() for url in urls)
        self.servers = tuple(Server(url, [p for p, served in endpoints.items() if url in served]) for url in urls)
        self._of = {
            policy: [server for server in self.servers if server.url in served] for policy, served in endpoints.items()
        }
        self._limits = limits
        self._dark_since: dict[str, float] = {}

    @property
    def policies(self) -> Collection[str]:
        return self._of.keys()

    def of(self, policy: str) -> Sequence[Server]:
        return self._of[policy]

    def pick(self, policy: str, ids: Sequence[int], avoid: Server | None = None) -> Server | None:
        """A living server for a prompt, or None. `avoid` is the one that has just failed: it is the last choice.

        Prompts that begin alike meet at one server, whose cache then has what they share, as long as it isn't busier
        than the idlest by more than `slack`.
        """
        alive = [server for server in self._of[policy] if server.up]
        alive = [server for server in alive if server is not avoid] or alive
        if not alive:
            self._dark_since.setdefault(policy, time.monotonic())
            return None
        self._dark_since.pop(policy, None)
        usual = alive[hash(tuple(ids)) % len(alive)]
        idlest = min(alive, key=lambda server: server.in_flight)
        return usual if usual.in_flight <= idlest.in_flight + self._limits.slack else idlest

    def waits(self, policy: str) -> bool:
        """Whether a policy without a living server may still get one back within its patience."""
        since = self._dark_since.get(policy)
        return since is None or time.monotonic() - since < self._limits.patience_s

    def down(self, server: Server, fault: str) -> None:
        server.up, server.fault = False, fault

    def told(self, policy: str) -> str:
        return ', '.join(map(str, self._of[policy]))
