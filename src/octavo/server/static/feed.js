// The line to the server: the key, fetches, the stream of samples, and how fast they are played. Knows no picture.

const KEY = "octavo-api-key";
const decoder = new TextDecoder();
export const SLOW_MS = 550; // how long one sample is shown in slow motion; live they come every 67 ms
const MOST_QUEUED = 900; // a minute of samples

export class NeedsKey extends Error {}

export function key() {
  try { return sessionStorage.getItem(KEY) || ""; } catch { return ""; }
}

export function setKey(value) {
  try { sessionStorage.setItem(KEY, value); } catch { /* no storage: the key is asked for again */ }
}

/** fetch with the key; throws NeedsKey on 401, and an Error with the server's own sentence on any other failure. */
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key()) headers.Authorization = `Bearer ${key()}`;
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.status === 401) throw new NeedsKey("The server does not take this key.");
  if (!answer.ok) {
    const body = await answer.json().catch(() => null);
    const error = new Error(body?.error?.message || `The server answered with status ${answer.status}.`);
    error.status = answer.status;
    throw error;
  }
  return answer;
}

export const askJson = async (path, options) => (await ask(path, options)).json();

/** The server-sent events of a response, as {event, data} with data as text. */
export async function* events(response) {
  const reader = response.body.getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      let end;
      while ((end = rest.search(/\r?\n\r?\n/)) >= 0) {
        const lines = rest.slice(0, end).split(/\r?\n/);
        rest = rest.slice(end).replace(/^\r?\n\r?\n/, "");
        const found = { event: "message", data: "" };
        for (const line of lines) {
          if (line.startsWith("event:")) found.event = line.slice(6).trim();
          else if (line.startsWith("data:")) found.data += line.slice(5).trimStart();
        }
        if (found.data) yield found;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

export function unpack(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const view = new DataView(bytes.buffer);
  const cells = new Uint32Array(bytes.length / 4);
  for (let i = 0; i < cells.length; i++) cells[i] = view.getUint32(i * 4, true);
  return cells;
}

/**
 * Keeps the stream open and hands on samples at the chosen speed: live, slow (each shown for SLOW_MS, from a queue), or
 * paused. `on.snapshot(s)` is all there is, `on.delta(d)` what changed; `on.queued(d)` may still add to what is shown
 * later; `on.status(kind, text)` is for people.
 */
export class Feed {
  constructor(on) {
    this.on = on;
    this.speed = "live";
    this.queue = [];
    this.latest = null; // all of the newest sample, whatever is shown
    this.timer = 0;
  }

  async run() {
    for (let wait = 500; ; wait = Math.min(wait * 2, 8000)) {
      try {
        const response = await ask("memory/events");
        this.on.status("on", this.label());
        for await (const { event, data } of events(response)) {
          wait = 500;
          this.take(event, JSON.parse(data));
        }
        this.on.status("off", "server closed");
      } catch (error) {
        if (error instanceof NeedsKey) return this.on.needsKey();
        this.on.status("off", "no connection");
      }
      await new Promise((done) => setTimeout(done, wait));
    }
  }

  label() {
    if (this.speed === "live") return "live";
    if (this.speed === "pause") return "paused";
    const behind = this.queue.length / 15;
    return behind > 0.5 ? `slow, ${behind.toFixed(0)} s behind` : "slow";
  }

  take(event, message) {
    if (event === "snapshot") {
      message.cells = unpack(message.cells);
      message.host = unpack(message.host);
      this.latest = { ...message, cells: message.cells.slice(), host: message.host.slice() };
      if (this.speed === "pause" && this.shown) return;
      this.queue.length = 0;
      this.show("snapshot", message);
    } else if (this.latest) {
      const { cells, host } = this.latest;
      for (let i = 0; i < message.cells.length; i += 2) cells[message.cells[i]] = message.cells[i + 1];
      for (let i = 0; i < message.host.length; i += 2) host[message.host[i]] = message.host[i + 1];
      this.latest = { ...this.latest, ...message, cells, host };
      if (this.speed === "live") this.show("delta", message);
      else if (this.speed === "slow") {
        this.enqueue(message);
        this.on.queued(message);
      }
    }
  }

  show(kind, message) {
    this.shown = true;
    this.on[kind](message);
  }

  enqueue(message) {
    this.queue.push(message);
    if (this.queue.length > MOST_QUEUED) {
      this.queue.length = 0;
      this.catchUp();
    }
    if (!this.timer) this.play();
  }

  play() {
    this.timer = 0;
    if (this.speed !== "slow") return;
    const next = this.queue.shift();
    if (!next) return;
    this.show("delta", next);
    this.on.status("on", this.label());
    const still = !next.cells.length && !next.events.length && !next.host.length;
    this.timer = setTimeout(() => this.play(), still ? 30 : SLOW_MS);
  }

  catchUp() {
    if (this.latest) this.show("snapshot", { ...this.latest, cells: this.latest.cells.slice(), host: this.latest.host.slice() });
  }

  setSpeed(speed) {
    this.speed = speed;
    if (speed !== "slow") this.queue.length = 0;
    if (speed !== "pause") this.catchUp();
    this.on.status("on", this.label());
  }
}
