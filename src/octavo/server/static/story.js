// What is happening, in plain words: one sentence for now, and a list of what happened. Knows samples, no picture.

import { h, many, number, short } from "./dom.js";

const DWELL = 3200; // ms that a sentence stays before a less important one takes its place

const c = (kind, text) => h("b", { class: `c-${kind}` }, text);

export class Story {
  constructor(target, list) {
    this.target = target;
    this.list = list;
    this.seen = new Map(); // request id -> what is remembered of it
    this.last = null; // the request that ended last
    this.moment = null; // {rank, parts, until}
    this.told = "";
    this.geometry = null;
  }

  remember(rows) {
    for (const row of rows) {
      const known = this.seen.get(row.id) || { copies: 0, peak: 0, apart: 0, sequences: 0, shared: 0, tokens: 0, found: 0 };
      this.seen.set(row.id, known);
      known.row = row;
      known.sequences = Math.max(known.sequences, row.sequences);
      known.tokens = Math.max(known.tokens, row.output_tokens);
      if (row.state === "running") {
        known.shared = Math.max(known.shared, row.shared_blocks);
        if (row.blocks >= known.peak) [known.peak, known.apart] = [row.blocks, row.logical_blocks];
      }
    }
    while (this.seen.size > 200) this.seen.delete(this.seen.keys().next().value);
  }

  /** Take a sample's events and requests; `at` is the sample's time in seconds. */
  note(sample) {
    this.remember(sample.requests);
    const evicted = [], out = [], back = [], copied = new Map();
    for (const event of sample.events || []) {
      const known = this.seen.get(event.request);
      if (event.type === "copy") {
        if (known) known.copies++;
        const key = event.request || "";
        copied.set(key, [...(copied.get(key) || []), event]);
      } else if (event.type === "evict") evicted.push(event.block);
      else if (event.type === "swap_out") out.push(event);
      else if (event.type === "swap_in") back.push(event);
      else if (event.type === "preempt") this.preempted(event);
      else if (event.type === "prefill") this.prefilled(event, known);
      else if (event.type === "finish") this.finished(event, known);
    }
    for (const [request, events] of copied) this.copied(request, events);
    if (evicted.length) this.evicted(evicted);
    if (out.length) this.log("swapped", `${many(out.length, "block")} moved to host memory.`);
    if (back.length) {
      this.log("swapped", `${many(back.length, "block")} came back from host memory.`);
      this.say(6, ["A request is back: ", c("swapped", many(back.length, "block")), " came home from host memory, perhaps to other places. Only its block table knows, and only the table had to change."]);
    }
    if (sample.dropped) this.log("finish", `${many(sample.dropped, "more event")} than could be told.`);
    this.tell(sample);
  }

  preempted({ request, kind }) {
    const how = kind === "swap" ? "moved to host memory" : "given up, to be computed again later";
    this.log("preempt", `Memory ran out: ${short(request)} stepped aside, its blocks ${how}.`);
    this.say(8, ["Memory ran out. The request that came last stepped aside, its blocks ", c(kind === "swap" ? "swapped" : "free", how), ", so that those before it go on."]);
  }

  prefilled({ request, tokens, done, of, cached }, known) {
    const whole = done >= of ? "" : `, ${number(done)} of ${number(of)} so far`;
    if (cached) {
      if (known) known.found = cached;
      this.log("cached", `${short(request)}: ${number(cached)} prompt tokens found in the cache, ${number(tokens)} computed${whole}.`);
      const blocks = cached / (this.geometry?.block_size || 16);
      this.say(4, ["The first ", c("cached", `${number(cached)} of ${number(of)}`), ` prompt tokens were in memory already: ${many(blocks, "block")} held again instead of computed again.`]);
    } else this.log("prefill", `${short(request)}: ${many(tokens, "prompt token")} computed${whole}.`);
  }

  finished({ request, reason }, known) {
    const why = { stop: "is complete", length: "reached its length", abort: "was called off", error: "failed" }[reason] || "ended";
    this.log("finish", `${short(request)} ${why}${known?.peak ? `; at most it held ${many(known.peak, "block")}` : ""}.`);
    if (known) this.last = known;
  }

  copied(request, events) {
    const [first] = events, row = this.seen.get(request)?.row;
    const who = request ? `${short(request)}, ${row?.kind === "beam" ? "beam" : "answer"} ${first.sequence},` : "A sequence that has ended since";
    const pairs = events.slice(0, 4).map((e) => `${e.source} → ${e.target}`).join(", ");
    if (events.length === 1) this.log("copy", `${who} wrote to shared block ${first.source}, in a copy of its own: ${first.target}.`);
    else this.log("copy", `${request ? short(request) : "Sequences that have ended since"}: ${events.length} copies on write, ${pairs}${events.length > 4 ? ", …" : ""}.`);
    if (row?.kind === "beam" || !request) return; // of beams there are too many to tell
    const targets = events.map((e) => e.target).slice(0, 4).join(", ");
    const writers = events.length === 1 ? "An answer wrote to a block it shared, so it first got" : `${events.length} answers wrote to a block they shared, so each first got`;
    this.say(5, [`${writers} a `, c("shared", "copy of its own"), `: block ${first.source} → ${targets}. The last to hold ${first.source} keeps it, and all blocks before it stay shared.`]);
  }

  evicted(blocks) {
    this.log("evict", `No block was free: ${blocks.length === 1 ? `cached block ${blocks[0]} was` : `${blocks.length} cached blocks were`} taken for new tokens.`);
    this.say(3, ["No block is free, so the cache gives way: ", c("cached", blocks.length === 1 ? `block ${blocks[0]}` : many(blocks.length, "block")), ", unused for longest, ", blocks.length === 1 ? "holds" : "hold", " other tokens now."]);
  }

  log(kind, text) {
    this.list.prepend(h("li", {}, h("i", { class: `sw ${kind}`, "aria-hidden": "true" }), h("span", {}, text)));
    while (this.list.children.length > 60) this.list.lastChild.remove();
  }

  /** A moment that deserves its sentence for a while, if nothing of a higher rank is being told. */
  say(rank, parts) {
    const now = performance.now();
    if (this.moment && this.moment.until > now && this.moment.rank > rank) return;
    this.moment = { rank, parts, until: now + DWELL };
  }

  tell(sample) {
    const now = performance.now();
    const parts = this.moment && this.moment.until > now ? this.moment.parts : this.steady(sample);
    const text = parts.map((part) => part.textContent ?? part).join("");
    if (text === this.told) return;
    // Numbers that grow with every block would make a restless line, and a screen reader that never ends.
    const shape = text.replace(/[\d,.]+/g, "#");
    if (shape === this.shape && now - this.toldAt < 1200) return;
    this.told = text;
    this.shape = shape;
    this.toldAt = now;
    this.target.replaceChildren(...parts.map((part) => (part.cloneNode ? part.cloneNode(true) : part)));
  }

  steady({ figures: f, requests }) {
    const running = requests.filter((row) => row.state === "running");
    if (f.running > 1) {
      const waiting = f.waiting + f.swapped ? `, while ${many(f.waiting + f.swapped, "request waits", "requests wait")}` : "";
      return [`${many(f.running, "request")} run together in `, c("active", many(f.paged, "block")), f.shared ? [", "][0] : "", f.shared ? c("shared", `${number(f.shared)} of them shared`) : "", `${waiting}. In one piece each, at the longest they may become, they would take ${number(f.contiguous_own)}.`];
    }
    const row = running[0];
    if (row) return this.alone(row);
    if (f.waiting + f.swapped) return [`${many(f.waiting + f.swapped, "request")} wait for memory.`];
    return this.idle(f);
  }

  alone(row) {
    const known = this.seen.get(row.id);
    if (row.prefill_done < row.prefill_of) {
      return ["Reading a prompt: ", c("prefill", `${number(row.prefill_done)} of ${number(row.prefill_of)} tokens`), " are in memory. Its blocks are claimed, and fill from the front."];
    }
    if (row.sequences > 1) {
      const apart = `${number(row.blocks)} blocks hold what would take ${number(row.logical_blocks)} without sharing.`;
      if (row.kind === "beam") return [`${row.sequences} beams `, c("shared", `share ${many(row.shared_blocks, "block")}`), `. One that falls behind gives its blocks back; two that part copy only the block they write to. ${apart}`];
      const copies = known?.copies ? ` Where they parted, ${known.copies === 1 ? "one" : known.copies} of them copied the block they wrote to.` : "";
      return [`${row.sequences} answers `, c("shared", `share ${many(row.shared_blocks, "block")}`), ` of the prompt.${copies} Each goes on in `, c("active", "blocks of its own"), `: ${apart}`];
    }
    const room = row.blocks ? ` It holds ${many(row.blocks, "block")}, and asks for the next only when the last is full.` : "";
    return ["An answer grows token by token.", room];
  }

  idle(f) {
    const last = this.last;
    const kept = f.cached ? [" ", c("cached", many(f.cached, "block")), ` stay${f.cached === 1 ? "s" : ""} cached: a prompt that begins the same finds ${f.cached === 1 ? "it" : "them"} again.`] : [];
    if (last && last.sequences > 1) {
      const what = last.row.kind === "beam" ? "beams" : "answers";
      return [`Done. ${last.sequences} ${what} took ${many(last.peak, "block")} at their most; without sharing it would have been ${number(last.apart)}.`, ...kept];
    }
    if (last) return [`Done. The answer took ${many(last.peak, "block")} at its most, of ${number(f.free + f.cached + f.active + f.shared)}.`, ...kept];
    if (f.cached) return ["Nothing runs.", ...kept];
    return [`All ${number(f.free)} blocks are free. Ask for something, and watch where its tokens go.`];
  }
}
