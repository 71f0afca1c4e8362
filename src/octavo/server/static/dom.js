// Elements from plain values; text is always text, never markup.

/** h("p", {class: "note"}, "text", child): props that start with "on" are listeners, others attributes. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export const byId = (id) => document.getElementById(id);
const grouped = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const number = (value) => grouped.format(value);
export const many = (count, one, more = `${one}s`) => `${number(count)} ${count === 1 ? one : more}`;

/** Bytes as people write them. */
export function size(bytes) {
  for (const unit of ["bytes", "KiB", "MiB", "GiB"]) {
    if (bytes < 1024) return `${bytes < 10 && unit !== "bytes" ? bytes.toFixed(1) : Math.round(bytes)} ${unit}`;
    bytes /= 1024;
  }
  return `${bytes.toFixed(1)} TiB`;
}

/** A request's id as short as it can be told from others at a glance. */
export const short = (id) => (id.length > 14 ? `…${id.slice(-6)}` : id);

/** A canvas fitted to its width and to the screen's pixels; returns its context, in CSS pixels. */
export function fitted(canvas, width, height) {
  const ratio = Math.min(2, devicePixelRatio || 1);
  const [w, hgt] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== hgt) {
    canvas.width = w;
    canvas.height = hgt;
  }
  const g = canvas.getContext("2d");
  g.setTransform(ratio, 0, 0, ratio, 0, 0);
  g.clearRect(0, 0, width, height);
  return g;
}

/** Arrow keys move along a group of which one member at a time can be reached by Tab (the ARIA "roving tabindex"). */
export function roving(group, selector, choose) {
  group.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    const all = [...group.querySelectorAll(selector)];
    const here = all.indexOf(document.activeElement);
    if (!step || here < 0) return;
    event.preventDefault();
    const next = all[(here + step + all.length) % all.length];
    for (const one of all) one.tabIndex = one === next ? 0 : -1;
    next.focus();
    choose?.(next);
  });
}
