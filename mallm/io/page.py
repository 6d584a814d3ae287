"""The look of report.html: one file, no network, light and dark, desk and phone.

What a model wrote is hostile. It reaches the page as escaped text, or inside a JSON block from which the script takes
it by `textContent` only; and the page's own policy lets no script run but this one, known by its hash.
"""

import base64
import hashlib
import html
from typing import Any

from mallm.io import files
from mallm.io.display import printable

STYLE = """
:root { color-scheme: light dark; --paper:#f6f7f9; --card:#fff; --ink:#1d2430; --dim:#5f6b7a; --edge:#dfe3ea;
  --accent:#2563c9; --good:#2b8a3e; --bad:#c92a2a; --soft:#eef2f8; }
@media (prefers-color-scheme: dark) { :root { --paper:#0f1217; --card:#171b22; --ink:#dce1e8; --dim:#98a3b3;
  --edge:#2b323c; --accent:#6ea8fe; --good:#69db7c; --bad:#ff8787; --soft:#1f2530; } }
* { box-sizing: border-box; }
body { margin:0 auto; max-width:1180px; padding:1.2rem; background:var(--paper); color:var(--ink);
  font:16px/1.5 system-ui, sans-serif; }
h1 { font-size:1.5rem; margin:.2rem 0; overflow-wrap:anywhere; } h2 { font-size:1.15rem; margin:2rem 0 .7rem; }
.dim { color:var(--dim); } .lead { font-size:1.15rem; margin:.2rem 0 1rem; }
.cards, .curves, .panes { display:grid; gap:.8rem; }
.cards { grid-template-columns:repeat(auto-fit, minmax(215px, 1fr)); }
.curves { grid-template-columns:repeat(auto-fit, minmax(min(100%, 330px), 1fr)); }
.panes { grid-template-columns:repeat(auto-fit, minmax(min(100%, 380px), 1fr)); align-items:start; }
.card { background:var(--card); border:1px solid var(--edge); border-radius:10px; padding:.8rem 1rem; min-width:0; }
.card b { display:block; font-size:1.35rem; font-variant-numeric:tabular-nums; overflow-wrap:anywhere; }
.curves img, .gallery img { width:100%; display:block; } .curves .card { padding:.4rem; }
.bar { height:5px; border-radius:3px; background:var(--edge); margin-top:.4rem; position:relative; }
.bar i { position:absolute; inset:0 auto 0 0; border-radius:3px; background:var(--accent); }
.bar i.was { background:var(--dim); }
.scroll { overflow-x:auto; } table { border-collapse:collapse; font-variant-numeric:tabular-nums; }
th, td { padding:.3rem .9rem .3rem 0; text-align:right; border-bottom:1px solid var(--edge); }
th:first-child, td:first-child { text-align:left; }
pre { margin:.3rem 0; padding:.6rem .8rem; background:var(--soft); border-radius:8px; overflow-x:auto;
  font:13px/1.45 ui-monospace, monospace; white-space:pre-wrap; overflow-wrap:anywhere; }
pre.board { font-size:19px; line-height:1.15; white-space:pre; overflow-wrap:normal; display:inline-block;
  max-width:100%; }
details > summary { cursor:pointer; color:var(--dim); } .warn { border-left:4px solid var(--bad); }
.controls { position:sticky; top:0; background:var(--paper); padding:.5rem 0; display:flex; flex-wrap:wrap;
  gap:.5rem; align-items:center; z-index:1; }
button, select { font:inherit; color:inherit; background:var(--card); border:1px solid var(--edge);
  border-radius:8px; padding:.35rem .8rem; min-height:2.4rem; } button { cursor:pointer; }
button:hover:enabled, select:hover { border-color:var(--accent); } button:disabled { opacity:.4; cursor:default; }
.role { font-weight:600; margin-top:.7rem; } .chip { font-weight:400; font-size:.85rem; color:var(--dim);
  border:1px solid var(--edge); border-radius:99px; padding:.05rem .55rem; margin-left:.4rem; display:inline-block; }
.good { color:var(--good); } .bad { color:var(--bad); }
"""

SCRIPT = """
'use strict';
const replays = JSON.parse(document.getElementById('replay-data').textContent);
const moments = [['before', 'Before training'], ['after', 'After training']];
const find = (when, env) => (replays[when] || []).find(replay => replay.env === env);
const boards = [...new Set(moments.flatMap(([when]) => (replays[when] || []).map(replay => replay.env)))];
const state = {board: 0, step: 0, prompts: false, timer: null};
const at = id => document.getElementById(id);

function make(tag, name, text) {
  const element = document.createElement(tag);
  if (name) element.className = name;
  if (text !== undefined) element.textContent = text;
  return element;
}
const wordsOf = replay => replay.words || {instance: 'instance', difficulty: 'shortest solution'};
const turnsOf = replay => replay ? replay.turns.length : 0;
const number = value => typeof value === 'number' ? (value >= 0 ? '+' : '') + value.toFixed(2) : 'none';
const last = () => Math.max(...moments.map(([when]) => turnsOf(find(when, boards[state.board]))));

function group(pane, one) {
  const head = pane.appendChild(make('div', 'role', one.role + ' wrote'));
  head.appendChild(make('span', 'chip', 'reward ' + number(one.reward)));
  for (const [name, value] of Object.entries(one.terms || {}))
    head.appendChild(make('span', 'chip', name + ' ' + number(value)));
  pane.appendChild(make('pre', '', one.answer));
  const more = pane.appendChild(make('details'));
  more.open = state.prompts;
  more.appendChild(make('summary', '', 'the prompt ' + one.role + ' saw'));
  more.appendChild(make('pre', '', one.prompt));
  more.firstChild.addEventListener('click', () => { state.prompts = !more.open; });
}

function pane(when, title) {
  const replay = find(when, boards[state.board]);
  const box = make('div', 'card');
  box.appendChild(make('strong', '', title));
  if (!replay) { box.appendChild(make('p', 'dim', 'no replay of this instance')); return box; }
  const turns = turnsOf(replay), step = Math.min(state.step, turns);
  const words = wordsOf(replay), hard = replay.difficulty === undefined ? replay.optimal : replay.difficulty;
  const best = typeof hard === 'number' ? ' (' + words.difficulty + ': ' + hard + ')' : '';
  const end = (replay.solved ? 'solved' : 'not solved') + ' after ' + turns + (turns === 1 ? ' turn' : ' turns');
  box.appendChild(make('div', replay.solved ? 'good' : 'bad', end + best));
  box.appendChild(make('div', 'dim', step ? 'after turn ' + step + ' of ' + turns : 'the start'));
  if (replay.frames[step] !== undefined) box.appendChild(make('pre', 'board', replay.frames[step]));
  if (step) for (const one of replay.turns[step - 1].groups) group(box, one);
  return box;
}

function show() {
  const panes = at('panes');
  panes.replaceChildren(...moments.map(([when, title]) => pane(when, title)));
  at('where').textContent = 'step ' + state.step + ' of ' + last();
  at('prev').disabled = state.step === 0;
  at('next').disabled = state.step >= last();
  at('board').value = state.board;
}
function go(step) { state.step = Math.max(0, Math.min(last(), step)); show(); }
function board(number) { state.board = (number + boards.length) % boards.length; state.step = 0; show(); }
function play() {
  if (state.timer) { clearInterval(state.timer); state.timer = null; at('play').textContent = 'play'; return; }
  if (state.step >= last()) go(0);
  at('play').textContent = 'pause';
  state.timer = setInterval(() => { if (state.step >= last()) play(); else go(state.step + 1); }, 1000);
}

if (boards.length) {
  boards.forEach((env, index) => {
    const option = make('option', '', wordsOf(find('before', env) || find('after', env)).instance + ' ' + env);
    option.value = index;
    at('board').appendChild(option);
  });
  at('board').addEventListener('change', event => board(Number(event.target.value)));
  at('prev').addEventListener('click', () => go(state.step - 1));
  at('next').addEventListener('click', () => go(state.step + 1));
  at('play').addEventListener('click', play);
  document.addEventListener('keydown', event => {
    if (event.ctrlKey || event.altKey || event.metaKey || event.target.tagName === 'SELECT') return;
    if (event.key === 'ArrowLeft') go(state.step - 1);
    else if (event.key === 'ArrowRight') go(state.step + 1);
    else return;
    event.preventDefault();
  });
  show();
}
"""

PLAYER = """<div class="controls"><select id="board" aria-label="instance"></select>
<button id="prev" aria-label="previous step">&larr; prev</button>
<button id="next" aria-label="next step">next &rarr;</button>
<button id="play">play</button> <span id="where" class="dim" aria-live="polite"></span></div>
<div id="panes" class="panes"></div>
<noscript>The replays need JavaScript; <code>python -m experiments.watch</code> plays them in a terminal.</noscript>"""


def text(value: object) -> str:
    """Any text, made safe to stand in the page and in its attributes."""
    return html.escape(printable(str(value)), quote=True)


def embedded(value: Any) -> str:
    """JSON that can stand inside a script element: no character in it can end that element or begin another."""
    plain = files.dumps(value)
    return plain.replace('<', '\\u003c').replace('>', '\\u003e').replace('&', '\\u0026')


def image(light: bytes, dark: bytes, alt: str) -> str:
    """A PNG in its light and its dark version, inside the page."""
    light_uri, dark_uri = (f'data:image/png;base64,{base64.b64encode(png).decode()}' for png in (light, dark))
    dark_source = f'<source srcset="{dark_uri}" media="(prefers-color-scheme: dark)">'
    return f'<picture>{dark_source}<img src="{light_uri}" alt="{text(alt)}"></picture>'


def document(title: str, body: str, replays: Any) -> str:
    """The whole page. `body` is HTML that was made with `text`; `replays` may hold anything JSON can."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{text(title)}</title><style>{STYLE}</style></head>
<body>{body}
<script type="application/json" id="replay-data">{embedded(replays)}</script>
<script>{SCRIPT}</script></body></html>
"""
