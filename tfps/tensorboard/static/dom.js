// Small helpers for elements, numbers and requests.

/** An element with properties and children: el("button", {class: "x", onclick: f}, "text"). */
export function el(name, properties = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(properties)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value === true) made.setAttribute(key, "");
    else if (value !== false && value != null) made.setAttribute(key, value);
  }
  made.append(...children.filter((child) => child != null));
  return made;
}

/** Nanoseconds for people: "12.3 ms". */
export function time(ns) {
  const size = Math.abs(ns);
  if (size >= 1e9) return `${(ns / 1e9).toPrecision(4)} s`;
  if (size >= 1e6) return `${(ns / 1e6).toPrecision(4)} ms`;
  if (size >= 1e3) return `${(ns / 1e3).toPrecision(3)} µs`;
  return `${Math.round(ns)} ns`;
}

/** Bytes for people: "1.05 MB". */
export function bytes(count) {
  for (const [size, unit] of [[1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (count >= size) return `${(count / size).toPrecision(3)} ${unit}`;
  }
  return `${count} B`;
}

/** A part for people: "12.3 %". */
export function percent(part) {
  return `${(100 * part).toFixed(1)} %`;
}

/** The JSON that a route of the plugin answers, or an error with the server's words. */
export async function load(route, parameters = {}) {
  const url = new URL(route, import.meta.url);
  for (const [key, value] of Object.entries(parameters)) url.searchParams.set(key, value);
  const answer = await fetch(url);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
