// The picture of all blocks: cells by state, drawn where they changed, and what moves over them. Knows no server.

export const STATES = ["free", "cached", "active", "shared", "prefill", "swapped"];
export const stateOf = (cell) => STATES[cell & 255];
export const filledOf = (cell) => (cell >>> 8) & 255;
export const refsOf = (cell) => (cell >>> 16) & 255;
export const isPinned = (cell) => (cell >>> 24) & 1;

const FADE = 320; // ms from one colour to the next
const SHADES = 8; // steps of a fade
const MOST_EFFECTS = 28; // at once; more could not be told apart
const MOST_FADING = 1200; // cells; of more at once the rest change at a stroke
const FIRST_SHOWN = 192; // blocks shown at least, where the pool is larger

const parse = (text) => {
  const n = parseInt(text.slice(1), 16);
  return text.length === 4 ? [(n >> 8) * 17, ((n >> 4) & 15) * 17, (n & 15) * 17] : [n >> 16, (n >> 8) & 255, n & 255];
};
const mix = (a, b, t) => `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * t)).join(",")})`;

export class Field {
  /** `on.pick(block)` a click or Enter, `on.point(block, x, y)` the pointer or cursor is over it (-1: over none). */
  constructor(root, minimap, on) {
    this.root = root;
    this.minimap = minimap;
    this.on = on;
    [this.base, this.over] = root.querySelectorAll("canvas");
    this.cells = new Uint32Array(0);
    this.host = new Uint32Array(0);
    this.blockSize = 16;
    this.whole = false;
    this.high = 0; // blocks up to the last one ever seen in use
    this.hostSeen = 0;
    this.fading = new Map(); // index (host ones after all device ones) -> {from, start}
    this.effects = [];
    this.outlined = new Map(); // block -> label
    this.hovered = -1;
    this.cursor = -1;
    this.kept = -1;
    this.lit = new Set();
    this.frame = 0;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    new ResizeObserver(() => this.layout()).observe(root);
    this.listen();
  }

  // --- data ---------------------------------------------------------------------------------------------------------
  setSnapshot(cells, host, blockSize) {
    this.cells = cells;
    this.host = host;
    this.blockSize = blockSize;
    this.high = 0;
    for (let i = cells.length - 1; i >= 0; i--) if (cells[i] & 255) { this.high = i + 1; break; }
    this.hostSeen = 0;
    for (let i = host.length - 1; i >= 0; i--) if (host[i] & 255) { this.hostSeen = i + 1; break; }
    this.fading.clear();
    this.effects = [];
    this.layout();
  }

  applyDelta(cells, host) {
    const now = performance.now();
    let high = this.high, hostSeen = this.hostSeen;
    for (let i = 0; i < cells.length; i += 2) {
      this.change(this.cells, cells[i], cells[i], cells[i + 1], now);
      if (cells[i] >= high && cells[i + 1] & 255) high = cells[i] + 1;
    }
    for (let i = 0; i < host.length; i += 2) {
      this.change(this.host, host[i], this.cells.length + host[i], host[i + 1], now);
      if (host[i] >= hostSeen) hostSeen = host[i] + 1;
    }
    const relayout = this.extentOf(high) !== this.extentOf(this.high) || this.hostExtent(hostSeen) !== this.hostExtent(this.hostSeen);
    this.high = high;
    this.hostSeen = hostSeen;
    if (relayout) this.layout();
    this.drawMinimap();
    this.wake();
  }

  change(array, place, index, cell, now) {
    const old = array[place];
    array[place] = cell;
    const known = this.fading.get(index);
    if ((old & 255) !== (cell & 255) && this.fading.size < MOST_FADING && !this.calm.matches) {
      this.fading.set(index, { from: old & 255, start: now });
    } else if (!known) this.fading.set(index, { from: -1, start: now });
  }

  counts() {
    const found = [0, 0, 0, 0, 0, 0];
    for (const cell of this.cells) found[cell & 255]++;
    for (const cell of this.host) if (cell & 255) found[5]++;
    return found;
  }

  // --- where things are ---------------------------------------------------------------------------------------------
  extentOf(high) {
    const all = this.cells.length;
    if (this.whole || all <= FIRST_SHOWN * 2) return all;
    let shown = FIRST_SHOWN;
    while (shown < high * 1.04) shown *= 2;
    return Math.min(shown, all);
  }

  hostExtent(seen) {
    if (!seen) return 0;
    let shown = 48;
    while (shown < seen) shown *= 2;
    return Math.min(shown, this.host.length);
  }

  layout() {
    const width = this.root.clientWidth;
    if (!width || !this.cells.length) return;
    this.colours();
    let shown = this.extentOf(this.high);
    const narrow = width < 560;
    const area = width * (narrow ? Math.min(width * 0.95, 330) : 330);
    const size = Math.max(narrow ? 2 : 3, Math.min(narrow ? 26 : 34, Math.floor(Math.sqrt(area / shown))));
    const columns = Math.max(1, Math.floor(width / size));
    if (shown < this.cells.length) shown = Math.min(this.cells.length, Math.ceil(shown / columns) * columns); // whole rows
    this.shown = shown;
    this.size = size;
    this.columns = columns;
    this.pitch = columns * 12 < width ? width / columns : size; // large cells reach from edge to edge
    this.gap = size >= 16 ? 2 : size >= 5 ? 1 : 0;
    const rows = Math.ceil(shown / columns);
    this.hostShown = this.hostExtent(this.hostSeen);
    this.hostTop = rows * size + 30;
    const height = this.hostShown ? this.hostTop + Math.ceil(this.hostShown / columns) * size : rows * size;
    const ratio = Math.min(2, devicePixelRatio || 1);
    for (const canvas of [this.base, this.over]) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
    this.ratio = ratio;
    this.width = width;
    this.height = height;
    this.drawAll();
    this.drawMinimap();
    this.on.layout?.(shown, this.cells.length);
    this.wake();
  }

  colours() {
    const style = getComputedStyle(document.documentElement);
    const get = (name) => style.getPropertyValue(name).trim();
    this.ink = {
      ring: get("--ring"), soft: get("--soft"), on: get("--on-state"), copy: get("--copy"), bad: get("--bad"),
      free: get("--free"), edge: get("--free-edge"), leaf: get("--leaf"), swapped: get("--swapped"), ink: get("--ink"), fold: get("--cached-text"),
    };
    const full = ["--free", "--cached", "--active", "--shared", "--prefill", "--swapped"].map((n) => parse(get(n)));
    const hollow = ["--free", "--cached", "--active-empty", "--shared-empty", "--prefill-empty", "--swapped"].map((n) => parse(get(n)));
    // [from state][to state][shade]: whoever draws a thousand cells a frame has no time to mix colours.
    const shades = (to) => full.map((from) => to.map((colour) => Array.from({ length: SHADES + 1 }, (_, k) => mix(from, colour, k / SHADES))));
    this.fullShades = shades(full);
    this.hollowShades = shades(hollow);
    this.fullText = full.map((c) => mix(c, c, 0));
    this.hollowText = hollow.map((c) => mix(c, c, 0));
  }

  /** Left upper corner of a cell, or null if it is not shown. Host cells come after all device cells. */
  place(index) {
    const host = index >= this.cells.length;
    const i = host ? index - this.cells.length : index;
    if (i >= (host ? this.hostShown : this.shown)) return null;
    return [Math.round((i % this.columns) * this.pitch), (host ? this.hostTop : 0) + Math.floor(i / this.columns) * this.size];
  }

  blockAt(x, y) {
    const column = Math.floor(x / this.pitch), row = Math.floor(y / this.size);
    if (x < 0 || y < 0 || column >= this.columns) return -1;
    const block = row * this.columns + column;
    return block < this.shown ? block : -1;
  }

  // --- drawing ------------------------------------------------------------------------------------------------------
  drawAll() {
    const g = this.base.getContext("2d");
    g.clearRect(0, 0, this.width, this.height);
    for (let i = 0; i < this.shown; i++) this.drawCell(g, i, this.cells[i], SHADES, -1);
    if (this.hostShown) {
      g.fillStyle = this.ink.soft;
      g.font = "13px system-ui, sans-serif";
      g.fillText(`Host memory: ${this.host.length.toLocaleString("en")} blocks for requests that had to step aside`, 0, this.hostTop - 9);
      for (let i = 0; i < this.hostShown; i++) this.drawCell(g, this.cells.length + i, this.host[i], SHADES, -1);
    }
    this.fading.clear();
  }

  drawCell(g, index, cell, shade, from) {
    const at = this.place(index);
    if (!at) return;
    const [x, y] = at, s = this.size - this.gap, state = cell & 255;
    const full = from < 0 ? this.fullText[state] : this.fullShades[from][state][shade];
    if (state === 0 || state === 1 || state === 5) {
      g.fillStyle = full;
      g.fillRect(x, y, s, s);
      if (state === 1 && s >= 8) { // held by none, but to be found again: a page with its corner folded
        const m = Math.round(s * 0.3);
        g.fillStyle = this.ink.leaf;
        g.beginPath();
        g.moveTo(x + s - m, y);
        g.lineTo(x + s, y);
        g.lineTo(x + s, y + m);
        g.fill();
        g.fillStyle = this.ink.fold;
        g.beginPath();
        g.moveTo(x + s - m, y);
        g.lineTo(x + s, y + m);
        g.lineTo(x + s - m, y + m);
        g.fill();
      }
    } else {
      const part = s >= 5 ? Math.min(1, filledOf(cell) / this.blockSize) : 1;
      const top = Math.round(s * (1 - part));
      if (top) {
        g.fillStyle = from < 0 ? this.hollowText[state] : this.hollowShades[from][state][shade];
        g.fillRect(x, y, s, top);
      }
      g.fillStyle = full;
      g.fillRect(x, y + top, s, s - top);
      if (state === 3 && s >= 12) {
        g.fillStyle = this.ink.on;
        g.font = `600 ${Math.min(12, Math.round(s * 0.52))}px system-ui, sans-serif`;
        g.textAlign = "center";
        g.textBaseline = "middle";
        const refs = refsOf(cell);
        g.fillText(s >= 18 ? `×${refs}` : refs < 100 ? refs : "+", x + s / 2, y + s / 2 + 0.5);
        g.textAlign = "start";
        g.textBaseline = "alphabetic";
      }
    }
    if (isPinned(cell) && s >= 6) {
      g.fillStyle = this.ink.ink;
      g.fillRect(x, y, Math.max(2, s / 5), Math.max(2, s / 5));
    }
  }

  drawMinimap() {
    const canvas = this.minimap, width = canvas.clientWidth, all = this.cells.length;
    canvas.hidden = !all || this.shown >= all;
    if (canvas.hidden || !width) return;
    const g = canvas.getContext("2d"), ratio = this.ratio;
    if (canvas.width !== Math.round(width * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(12 * ratio);
    }
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.fillStyle = this.fullText[0];
    g.fillRect(0, 2, width, 8);
    const rank = [0, 1, 3, 5, 4, 0];
    for (let x = 0, i = 0; x < width; x++) {
      const end = Math.max(i + 1, Math.floor(((x + 1) * all) / width));
      let best = 0;
      for (; i < end && i < all; i++) if (rank[this.cells[i] & 255] > rank[best]) best = this.cells[i] & 255;
      if (best) { g.fillStyle = this.fullText[best]; g.fillRect(x, 2, 1, 8); }
    }
    g.strokeStyle = this.ink.ring;
    g.strokeRect(0.5, 0.5, Math.max(3, (width * this.shown) / all - 1), 11);
  }

  wake() {
    if (!this.frame) this.frame = requestAnimationFrame((now) => this.step(now));
  }

  step(now) {
    this.frame = 0;
    const g = this.base.getContext("2d");
    for (const [index, fade] of this.fading) {
      const shade = fade.from < 0 ? SHADES : Math.max(0, Math.min(SHADES, Math.round(((now - fade.start) / FADE) * SHADES)));
      if (shade === fade.shade) continue;
      fade.shade = shade;
      const cell = index < this.cells.length ? this.cells[index] : this.host[index - this.cells.length];
      this.drawCell(g, index, cell, shade, shade < SHADES ? fade.from : -1);
      if (shade === SHADES) this.fading.delete(index);
    }
    this.drawOver(now);
    if (this.fading.size || this.effects.length) this.wake();
  }

  drawOver(now) {
    const g = this.over.getContext("2d"), s = this.size - this.gap;
    g.clearRect(0, 0, this.width, this.height);
    g.lineWidth = s >= 12 ? 2 : 1;
    for (const [block, label] of this.outlined) {
      const at = this.place(block);
      if (!at) continue;
      g.strokeStyle = this.ink.ring;
      g.strokeRect(at[0] + 0.5, at[1] + 0.5, s - 1, s - 1);
      if (s >= 26 && label !== null && (this.cells[block] & 255) !== 3) {
        const part = filledOf(this.cells[block]) / this.blockSize; // the label stands in the larger part
        g.fillStyle = part >= 0.5 ? this.ink.on : this.ink.ink;
        g.font = "600 11px system-ui, sans-serif";
        g.textAlign = "center";
        g.fillText(label, at[0] + s / 2, at[1] + (part >= 0.5 ? s * (1 - part / 2) : (s * (1 - part)) / 2) + 4);
        g.textAlign = "start";
      }
    }
    for (const block of this.lit) this.ring(g, block, this.ink.ring, 2.5, 2);
    if (this.kept >= 0) this.ring(g, this.kept, this.ink.ring, 2, 1);
    if (this.cursor >= 0) this.ring(g, this.cursor, this.ink.ring, 2, 2);
    else if (this.hovered >= 0) this.ring(g, this.hovered, this.ink.ring, 1.5, 1);
    this.effects = this.effects.filter((effect) => now - effect.start < effect.lasts);
    for (const effect of this.effects) if (now >= effect.start) this.drawEffect(g, effect, (now - effect.start) / effect.lasts);
  }

  ring(g, index, colour, width, out) {
    const at = this.place(index), s = this.size - this.gap;
    if (!at) return;
    g.strokeStyle = colour;
    g.lineWidth = width;
    g.strokeRect(at[0] - out, at[1] - out, s + 2 * out, s + 2 * out);
  }

  /** Shows that something happened: "move" (a copy or a swap) from one cell to another, or "burst" at one cell. */
  effect(kind, colour, from, to = -1, delay = 0) {
    if (this.effects.length >= MOST_EFFECTS) return;
    this.effects.push({ kind, colour, from, to, start: performance.now() + delay, lasts: kind === "move" ? 1100 : 800 });
    this.wake();
  }

  drawEffect(g, { kind, colour, from, to }, t) {
    const a = this.place(from), s = this.size - this.gap;
    const tint = this.ink[colour];
    if (kind === "burst" || this.calm.matches) {
      for (const index of kind === "burst" ? [from] : [from, to]) {
        g.globalAlpha = 1 - t;
        this.ring(g, index, tint, 2.5, 2 + (this.calm.matches ? 1 : t * Math.max(9, s * 0.5)));
      }
      g.globalAlpha = 1;
      return;
    }
    const b = this.place(to);
    if (!a || !b) return;
    const [ax, ay] = [a[0] + s / 2, a[1] + s / 2], [bx, by] = [b[0] + s / 2, b[1] + s / 2];
    const lift = Math.min(90, 26 + Math.hypot(bx - ax, by - ay) * 0.35);
    const over = Math.min(ay, by) - lift > 4; // else there is no room above
    const [cx, cy] = [(ax + bx) / 2, over ? Math.min(ay, by) - lift : Math.max(ay, by) + lift];
    const go = Math.min(1, t / 0.72), ease = go * go * (3 - 2 * go);
    // The part of the curve that is travelled is a curve too (de Casteljau): to (x, y), around (mx, my).
    const between = (p, q) => p + (q - p) * ease;
    const [mx, my] = [between(ax, cx), between(ay, cy)];
    const [x, y] = [between(mx, between(cx, bx)), between(my, between(cy, by))];
    g.globalAlpha = t > 0.72 ? (1 - t) / 0.28 : 1;
    g.strokeStyle = tint;
    g.lineWidth = 2;
    g.beginPath();
    g.moveTo(ax, ay);
    g.quadraticCurveTo(mx, my, x, y);
    g.stroke();
    const side = Math.max(5, s * 0.44);
    g.fillStyle = tint;
    g.fillRect(x - side / 2, y - side / 2, side, side);
    this.ring(g, from, tint, 2, 2);
    if (go >= 1) this.ring(g, to, tint, 2, 2 + ((t - 0.72) / 0.28) * 6);
    g.globalAlpha = 1;
  }

  // --- pointer and keys ---------------------------------------------------------------------------------------------
  listen() {
    const at = (event) => {
      const box = this.base.getBoundingClientRect();
      return this.blockAt(event.clientX - box.left, event.clientY - box.top);
    };
    this.root.addEventListener("pointermove", (event) => {
      const block = at(event);
      if (block === this.hovered) return;
      this.hovered = block;
      this.cursor = -1;
      this.point(block);
    });
    this.root.addEventListener("pointerleave", () => {
      this.hovered = -1;
      this.point(-1);
    });
    this.root.addEventListener("click", (event) => {
      const block = at(event);
      this.cursor = -1;
      this.on.pick(block);
    });
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.root.addEventListener("focus", () => {
      if (this.root.matches(":focus-visible") && this.cursor < 0) this.moveTo(Math.max(0, this.kept));
    });
    this.root.addEventListener("blur", () => {
      this.cursor = -1;
      this.point(-1);
    });
  }

  key(event) {
    const here = Math.max(0, this.cursor), row = this.columns, last = this.shown - 1;
    const used = (step) => {
      for (let i = here + step; i >= 0 && i <= last; i += step) if (this.cells[i] & 255) return i;
      return here;
    };
    const moves = {
      ArrowLeft: () => here - 1, ArrowRight: () => here + 1, ArrowUp: () => here - row, ArrowDown: () => here + row,
      Home: () => here - (here % row), End: () => here - (here % row) + row - 1,
      PageUp: () => here - 5 * row, PageDown: () => here + 5 * row, n: () => used(1), p: () => used(-1),
    };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (moves[event.key]) {
      event.preventDefault();
      const to = moves[event.key]();
      this.moveTo(event.key.startsWith("Arrow") && (to < 0 || to > last) ? here : Math.min(last, Math.max(0, to)));
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      this.on.pick(here);
    } else if (event.key === "Escape") this.on.pick(-1);
  }

  moveTo(block) {
    this.cursor = block;
    this.hovered = -1;
    this.point(block);
  }

  point(block) {
    const at = block >= 0 ? this.place(block) : null;
    this.on.point(block, at);
    this.wake();
  }

  keep(block) {
    this.kept = block;
    this.wake();
  }

  light(blocks) {
    this.lit = new Set(blocks);
    this.wake();
  }

  outline(map) {
    this.outlined = map;
    this.wake();
  }
}
