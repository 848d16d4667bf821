'use strict';
// Asks for /ui/state once a second and shows it. What the daemon says goes into text nodes only: a name may hold anything.

const EVERY_MS = 1000;
const KEPT = 120;
const by = id => document.getElementById(id);
const say = (id, text) => { by(id).textContent = text; };
const percent = share => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
const samples = [];
let typed = false;

function bytes(n) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  const power = n < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(n) / 10));
  return `${(n / 1024 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

function bar(id, share) {
  by(id).style.width = `${(100 * Math.min(1, Math.max(0, share))).toFixed(1)}%`;
}

/** Rates between samples; a counter that has gone back is another model's. */
function rates() {
  const found = [];
  for (let i = 1; i < samples.length; i++) {
    const seconds = (samples[i].at - samples[i - 1].at) / 1000;
    const tokens = samples[i].tokens - samples[i - 1].tokens;
    found.push({at: samples[i].at, rate: tokens < 0 ? 0 : tokens / Math.max(seconds, 1e-3)});
  }
  return found;
}

function draw() {
  const found = rates();
  const most = Math.max(1, ...found.map(r => r.rate));
  const now = samples.length ? samples[samples.length - 1].at : 0;
  const point = r => `${(300 - (now - r.at) / (KEPT * EVERY_MS) * 300).toFixed(1)},${(77 - r.rate / most * 72).toFixed(1)}`;
  const line = document.createElementNS('http://www.w3.org/2000/svg', 'polyline');
  line.setAttribute('points', found.map(point).join(' '));
  by('rates').replaceChildren(line);
  say('most', found.length ? `most: ${most.toFixed(0)}` : '');
  const last = found.slice(-3);
  say('rate', last.length ? (last.reduce((sum, r) => sum + r.rate, 0) / last.length).toFixed(1) : '–');
}

function show(s) {
  const ready = s.state === 'ready';
  say('model', ready ? s.model : s.state);
  const up = s.uptime_seconds;
  const time = up < 120 ? `${up} s` : up < 7200 ? `${Math.floor(up / 60)} minutes` : `${Math.floor(up / 3600)} hours`;
  say('about', ready ? `· ${s.device || 'CPU alone'} · predictor ${s.predictor} · up for ${time}` : `· up for ${time}`);
  by('change').hidden = !ready || !s.device;
  if (!ready) return;
  samples.push({at: performance.now(), tokens: s.generated_tokens});
  if (samples.length > KEPT) samples.shift();
  draw();
  const active = s.hits + s.misses;
  by('hits').parentElement.className = active ? 'bar two' : 'bar';
  bar('hits', active ? s.hits / active : 0);
  say('device', active ? percent(s.hits / active) : '–');
  say('cpu', active ? percent(s.misses / active) : s.device ? '–' : 'all');
  say('computed', s.neurons_all ? `${percent(s.neurons_computed / s.neurons_all)} of all neurons are computed` : '');
  say('running', s.running);
  say('slots', s.slots);
  say('waiting', s.waiting);
  bar('used', s.budget_bytes ? s.used_bytes / s.budget_bytes : 0);
  say('memory', s.device ? `${bytes(s.used_bytes)} of ${bytes(s.budget_bytes)} used` : 'there is no device');
  if (!typed && document.activeElement !== by('budget')) by('budget').value = (s.budget_bytes / 2 ** 20).toFixed(2);
  by('budget').disabled = by('change').querySelector('button').disabled = !s.may_steer;
  if (!s.may_steer) say('said', 'The budget cannot be changed from this page: the setting serve.steering names the clients that may.');
}

function live(is, why) {
  say('live', is ? 'live' : `no answer: ${why}`);
  by('live').className = is ? '' : 'bad';
}

async function look() {
  try {
    const answer = await fetch('/ui/state', {cache: 'no-store'});
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    show(await answer.json());
    live(true);
  } catch (why) {
    live(false, why.message);
  }
  setTimeout(look, EVERY_MS);
}

by('budget').addEventListener('input', () => { typed = true; });
by('change').addEventListener('submit', async event => {
  event.preventDefault();
  const wanted = Math.round(Number(by('budget').value) * 2 ** 20);
  by('said').className = '';
  say('said', 'changing …');
  try {
    const headers = {'content-type': 'application/json', 'x-dynamicinfer-ui': '1'};
    const answer = await fetch('/ui/state', {method: 'PUT', headers, body: JSON.stringify({vram_budget_bytes: wanted})});
    const got = await answer.json();
    if (!answer.ok) throw new Error(got.error ? got.error.message : `status ${answer.status}`);
    say('said', `The budget is ${bytes(got.vram_budget_bytes)}.`);
  } catch (why) {
    by('said').className = 'bad';
    say('said', why.message);
  }
  typed = false;
});
look();
