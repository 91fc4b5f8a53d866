// @ts-check
// The page draws what the daemon says; layout, states and words come from there.

const SVG = 'http://www.w3.org/2000/svg';
const drawn = new Set(['svg', 'g', 'path', 'rect', 'text', 'title', 'line']);

/**
 * @typedef {{x: number, y: number, w: number, h: number}} Box
 * @typedef {Box & {name: string, by: string}} Rack
 * @typedef {Box & {id: string, name: string, outside: boolean, self: boolean, state: string, reasons: string[], addresses: string[],
 *   asn: number, roles: string[], blocks: number, used: number, rack: string}} Host
 * @typedef {{from: string, to: string, session: string, tunnel: string, says: string[], path: string}} Link
 * @typedef {{node: string, width: number, height: number, compact: boolean, racks: Rack[], hosts: Host[], links: Link[], notes: string[]}} Topology
 * @typedef {{cidr: string, holder: string, used: number, size: number, borrowed: number}} Block
 * @typedef {{at: number, cidr: string, used: number, claimed: number, holders: string[]}} Cell
 * @typedef {{name: string, cidr: string, encapsulation: string, problem: string, size: number, used: number, columns: number, rows: number,
 *   cellSize: number, cells: Cell[], blocks: Block[]}} Pool
 */

/** An element with attributes and children. A title is drawn only within a picture.
 * @param {string} tag @param {Record<string, any>} [attrs] @param {...(Node|string|null)} children */
function el(tag, attrs = {}, ...children) {
  const e = drawn.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [k, v] of Object.entries(attrs)) {
    if (k.startsWith('on')) e.addEventListener(k.slice(2), v);
    else if (v !== false && v !== null && v !== undefined) e.setAttribute(k, v === true ? '' : String(v));
  }
  e.append(...children.filter((c) => c !== null));
  return e;
}

/** @param {string} id @returns {any} */
const $ = (id) => document.getElementById(id);

/** Replaces what is in a part of the page; who had the focus has it afterwards.
 * @param {Element} root @param {...Node} children */
function fill(root, ...children) {
  const had = root.contains(document.activeElement) ? document.activeElement?.getAttribute('data-key') : null;
  const open = new Set([...root.querySelectorAll('details[open]')].map((d) => d.getAttribute('data-key')));
  root.replaceChildren(...children);
  for (const d of root.querySelectorAll('details[data-key]')) if (open.has(d.getAttribute('data-key'))) d.setAttribute('open', '');
  if (had) for (const e of root.querySelectorAll('[data-key]')) if (e.getAttribute('data-key') === had) /** @type {any} */ (e).focus();
}

/** @param {string} path @param {Record<string, string>} [query] */
async function get(path, query) {
  const r = await fetch('/api/v1/' + path + (query ? '?' + new URLSearchParams(query) : ''));
  if (!r.ok) {
    if (r.status === 401) ended();
    throw new Error((await r.text()).trim());
  }
  return r.json();
}

/** A table. Cells are texts, or nodes. @param {Element} table @param {string} caption @param {string[]} columns @param {any[][]} rows @param {(i: number) => string} [rowClass] */
function fillTable(table, caption, columns, rows, rowClass) {
  fill(table,
    el('caption', {}, caption),
    el('thead', {}, el('tr', {}, ...columns.map((c) => el('th', { scope: 'col' }, c)))),
    el('tbody', {}, ...rows.map((r, i) => el('tr', { class: rowClass?.(i) || null }, ...r.map((c) => el('td', {}, c instanceof Node ? c : String(c)))))));
}

/** @param {string} s */
const stateOf = (s) => el('span', { class: 'state-' + s }, s);
/** @param {number} n @param {string} one @param {string} [many] */
const count = (n, one, many = one + 's') => `${n} ${n === 1 ? one : many}`;

/** @param {number} n */
function amount(n) {
  return n < 1e6 ? n.toLocaleString('en') : n < 1e15 ? n.toLocaleString('en', { notation: 'compact' }) : '2^' + Math.round(Math.log2(n));
}

// --- topology ---

/** @type {Topology|null} */
let topology = null;
/** What the details are of: a key. */
let chosen = '';

/** @param {Link} l */
const linkKey = (l) => 'link ' + l.from + ' ' + l.to;

async function showTopology() {
  topology = /** @type {Topology} */ (await get('topology'));
  const t = topology;
  $('node').textContent = t.node;
  document.title = t.node + ' – routerd';
  const nodes = t.hosts.filter((h) => !h.outside);
  const sessions = t.links.filter((l) => l.session);
  const mine = sessions.filter((l) => l.from === t.node || l.to === t.node);
  fill($('summary'),
    el('span', {}, el('b', {}, String(nodes.filter((h) => h.state === 'up').length)), ` of ${count(nodes.length, 'host')} up`),
    el('span', {}, el('b', {}, String(mine.filter((l) => l.session === 'up').length)), ` of this host's ${count(mine.length, 'peer')} connected`),
    el('span', {}, el('b', {}, String(nodes.reduce((n, h) => n + h.used, 0))), ` addresses taken, of ${count(nodes.reduce((n, h) => n + h.blocks, 0), 'block')}`));
  fill($('notes'), ...t.notes.map((n) => el('li', {}, n)));
  fill($('picture'), picture(t));
  fillTable($('hosts'), 'Hosts of the cluster, and BGP peers outside it', ['Host', 'State', 'Why', 'Addresses', 'Rack', 'Blocks', 'Addresses taken', 'Roles'],
    t.hosts.map((h) => [h.name + (h.self ? ' (this host)' : ''), stateOf(h.state), h.reasons.join('; '), h.addresses.join(', '), h.outside ? 'outside' : h.rack, h.blocks, h.used, h.roles.join(', ')]));
  fillTable($('links'), 'What hosts have with each other', ['From', 'To', 'Session', 'Tunnel', 'Details'],
    t.links.map((l) => [nameOf(l.from), nameOf(l.to), l.session ? stateOf(l.session) : '–', l.tunnel ? stateOf(l.tunnel) : '–', l.says.join('; ')]));
  details();
}

/** @param {string} id */
const nameOf = (id) => topology?.hosts.find((h) => h.id === id)?.name ?? id;

/** What makes an element of the picture something to choose. @param {string} key @param {string} label */
function choosable(key, label) {
  const choose = () => { chosen = key; details(); };
  return {
    'data-key': key, tabindex: 0, role: 'button', 'aria-label': label, onclick: choose,
    onkeydown: (/** @type {KeyboardEvent} */ e) => { if (e.key === 'Enter' || e.key === ' ') { e.preventDefault(); choose(); } },
  };
}

/** @param {Topology} t */
function picture(t) {
  const label = `${count(t.hosts.length, 'host')} and ${count(t.links.length, 'link')}; the tables below say the same`;
  return el('svg', { viewBox: `0 0 ${t.width} ${t.height}`, width: t.width, height: t.height, role: 'group', 'aria-label': label },
    ...t.racks.map((r) => el('g', { class: 'rack' },
      el('rect', { x: r.x, y: r.y, width: r.w, height: r.h, rx: 10 }),
      el('text', { x: r.x + 16, y: r.y + 21 }, r.name))),
    ...t.links.map((l) => el('g', { class: 'link', ...choosable(linkKey(l), `${nameOf(l.from)} to ${nameOf(l.to)}: session ${l.session || 'none'}, tunnel ${l.tunnel || 'none'}`) },
      el('title', {}, l.says.join('\n')),
      l.tunnel ? el('path', { d: l.path, class: 'band ' + l.tunnel }) : null,
      l.session ? el('path', { d: l.path, class: 'session ' + l.session }) : null,
      el('path', { d: l.path, class: 'hit' }))),
    ...t.hosts.map((h) => el('g', { class: 'host ' + h.state, ...choosable('host ' + h.id, `${h.name}: ${h.state}${h.self ? ', this host' : ''}`) },
      el('title', {}, [h.name + ': ' + h.state, ...h.reasons].join('\n')),
      el('rect', { class: 'box', x: h.x, y: h.y, width: h.w, height: h.h, rx: t.compact ? 5 : 8 }),
      ...(t.compact ? [el('rect', { class: 'bar', x: h.x + 5, y: h.y + 5, width: h.w - 10, height: h.h - 10, rx: 3 })] : [
        el('rect', { class: 'bar', x: h.x + 9, y: h.y + 11, width: 4, height: h.h - 22, rx: 2 }),
        el('text', { class: 'name', x: h.x + 22, y: h.y + 23 }, short(h.name, 17)),
        el('text', { class: 'state', x: h.x + h.w - 10, y: h.y + 23 }, h.state),
        el('text', { class: 'line', x: h.x + 22, y: h.y + 40 }, h.outside ? (h.asn ? 'AS ' + h.asn : '') : short((h.addresses[0] ?? 'no address') + (h.self ? ' · this host' : ''), 26)),
        el('text', { class: 'line', x: h.x + 22, y: h.y + 55 }, h.outside ? short(h.roles[0] ?? '', 24) : `${count(h.blocks, 'block')}, ${h.used} taken`),
      ]))));
}

/** @param {string} s @param {number} n */
const short = (s, n) => (s.length > n ? s.slice(0, n - 1) + '…' : s);

function details() {
  if (!topology) return;
  const host = topology.hosts.find((h) => 'host ' + h.id === chosen);
  const link = topology.links.find((l) => linkKey(l) === chosen);
  for (const e of $('picture').querySelectorAll('[data-key]')) e.classList.toggle('chosen', e.getAttribute('data-key') === chosen);
  /** @type {[string, any][]} */
  let rows = [];
  if (host) {
    rows = [['Name', host.name + (host.self ? ' (this host)' : '')], ['State', stateOf(host.state)], ['Why', list(host.reasons)], ['Addresses', host.addresses.join(', ')],
      ['Rack', host.rack], ['AS', host.asn || ''], ['Roles', host.roles.join(', ')], ['Blocks', host.outside ? '' : `${host.blocks}, ${host.used} addresses taken`],
      ['Links', list(topology.links.filter((l) => l.from === host.id || l.to === host.id).map((l) => `${nameOf(l.from === host.id ? l.to : l.from)}: ${l.session ? 'session ' + l.session : 'no session'}${l.tunnel ? ', tunnel ' + l.tunnel : ''}`))]];
  } else if (link) {
    rows = [['Between', nameOf(link.from) + ' and ' + nameOf(link.to)], ['Session', link.session ? stateOf(link.session) : ''], ['Tunnel', link.tunnel ? stateOf(link.tunnel) : ''], ['Details', list(link.says)]];
  } else {
    return;
  }
  const now = el('dl', {}, ...rows.filter(([, v]) => v).flatMap(([k, v]) => [el('dt', {}, k), el('dd', {}, v)]));
  const d = $('details');
  if (d.firstElementChild?.outerHTML !== now.outerHTML) fill(d, now); // a screen reader says what is new alone
}

/** @param {string[]} items */
const list = (items) => (items.length ? el('ul', {}, ...items.map((i) => el('li', {}, i))) : '');

/** @param {number} bits */
function rate(bits) {
  for (const [unit, n] of /** @type {[string, number][]} */ ([['Gbit/s', 1e9], ['Mbit/s', 1e6], ['kbit/s', 1e3]])) if (bits >= n) return (bits / n).toFixed(1) + ' ' + unit;
  return Math.round(bits) + ' bit/s';
}

/** @param {{device: string, received: number, sent: number, dropped: number}[]} rates */
function showRates(rates) {
  fill($('rates').tBodies[0], ...rates.map((r) => el('tr', {}, el('td', { class: 'mono' }, r.device), el('td', { class: 'n' }, rate(r.received)), el('td', { class: 'n' }, rate(r.sent)),
    el('td', { class: 'n' + (r.dropped ? ' state-down' : '') }, r.dropped ? r.dropped.toFixed(1) + '/s' : '0'))));
}

// --- pools ---

async function showPools() {
  const p = /** @type {{pools: Pool[], stray: Block[]}} */ (await get('pools'));
  const holders = [...new Set(p.pools.flatMap((q) => q.blocks.map((b) => b.holder)).filter(Boolean))].sort();
  /** @param {string[]} of */
  const colour = (of) => (of.length === 1 ? 'c' + (holders.indexOf(of[0]) % 8) : 'c8');
  fill($('pools'),
    holders.length && holders.length <= 8 ? el('ul', { class: 'legend', 'aria-label': 'Colours of hosts' }, ...holders.map((h) => el('li', { class: 'swatch ' + colour([h]) }, h)),
      el('li', { class: 'swatch c8' }, 'several hosts, or none')) : el('p', { class: 'muted' }, holders.length ? 'Neighbouring colours are of different hosts; the tables name them.' : 'No host has a block yet.'),
    ...p.pools.map((q) => el('section', { class: 'card', 'aria-label': 'Pool ' + q.name },
      el('div', { class: 'pool-head' }, el('h3', {}, q.name), el('span', { class: 'mono' }, q.cidr), el('span', { class: 'muted' }, q.encapsulation),
        el('span', {}, `${amount(q.used)} of ${amount(q.size)} addresses taken, ${count(q.blocks.length, 'block')}`), q.problem ? el('span', { class: 'error' }, q.problem) : null),
      q.columns ? poolMap(q, colour) : '',
      q.cellSize ? el('p', { class: 'muted' }, `Each of the ${q.columns * q.rows} cells stands for ${amount(q.cellSize)} addresses. Pale is what hosts have as blocks; full is what is taken of it: in use, held ready, or cooling down.`) : '',
      el('details', { 'data-key': 'pool ' + q.name }, el('summary', {}, 'The map as a table'), blockTable(q.blocks)))),
    p.stray.length ? el('section', { class: 'card' }, el('h3', {}, 'Blocks that no pool contains'), blockTable(p.stray)) : '');
}

/** @param {Block[]} blocks */
function blockTable(blocks) {
  const t = el('table');
  fillTable(t, count(blocks.length, 'block'), ['Block', 'Host', 'Taken', 'Of', 'Borrowed by other hosts'], blocks.map((b) => [b.cidr, b.holder || 'none', b.used, b.size, b.borrowed]));
  return el('div', { class: 'scroll' }, t);
}

/** @param {Pool} q @param {(of: string[]) => string} colour */
function poolMap(q, colour) {
  const size = q.columns > 16 ? 18 : 34, w = q.columns * size, h = q.rows * size;
  const lines = [];
  for (let i = 1; i < q.columns; i++) lines.push(`M${i * size} 0V${h}`);
  for (let i = 1; i < q.rows; i++) lines.push(`M0 ${i * size}H${w}`);
  return el('svg', { class: 'map', viewBox: `0 0 ${w} ${h}`, width: w, height: h, role: 'img', 'aria-label': `Map of pool ${q.name}: ${count(q.blocks.length, 'block')}, ${q.used} addresses taken; the table below says the same` },
    el('rect', { class: 'free', width: w, height: h, rx: 3 }),
    ...q.cells.map((c) => {
      const x = (c.at % q.columns) * size, y = Math.floor(c.at / q.columns) * size;
      const full = c.used ? Math.max(2, Math.round(Math.min(1, c.used / q.cellSize) * size)) : 0;
      return el('g', { class: colour(c.holders) },
        el('title', {}, `${c.cidr}: ${c.used} of ${amount(c.claimed)} taken; ${c.holders.join(', ') || 'no host has it'}`),
        el('rect', { class: 'claimed', x, y, width: size, height: size }),
        el('rect', { x, y: y + size - full, width: size, height: full }));
    }),
    el('path', { class: 'grid', d: lines.join('') }));
}

// --- routes ---

/** What the table shows; empty: nothing yet. */
let prefix = '';

async function showRoutes() {
  const p = /** @type {{pools: Pool[]}} */ (await get('pools'));
  fill($('prefixes'), ...p.pools.map((q) => el('option', { value: q.cidr }, q.name)));
  if (!prefix && p.pools.length) prefix = $('routes-prefix').value = p.pools[0].cidr;
  if (!prefix) return;
  const r = await get('routes', { prefix });
  const most = 1000;
  $('routes-count').textContent = `${count(r.routes.length, 'route')} of ${prefix}${r.routes.length > most ? `; the first ${most} are shown` : ''}`;
  const shown = r.routes.slice(0, most);
  fillTable($('routes'), 'Candidates for each prefix, the chosen one first', ['Prefix', 'Chosen', 'Source', 'Type', 'From', 'Via', 'Device', 'State', 'Why'],
    shown.map((/** @type {any} */ q) => [el('span', { class: 'mono nowrap' }, q.prefix), q.best ? 'yes' : 'no', q.source, q.type, q.peer, q.via || q.nextHop, q.device, q.state, q.reason]),
    (i) => (shown[i].best ? '' : 'lost'));
}

// --- policy ---

async function showPolicy() {
  const p = await get('policy');
  fill($('endpoints'), ...p.endpoints.map((/** @type {any} */ e) => el('option', { value: e.name })));
  fill($('policy'),
    p.state ? el('p', { class: 'error' }, p.state) : '',
    ...p.problems.map((/** @type {any} */ q) => el('p', { class: 'error' }, q.object + ': ' + q.reason)),
    el('p', { class: 'muted' }, `${count(p.endpoints.length, 'endpoint')}, ${count(p.policies, 'policy', 'policies')}, ${count(p.sets, 'set')} with ${count(Number(p.members), 'member')}`),
    ...(await Promise.all(p.endpoints.map(endpoint))));
}

/** An endpoint, whose rules are asked for when it is opened. @param {any} e */
async function endpoint(e) {
  const body = el('div');
  const key = 'endpoint ' + e.interface;
  const load = async () => {
    const one = await get('policy', { endpoint: e.interface });
    fill(body, ...one.endpoints.flatMap((/** @type {any} */ q) => q.paths.map(policyPath)));
  };
  const d = el('details', { class: 'card', 'data-key': key, ontoggle: () => { if (/** @type {any} */ (d).open) report($('policy'), load()); } },
    el('summary', { 'data-key': 'summary ' + key }, e.name || e.interface, el('span', { class: 'muted' }, `  ${e.host ? 'host, ' : ''}${e.interface}  ${(e.sources ?? []).join(', ')}`)), body);
  return d;
}

/** @param {any} p */
function policyPath(p) {
  const t = el('table');
  /** @type {any[][]} */
  const rows = [];
  for (const [tier, sets, end] of /** @type {[string, any[], string][]} */ ([...p.tiers.map((/** @type {any} */ q) => [q.name, q.policies, q.end]), ['profiles', p.profiles, p.default]])) {
    for (const s of sets) for (const r of s.rules) rows.push([tier, s.policy + (s.staged ? ' (staged)' : ''), r.action, r.match || 'all', r.counted ? r.packets : '']);
    rows.push([tier, 'no rule decided', end, '', '']);
  }
  fillTable(t, `${p.direction}, ${p.hook}`, ['Tier', 'Policy', 'Action', 'Packets that it is for', 'Packets so far'], rows);
  return el('div', { class: 'scroll' }, t);
}

/** @param {SubmitEvent} ev */
async function explain(ev) {
  ev.preventDefault();
  const f = new FormData(/** @type {HTMLFormElement} */ (ev.target));
  const query = Object.fromEntries([...f].map(([k, v]) => [k, String(v)]).filter(([, v]) => v));
  await report($('explained'), (async () => {
    const r = await get('policy/explain', query);
    const t = el('table');
    fillTable(t, r.packet, ['Host', 'At', 'Direction', 'Tier', 'Policy', 'Action', 'Why'],
      r.ends.flatMap((/** @type {any} */ e) => (e.steps.length ? e.steps : [{}]).map((/** @type {any} */ s) => [e.node, s.endpoint || `${e.from} to ${e.to}`, s.direction ?? '', s.tier ?? '', s.policy ?? '', s.action || (e.allowed ? 'Allow' : 'Deny'), [s.reason, s.match].filter(Boolean).join(': ')])));
    fill($('explained'), el('div', { class: 'card finding ' + (r.allowed ? 'well' : 'critical') }, el('p', {}, el('b', {}, r.allowed ? 'Allowed' : 'Denied')), el('div', { class: 'scroll' }, t)));
  })());
}

// --- trace ---

async function showTrace() {
  const p = /** @type {{pods: {name: string, node: string, addresses: string[]}[], all: number}} */ (await get('pods'));
  const nodes = [...new Set(p.pods.map((q) => q.node))];
  fill($('pods'), ...nodes.map((n) => el('section', { class: 'card', 'aria-label': 'Pods of ' + n }, el('h3', {}, n),
    el('ul', {}, ...p.pods.filter((q) => q.node === n).map((q) => el('li', {}, el('button', {
      type: 'button', class: 'pod', 'data-key': 'pod ' + q.name, 'data-end': q.name, 'aria-pressed': 'false', onclick: () => choosePod(q.name),
    }, q.name, el('span', { class: 'muted' }, q.addresses.join(', ')))))))),
    p.all > p.pods.length ? el('p', { class: 'muted' }, `The first ${p.pods.length} of ${p.all} pods; write the name of any other.`) : '');
  markPods();
}

/** The first that is chosen is where the packet comes from, the second where it goes to. @param {string} name */
function choosePod(name) {
  const f = $('trace-form').elements;
  if (!f.from.value || f.to.value) {
    f.from.value = name;
    f.to.value = '';
  } else if (f.from.value !== name) {
    f.to.value = name;
    $('trace-form').requestSubmit();
  }
  markPods();
}

function markPods() {
  const f = $('trace-form').elements;
  for (const b of $('pods').querySelectorAll('[data-end]')) {
    const end = b.getAttribute('data-end');
    b.setAttribute('aria-pressed', String(end === f.from.value || end === f.to.value));
  }
}

/** @param {SubmitEvent} ev */
async function trace(ev) {
  ev.preventDefault();
  markPods();
  const query = Object.fromEntries([...new FormData($('trace-form'))].map(([k, v]) => [k, String(v)]).filter(([, v]) => v));
  fill($('traced'), el('p', { class: 'muted' }, `Following a packet from ${query.from} to ${query.to}…`));
  await report($('traced'), get('trace', query).then((r) => fill($('traced'), ...traced(r))));
}

/** What became of a packet: the verdict, and the steps there and back. @param {any} r @returns {Node[]} */
function traced(r) {
  const kind = { whole: 'well', broken: 'critical' }[/** @type {string} */ (r.verdict)] ?? '';
  const head = r.fault ? finding(r.fault) : el('div', { class: 'card finding ' + kind });
  head.prepend(el('p', {}, el('b', {}, `${r.verdict}: `), r.packet));
  const ways = [false, true].map((back) => [back, r.hops.filter((/** @type {any} */ h) => h.back === back)]).filter(([, hops]) => hops.length).map(([back, hops]) => {
    const t = el('table');
    fillTable(t, back ? 'Back' : 'There', ['Host', 'Step', 'What', 'Wrong'], hops.map((/** @type {any} */ h) => [h.node, h.step.name, h.step.what,
      h.step.findings.length ? list(h.step.findings.map((/** @type {any} */ f) => `${f.check}: ${f.what}; cure: ${f.cure}`)) : '']),
    (i) => (hops[i].step.findings.length ? 'wrong' : ''));
    return el('div', { class: 'card scroll' }, t);
  });
  return [head, ...r.unknown.map((/** @type {string} */ u) => el('p', { class: 'error' }, 'Not examined: ' + u)), ...ways, ...r.ways.flatMap(traced)];
}

// --- events ---

async function showEvents() {
  const r = await get('events', { level: $('events-form').elements.level.value });
  const events = r.events.reverse();
  fillTable($('events'), 'The newest first', ['Time', 'Level', 'Part', 'What', 'About'],
    events.map((/** @type {any} */ e) => [el('span', { class: 'nowrap' }, new Date(e.time).toLocaleTimeString()), e.level, e.part, e.message, e.attrs.map((/** @type {any} */ a) => `${a.key}=${a.value}`).join('  ')]),
    (i) => (events[i].level === 'warn' || events[i].level === 'error' ? 'state-trouble' : ''));
}

// --- doctor ---

async function showDoctor() {
  const b = $('examine');
  b.disabled = true;
  b.textContent = 'Examining…';
  try {
    const r = await get('doctor');
    fill($('findings'), ...(r.findings.length ? r.findings.map(finding) : [el('div', { class: 'card finding well' }, el('p', {}, el('b', {}, 'Nothing is wrong.')))]),
      ...r.unknown.map((/** @type {string} */ u) => el('p', { class: 'error' }, 'Not examined: ' + u)));
  } finally {
    b.disabled = false;
    b.textContent = 'Examine';
  }
}

/** @param {any} f */
function finding(f) {
  return el('div', { class: 'card finding ' + f.severity }, el('p', {}, el('b', {}, `${f.node}: ${f.what}`)),
    el('p', { class: 'muted' }, `${f.severity}, ${f.check}${f.cause && !f.what.includes(f.cause) ? '; ' + f.cause : ''}`), el('code', {}, f.cure));
}

// --- views and changes ---

/** Each view, what shows it, and what of the revisions it depends on.
 * @type {Record<string, {show: () => Promise<void>, on: string[]}>} */
const views = {
  topology: { show: showTopology, on: ['topology'] },
  pools: { show: showPools, on: ['pools'] },
  routes: { show: showRoutes, on: ['pools', 'topology'] },
  policy: { show: showPolicy, on: ['policy'] },
  trace: { show: showTrace, on: ['policy'] },
  events: { show: showEvents, on: ['events'] },
  doctor: { show: showDoctor, on: [] },
};
let view = '';
/** @type {Record<string, number>} */
let seen = {};

/** Shows an error where its result would be. @param {Element} at @param {Promise<void>} work */
async function report(at, work) {
  try {
    await work;
  } catch (e) {
    fill(at, el('p', { class: 'error', role: 'alert' }, String(e instanceof Error ? e.message : e)));
  }
}

/** One at a time: what changes while a view is being made is shown after it. */
let showing = false;
let again = false;

async function show() {
  if (showing) {
    again = true;
    return;
  }
  showing = true;
  do {
    again = false;
    const v = view;
    let problem = '';
    try {
      await views[v].show();
    } catch (e) {
      problem = String(e instanceof Error ? e.message : e);
    }
    $('problem').hidden = !problem;
    if ($('problem').textContent !== problem) $('problem').textContent = problem;
  } while (again);
  showing = false;
}

/** Views' addresses are no elements' ids, so that the focus stays on the link. */
function navigate() {
  const want = location.hash.replace('#/', '');
  if (!(want in views) && want !== '') return; // the skip link
  view = want || 'topology';
  for (const name of Object.keys(views)) $('view-' + name).hidden = name !== view;
  for (const a of document.querySelectorAll('nav a')) {
    if (a.getAttribute('href') === '#/' + view) a.setAttribute('aria-current', 'page');
    else a.removeAttribute('aria-current');
  }
  show();
}

/** @param {string} kind @param {string} text */
function state(kind, text) {
  const c = $('connection');
  c.className = kind;
  if (c.textContent !== text) c.textContent = text;
}

let over = false;
function ended() {
  over = true;
  changes.close();
  state('down', 'this session has ended: run routerctl ui again');
}

const changes = new EventSource('/api/v1/changes');
changes.addEventListener('revisions', (e) => {
  state('up', 'live');
  const now = JSON.parse(/** @type {MessageEvent} */ (e).data);
  // After a break everything may have changed; the doctor looks when it is asked.
  if (views[view].on.some((k) => now[k] !== seen[k])) show();
  seen = now;
});
changes.addEventListener('rates', (e) => showRates(JSON.parse(/** @type {MessageEvent} */ (e).data)));
changes.addEventListener('error', () => {
  seen = {};
  if (over) return;
  if (changes.readyState === EventSource.CLOSED) ended();
  else state('down', 'not connected; trying again');
});

addEventListener('hashchange', navigate);
$('explain-form').addEventListener('submit', explain);
$('trace-form').addEventListener('submit', trace);
$('trace-form').addEventListener('input', markPods);
$('routes-form').addEventListener('submit', (/** @type {SubmitEvent} */ e) => { e.preventDefault(); prefix = $('routes-prefix').value.trim(); show(); });
$('events-form').addEventListener('change', () => show());
$('events-form').addEventListener('submit', (/** @type {SubmitEvent} */ e) => e.preventDefault());
$('examine').addEventListener('click', () => show());
navigate();
