// The live view of the daemon: speed, where neurons are computed, what lies on the device, and its budget.

import {asked} from './daemon.js';

const EVERY_MS = 1000;
const KEPT = 120;
const SVG = 'http://www.w3.org/2000/svg';
const by = id => document.getElementById(id);
const say = (id, text) => { if (by(id).textContent !== text) by(id).textContent = text; };
const percent = share => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
const samples = [];
let typed = false, most = 0, field = '', seen = () => {};

function bytes(n) {
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  const power = n < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(n) / 10));
  return `${(n / 1024 ** power).toFixed(power ? 1 : 0)} ${units[power]}`;
}

function bar(id, share) {
  by(id).style.width = `${(100 * Math.min(1, Math.max(0, share))).toFixed(1)}%`;
}

function shape(name, attributes) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
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

function drawRates() {
  const found = rates();
  const top = Math.max(1, ...found.map(r => r.rate));
  const now = samples.length ? samples[samples.length - 1].at : 0;
  const point = r => `${(300 - (now - r.at) / (KEPT * EVERY_MS) * 300).toFixed(1)},${(58 - r.rate / top * 54).toFixed(1)}`;
  by('rates').replaceChildren(shape('polyline', {points: found.map(point).join(' ')}));
  say('most', found.length ? `most: ${top.toFixed(0)}` : '');
  const last = found.slice(-3);
  say('rate', last.length ? (last.reduce((sum, r) => sum + r.rate, 0) / last.length).toFixed(1) : '–');
}

/** One bar a layer, each of a share from 0 to 1. */
function drawBars(id, kind, shares, title) {
  by(id).setAttribute('viewBox', `0 0 ${shares.length} 1`);
  const gap = Math.min(0.12, shares.length / 200);
  by(id).replaceChildren(...shares.map((share, i) => {
    const back = shape('rect', {x: i, y: 0, width: 1 - gap, height: 1, class: 'back'});
    const front = shape('rect', {x: i, y: 1 - share, width: 1 - gap, height: share, class: kind});
    const group = shape('g', {});
    const name = document.createElementNS(SVG, 'title');
    name.textContent = title(i);
    group.append(name, back, front);
    return group;
  }));
}

async function lookAtLayers() {
  const cache = await asked('GET', '/v1/x/cache');
  const layers = cache.layers.filter(layer => layer.slots);
  by('layers').hidden = !layers.length;
  if (!layers.length) return;
  const active = layer => Math.max(1, (layer.hits || 0) + (layer.misses || 0));
  drawBars('resident', 'device', layers.map(l => Math.min(1, l.resident / Math.max(1, l.neurons))),
    i => `layer ${layers[i].layer}: ${layers[i].resident} of ${layers[i].neurons} in ${layers[i].slots} slots`);
  drawBars('hitrates', 'hit', layers.map(l => (l.hits || 0) / active(l)),
    i => `layer ${layers[i].layer}: ${percent((layers[i].hits || 0) / active(layers[i]))} of its active neurons were there`);
}

function showBudget(s) {
  const onDevice = Boolean(s.device);
  by('budgets').hidden = !onDevice && !s.ram_budget_bytes;
  if (by('budgets').hidden) return;
  const [budget, used] = onDevice ? [s.budget_bytes, s.used_bytes] : [s.ram_budget_bytes, s.ram_used_bytes];
  field = onDevice ? 'vram_budget_bytes' : 'ram_budget_bytes';
  say('memory-kind', onDevice ? `Memory of ${s.device}` : 'Host memory of the model');
  bar('used', budget ? used / budget : 0);
  say('memory', `${bytes(used)} of ${bytes(budget)} used`);
  most = Math.max(most, budget * 1.5);
  by('slide').max = Math.ceil(most / 2 ** 20);
  if (!typed && ![by('budget'), by('slide')].includes(document.activeElement)) {
    by('budget').value = (budget / 2 ** 20).toFixed(2);
    by('slide').value = by('budget').value;
  }
  for (const control of by('change').elements) control.disabled = !s.may_steer;
  if (!s.may_steer) say('said', 'The setting serve.steering does not let this page change it.');
}

function show(s) {
  const ready = s.state === 'ready';
  seen(s);
  for (const id of ['neurons']) by(id).hidden = !ready || !s.device;
  if (!ready) {
    by('budgets').hidden = by('layers').hidden = true;
    return;
  }
  samples.push({at: performance.now(), tokens: s.generated_tokens});
  if (samples.length > KEPT) samples.shift();
  drawRates();
  const active = s.hits + s.misses;
  bar('hits', active ? s.hits / active : 0);
  say('device', active ? percent(s.hits / active) : '–');
  say('cpu', active ? percent(s.misses / active) : '–');
  say('running', `${s.running} of ${s.slots} answers run${s.waiting ? `, ${s.waiting} wait` : ''}`);
  const computed = s.neurons_all && s.neurons_computed < s.neurons_all
    ? `${percent(s.neurons_computed / s.neurons_all)} of all neurons are computed. ` : '';
  say('computed', `${computed}Weights ${bytes(s.model_bytes)}, predictor ${s.predictor}${s.device ? '' : ', on the CPU alone'}.`);
  showBudget(s);
}

async function look() {
  if (!document.hidden) {
    try {
      const state = await asked('GET', '/ui/state');
      show(state);
      if (state.state === 'ready' && state.device && by('layers').offsetParent !== null | by('layers').hidden) await lookAtLayers();
    } catch (why) {
      seen({state: 'gone', why: why.message});
    }
  }
  setTimeout(look, EVERY_MS);
}

/** Watches the daemon; `tell` gets its state each time. */
export function watch(tell) {
  seen = tell;
  by('slide').addEventListener('input', () => { typed = true; by('budget').value = by('slide').value; });
  by('budget').addEventListener('input', () => { typed = true; by('slide').value = by('budget').value; });
  by('change').addEventListener('submit', async event => {
    event.preventDefault();
    by('said').className = '';
    say('said', 'changing …');
    try {
      const got = await asked('PUT', '/v1/x/budget', {[field]: Math.round(Number(by('budget').value) * 2 ** 20)});
      say('said', `The budget is ${bytes(got[field])}.`);
    } catch (why) {
      by('said').className = 'bad';
      say('said', why.message);
    }
    typed = false;
  });
  look();
}
