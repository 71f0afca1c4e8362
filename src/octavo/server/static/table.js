// One request's block table, logical → physical, and one block under the lens. Knows the server's JSON, no pool.

import { h, many, number, short } from "./dom.js";

const MOST_COLUMNS = 44; // of a longer table the middle is left out, and said so
const HEAD = 12;

/** Which logical blocks to draw: all, or both ends and a gap. */
function columnsOf(longest) {
  const all = Array.from({ length: longest }, (_, i) => i);
  if (longest <= MOST_COLUMNS) return { columns: all, gap: null };
  const tail = MOST_COLUMNS - HEAD;
  return { columns: [...all.slice(0, HEAD), null, ...all.slice(longest - tail)], gap: [HEAD, longest - tail - 1] };
}

const common = (a, b) => {
  let i = 0;
  while (i < a.table.length && a.table[i] === b.table[i]) i++;
  return i;
};

/** The sequences in an order that puts those next to each other that share most, else by number. */
function ordered(sequences) {
  const rest = [...sequences].sort((a, b) => a.sequence - b.sequence);
  if (rest.length > 64) return rest;
  const found = rest.splice(0, 1);
  while (rest.length) {
    const shared = rest.map((row) => common(found.at(-1), row));
    found.push(...rest.splice(shared.indexOf(Math.max(...shared)), 1));
  }
  return found;
}

export class RequestView {
  /** `on.block(block)` a cell was chosen; `on.light(blocks)` cells to light up in the pool. */
  constructor(root, on) {
    this.root = root;
    this.on = on;
    this.shape = "";
    this.detail = null;
    root.addEventListener("keydown", (event) => this.key(event));
  }

  empty(text) {
    this.detail = null;
    this.shape = "";
    this.root.replaceChildren(h("p", { class: "empty" }, text));
  }

  show(detail, ended = false) {
    this.detail = detail;
    const rows = ordered(detail.sequences);
    const shape = JSON.stringify([detail.id, ended, rows.map((row) => [row.sequence, row.where, row.table, row.shared.map((s) => [s.logical, s.others.length])])]);
    if (shape !== this.shape) this.build(detail, rows);
    this.shape = shape;
    this.fill(detail, rows, ended);
  }

  build(detail, rows) {
    const at = document.activeElement?.dataset?.at;
    this.cells = [];
    this.top = h("div", { class: "top" });
    this.texts = h("div", { class: "texts" });
    const longest = Math.max(0, ...rows.map((row) => row.table.length));
    const { columns, gap } = columnsOf(longest);
    const grid = h("div", { class: "ptable", role: "group", "aria-label": "Block table: each row a sequence, each cell the physical block of one logical block" });
    grid.style.gridTemplateColumns = `max-content ${columns.map((i) => (i === null ? "max-content" : "minmax(34px, 46px)")).join(" ")}`;
    const put = (element, row, column, span = 1) => {
      element.style.gridRow = `${row} / span ${span}`;
      element.style.gridColumn = column;
      grid.append(element);
    };
    put(h("span", { class: "lab" }, "logical"), 1, 1);
    columns.forEach((index, k) => put(index === null ? h("span", { class: "gap" }, `… ${number(gap[1] - gap[0] + 1)} more …`) : h("span", { class: "ix" }, String(index)), 1, k + 2));
    rows.forEach((row, r) => put(h("span", { class: "lab" }, `${detail.kind === "beam" ? "beam" : "answer"} ${row.sequence}`), r + 2, 1));
    columns.forEach((index, k) => {
      if (index === null) return;
      for (let r = 0; r < rows.length; ) {
        const block = rows[r].table[index];
        let span = 1;
        if (block !== undefined) {
          while (r + span < rows.length && rows[r + span].table[index] === block) span++;
          put(this.cell(detail, rows.slice(r, r + span), index, block), r + 2, k + 2, span);
        }
        r += span;
      }
    });
    this.grid = grid;
    this.prompt = h("p", { class: "prompt" });
    this.root.replaceChildren(h("div", { class: "req" }, this.top), this.prompt, longest ? grid : "", this.texts);
    const first = this.cells[0]?.element;
    if (first) first.tabIndex = 0;
    if (at) this.grid.querySelector(`[data-at="${at}"]`)?.focus();
  }

  cell(detail, rows, logical, block) {
    const shared = rows[0].shared.find((s) => s.logical === logical);
    const outside = shared ? shared.others.filter((o) => o.request !== detail.id || !rows.some((row) => row.sequence === o.sequence)) : [];
    const kind = rows[0].where === "host" ? "swapped" : shared ? "shared" : rows[0].computed < (logical + 1) * detail.block_size && detail.prefill_done < detail.prefill_of ? "prefill" : "active";
    const whose = rows.map((row) => row.sequence).join(", ");
    const others = outside.length ? `; also held by ${outside.slice(0, 6).map((o) => `${o.request === detail.id ? "" : `${short(o.request)} `}${o.sequence}`).join(", ")}` : "";
    const element = h("button", { type: "button", class: `pcell ${kind}`, tabindex: "-1", "data-at": `${rows[0].sequence}.${logical}`, "data-block": block,
      "aria-label": `Logical block ${logical} of ${whose} is physical block ${block}, ${kind}${others}`, title: `logical ${logical} → physical ${block}${others}`,
      onclick: () => this.on.block(block), onmouseenter: () => this.light(block), onmouseleave: () => this.light(-1), onfocus: () => this.light(block), onblur: () => this.light(-1) },
    String(block), outside.length ? h("sup", {}, `+${outside.length}`) : null);
    this.cells.push({ element, logical, rows: rows.map((row) => row.sequence), whole: kind === "swapped" });
    return element;
  }

  light(block) {
    for (const { element } of this.cells) element.classList.toggle("lit", Number(element.dataset.block) === block);
    this.on.light(block >= 0 && this.detail?.sequences[0]?.where !== "host" ? [block] : []);
  }

  fill(detail, rows, ended) {
    const bs = detail.block_size;
    const computed = new Map(rows.map((row) => [row.sequence, row.computed]));
    for (const cell of this.cells) {
      const most = Math.max(...cell.rows.map((sequence) => computed.get(sequence) ?? 0));
      const part = cell.whole ? 1 : Math.max(0, Math.min(1, (most - cell.logical * bs) / bs));
      cell.element.style.setProperty("--fill", part);
      cell.element.classList.toggle("part", part < 1);
    }
    const prefill = detail.prefill_of ? detail.prefill_done / detail.prefill_of : 1;
    const decode = detail.most_tokens ? detail.output_tokens / detail.most_tokens : 0;
    const state = ended ? "ended" : detail.state;
    const chip = { running: "active", waiting: "free", swapped: "swapped", ended: "cached" }[state];
    this.top.replaceChildren(
      h("h3", {}, h("span", { class: "mono" }, short(detail.id)), h("span", { class: `chip ${chip}` }, state)),
      h("span", {}, "prefill", bar("prefill", prefill), `${number(detail.prefill_done)}/${number(detail.prefill_of)}`, detail.cached_tokens ? `, ${number(detail.cached_tokens)} from the cache` : ""),
      h("span", {}, "decode", bar("", decode), `${number(detail.output_tokens)} of at most ${number(detail.most_tokens)}`),
      h("span", {}, detail.sequences.length ? `${many(detail.blocks, "block")}${detail.logical_blocks > detail.blocks ? ` for ${number(detail.logical_blocks)} table entries` : ""}` : "holds no block"),
      ...(detail.preemptions ? [h("span", {}, `preempted ${many(detail.preemptions, "time")}`)] : []),
    );
    this.prompt.textContent = detail.prompt ?? `${number(detail.prompt_tokens)} tokens`;
    const letters = Math.max(60, Math.floor(this.root.clientWidth / 4.6) - 60); // two lines
    const answers = [...detail.sequences].sort((a, b) => a.sequence - b.sequence).slice(0, 16);
    this.texts.replaceChildren(...answers.map((row) => h("p", {}, h("span", {}, `${detail.kind === "beam" ? "beam" : "answer"} ${row.sequence}`), h("q", {}, tail(row.text, letters) || (row.text === null ? `${row.output_token_ids.length} tokens` : "…")))));
  }

  key(event) {
    const here = this.cells?.findIndex(({ element }) => element === document.activeElement) ?? -1;
    if (here < 0 || !event.key.startsWith("Arrow")) return;
    const [sequence, logical] = this.cells[here].element.dataset.at.split(".").map(Number);
    const order = ordered(this.detail.sequences).map((row) => row.sequence);
    const covers = (s, l) => this.cells.find((cell) => cell.logical === l && cell.rows.includes(s));
    let next = null;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") next = covers(sequence, logical + (event.key === "ArrowRight" ? 1 : -1));
    else {
      const covered = this.cells[here].rows.map((s) => order.indexOf(s));
      const row = event.key === "ArrowDown" ? Math.max(...covered) + 1 : Math.min(...covered) - 1;
      next = order[row] === undefined ? null : covers(order[row], logical);
    }
    event.preventDefault();
    if (next) {
      for (const { element } of this.cells) element.tabIndex = -1;
      next.element.tabIndex = 0;
      next.element.focus();
    }
  }
}

const tail = (text, most) => (text && text.length > most ? `… ${text.slice(-most)}` : text);

function bar(kind, part) {
  const inner = h("i");
  inner.style.width = `${Math.round(Math.min(1, part) * 100)}%`;
  return h("span", { class: `bar ${kind}`, "aria-hidden": "true" }, inner);
}

/** A block's tokens as they read, each told from the next. */
function pieces(detail) {
  if (!detail.token_ids.length) return h("p", { class: "pieces" }, h("em", {}, "no token computed"));
  const shown = (detail.pieces || detail.token_ids.map(String)).map((piece) => piece.replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "␀");
  return h("p", { class: "pieces" }, shown.map((piece, i) => h("span", { title: `token ${detail.token_ids[i]}` }, piece)));
}

/** The lens: what one block holds, for whom, and the chain that it is found by. */
export function lens(root, detail, on, note = "") {
  const marks = [h("span", { class: `chip ${detail.state}` }, detail.state)];
  if (detail.pins) marks.push(h("span", { class: "chip" }, `pinned${detail.pins > 1 ? ` ×${detail.pins}` : ""}`));
  const holders = detail.holders.slice(0, 24).map((holder) =>
    h("button", { type: "button", onclick: () => on.request(holder.request) }, `${short(holder.request)}, answer ${holder.sequence}, as logical ${holder.logical}`));
  if (detail.holders.length > 24) holders.push(`and ${detail.holders.length - 24} more`);
  const facts = [
    ["Held by", holders.length ? h("span", { class: "holders" }, holders) : detail.state === "cached" ? "nobody; kept until its place is needed" : "nobody"],
    ["Filled", `${detail.filled} of ${detail.block_size} slots`],
    ["Hash chain", chain(detail, on)],
  ];
  root.replaceChildren(h("h3", {}, `Block ${detail.block}`), ...marks, note ? h("span", { class: "note" }, ` ${note}`) : "", pieces(detail), h("dl", { class: "facts" }, facts.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])));
}

function chain(detail, on) {
  if (!detail.chain.length && !detail.key) {
    return detail.filled && detail.filled < detail.block_size ? "none yet: a block is hashed when it is full" : "none";
  }
  const links = detail.chain.map((link, i) =>
    h("button", { type: "button", class: link.block === detail.block ? "self" : "", title: `SHA-256 ${link.key}`, "aria-label": `Block ${link.block}, key ${link.key.slice(0, 8)}`, onclick: () => on.block(link.block) }, `${link.key.slice(0, 6)}`));
  const shown = links.length > 6 ? [...links.slice(0, 3), h("i", {}, `… ${links.length - 5} more …`), ...links.slice(-2)] : links; // one line
  const root = h("i", {}, detail.salted ? "salted root" : "root");
  const end = detail.key ? [] : [h("i", {}, "→ not full yet, so not hashed")];
  return h("span", { class: "chain" }, root, ...shown.flatMap((link) => [h("i", { "aria-hidden": "true" }, "→"), link]), ...end);
}
