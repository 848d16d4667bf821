// The conversation. What a model writes becomes elements by markdown.js, which makes text nodes of all text.

import {ask, asked, events, reason} from './daemon.js';
import {copied, el, show} from './markdown.js';
import {watch} from './memory.js';

const NUMBERS = ['temperature', 'top_p', 'top_k', 'min_p', 'max_tokens', 'seed'];
const by = id => document.getElementById(id);
const turns = [];
let running = null, cards = new Map(), context = 0, daemonModel = null, leftOut = 0;

/** Fields of the request that the user has set. */
function chosen() {
  const fields = {};
  for (const id of NUMBERS) if (by(id).value !== '' && by(id).validity.valid) fields[id] = Number(by(id).value);
  if (by('thinking').value) fields.chat_template_kwargs = {enable_thinking: by('thinking').value === 'on'};
  const tools = readTools();
  if (tools) fields.tools = tools;
  return fields;
}

/** The tools that were typed; null for none. */
function readTools() {
  const text = by('tools').value.trim();
  by('tools-said').textContent = '';
  if (!text) return null;
  try {
    const tools = JSON.parse(text);
    if (!Array.isArray(tools)) throw new Error('a list of functions is wanted');
    return tools.length ? tools : null;
  } catch (why) {
    by('tools-said').textContent = `The tools are left out: ${why.message}`;
    return null;
  }
}

function messages() {
  const system = by('system').value.trim();
  const said = turns.slice(leftOut).filter(turn => !turn.failed).map(turn => turn.message);
  return system ? [{role: 'system', content: system}, ...said] : said;
}

const whole = number => number.toLocaleString('en');

/** Whether the end of the conversation is in sight, so that it follows. */
function atEnd() {
  const log = by('log');
  return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}

function toEnd() {
  by('log').scrollTop = by('log').scrollHeight;
  by('down').hidden = true;
}

function button(text, act) {
  return el('button', {type: 'button', class: 'quiet', onclick: act}, text);
}

/** Leaves out the oldest question that is still sent, with its answer; false where only the last one is left. */
function leaveOut() {
  const next = turns.findIndex((turn, i) => i > leftOut && turn.message.role === 'user');
  if (next < 0) return false;
  leftOut = next;
  return true;
}

/** Adds a turn and its element to the conversation. */
function add(message) {
  const body = el('div', {class: 'body'});
  const foot = el('footer');
  const turn = {message, body, foot, element: el('article', {class: message.role}, body, foot)};
  turns.push(turn);
  by('empty').hidden = true;
  by('log').append(turn.element);
  return turn;
}

/** Takes away a turn and all behind it. */
function cutFrom(turn) {
  document.querySelectorAll('.note').forEach(note => { if (turn.element.compareDocumentPosition(note) & Node.DOCUMENT_POSITION_FOLLOWING) note.remove(); });
  for (const gone of turns.splice(turns.indexOf(turn))) gone.element.remove();
  leftOut = Math.min(leftOut, turns.length);
  by('empty').hidden = turns.length > 0;
}

function addUser(text) {
  const turn = add({role: 'user', content: text});
  turn.body.textContent = text;
  turn.foot.append(button('Edit', () => {
    if (running) return;
    cutFrom(turn);
    by('text').value = text;
    grow();
    by('text').focus();
  }));
}

/** Asks for an answer to what was said, and shows it while it comes. */
async function answer() {
  const turn = add({role: 'assistant', content: ''});
  const text = el('div', {class: 'text'}), said = {thoughts: '', calls: []};
  const waits = el('p', {class: 'waits'}, 'waiting …');
  turn.body.append(waits);
  turn.element.setAttribute('aria-busy', 'true');
  const began = performance.now();
  let first = 0, usage = null, thought = null, drawn = false, pieces = 0, cut = false;
  const draw = () => {
    drawn = false;
    const follow = atEnd();
    if (said.thoughts && !thought) {
      thought = {text: el('div'), summary: el('summary', null, 'Thinking …')};
      thought.element = el('details', {class: 'thought', open: ''}, thought.summary, thought.text);
      turn.body.prepend(thought.element);
    }
    if (thought) show(thought.text, said.thoughts);
    if (turn.message.content) {
      if (!text.isConnected) turn.body.append(text);
      show(text, turn.message.content);
    }
    said.calls.forEach((call, i) => showCall(turn, call, i));
    if (follow) toEnd(); else by('down').hidden = false;
  };
  const later = () => { if (!drawn) { drawn = true; requestAnimationFrame(draw); } };
  const rate = () => {
    const seconds = (performance.now() - first) / 1000, n = usage ? usage.completion_tokens : pieces;
    return seconds > 0.2 && n > 1 ? `${((n - 1) / seconds).toFixed(1)} tokens/s` : '';
  };
  const take = event => {
    if (event.error) throw new Error(event.error.message);
    if (event.usage) usage = event.usage;
    const choice = event.choices && event.choices[0], delta = choice && choice.delta;
    if (choice && choice.finish_reason === 'length') cut = true;
    if (!delta) return;
    if (delta.content || delta.reasoning_content || delta.tool_calls) {
      if (!first) { first = performance.now(); waits.remove(); }
      pieces++;
      if (pieces % 8 === 0) turn.foot.textContent = rate();
    }
    said.thoughts += delta.reasoning_content || '';
    if (delta.content && thought && !turn.message.content) closeThought(thought, began);
    turn.message.content += delta.content || '';
    for (const part of delta.tool_calls || []) {
      const call = said.calls[part.index] ??= {id: '', type: 'function', function: {name: '', arguments: ''}};
      if (part.id) call.id = part.id;
      call.function.name += (part.function && part.function.name) || '';
      call.function.arguments += (part.function && part.function.arguments) || '';
    }
    later();
  };
  running = new AbortController();
  ready();
  let ended = '';
  try {
    const body = {stream: true, stream_options: {include_usage: true}, ...chosen()};
    if (by('model').value) body.model = by('model').value;
    const before = leftOut;
    for (;;) {
      body.messages = messages().slice(0, -1);
      const got = await ask('POST', '/v1/chat/completions', body, running.signal);
      if (got.ok) {
        if (leftOut > before) turn.element.before(el('p', {class: 'dim note'}, 'The first messages are left out from here on: the context is full.'));
        await events(got, take);
        break;
      }
      const why = await reason(got);
      if (why.code !== 'context_length_exceeded' || !leaveOut()) throw why;
    }
    if (cut) ended = '(cut: the answer is as long as it may be, or the context is full)';
  } catch (why) {
    ended = why.name === 'AbortError' ? '(stopped)' : why.message;
    turn.failed = why.name !== 'AbortError' && !turn.message.content;
  }
  running = null;
  waits.remove();
  draw();
  if (thought) closeThought(thought, began);
  if (said.calls.length) turn.message.tool_calls = said.calls;
  turn.element.removeAttribute('aria-busy');
  finish(turn, {ended, usage, rate: first ? rate() : '', wait: first ? first - began : 0});
  ready();
  models();
}

function closeThought(thought, began) {
  if (thought.closed) return;
  thought.closed = true;
  thought.element.removeAttribute('open');
  thought.summary.textContent = `Thought for ${((performance.now() - began) / 1000).toFixed(1)} s`;
}

/** A call of a function, as far as it has come. */
function showCall(turn, call, i) {
  turn.calls ??= [];
  if (!turn.calls[i]) {
    const [name, args] = [el('b'), el('code')];
    turn.calls[i] = {name, args};
    turn.body.append(el('div', {class: 'call'}, el('p', null, 'calls ', name), el('pre', null, args)));
  }
  turn.calls[i].name.textContent = call.function.name;
  turn.calls[i].args.textContent = pretty(call.function.arguments);
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** The line below a finished answer, and what can be done with it. */
function finish(turn, {ended, usage, rate, wait}) {
  const facts = [];
  if (usage) {
    const cached = usage.prompt_tokens_details && usage.prompt_tokens_details.cached_tokens;
    facts.push(`${usage.completion_tokens} tokens`, rate, `first after ${(wait / 1000).toFixed(1)} s`,
      `prompt ${usage.prompt_tokens}${cached ? `, ${cached} from before` : ''}`);
    by('room').textContent = context ? `${whole(usage.total_tokens)} of ${whole(context)} tokens` : '';
  }
  if (ended) turn.body.append(el('p', {class: ended.startsWith('(') ? 'dim' : 'bad', role: 'alert'}, ended));
  const again = button('Again', () => { if (!running) { cutFrom(turn); answer(); } });
  turn.foot.replaceChildren(el('span', null, facts.filter(Boolean).join(' · ')));
  if (turn.message.content) turn.foot.append(button('Copy', async event => {
    event.target.textContent = await copied(turn.message.content) ? 'Copied' : 'Not copied';
  }));
  turn.foot.append(again);
  if (turn.message.tool_calls) askResults(turn);
}

/** Fields for what the called functions return. */
function askResults(turn) {
  const fields = turn.message.tool_calls.map(call =>
    el('textarea', {rows: 1, placeholder: `what ${call.function.name} returns`, 'aria-label': `result of ${call.function.name}`}));
  const form = el('form', {class: 'results', onsubmit: event => {
    event.preventDefault();
    if (running) return;
    form.remove();
    turn.message.tool_calls.forEach((call, i) => {
      const result = add({role: 'tool', tool_call_id: call.id, content: fields[i].value});
      result.body.append(el('p', {class: 'dim'}, `${call.function.name} returns`), el('pre', null, el('code', null, pretty(fields[i].value))));
    });
    answer();
  }}, ...fields, el('button', null, 'Send results'));
  turn.body.append(form);
}

/** Shows what can be done now. */
function ready() {
  by('send').textContent = running ? 'Stop' : 'Send';
  by('send').classList.toggle('stop', Boolean(running));
  by('new').disabled = Boolean(running);
}

function send() {
  if (running) {
    running.abort();
    return;
  }
  const text = by('text').value.trim();
  if (!text) return;
  by('text').value = '';
  grow();
  addUser(text);
  answer();
  toEnd();
}

/** The field for a message is as high as its text. */
function grow() {
  const field = by('text');
  field.style.height = 'auto';
  field.style.height = `${field.scrollHeight + 2}px`;
}

/** Lists the models that can be asked. */
async function models() {
  const list = (await asked('GET', '/v1/models')).data;
  cards = new Map(list.map(card => [card.id, card]));
  const now = by('model').value, loaded = list.find(card => card.loaded);
  const option = card => el('option', {value: card.id}, card.loaded || list.length === 1 ? card.id : `${card.id} (loads when asked)`);
  by('model').replaceChildren(...list.map(option));
  if (cards.has(now)) by('model').value = now;
  else if (loaded) by('model').value = loaded.id;
  by('model').hidden = !list.length;
  about();
}

function about() {
  const card = cards.get(by('model').value);
  context = card && card.context_length || 0;
  by('about').textContent = !card ? 'No model is loaded. Load one: dynamicinfer load MODEL'
    : `${card.id}${context ? `, ${whole(context)} tokens of context` : ''}${card.chat_template === false ? '. It has no chat template, so it continues your text.' : ''}`;
}

/** Shows how the daemon is. */
function live(state) {
  const words = {ready: 'ready', gone: `no answer: ${state.why}`, freed: 'at rest', loading: `loading ${state.loading || ''}`, failed: 'the model cannot be used'};
  by('live').textContent = words[state.state] || state.state;
  by('live').className = state.state === 'gone' || state.state === 'failed' ? 'bad' : state.state;
  const model = state.state === 'ready' ? state.model : null;
  if (model !== daemonModel) {
    daemonModel = model;
    models().catch(() => {});
  }
}

function openSide(open) {
  document.body.classList.toggle('side', open);
  by('toggle').setAttribute('aria-expanded', String(open));
}

by('composer').addEventListener('submit', event => { event.preventDefault(); send(); });
by('text').addEventListener('input', grow);
by('text').addEventListener('keydown', event => {
  if (event.key === 'Enter' && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!running) send(); }
});
by('new').addEventListener('click', () => { if (turns.length) cutFrom(turns[0]); by('room').textContent = ''; by('text').focus(); });
by('toggle').addEventListener('click', () => openSide(!document.body.classList.contains('side')));
by('down').addEventListener('click', toEnd);
by('log').addEventListener('scroll', () => { if (atEnd()) by('down').hidden = true; });
by('model').addEventListener('change', about);
by('tools').addEventListener('change', readTools);
addEventListener('keydown', event => { if (event.key === 'Escape' && running) running.abort(); });
openSide(matchMedia('(min-width: 70em)').matches);
watch(live);
