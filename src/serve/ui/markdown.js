// Markdown as elements. Text goes into text nodes only: nothing of it can become markup, whatever a model writes.

const LINK = /^(https?:|mailto:)/i;
const MAX_DEPTH = 12;

/** An element with children, which are elements or texts. */
export function el(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === 'class') made.className = value;
    else if (key.startsWith('on')) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

/** The top-level blocks of a text, as texts: a new one begins behind an empty line outside a fence. */
export function blocks(text) {
  const found = [];
  let lines = [], fence = null;
  const end = () => {
    if (lines.some(line => line.trim())) found.push(lines.join('\n'));
    lines = [];
  };
  for (const line of text.split('\n')) {
    const mark = line.match(/^ {0,3}(`{3,}|~{3,})/);
    if (fence) {
      lines.push(line);
      if (mark && mark[1].startsWith(fence) && !line.trim().slice(mark[1].length).trim()) { fence = null; end(); }
    } else if (mark) {
      // In a list a fence belongs to its item.
      if (!lines.length || !isItem(lines[0])) end();
      fence = mark[1];
      lines.push(line);
    } else if (!line.trim()) {
      // A list goes on behind an empty line; what follows it decides.
      if (lines.length && isItem(lines[0])) lines.push(line); else end();
    } else {
      const before = lines[lines.length - 1];
      if (before !== undefined && !before.trim() && !isItem(line) && !/^\s/.test(line)) end();
      lines.push(line);
    }
  }
  end();
  return found;
}

const isItem = line => /^\s*([-*+]|\d{1,9}[.)])\s+/.test(line);
const isRule = line => /^ {0,3}([-*_])( *\1){2,} *$/.test(line);
const isTable = line => /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(line) && line.includes('|');

/** The element of one block. */
export function block(text, depth = 0) {
  if (depth > MAX_DEPTH) return el('p', null, text);
  const lines = text.split('\n');
  const parts = [];
  let at = 0, plain = [];
  const flush = () => {
    if (plain.length) parts.push(el('p', null, ...inline(plain.join('\n'))));
    plain = [];
  };
  while (at < lines.length) {
    const line = lines[at], next = lines[at + 1];
    const heading = line.match(/^ {0,3}(#{1,6})\s+(.*)$/);
    const fence = line.match(/^ {0,3}(`{3,}|~{3,})\s*(\S*)/);
    if (fence) {
      flush();
      const code = [];
      for (at++; at < lines.length && !(lines[at].trim().startsWith(fence[1]) && !lines[at].trim().replace(/^[`~]+/, '')); at++) code.push(lines[at]);
      at++;
      parts.push(codeBlock(code.join('\n'), fence[2]));
    } else if (heading) {
      flush();
      // The page itself has the first two levels.
      parts.push(el(`h${Math.min(6, heading[1].length + 2)}`, null, ...inline(titleOf(heading[2]))));
      at++;
    } else if (isRule(line)) {
      flush();
      parts.push(el('hr'));
      at++;
    } else if (/^ {0,3}>/.test(line)) {
      flush();
      const quoted = [];
      for (; at < lines.length && /^ {0,3}>/.test(lines[at]); at++) quoted.push(lines[at].replace(/^ {0,3}> ?/, ''));
      parts.push(el('blockquote', null, ...blocks(quoted.join('\n')).map(part => block(part, depth + 1))));
    } else if (isItem(line)) {
      flush();
      const [list, after] = listOf(lines, at, depth);
      parts.push(list);
      at = after;
    } else if (next !== undefined && line.includes('|') && isTable(next)) {
      flush();
      const [table, after] = tableOf(lines, at);
      parts.push(table);
      at = after;
    } else {
      if (line.trim()) plain.push(line); else flush();
      at++;
    }
  }
  flush();
  return parts.length === 1 ? parts[0] : el('div', {class: 'parts'}, ...parts);
}

/** The list that begins at a line, and the line behind it. */
function listOf(lines, at, depth) {
  const first = lines[at].match(/^(\s*)(?:([-*+])|(\d{1,9})[.)])\s+/);
  const indent = first[1].length, ordered = first[3] !== undefined;
  const items = [];
  while (at < lines.length) {
    const mark = lines[at].match(/^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+/);
    if (!mark || mark[1].length > indent + 3 || mark[1].length < indent || (mark[2] !== undefined) !== ordered || isRule(lines[at])) break;
    const inside = mark[0].length;
    const own = [lines[at].slice(inside)];
    for (at++; at < lines.length; at++) {
      const line = lines[at], spaces = line.match(/^\s*/)[0].length;
      if (line.trim() && spaces <= indent && (isItem(line) || !lines[at - 1].trim())) break;
      if (line.trim() && isItem(line) && spaces < inside && spaces <= indent + 1) break;
      own.push(line.slice(Math.min(spaces, inside)));
    }
    while (own.length > 1 && !own[own.length - 1].trim()) own.pop();
    const task = own[0].match(/^\[([ xX])\]\s+/);
    if (task) own[0] = (task[1] === ' ' ? '☐ ' : '☑ ') + own[0].slice(task[0].length);
    // The lines of a tight item are its text; below it may be lists.
    const below = own.findIndex((line, i) => i > 0 && (isItem(line) || /^ {0,3}(```|~~~|>)/.test(line) || !line.trim()));
    const head = below < 0 ? own : own.slice(0, below), rest = below < 0 ? [] : own.slice(below);
    items.push(el('li', task ? {class: 'task'} : null, ...inline(head.join('\n')), ...blocks(rest.join('\n')).map(part => block(part, depth + 1))));
  }
  const list = el(ordered ? 'ol' : 'ul', null, ...items);
  if (ordered && first[3] !== '1') list.start = Number(first[3]);
  return [list, at];
}

function tableOf(lines, at) {
  const cells = line => line.trim().replace(/^\||\|$/g, '').split(/(?<!\\)\|/).map(cell => cell.trim().replace(/\\\|/g, '|'));
  const head = cells(lines[at]);
  const sides = cells(lines[at + 1]).map(cell => cell.endsWith(':') ? (cell.startsWith(':') ? 'center' : 'right') : '');
  const row = (name, texts) => el('tr', null, ...head.map((_, i) => el(name, sides[i] ? {class: sides[i]} : null, ...inline(texts[i] || ''))));
  const body = [];
  for (at += 2; at < lines.length && lines[at].includes('|'); at++) body.push(row('td', cells(lines[at])));
  return [el('div', {class: 'scroll'}, el('table', null, el('thead', null, row('th', head)), el('tbody', null, ...body))), at];
}

function codeBlock(text, language) {
  const copy = el('button', {type: 'button', class: 'quiet', onclick: async event => {
    const button = event.currentTarget;
    button.textContent = await copied(text) ? 'Copied' : 'Not copied';
    setTimeout(() => { button.textContent = 'Copy'; }, 1500);
  }}, 'Copy');
  return el('div', {class: 'code'}, el('div', null, el('span', null, language || 'code'), copy), el('pre', null, el('code', null, text)));
}

/** Copies a text; false where the browser does not let the page. */
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}

const INLINE = [
  [/^\\([\\`*_{}[\]()#+\-.!|~<>])/, m => m[1]],
  [/^(\*\*|__)(?=\S)([^]*?\S)\1/, (m, depth) => el('strong', null, ...inline(m[2], depth + 1))],
  [/^~~(?=\S)([^]*?\S)~~/, (m, depth) => el('del', null, ...inline(m[1], depth + 1))],
  [/^\*(?=\S)([^*]*?[^*\s])\*(?!\*)/, (m, depth) => el('em', null, ...inline(m[1], depth + 1))],
  [/^!?\[([^\]\n]*)\]\(\s*<?([^\s()<>]*(?:\([^\s()]*\)[^\s()<>]*)?)>?(?:\s+"[^"\n]*")?\s*\)/, (m, depth) => link(m[2], inline(m[1], depth + 1), m[0])],
  [/^<((?:https?|mailto):[^\s<>]+)>/i, m => link(m[1], [m[1]], m[0])],
  [/^https?:\/\/[^\s<>"'`]*[^\s<>"'`.,;:!?)\]*_~]/i, m => link(m[0], [m[0]], m[0])],
  [/^ {2,}\n|^\n/, () => el('br')],
];

/** A link; its source as text where it leads to no page. */
function link(address, shown, source) {
  if (!LINK.test(address)) return source;
  return el('a', {href: address, target: '_blank', rel: 'noopener noreferrer'}, ...shown);
}

/** A heading without the marks at its end. */
function titleOf(text) {
  let end = text.trimEnd().length;
  while (end > 0 && text[end - 1] === '#') end--;
  return text.slice(0, end).trimEnd();
}

/** Where the run of backticks at `at` ends, and where the next run of the same length begins; -1 if there is none. */
function codeFrom(text, at) {
  const runEnd = from => {
    while (text[from] === '`') from++;
    return from;
  };
  const begin = runEnd(at);
  for (let next = text.indexOf('`', begin); next >= 0; next = text.indexOf('`', runEnd(next))) {
    if (runEnd(next) - next === begin - at) return [begin, next];
  }
  return [begin, -1];
}

/** Elements and texts of what stands in a line. */
export function inline(text, depth = 0) {
  const made = [];
  let plain = '';
  const flush = () => { if (plain) made.push(plain); plain = ''; };
  for (let at = 0; at < text.length;) {
    const c = text[at];
    // An underscore within a word is one.
    const emphasis = c === '_' && !/\w/.test(text[at - 1] || ' ') ? text.slice(at).match(/^_(?=\S)([^_]*?[^_\s])_(?!\w)/) : null;
    if (emphasis && depth < MAX_DEPTH) {
      flush();
      made.push(el('em', null, ...inline(emphasis[1], depth + 1)));
      at += emphasis[0].length;
      continue;
    }
    if (c === '`') {
      const [begin, end] = codeFrom(text, at);
      if (end >= 0) {
        flush();
        const code = text.slice(begin, end).replaceAll('\n', ' ');
        const padded = code.length > 2 && code.startsWith(' ') && code.endsWith(' ');
        made.push(el('code', null, padded ? code.slice(1, -1) : code));
        at = end + begin - at;
      } else {
        plain += text.slice(at, begin);
        at = begin;
      }
      continue;
    }
    let found = null;
    if (depth < MAX_DEPTH && '\\*_~!['.includes(c) || c === '<' || c === '\n' || c === ' ' || (c === 'h' || c === 'H') && !/\w/.test(text[at - 1] || ' ')) {
      const rest = text.slice(at, at + 4000);
      for (const [pattern, make] of INLINE) {
        const match = rest.match(pattern);
        if (match) { found = [match, make]; break; }
      }
    }
    if (!found) { plain += c; at++; continue; }
    flush();
    made.push(found[1](found[0], depth));
    at += found[0][0].length;
  }
  flush();
  return made;
}

/** Shows a text in an element. Blocks that have not changed keep their elements, so that a stream costs only its end. */
export function show(into, text) {
  const wanted = blocks(text);
  wanted.forEach((source, i) => {
    const now = into.children[i];
    if (now && now.source === source) return;
    const made = block(source);
    made.source = source;
    if (now) now.replaceWith(made); else into.append(made);
  });
  while (into.children.length > wanted.length) into.lastElementChild.remove();
}
