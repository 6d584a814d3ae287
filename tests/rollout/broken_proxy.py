"""A proxy that hands on everything, and breaks a stated number of replies to one path in a stated way."""

import contextlib
import http.client
import http.server
import json
import threading
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any


class Proxy(contextlib.AbstractContextManager):
    """Between a client and one server."""

    def __init__(self, url: str) -> None:
        self._to = urllib.parse.urlsplit(url).netloc
        self._how, self._left, self._path = '', 0, ''
        self._last = '', 0
        self._lock = threading.Lock()
        self.seen: list[str] = []
        self.most = self._now = 0
        """Most requests to /generate at once, and those of now."""
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = 'HTTP/1.1'

            def do_GET(self) -> None:
                outer.hand_on(self, b'')

            def do_POST(self) -> None:
                outer.hand_on(self, self.rfile.read(int(self.headers['Content-Length'] or 0)))

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
        self._server.daemon_threads = True
        self.url = f'http://127.0.0.1:{self._server.server_port}'
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def breaks(self, how: str, times: int, path: str = '/generate') -> None:
        self._how, self._left, self._path = how, times, path

    def dies_after(self, path: str, count: int) -> None:
        """Breaks every connection once it has answered so many requests to a path."""
        self._last = path, count

    def _due(self, path: str) -> str:
        """How this reply is to be broken, or nothing."""
        with self._lock:
            if path != self._path or self._left <= 0:
                return ''
            self._left -= 1
            return self._how

    @contextlib.contextmanager
    def counted(self, path: str) -> Iterator[None]:
        one = int(path == '/generate')
        with self._lock:
            self._now += one
            self.most = max(self.most, self._now)
        yield
        with self._lock:
            self._now -= one

    def hand_on(self, client: http.server.BaseHTTPRequestHandler, body: bytes) -> None:
        path, count = self._last
        if path and self.seen.count(path) >= count:
            self.breaks('closed', times=1, path=client.path)
        self.seen.append(client.path)
        how = self._due(client.path)
        if how == 'closed':
            client.close_connection = True
            client.connection.close()
            return
        if how == 'hangs':
            time.sleep(8)
        if how == '503':
            status, said = 503, b'{"error": "busy"}'
        else:
            there = http.client.HTTPConnection(self._to, timeout=120)
            headers = {'Content-Type': 'application/json'} if body else {}
            headers |= {'Authorization': client.headers['Authorization'] or ''}
            with self.counted(client.path):
                there.request(client.command, client.path, body or None, headers)
                reply = there.getresponse()
                status, said = reply.status, reply.read()
            there.close()
        if how:
            said = broken(how, said)
        with contextlib.suppress(ConnectionError):
            client.send_response(status)
            client.send_header('Content-Length', str(len(said)))
            client.end_headers()
            client.wfile.write(said)


def broken(how: str, said: bytes) -> bytes:
    """A reply made wrong."""
    if how in ('503', 'hangs'):
        return said
    if how == 'truncated':
        return said[: len(said) // 2]
    reply = json.loads(said)
    if how == 'other model':
        return json.dumps(reply | {'model_type': 'llama'}).encode()
    if how == 'no answer':
        return b'[]'
    row = reply[0] if isinstance(reply, list) else reply
    if how == 'other log-probs of the prompt':
        for pair in row['meta_info']['input_token_logprobs'][1:]:
            pair[0] -= 1.0
    meta = row['meta_info']
    pairs = meta['output_token_logprobs']
    if how == 'one log-prob missing':
        pairs.pop()
    elif how == 'log-prob above 0':
        pairs[0][0] = 0.7
    elif how == 'log-prob NaN':
        pairs[0][0] = float('nan')
    elif how == 'id beyond the vocabulary':
        row['output_ids'][0] = pairs[0][1] = 9999
    elif how == 'other weights':
        meta |= {'weight_version': 'default', 'weight_versions': None}
    elif how == 'aborted':
        meta['finish_reason'] = {'type': 'abort', 'message': 'told to'}
    return json.dumps(reply).encode()
