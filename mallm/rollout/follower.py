"""The client of SGLang servers inside a rollout worker: it asks them, and leaves their weights to the learner's."""

import asyncio
from collections.abc import Mapping
from typing import Any

from mallm.errors import EngineError
from mallm.rollout import replies
from mallm.rollout.fleet import Server
from mallm.rollout.sglang import BASE, Loaded, Published, SGLangEngine


def nothing(policy: str, weights: Any, version: int) -> Published:
    """What a follower publishes."""
    raise EngineError(
        f"weights {version} of policy {policy!r}: a follower loads none; give them to the learner's engine"
    )


class Follower(SGLangEngine):
    """Samples on servers that another client keeps up to date; `follow` says what they should hold.

    Make it with `publish=nothing`. A server that does not hold what it should, runs another model or wants another key
    is as good as dead: its requests go elsewhere, and it is asked again in the background until it is right.
    """

    async def follow(self, told: Mapping[str, Loaded]) -> None:
        """From now on only answers by these weights are taken."""
        self._wanted = dict(told)
        self._versions |= {loaded.name: (policy, loaded.version) for policy, loaded in told.items()}
        work = self._bring_all(self._fleet.servers)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _bring(self, server: Server, policy: str, wanted: Loaded) -> None:
        """Raises StaleError as long as a server does not hold what is wanted."""
        if policy == BASE or not self._adapters:
            held = [(await self._call(server, 'GET', '/model_info', self._limits.connect_s)).get('weight_version')]
        else:
            held = replies.names(await self._call(server, 'GET', '/v1/models', self._limits.connect_s))
        if wanted.name not in held:
            raise replies.StaleError(f'{server.url} has {held}, and not yet {wanted.name!r}')
        server.holds[policy] = wanted.name

    def metrics(self) -> Mapping[str, float]:
        """Counters since the last call. How many servers there are is for the other client to say."""
        return {name: count for name, count in super().metrics().items() if not name.startswith('servers/')}
