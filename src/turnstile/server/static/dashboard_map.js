// The two drawings of the live map: the page pool, and the last steps. They read their colours from
// the style sheet, so that light and dark are decided in one place.

export const FREE = 0, CACHED = 1, HELD = 2, PUBLISHED = 3, SHARED = 4;
const STATES = ["free", "cached", "held, being written", "held, findable by others", "shared"];
const FLASH = 600; // milliseconds for which a page that changed stands out
const BIGGEST = 32, SMALLEST = 3; // pixels of a cell
const MANY = 4000, PAUSE = 120; // pages from which on it is drawn only every so many milliseconds
const TALLEST = 330; // pixels of the pool; fewer pages take less

const style = getComputedStyle(document.documentElement);
export const colour = (name) => style.getPropertyValue(`--${name}`).trim();

// Tenants and sequences get hues as far apart as the golden angle puts them.
const hues = new Map();
export function tenantColour(tenant) {
  if (!tenant) return colour("other");
  if (!hues.has(tenant)) hues.set(tenant, (168 + hues.size * 137.5) % 360);
  return hue(hues.get(tenant));
}
const sequenceColour = (name) => hue((name * 137.5) % 360);
const hue = (degrees) => `hsl(${degrees.toFixed(0)} 55% ${dark() ? 58 : 48}%)`;
const dark = () => matchMedia("(prefers-color-scheme: dark)").matches;

// A canvas as sharp as the screen; returns its context and its size in CSS pixels.
function prepare(canvas) {
  const ratio = devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

// The place of a cell, on whole pixels: cells are rarely whole ones wide.
function box(place, { cell, columns }) {
  const column = place % columns, row = Math.floor(place / columns);
  const x = Math.round(column * cell), y = Math.round(row * cell);
  return [x, y, Math.round((column + 1) * cell) - x, Math.round((row + 1) * cell) - y];
}

export class PoolMap {
  constructor(canvas, onPoint, onChoose) {
    this.canvas = canvas;
    this.by = "state";
    this.chosen = null; // the name of the sequence whose page table is lit
    this.pointed = null; // the page under the pointer or the keyboard's cursor
    this.clear("");
    canvas.addEventListener("pointermove", (e) => this.point(this.pageAt(e), onPoint));
    canvas.addEventListener("pointerleave", () => this.point(null, onPoint));
    canvas.addEventListener("click", (e) => onChoose(this.holders(this.pageAt(e))[0] ?? null));
    canvas.addEventListener("keydown", (e) => this.key(e, onPoint, onChoose));
  }

  clear(digits) {
    this.states = Uint8Array.from(digits, Number);
    this.changed = new Float64Array(digits.length).fill(-Infinity);
    this.cachedAt = new Map(); // page -> serial: the lowest is given away first
    this.serial = 0;
    this.owners = new Map(); // page -> names of the sequences that hold it
    this.slots = new Map(); // name -> {id, tenant, prompt, computed, total, pages…}
    this.dirty = true;
  }

  whole(told) {
    const chosen = this.slots.get(this.chosen)?.id;
    this.clear(told.pages);
    for (const page of told.cached) this.cachedAt.set(page, this.serial++);
    for (const slot of told.slots) this.enter({ ...slot });
    if (![...this.slots.values()].some((slot) => slot.name === this.chosen && slot.id === chosen)) this.chosen = null;
  }

  enter(slot) {
    const pages = slot.pages ?? [];
    slot.pages = [];
    this.slots.set(slot.name, slot);
    this.grow(slot, false, pages);
  }

  change(told, now) {
    for (const slot of told.entered) this.enter({ computed: 0, total: slot.prompt, ...slot });
    for (const [name, anew, pages] of told.tables) this.grow(this.slots.get(name), anew, pages);
    for (const name of told.left) this.leave(name);
    for (const [name, computed, total] of told.progress) Object.assign(this.slots.get(name) ?? {}, { computed, total });
    const [pages, digits] = told.pages;
    pages.forEach((page, i) => {
      this.states[page] = digits.charCodeAt(i) - 48;
      this.changed[page] = now;
      this.cachedAt.delete(page);
      if (this.states[page] === CACHED) this.cachedAt.set(page, this.serial++);
    });
    this.dirty = true;
  }

  grow(slot, anew, pages) {
    if (!slot) return;
    if (anew) this.drop(slot);
    for (const page of pages) {
      slot.pages.push(page);
      if (!this.owners.has(page)) this.owners.set(page, new Set());
      this.owners.get(page).add(slot.name);
    }
  }

  drop(slot) {
    for (const page of slot.pages) {
      this.owners.get(page)?.delete(slot.name);
      if (!this.owners.get(page)?.size) this.owners.delete(page);
    }
    slot.pages = [];
  }

  leave(name) {
    const slot = this.slots.get(name);
    if (!slot) return;
    this.drop(slot);
    this.slots.delete(name);
    if (this.chosen === name) this.chosen = null;
  }

  holders(page) {
    return page === null ? [] : [...(this.owners.get(page) ?? [])];
  }

  // A sentence about a page.
  describe(page) {
    if (page === null || page >= this.states.length) return "";
    const state = this.states[page];
    let text = `Page ${page}: ${STATES[state]}`;
    if (state === CACHED) {
      const serial = this.cachedAt.get(page) ?? 0;
      let before = 0;
      for (const other of this.cachedAt.values()) before += other < serial;
      text += `, number ${before + 1} of ${this.cachedAt.size} to be given away`;
    }
    const names = this.holders(page).map((name) => this.slots.get(name));
    if (names.length) text += `, by ${names.slice(0, 4).map((slot) => `${label(slot)} (its page ${slot.pages.indexOf(page) + 1} of ${slot.pages.length})`).join(", ")}`;
    else if (state >= HELD) text += ", by another tenant";
    return names.length > 4 ? `${text} and ${names.length - 4} more.` : `${text}.`;
  }

  // -- where things are ---------------------------------------------------------------------------

  // The largest cells that fill the width and fit; where even the smallest do not, a cell stands for
  // several pages.
  layout(width, height) {
    const pages = this.states.length;
    for (let columns = Math.ceil(width / BIGGEST); columns <= width / SMALLEST; columns++) {
      const cell = width / columns;
      if (Math.ceil(pages / columns) * cell <= height) return { cell, columns, each: 1 };
    }
    const columns = Math.max(1, Math.floor(width / SMALLEST)), rows = Math.max(1, Math.floor(height / SMALLEST));
    return { cell: SMALLEST, columns, each: Math.ceil(pages / (columns * rows)) };
  }

  pageAt(event) {
    if (!this.grid) return null;
    const { cell, columns, each } = this.grid;
    const column = Math.floor(event.offsetX / cell), row = Math.floor(event.offsetY / cell);
    const page = (row * columns + column) * each;
    return column < columns && page < this.states.length ? page : null;
  }

  centre(page) {
    const { cell, columns, each } = this.grid;
    const place = Math.floor(page / each);
    return [(place % columns) * cell + cell / 2, Math.floor(place / columns) * cell + cell / 2];
  }

  point(page, onPoint, aloud = false) {
    if (page === this.pointed) return;
    this.pointed = page;
    this.dirty = true;
    onPoint(page, aloud);
  }

  key(event, onPoint, onChoose) {
    const { columns, each } = this.grid ?? { columns: 1, each: 1 };
    const steps = { ArrowLeft: -each, ArrowRight: each, ArrowUp: -columns * each, ArrowDown: columns * each };
    if (event.key in steps) {
      const page = (this.pointed ?? -steps.ArrowRight) + steps[event.key];
      if (page >= 0 && page < this.states.length) this.point(page, onPoint, true);
    } else if (event.key === "Enter" || event.key === " ") onChoose(this.holders(this.pointed)[0] ?? null);
    else if (event.key === "Escape") onChoose(null);
    else return;
    event.preventDefault();
  }

  // -- drawing ------------------------------------------------------------------------------------

  // Draws, if anything is new or still fades.
  draw(now) {
    if (!this.canvas.clientWidth || (!this.dirty && !(now - this.lastChange < FLASH))) return;
    if (this.states.length > MANY && now - this.drawn < PAUSE) return;
    this.dirty = false;
    this.drawn = now;
    this.oldest = this.cachedAt.values().next().value ?? 0; // a Map keeps the order of its entries
    const grid = (this.grid = this.layout(this.canvas.clientWidth, TALLEST));
    const rows = Math.ceil(this.states.length / grid.each / grid.columns);
    this.canvas.style.height = `${Math.max(2 * BIGGEST, Math.ceil(rows * grid.cell))}px`;
    const { context } = prepare(this.canvas);
    const paint = this.palette();
    const gap = grid.cell >= 6 ? 1 : 0;
    const lit = this.slots.get(this.chosen);
    this.lastChange = -Infinity;
    for (let first = 0, place = 0; first < this.states.length; first += grid.each, place++) {
      const [x, y, wide, tall] = box(place, grid);
      const last = Math.min(first + grid.each, this.states.length);
      for (let page = first; page < last; page++) {
        // Several pages in a cell: side by side, as thin as need be.
        const part = (wide - gap) / (last - first);
        this.cell(context, paint, page, x + (page - first) * part, y, part, tall - gap, lit);
        this.flash(context, paint, page, x + (page - first) * part, y, part, tall - gap, now);
      }
    }
    if (lit) this.path(context, lit);
    if (this.pointed !== null && this.pointed < this.states.length) {
      const [x, y, wide, tall] = box(Math.floor(this.pointed / grid.each), grid);
      context.strokeStyle = colour("text");
      context.lineWidth = 2;
      context.strokeRect(x, y, wide - gap, tall - gap);
    }
  }

  palette() {
    const names = ["free", "cached", "held", "shared", "writing", "flash"];
    return Object.fromEntries(names.map((name) => [name, colour(name)]));
  }

  cell(context, paint, page, x, y, width, height, lit) {
    const state = this.states[page];
    const mine = !lit || this.owners.get(page)?.has(lit.name);
    context.globalAlpha = mine ? 1 : 0.28;
    if (state === CACHED) context.globalAlpha *= this.freshness(page);
    const holder = this.slots.get(this.holders(page)[0]);
    if (state === FREE) context.fillStyle = paint.free;
    else if (state === CACHED) context.fillStyle = paint.cached;
    else if (this.by === "tenant") context.fillStyle = tenantColour(holder?.tenant);
    else if (this.by === "sequence" && state !== SHARED) context.fillStyle = holder ? sequenceColour(holder.name) : colour("other");
    else context.fillStyle = state === SHARED ? paint.shared : state === HELD ? paint.writing : paint.held;
    context.fillRect(x, y, width, height);
    if (state === SHARED && width >= 6 && this.by === "tenant") {
      context.fillStyle = paint.shared; // visibly so, whatever the colours mean
      context.fillRect(x + width / 3, y + height / 3, width / 3, height / 3);
    }
    context.globalAlpha = 1;
  }

  // 1 for what was cached last, less the sooner it goes.
  freshness(page) {
    const span = Math.max(1, this.serial - this.oldest);
    return 0.35 + (0.65 * ((this.cachedAt.get(page) ?? 0) - this.oldest)) / span;
  }

  flash(context, paint, page, x, y, width, height, now) {
    const age = now - this.changed[page];
    if (!(age < FLASH)) return;
    this.lastChange = Math.max(this.lastChange, this.changed[page]);
    context.globalAlpha = (this.chosen === null ? 0.55 : 0.15) * (1 - age / FLASH);
    context.fillStyle = paint.flash;
    context.fillRect(x, y, width, height);
    context.globalAlpha = 1;
  }

  // The page table of a sequence, in order: a line from page to page, with numbers where they fit.
  path(context, slot) {
    const { cell } = this.grid;
    context.strokeStyle = colour("text");
    context.lineWidth = 1.5;
    context.globalAlpha = 0.8;
    context.beginPath();
    slot.pages.forEach((page, i) => (i ? context.lineTo(...this.centre(page)) : context.moveTo(...this.centre(page))));
    context.stroke();
    context.globalAlpha = 1;
    if (cell < 16) return;
    context.font = `600 ${Math.min(12, cell / 2)}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    slot.pages.forEach((page, i) => {
      const [x, y] = this.centre(page);
      context.fillStyle = "#000a";
      context.fillRect(x - cell / 3, y - cell / 3, (2 * cell) / 3 - 1, (2 * cell) / 3 - 1);
      context.fillStyle = "#fff";
      context.fillText(String(i + 1), x - 0.5, y);
    });
  }
}

export const label = (slot) => (slot.id ? (slot.sample ? `${slot.id} #${slot.sample}` : slot.id) : `sequence ${slot.name}`);

export class StepChart {
  constructor(canvas) {
    this.canvas = canvas;
    this.steps = [];
    this.dirty = true;
  }

  clear() {
    this.steps = [];
    this.dirty = true;
  }

  add(steps) {
    if (!steps.length) return;
    this.steps = [...this.steps, ...steps].slice(-60);
    this.dirty = true;
  }

  // Above: tokens of each step by kind, with a mark where somebody was preempted. Below: its seconds.
  draw() {
    if (!this.canvas.clientWidth || !this.dirty) return;
    this.dirty = false;
    const { context, width, height } = prepare(this.canvas);
    if (!this.steps.length) return;
    const left = 40, top = 16, split = Math.round(height * 0.6), bottom = height - 4;
    const most = Math.max(1, ...this.steps.map((s) => s.prefill + s.decode + s.drafts));
    const longest = Math.max(1e-3, ...this.steps.map((s) => s.seconds));
    const bar = (width - left) / 60;
    context.font = "11px system-ui, sans-serif";
    context.fillStyle = colour("soft");
    context.textBaseline = "middle";
    context.fillText("tokens", 0, top - 9);
    context.fillText(String(most), 0, top + 6);
    context.fillText("time", 0, split + 14);
    context.fillText(milliseconds(longest), 0, split + 30);
    context.strokeStyle = colour("line");
    for (const y of [split, bottom]) {
      context.beginPath();
      context.moveTo(left, y + 0.5);
      context.lineTo(width, y + 0.5);
      context.stroke();
    }
    this.steps.forEach((step, i) => {
      const x = width - (this.steps.length - i) * bar;
      let y = split;
      for (const kind of ["decode", "drafts", "prefill"]) {
        const tall = ((split - top) * step[kind]) / most;
        context.fillStyle = colour(kind);
        context.fillRect(x, y - tall, bar - 1, tall);
        y -= tall;
      }
      context.fillStyle = colour("cached");
      const tall = ((bottom - split - 10) * step.seconds) / longest;
      context.fillRect(x, bottom - tall, bar - 1, tall);
      if (step.preempted) this.mark(context, x + bar / 2, top - 12);
    });
    const last = this.steps.at(-1);
    this.canvas.setAttribute("aria-label", last ? `The last ${this.steps.length} steps. The newest took ${milliseconds(last.seconds)} for ${last.prefill} prefill and ${last.decode} decode tokens of ${last.sequences} sequences.` : "No step yet.");
  }

  mark(context, x, y) {
    context.fillStyle = colour("bad");
    context.beginPath();
    context.moveTo(x - 4, y);
    context.lineTo(x + 4, y);
    context.lineTo(x, y + 7);
    context.fill();
  }
}

export const milliseconds = (seconds) =>
  seconds === null || seconds === undefined ? "–" : seconds >= 1 ? `${seconds.toFixed(seconds < 10 ? 2 : 1)} s` : `${(seconds * 1000).toFixed(seconds < 0.01 ? 1 : 0)} ms`;
