// The live map: reads /live, an event stream, and shows what it tells. The stream sends the whole
// pool first, then what changes; once a second everything that is no page.
import { CACHED, FREE, PoolMap, SHARED, StepChart, label, milliseconds, tenantColour } from "./dashboard_map.js";

const at = (id) => document.getElementById(id);
const make = (tag, properties = {}, ...children) => {
  const node = Object.assign(document.createElement(tag), properties);
  node.append(...children);
  return node;
};
const grouped = (number) => number.toLocaleString("en");
const count = (number, one) => `${grouped(number)} ${one}${number === 1 ? "" : "s"}`;
const KEPT_KEY = "turnstile-key";

const pool = new PoolMap(at("pages"), showPage, choose);
const steps = new StepChart(at("steps"));
const server = { now: null, taken: 0, offset: 0 }; // what was told last
let places = []; // who sits in which slot: a sequence keeps its place as long as it is there
let happenings = [];

// -- the stream -----------------------------------------------------------------------------------

let connection = null;

async function connect() {
  connection?.abort();
  const mine = (connection = new AbortController());
  for (let pause = 500; !mine.signal.aborted; pause = Math.min(8000, pause * 2)) {
    try {
      if (await read(mine)) pause = 500;
    } catch (error) {
      if (mine.signal.aborted) return;
      say("lost", `No connection to the server (${error.message}). Trying again…`);
    }
    if (!at("key-form").hidden) return;
    await new Promise((done) => setTimeout(done, pause));
  }
}

async function read({ signal }) {
  const key = sessionStorage.getItem(KEPT_KEY);
  const answer = await fetch("live", { signal, cache: "no-store", headers: key ? { authorization: `Bearer ${key}` } : {} });
  if (!answer.ok) {
    const error = (await answer.json().catch(() => null))?.error?.message ?? `The server answers ${answer.status}.`;
    if (answer.status === 401) askForKey(key ? error : "");
    else say("lost", error);
    return false;
  }
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { done, value } = await reader.read();
    if (done) break;
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) if (frame.startsWith("data: ")) take(JSON.parse(frame.slice(6)));
  }
  say("lost", "The server has ended the stream. Trying again…");
  return true;
}

function take(told) {
  if (told.type === "server") return takeServer(told);
  server.offset = performance.now() / 1000 - told.time;
  server.taken = told.taken;
  if (told.type === "whole") {
    pool.whole(told);
    steps.clear();
    places = [];
    happenings = [];
  } else pool.change(told, performance.now());
  steps.add(told.steps);
  happenings = [...told.happened.reverse(), ...happenings].slice(0, 10);
  showSoon();
}

function takeServer(told) {
  server.now = told;
  showServer();
  showSoon();
}

function askForKey(error) {
  sessionStorage.removeItem(KEPT_KEY);
  showKeyForm(true);
  say("key needed", error);
  at("key").focus();
}

function showKeyForm(shown) {
  at("key-form").hidden = !shown;
  for (const part of ["figures", "main"]) at(part).hidden = shown;
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEPT_KEY, at("key").value.trim());
  at("key").value = "";
  showKeyForm(false);
  connect();
});
at("pause").addEventListener("click", () => {
  const paused = at("pause").getAttribute("aria-pressed") !== "true";
  at("pause").setAttribute("aria-pressed", paused);
  at("pause").textContent = paused ? "Go on" : "Pause";
  if (paused) {
    connection.abort();
    say("paused", "Paused: the picture stands still, and the server sends nothing.");
  } else connect();
});
document.addEventListener("visibilitychange", () => {
  if (at("pause").getAttribute("aria-pressed") === "true" || !at("key-form").hidden) return;
  if (document.hidden) connection.abort(); // nobody looks: the engine need not draw
  else connect();
});

// -- words and figures ----------------------------------------------------------------------------

function say(state, words) {
  if (at("state").textContent !== state) at("state").dataset.state = at("state").textContent = state;
  at("words").textContent = words;
}

function stateOf({ phase, engine, counts, words }) {
  if (phase === "failed" || engine === "dead") return "dead";
  if (phase !== "ready") return phase;
  if (engine !== "ready") return engine;
  if (words.includes("preemption")) return "preempting";
  if (words.startsWith("No step")) return "stuck";
  if (!counts.running && !counts.waiting) return "idle";
  return counts.waiting ? "full" : "ready";
}

const percent = (share) => (share === null ? "–" : `${(share * 100).toFixed(share < 0.0995 ? 1 : 0)} %`);

function showServer() {
  const told = server.now, { counts, minute } = told;
  say(stateOf(told), told.words);
  at("model").textContent = told.model ?? "";
  document.title = `${stateOf(told)} · ${counts.running} running · Turnstile`;
  const pair = ({ p50, p99 }) => [milliseconds(p50), p99 === null ? "" : ` / ${milliseconds(p99)}`];
  const over = `of the last ${Math.round(minute.seconds)} s`;
  figures([
    ["output tokens/s", grouped(Math.round(minute.generated_tokens_per_second))],
    ["prompt tokens/s", grouped(Math.round(minute.prompt_tokens_per_second))],
    ["TTFT p50 / p99", ...pair(minute.ttft), over],
    ["ITL p50 / p99", ...pair(minute.itl), over],
    ["KV in use", percent(counts.pages ? counts.held / counts.pages : 0)],
    ["prefix hit rate", percent(counts.prefix_hit_rate)],
    ...(counts.drafts_accepted === null ? [] : [["drafts accepted", percent(counts.drafts_accepted)]]),
    ["preemptions", grouped(counts.preemptions)],
    ["refused", grouped(counts.rejections)],
    ["engine", `no. ${told.epoch}`, told.crashes ? ` ${count(told.crashes, "restart")}` : "", "", told.crashes > 0],
  ]);
  showLine(told);
  showTenants(told);
}

function figures(rows) {
  const list = at("figures");
  while (list.children.length > rows.length) list.lastChild.remove();
  rows.forEach(([name, value, small = "", title = "", bad = false], i) => {
    const box = list.children[i] ?? list.appendChild(make("div", {}, make("dt"), make("dd", {}, make("span"), make("small"))));
    box.title = title;
    box.firstChild.textContent = name;
    const [main, rest] = box.lastChild.children;
    main.textContent = value;
    rest.textContent = small;
    box.lastChild.classList.toggle("bad", bad);
  });
}

function showLine({ line, more_in_line: more, counts }) {
  at("line-size").textContent = counts.waiting ? `${counts.waiting} wait` : "";
  const rows = line.map((row) => {
    const starts = row.predicted_start_seconds;
    const entry = make("li", {},
      make("div", { className: "top" },
        make("b", { textContent: row.position ?? "·" }),
        make("span", { className: "id", textContent: row.id, title: `${row.id}, ${row.tenant}` }),
        make("span", { textContent: starts === null ? `${row.since_seconds.toFixed(1)} s so far` : `starts in ${starts.toFixed(1)} s` })),
      make("p", { textContent: row.text }));
    entry.style.setProperty("--tenant", tenantColour(row.tenant));
    return entry;
  });
  const hidden = more + (counts.waiting > line.length + more ? counts.waiting - line.length - more : 0);
  if (hidden) rows.push(make("li", { className: "empty", textContent: `and ${hidden} more` }));
  if (!rows.length) rows.push(make("li", { className: "empty", textContent: "Nobody waits." }));
  at("line").replaceChildren(...rows);
}

function showTenants({ tenants, more_tenants: more, others_running: running, others_waiting: waiting, all }) {
  at("tenants-more").textContent = more ? `${more} more${all ? "" : `: ${running} running, ${waiting} waiting`}` : "";
  at("tenants").replaceChildren(...tenants.map((row) => {
    const name = make("td", {}, make("span", { className: "dot" }), row.tenant);
    name.firstChild.style.setProperty("--tenant", tenantColour(row.tenant));
    const cells = [row.weight, grouped(Math.round(row.counter)), row.running, row.waiting];
    return make("tr", {}, name, ...cells.map((value) => make("td", { textContent: value })));
  }));
}

// -- pages and slots ------------------------------------------------------------------------------

// By the keyboard it is said aloud too. What changes by itself is not: it would never end.
function showPage(page, aloud) {
  at("readout").textContent = pool.describe(page) || chosenText();
  if (aloud) at("announced").textContent = at("readout").textContent;
}

function choose(name) {
  pool.chosen = name !== null && name !== pool.chosen && pool.slots.has(name) ? name : null;
  pool.dirty = true;
  at("readout").textContent = at("announced").textContent = chosenText();
  showSlots();
}

function chosenText() {
  const slot = pool.slots.get(pool.chosen);
  if (!slot) return pool.states.length ? "Point at a page, or choose a slot to see its page table." : "";
  const pages = slot.pages.slice(0, 24).join(" → ");
  return `${label(slot)} of ${slot.tenant}: ${count(slot.pages.length, "page")}, in order ${pages}${slot.pages.length > 24 ? " → …" : ""}.`;
}

function showPool() {
  const total = pool.states.length;
  const of = [0, 0, 0, 0, 0];
  for (const state of pool.states) of[state]++;
  const held = total - of[FREE] - of[CACHED];
  at("pool-sizes").textContent = total
    ? `${count(total, "page")} of ${server.now?.page_size ?? "?"} tokens: ${grouped(held)} held${of[SHARED] ? ` (${grouped(of[SHARED])} shared)` : ""}, ${grouped(of[CACHED])} cached, ${grouped(of[FREE])} free`
    : "not drawn yet";
  at("pages").setAttribute("aria-label", `Page pool: ${at("pool-sizes").textContent}. Arrow keys move, Enter chooses a page's sequence.`);
  for (const [part, number] of Object.entries({ held: held - of[SHARED], shared: of[SHARED], cached: of[CACHED] })) {
    at("usage").querySelector(`[data-kind="${part}"]`).style.width = `${total ? (100 * number) / total : 0}%`;
  }
  const each = pool.grid?.each ?? 1;
  showLegend(each);
  if (pool.pointed !== null) at("readout").textContent = pool.describe(pool.pointed);
  else at("readout").textContent = chosenText();
}

let legendOf = "";
function showLegend(each) {
  const key = `${pool.by} ${each}`;
  if (key === legendOf) return;
  legendOf = key;
  const swatch = (kind, text) => {
    const box = make("i");
    box.dataset.kind = kind;
    return make("li", {}, box, text);
  };
  const held = pool.by === "state" ? [swatch("held", "held"), swatch("writing", "held, being written")] : [make("li", { textContent: `held: the colour of the ${pool.by}` })];
  const entries = [...held, swatch("shared", "shared by several"), swatch("cached", "cached: the fainter, the sooner given away"), swatch("free", "free")];
  if (each > 1) entries.push(make("li", { textContent: `a cell is ${each} pages` }));
  at("legend").replaceChildren(...entries);
}

function showSlots() {
  const many = Math.max(server.now?.num_slots ?? 0, pool.slots.size);
  for (let i = 0; i < places.length; i++) if (!pool.slots.has(places[i])) places[i] = null;
  for (const name of pool.slots.keys()) {
    if (places.includes(name)) continue;
    const free = places.indexOf(null);
    if (free >= 0) places[free] = name;
    else places.push(name);
  }
  const others = Math.max(0, server.taken - pool.slots.size);
  const shown = Math.min(many, Math.max(places.length + others + 4, 12));
  at("slots-size").textContent = many ? `${server.taken} of ${many} taken${others ? `, ${others} by other tenants` : ""}` : "";
  const list = at("slots");
  while (list.children.length > shown) list.lastChild.remove();
  let left = others;
  for (let i = 0; i < shown; i++) {
    const box = list.children[i] ?? list.appendChild(slotBox());
    const slot = pool.slots.get(places[i]);
    fillSlot(box, slot, i, !slot && left > 0 && i >= places.length ? left-- : 0);
  }
}

function slotBox() {
  const box = make("button", { type: "button", className: "slot", disabled: true },
    make("span", { className: "id" }), make("span", { className: "what" }), make("span", { className: "bar" }, make("i")));
  box.addEventListener("click", () => choose(box.name === "" ? null : Number(box.name)));
  return box;
}

function fillSlot(box, slot, place, other) {
  const name = slot ? String(slot.name) : "";
  if (box.name !== name) {
    box.name = name;
    box.disabled = !slot;
    box.classList.remove("new");
    if (slot) requestAnimationFrame(() => box.classList.add("new"));
    box.style.setProperty("--tenant", slot ? tenantColour(slot.tenant) : "var(--line)");
  }
  box.title = slot ? `${label(slot)} of ${slot.tenant}: ${slot.prompt} prompt tokens, ${slot.total - slot.prompt} of at most ${slot.most} out` : "";
  const [id, what, bar] = box.children;
  const set = (node, text) => node.textContent !== text && (node.textContent = text);
  box.setAttribute("aria-pressed", Boolean(slot && pool.chosen === slot.name));
  if (!slot) {
    set(id, other ? "another tenant's" : `slot ${place + 1}`);
    set(what, other ? "" : "free");
    bar.firstChild.style.width = "0";
    return;
  }
  const prefill = slot.computed < slot.total - 1;
  box.dataset.part = prefill ? "prefill" : "decode";
  set(id, label(slot));
  set(what, prefill ? `prefill ${slot.computed} / ${slot.total}` : `${slot.total - slot.prompt} / ${slot.most} · ${count(slot.pages.length, "page")}`);
  bar.firstChild.style.width = `${(100 * (prefill ? slot.computed / slot.total : (slot.total - slot.prompt) / slot.most)).toFixed(1)}%`;
}

const WORDS = { entered: "entered", left: "left", preempted: "preempted", repaired: "books repaired", engine_lost: "engine lost" };

function showHappened() {
  const now = performance.now() / 1000 - server.offset;
  const rows = happenings.map((row) => {
    const details = row.what === "left" ? `${row.why ?? ""}, ${count(row.tokens ?? 0, "token")}`
      : row.what === "entered" && row.id !== undefined ? `waited ${milliseconds(row.waited)}${row.cached ? `, ${row.cached} cached` : ""}`
      : row.what === "preempted" && row.id !== undefined ? `${row.lost} tokens to compute again` : "";
    const dot = make("span", { className: "dot" });
    dot.style.setProperty("--tenant", tenantColour(row.tenant));
    return make("li", {}, make("time", { textContent: `${Math.max(0, now - row.time).toFixed(1)} s` }), dot,
      make("span", { className: `what${["preempted", "repaired", "engine_lost"].includes(row.what) ? " bad" : ""}`, textContent: WORDS[row.what] ?? row.what }),
      make("span", { className: "id", textContent: row.id ?? "", title: row.id ?? "" }),
      make("span", { className: "more", textContent: row.id === undefined ? "" : details }));
  });
  if (!rows.length) rows.push(make("li", { className: "empty", textContent: "Nobody has come or gone since you look." }));
  at("happened").replaceChildren(...rows);
}

// -- drawing, once a frame at most ----------------------------------------------------------------

let told = true;
function showSoon() {
  told = true;
}

function frame(now) {
  pool.draw(now);
  steps.draw();
  if (told) {
    told = false;
    showPool();
    showSlots();
    showHappened();
    const last = steps.steps.at(-1);
    at("steps-last").textContent = last ? `no. ${last.step}: ${milliseconds(last.seconds)}, ${count(last.sequences, "sequence")}` : "none since you look";
  }
  requestAnimationFrame(frame);
}

at("colours").addEventListener("change", (event) => {
  pool.by = event.target.value;
  pool.dirty = true;
  showSoon();
});
for (const event of ["resize", "focus"]) addEventListener(event, () => (pool.dirty = steps.dirty = true));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => (pool.dirty = steps.dirty = true));

requestAnimationFrame(frame);
connect();
