// The daemon as the page asks it. The token comes from the address's fragment or is typed; it stays in this tab.

const KEPT = 'token';
let asks = null;

/** The token of this tab; a fragment with one is taken out of the address, so that it is in no history. */
function token() {
  const given = new URLSearchParams(location.hash.slice(1)).get('token');
  if (given) {
    sessionStorage.setItem(KEPT, given);
    history.replaceState(null, '', location.pathname);
  }
  return sessionStorage.getItem(KEPT);
}

/** Sends a request; where the token is missing or wrong the user is asked for it first. */
export async function ask(method, path, body, signal) {
  for (;;) {
    const headers = {};
    const shown = token();
    if (shown) headers.authorization = `Bearer ${shown}`;
    if (body !== undefined) headers['content-type'] = 'application/json';
    const answer = await fetch(path, {method, headers, signal, cache: 'no-store', body: body === undefined ? undefined : JSON.stringify(body)});
    if (answer.status !== 401) return answer;
    // Another request may have asked meanwhile.
    if (token() === shown) await typed(shown ? 'This is not the token.' : '');
  }
}

/** The answer's JSON. Throws what the daemon says is wrong. */
export async function asked(method, path, body, signal) {
  const answer = await ask(method, path, body, signal);
  if (!answer.ok) throw await reason(answer);
  return answer.json();
}

/** What an answer says is wrong, as an error with the daemon's code. */
export async function reason(answer) {
  const said = await answer.json().catch(() => ({}));
  const {message, code} = said.error || {};
  return Object.assign(new Error(message || `status ${answer.status}`), {code});
}

/** Waits until the user has typed a token. All requests wait for the same one. */
function typed(why) {
  asks ??= new Promise(done => {
    const [door, field] = ['door', 'token'].map(id => document.getElementById(id));
    document.getElementById('door-said').textContent = why;
    field.value = '';
    door.addEventListener('cancel', event => event.preventDefault());
    // A browser lets a second Escape close it all the same.
    door.onclose = () => { if (asks) { door.showModal(); field.focus(); } };
    document.getElementById('enter').onsubmit = event => {
      event.preventDefault();
      sessionStorage.setItem(KEPT, field.value.trim());
      asks = null;
      door.close();
      done();
    };
    if (!door.open) door.showModal();
    field.focus();
  });
  return asks;
}

/** Calls `take` with the data of each event of a stream. */
export async function events(answer, take) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (rest + value).split('\n\n');
    rest = parts.pop();
    for (const part of parts) {
      const data = part.split('\n').filter(line => line.startsWith('data: ')).map(line => line.slice(6)).join('\n');
      if (data && data !== '[DONE]') take(JSON.parse(data));
    }
  }
}
