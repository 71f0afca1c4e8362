// The three forms that ask the server, through the same API that everybody uses. Knows no memory.

import { ask, askJson, events, NeedsKey } from "./feed.js";
import { byId, h, number, roving } from "./dom.js";

let model = null;

export async function modelName() {
  if (model === null) model = (await askJson("v1/models")).data[0].id;
  return model;
}

/** Streams a chat completion; `on(index, text)` for each piece. Returns the usage, if the server told it. */
async function stream(body, on, signal) {
  const options = { method: "POST", signal, headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ model: await modelName(), stream: true, stream_options: { include_usage: true }, ...body }) };
  let usage = null;
  for await (const { data } of events(await ask("v1/chat/completions", options))) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) usage = chunk.usage;
    for (const choice of chunk.choices || []) if (choice.delta?.content) on(choice.index, choice.delta.content);
  }
  return usage;
}

function usageLine(usage, seconds) {
  if (!usage) return "";
  const cached = usage.prompt_tokens_details?.cached_tokens;
  return `${number(usage.prompt_tokens)} prompt tokens${cached ? `, ${number(cached)} of them found in memory` : ""}; ${number(usage.completion_tokens)} answered in ${seconds.toFixed(1)} s`;
}

/** A form whose button sends, and stops what it sent while that runs. */
function form(id, label, send) {
  const element = byId(id), button = element.querySelector(".go"), out = element.querySelector("[data-out]");
  let running = null;
  const relabel = () => { button.textContent = running ? "Stop" : label(); };
  element.addEventListener("input", relabel);
  element.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (running) return running.abort();
    const mine = (running = new AbortController());
    relabel();
    const begin = performance.now();
    let usage = null;
    try {
      usage = await send(out, mine.signal);
    } catch (error) {
      if (error instanceof NeedsKey) location.reload();
      else if (error.name !== "AbortError") out.append(h("p", { class: "error", role: "alert" }, error.message));
    }
    const line = usageLine(usage, (performance.now() - begin) / 1000);
    if (line) out.append(h("p", { class: "used" }, line));
    running = null;
    relabel();
  });
  for (const area of element.querySelectorAll("textarea")) {
    area.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey || (id === "pane-chat" && !event.shiftKey))) {
        event.preventDefault();
        element.requestSubmit();
      }
    });
  }
  relabel();
  return relabel;
}

const value = (id) => Number(byId(id).value);

function cards(out, count, name) {
  const texts = Array.from({ length: count }, () => document.createTextNode(""));
  out.classList.toggle("several", count > 1);
  out.replaceChildren(...texts.map((text, i) => h("article", { tabindex: "0" }, h("b", {}, `${name} ${i}`), text)));
  return (index, piece) => {
    const text = texts[index], card = text?.parentElement;
    if (!text) return;
    const atEnd = card.scrollTop + card.clientHeight >= card.scrollHeight - 8; // who has scrolled up reads there
    text.data += piece;
    if (atEnd) card.scrollTop = card.scrollHeight;
  };
}

export function askForms() {
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const choose = (tab) => {
    for (const one of tabs) {
      one.setAttribute("aria-selected", String(one === tab));
      one.tabIndex = one === tab ? 0 : -1;
      byId(one.getAttribute("aria-controls")).hidden = one !== tab;
    }
  };
  for (const tab of tabs) tab.addEventListener("click", () => choose(tab));
  roving(tabs[0].parentElement, "[role=tab]", choose);

  form("pane-many", () => (value("many-n") === 1 ? "Answer" : `Answer ${value("many-n") || ""} times`), (out, signal) => {
    const n = value("many-n");
    const messages = [{ role: "user", content: byId("many-prompt").value }];
    return stream({ messages, n, max_tokens: value("many-tokens"), temperature: 0.9 }, cards(out, n, "Answer"), signal);
  });
  form("pane-beam", () => "Search", (out, signal) => {
    const n = value("beam-n");
    const messages = [{ role: "user", content: byId("beam-prompt").value }];
    return stream({ messages, n, use_beam_search: true, temperature: 0, max_tokens: value("beam-tokens") }, cards(out, n, "Beam"), signal);
  });

  let turns = [];
  byId("chat-clear").addEventListener("click", () => {
    turns = [];
    byId("pane-chat").querySelector("[data-out]").replaceChildren();
  });
  form("pane-chat", () => "Send", async (out, signal) => {
    const box = byId("chat-prompt"), content = box.value.trim();
    if (!content) return null;
    box.value = "";
    const mine = { role: "user", content }, answer = document.createTextNode("");
    out.append(h("article", { class: "me" }, h("b", {}, "You"), content), h("article", {}, h("b", {}, "Model"), answer));
    const messages = [...turns, mine];
    const bottom = () => { out.scrollTop = out.scrollHeight; };
    bottom();
    try {
      return await stream({ messages, max_tokens: value("chat-tokens"), temperature: 0.7 }, (_, piece) => { answer.data += piece; bottom(); }, signal);
    } finally {
      if (answer.data) turns = [...messages, { role: "assistant", content: answer.data }];
      else box.value = content;
    }
  });
}
