// The last minute and a half as four small charts, and the same requests held in one piece, to scale. Knows figures.

import { fitted, h, number } from "./dom.js";

const SPAN = 90; // seconds

const CHARTS = [
  { name: "Blocks", unit: "", stacked: true, lines: [["shared", "--shared", (f) => f.shared], ["active", "--active", (f) => f.active], ["cached", "--cached", (f) => f.cached]] },
  { name: "Utilisation: tokens in held slots", unit: " %", top: 100, lines: [["of held slots", "--active", (f) => (f.paged ? f.utilisation * 100 : null)], ["of the pool", "--soft", (f) => (100 * f.paged) / (f.free + f.cached + f.active + f.shared)]] },
  { name: "Requests", unit: "", lines: [["running", "--active", (f) => f.running], ["waiting", "--prefill", (f) => f.waiting], ["swapped", "--swapped", (f) => f.swapped]] },
  { name: "Tokens a second", unit: "", lines: [["decode", "--active", (f) => f.decode_rate], ["prefill", "--prefill", (f) => f.prefill_rate]] },
];

const ceiling = (value) => {
  const step = 10 ** Math.floor(Math.log10(Math.max(1, value)));
  return [1, 2, 3, 5, 10].map((k) => k * step).find((top) => top >= value) || value;
};

export class Timeline {
  constructor(root) {
    this.samples = []; // {time, figures}
    this.charts = CHARTS.map((chart) => {
      const canvas = h("canvas", { role: "img", "aria-label": chart.name });
      const values = chart.lines.map(([name, colour]) => {
        const value = h("b", {}, "0"), swatch = h("i", { class: "sw" });
        swatch.style.background = `var(${colour})`;
        return { value, element: h("span", {}, swatch, name, value) };
      });
      root.append(h("figure", {}, h("figcaption", {}, chart.name), canvas, h("div", { class: "keys" }, values.map((v) => v.element))));
      return { ...chart, canvas, values };
    });
    this.drawn = 0;
    this.said = 0;
  }

  add(time, figures) {
    const last = this.samples.at(-1);
    if (last && time < last.time) this.samples = []; // another server
    this.samples.push({ time, figures });
    while (this.samples[0].time < time - SPAN) this.samples.shift();
    if (performance.now() - this.drawn > 120) this.draw();
  }

  draw() {
    this.drawn = performance.now();
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const say = this.drawn - this.said > 2000;
    if (say) this.said = this.drawn;
    for (const chart of this.charts) this.drawChart(chart, colour, say);
  }

  drawChart(chart, colour, say) {
    const { canvas, lines } = chart, width = canvas.clientWidth, height = 92, floor = height - 4;
    if (!width || !this.samples.length) return;
    const g = fitted(canvas, width, height);
    const now = this.samples.at(-1).time;
    const series = lines.map(([, , of]) => this.samples.map((s) => of(s.figures)));
    if (chart.stacked) for (let k = 1; k < series.length; k++) series[k] = series[k].map((v, i) => v + series[k - 1][i]);
    const top = chart.top || ceiling(Math.max(1, ...series.flat()));
    const x = (time) => width - ((now - time) / SPAN) * width;
    const y = (value) => floor - (value / top) * (floor - 14);
    g.strokeStyle = colour("--line");
    g.lineWidth = 1;
    for (const part of [0, 0.5, 1]) {
      g.beginPath();
      g.moveTo(0, Math.round(y(top * part)) + 0.5);
      g.lineTo(width, Math.round(y(top * part)) + 0.5);
      g.stroke();
    }
    for (let k = lines.length - 1; k >= 0; k--) this.drawLine(g, chart, series[k], colour(lines[k][1]), x, y, floor);
    g.fillStyle = colour("--soft");
    g.font = "11px system-ui, sans-serif";
    g.fillText(`${number(top)}${chart.unit}`, 0, 9);
    const latest = this.samples.at(-1).figures;
    lines.forEach(([, , of], k) => {
      const value = of(latest);
      chart.values[k].value.textContent = value === null ? "–" : `${number(value)}${chart.unit}`;
    });
    if (say) canvas.setAttribute("aria-label", `${chart.name}: ${lines.map(([name, , of]) => `${name} ${number(of(latest) ?? 0)}${chart.unit}`).join(", ")}`);
  }

  drawLine(g, chart, values, colour, x, y, floor) {
    g.fillStyle = g.strokeStyle = colour;
    g.lineWidth = 1.75;
    g.lineJoin = "round";
    g.beginPath();
    let open = false, from = 0;
    values.forEach((value, i) => {
      if (value === null) { open = false; return; }
      const px = x(this.samples[i].time), py = y(value);
      if (open) g.lineTo(px, py);
      else { g.moveTo(px, py); from = px; }
      open = true;
    });
    if (chart.stacked && open) {
      g.lineTo(x(this.samples.at(-1).time), floor);
      g.lineTo(from, floor);
      g.closePath();
      g.fill();
    } else g.stroke();
  }
}

/** The running requests in paged memory and in one piece each: a small square is a block, in all three the same. */
export class Comparison {
  constructor(root, note, text) {
    this.note = note;
    this.text = text;
    this.peak = null; // figures at the last moment most was held
    this.kinds = [["paged", "Paged, as Octavo holds them"], ["contiguous_own", "Contiguous, at each one's longest"], ["contiguous_model", "Contiguous, at the model's longest"]];
    this.parts = this.kinds.map(([key, name]) => {
      const value = h("b", {}, ""), canvas = h("canvas", { role: "img", "aria-label": name });
      root.append(h("figure", {}, h("figcaption", {}, h("span", {}, name), value), canvas));
      return { key, name, value, canvas };
    });
    this.drawn = 0;
    this.running = 0;
  }

  show(figures, geometry) {
    if (figures.running) {
      if (!this.running || !this.peak || figures.paged >= this.peak.paged) this.peak = figures;
      this.running = figures.running;
    } else this.running = 0;
    const shown = figures.running ? figures : this.peak;
    if (performance.now() - this.drawn < 150 && this.was === !!figures.running) return;
    this.drawn = performance.now();
    this.was = !!figures.running;
    this.draw(shown, geometry, figures.running > 0);
  }

  draw(f, geometry, now) {
    this.last = [f, geometry, now];
    if (!f) {
      this.note.textContent = "nothing has run yet";
      this.text.textContent = `To scale, for the requests that run: reservation must set aside ${number(geometry.max_model_len)} tokens for each sequence, whatever it will need.`;
      for (const { canvas } of this.parts) canvas.parentElement.hidden = true;
      return;
    }
    this.note.textContent = now ? "to scale, now" : "to scale, at the last peak";
    const width = this.parts[0].canvas.parentElement.parentElement.clientWidth;
    const most = Math.max(f.paged, f.contiguous_own, f.contiguous_model, 1);
    const side = Math.max(1, Math.min(9, Math.floor(Math.sqrt((width * 150) / most) * 4) / 4));
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const bs = geometry.block_size;
    for (const { key, name, value, canvas } of this.parts) {
      const blocks = f[key], stored = key === "paged" ? f.tokens_stored : f.tokens_apart;
      const filled = Math.min(blocks, stored / bs);
      const times = key === "paged" || !f.paged ? "" : `, ${(blocks / f.paged).toFixed(blocks / f.paged < 10 ? 1 : 0)}×`;
      value.textContent = `${number(blocks)} blocks${times}`;
      canvas.parentElement.hidden = false;
      canvas.setAttribute("aria-label", `${name}: ${number(blocks)} blocks, ${number(filled)} of them filled`);
      this.grid(canvas, width, side, blocks, filled, colour, key === "paged" ? f.shared : 0);
    }
    const fits = Math.floor((geometry.num_blocks * bs) / (Math.ceil(geometry.max_model_len / bs) * bs));
    const sequences = f.sequences === 1 ? "One sequence" : `${number(f.sequences)} sequences`;
    this.text.textContent = `${sequences} ${now ? (f.sequences === 1 ? "runs" : "run") : "ran"}. Contiguous at the model's ${number(geometry.max_model_len)} tokens, this pool could never ${fits ? `run more than ${number(fits)} at once` : "run even one"}. Pale squares are reserved and hold nothing.`;
  }

  redraw() {
    if (this.last) this.draw(...this.last);
  }

  grid(canvas, width, side, blocks, filled, colour, shared) {
    const columns = Math.max(1, Math.floor(width / side)), rows = Math.max(1, Math.ceil(blocks / columns));
    const height = Math.ceil(rows * side);
    canvas.style.height = `${height}px`;
    const g = fitted(canvas, width, height), gap = side >= 4 ? 1 : 0;
    const part = (from, to, tint) => {
      g.fillStyle = tint;
      if (gap) {
        for (let i = from; i < to; i++) g.fillRect((i % columns) * side, Math.floor(i / columns) * side, side - gap, side - gap);
        return;
      }
      for (let i = from; i < to; ) { // whole rows at a stroke: there may be a million
        const row = Math.floor(i / columns), end = Math.min(to, (row + 1) * columns);
        g.fillRect((i % columns) * side, row * side, (end - i) * side, side);
        i = end;
      }
    };
    const whole = Math.min(blocks, Math.round(filled));
    part(whole, blocks, colour("--free-edge"));
    part(shared, whole, colour("--active"));
    part(0, Math.min(shared, blocks), colour("--shared"));
  }
}
