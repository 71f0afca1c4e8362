// Ties the page together: samples in, picture, story, tables and charts out.

import { askForms, modelName } from "./ask.js";
import { Comparison, Timeline } from "./charts.js";
import { byId, h, many, number, roving, short, size } from "./dom.js";
import { ask, askJson, Feed, key, NeedsKey, setKey } from "./feed.js";
import { Field, filledOf, refsOf, STATES, stateOf } from "./field.js";
import { Story } from "./story.js";
import { lens, RequestView } from "./table.js";

const DETAIL_MS = 220; // between two looks at the request that is picked

let geometry = null, sample = null, model = "";
let picked = null, following = true, detailAt = 0, detailBusy = false, pickedEnded = false;
let shownBlock = -1, keptBlock = -1, autoBlock = -1, blockTimer = 0, blockAsked = 0;

const story = new Story(byId("story"), byId("events"));
const timeline = new Timeline(byId("charts"));
const comparison = new Comparison(byId("compare"), byId("compare-note"), byId("compare-text"));
const field = new Field(byId("field"), byId("minimap"), { pick: pickBlock, point: pointAt, layout: noteExtent });
const table = new RequestView(byId("request"), { block: pickBlock, light: (blocks) => field.light(blocks) });

// --- samples --------------------------------------------------------------------------------------------------------

function onSnapshot(message) {
  if (!geometry) modelName().then((name) => { model = name; showPool(); }).catch(() => {});
  geometry = story.geometry = message.geometry;
  sample = message;
  byId("main").hidden = false;
  byId("key-form").hidden = true;
  showPool();
  field.setSnapshot(message.cells, message.host, geometry.block_size);
  refresh(message);
}

function showPool() {
  byId("pool-line").textContent = `${model ? `${model}: ` : ""}${number(geometry.num_blocks)} blocks of ${geometry.block_size} tokens, ${size(geometry.block_bytes)} each, ${size(geometry.num_blocks * geometry.block_bytes)} in all`;
}

function onDelta(message) {
  sample = { ...sample, ...message, cells: field.cells, host: field.host };
  message.listed = !!message.requests;
  message.requests ??= sample.requests;
  message.more_requests ??= sample.more_requests;
  field.applyDelta(message.cells, message.host);
  animate(message.events);
  refresh(message);
}

function animate(events) {
  let delay = 0;
  const hostBase = geometry.num_blocks;
  for (const event of events) {
    if (event.type === "copy") field.effect("move", "copy", event.source, event.target, delay);
    else if (event.type === "evict") field.effect("burst", "bad", event.block, -1, delay);
    else if (event.type === "swap_out") field.effect("move", "swapped", event.source, hostBase + event.target, delay);
    else if (event.type === "swap_in") field.effect("move", "swapped", hostBase + event.source, event.target, delay);
    else continue;
    delay = Math.min(delay + 45, 600);
  }
}

function refresh(message) {
  story.note(message);
  timeline.add(message.time, message.figures);
  comparison.show(message.figures, geometry);
  showLegend();
  if (message.listed !== false) showRequests(message.requests, message.more_requests);
  if (feed.speed === "slow") showKeptDetail(message);
  else lookAtPicked();
  if (field.hovered >= 0) pointAt(field.hovered, field.place(field.hovered)); // it may be another's by now
  if (shownBlock >= 0 || autoBlock >= 0) lookAtBlock(false);
  if (!byId("block-table").hidden) showBlockTable();
}

function showLegend() {
  const counts = field.counts();
  STATES.forEach((name, i) => {
    const element = document.querySelector(`[data-n="${name}"]`), text = number(counts[i]);
    if (element.textContent !== text) element.textContent = text;
  });
}

function noteExtent(shown, all) {
  byId("field-note").textContent = shown < all ? `blocks 0 to ${number(shown - 1)}; all beyond are free` : `all ${number(all)} blocks`;
  byId("extent").hidden = shown >= all && !field.whole;
}

// --- requests -------------------------------------------------------------------------------------------------------

function showRequests(rows, more) {
  const root = byId("requests");
  const known = new Map([...root.querySelectorAll("button")].map((button) => [button.dataset.id, button]));
  for (const row of rows) {
    let button = known.get(row.id);
    known.delete(row.id);
    if (!button) {
      button = h("button", { type: "button", "data-id": row.id, "aria-pressed": "false", onclick: () => pickRequest(row.id) },
        h("span", { class: "mono" }, short(row.id)), h("span", { class: "what" }), h("span", { class: "bar", "aria-hidden": "true" }, h("i")));
      root.append(button);
    }
    showRow(button, row);
  }
  for (const button of known.values()) button.remove();
  let rest = root.querySelector(".more");
  if (more && !rest) root.append((rest = h("span", { class: "more note" })));
  if (rest) rest.textContent = more ? `and ${number(more)} more` : "";
  const newest = rows.filter((row) => row.state === "running").at(-1) || rows.at(-1);
  if (following && newest && picked !== newest.id && feed.speed === "live") pickRequest(newest.id, true);
  if (!rows.length && picked === null) table.empty("No request runs. The table of the next one is drawn here while it does.");
}

function showRow(button, row) {
  const reading = row.prefill_done < row.prefill_of;
  const part = row.state === "running" ? (reading ? row.prefill_done / row.prefill_of : row.output_tokens / row.most_tokens) : 0;
  const what = row.state !== "running" ? row.state : reading ? "prefill" : row.sequences > 1 ? `${row.sequences} ${row.kind === "beam" ? "beams" : "answers"}` : "decode";
  const bar = button.querySelector(".bar");
  bar.className = `bar ${row.state === "swapped" ? "swapped" : reading ? "prefill" : ""}`;
  bar.firstChild.style.width = `${Math.round(Math.min(1, part) * 100)}%`;
  const label = button.querySelector(".what"), text = `${what}, ${many(row.blocks, "block")}`;
  if (label.textContent !== text) label.textContent = text;
  button.setAttribute("aria-pressed", String(row.id === picked));
}

function pickRequest(id, followed = false) {
  picked = id;
  pickedEnded = false;
  detailAt = 0;
  following = followed && following;
  byId("follow").setAttribute("aria-pressed", String(following));
  for (const button of byId("requests").querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.id === id));
  lookAtPicked();
}

async function lookAtPicked() {
  if (feed.speed !== "live" || picked === null || pickedEnded || detailBusy || performance.now() - detailAt < DETAIL_MS) return;
  detailBusy = true;
  detailAt = performance.now();
  const id = picked;
  try {
    const answer = await ask(`memory/requests/${encodeURIComponent(id)}?ended=true`);
    const detail = answer.status === 204 ? null : await answer.json();
    if (id !== picked) return;
    if (detail) showDetail(detail);
    else showEnded(id);
  } catch (error) {
    if (error instanceof NeedsKey) needsKey();
  } finally {
    detailBusy = false;
  }
}

/** In slow motion a request may be over before it is shown: look at it now, and keep what was seen with its sample. */
async function lookAhead(message) {
  if (detailBusy || performance.now() - detailAt < DETAIL_MS) return;
  const newest = feed.latest.requests.filter((row) => row.state === "running").at(-1);
  const id = following ? newest?.id : picked;
  if (!id) return;
  detailBusy = true;
  detailAt = performance.now();
  try {
    const answer = await ask(`memory/requests/${encodeURIComponent(id)}?ended=true`);
    if (answer.status === 200) message.detail = await answer.json();
  } catch {
    // the stream will tell
  } finally {
    detailBusy = false;
  }
}

function showKeptDetail(message) {
  if (message.detail) {
    picked = message.detail.id;
    pickedEnded = false;
    showDetail(message.detail);
  } else if (picked !== null && !pickedEnded && !message.requests.some((row) => row.id === picked) && !message.more_requests) showEnded(picked);
}

function showEnded(id) {
  pickedEnded = true;
  autoBlock = -1;
  if (table.detail?.id === id) table.show(table.detail, true);
  else table.empty("This request has ended, and its blocks went back.");
  field.outline(new Map());
}

function showDetail(detail) {
  table.show(detail);
  const outlined = new Map();
  for (const row of detail.sequences) if (row.where === "device") row.table.forEach((block, logical) => outlined.set(block, String(logical)));
  field.outline(outlined);
  const writer = detail.sequences.find((row) => row.where === "device" && row.table.length);
  autoBlock = writer ? writer.table.at(-1) : -1;
}

byId("follow").addEventListener("click", () => {
  following = !following;
  byId("follow").setAttribute("aria-pressed", String(following));
  if (following && sample) showRequests(sample.requests, sample.more_requests);
});

// --- one block ------------------------------------------------------------------------------------------------------

function pointAt(block, at) {
  const hover = byId("hover");
  hover.hidden = block < 0 || !at;
  if (!hover.hidden) {
    const box = field.base.getBoundingClientRect(), cell = field.cells[block];
    const refs = refsOf(cell), state = stateOf(cell);
    hover.textContent = `Block ${number(block)}: ${state}${refs > 1 ? `, ${refs} holders` : ""}${cell & 255 ? `, ${filledOf(cell)} of ${geometry.block_size} filled` : ""}`;
    const left = Math.max(4, Math.min(innerWidth - hover.offsetWidth - 8, box.left + at[0] - 10));
    hover.style.left = `${left + scrollX}px`;
    hover.style.top = `${box.top + scrollY + at[1] + field.size + 8}px`;
    if (field.cursor >= 0) byId("field-live").textContent = hover.textContent;
  }
  const wanted = block >= 0 ? block : keptBlock;
  if (wanted === shownBlock) return;
  shownBlock = wanted;
  clearTimeout(blockTimer);
  blockTimer = setTimeout(() => lookAtBlock(true), 60);
}

async function lookAtBlock(fresh) {
  const block = shownBlock >= 0 ? shownBlock : feed.speed === "live" ? autoBlock : -1; // nobody points: the one being written
  if (block < 0) return;
  if (!fresh && (performance.now() - blockAsked < 400 || feed.speed === "pause")) return;
  blockAsked = performance.now();
  try {
    const detail = await askJson(`memory/blocks/${block}`);
    if (block !== (shownBlock >= 0 ? shownBlock : autoBlock)) return;
    if (byId("lens").contains(document.activeElement) && !fresh) return; // do not pull away what has the focus
    lens(byId("lens"), detail, { block: pickBlock, request: (id) => pickRequest(id) },
      feed.speed !== "live" ? "as it is now, not as in the picture" : shownBlock < 0 ? "being written; point at any other" : "");
    if (field.cursor === block) byId("field-live").textContent = spoken(detail);
  } catch (error) {
    if (error instanceof NeedsKey) needsKey();
  }
}

function spoken(detail) {
  const holders = detail.holders.map((x) => `${short(x.request)} answer ${x.sequence} as logical block ${x.logical}`).slice(0, 4).join("; ");
  return `Block ${detail.block}, ${detail.state}, ${detail.filled} of ${detail.block_size} slots filled. ${holders ? `Held by ${holders}. ` : ""}${detail.text ? `Text: ${detail.text}` : ""}`;
}

function pickBlock(block) {
  keptBlock = block === keptBlock ? -1 : block;
  shownBlock = keptBlock >= 0 ? keptBlock : block;
  field.keep(keptBlock);
  if (block < 0) return;
  lookAtBlock(true);
  askJson(`memory/blocks/${block}`).then((detail) => {
    const ids = new Set(detail.holders.map((holder) => holder.request));
    if (ids.size && !ids.has(picked)) pickRequest(detail.holders[0].request);
  }).catch(() => {});
}

function emptyLens() {
  byId("lens").replaceChildren(h("p", { class: "empty" }, "Point at a block, tap it, or walk there with the arrow keys, to see whose it is, the tokens in it, and the chain of hashes it is found by."));
}

// --- the pool as a table --------------------------------------------------------------------------------------------

function showBlockTable() {
  const root = byId("block-table");
  if (root.contains(document.activeElement) && document.activeElement !== root) return;
  const rows = [];
  let beyond = 0;
  field.cells.forEach((cell, block) => {
    if (!(cell & 255)) return;
    if (rows.length >= 300) beyond++;
    else rows.push(h("tr", {}, h("td", {}, h("button", { type: "button", onclick: () => pickBlock(block) }, String(block))), h("td", {}, stateOf(cell)), h("td", {}, String(refsOf(cell))), h("td", {}, `${filledOf(cell)} of ${geometry.block_size}`)));
  });
  const head = h("tr", {}, ["Block", "State", "Holders", "Filled"].map((name) => h("th", { scope: "col" }, name)));
  root.replaceChildren(h("table", {}, h("caption", { class: "visually-hidden" }, "Blocks in use"), h("thead", {}, head), h("tbody", {}, rows)),
    rows.length ? (beyond ? h("p", { class: "note" }, `and ${number(beyond)} more`) : "") : h("p", { class: "empty" }, "Every block is free."));
}

byId("as-table").addEventListener("click", (event) => {
  const root = byId("block-table");
  root.hidden = !root.hidden;
  event.currentTarget.setAttribute("aria-pressed", String(!root.hidden));
  if (!root.hidden) showBlockTable();
});
byId("extent").addEventListener("click", (event) => {
  field.whole = !field.whole;
  event.currentTarget.setAttribute("aria-pressed", String(field.whole));
  field.layout();
});
byId("minimap").addEventListener("click", () => byId("extent").click());

// --- theme, speed, key ----------------------------------------------------------------------------------------------

const dark = matchMedia("(prefers-color-scheme: dark)");
function setTheme(name) {
  document.documentElement.dataset.theme = name;
  byId("theme").textContent = name === "dark" ? "Light" : "Dark";
  byId("theme").setAttribute("aria-label", `Use ${name === "dark" ? "light" : "dark"} colours`);
  field.layout();
  timeline.draw();
  comparison.redraw();
}
let chosen = null;
try { chosen = localStorage.getItem("octavo-theme"); } catch { /* no storage: as the system has it */ }
setTheme(chosen || (dark.matches ? "dark" : "light"));
dark.addEventListener("change", () => { if (!chosen) setTheme(dark.matches ? "dark" : "light"); });
byId("theme").addEventListener("click", () => {
  chosen = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  try { localStorage.setItem("octavo-theme", chosen); } catch { /* forgotten on reload */ }
  setTheme(chosen);
});

function status(kind, text) {
  byId("link").className = `link ${kind}`;
  if (byId("link-text").textContent !== text) byId("link-text").textContent = text;
}

const feed = new Feed({ snapshot: onSnapshot, delta: onDelta, status, needsKey, queued: lookAhead });
const speeds = [...byId("speed").querySelectorAll("button")];
function setSpeed(button) {
  for (const one of speeds) {
    one.setAttribute("aria-checked", String(one === button));
    one.tabIndex = one === button ? 0 : -1;
  }
  feed.setSpeed(button.dataset.speed);
}
for (const button of speeds) button.addEventListener("click", () => setSpeed(button));
roving(byId("speed"), "button", setSpeed);

function needsKey() {
  const form = byId("key-form");
  byId("main").hidden = true;
  form.hidden = false;
  byId("key-error").textContent = key() ? "The server does not take this key." : "";
  status("off", "needs a key");
  byId("key").focus();
}
byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key").value = "";
  feed.run();
});

addEventListener("resize", () => comparison.redraw());
emptyLens();
askForms();
feed.run();
